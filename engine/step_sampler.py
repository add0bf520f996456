"""Drawing a step's tokens where the logits lie, so that the next step can begin before the host knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .batch import SampleSpec
from .model_runner import TokenSampler
from .request import TokenLogprob


class DrawnTokens(Protocol):
    """One token for each specification."""

    @property
    def token_ids(self) -> Tensor:
        """int32 [num_specs], on the device. Any id where a row of logits is not finite."""
        ...

    def results(self) -> list[tuple[int, TokenLogprob | None]]:
        """Once the device has come so far."""
        ...


class StepSampler(Protocol):
    def launch(self, logits: Tensor, specs: Sequence[SampleSpec], eos_ids: frozenset[int]) -> DrawnTokens:
        """logits: float32 [num_specs, vocab_size] on the device, which the next step overwrites."""
        ...


@dataclass(frozen=True, slots=True)
class DrawnOnHost:
    """Implements `DrawnTokens`."""

    token_ids: Tensor
    samples: list[tuple[int, TokenLogprob | None]]

    def results(self) -> list[tuple[int, TokenLogprob | None]]:
        return self.samples


class HostStepSampler:
    """Implements `StepSampler` by the host's sampler: waits for the logits and copies them."""

    def __init__(self, sampler: TokenSampler) -> None:
        self._sampler = sampler

    def launch(self, logits: Tensor, specs: Sequence[SampleSpec], eos_ids: frozenset[int]) -> DrawnOnHost:
        numbers = logits.cpu()
        is_finite = numbers.isfinite().all(-1).tolist()
        finite_specs = [spec for spec, ok in zip(specs, is_finite, strict=True) if ok]
        drawn = iter(self._sampler.sample(numbers[is_finite], finite_specs, eos_ids) if finite_specs else ())
        samples = [next(drawn) if ok else (0, None) for ok in is_finite]
        token_ids = torch.tensor([token for token, _ in samples], dtype=torch.int32)
        return DrawnOnHost(token_ids.to(logits.device), samples)
