"""A model's loading, in a thread of its own that nobody has to wait for when the service stops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from chatkv.app.hub.installed import InstalledModel

from .loaded import LoadedModel, Loader


class LoadAbandonedError(Exception):
    """Raised into a load that nobody waits for any more."""


class LoadThread:
    """Starts at once. The thread is a daemon: a load that cannot be interrupted does not hold up the exit."""

    def __init__(self, loader: Loader, installed: InstalledModel, on_progress: Callable[[float], None]):
        self._loop = asyncio.get_running_loop()
        self._on_progress = on_progress
        self._is_abandoned = False
        self._future: asyncio.Future[LoadedModel] = self._loop.create_future()
        threading.Thread(target=self._run, args=(loader, installed), name="chatkv-load", daemon=True).start()

    async def wait(self) -> LoadedModel:
        """Raises what the loader raised. When cancelled, the load ends at its next report of progress."""
        try:
            return await self._future
        except asyncio.CancelledError:
            self._is_abandoned = True
            raise

    def _run(self, loader: Loader, installed: InstalledModel) -> None:
        try:
            model = loader(installed, self._report)
        except Exception as error:
            self._post(self._fail, error)
        else:
            self._post(self._succeed, model)

    def _report(self, share: float) -> None:
        if self._is_abandoned:
            raise LoadAbandonedError
        self._post(self._on_progress, share)

    def _succeed(self, model: LoadedModel) -> None:
        if self._future.done():
            threading.Thread(target=model.close, daemon=True).start()
        else:
            self._future.set_result(model)

    def _fail(self, error: Exception) -> None:
        if not self._future.done():
            self._future.set_exception(error)

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed: the service is gone.
            self._loop.call_soon_threadsafe(call, *arguments)
