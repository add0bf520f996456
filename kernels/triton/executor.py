"""A model on the GPU: every operation of its program is one launch, or a part of one."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..angles import angles_of
from ..executor import OnProgress, StepResult, StepRows
from ..kv_blocks import KeyOrder, KVBlocks
from ..program import Attend, Gate, Program, Register, Select, Take
from .activation import silu_mul
from .attention_chunk import paged_chunk
from .attention_decode import SPLIT_TOKENS, paged_decode
from .bnb_matrix import BnbMatrix
from .embedding import embed
from .linear import W8A8_FROM_ROWS, linear
from .linear_fp import sum_in_float32
from .lowering import AnyMatrix, EmbedRows, Lowering, Multiply, NormRows, Rotate
from .norm import add, add_rms_norm
from .pending_ids import fill_pending
from .rope import rotate_and_store
from .step_inputs import InputPacker, StepInputs
from .stream import DeviceStream

ComputeDtype: TypeAlias = Literal["bf16", "fp16"]
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_POSITIONS = 2048
"""Positions whose angles are there from the start."""
MAX_SAMPLES = 1024
"""Ids that one step samples at most."""


class StepOutputs(NamedTuple):
    """On the device, and there only when the stream has come so far."""

    logits: Tensor
    """float32 [num_selected, vocab_size]"""
    is_finite: Tensor
    """bool [num_rows]: whether all numbers of a row are, before the final norm."""


class TritonExecutor:
    """Implements `kernels.executor.Executor`. For one caller at a time; everything runs on `stream`."""

    keys_by: KeyOrder = "position"
    angles: tuple[Tensor, Tensor]
    """cos and sin, float32 [positions, head_dim / 2]."""

    def __init__(
        self,
        program: Program,
        device: torch.device,
        compute_dtype: ComputeDtype = "bf16",
        *,
        is_deterministic: bool = False,
        has_fp8_activations: bool | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        """is_deterministic: a row goes one way through the kernels, however many rows there are; slower.
        has_fp8_activations: products of many rows with fp8 weights are of fp8 numbers; None: where the device can.
        """
        self.device = device
        # What others queue without a thought, such as weights that are made on the device, is in order with the steps.
        self.stream = DeviceStream(device, is_default=True)
        self.is_deterministic = is_deterministic
        self.compute_dtype = compute_dtype
        self.kv_dtypes = (compute_dtype, *(name for name in TORCH_DTYPES if name != compute_dtype), "int8", "fp8")
        self._dtype = TORCH_DTYPES[compute_dtype]
        self._program = program
        self._num_query_numbers = program.num_heads * program.head_dim
        sum_in_float32()
        with self.stream.active():
            lowering = Lowering(program, device, self._dtype)
            self._launches = list(lowering.launches(on_progress))
            self.sampled_ids = torch.zeros(MAX_SAMPLES, dtype=torch.int32, device=device)
            """Of the step before: what pending ids stand for. Whoever samples writes them."""
        self.weight_bytes = lowering.weight_bytes
        if has_fp8_activations is None:
            has_fp8_activations = multiplies_fp8(device)
        self._has_fp8_activations = has_fp8_activations and lowering.has_fp8_weights and not is_deterministic
        self.packer = InputPacker(self.stream, program.vocab_size)
        self._num_positions = 0
        self.ensure_positions(FIRST_POSITIONS)

    @property
    def description(self) -> str:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "the interpreter"
        return f"Triton on {name}, {self.compute_dtype}{', deterministic' if self.is_deterministic else ''}"

    @property
    def vocab_size(self) -> int:
        return self._program.vocab_size

    def set_num_threads(self, num_threads: int) -> None:
        """The GPU has its own."""

    def numerics(self) -> dict[str, str | int]:
        return {
            "backend": "triton",
            "compute_dtype": self.compute_dtype,
            "is_deterministic": int(self.is_deterministic),
            "attention_split": SPLIT_TOKENS,
            "activation_quantisation": f"e4m3 from {W8A8_FROM_ROWS} rows" if self._has_fp8_activations else "none",
        }

    def ensure_positions(self, num_positions: int) -> None:
        """Angles of so many positions are there. Captured steps read the tables of their time: before a capture, all
        that will ever be needed."""
        if num_positions <= self._num_positions:
            return
        frequencies = self._program.inverse_frequencies.numpy()
        cos, sin = angles_of(0, num_positions, frequencies, self._program.attention_factor)
        with self.stream.active():
            self.angles = (torch.from_numpy(cos).to(self.device), torch.from_numpy(sin).to(self.device))
        self._num_positions = num_positions

    @torch.inference_mode()
    def run(self, rows: StepRows, kv: KVBlocks) -> StepResult:
        end = max(span.end_position for span in rows.spans)
        if end > self._num_positions:
            self.ensure_positions(max(end, 2 * self._num_positions))
        with self.stream.active():
            outputs = self.forward(self.packer.pack(rows), kv)
            return StepResult(outputs.logits, outputs.is_finite.cpu().numpy())

    def forward(self, inputs: StepInputs, kv: KVBlocks, logits: Tensor | None = None) -> StepOutputs:
        """Launches a step on the current stream. Waits for nothing and takes all sizes from the inputs' shapes, so that
        it can be captured. `logits`: where they are to lie."""
        token_ids = fill_pending(inputs.token_ids, self.sampled_ids)
        registers: dict[Register, Tensor] = {}
        pending: dict[Register, Tensor | None] = {}
        """Products that are yet to be added to a register."""
        activations = is_finite = token_ids
        for op in self._launches:
            match op:
                case EmbedRows(target, table):
                    registers[target] = self._embed(token_ids, table)
                case NormRows(source, weight, eps):
                    hidden = registers[source]
                    activations = torch.empty(hidden.shape, dtype=self._dtype, device=self.device)
                    add_rms_norm(hidden, pending.pop(source, None), weight, eps, activations)
                case Take(source):
                    activations = registers[source]
                case Gate(source):
                    activations = silu_mul(registers[source])
                case Multiply(target, matrix, is_added=True):
                    self._settle(registers, pending, target)
                    pending[target] = self._multiply(activations, matrix)
                case Multiply(Register.LOGITS, matrix):
                    logits = self._multiply(activations, matrix, logits, torch.float32)
                case Multiply(target, matrix):
                    registers[target] = self._multiply(activations, matrix)
                case Rotate():
                    self._rotate_and_store(op, registers[op.heads], inputs, kv)
                case Attend(heads, target):
                    registers[target] = self._attend(op, registers[heads], inputs, kv)
                case Select(source, target):
                    self._settle(registers, pending, source)
                    hidden = registers[source]
                    is_finite = torch.linalg.vector_norm(hidden, float("inf"), dim=-1).isfinite()
                    if not len(inputs.selected):
                        return StepOutputs(hidden.new_empty(0, self.vocab_size), is_finite)
                    registers[target] = hidden if inputs.is_all_selected else hidden.index_select(0, inputs.selected)
        assert logits is not None, "a program ends with its logits"
        return StepOutputs(logits, is_finite)

    @staticmethod
    def _embed(token_ids: Tensor, table: AnyMatrix) -> Tensor:
        return table.embed(token_ids) if isinstance(table, BnbMatrix) else embed(token_ids, table)

    def _multiply(
        self, x: Tensor, matrix: AnyMatrix, out: Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        if isinstance(matrix, BnbMatrix):
            return matrix.product(x, out, out_dtype or self._dtype)
        return linear(
            x,
            matrix,
            out,
            out_dtype,
            is_deterministic=self.is_deterministic,
            has_fp8_activations=self._has_fp8_activations,
        )

    @staticmethod
    def _settle(registers: dict[Register, Tensor], pending: dict[Register, Tensor | None], register: Register) -> None:
        product = pending.pop(register, None)
        if product is not None:
            add(registers[register], product)

    def _rotate_and_store(self, op: Rotate, heads: Tensor, inputs: StepInputs, kv: KVBlocks) -> None:
        rotate_and_store(
            heads,
            inputs.positions,
            *self.angles,
            kv,
            op.layer,
            inputs.slots,
            self._program.num_heads,
            self._program.num_kv_heads,
            op.norm,
            op.eps,
            op.has_rope,
        )

    def _attend(self, op: Attend, heads: Tensor, inputs: StepInputs, kv: KVBlocks) -> Tensor:
        """[T, q, k and v side by side] -> [T, num_heads * head_dim]."""
        program = self._program
        queries = heads[:, : self._num_query_numbers].unflatten(1, (program.num_heads, program.head_dim))
        tables, scale, window = inputs.block_tables, program.scale, op.window
        if inputs.is_decode and not self.is_deterministic:
            attended = paged_decode(queries, kv, op.layer, tables, inputs.lengths, scale, window=window)
        else:
            starts, cu_rows, max_rows = inputs.start_positions, inputs.cu_rows, inputs.max_rows
            attended = paged_chunk(
                queries,
                kv,
                op.layer,
                tables,
                cu_rows,
                starts,
                max_rows,
                scale,
                window=window,
                is_deterministic=self.is_deterministic,
            )
        return attended.flatten(1)


def multiplies_fp8(device: torch.device) -> bool:
    """NVIDIA's cards from compute capability 8.9 on."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 9)
