"""The thin layer over the operating system."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from chatkv.engine.store import files as files_module
from chatkv.engine.store.files import OsFile, OsFiles


@pytest.fixture
def file(any_folder: Path) -> OsFile:
    opened = OsFiles().open(any_folder / "f")
    assert isinstance(opened, OsFile)
    return opened


def content(file: OsFile, offset: int, length: int) -> bytes:
    into = bytearray(length)
    return bytes(into[: file.pread_into([into], offset)])


def test_files_are_private_and_closed_in_children(folder: Path) -> None:
    (folder / "f").touch(mode=0o644)
    (folder / "f").chmod(0o666)
    OsFiles().open(folder / "f")
    OsFiles().open(folder / "g")
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    ours = [fd for fd in descriptors if os.path.exists(f"/proc/self/fd/{fd}") and _is_in(fd, folder)]
    assert ours
    assert not any(os.get_inheritable(fd) for fd in ours)


def _is_in(fd: int, folder: Path) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))


def test_parts_are_written_and_read_one_after_the_other(file: OsFile) -> None:
    file.pwrite([b"abc", bytearray(b"de"), memoryview(b"f")], 10)
    first, second = bytearray(2), bytearray(10)
    assert file.pread_into([first, second], 10) == 6
    assert bytes(first + second[:4]) == b"abcdef"


def test_more_parts_than_one_call_takes(file: OsFile) -> None:
    numbers = bytes(range(256)) * 10
    file.pwrite([numbers[i : i + 1] for i in range(len(numbers))], 0)
    parts = [bytearray(1) for _ in numbers]
    assert file.pread_into(parts, 0) == len(numbers)
    assert b"".join(parts) == numbers


def test_a_write_that_is_cut_short_goes_on(file: OsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, parts, offset: real(fd, [parts[0][:3]], offset))
    file.pwrite([b"0123456", b"789"], 5)
    assert content(file, 5, 20) == b"0123456789"


def test_a_read_ends_at_the_end_of_the_file(file: OsFile) -> None:
    file.pwrite([b"abc"], 0)
    assert file.pread_into([bytearray(10)], 1) == 2
    assert file.pread_into([bytearray(10)], 100) == 0


def test_punching_gives_the_range_back(file: OsFile) -> None:
    file.pwrite([b"x" * 65536], 0)
    file.datasync()
    before = file.allocated_bytes
    file.punch(8192, 32768)
    file.datasync()
    assert file.allocated_bytes <= before - 32768
    assert content(file, 0, 65536) == b"x" * 8192 + bytes(32768) + b"x" * (65536 - 8192 - 32768)
    assert file.size == 65536
    assert file.data_ranges() == [(0, 8192), (40960, 65536)]


def test_where_holes_cannot_be_punched_zeros_are_written(file: OsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no holes here")

    monkeypatch.setattr(files_module, "_fallocate", refuse)
    file.pwrite([b"x" * 3_000_000], 0)
    file.punch(1000, 2_000_000)
    assert content(file, 0, 3_000_000) == b"x" * 1000 + bytes(2_000_000) + b"x" * 999_000
    file.punch(2_999_000, 5000)
    assert file.size == 3_000_000


def test_other_failures_of_a_punch_are_told(file: OsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(files_module, "_fallocate", fail)
    with pytest.raises(OSError, match="broken"):
        file.punch(0, 4096)


def test_every_allocated_byte_of_a_directory_counts(any_folder: Path) -> None:
    (any_folder / "below").mkdir()
    for path in (any_folder / "a", any_folder / "below" / "b"):
        path.write_bytes(b"x" * 10_000)
    with open(any_folder / "sparse", "wb") as sparse:
        sparse.truncate(1 << 30)
    paths = [any_folder, *any_folder.rglob("*")]
    counted = OsFiles().allocated_bytes(any_folder)
    assert counted == sum(path.lstat().st_blocks * 512 for path in paths)
    assert 20_000 < counted < 1 << 20
    assert OsFiles().allocated_bytes(any_folder / "missing") == 0
