"""The native step under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

from chatkv.kernels.cpu.native.build import COMMON_FLAGS, SOURCES, VARIANT_SOURCE, X86_VARIANTS, find_compiler

DRIVER = Path(__file__).parent / "driver.cpp"
VARIANTS = ("scalar", "avx2")
OPTIONS = {
    "thread": {"TSAN_OPTIONS": "halt_on_error=1"},
    "address,undefined": {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
}


def compiled(folder: Path, sanitizers: str) -> Path:
    compiler = [*find_compiler().command, *COMMON_FLAGS, "-O1", "-g", f"-fsanitize={sanitizers}", f"-I{SOURCES}"]
    if "undefined" in sanitizers:
        compiler.append("-fno-sanitize-recover=undefined")
    has = [f"-DCHATKV_HAS_{name.upper()}" for name in VARIANTS]
    units = [(SOURCES / name, has) for name in ("threads.cpp", "step.cpp", "library.cpp")] + [(DRIVER, [])]
    for name in VARIANTS:
        defines = [f"-DCHATKV_VARIANT={name}", f"-DCHATKV_{name.upper()}", *X86_VARIANTS[name]]
        units.append((SOURCES / VARIANT_SOURCE, defines))
    objects = []
    for number, (source, flags) in enumerate(units):
        objects.append(str(folder / f"{number}.o"))
        subprocess.run([*compiler, *flags, "-c", str(source), "-o", objects[-1]], check=True)
    subprocess.run([*compiler, *objects, "-o", str(folder / "driver"), "-pthread"], check=True)
    return folder / "driver"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names the instruction sets of x86-64")
@pytest.mark.parametrize("sanitizers", OPTIONS)
def test_nothing_is_found(tmp_path: Path, sanitizers: str) -> None:
    environment = {**os.environ, **OPTIONS[sanitizers]}
    answer = subprocess.run(
        [str(compiled(tmp_path, sanitizers))], env=environment, capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "", "")
