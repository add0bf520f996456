"""What the card can do, measured first: every other figure is a share of these."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .bench_device import BenchDevice
from .results import Results

_COPY_BYTES, _DRY_COPY_BYTES = 1 << 30, 1 << 20
_MATRIX_SIZE, _DRY_MATRIX_SIZE = 8192, 64
_LINK_BYTES, _DRY_LINK_BYTES = 256 << 20, 1 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes and operations a second."""

    copy_bytes_per_s: float
    """Read and written ones together."""
    matrix_flops: float
    """bf16."""
    fp8_flops: float | None
    """None: the card, or torch, does not multiply e4m3."""
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float


def measure_machine(bench: BenchDevice, results: Results) -> Machine:
    with results.section("machine"):
        machine = Machine(
            _copy_rate(bench),
            _matrix_rate(bench),
            _fp8_rate(bench),
            *_link_rates(bench),
        )
        results.figure("copy on the device", machine.copy_bytes_per_s / 1e9, "GB/s")
        results.figure("bf16 matrices", machine.matrix_flops / 1e12, "TFLOP/s")
        if machine.fp8_flops is None:
            results.leave_out("fp8 matrices", "the card or this torch does not multiply e4m3")
        else:
            results.figure("fp8 matrices", machine.fp8_flops / 1e12, "TFLOP/s")
        results.figure("pinned memory to the device", machine.to_device_bytes_per_s / 1e9, "GB/s")
        results.figure("the device to pinned memory", machine.to_host_bytes_per_s / 1e9, "GB/s")
        return machine
    return Machine(float("nan"), float("nan"), None, float("nan"), float("nan"))


def _copy_rate(bench: BenchDevice) -> float:
    num_bytes = _COPY_BYTES if bench.is_cuda else _DRY_COPY_BYTES
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / bench.median_s(lambda index: target.copy_(source))


def _matrix_rate(bench: BenchDevice) -> float:
    size = _MATRIX_SIZE if bench.is_cuda else _DRY_MATRIX_SIZE
    left, right = (torch.randn(size, size, device=bench.device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / bench.median_s(lambda index: left @ right)


def _fp8_rate(bench: BenchDevice) -> float | None:
    if not bench.is_cuda or torch.cuda.get_device_capability(bench.device) < (8, 9):
        return None
    size = _MATRIX_SIZE
    left, right = (torch.randn(size, size, device=bench.device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=bench.device)

    def run(index: int) -> object:
        return torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    try:
        return 2 * size**3 / bench.median_s(run)
    except RuntimeError:
        return None


def _link_rates(bench: BenchDevice) -> tuple[float, float]:
    num_bytes = _LINK_BYTES if bench.is_cuda else _DRY_LINK_BYTES
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=bench.is_cuda)
    device = torch.empty(num_bytes, dtype=torch.uint8, device=bench.device)
    to_device_s = bench.median_s(lambda index: device.copy_(host, non_blocking=True))
    to_host_s = bench.median_s(lambda index: host.copy_(device, non_blocking=True))
    return num_bytes / to_device_s, num_bytes / to_host_s
