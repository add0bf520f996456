"""`python -m tests.bench.profile [FILE.svg]`: where a decode step and a prefill chunk spend their time on the native
CPU kernels, as a picture, beside what this machine's memory and arithmetic allow.

Limits: memory, as fast as a plain sum reads it, for the weights and the K and V that a step reads; arithmetic, for
products of quantised weights the best rate that any of the model's matrices reaches, for attention as fast as it is
at its best, or as the BLAS library multiplies large float32 matrices where that is faster.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.models.native import load_model
from chatkv.kernels.cpu.native.model import NativeModel
from chatkv.kernels.executor import StepRows
from chatkv.kernels.kv_blocks import KVBlocks
from chatkv.kernels.program import Attend, Linear, ProgramOp, Register, RotateAndStore
from chatkv.kernels.reference_attention import SequenceSpan
from chatkv.kernels.weights import TiledWeight
from tests.running_service import MODEL, ROOT, RunningService

from .bars import Bar, draw_bars
from .report import Report

NUM_REPEATS = 15
NUM_CHUNK_REPEATS = 5
CONTEXT_BLOCKS = 256
LINEARS = {
    Register.HEADS: "q, k, v",
    Register.HIDDEN: "output, down",
    Register.GATE_UP: "gate, up",
    Register.LOGITS: "head",
}
PARTS = ("gate, up", "output, down", "q, k, v", "head", "attention", "rotation", "norms, rounding")


@dataclass(frozen=True, slots=True)
class Work:
    """One step to be measured."""

    name: str
    num_sequences: int
    num_rows: int
    start: int


WORKS = (
    Work("decode, 1 chat, 300 tokens", 1, 1, 300),
    Work("decode, 1 chat, 4,000 tokens", 1, 1, 4000),
    Work("decode, 8 chats, 300 tokens each", 8, 1, 300),
    Work("decode, 8 chats, 4,000 tokens each", 8, 1, 4000),
    Work("prefill, tokens 0 to 511", 1, 512, 0),
    Work("prefill, tokens 3,488 to 3,999", 1, 512, 3488),
)


def part_of(op: ProgramOp) -> str:
    match op:
        case Linear():
            return LINEARS[op.target]
        case Attend():
            return "attention"
        case RotateAndStore():
            return "rotation"
    return "norms, rounding"


def rows_of(work: Work) -> StepRows:
    tables = [range(i * CONTEXT_BLOCKS, (i + 1) * CONTEXT_BLOCKS) for i in range(work.num_sequences)]
    spans = [SequenceSpan(work.num_rows, work.start, table) for table in tables]
    positions = [(table, work.start + i) for table in tables for i in range(work.num_rows)]
    slots = [table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for table, position in positions]
    last_rows = [(i + 1) * work.num_rows - 1 for i in range(work.num_sequences)]
    return StepRows([7 * i % 40_000 for i in range(len(slots))], slots, spans, last_rows)


def measure_work(
    executor: NativeModel, ops: Sequence[ProgramOp], kv: KVBlocks, work: Work
) -> tuple[dict[str, float], float]:
    """Milliseconds of each part in the median step, and of the whole step with what is around the native call."""
    rows = rows_of(work)
    samples = []
    for _ in range(NUM_REPEATS if work.num_rows == 1 else NUM_CHUNK_REPEATS):
        started = time.perf_counter()
        times = executor.timed_run(rows, kv)
        samples.append((1000 * (time.perf_counter() - started), times))
    whole_ms, times = sorted(samples, key=lambda sample: sample[0])[len(samples) // 2]
    parts: Counter[str] = Counter()
    for op, nanoseconds in zip(ops, times, strict=True):
        parts[part_of(op)] += nanoseconds / 1e6
    return {part: parts[part] for part in PARTS}, whole_ms


@dataclass(frozen=True, slots=True)
class Machine:
    read_bytes_per_s: float
    products_per_s: float
    """Of quantised numbers."""
    fp32_products_per_s: float


def seconds_of(call: Callable[[], object]) -> float:
    """The fastest of several."""
    best = float("inf")
    for _ in range(7):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best


def measure_machine(model: Decoder, executor: NativeModel, kv: KVBlocks) -> Machine:
    ops = model.program.ops
    many = torch.ones(1 << 27, dtype=torch.int8).view(torch.int64)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    work = WORKS[-2]
    times = zip(*(executor.timed_run(rows_of(work), kv) for _ in range(NUM_CHUNK_REPEATS)), strict=True)
    rates = [
        work.num_rows * num_weights(op) / (1e-9 * min(several))
        for op, several in zip(ops, times, strict=True)
        if isinstance(op, Linear) and op.target != Register.LOGITS
    ]
    return Machine(
        read_bytes_per_s=many.nbytes / seconds_of(many.sum),
        products_per_s=max(rates),
        fp32_products_per_s=max(1024**3 / seconds_of(lambda: a @ b), attention_products_per_s(model, executor, kv)),
    )


def attention_products_per_s(model: Decoder, executor: NativeModel, kv: KVBlocks) -> float:
    work = WORKS[-1]
    ops = model.program.ops
    times = [executor.timed_run(rows_of(work), kv) for _ in range(NUM_CHUNK_REPEATS)]
    nanoseconds = min(sum(t for op, t in zip(ops, one, strict=True) if isinstance(op, Attend)) for one in times)
    return num_attention_products(model, work) / (1e-9 * nanoseconds)


def num_attention_products(model: Decoder, work: Work) -> float:
    config = model.config
    seen = work.num_sequences * work.num_rows * (work.start + work.num_rows / 2)
    return 2 * seen * config.num_heads * config.head_dim * config.num_layers


def num_weights(op: Linear) -> int:
    return sum(weight.shape[0] * weight.shape[1] for weight in op.weights)


def limit_ms(model: Decoder, machine: Machine, work: Work) -> float:
    """What reading and arithmetic take at the least; the slower of the two."""
    num_rows = work.num_rows * work.num_sequences
    matrices = [op for op in model.program.ops if isinstance(op, Linear)]
    weight_bytes, products = 0, 0
    for op in matrices:
        weight_bytes += sum(weight.tiles.numel() for weight in op.weights if isinstance(weight, TiledWeight))
        products += num_weights(op) * (work.num_sequences if op.target == Register.LOGITS else num_rows)
    keys = work.start + work.num_rows
    kv_bytes = work.num_sequences * keys * model.layout.block_bytes // BLOCK_SIZE
    fp32_products = num_attention_products(model, work)
    reading_s = (weight_bytes + kv_bytes) / machine.read_bytes_per_s
    computing_s = products / machine.products_per_s + fp32_products / machine.fp32_products_per_s
    return 1000 * max(reading_s, computing_s)


def run(home: Path, file: Path) -> None:
    RunningService(home).install_model()
    model = load_model(home / "data" / "models" / MODEL)
    executor = model.executor
    assert isinstance(executor, NativeModel), executor.description
    pool = model.layout.new_pool(8 * CONTEXT_BLOCKS, executor.device)
    pool.zero_()
    kv, ops = model.layout.views(pool), model.program.ops
    machine = measure_machine(model, executor, kv)
    report = Report()
    report.add("memory, a plain sum", machine.read_bytes_per_s / 1e9, "GB/s")
    report.add("products of quantised numbers, best matrix", machine.products_per_s / 1e9, "G/s")
    report.add("products of float32 numbers, BLAS or attention", machine.fp32_products_per_s / 1e9, "G/s")
    bars = []
    for work in WORKS:
        parts, whole_ms = measure_work(executor, ops, kv, work)
        limit = limit_ms(model, machine, work)
        for part, milliseconds in parts.items():
            report.add(f"{work.name}: {part}", milliseconds, "ms")
        report.add(f"{work.name}: all, against the machine's limit", whole_ms, "ms", against=limit)
        bars.append(Bar(work.name, {**parts, "around the call": max(0.0, whole_ms - sum(parts.values()))}, limit))
    report.print_table()
    file.write_text(draw_bars(f"One step of {MODEL}: {executor.description}", "ms", bars), encoding="utf-8")
    print(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=ROOT / "assets" / "cpu-profile.svg")
    parser.add_argument("--home", type=Path, default=ROOT / "build" / "bench-home", help="kept between runs")
    options = parser.parse_args()
    run(options.home, options.file)
