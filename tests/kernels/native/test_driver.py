"""A small model in C++ alone: under sanitizers, and on an emulated Arm processor."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from chatkv.kernels.cpu.native.build import (
    ARM_VARIANTS,
    COMMON_FLAGS,
    COMMON_SOURCES,
    SOURCES,
    VARIANT_SOURCE,
    X86_VARIANTS,
    find_compiler,
)

DRIVER = Path(__file__).parent / "driver.cpp"
X86 = {name: X86_VARIANTS[name] for name in ("scalar", "avx2")}
OPTIONS = {
    "thread": {"TSAN_OPTIONS": "halt_on_error=1"},
    "address,undefined": {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
}
ARM_COMPILER, ARM_EMULATOR = "CHATKV_ARM_CXX", "CHATKV_ARM_EMULATOR"
"""Commands, where they are not found by themselves."""
ZIG_NEON = ("-mcpu=generic+v8_2a+dotprod+fullfp16",)
"""Zig names processors where other compilers name architectures."""


def compiled(
    folder: Path, compiler: Sequence[str], variants: Mapping[str, tuple[str, ...]], extra_flags: Sequence[str] = ()
) -> Path:
    folder.mkdir(exist_ok=True)
    command = [*compiler, *COMMON_FLAGS, f"-I{SOURCES}", *extra_flags]  # of two levels of optimisation the last counts
    has = [f"-DCHATKV_HAS_{name.upper()}" for name in variants]
    units = [(SOURCES / name, has) for name in COMMON_SOURCES] + [(DRIVER, [])]
    for name, flags in variants.items():
        units.append((SOURCES / VARIANT_SOURCE, [f"-DCHATKV_VARIANT={name}", f"-DCHATKV_{name.upper()}", *flags]))
    objects = []
    for number, (source, flags) in enumerate(units):
        objects.append(str(folder / f"{number}.o"))
        subprocess.run([*command, *flags, "-c", str(source), "-o", objects[-1]], check=True)
    subprocess.run([*command, *objects, "-o", str(folder / "driver"), "-pthread"], check=True)
    return folder / "driver"


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    answer = subprocess.run(command, env={**os.environ, **(environment or {})}, capture_output=True, text=True)
    assert (answer.returncode, answer.stderr) == (0, ""), answer.stdout + answer.stderr
    return answer.stdout


def found_command(variable: str, candidates: Sequence[Sequence[str]]) -> list[str] | None:
    if wanted := os.environ.get(variable):
        return shlex.split(wanted)
    return next((list(command) for command in candidates if shutil.which(command[0])), None)


@pytest.mark.slow
@pytest.mark.timeout(900)  # compiling takes several times as long beside other work
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names the instruction sets of x86-64")
@pytest.mark.parametrize("sanitizers", OPTIONS)
def test_sanitizers_find_nothing(tmp_path: Path, sanitizers: str) -> None:
    flags = ["-O1", "-g", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    driver = compiled(tmp_path / "driver", find_compiler().command, X86, flags)
    assert len(output_of([str(driver)], OPTIONS[sanitizers]).split()) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)  # compiling takes several times as long beside other work
@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates the other architecture")
def test_an_arm_processor_computes_the_same_bits(tmp_path: Path) -> None:
    emulator = found_command(ARM_EMULATOR, [["qemu-aarch64"], ["qemu-aarch64-static"]])
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]
    compilers = [["aarch64-linux-gnu-g++", "-static"]] + ([zig] if find_spec("ziglang") else [])
    compiler = found_command(ARM_COMPILER, compilers)
    if emulator is None or compiler is None:
        pytest.skip(f"needs qemu-aarch64 and a cross compiler (PATH, or {ARM_EMULATOR} and {ARM_COMPILER})")
    neon = ZIG_NEON if "zig" in " ".join(compiler) else ARM_VARIANTS["neon"]
    on_arm = compiled(tmp_path / "arm", compiler, ARM_VARIANTS | {"neon": neon})
    on_x86 = compiled(tmp_path / "x86", find_compiler().command, X86)
    digests = output_of([str(on_x86)])
    assert len(digests.split()) == 2
    assert output_of([*emulator, str(on_arm)]) == digests
