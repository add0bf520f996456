"""Which model is loaded, who uses it, and who waits for which: first come, first served."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from chatkv.app.hub.installed import InstalledModel
from chatkv.app.settings import Settings
from chatkv.engine.errors import QueueFullError

from .errors import ApiError, not_found, stopping
from .last_model import LastModel
from .load_thread import LoadThread
from .loaded import LoadedModel, Loader
from .model_choice import ALIASES, Installed, ModelChoice
from .model_state import ModelState, Waiter
from .sse import end_task

log = logging.getLogger(__name__)


class ModelManager:
    """One model at a time. All methods run on the event loop; loading runs in a thread.

    A user holds a lease. The model is swapped only when the first waiter wants another one and no lease is out, so
    running answers end undisturbed and nobody waits forever behind later requests for the loaded model.
    """

    def __init__(
        self,
        installed: Installed,
        loader: Loader,
        settings: Settings,
        last_model: LastModel,
        on_change: Callable[[], None],
    ):
        self._installed = installed
        self._choice = ModelChoice(installed, settings, last_model)
        self._loader = loader
        self._settings = settings
        self._last_model = last_model
        self._on_change = on_change
        self._loaded: LoadedModel | None = None
        self._loading_name: str | None = None
        self._progress = 0.0
        self._error: str | None = None
        self._failed_name: str | None = None
        self._waiters: deque[Waiter] = deque()
        self._num_leases = 0
        self._num_threads: int | None = None
        """Asked for while the service runs; None: as the settings say."""
        self._task: asyncio.Task[None] | None = None
        self._unloaded_name: str | None = None
        self._used_at = time.monotonic()
        self._is_held = False
        """The model is being removed or unloaded: whoever wants one waits."""
        self._is_closed = False
        self.is_unloading = False
        """A model's engine is being closed, and what it holds made safe."""

    @property
    def state(self) -> ModelState:
        if self._loading_name is not None:
            return ModelState.LOADING
        if self._loaded is not None:
            return ModelState.READY
        if self._error:
            return ModelState.FAILED
        return ModelState.UNLOADED if self._unloaded_name else ModelState.NO_MODEL

    @property
    def loaded(self) -> LoadedModel | None:
        """The model in memory, if one is ready."""
        return self._loaded if self.state is ModelState.READY else None

    @property
    def current_name(self) -> str | None:
        """The model that is loaded or being loaded."""
        return self._loading_name or (self._loaded.name if self._loaded else None)

    def status(self) -> dict[str, Any]:
        loaded = self.loaded
        return {
            "name": self.current_name or self._failed_name or self._unloaded_name,
            "state": self.state.value,
            "progress": round(self._progress, 3) if self._loading_name else float(loaded is not None),
            "error": self._error,
            "context_tokens": loaded.context_tokens if loaded else None,
            "weight_format": loaded.weight_format if loaded else None,
            "weights": loaded.weights or None if loaded else None,
            "kernels": loaded.kernels if loaded else None,
            "card": loaded.place.card or None if loaded else None,
            "plan": loaded.place.plan or None if loaded else None,
            "note": loaded.place.note or None if loaded else None,
        }

    def resolve(self, model_id: str | None) -> InstalledModel:
        """The installed model that a request means.

        Raises:
            ApiError: 404 naming what is installed; 400 when the model's folder is damaged.
        """
        loaded = self.loaded
        if loaded is not None and (model_id or "").strip() in ALIASES | {loaded.name}:
            return loaded.installed
        return self._choice.resolve(model_id, self.current_name or self._unloaded_name)

    async def lease(self, model_id: str | None) -> LoadedModel:
        """Wait until the model is ready, and keep it from being swapped until `release`.

        Raises:
            ApiError: 404 unknown, 400 damaged, 503 it could not be loaded, or the service is stopping.
            QueueFullError: too many wait already.
        """
        future = self._wait_for(self.resolve(model_id).name)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release()
            else:
                self._pump()
            raise

    def release(self) -> None:
        assert self._num_leases > 0, "a lease was released twice"
        self._num_leases -= 1
        self._used_at = time.monotonic()
        self._pump()

    def is_ready(self, model_id: str | None) -> bool:
        """Whether a lease would be granted at once."""
        loaded = self.loaded
        return loaded is not None and not self._waiters and self.resolve(model_id).name == loaded.name

    def start(self) -> None:
        """Load the last used or the default model, if it is installed."""
        name = self._choice.default_name()
        if self._choice.is_installed(name) and not self._is_closed:
            self._begin_loading(name)

    def load_soon(self, model_id: str) -> None:
        """Swap to a model when it is its turn; how it goes is in `status()`.

        Raises:
            ApiError: 404 unknown, 400 damaged, 503 the service is stopping.
            QueueFullError: too many wait already.
        """
        self._wait_for(self.resolve(model_id).name).add_done_callback(self._drop)

    def _wait_for(self, name: str) -> asyncio.Future[LoadedModel]:
        if self._is_closed:
            raise stopping()
        num_waiting = sum(not waiter.future.done() for waiter in self._waiters)
        if num_waiting >= self._settings.max_num_waiting:
            raise QueueFullError(num_waiting)
        future: asyncio.Future[LoadedModel] = asyncio.get_running_loop().create_future()
        self._waiters.append(Waiter(name, future))
        self._pump()
        return future

    def _drop(self, future: asyncio.Future[LoadedModel]) -> None:
        """A lease that nobody wanted but for the load; a failed load is told by the status."""
        if not future.cancelled() and future.exception() is None:
            self.release()

    async def set_num_threads(self, num_threads: int) -> None:
        """Of this model and of those that come, until the service ends; between two steps."""
        self._num_threads = num_threads
        if self._loaded is not None:
            await self._apply_threads(self._loaded)
            self._on_change()

    async def _apply_threads(self, model: LoadedModel) -> None:
        if (num_threads := self._num_threads) is not None:
            await asyncio.wrap_future(model.engine.run(lambda engine: model.set_num_threads(num_threads)))

    def idle_left_s(self, idle_s: float) -> float | None:
        """Until `unload_if_idle` would free the model if nobody comes. None: there is none, or it is in use."""
        if self.loaded is None or self._num_leases or self._waiters or self._is_held:
            return None
        return self._used_at + idle_s - time.monotonic()

    async def unload_if_idle(self, idle_s: float) -> None:
        """Free the model when no request has used it for `idle_s`."""
        left_s = self.idle_left_s(idle_s)
        if self.loaded is None or left_s is None or left_s > 0:
            return
        log.info("nobody used the model for %.0f s: it is unloaded", idle_s)
        self._is_held = True
        self._unloaded_name = self.loaded.name
        try:
            await self._unload()
        finally:
            self._is_held = False
            self._on_change()
            self._pump()

    async def remove(self, name: str, is_forced: bool) -> None:
        """Delete an installed model.

        Raises:
            ApiError: 404 not installed; 409 it is loaded and `is_forced` is false, or it answers right now.
        """
        if not self._choice.is_installed(name):
            raise not_found(f"The model '{name}' is not installed.", "model_not_found")
        if name == self.current_name:
            if not is_forced:
                raise ApiError(409, f"The model '{name}' is loaded. Remove it all the same with force.", "model_loaded")
            if self._num_leases or self._loading_name:
                raise ApiError(409, f"The model '{name}' is at work. Stop its replies first.", "model_busy")
        self._is_held = True  # Whoever wants it now waits, and is told afterwards that it is gone.
        try:
            if name == self.current_name:
                await self._unload()
            await asyncio.to_thread(self._installed.remove, name)
            if name == self._unloaded_name:
                self._unloaded_name = None
        finally:
            self._is_held = False
            self._on_change()
            self._pump()

    async def close(self) -> None:
        """Refuse the waiters, abandon a load that runs, free the model."""
        self._is_closed = True
        self._fail_waiters(lambda _: True, stopping())
        if self._task is not None:
            await end_task(self._task)
        await self._unload()

    def _pump(self) -> None:
        """Serve the waiters in order, as far as it goes without harming a lease."""
        while self._waiters and self._loading_name is None and not self._is_held:
            waiter = self._waiters[0]
            if waiter.future.done():
                self._waiters.popleft()
            elif self._loaded is not None and waiter.name == self._loaded.name:
                self._waiters.popleft()
                self._num_leases += 1
                waiter.future.set_result(self._loaded)
            elif self._num_leases == 0:
                self._begin_loading(waiter.name)
            else:
                return

    def _begin_loading(self, name: str) -> None:
        self._loading_name = name
        self._progress = 0.0
        self._error = self._failed_name = self._unloaded_name = None
        self._task = asyncio.get_running_loop().create_task(self._load(name))
        self._on_change()

    async def _load(self, name: str) -> None:
        try:
            await self._unload()
            loaded = await LoadThread(self._loader, self._installed.get(name), self._set_progress).wait()
            await self._apply_threads(loaded)
            self._loaded = loaded
            self._used_at = time.monotonic()
            self._last_model.write(name)
            log.info("model %s is loaded", name)
        except Exception as error:
            log.exception("model %s could not be loaded", name)
            self._error, self._failed_name = str(error) or type(error).__name__, name
            refusal = ApiError(503, f"The model '{name}' could not be loaded: {self._error}", "model_load_failed")
            self._fail_waiters(lambda waiter: waiter.name == name, refusal)
        finally:
            self._loading_name = None
            self._task = None
            self._on_change()
            self._pump()

    async def _unload(self) -> None:
        if self._loaded is not None:
            model, self._loaded = self._loaded, None
            self.is_unloading = True
            try:
                await asyncio.to_thread(model.close)
            finally:
                self.is_unloading = False
            del model
            gc.collect()  # Cycles would hold the old weights while the new ones are read.
            self._on_change()

    def _fail_waiters(self, is_meant: Callable[[Waiter], bool], error: ApiError) -> None:
        for waiter in [waiter for waiter in self._waiters if is_meant(waiter)]:
            self._waiters.remove(waiter)
            if not waiter.future.done():
                waiter.future.set_exception(error)

    def _set_progress(self, share: float) -> None:
        self._progress = share
        self._on_change()
