"""The routes that every OpenAI client knows, with and without `/v1`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from .bodies import read_json
from .completion_format import Completion
from .completion_request import parse_completion
from .errors import ApiError
from .model_state import ModelState
from .model_views import openai_model
from .outputs import OutputStream
from .responses import DONE, KEEP_ALIVE, ErrorResponse, JsonResponse, sse_event
from .service import Service
from .sse import EventStream, unless_disconnected


class OpenAiRoutes:
    def __init__(self, service: Service):
        self.service = service
        self.router = APIRouter()
        for prefix in ("", "/v1"):
            add = self.router.add_api_route
            add(f"{prefix}/chat/completions", self.complete, methods=["POST"])
            add(f"{prefix}/models", self.list_models, methods=["GET"])
            add(f"{prefix}/models/{{model_id:path}}", self.get_model, methods=["GET"])
            add(f"{prefix}/health", self.health, methods=["GET"])
        self.router.add_api_route("/metrics", self.metrics, methods=["GET"])

    async def complete(self, request: Request) -> Response:
        """Everything that can be refused is refused before the headers; then the prompt is read."""
        parse = partial(parse_completion, wants_debug=request.headers.get("x-chatkv-debug") == "1")
        wanted = await read_json(request, self.service.text_pool, parse)
        is_unix = bool(request.scope["chatkv_is_unix"])
        stream = await unless_disconnected(request, self.service.generations.complete(wanted))
        if stream is None:
            return Response(status_code=499)
        completion = Completion(stream.request, wanted, stream.model, is_unix)
        if wanted.is_stream:
            return EventStream(self._events(stream, completion), stream.close)
        try:
            answer = await unless_disconnected(request, self._whole(stream, completion))
        finally:
            stream.close()
        return Response(status_code=499) if answer is None else JsonResponse(answer)

    async def list_models(self) -> Response:
        models = self.service.installed.list()
        data = [
            openai_model(model, self.service.models.loaded, self.service.settings)
            for model in models
            if model.is_usable
        ]
        return JsonResponse({"object": "list", "data": data})

    async def get_model(self, model_id: str) -> Response:
        return JsonResponse(
            openai_model(self.service.models.resolve(model_id), self.service.models.loaded, self.service.settings)
        )

    async def health(self) -> Response:
        match self.service.models.state:
            case ModelState.READY:
                return JsonResponse({"status": "ok"})
            case ModelState.LOADING:
                error = ApiError(503, "Loading model", "loading_model", headers={"Retry-After": "2"})
            case ModelState.FAILED:
                error = ApiError(503, str(self.service.models.status()["error"]), "model_load_failed")
            case state:
                return JsonResponse({"status": state.value})
        return ErrorResponse(error)

    async def metrics(self) -> Response:
        await self.service.refresh()
        text, media_type = self.service.metrics.render()
        return Response(text, headers={"Content-Type": media_type})

    async def _events(self, stream: OutputStream, completion: Completion) -> AsyncGenerator[bytes, None]:
        for chunk in completion.first_chunks():
            yield sse_event(chunk)
        while not completion.is_done:
            outputs = await stream.next(self.service.keep_alive_s)
            if not outputs:
                yield KEEP_ALIVE
            events: list[bytes] = []
            for output in outputs:
                completion.add(output)
                events += map(sse_event, completion.chunks(output))
            if events:
                yield b"".join(events)
        self._remember(stream, completion)
        if completion.failure is not None:
            yield sse_event(completion.failure.body())
        elif completion.request.include_usage:
            yield sse_event(completion.usage_chunk())
        yield DONE

    async def _whole(self, stream: OutputStream, completion: Completion) -> dict[str, Any]:
        while not completion.is_done:
            for output in await stream.next():
                completion.add(output)
        self._remember(stream, completion)
        if completion.failure is not None:
            raise completion.failure
        return completion.whole()

    def _remember(self, stream: OutputStream, completion: Completion) -> None:
        """So that the next request, which brings these answers as text, finds their exact ids; and for `why`."""
        if completion.facts.num_prompt_tokens:
            self.service.requests.note(stream.model, stream.request.prompt_token_ids, completion.facts)
        for choice in completion.choices:
            self.service.text_pool.submit(
                stream.model.text.remember,
                stream.request.prompt_token_ids,
                choice.text,
                tuple(choice.token_ids),
                choice.block_hashes[-1] if choice.block_hashes else None,
            )
