"""Token ids that the host does not know yet: the step before has sampled them, and they never left the device."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit(do_not_specialize=["num_rows"])
def fill_pending_kernel(token_ids, sampled_ids, filled_ids, num_rows, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_rows
    ids = tl.load(token_ids + rows, mask=is_row, other=0)
    sampled = tl.load(sampled_ids - 1 - ids, mask=is_row & (ids < 0), other=0)
    tl.store(filled_ids + rows, tl.where(ids < 0, sampled, ids), mask=is_row)


def fill_pending(token_ids: Tensor, sampled_ids: Tensor) -> Tensor:
    """int32 [T] -> int32 [T]: an id -1 - k becomes `sampled_ids[k]` (int32 [more than any k])."""
    assert token_ids.dtype == sampled_ids.dtype == torch.int32
    assert token_ids.is_contiguous()
    assert sampled_ids.is_contiguous()
    num_rows = len(token_ids)
    filled = torch.empty_like(token_ids)
    kernel: Any = fill_pending_kernel
    kernel[(triton.cdiv(num_rows, _BLOCK),)](token_ids, sampled_ids, filled, num_rows, BLOCK=_BLOCK)
    return filled
