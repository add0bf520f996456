"""What a machine has for running models: cards, driver, the build of torch, a C compiler. Read without ever failing.

Memory and display are asked of nvidia-smi first: torch can tell the free memory of a card only by making a context on
it, which takes hundreds of megabytes of each card that is looked at.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ASK_TIMEOUT_S = 10.0
"""nvidia-smi needs seconds when it has to wake a card."""
NVIDIA_VENDOR = "0x10de"
DISPLAY_CLASS = "0x03"
"""PCI class of anything that draws or computes like a graphics card."""

Version = tuple[int, int]
RunCommand = Callable[[Sequence[str]], str]


class TorchBuild(NamedTuple):
    version: str
    cuda: Version | None
    """Toolkit that it was built with; None: no CUDA in it."""
    is_rocm: bool = False


class Driver(NamedTuple):
    """NVIDIA's driver."""

    version: str
    """Such as "580.65.06"; empty where only the CUDA version is known."""
    cuda: Version
    """Newest CUDA that it runs."""


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU, by torch's numbering: what CUDA_VISIBLE_DEVICES hides does not count."""

    index: int
    name: str
    capability: Version
    """CUDA compute capability."""
    total_bytes: int
    free_bytes: int
    has_display: bool | None = None
    """A desktop draws on it; None: not known."""
    has_context: bool = False
    """`free_bytes` was measured from within this process, so its own CUDA context is in it already."""


@dataclass(frozen=True, slots=True)
class System:
    """Everything that decides on what a model can run."""

    torch: TorchBuild
    driver: Driver | None = None
    cards: tuple[Card, ...] = ()
    cards_error: str = ""
    """What CUDA said instead of naming cards."""
    has_nvidia_hardware: bool = False
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES."""
    c_compiler: str | None = None
    has_python_headers: bool = False
    has_triton: bool = True
    assembler_cuda: Version | None = None
    """CUDA version of the assembler that Triton uses for compute capability 9.0 and up."""


class _Row(NamedTuple):
    """What nvidia-smi says of a card."""

    free_bytes: int | None
    driver_version: str
    has_display: bool | None


def read_system(run: RunCommand | None = None) -> System:
    """Look at this machine. Imports torch. `run` runs a command and gives what it printed."""
    _give_back_unused()
    rows = _nvidia_smi(run or _run)
    build = _torch_build()
    driver = _driver({row.driver_version for row in rows.values()})
    cards, error = _cards(build, rows)
    return System(
        torch=build,
        driver=driver,
        cards=cards,
        cards_error=error,
        has_nvidia_hardware=driver is not None or _has_nvidia_hardware(Path("/sys/bus/pci/devices")),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        c_compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        has_python_headers=(Path(sysconfig.get_paths(_header_scheme())["include"]) / "Python.h").is_file(),
        has_triton=importlib.util.find_spec("triton") is not None,
        assembler_cuda=_assembler_cuda(run or _run),
    )


def measured(card: Card) -> Card:
    """The card with its memory as of now. Makes this process's CUDA context on it, if there is none."""
    import torch

    _give_back_unused()
    free_bytes, total_bytes = torch.cuda.mem_get_info(card.index)
    return Card(card.index, card.name, card.capability, total_bytes, free_bytes, card.has_display, has_context=True)


def _give_back_unused() -> None:
    """What a model that is gone has left in torch's hands counts as free."""
    import torch

    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True).stdout


def _torch_build() -> TorchBuild:
    import torch

    return TorchBuild(torch.__version__, _version(torch.version.cuda), torch.version.hip is not None)


def _nvidia_smi(run: RunCommand) -> Mapping[str, _Row]:
    """UUID -> what is said of that card; empty where there is no such program, or it fails."""
    query = "--query-gpu=uuid,memory.free,driver_version,display_active"
    try:
        printed = run(["nvidia-smi", query, "--format=csv,noheader,nounits"])
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = {}
    for line in printed.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 4:
            continue
        uuid, free, version, display = fields
        has_display = {"Enabled": True, "Disabled": False}.get(display)
        rows[_bare(uuid)] = _Row(int(free) << 20 if free.isdecimal() else None, version, has_display)
    return rows


def _cards(build: TorchBuild, rows: Mapping[str, _Row]) -> tuple[tuple[Card, ...], str]:
    """The cards that torch sees, and why it sees none."""
    if build.cuda is None and not build.is_rocm:
        return (), ""
    import torch

    try:
        torch.cuda.init()
        return tuple(_card(torch.cuda, index, rows) for index in range(torch.cuda.device_count())), ""
    except Exception as error:  # RuntimeError, AssertionError, torch's own: whatever it is, there is no card to use.
        return (), str(error).strip() or type(error).__name__


def _card(cuda: Any, index: int, rows: Mapping[str, _Row]) -> Card:
    properties = cuda.get_device_properties(index)
    row = rows.get(_bare(str(getattr(properties, "uuid", ""))), _Row(None, "", None))
    has_context = row.free_bytes is None
    free_bytes = cuda.mem_get_info(index)[0] if row.free_bytes is None else row.free_bytes
    capability = (properties.major, properties.minor)
    return Card(index, properties.name, capability, properties.total_memory, free_bytes, row.has_display, has_context)


def _driver(versions: set[str]) -> Driver | None:
    """By asking the driver's library itself, which needs neither a card nor torch."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(number)) != 0 or number.value <= 0:
            return None
    except (OSError, AttributeError):
        return None
    cuda = number.value // 1000, number.value % 1000 // 10
    return Driver(next((version for version in sorted(versions) if version), _kernel_module_version()), cuda)


def _kernel_module_version() -> str:
    try:
        found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", Path("/proc/driver/nvidia/version").read_text("ascii"))
    except (OSError, ValueError):
        return ""
    return found[1] if found else ""


def _has_nvidia_hardware(devices: Path) -> bool:
    return any(
        _word(path / "vendor") == NVIDIA_VENDOR and _word(path / "class")[:4] == DISPLAY_CLASS
        for path in _children(devices)
    )


def _children(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from folder.iterdir()


def _word(file: Path) -> str:
    try:
        return file.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def _header_scheme() -> str:
    """Where Triton looks: Debian's own scheme names a folder that its packages do not fill."""
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme


def _assembler_cuda(run: RunCommand) -> Version | None:
    """Without importing triton, which takes a noticeable time."""
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        tool = Path(folder) / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            found = re.search(r"release (\d+\.\d+)", run([str(tool), "--version"]))
            return _version(found[1]) if found else None
    return None


def _version(text: str | None) -> Version | None:
    found = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


def _bare(uuid: str) -> str:
    """nvidia-smi and torch spell it with and without a prefix."""
    return uuid.removeprefix("GPU-").lower()
