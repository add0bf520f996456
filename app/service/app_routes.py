"""The app's own routes for the service, models and jobs, on the unix socket only."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from chatkv.app.hub.catalogue import catalogue

from .bodies import read_model
from .errors import not_found
from .model_views import app_model
from .responses import JsonResponse
from .service import Service
from .sse import EventStream

MAX_THREADS = 256


class NamedModel(BaseModel):
    name: str


class PullRequest(BaseModel):
    name: str
    """A catalogue name, or a source such as hf:OWNER/REPO/FILE.gguf."""
    as_name: str | None = None


class ThreadCount(BaseModel):
    threads: int = Field(ge=1, le=MAX_THREADS)


class RequestRef(BaseModel):
    request_id: str


class AppRoutes:
    def __init__(self, service: Service):
        self.service = service
        self.router = APIRouter(prefix="/chatkv")
        add = self.router.add_api_route
        add("/status", self.status, methods=["GET"])
        add("/stop", self.stop, methods=["POST"])
        add("/events", self.events, methods=["GET"])
        add("/models", self.list_models, methods=["GET"])
        add("/models/pull", self.pull, methods=["POST"])
        add("/models/load", self.load, methods=["POST"])
        add("/threads", self.set_threads, methods=["POST"])
        add("/models/{name}", self.remove, methods=["DELETE"])
        add("/jobs", self.list_jobs, methods=["GET"])
        add("/jobs/{job_id}", self.cancel_job, methods=["DELETE"])
        add("/cancel", self.cancel, methods=["POST"])

    async def status(self) -> Response:
        await self.service.refresh()
        return JsonResponse(self.service.status())

    async def stop(self) -> Response:
        self.service.stop_wanted.set()
        return JsonResponse({"ok": True})

    async def events(self) -> Response:
        hub = self.service.events
        await self.service.refresh()
        subscriber = hub.subscribe()
        first = {"type": "hello", "status": self.service.status()}
        events = subscriber.stream(first, self.service.keep_alive_s)
        return EventStream(events, on_close=partial(hub.unsubscribe, subscriber))

    async def list_models(self) -> Response:
        installed = {model.name: model for model in self.service.installed.list()}
        names = [*catalogue(), *(name for name in installed if name not in catalogue())]
        current = self.service.models.current_name
        jobs = {job.name: job.id for job in self.service.jobs.list_jobs() if job.state == "running"}
        # A pull of a source that is in no catalogue is shown too.
        names += [name for name in jobs if name not in names]
        return JsonResponse(
            {"models": [app_model(name, installed.get(name), current, jobs.get(name)) for name in names]}
        )

    async def pull(self, request: Request) -> Response:
        wanted = await read_model(request, self.service.text_pool, PullRequest)
        job = self.service.jobs.start(wanted.name, wanted.as_name)
        return JsonResponse({"job": job.snapshot().as_json()}, status_code=202)

    async def load(self, request: Request) -> Response:
        """Begins the swap; `model` events tell how it goes."""
        wanted = await read_model(request, self.service.text_pool, NamedModel)
        name = self.service.models.resolve(wanted.name).name
        self.service.models.load_soon(name)
        return JsonResponse({"model": self.service.models.status()}, status_code=202)

    async def set_threads(self, request: Request) -> Response:
        """Of the CPU kernels, until the service ends."""
        wanted = await read_model(request, self.service.text_pool, ThreadCount)
        await self.service.models.set_num_threads(wanted.threads)
        return JsonResponse({"model": self.service.models.status()})

    async def remove(self, name: str, force: bool = False) -> Response:
        await self.service.models.remove(name, is_forced=force)
        return JsonResponse({"ok": True})

    async def list_jobs(self) -> Response:
        return JsonResponse({"jobs": [job.as_json() for job in self.service.jobs.list_jobs()]})

    async def cancel_job(self, job_id: str) -> Response:
        job = self.service.jobs.get(job_id)
        if job is None:
            raise not_found(f"There is no job {job_id}.")
        job.cancel()
        return JsonResponse({"job": job.snapshot().as_json()})

    async def cancel(self, request: Request) -> Response:
        wanted = await read_model(request, self.service.text_pool, RequestRef)
        if not self.service.generations.cancel(wanted.request_id):
            raise not_found(f"No request {wanted.request_id} is running.")
        return JsonResponse({"ok": True})
