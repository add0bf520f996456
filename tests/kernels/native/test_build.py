"""Compiling the native library: once, whole, and with a clear word where it cannot be."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chatkv.kernels.cpu.native import build, library
from chatkv.kernels.cpu.native.build import NoCompilerError, built_library, find_compiler
from tests.running_service import ROOT


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache" / "kernels"
    monkeypatch.setenv(build.CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def quick_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile at once."""
    folder = tmp_path / "src"
    folder.mkdir()
    for name in (*build.COMMON_SOURCES, build.VARIANT_SOURCE):
        (folder / name).write_text("")
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


def compiler_script(folder: Path, text: str) -> str:
    file = folder / "compiler"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_it_is_compiled_once(cache: Path, quick_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = built_library()
    assert [file] == list(cache.iterdir())
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700

    def fail(*_: object) -> None:
        raise AssertionError("it was there already")

    monkeypatch.setattr(build, "compile_library", fail)
    assert built_library() == file


def test_other_sources_other_flags_other_library(cache: Path, quick_sources: Path) -> None:
    first = built_library()
    assert built_library(["-O1"]) != first
    (quick_sources / "step.cpp").write_text("// changed\n")
    assert built_library() != first


def test_several_at_once_leave_one_whole_library(cache: Path, quick_sources: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        files = set(pool.map(lambda _: built_library(), range(4)))
    assert list(cache.iterdir()) == list(files)


def test_a_library_outlives_its_compiler(cache: Path, quick_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = built_library()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    assert built_library() == file


def test_what_killed_compilations_and_old_versions_left_is_swept(cache: Path, quick_sources: Path) -> None:
    fresh, stale, old = cache / "build-fresh", cache / "build-stale", cache / "chatkv_cpu-x-0.so"
    for path in (fresh, stale):
        path.mkdir(parents=True)
        (path / "one.o").write_text("")
    old.write_text("")
    os.utime(stale, (0, 0))
    os.utime(old, (0, 0))
    file = built_library()
    assert set(cache.iterdir()) == {file, fresh}


def test_without_a_compiler_it_says_what_to_install(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(NoCompilerError, match="install g\\+\\+"):
        built_library()


def test_a_compiler_that_fails_leaves_nothing_and_is_quoted(
    cache: Path, quick_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (quick_sources / "step.cpp").write_text("#error no such thing\n")
    with pytest.raises(NoCompilerError, match="no such thing"):
        built_library()
    assert list(cache.iterdir()) == []


def test_a_compiler_that_cannot_run_is_no_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler_script(tmp_path, "exit 3"))
    with pytest.raises(NoCompilerError, match="no C\\+\\+ compiler"):
        built_library()


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, quick_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(build.CACHE_VARIABLE, str(tmp_path / "file" / "kernels"))
    with pytest.raises(NoCompilerError, match="could not be stored in"):
        built_library()


def test_a_compiler_without_a_version_is_no_compiler(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler_script(tmp_path, "exit 0"))
    with pytest.raises(NoCompilerError, match="no C\\+\\+ compiler"):
        built_library()


@pytest.fixture
def plain_library(quick_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of `quick_sources` have no functions: they are loaded, and no more."""
    monkeypatch.setattr(library, "NativeLibrary", lambda file: ctypes.CDLL(str(file)))


def test_a_damaged_library_is_compiled_anew(cache: Path, plain_library: None) -> None:
    file = built_library()
    file.write_bytes(b"damaged")
    assert library.native_library.__wrapped__() is not None
    assert [file] == list(cache.iterdir())
    assert file.read_bytes().startswith(b"\x7fELF")


def test_a_wheels_library_that_does_not_load_here_is_done_without(
    cache: Path, plain_library: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prebuilt.so").write_bytes(b"for another system")
    monkeypatch.setattr(library, "prebuilt_library", lambda: tmp_path / "prebuilt.so")
    assert library.native_library.__wrapped__() is not None


def test_libraries_that_never_load_are_said_so(
    cache: Path, quick_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path) -> None:
        raise OSError(f"{file}: failed to map segment from shared object")

    monkeypatch.setattr(library, "NativeLibrary", refuse)
    with pytest.raises(NoCompilerError, match=r"cannot be loaded: .*failed to map segment"):
        library.native_library.__wrapped__()


@pytest.mark.slow
def test_a_wheel_brings_its_kernels_and_needs_no_compiler(tmp_path: Path) -> None:
    find_compiler()
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(clone), "--wheel-dir", str(tmp_path)]
    subprocess.run(command, check=True, timeout=280)
    [wheel] = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    site = str(tmp_path / "site")
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", site, str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": site, "PATH": "", build.CACHE_VARIABLE: "/nowhere"}
    program = (
        "import chatkv.kernels.cpu.native.library as library;print(library.__file__, library.native_library().variants)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert site in answer.stdout
    assert "scalar" in answer.stdout
