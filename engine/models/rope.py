"""Rotary position embedding: frequencies of each scaling scheme, and the table of angles.

Formulas as in transformers' `modeling_rope_utils` (float32 throughout), so that a model runs as it was trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import BrokenModelError, UnsupportedModelError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "factors")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How positions turn into angles. Fields a scheme does not use keep their defaults."""

    theta: float = 10000.0
    rope_type: str = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn)."""
    factors: tuple[float, ...] = ()
    """One divisor per frequency (GGUF's rope_freqs tensor), type "factors"."""

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> RopeConfig:
        """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
        scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
        rope_type = str(scaling.get("rope_type") or scaling.get("type") or "default")
        if rope_type not in ROPE_TYPES:
            raise UnsupportedModelError(
                f"This model scales RoPE by {rope_type!r}; chatkv runs {', '.join(ROPE_TYPES[:-1])}. Choose another."
            )
        partial = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise UnsupportedModelError(
                f"partial_rotary_factor {partial} is not supported: chatkv rotates whole heads."
            )
        original = scaling.get("original_max_position_embeddings") or config["max_position_embeddings"]
        try:
            return cls(
                theta=theta,
                rope_type=rope_type,
                factor=float(scaling["factor"]) if rope_type in ("linear", "llama3", "yarn") else 1.0,
                original_max_positions=int(original) if rope_type in ("llama3", "yarn") else 0,
                low_freq_factor=float(scaling["low_freq_factor"]) if rope_type == "llama3" else 1.0,
                high_freq_factor=float(scaling["high_freq_factor"]) if rope_type == "llama3" else 4.0,
                beta_fast=float(scaling.get("beta_fast") or 32.0),
                beta_slow=float(scaling.get("beta_slow") or 1.0),
                is_truncated=bool(scaling.get("truncate", True)),
                attention_factor=_attention_factor(scaling) if rope_type == "yarn" else 1.0,
                factors=tuple(float(x) for x in scaling["factors"]) if rope_type == "factors" else (),
            )
        except KeyError as error:
            raise BrokenModelError(f"config.json: RoPE scaling {rope_type!r} lacks {error}.") from None

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """float32 [head_dim / 2], radians per position."""
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / (self.theta**steps)
        match self.rope_type:
            case "linear":
                return frequencies / self.factor
            case "llama3":
                return self._llama3(frequencies)
            case "yarn":
                return self._yarn(self.theta**steps, head_dim)
            case "factors":
                if len(self.factors) != head_dim // 2:
                    raise BrokenModelError(f"{len(self.factors)} RoPE factors given, {head_dim // 2} expected.")
                return frequencies / torch.tensor(self.factors, dtype=torch.float32)
        return frequencies

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
        wavelengths = 2 * math.pi / frequencies
        original = self.original_max_positions
        is_long = wavelengths > original / self.low_freq_factor
        scaled = torch.where(is_long, frequencies / self.factor, frequencies)
        smooth = (original / wavelengths - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blended = (1 - smooth) * scaled / self.factor + smooth * scaled
        is_between = ~(wavelengths < original / self.high_freq_factor) & ~is_long
        return torch.where(is_between, blended, scaled)

    def _yarn(self, periods: Tensor, head_dim: int) -> Tensor:
        """arXiv:2309.00071: a ramp between interpolation and extrapolation."""

        def dimension(rotations: float) -> float:
            ratio = self.original_max_positions / (rotations * 2 * math.pi)
            return head_dim * math.log(ratio) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.is_truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
        extrapolated = 1 - ramp
        return 1.0 / (self.factor * periods) * (1 - extrapolated) + 1.0 / periods * extrapolated


def angle_table(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [num_positions, head_dim / 2], attention factor included."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions.unsqueeze(1) * rope.inverse_frequencies(head_dim)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def _attention_factor(scaling: dict[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(factor: float, scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    factor = float(scaling["factor"])
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(factor, mscale) / magnitude(factor, mscale_all_dim)
    return magnitude(factor, 1.0)
