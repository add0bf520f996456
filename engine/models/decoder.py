"""One decoder for the whole Llama family: what differs between models is in `ModelConfig`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from chatkv.kernels.backend import Backend, PreparedLinear
from chatkv.kernels.kv_blocks import KVBlocks
from chatkv.kernels.reference_attention import SequenceSpan
from chatkv.kernels.weights import FpWeight, Int4Weight, Int8Weight, Weight

from ..config import BLOCK_SIZE
from ..kv_layout import KVLayout
from ..quant.formats import PackedTensor
from .config import ModelConfig
from .names import EMBEDDING, FINAL_NORM, HEAD, layer_prefix

FORMAT_VERSION = 1
"""Raised when these facts, or what a block image holds, take another form."""
NUMERICS_EPOCH = 1
"""Raised by hand whenever the same weights and tokens give other bits than before: old caches then go stale."""

AUTO = "auto"
"""The KV dtype that the backend prefers."""

TensorReader = Callable[[str], PackedTensor]


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Where the numbers come from, for the fingerprint."""

    content_sha256: str
    weight_format: str


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer block, as the backend holds it."""

    input_norm: Tensor
    qkv: PreparedLinear
    qk_norm: Tensor | None
    """[num_heads + num_kv_heads, head_dim]: one row per query head, then one per KV head."""
    output: PreparedLinear
    post_norm: Tensor
    gate_up: PreparedLinear
    down: PreparedLinear
    window: int | None
    has_rope: bool


class Decoder:
    """Weights, and the forward pass over a paged KV pool. T is the number of rows of a step."""

    def __init__(
        self,
        config: ModelConfig,
        read: TensorReader,
        facts: WeightFacts,
        backend: Backend,
        on_progress: Callable[[float], None] | None = None,
        kv_dtype: str = AUTO,
    ):
        """`read` gives each packed tensor by its Hugging Face name; it is not used after construction.

        kv_dtype: how K and V are stored: "auto" (the backend's default), or one of `backend.kv_dtypes`. Raises
        ValueError for another.
        """
        if kv_dtype not in (AUTO, *backend.kv_dtypes):
            raise ValueError(
                f"kv_dtype {kv_dtype!r} is unknown here: {AUTO!r}, {', '.join(map(repr, backend.kv_dtypes))}"
            )
        self.config = config
        self.backend = backend
        self.layout = KVLayout.of(config, backend.kv_dtypes[0] if kv_dtype == AUTO else kv_dtype, "position")
        self._facts = facts
        self._scale = config.head_dim**-0.5
        self._inverse_frequencies = config.rope.inverse_frequencies(config.head_dim)
        self._embedding = _matrix(read, EMBEDDING)
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(self._load_layer(index, read))
            if on_progress:
                on_progress((index + 1) / (config.num_layers + 2))
        self._final_norm = _vector(read, FINAL_NORM)
        self._head = backend.prepare_linear([self._embedding if config.is_head_tied else _matrix(read, HEAD)])
        if on_progress:
            on_progress((config.num_layers + 1) / (config.num_layers + 2))
        backend.seal(config.num_heads, config.num_kv_heads, config.head_dim)
        if on_progress:
            on_progress(1.0)

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, sequences: Sequence[SequenceSpan], kv: KVBlocks
    ) -> Tensor:
        """Run every row through all layers, writing its K and V, -> float32 [T, hidden_size] before the final norm.

        token_ids, positions, slots: int64 [T], sequence after sequence as in `sequences`; a negative slot writes
        nothing. kv: `KVLayout.views` of the pool.
        """
        backend = self.backend
        plan = backend.plan_step(kv, slots, sequences)
        cos, sin = self._angles(positions)
        hidden = backend.embedding(token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = backend.rms_norm(hidden, layer.input_norm, self.config.rms_norm_eps)
            queries, keys, values = self._project(layer, normed, cos, sin)
            backend.kv_write(plan, index, keys, values)
            attended = backend.paged_attention(plan, index, queries, self._scale, layer.window)
            hidden = hidden + backend.linear(attended.flatten(1), layer.output)
            normed = backend.rms_norm(hidden, layer.post_norm, self.config.rms_norm_eps)
            hidden = hidden + backend.linear(backend.silu_mul(backend.linear(normed, layer.gate_up)), layer.down)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] from `forward` -> float32 [n, vocab_size]."""
        normed = self.backend.rms_norm(hidden, self._final_norm, self.config.rms_norm_eps)
        return self.backend.linear(normed, self._head)

    def fingerprint_facts(self) -> dict[str, Any]:
        """All that decides what a stored number means (DESIGN.md section 6), ready for canonical JSON.

        Not in it: names, paths, context length, batch settings, tokenizer, template.
        """
        config = self.config
        shape = asdict(config)
        for unrelated in ("rope", "max_positions", "layer_windows"):
            shape.pop(unrelated)
        shape["layer_ropes"] = list(config.layer_ropes)
        frequencies = self._inverse_frequencies.numpy().astype("<f4").tobytes().hex()
        return {
            "format_version": FORMAT_VERSION,
            "numerics_epoch": NUMERICS_EPOCH,
            "numerics": self.backend.numerics(),
            "shape": shape,
            "rope": {"inverse_frequencies_f32": frequencies, "attention_factor": config.rope.attention_factor},
            "layer_windows": list(config.layer_windows),
            "soft_cap": None,
            "content_sha256": self._facts.content_sha256,
            "weight_format": self._facts.weight_format,
            "kv": self.layout.facts(),
            "block_size": BLOCK_SIZE,
            "adapters": [],
        }

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, head_dim / 2]."""
        angles = positions.float().unsqueeze(1) * self._inverse_frequencies
        factor = self.config.rope.attention_factor
        return angles.cos() * factor, angles.sin() * factor

    def _project(self, layer: Layer, normed: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = self.backend.linear(normed, layer.qkv).view(len(normed), -1, config.head_dim)
        rotated, values = heads[:, :num_rotated], heads[:, num_rotated:]
        if layer.qk_norm is not None:
            rotated = self.backend.rms_norm(rotated, layer.qk_norm, config.rms_norm_eps)
        if layer.has_rope:
            rotated = self.backend.rope(rotated, cos, sin)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], values

    def _load_layer(self, index: int, read: TensorReader) -> Layer:
        config, prefix = self.config, layer_prefix(index)

        def linear(*modules: str, has_bias: bool) -> PreparedLinear:
            biases = [_vector(read, f"{prefix}{module}.bias") for module in modules] if has_bias else []
            weights = [_matrix(read, f"{prefix}{module}.weight") for module in modules]
            return self.backend.prepare_linear(weights, torch.cat(biases) if has_bias else None)

        def qk_norm() -> Tensor:
            q, k = (_vector(read, f"{prefix}self_attn.{part}_norm.weight") for part in ("q", "k"))
            return torch.cat((q.expand(config.num_heads, -1), k.expand(config.num_kv_heads, -1)))

        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return Layer(
            input_norm=_vector(read, f"{prefix}input_layernorm.weight"),
            qkv=linear(*attention, has_bias=config.has_qkv_bias),
            qk_norm=qk_norm() if config.has_qk_norm else None,
            output=linear("self_attn.o_proj", has_bias=config.has_output_bias),
            post_norm=_vector(read, f"{prefix}post_attention_layernorm.weight"),
            gate_up=linear("mlp.gate_proj", "mlp.up_proj", has_bias=config.has_mlp_bias),
            down=linear("mlp.down_proj", has_bias=config.has_mlp_bias),
            window=config.layer_windows[index],
            has_rope=config.layer_ropes[index],
        )


def _matrix(read: TensorReader, name: str) -> Weight:
    tensor = read(name)
    assert isinstance(tensor, (FpWeight, Int8Weight, Int4Weight)), f"{name} must be a matrix"
    return tensor


def _vector(read: TensorReader, name: str) -> Tensor:
    tensor = read(name)
    assert isinstance(tensor, Tensor), f"{name} must be a vector"
    return tensor.to(torch.float32, copy=True)
