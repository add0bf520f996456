"""Host memory that a GPU copies from by itself: its pages are locked piece by piece, on a thread, ahead of their use.

To lock memory takes its time (some 0.4 s a GB) and takes the pages from the system, so what no chat needs yet is left
alone. torch's own page-locked tensors are rounded up to a power of two, and whole from the start.
"""

from __future__ import annotations

import logging
import mmap
import threading
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)
PIECE_BYTES = 256 << 20


class PageLocker(Protocol):
    """Locks pages for a device. Raises RuntimeError when the system refuses."""

    def lock(self, address: int, num_bytes: int) -> None: ...

    def unlock(self, address: int) -> None:
        """What was locked from this address on."""
        ...


class CudaPageLocker:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, num_bytes: int) -> None:
        # A thread's device is the first card, on which there may be no context, and should be none.
        with torch.cuda.device(self._device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)))

    def unlock(self, address: int) -> None:
        with torch.cuda.device(self._device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))


class LockedMemory:
    """`bytes`: uint8 [num_bytes], page-aligned. Used from its start on; what is not locked yet, or never, can be used
    all the same."""

    def __init__(self, num_bytes: int, unit_bytes: int, locker: PageLocker | None) -> None:
        """unit_bytes: what is copied at once lies within one piece. locker: None locks nothing."""
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes: Tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self._piece_bytes = max(1, PIECE_BYTES // unit_bytes) * unit_bytes
        self._locker = locker
        self._locked: list[int] = []
        """Addresses of pieces."""
        self._asked_bytes = 0
        self._thread: threading.Thread | None = None
        self.reach(0)

    @property
    def locked_bytes(self) -> int:
        """From the start on."""
        return min(len(self._locked) * self._piece_bytes, self.bytes.numel())

    def reach(self, offset: int) -> None:
        """Use has come to this byte. When half of the last piece is used, a thread locks the next one."""
        if self._locker is None or offset + self._piece_bytes // 2 < self._asked_bytes:
            return
        if self._asked_bytes >= self.bytes.numel() or (self._thread is not None and self._thread.is_alive()):
            return
        start = self._asked_bytes
        self._asked_bytes = min(start + self._piece_bytes, self.bytes.numel())
        self._thread = threading.Thread(
            target=self._lock, args=(self._locker, start, self._asked_bytes), name="chatkv-lock", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Before the memory goes, and when no copy runs any more."""
        if self._thread is not None:
            self._thread.join()
        locker, self._locker = self._locker, None
        while locker is not None and self._locked:
            try:
                locker.unlock(self._locked.pop())
            except RuntimeError as error:
                log.warning("memory for cached chats could not be unlocked: %s", error)

    def _lock(self, locker: PageLocker, start: int, end: int) -> None:
        address = self.bytes.data_ptr() + start
        try:
            locker.lock(address, end - start)
        except RuntimeError as error:
            log.warning("memory for cached chats is not locked, so copies to the GPU are slower: %s", error)
            self._asked_bytes = self.bytes.numel()  # The system has said no; it is not asked again.
        else:
            self._locked.append(address)
