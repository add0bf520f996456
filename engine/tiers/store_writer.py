"""The thread that writes, evicts and erases, and decides when."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable

from ..errors import OwnersGoneError
from .back_off import BackOff
from .disk_state import DiskState
from .group_writer import GroupWriter

GROUP_AGE_S = 1.0
"""A kill loses what is younger, and what is being written."""
GROUP_BYTES = 16 << 20
HITS_AGE_S = 30.0

logger = logging.getLogger(__name__)


class StoreWriter:
    """Work is due when a group is old or large enough, something is to be erased, or somebody waits for it. After a
    failure the same kind of work waits for its back-off; those who wait in `flush` get one try at once."""

    def __init__(
        self,
        state: DiskState,
        writer: GroupWriter,
        on_change: Callable[[], None],
        monotonic: Callable[[], float],
        *,
        group_age_s: float = GROUP_AGE_S,
        group_bytes: int = GROUP_BYTES,
    ) -> None:
        self._state, self._writer = state, writer
        self._on_change, self._monotonic = on_change, monotonic
        self._group_age_s, self._group_bytes = group_age_s, group_bytes
        self._wake = threading.Condition(state.lock)
        self._done = threading.Condition(state.lock)
        self._write_back_off, self._erase_back_off = BackOff(monotonic), BackOff(monotonic)
        self._is_busy = self._is_closing = self._is_ended = False
        self._is_hurried = False
        """Somebody waits: no group is too young."""
        self._is_try_left = False
        """Of those who wait: despite the back-off."""
        self._shrink_bytes = 0
        self._hits_saved_at = monotonic()
        state.wake = self._wake.notify
        self._thread = threading.Thread(target=self._run, name="chatkv-disk-write", daemon=True)
        self._thread.start()

    def queued(self) -> None:
        """With the lock, after a block was put: the thread sleeps on unless it has to know."""
        if len(self._state.queue) == 1 or self._state.queue.num_bytes >= self._group_bytes:
            self._wake.notify()

    def flush(self, timeout_s: float) -> bool:
        with self._state.lock:
            self._hurry()
            return self._done.wait_for(lambda: self._is_quiet or self._is_ended, timeout_s) and self._is_quiet

    def shrink(self, num_bytes: int, timeout_s: float) -> bool:
        """Waits until that much was freed, or what could be."""
        with self._state.lock:
            self._shrink_bytes = max(self._shrink_bytes, num_bytes)
        return self.flush(timeout_s)

    def close(self, timeout_s: float | None) -> bool:
        """Flushes and ends the thread; None: however long that takes. False: it still hangs in a disk operation, and
        ends after it."""
        with self._state.lock:
            self._is_closing = True
            self._hurry()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _hurry(self) -> None:
        self._is_hurried = self._is_try_left = True
        self._wake.notify()

    @property
    def _is_quiet(self) -> bool:
        return not (self._is_busy or self._state.queue or self._state.erasures or self._shrink_bytes)

    def _run(self) -> None:
        while True:
            with self._state.lock:
                while (work := self._due()) is None:
                    if self._is_quiet:
                        self._is_hurried = self._is_try_left = False
                        self._done.notify_all()
                    if self._is_closing:
                        self._end()
                        return
                    self._wake.wait(self._wait_s())
                self._is_busy = True
            try:
                work()
            finally:
                with self._state.lock:
                    self._is_busy = False
            self._on_change()

    def _end(self) -> None:
        self._is_ended = True
        self._state.drop([block.copy for block in self._state.queue.take()], is_forgotten=False, is_told=True)
        self._done.notify_all()

    def _due(self) -> Callable[[], None] | None:
        """What to do now. Erasures first: until they succeed nothing is written, because they may be tried again."""
        state = self._state
        if state.erasures:
            return self._erase if self._is_try_left or not self._erase_back_off.remaining_s else None
        if self._shrink_bytes:
            return self._shrink
        oldest_at = state.queue.oldest_at
        is_ripe = oldest_at is not None and (
            self._is_hurried
            or state.queue.num_bytes >= self._group_bytes
            or self._monotonic() - oldest_at >= self._group_age_s
        )
        if is_ripe and (self._is_try_left or not self._write_back_off.remaining_s):
            return self._write
        is_hits_due = self._is_closing or self._monotonic() - self._hits_saved_at >= HITS_AGE_S
        return self._save_hits if state.touched and is_hits_due else None

    def _wait_s(self) -> float | None:
        """Until something may be due by itself."""
        state, now = self._state, self._monotonic()
        if state.erasures:
            return self._erase_back_off.remaining_s
        waits: list[float] = []
        if (oldest_at := state.queue.oldest_at) is not None:
            waits.append(max(self._group_age_s - (now - oldest_at), self._write_back_off.remaining_s))
        if state.touched:
            waits.append(HITS_AGE_S - (now - self._hits_saved_at))
        return max(0.0, min(waits)) if waits else None

    def _write(self) -> None:
        with self._state.lock:
            blocks = self._state.queue.take()
        try:
            self._writer.write(blocks)
        except OwnersGoneError as error:
            logger.info("a group of blocks was not stored: %s", error)
        except Exception as error:
            self._failed(self._write_back_off, error)
            return
        self._succeeded(self._write_back_off)

    def _erase(self) -> None:
        with self._state.lock:
            erasures = self._state.take_erasures()
        try:
            self._writer.erase(erasures)
        except Exception as error:
            with self._state.lock:
                self._state.erasures.add(erasures)
            self._failed(self._erase_back_off, error)
        else:
            self._succeeded(self._erase_back_off)

    def _shrink(self) -> None:
        with self._state.lock:
            num_bytes, self._shrink_bytes = self._shrink_bytes, 0
        try:
            self._writer.shrink(num_bytes)
        except Exception as error:
            self._failed(self._erase_back_off, error)

    def _save_hits(self) -> None:
        self._hits_saved_at = self._monotonic()
        try:
            self._writer.save_hits()
        except Exception:
            logger.warning("the hits of cached blocks could not be saved", exc_info=True)

    def _failed(self, back_off: BackOff, error: Exception) -> None:
        logger.warning("the disk store could not be written", exc_info=error)
        back_off.fail()
        with self._state.lock:
            self._is_try_left = False
            self._state.fault = fault_text(error)

    def _succeeded(self, back_off: BackOff) -> None:
        back_off.succeed()
        if not (self._write_back_off.is_failing or self._erase_back_off.is_failing):
            with self._state.lock:
                self._state.fault = None


def fault_text(error: Exception) -> str:
    """What a person is told."""
    if not isinstance(error, OSError):
        return f"Chats could not be cached on disk ({type(error).__name__}: {error}). chatkv tries again."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "The disk is full: chats are not cached on it until there is room again."
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "The folder of cached chats cannot be written: nothing new is stored there until it can."
    return f"The disk with the cached chats reports errors ({error.strerror or error}): chatkv tries again."
