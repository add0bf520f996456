"""On which device a model runs: "auto", "cuda" or "cpu", which card, and in plain words why not another."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import Literal, TypeAlias

from .device_facts import Card, Driver, System, Version, read_system

DeviceWish: TypeAlias = Literal["auto", "cuda", "cpu"]
LOWEST_CAPABILITY = (8, 0)
ASSEMBLED_ANEW_FROM = (9, 0)
"""Compute capability from which Triton's binaries come from its newer assembler."""
DRIVER_OF_CUDA = {11: "450", 12: "525", 13: "580"}
"""CUDA's major version -> the oldest driver on Linux that runs it."""
SUPPORTED = "compute capability 8.0 or higher: RTX 30, 40 and 50, A100, and newer ones"
HOW_TO_CHOOSE = "gpu = N in the settings, or CUDA_VISIBLE_DEVICES, chooses another"
COMPILER_PACKAGES = "sudo apt install gcc (Debian, Ubuntu), sudo dnf install gcc (Fedora) or sudo pacman -S gcc (Arch)"
HEADER_PACKAGES = "sudo apt install python3-dev (Debian, Ubuntu) or sudo dnf install python3-devel (Fedora)"
NEWER_DRIVER = "with the system's own driver tool, or from nvidia.com, and restart"
_BINARY_REFUSED = ("kernel image", "unsupported toolchain", "invalid ptx", "ptx was compiled")


class DeviceError(Exception):
    """The device asked for cannot be had."""

    def __init__(self, message: str, hint: str):
        super().__init__(f"{message}\n{hint}")
        self.message = message
        """What is wrong: a sentence."""
        self.hint = hint
        """What to do: a sentence."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where a model runs, and what a person should know of it."""

    card: Card | None
    """None: the CPU."""
    note: str = ""
    """Why the CPU when "auto" was asked, or why this card of several; a sentence, or empty."""
    warning: str = ""
    """What may go wrong with it all the same; a sentence, or empty."""
    is_surprising: bool = False
    """There is a GPU, and yet it is the CPU."""

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.card else "cpu"


def choose_device(wanted: DeviceWish, gpu: int | None = None, system: System | None = None) -> DeviceChoice:
    """`gpu`: index of the card to use; None: the one with most free memory. `system`: None reads this machine.

    Raises DeviceError when "cuda" is wanted and cannot be had; "auto" then takes the CPU and says why.
    """
    if wanted == "cpu":
        return DeviceChoice(None)
    system = system or read_system()
    if wanted == "auto" and system.torch.is_rocm:
        return DeviceChoice(
            None,
            "It runs on the CPU: this torch is built for ROCm, on which chatkv's GPU kernels were compiled but never "
            'run. device = "cuda" tries them.',
            is_surprising=bool(system.cards),
        )
    try:
        return _choose_card(system, gpu)
    except DeviceError as error:
        if wanted == "cuda":
            raise
        hint = f" {error.hint}" if system.has_nvidia_hardware else ""
        return DeviceChoice(None, on_the_cpu(f"{error.message}{hint}"), is_surprising=system.has_nvidia_hardware)


def on_the_cpu(reason: str) -> str:
    """`reason`: sentences. Names and abbreviations keep their capitals after the colon."""
    first, _, rest = reason.partition(" ")
    first = first.lower() if first in {"Another", "No", "One", "The", "There", "This"} else first
    return f"It runs on the CPU: {first} {rest}"


def explain_launch_error(error: BaseException, card: Card, system: System | None = None) -> DeviceError | None:
    """What a failed first launch on `card` means, where a person can do something about it; else None."""
    text = f"{type(error).__name__}: {error}".lower()
    if any(words in text for words in _BINARY_REFUSED):
        system = system or read_system()
        return _binary_refused(card, system)
    if "failed to find c compiler" in text:
        return _no_compiler()
    if isinstance(error, subprocess.CalledProcessError) or "python.h" in text:
        return DeviceError(
            f"The C compiler could not build what Triton needs to reach {card.name}: {error}.",
            f"Check that a C compiler and Python's headers are installed: {COMPILER_PACKAGES}; {HEADER_PACKAGES}.",
        )
    return None


def _choose_card(system: System, gpu: int | None) -> DeviceChoice:
    _check_system(system)
    cards = {card.index: card for card in system.cards}
    if gpu is not None and gpu not in cards:
        raise DeviceError(
            f"There is no GPU {gpu}: {_listed(system.cards)}.", "Set gpu to one of these, or leave it out."
        )
    usable = [card for card in system.cards if card.capability >= LOWEST_CAPABILITY]
    if not usable or (gpu is not None and cards[gpu] not in usable):
        card = system.cards[0] if gpu is None else cards[gpu]
        raise DeviceError(
            f"{card.name} has compute capability {_dotted(card.capability)}: chatkv's GPU kernels do not run on it.",
            f'They need {SUPPORTED}. device = "cpu" runs on the CPU.',
        )
    card = max(usable, key=lambda card: (card.free_bytes, -card.index)) if gpu is None else cards[gpu]
    note = ""
    if len(system.cards) > 1:
        how = "which has most free memory" if gpu is None else "as set"
        note = (
            f"Of {len(system.cards)} GPUs ({_listed(system.cards)}) it uses GPU {card.index}, {how}; {HOW_TO_CHOOSE}."
        )
    return DeviceChoice(card, note, _warning(card, system))


