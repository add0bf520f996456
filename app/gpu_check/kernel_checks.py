"""Every kernel against float64 on random data. Outputs are poisoned before each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from chatkv.engine.kv_layout import KVLayout
from chatkv.kernels import reference
from chatkv.kernels.kv_blocks import KVBlocks
from chatkv.kernels.reference_attention import SequenceSpan, kv_write, paged_attention
from chatkv.kernels.triton.activation import silu_mul
from chatkv.kernels.triton.attention_chunk import paged_chunk
from chatkv.kernels.triton.attention_decode import paged_decode
from chatkv.kernels.triton.embedding import embed
from chatkv.kernels.triton.linear import W8A8_FROM_ROWS, linear
from chatkv.kernels.triton.norm import add_rms_norm
from chatkv.kernels.triton.rope import rotate_and_store
from chatkv.kernels.triton.transfer import gather_blocks, scatter_blocks, zero_blocks
from chatkv.kernels.weights import Weight

from .bench_device import BenchDevice
from .random_data import fp8_weight, fp_weight, int4_weight, int8_weight, on_device, pool_of, tables_of
from .results import Results
from .sizes import Sizes

TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Of the largest number of the reference."""
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS: dict[str, Callable[[int, int, torch.device], Weight]] = {
    "fp": fp_weight,
    "int4": int4_weight,
    "int8": int8_weight,
    "fp8": fp8_weight,
}
EPS = 1e-5


