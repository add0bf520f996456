"""What the store says of itself, and of what it was told to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlabStatus:
    model: str
    fingerprint: bytes
    num_blocks: int
    bytes: int
    """Allocated."""
    last_used: float
    """Wall clock, seconds."""
    is_open: bool
    """A model uses it now."""


@dataclass(frozen=True, slots=True)
class StoreStatus:
    used_bytes: int
    """Allocated bytes of everything in the directory."""
    quota_bytes: int
    written_today_bytes: int
    """Records written since midnight, local time."""
    slabs: tuple[SlabStatus, ...]
    notice: str | None


@dataclass(frozen=True, slots=True)
class PruneResult:
    num_slabs: int
    num_blocks: int
    num_files: int
    """Others than slabs."""
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyResult:
    num_checked: int
    num_damaged: int
    """Records that were bad. They are gone, and the blocks below them."""
    damaged: frozenset[bytes]
    """Their block hashes."""
    is_complete: bool
    """Not cancelled."""