def _check_system(system: System) -> None:
    """Raises DeviceError when no card at all can be used."""
    build, driver = system.torch, system.driver
    if not build.is_rocm:
        if not system.has_nvidia_hardware and not system.cards:
            raise DeviceError("No NVIDIA GPU was found.", 'device = "cpu" runs on the CPU.')
        if build.cuda is None:
            version = build.version.partition("+")[0]
            raise DeviceError(
                f"This torch ({build.version}) is built for the CPU only.",
                f"Install its CUDA build: pip install --force-reinstall torch=={version} --index-url "
                "https://pypi.org/simple",
            )
        if driver is None:
            raise DeviceError(
                "There is an NVIDIA GPU, but no driver for it.",
                f"Install NVIDIA's driver, version {_driver_for(build.cuda)} or newer, {NEWER_DRIVER}.",
            )
        if driver.cuda[0] < build.cuda[0]:
            raise DeviceError(
                f"{_named(driver)} is too old for this torch, which is built for CUDA {_dotted(build.cuda)}.",
                f"Install version {_driver_for(build.cuda)} or newer, {NEWER_DRIVER}.",
            )
    if not system.cards:
        if system.visible_devices is not None and system.visible_devices.strip() in ("", "-1"):
            raise DeviceError(
                f'CUDA_VISIBLE_DEVICES="{system.visible_devices}" hides every GPU.', "Unset it, or name a GPU in it."
            )
        said = f": {system.cards_error.splitlines()[0].rstrip('.')}" if system.cards_error else ""
        raise DeviceError(
            f"The driver is there, but torch finds no GPU{said}.",
            "After an update of the driver the machine must be restarted; a container must be given the GPUs "
            "(docker run --gpus all). Compare with nvidia-smi.",
        )
    if not system.has_triton:
        raise DeviceError(
            "Triton, which runs chatkv's GPU kernels, is not installed.", "Install it: pip install triton"
        )
    if system.c_compiler is None:
        raise _no_compiler()
    if not system.has_python_headers:
        raise DeviceError(
            "Python's C headers (Python.h) are missing, and Triton needs them at the first start on a GPU.",
            f"Install them: {HEADER_PACKAGES}; of the Python that runs chatkv.",
        )


def _no_compiler() -> DeviceError:
    return DeviceError(
        "There is no C compiler, and Triton needs one at the first start on a GPU.",
        f"Install one: {COMPILER_PACKAGES}; or name yours in CC.",
    )


def _warning(card: Card, system: System) -> str:
    if system.torch.is_rocm:
        return "This torch is built for ROCm: chatkv's GPU kernels were compiled for it but never run there."
    driver, assembler = system.driver, system.assembler_cuda
    if driver and assembler and card.capability >= ASSEMBLED_ANEW_FROM and driver.cuda[0] < assembler[0]:
        return (
            f"{_named(driver)} may refuse kernels for {card.name}, which are assembled with CUDA {_dotted(assembler)}: "
            f"if so, install version {_driver_for(assembler)} or newer."
        )
    return ""


def _binary_refused(card: Card, system: System) -> DeviceError:
    needed = [version for version in (system.torch.cuda,) if version]
    if system.assembler_cuda and card.capability >= ASSEMBLED_ANEW_FROM:
        needed.append(system.assembler_cuda)
    version = _driver_for(max(needed)) if needed else "580"
    driver = _named(system.driver) if system.driver else "The NVIDIA driver"
    return DeviceError(
        f"{driver} refuses the kernels that were compiled for {card.name} "
        f"(compute capability {_dotted(card.capability)}).",
        f'Install version {version} or newer, {NEWER_DRIVER}. Until then device = "cpu" runs on the CPU.',
    )


def _driver_for(cuda: Version) -> str:
    return DRIVER_OF_CUDA.get(cuda[0], DRIVER_OF_CUDA[max(DRIVER_OF_CUDA)])


def _named(driver: Driver) -> str:
    version = f" {driver.version}" if driver.version else ""
    return f"The NVIDIA driver{version} (CUDA {_dotted(driver.cuda)})"


def _listed(cards: tuple[Card, ...]) -> str:
    return ", ".join(f"{card.index}: {card.name}, {card.free_bytes / (1 << 30):.1f} GiB free" for card in cards)


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
