"""Runs a call with a deadline that nothing inside can stretch: name look-ups and TLS have no timeout of their own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from .reports import IsCancelled, PullCancelled, SourceFailed

_POLL_S = 0.1
T = TypeVar("T")


def within(timeout_s: float, call: Callable[[], T], is_cancelled: IsCancelled, who: str) -> T:
    """The result of `call`, which goes on in its own thread, unheard, when it is too late.

    Raises:
        SourceFailed: `who` did not answer in time.
        PullCancelled: the person stopped it.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, name="hub-request", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        if is_cancelled():
            raise PullCancelled
        try:
            result, error = answers.get(timeout=min(left, _POLL_S))
        except queue.Empty:
            continue
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # without an error there is a result
    raise SourceFailed(f"{who} did not answer within {timeout_s:g} s")
