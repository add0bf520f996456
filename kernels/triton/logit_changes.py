"""Penalties and biases: changes of single logits, applied to a copy of the rows that have any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runtime import ceil_div

_BLOCK = 256


@dataclass(frozen=True)
class LogitChanges:
    """E changes in C rows, on the device. An id comes at most once a row."""

    logit_rows: Tensor
    """int64 [C]: which rows of the logits they are."""
    rows: Tensor
    """int32 [E]: 0 .. C - 1."""
    token_ids: Tensor
    """int32 [E]"""
    penalties: Tensor
    """float64 [E]: positive logits are divided by it, others multiplied; 1 where there is none."""
    subtracted: Tensor
    """float64 [E]: then taken off."""


@triton.jit(do_not_specialize=["num_changes"])
def change_logits_kernel(
    logits,
    logits_stride,
    changed,
    logit_rows,
    rows,
    token_ids,
    penalties,
    subtracted,
    num_changes,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Reads the logits themselves, writes their copy. float64, so that float32 rounds once."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_change = index < num_changes
    row = tl.load(rows + index, mask=is_change, other=0).to(tl.int64)
    token_id = tl.load(token_ids + index, mask=is_change, other=0)
    logit_row = tl.load(logit_rows + row, mask=is_change, other=0)
    value = tl.load(logits + logit_row * logits_stride + token_id, mask=is_change, other=0.0).to(tl.float64)
    penalty = tl.load(penalties + index, mask=is_change, other=1.0)
    value = tl.where(value > 0.0, value / penalty, value * penalty)
    value -= tl.load(subtracted + index, mask=is_change, other=0.0)
    tl.store(changed + row * vocab_size + token_id, value.to(tl.float32), mask=is_change)


def change_logits(logits: Tensor, changes: LogitChanges, vocab_size: int) -> Tensor:
    """float32 [any, vocab_size or more] -> float32 [C, vocab_size], a copy. What is beyond float32 becomes infinite."""
    changed = logits[:, :vocab_size].index_select(0, changes.logit_rows)
    num_changes = len(changes.token_ids)
    if num_changes:
        assert changes.penalties.dtype == changes.subtracted.dtype == torch.float64
        kernel: Any = change_logits_kernel
        kernel[(ceil_div(num_changes, _BLOCK),)](
            logits,
            logits.stride(0),
            changed,
            changes.logit_rows,
            changes.rows,
            changes.token_ids,
            changes.penalties,
            changes.subtracted,
            num_changes,
            vocab_size,
            BLOCK=_BLOCK,
        )
    return changed
