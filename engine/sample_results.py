"""What sampling on the device gives, as one array that is copied to the host once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 4
"""Numbers: 16 bytes, for which kernels are compiled."""


class ResultViews(NamedTuple):
    """Parts of one packed tensor."""

    token_ids: Tensor
    """int32 [R]"""
    are_finite: Tensor
    """int32 [R]: 1 where every logit of the row is."""
    drawn_logprobs: Tensor
    """float32 [L]"""
    top_ids: Tensor
    """int32 [L, num_top]"""
    top_logprobs: Tensor
    """float32 [L, num_top]"""


@dataclass(frozen=True)
class ResultLayout:
    num_rows: int
    num_logprob_rows: int
    num_top: int

    def new(self, device: torch.device) -> Tensor:
        """int32 [size], packed; its contents are anything."""
        return torch.empty(sum(_padded(n) for n in self._lengths), dtype=torch.int32, device=device)

    def views(self, packed: Tensor) -> ResultViews:
        """packed: int32 [size], of `new` or a copy of it."""
        parts: list[Tensor] = []
        start = 0
        for length in self._lengths:
            parts.append(packed[start : start + length])
            start += _padded(length)
        token_ids, are_finite, drawn, top_ids, top_logprobs = parts
        shape = (self.num_logprob_rows, self.num_top)
        return ResultViews(
            token_ids,
            are_finite,
            drawn.view(torch.float32),
            top_ids.view(shape),
            top_logprobs.view(torch.float32).view(shape),
        )

    @property
    def _lengths(self) -> tuple[int, ...]:
        num_all_top = self.num_logprob_rows * self.num_top
        return self.num_rows, self.num_rows, self.num_logprob_rows, num_all_top, num_all_top


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
