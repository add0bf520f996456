"""On what a model runs, and in what words it is said that it cannot: machines are made up, no GPU is needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from chatkv.kernels import device_facts
from chatkv.kernels.device_facts import Card, Driver, System, TorchBuild, read_system
from chatkv.kernels.devices import DeviceError, choose_device, explain_launch_error

GIB = 1 << 30
RTX_3060 = Card(0, "NVIDIA GeForce RTX 3060", (8, 6), 12 * GIB, 11 * GIB, has_display=True)
RTX_4090 = Card(1, "NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB, 23 * GIB, has_display=False)
RTX_5090 = Card(0, "NVIDIA GeForce RTX 5090", (12, 0), 32 * GIB, 31 * GIB, has_display=None)
RTX_2080 = Card(0, "NVIDIA GeForce RTX 2080", (7, 5), 8 * GIB, 7 * GIB, has_display=True)
GOOD = System(
    torch=TorchBuild("2.13.0", (13, 0)),
    driver=Driver("580.65.06", (13, 0)),
    cards=(RTX_3060,),
    has_nvidia_hardware=True,
    c_compiler="/usr/bin/gcc",
    has_python_headers=True,
    assembler_cuda=(13, 4),
)
NO_GPU = System(torch=TorchBuild("2.13.0+cpu", None))


def refusal(system: System, gpu: int | None = None) -> str:
    """What `cuda` is told; `auto` must take the CPU and give the same reason."""
    with pytest.raises(DeviceError) as caught:
        choose_device("cuda", gpu, system)
    choice = choose_device("auto", gpu, system)
    assert choice.device == "cpu"
    assert caught.value.message.partition(" ")[2] in choice.note
    assert choice.is_surprising == system.has_nvidia_hardware
    return str(caught.value)


def test_one_good_card_is_used_without_a_word() -> None:
    for wanted in ("auto", "cuda"):
        choice = choose_device(wanted, system=GOOD)
        assert (choice.device, choice.card, choice.note, choice.warning) == ("cuda", RTX_3060, "", "")
    assert choose_device("cpu", system=GOOD).device == "cpu"


def test_no_gpu_at_all() -> None:
    assert "No NVIDIA GPU was found." in refusal(NO_GPU)
    assert choose_device("auto", system=NO_GPU).note == "It runs on the CPU: no NVIDIA GPU was found."
    assert choose_device("cpu", system=NO_GPU).note == ""


def test_a_torch_for_the_cpu_is_told_how_to_be_replaced() -> None:
    said = refusal(replace(GOOD, torch=TorchBuild("2.13.0+cpu", None), cards=()))
    assert "This torch (2.13.0+cpu) is built for the CPU only." in said
    assert "pip install --force-reinstall torch==2.13.0 --index-url https://pypi.org/simple" in said


def test_no_driver_names_the_version_to_install() -> None:
    said = refusal(replace(GOOD, driver=None, cards=()))
    assert "no driver" in said
    assert "version 580 or newer" in said
    older = replace(GOOD, torch=TorchBuild("2.11.0+cu128", (12, 8)), driver=None, cards=())
    assert "version 525 or newer" in refusal(older)


def test_a_driver_too_old_for_torch() -> None:
    said = refusal(replace(GOOD, driver=Driver("535.183.01", (12, 2)), cards=(), cards_error="driver too old"))
    assert "The NVIDIA driver 535.183.01 (CUDA 12.2) is too old for this torch, which is built for CUDA 13.0." in said
    assert "version 580 or newer" in said


def test_a_driver_of_the_same_major_version_is_new_enough() -> None:
    build = TorchBuild("2.11.0+cu128", (12, 8))
    system = replace(GOOD, torch=build, driver=Driver("535.183.01", (12, 2)))
    assert choose_device("cuda", system=system).device == "cuda"


def test_a_driver_that_may_refuse_the_assemblers_binaries_is_a_warning_on_new_cards_only() -> None:
    build, driver = TorchBuild("2.11.0+cu128", (12, 8)), Driver("570.86.10", (12, 8))
    old_driver = replace(GOOD, torch=build, driver=driver)
    assert choose_device("cuda", system=old_driver).warning == ""
    choice = choose_device("cuda", system=replace(old_driver, cards=(RTX_5090,)))
    assert choice.card == RTX_5090
    assert "570.86.10 (CUDA 12.8) may refuse kernels for NVIDIA GeForce RTX 5090" in choice.warning
    assert "install version 580 or newer" in choice.warning


def test_cards_hidden_by_the_environment() -> None:
    for value in ("", "-1"):
        said = refusal(replace(GOOD, cards=(), visible_devices=value))
        assert f'CUDA_VISIBLE_DEVICES="{value}" hides every GPU. ' in said.replace("\n", " ")


def test_what_cuda_said_is_passed_on() -> None:
    said = refusal(replace(GOOD, cards=(), cards_error="CUDA driver version mismatch.\nlong trace"))
    assert "torch finds no GPU: CUDA driver version mismatch." in said
    assert "long trace" not in said
    assert "restarted" in said
    assert "--gpus all" in said


def test_no_compiler_names_the_package() -> None:
    said = refusal(replace(GOOD, c_compiler=None))
    assert "no C compiler" in said
    assert "apt install gcc" in said
    assert "apt install python3-dev" in refusal(replace(GOOD, has_python_headers=False))


def test_no_triton() -> None:
    assert "pip install triton" in refusal(replace(GOOD, has_triton=False))


def test_a_card_below_8_0_says_what_is_supported() -> None:
    said = refusal(replace(GOOD, cards=(RTX_2080,)))
    assert "RTX 2080 has compute capability 7.5" in said
    assert "8.0 or higher" in said
    both = replace(GOOD, cards=(replace(RTX_2080, index=1), replace(RTX_3060, free_bytes=GIB)))
    assert choose_device("cuda", system=both).card == both.cards[1], "a usable card comes before a larger one"
    assert "RTX 2080 has compute capability 7.5" in refusal(both, gpu=1)


def test_of_two_cards_the_one_with_most_free_memory() -> None:
    system = replace(GOOD, cards=(RTX_3060, RTX_4090))
    choice = choose_device("auto", system=system)
    assert choice.card == RTX_4090
    assert choice.note == (
        "Of 2 GPUs (0: NVIDIA GeForce RTX 3060, 11.0 GiB free, 1: NVIDIA GeForce RTX 4090, 23.0 GiB free) it uses GPU "
        "1, which has most free memory; gpu = N in the settings, or CUDA_VISIBLE_DEVICES, chooses another."
    )
    busy = replace(GOOD, cards=(RTX_3060, replace(RTX_4090, free_bytes=GIB)))
    assert choose_device("auto", system=busy).card == RTX_3060
    chosen = choose_device("cuda", 0, system)
    assert chosen.card == RTX_3060
    assert "it uses GPU 0, as set;" in chosen.note
    alike = replace(GOOD, cards=(replace(RTX_4090, index=0), RTX_4090))
    assert choose_device("auto", system=alike).card == alike.cards[0], "the same card at every start"


def test_a_card_that_is_not_there_lists_those_that_are() -> None:
    said = refusal(GOOD, gpu=3)
    assert "There is no GPU 3: 0: NVIDIA GeForce RTX 3060, 11.0 GiB free." in said


def test_rocm_is_never_chosen_alone_and_is_said_to_be_untested() -> None:
    card = Card(0, "AMD Radeon RX 7900 XTX", (11, 0), 24 * GIB, 23 * GIB)
    system = replace(GOOD, torch=TorchBuild("2.13.0+rocm7.1", None, True), driver=None, cards=(card,))
    choice = choose_device("auto", system=system)
    assert choice.device == "cpu"
    assert "ROCm" in choice.note
    asked = choose_device("cuda", system=system)
    assert asked.card == card
    assert "never run" in asked.warning


def test_failed_launches_are_explained() -> None:
    refused = RuntimeError("Triton Error [CUDA]: device kernel image is invalid")
    old_driver = replace(GOOD, torch=TorchBuild("2.11.0+cu128", (12, 8)), driver=Driver("570.86.10", (12, 8)))
    said = str(explain_launch_error(refused, RTX_5090, old_driver))
    assert "driver 570.86.10 (CUDA 12.8) refuses the kernels" in said
    assert "version 580 or newer" in said
    assert "version 525 or newer" in str(explain_launch_error(refused, RTX_3060, old_driver))
    missing = RuntimeError("Failed to find C compiler. Please specify via CC environment variable")
    assert "apt install gcc" in str(explain_launch_error(missing, RTX_3060, GOOD))
    broken = subprocess.CalledProcessError(1, ["gcc", "main.c"])
    assert "python3-dev" in str(explain_launch_error(broken, RTX_3060, GOOD))
    assert explain_launch_error(ValueError("a bug of ours"), RTX_3060, GOOD) is None


SMI = """GPU-aaaa-1, 11264, 580.65.06, Enabled
GPU-bbbb-2, [N/A], 580.65.06, Disabled
GPU-cccc-3, 100, 580.65.06, [N/A]
a line of another kind
"""


def test_what_nvidia_smi_prints_is_understood() -> None:
    rows = device_facts._nvidia_smi(lambda command: SMI)
    assert rows["aaaa-1"] == (11 * GIB, "580.65.06", True)
    assert rows["bbbb-2"] == (None, "580.65.06", False)
    assert rows["cccc-3"] == (100 << 20, "580.65.06", None)
    assert len(rows) == 3


class FakeCuda:
    """`torch.cuda`, as far as it is asked."""

    class Properties:
        name, major, minor, total_memory, uuid = "NVIDIA A100", 8, 0, 80 * GIB, "AAAA-1"

    def get_device_properties(self, index: int) -> Properties:
        return self.Properties()

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 70 * GIB, 80 * GIB


def test_memory_is_asked_of_nvidia_smi_and_of_cuda_only_without_it() -> None:
    told = device_facts._card(FakeCuda(), 0, device_facts._nvidia_smi(lambda command: SMI))
    assert (told.free_bytes, told.has_display, told.has_context) == (11 * GIB, True, False)
    alone = device_facts._card(FakeCuda(), 0, {})
    assert (alone.free_bytes, alone.has_display, alone.has_context) == (70 * GIB, None, True)


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 10)])
def test_reading_this_machine_never_fails(error: Exception) -> None:
    def run(command: Sequence[str]) -> str:
        raise error

    system = read_system(run)
    assert system.torch.version
    assert choose_device("auto", system=system).device in ("cpu", "cuda")


def test_looking_for_devices_does_not_load_triton() -> None:
    code = """
import sys
import chatkv.kernels.devices
from chatkv.kernels.devices import choose_device
choose_device("cpu")
assert "triton" not in sys.modules
choose_device("auto")
assert "triton" not in sys.modules, "it costs a noticeable part of the start"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
