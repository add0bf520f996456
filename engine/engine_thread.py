"""The thread that runs the engine: asleep when there is nothing to do, an inbox for everybody else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Condition, Thread, current_thread
from typing import TypeVar

from .engine import Engine
from .errors import EngineClosedError, InvalidRequestError
from .metrics import EngineStats
from .prompt import PreparedPrompt
from .request import FinishReason, GenerationRequest, RequestOutput

logger = logging.getLogger(__name__)

OnOutput = Callable[[RequestOutput], None]
T = TypeVar("T")
CLOSED = "The engine is stopping; start it again to send requests."


@dataclass(slots=True)
class _Listener:
    on_output: OnOutput
    unfinished: set[int]
    """Choices whose last output has not been delivered."""


class EngineThread:
    """Submits, cancels and delivers between steps. Outputs of a request come in order, on the engine's thread; each of
    its choices gets exactly one with a finish reason, and nothing after it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._condition = Condition()
        self._submitted: list[tuple[GenerationRequest, PreparedPrompt]] = []
        self._cancelled: list[str] = []
        self._jobs: list[Callable[[], None]] = []
        self._has_tier_news = True
        """A tier has reported something since the last step; at first, because it may have before."""
        self._listeners: dict[str, _Listener] = {}
        self._is_closing = False
        self._is_draining = False
        self._stats = engine.step_stats()
        for tier in engine.lower_tiers:
            tier.on_change = self._on_tier_change
        self._thread = Thread(target=self._run, name="chatkv-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, on_output: OnOutput) -> None:
        """Queues a request. At once raises PromptTooLongError, QueueFullError, InvalidRequestError, EngineClosedError.

        `on_output` runs on the engine's thread: it should only pass the output on. If it raises, its request ends.
        """
        self.engine.validate(request)
        prompt = self.engine.prepare(request)
        with self._condition:
            if self._is_closing:
                raise EngineClosedError(CLOSED)
            if request.request_id in self._listeners:
                raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
            self.engine.check_queue(num_more=len(self._submitted))
            self._listeners[request.request_id] = _Listener(on_output, set(range(request.n)))
            self._submitted.append((request, prompt))
            self._condition.notify()

    def cancel(self, request_id: str) -> None:
        """Ends a request within one step, in every state. Unknown and finished ids are ignored."""
        with self._condition:
            if request_id in self._listeners:
                self._cancelled.append(request_id)
                self._condition.notify()

    def run(self, function: Callable[[Engine], T]) -> Future[T]:
        """Calls `function` on the engine's thread between two steps. Its result, or what it raised, is the future's;
        EngineClosedError if the engine stops first. A future that was cancelled in time is never run."""
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(self.engine)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._condition:
            if self._is_closing:
                raise EngineClosedError(CLOSED)
            self._jobs.append(job)
            self._condition.notify()
        return future

    def stats(self) -> EngineStats:
        """As of the end of the last step; the lower tiers as they are now."""
        stats = self._stats
        num_waiting = stats.num_waiting + len(self._submitted)
        return replace(stats, num_waiting=num_waiting, tiers=self.engine.tiers.stats())

    def count_cached(self, prompt_token_ids: Sequence[int], cache_salt: bytes = b"") -> int:
        """Tokens of a prompt that the device holds now. Touches nothing."""
        return self.engine.count_cached(prompt_token_ids, cache_salt)

    @property
    def is_idle(self) -> bool:
        with self._condition:
            return not self._listeners

    def close(self, drain: bool = False) -> None:
        """Refuses new requests, cancels the unfinished ones (`drain`: lets them end first), stores what is left to be
        stored, closes the lower tiers and stops the thread."""
        with self._condition:
            self._is_closing = True
            self._is_draining = drain
            self._condition.notify_all()
        if current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while self._wait_for_work():
            self._try(self._step)
        self._try(self._end_all)
        self.engine.close()

    def _step(self) -> None:
        self._read_inbox()
        self._deliver(self.engine.step())

    def _end_all(self) -> None:
        """Also what came during the last step."""
        self._read_inbox()
        for request_id in list(self._listeners):
            self._deliver(self.engine.cancel(request_id))

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            logger.exception("the engine failed")
            self._fail_all(f"The engine failed: {type(error).__name__}: {error}. Its cache starts empty.")
        self._stats = self.engine.step_stats()

    def _wait_for_work(self) -> bool:
        """False when it is time to stop."""
        with self._condition:
            while not self._has_work():
                if self._is_closing and not (self._is_draining and self.engine.has_unfinished):
                    return False
                if not self._condition.wait(self.engine.wait_s):
                    break  # a load has gone without a sign for too long
            self._has_tier_news = False
            return not self._is_closing or self._is_draining

    def _has_work(self) -> bool:
        has_mail = self._submitted or self._cancelled or self._jobs or self._has_tier_news
        return bool(has_mail) or not self.engine.is_waiting

    def _on_tier_change(self) -> None:
        with self._condition:
            self._has_tier_news = True
            self._condition.notify()

    def _read_inbox(self) -> None:
        with self._condition:
            for request, prompt in self._submitted:
                self.engine.add_request(request, prompt)
            self._submitted.clear()
            cancelled, self._cancelled = self._cancelled, []
        for request_id in cancelled:
            self._deliver(self.engine.cancel(request_id))
        for _ in range(len(self._jobs)):  # one by one: those behind a failure are run after it
            self._jobs.pop(0)()
        self._deliver(self.engine.report_progress())

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            listener = self._listeners.get(output.request_id)
            if listener is None:
                continue  # its callback failed a moment ago
            is_broken = False
            try:
                listener.on_output(output)
            except Exception:
                logger.exception("a listener failed; its request ends")
                is_broken = True
            if output.finish_reason is not None:
                listener.unfinished.discard(output.index)
            if is_broken or not listener.unfinished:
                with self._condition:
                    del self._listeners[output.request_id]
            if is_broken:
                self.engine.cancel(output.request_id)

    def _fail_all(self, error: str) -> None:
        """Nobody is left waiting, whatever was lost with the step."""
        with self._condition:
            self._submitted.clear()
            listeners = dict(self._listeners)
        self.engine.reset()
        for request_id, listener in listeners.items():
            self._deliver(
                [
                    RequestOutput(request_id, index, finish_reason=FinishReason.ERROR, error=error)
                    for index in sorted(listener.unfinished)
                ]
            )
