"""How fast each kernel is, as a share of what the card can do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from chatkv.engine.kv_layout import KVLayout
from chatkv.kernels.triton.activation import silu_mul
from chatkv.kernels.triton.attention_decode import paged_decode
from chatkv.kernels.triton.linear import linear
from chatkv.kernels.triton.matrices import DeviceMatrix, num_bytes
from chatkv.kernels.triton.norm import add_rms_norm
from chatkv.kernels.triton.rope import rotate_and_store
from chatkv.kernels.weights import Weight

from .bench_device import BenchDevice
from .machine import Machine
from .random_data import fp8_weight, int4_weight, int8_weight, on_device, pool_of, tables_of
from .results import Results
from .sizes import Sizes

ATTENTION_SHARE, GEMV_SHARE, MATRIX_SHARE, ROWS_SHARE = 0.85, 0.80, 0.70, 0.85
EPS = 1e-5


class KernelFigures:
    """Each method measures one kernel. Bytes: what it must read and write, once."""

    def __init__(self, bench: BenchDevice, machine: Machine, sizes: Sizes, results: Results) -> None:
        self._bench, self._machine, self._sizes, self._results = bench, machine, sizes, results
        self._device = bench.device
        self._name = sizes.compute_dtypes[0]
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[self._name]

    def measure(self) -> None:
        for kv_dtype in self._sizes.kv_dtypes:
            with self._results.section("speed of attention"):
                self.attention(kv_dtype)
        with self._results.section("speed of matrices"):
            self.gemv("int4", int4_weight, GEMV_SHARE)
            self.gemv("int8", int8_weight, None)
            self.gemv("fp8", fp8_weight, None)
            self.chunk("int4", int4_weight)
            self.eight_bits()
        with self._results.section("speed of the rest"):
            self.norm()
            self.rope()
            self.gate()

    def attention(self, kv_dtype: str) -> None:
        sizes = self._sizes
        layout = KVLayout(1, sizes.num_kv_heads, sizes.head_dim, kv_dtype, "position")
        tables = tables_of(sizes.num_sequences, sizes.context_tokens, self._device)
        _, kv = pool_of(layout, tables.numel(), self._device)
        queries = self._random(sizes.num_sequences, sizes.num_heads, sizes.head_dim)
        lengths = torch.full((sizes.num_sequences,), sizes.context_tokens, dtype=torch.int32, device=self._device)
        seconds = self._median_s(lambda index: paged_decode(queries, kv, 0, tables, lengths, sizes.head_dim**-0.5))
        num_rows = sizes.num_sequences * sizes.context_tokens * sizes.num_kv_heads
        row_bytes = sizes.head_dim * kv.keys.itemsize + (0 if kv.key_scales is None else 4)
        name = f"decode attention, {sizes.num_sequences} x {sizes.context_tokens} tokens, {kv_dtype} KV"
        self._share_of_copy(name, 2 * num_rows * row_bytes, seconds, ATTENTION_SHARE)

    def gemv(self, name: str, make: Callable[[int, int, torch.device], Weight], target: float | None) -> None:
        """One row against gate and up of a layer."""
        num_rows, num_columns = 2 * self._sizes.intermediate_size, self._sizes.hidden_size
        first = on_device(make(num_rows, num_columns, self._device), self._device, self._dtype)
        num_sets = self._bench.num_sets(num_bytes(first))
        more = (make(num_rows, num_columns, self._device) for _ in range(num_sets - 1))
        matrices = [first, *(on_device(weight, self._device, self._dtype) for weight in more)]
        for batch in (1, 8):
            x = self._random(batch, num_columns)
            seconds = self._median_s(partial(_multiply, x, matrices), num_sets)
            share = target if batch == 1 else None
            title = f"{name} x {self._name}, {batch} row{'s' * (batch > 1)}, {num_rows} x {num_columns}"
            self._share_of_copy(title, num_bytes(first), seconds, share)

    def chunk(self, name: str, make: Callable[[int, int, torch.device], Weight]) -> None:
        num_rows, num_columns = 2 * self._sizes.intermediate_size, self._sizes.hidden_size
        matrix = on_device(make(num_rows, num_columns, self._device), self._device, self._dtype)
        x = self._random(self._sizes.matrix_rows, num_columns)
        seconds = self._median_s(lambda index: linear(x, matrix))
        rate = 2 * len(x) * num_rows * num_columns / seconds
        title = f"{name} x {self._name}, {len(x)} rows"
        self._results.figure(title, rate / self._machine.matrix_flops, "of the bf16 matrix rate", note=_tera(rate))

    def eight_bits(self) -> None:
        if self._machine.fp8_flops is None:
            self._results.leave_out("fp8 x fp8", "the card does not multiply e4m3")
            return
        num_rows, num_columns = 2 * self._sizes.intermediate_size, self._sizes.hidden_size
        matrix = on_device(fp8_weight(num_rows, num_columns, self._device), self._device, self._dtype)
        x = self._random(self._sizes.matrix_rows, num_columns)
        seconds = self._median_s(lambda index: linear(x, matrix, has_fp8_activations=True))
        rate = 2 * len(x) * num_rows * num_columns / seconds
        share = rate / self._machine.fp8_flops
        note = f"{_tera(rate)}, quantising the rows included"
        self._results.figure(f"fp8 x fp8, {len(x)} rows", share, "of the fp8 matrix rate", MATRIX_SHARE, note=note)

    def norm(self) -> None:
        rows, width = self._sizes.num_rows, self._sizes.hidden_size
        hidden = torch.randn(rows, width, device=self._device)
        product, out = self._random(rows, width), self._random(rows, width)
        weight = torch.ones(width, device=self._device)
        seconds = self._median_s(lambda index: add_rms_norm(hidden, product, weight, EPS, out))
        moved = 2 * hidden.nbytes + product.nbytes + out.nbytes
        self._share_of_copy(f"add and RMSNorm, {rows} rows of {width}", moved, seconds, ROWS_SHARE)

    def rope(self) -> None:
        sizes, rows = self._sizes, self._sizes.num_rows
        layout = KVLayout(1, sizes.num_kv_heads, sizes.head_dim, self._name, "position")
        _, kv = pool_of(layout, -(-rows // 16), self._device)
        heads = self._random(rows, sizes.qkv_width)
        positions = torch.arange(rows, dtype=torch.int32, device=self._device)
        angles = torch.rand(rows, sizes.head_dim // 2, device=self._device)
        slots = torch.arange(rows, dtype=torch.int64, device=self._device)
        num_heads, num_kv_heads = sizes.num_heads, sizes.num_kv_heads

        def run(index: int) -> None:
            rotate_and_store(
                heads, positions, angles, angles, kv, 0, slots, num_heads, num_kv_heads, None, EPS, has_rope=True
            )

        moved = 2 * heads.nbytes + 2 * angles.nbytes
        self._share_of_copy(f"RoPE and KV write, {rows} rows", moved, self._median_s(run), ROWS_SHARE)

    def gate(self) -> None:
        rows, width = self._sizes.num_rows, self._sizes.intermediate_size
        gate_up = self._random(rows, 2 * width)
        seconds = self._median_s(lambda index: silu_mul(gate_up))
        self._share_of_copy(f"SwiGLU, {rows} rows of {width}", gate_up.nbytes * 3 // 2, seconds, ROWS_SHARE)

    def _median_s(self, run: Callable[[int], object], num_sets: int = 1) -> float:
        return self._bench.median_s(run, num_sets, is_captured=True)

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self._device).to(self._dtype)

    def _share_of_copy(self, name: str, moved_bytes: int, seconds: float, target: float | None) -> None:
        rate = moved_bytes / seconds
        share = rate / self._machine.copy_bytes_per_s
        note = f"{rate / 1e9:.0f} GB/s, {seconds * 1e3:.3f} ms"
        self._results.figure(name, share, "of the copy rate", target, note=note)


def _multiply(x: torch.Tensor, matrices: Sequence[DeviceMatrix], index: int) -> torch.Tensor:
    return linear(x, matrices[index])


def _tera(rate: float) -> str:
    return f"{rate / 1e12:.0f} TFLOP/s"
