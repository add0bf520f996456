"""The requests at work: admitted, known by id, cancelled together when the service stops."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from chatkv.engine.request import GenerationRequest

from .completion_request import CompletionRequest
from .errors import ApiError
from .loaded import LoadedModel
from .model_manager import ModelManager
from .outputs import OutputStream, new_request_id
from .preparation import check_token_ids, render
from .wakeup import LoopWaker


class Generations:
    def __init__(self, models: ModelManager, text_pool: Executor):
        self._models = models
        self._text_pool = text_pool
        self._running: dict[str, OutputStream] = {}
        self._waker: LoopWaker | None = None
        self._is_stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def complete(self, wanted: CompletionRequest) -> OutputStream:
        """Wait for the model, render, tokenise and admit.

        Raises:
            ApiError, EngineError: the request is refused; nothing runs.
        """
        model = await self._models.lease(wanted.model)
        try:
            check_token_ids(model, tuple(wanted.sampling.logit_bias), "logit_bias")
            prompt = await render(model, wanted.messages, self._text_pool, template_kwargs=wanted.template_kwargs)
            request = GenerationRequest(
                request_id=new_request_id("chatcmpl"),
                prompt_token_ids=tuple(prompt.token_ids),
                sampling=wanted.sampling,
                n=wanted.n,
                priority=wanted.priority,
            )
        except BaseException:
            self._models.release()
            raise
        return await self.start(model, request)

    async def start(self, model: LoadedModel, request: GenerationRequest) -> OutputStream:
        """Submit; the caller's lease passes to the stream, which gives it back when it is closed.

        Raises:
            ApiError, EngineError: refused, and the lease is given back.
        """

        def on_close() -> None:
            self._running.pop(request.request_id, None)
            self._models.release()
            if not self._running:
                self._idle.set()

        self._waker = self._waker or LoopWaker()
        stream = OutputStream(model, request, on_close, self._waker)
        self._running[request.request_id] = stream
        self._idle.clear()
        try:
            if self._is_stopping:
                raise ApiError(503, "The service is stopping.", "stopping", headers={"Retry-After": "5"})
            await stream.start(self._text_pool)
        except BaseException:
            stream.close()
            raise
        return stream

    def cancel(self, request_id: str) -> bool:
        """False: no such request runs."""
        stream = self._running.get(request_id)
        if stream is not None:
            stream.cancel()
        return stream is not None

    async def stop(self, timeout_s: float) -> None:
        """Refuse new requests, cancel the running ones, and wait until their readers have taken the end."""
        self._is_stopping = True
        for stream in tuple(self._running.values()):
            stream.cancel()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass
