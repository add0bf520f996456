"""Frozen settings of the engine, validated once."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_SIZE = 16
"""Tokens a block holds. Part of every fingerprint."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What one engine may use. Sizes carry units."""

    max_context_tokens: int
    """Longest prompt plus answer of one request."""
    num_blocks: int
    """Blocks in the device pool."""
    max_num_seqs: int = 32
    """Requests that run at once; further ones wait."""
    max_num_waiting: int = 64
    """Bound of the waiting queue; a request beyond it is refused."""
    max_num_batched_tokens: int = 512
    """Upper limit of the token budget of one step."""
    target_step_s: float = 0.25
    """The budget shrinks so that a step stays about this short."""
    warm_keep_s: float = 600.0
    """Work in advance never evicts a block that somebody used since."""
    max_copy_bytes: int = 32 << 20
    """Bytes that may be copied between the device and lower tiers between two steps, each way, while others run."""
    check_integrity: bool = False
    """Recompute every invariant of pool and tables after each step (tests, debugging)."""

    def __post_init__(self) -> None:
        for name in (
            "max_context_tokens",
            "num_blocks",
            "max_num_seqs",
            "max_num_waiting",
            "max_num_batched_tokens",
            "max_copy_bytes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.target_step_s <= 0:
            raise ValueError(f"target_step_s must be positive, got {self.target_step_s}")
