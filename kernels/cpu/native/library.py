"""The native library in this process."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

from .abi import STRUCTS, Step
from .build import NoCompilerError, built_library, prebuilt_library

logger = logging.getLogger(__name__)

MAX_VARIANTS = 4
VARIANT_NAMES = {
    "avx512": "AVX-512 VNNI",
    "avx2": "AVX2",
    "neon": "NEON",
    "scalar": "plain C++ (no vector instructions)",
}


class NativeLibrary:
    """`variants`: those that this machine runs, best first."""

    def __init__(self, file: Path) -> None:
        library = ctypes.CDLL(str(file))
        library.chatkv_variant.restype = ctypes.c_char_p
        library.chatkv_threads_new.restype = ctypes.c_void_p
        library.chatkv_threads_free.argtypes = [ctypes.c_void_p]
        library.chatkv_threads_awake.argtypes = [ctypes.c_void_p]
        library.chatkv_run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Step)]
        library.chatkv_run.restype = None
        sizes = [library.chatkv_struct_bytes(index) for index in range(len(STRUCTS))]
        assert sizes == [ctypes.sizeof(struct) for struct in STRUCTS], f"abi.py and abi.h differ: {sizes}"
        self._library = library
        names = [library.chatkv_variant(index) for index in range(MAX_VARIANTS)]
        self._index_of = {name.decode(): index for index, name in enumerate(names) if name is not None}
        self.variants = tuple(self._index_of)

    def run(self, step: Step, variant: str | None = None, num_threads: int = 1) -> None:
        """One step on threads of its own; for tests. `variant`: the best when None."""
        threads = NativeThreads(self, num_threads)
        try:
            threads.run(step, variant)
        finally:
            threads.close()


class NativeThreads:
    """Threads that share the work of one step after another; the caller is one of them. Not for two callers at once."""

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        self.num_threads = num_threads
        self._library = library
        self._handle: int | None = library._library.chatkv_threads_new(num_threads)

    def run(self, step: Step, variant: str | None = None) -> None:
        """Runs `step`; other Python threads go on meanwhile."""
        index = self._library._index_of[variant or self._library.variants[0]]
        self._library._library.chatkv_run(self._handle, index, ctypes.byref(step))

    @property
    def num_awake_workers(self) -> int:
        """Those that spin or work. They fall asleep by themselves."""
        return int(self._library._library.chatkv_threads_awake(self._handle))

    def close(self) -> None:
        if self._handle is not None:
            self._library._library.chatkv_threads_free(self._handle)
            self._handle = None


@cache
def native_library() -> NativeLibrary:
    """Prebuilt, from the cache, or compiled now (some seconds). Raises NoCompilerError."""
    prebuilt = prebuilt_library()
    if prebuilt is not None:
        try:
            return NativeLibrary(prebuilt)
        except OSError as error:  # of a wheel for a newer C library, for example
            logger.warning("the kernels that came with the program cannot be loaded: %s", error)
    file = built_library()
    try:
        return NativeLibrary(file)
    except OSError as error:  # damaged, or made by another machine that shares the folder
        logger.warning("the compiled kernels cannot be loaded and are compiled anew: %s", error)
    try:
        file.unlink(missing_ok=True)
        return NativeLibrary(built_library())
    except OSError as error:
        raise NoCompilerError(f"the compiled native kernels cannot be loaded: {error}") from None
