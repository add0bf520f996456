"""The way of a request's outputs from the engine thread to its one reader on the event loop."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from chatkv.engine.request import GenerationRequest, RequestOutput

from .loaded import LoadedModel
from .wakeup import LoopWaker, Wakeup

MAX_BUFFERED = 16_384
"""Outputs a reader may be behind. One that is further behind has stopped reading: its request is cancelled."""


class OutputStream:
    """One request: submitted with `start`, read with `next`, ended with `close` (which cancels what still runs).

    The engine thread only appends to a deque, and wakes the loop once for all that is there when the loop gets to it.
    """

    def __init__(
        self,
        model: LoadedModel,
        request: GenerationRequest,
        on_close: Callable[[], None],
        waker: LoopWaker,
        max_buffered: int = MAX_BUFFERED,
    ):
        self.model = model
        self.request = request
        self._on_close = on_close
        self._max_buffered = max_buffered
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[RequestOutput] = deque()
        self._lock = threading.Lock()
        self._waker = waker
        self._wakeup = Wakeup()
        self._is_wakeup_due = False
        self._is_overflown = False
        self._is_closed = False
        self._is_cancelled = False
        self._num_open = request.n

    @property
    def is_finished(self) -> bool:
        """Whether the reader has seen the last output of each choice."""
        return self._num_open == 0

    async def start(self, pool: Executor) -> None:
        """Hand the request to the engine, in a thread: hashing a long prompt takes a while.

        Raises:
            EngineError: the engine refuses it (too long, queue full, bad value).
        """
        submitted = self._loop.run_in_executor(pool, self.model.engine.submit, self.request, self._put)
        try:
            await asyncio.shield(submitted)
        except asyncio.CancelledError:
            # The thread cannot be stopped: what it admits after we left must go again.
            submitted.add_done_callback(self._cancel_admitted)
            raise
        if self._is_cancelled:
            self.cancel()

    def _cancel_admitted(self, submitted: asyncio.Future[None]) -> None:
        if not submitted.cancelled() and submitted.exception() is None:
            self.cancel()

    def cancel(self) -> None:
        """The engine answers with a last output per unfinished choice. It knows nothing of a request that is still on
        its way, so `start` cancels that again."""
        self._is_cancelled = True
        self.model.engine.cancel(self.request.request_id)

    def close(self) -> None:
        """Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self.is_finished:
            self.cancel()
        self._on_close()

    async def next(self, timeout_s: float | None = None) -> Sequence[RequestOutput]:
        """All outputs that wait; none only when `timeout_s` has passed."""
        while not self._buffer:
            if not await self._wakeup.wait(timeout_s):
                return ()
        with self._lock:
            self._is_wakeup_due = False
            outputs = tuple(self._buffer)
            self._buffer.clear()
        self._num_open -= sum(output.finish_reason is not None for output in outputs)
        return outputs

    def _put(self, output: RequestOutput) -> None:
        """Called on the engine thread; never raises into it."""
        with self._lock:
            if len(self._buffer) >= self._max_buffered and output.finish_reason is None:
                is_newly_full, self._is_overflown = not self._is_overflown, True
                is_wakeup_needed = False
            else:
                self._buffer.append(output)
                is_newly_full = False
                is_wakeup_needed, self._is_wakeup_due = not self._is_wakeup_due, True
        if is_newly_full:
            self.cancel()
        if is_wakeup_needed:
            try:
                self._waker.wake(self._wakeup)
            except RuntimeError:  # The loop is closed: the service ends, nobody reads any more.
                self.cancel()


def new_request_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
