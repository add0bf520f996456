"""How far one model is from another that stores K and V otherwise: shared by the tests and the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from chatkv.engine.batch import Batch, SampleSpec, ScheduledSequence
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.request import SamplingParams
from chatkv.kernels.kv_blocks import KVBlocks

CHUNK_TOKENS = 128


@dataclass
class Quality:
    """Of one model against another, over every position of a text; natural logarithms."""

    divergences: list[Tensor] = field(default_factory=list)
    agreements: list[Tensor] = field(default_factory=list)
    losses: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))

    def add(self, expected: Tensor, found: Tensor, next_ids: Sequence[int]) -> None:
        """Logits [n, vocab_size] of both; `next_ids`: what the text goes on with, n or, at its end, n - 1 ids."""
        log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
        self.divergences.append((log_p.exp() * (log_p - log_q)).sum(-1))
        self.agreements.append((expected.argmax(-1) == found.argmax(-1)).float())
        targets = torch.tensor(next_ids).unsqueeze(1)
        for losses, log_probabilities in zip(self.losses, (log_p, log_q), strict=True):
            losses.append(-log_probabilities[: len(next_ids)].gather(1, targets).squeeze(1))

    @property
    def divergence(self) -> Tensor:
        """Kullback-Leibler, per position."""
        return torch.cat(self.divergences)

    @property
    def agreement(self) -> float:
        """Share of positions with the same most likely token."""
        return float(torch.cat(self.agreements).mean())

    @property
    def perplexities(self) -> tuple[float, float]:
        expected, found = (float(torch.cat(losses).mean().exp()) for losses in self.losses)
        return expected, found


def compare(
    expected: ModelRunner, found: ModelRunner, ids: Sequence[int], damage: Callable[[KVBlocks], None] | None = None
) -> Quality:
    """Read `ids` with both, chunk by chunk. `damage` gets the second one's pool after each chunk, as a control."""
    quality = Quality()
    for start in range(0, len(ids), CHUNK_TOKENS):
        batch = Batch([text_part(ids[start : start + CHUNK_TOKENS], start)])
        next_ids = ids[start + 1 : start + CHUNK_TOKENS + 1]
        quality.add(expected.all_logits(batch), found.all_logits(batch), next_ids)
        if damage:
            damage(found.model.layout.views(found.pool))
    return quality


def swap_scales_of_heads(kv: KVBlocks) -> None:
    """A control: each KV head has the scales of its mirror image."""
    _flip_scales(kv, 2)


def mix_scales_of_positions(kv: KVBlocks) -> None:
    """A control: within a block, each position has the scales of its mirror image."""
    _flip_scales(kv, 3)


def _flip_scales(kv: KVBlocks, dim: int) -> None:
    for scales in (kv.key_scales, kv.value_scales):
        assert scales is not None
        scales.copy_(scales.flip(dim).clone())


def text_part(ids: Sequence[int], start: int, *, is_sampled: bool = False) -> ScheduledSequence:
    """In blocks 0, 1, 2 ..."""
    end = start + len(ids)
    table = range(-(-end // BLOCK_SIZE))
    specs = (SampleSpec(SamplingParams(temperature=0.0), 0, end, (), ()),) if is_sampled else ()
    return ScheduledSequence("text", tuple(ids), start, table, range(start, end), specs)
