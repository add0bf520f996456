"""Memory that the system has given before it is written.

A fresh page costs a fault when it is first touched: bringing back 93 MB took 40 ms of faults beside 5 ms of copying. To
ask for all pages at once would take memory that no chat needs yet, so they are asked for some way ahead of use, on
another thread.
"""

from __future__ import annotations

import ctypes
import threading

from torch import Tensor

READY_BYTES = 128 << 20
"""Ready at the start, and each further piece. More than 4,000 tokens of the default model take."""
MAX_READY_BYTES = 512 << 20
"""Of a mapping. Where more is in use, memory is dearer than a fault."""
PIECE_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; what is in the pages stays. Older kernels refuse, and pages come when they are touched."""

_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class ReadyMemory:
    """Of one mapping that is used from its start on. On one thread."""

    def __init__(self, memory: Tensor) -> None:
        """memory: uint8, contiguous, page-aligned."""
        self._memory = memory
        self._num_bytes = min(memory.numel(), MAX_READY_BYTES)
        self._ready_bytes = 0
        """Those of the last piece may still be on their way."""
        self._thread: threading.Thread | None = None
        self.reach(0)

    def reach(self, offset: int) -> None:
        """Use has come to this byte. When half of what is ready is used, a thread gets the next piece."""
        if offset + READY_BYTES // 2 < self._ready_bytes or self._ready_bytes >= self._num_bytes:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        start = self._ready_bytes
        self._ready_bytes = max(start, offset) + READY_BYTES
        end = min(self._ready_bytes, self._num_bytes)
        self._thread = threading.Thread(target=self._get_ready, args=(start, end), name="chatkv-memory", daemon=True)
        self._thread.start()

    def _get_ready(self, start: int, end: int) -> None:
        """Other threads write to these pages meanwhile, and lose nothing."""
        address = self._memory.data_ptr()
        for piece in range(start, end, PIECE_BYTES):
            _libc.madvise(address + piece, min(PIECE_BYTES, end - piece), _MADV_POPULATE_WRITE)
