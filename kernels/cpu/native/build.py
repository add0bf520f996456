"""Compiles the native library: at first use, in seconds, into the user's cache; or beforehand, into a wheel.

The file's name holds a digest of the sources and the flags, so an old library is never taken for a new one, and several
versions of the program can share the cache. The compiler is not in it: it changes no bit, and one that is upgraded or
removed leaves the library useful.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
CACHE_VARIABLE = "CHATKV_KERNEL_CACHE"
COMPILERS = ("c++", "g++", "clang++")

COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=off")
"""No contraction: a product and a sum become one fma only where the source says so, else bits would depend on the
compiler."""
COMMON_SOURCES = ("threads.cpp", "step.cpp", "library.cpp")
VARIANT_SOURCE = "variant.cpp"
X86_VARIANTS = {
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
        *("-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
    ),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "scalar": (),
}
ARM_VARIANTS = {"neon": ("-march=armv8.2-a+dotprod+fp16",), "scalar": ()}
COMPILE_TIMEOUT_S = 300
STALE_BUILD_S = 3600
STALE_LIBRARY_S = 90 * 24 * 3600


class NoCompilerError(Exception):
    """There is no compiler, or it failed. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Compiler:
    command: tuple[str, ...]
    version: str


def variants_of_machine() -> dict[str, tuple[str, ...]]:
    """Name -> flags, best first, for this architecture; none where it is unknown."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return X86_VARIANTS
    return ARM_VARIANTS if machine in ("aarch64", "arm64") else {}


def find_compiler() -> Compiler:
    """$CXX, or the first of COMPILERS that answers. Raises NoCompilerError."""
    wanted = os.environ.get("CXX")
    for command in [shlex.split(wanted)] if wanted else [[name] for name in COMPILERS]:
        if command and shutil.which(command[0]):
            answer = _run([*command, "--version"])
            if answer.returncode == 0 and answer.stdout:
                return Compiler(tuple(command), answer.stdout.splitlines()[0])
    raise NoCompilerError("no C++ compiler found: install g++ or clang++")


def cache_dir() -> Path:
    """Where compiled libraries lie: $CHATKV_KERNEL_CACHE, or the user's cache."""
    import platformdirs  # not there when setup.py runs

    wanted = os.environ.get(CACHE_VARIABLE)
    return Path(wanted) if wanted else Path(platformdirs.user_cache_dir("chatkv")) / "kernels"


def prebuilt_name() -> str:
    """Of the library in a wheel: whichever compiler made it, from these sources."""
    return _file_name(_digest(()))


def prebuilt_library() -> Path | None:
    """The one that came with a wheel, if it was made from these sources."""
    file = PREBUILT / prebuilt_name()
    return file if file.exists() else None


def built_library(extra_flags: Sequence[str] = ()) -> Path:
    """The library with every variant of this architecture, from the cache or compiled now.

    extra_flags: for sanitizers. Raises NoCompilerError.
    """
    if not variants_of_machine():
        raise NoCompilerError(f"no native kernels for this architecture ({platform.machine()})")
    folder = cache_dir()
    file = folder / _file_name(_digest(extra_flags))
    if not file.exists():
        compiler = find_compiler()
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            logger.info("the native kernels are compiled with %s, once; this takes some seconds", compiler.version)
            compile_library(file, compiler, extra_flags)
        except OSError as error:
            raise NoCompilerError(f"the native kernels could not be stored in {folder}: {error.strerror}") from None
        _sweep(folder)
    return file


def compile_library(file: Path, compiler: Compiler, extra_flags: Sequence[str] = ()) -> None:
    """Complete under its name or not there at all, however many processes do it at once."""
    variants = variants_of_machine()
    has = [f"-DCHATKV_HAS_{name.upper()}" for name in variants]
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="build-") as folder:
        units = [(source, [*has], source) for source in COMMON_SOURCES]
        units += [
            (VARIANT_SOURCE, [f"-DCHATKV_VARIANT={name}", f"-DCHATKV_{name.upper()}", *flags], f"variant_{name}")
            for name, flags in variants.items()
        ]
        commands = [
            [
                *compiler.command,
                *COMMON_FLAGS,
                *extra_flags,
                *flags,
                "-c",
                str(SOURCES / source),
                "-o",
                f"{folder}/{name}.o",
            ]
            for source, flags, name in units
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for answer in pool.map(_run, commands):
                _check(answer)
        library = Path(folder) / "library.so"
        objects = [command[-1] for command in commands]
        _check(_run([*compiler.command, "-shared", *extra_flags, *objects, "-o", str(library), "-pthread"]))
        with library.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(library, file)


def _sweep(folder: Path) -> None:
    """What killed compilations and earlier versions have left. A library that is in use stays with who uses it."""
    now = time.time()
    for left, age_s in (("build-*", STALE_BUILD_S), ("chatkv_cpu-*.so", STALE_LIBRARY_S)):
        for path in folder.glob(left):
            with contextlib.suppress(OSError):
                if now - path.stat().st_mtime > age_s:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _digest(facts: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    digest.update(repr((COMMON_FLAGS, variants_of_machine(), tuple(facts))).encode())
    return digest.hexdigest()


def _file_name(digest: str) -> str:
    return f"chatkv_cpu-{platform.machine()}-{digest}.so"


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompilerError(f"the C++ compiler {command[0]} could not be run: {error}") from None


def _check(answer: subprocess.CompletedProcess[str]) -> None:
    if answer.returncode:
        raise NoCompilerError(f"the C++ compiler failed: {answer.stderr.strip()[-2000:]}")