class KernelChecks:
    def __init__(self, bench: BenchDevice, sizes: Sizes, results: Results) -> None:
        self._device, self._sizes, self._results = bench.device, sizes, results
        self._is_small = not bench.is_cuda
        self._multiplies_fp8 = not bench.is_cuda or torch.cuda.get_device_capability(bench.device) >= (8, 9)

    def run(self) -> None:
        for name in self._sizes.compute_dtypes:
            with self._results.section(f"kernels in {name}"):
                self.all_of(TORCH_DTYPES[name])
        with self._results.section("moving blocks"):
            self.transfers()

    def all_of(self, dtype: torch.dtype) -> None:
        self.norm(dtype)
        self.gate(dtype)
        for name, make in FORMATS.items():
            self.matrices(name, make, dtype)
        for kv_dtype in self._sizes.kv_dtypes:
            self.attention(kv_dtype, dtype)
            self.rope(kv_dtype, dtype)

    def norm(self, dtype: torch.dtype) -> None:
        rows, width = 5, self._sizes.hidden_size
        hidden, weight = self._normal(rows, width), self._normal(width)
        product = self._normal(rows, width).to(dtype)
        expected_hidden = hidden.double() + product.double()
        expected = reference.rms_norm(expected_hidden, weight.double(), EPS)
        out = torch.full((rows, width), torch.nan, dtype=dtype, device=self._device)
        add_rms_norm(hidden, product, weight, EPS, out)
        self._check("add", hidden, expected_hidden, 1e-6)
        self._check("add and RMSNorm", out, expected, TOLERANCES[dtype])

    def gate(self, dtype: torch.dtype) -> None:
        gate_up = self._normal(7, 2 * self._sizes.intermediate_size).to(dtype)
        self._check("SwiGLU", silu_mul(gate_up), reference.silu_mul(gate_up.double()), TOLERANCES[dtype])

    def matrices(self, name: str, make: Callable[[int, int, torch.device], Weight], dtype: torch.dtype) -> None:
        num_rows, num_columns = self._sizes.qkv_width - 5, self._sizes.hidden_size
        weight = make(num_rows, num_columns, self._device)
        matrix = on_device(weight, self._device, dtype)
        plain = reference.dequantise(weight).double()
        for batch in (1, 5) if self._is_small else (1, 2, 5, 8, 16, 33, 257):
            x = self._normal(batch, num_columns).to(dtype)
            self._check(f"{name} matrix, {batch} rows", linear(x, matrix), x.double() @ plain.T, TOLERANCES[dtype])
        if name == "fp8" and self._multiplies_fp8:
            x = self._normal(W8A8_FROM_ROWS, num_columns).to(dtype)
            found = linear(x, matrix, has_fp8_activations=True)
            # Rounding the rows to 8 bits too is most of it.
            self._check(f"fp8 x fp8, {len(x)} rows", found, x.double() @ plain.T, 4e-2)
        token_ids = torch.arange(0, num_rows, 7, dtype=torch.int32, device=self._device)
        self._check(f"{name} embedding", embed(token_ids, matrix), plain[token_ids.long()], TOLERANCES[dtype])

    def attention(self, kv_dtype: str, dtype: torch.dtype) -> None:
        sizes = self._sizes
        lengths = (1, 16, 33) if self._is_small else (1, 15, 16, 17, 511, 512, 513, 2000)
        tables = tables_of(len(lengths), max(lengths), self._device)
        layout = KVLayout(2, sizes.num_kv_heads, sizes.head_dim, kv_dtype, "position")
        _, kv = pool_of(layout, tables.numel(), self._device)
        wide, scale = _on_host(kv), sizes.head_dim**-0.5
        block_tables = tables.tolist()
        queries = self._normal(len(lengths), sizes.num_heads, sizes.head_dim).to(dtype)
        ends = torch.tensor(lengths, dtype=torch.int32, device=self._device)
        spans = [SequenceSpan(1, end - 1, table) for end, table in zip(lengths, block_tables, strict=True)]
        expected = paged_attention(queries.cpu().float(), wide, 1, spans, scale)
        found = paged_decode(queries, kv, 1, tables, ends, scale)
        self._check(f"decode attention, {kv_dtype} KV", found, expected, TOLERANCES[dtype])
        counts = [min(end, 7 + 40 * index) for index, end in enumerate(lengths)]
        spans = [
            SequenceSpan(count, end - count, table)
            for count, end, table in zip(counts, lengths, block_tables, strict=True)
        ]
        queries = self._normal(sum(counts), sizes.num_heads, sizes.head_dim).to(dtype)
        expected = paged_attention(queries.cpu().float(), wide, 1, spans, scale)
        cu_rows = torch.tensor([0, *counts], device=self._device).cumsum(0).to(torch.int32)
        starts = torch.tensor([span.start_position for span in spans], dtype=torch.int32, device=self._device)
        found = paged_chunk(queries, kv, 1, tables, cu_rows, starts, max(counts), scale)
        self._check(f"chunk attention, {kv_dtype} KV", found, expected, TOLERANCES[dtype])

    def rope(self, kv_dtype: str, dtype: torch.dtype) -> None:
        sizes, rows = self._sizes, 5
        num_heads, num_kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        layout = KVLayout(1, num_kv_heads, head_dim, kv_dtype, "position")
        pool, kv = pool_of(layout, 3, self._device)
        expected_kv = layout.views(pool.cpu().clone())
        heads = self._normal(rows, sizes.qkv_width).to(dtype)
        positions = torch.tensor([0, 3, 3, 17, 40], dtype=torch.int32, device=self._device)
        slots = torch.tensor([0, 5, -1, 17, 47], device=self._device)
        cos, sin = (self._normal(64, head_dim // 2) for _ in range(2))
        turned = heads.cpu().float().view(rows, -1, head_dim)
        first, last = turned[:, : num_heads + num_kv_heads], turned[:, num_heads + num_kv_heads :]
        at = positions.long().cpu()
        turned = reference.rope(first, cos.cpu()[at], sin.cpu()[at])
        kv_write(expected_kv, 0, turned[:, num_heads:], last, slots.cpu())
        rotate_and_store(heads, positions, cos, sin, kv, 0, slots, num_heads, num_kv_heads, None, EPS, has_rope=True)
        queries = heads[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
        self._check(f"RoPE, {kv_dtype} KV", queries, turned[:, :num_heads], TOLERANCES[dtype])
        for part in ("keys", "values"):
            found, expected = _numbers(kv, part), _numbers(expected_kv, part)
            # One step of 8 bits: a number at the border may be rounded the other way.
            allowed = {"int8": 8.5e-3, "fp8": 3.6e-2}.get(kv_dtype, TOLERANCES[dtype])
            self._check(f"{part} written, {kv_dtype} KV", found, expected, allowed)

    def transfers(self) -> None:
        pool = torch.randint(0, 256, (9, 8192), dtype=torch.uint8, device=self._device)
        before = pool.cpu().clone()
        block_ids = torch.tensor([7, 0, 3], dtype=torch.int32, device=self._device)
        images = torch.zeros(3, 8192, dtype=torch.uint8, device=self._device)
        gather_blocks(pool, block_ids, images)
        self._equal("gather", images, before[[7, 0, 3]])
        scatter_blocks(pool, block_ids.flip(0).contiguous(), images)
        before[[3, 0, 7]] = before[[7, 0, 3]]
        self._equal("scatter", pool, before)
        zero_blocks(pool, block_ids)
        before[[7, 0, 3]] = 0
        self._equal("zero", pool, before)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._device)

    def _check(self, name: str, found: Tensor, expected: Tensor, allowed: float) -> None:
        found, expected = found.double().cpu(), expected.double().cpu()
        self._results.check(name, float((found - expected).abs().max() / expected.abs().max()), allowed)

    def _equal(self, name: str, found: Tensor, expected: Tensor) -> None:
        self._results.check(name, float((found.cpu() != expected).any()), 0.0)


def _on_host(kv: KVBlocks) -> KVBlocks:
    return KVBlocks(*(None if view is None else view.cpu() for view in _views(kv)))  # type: ignore[arg-type]


def _views(kv: KVBlocks) -> Iterator[Tensor | None]:
    yield from (kv.keys, kv.values, kv.key_scales, kv.value_scales)


def _numbers(kv: KVBlocks, part: str) -> Tensor:
    """float32 of what is stored."""
    stored = getattr(kv, part).cpu()
    scales = kv.key_scales if part == "keys" else kv.value_scales
    return stored.float() if scales is None else reference.dequantise_rows(stored, scales.cpu())
