"""What the engine asks of whatever runs a model's steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .kv_blocks import KeyOrder, KVBlocks
from .reference_attention import SequenceSpan

OnProgress: TypeAlias = Callable[[float], None]
"""Gets 0 .. 1."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step, sequence after sequence."""

    token_ids: Sequence[int]
    slots: Sequence[int]
    """Per row: block * block_size + offset; negative: K and V are not written."""
    spans: Sequence[SequenceSpan]
    selected: Sequence[int]
    """Rows whose logits are wanted."""


class StepResult(NamedTuple):
    logits: Tensor
    """float32 [num_selected, vocab_size], in memory that the next step overwrites."""
    is_finite: NDArray[np.bool_]
    """[num_rows]: whether all numbers of a row are, before the final norm."""


class Executor(Protocol):
    """One model on one device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def description(self) -> str:
        """For people: which kernels, on how many threads."""
        ...

    @property
    def weight_bytes(self) -> int:
        """What the weights take as they lie in memory."""
        ...

    @property
    def kv_dtypes(self) -> tuple[str, ...]:
        """How K and V can lie in the pool: names that `engine.kv_layout` knows, the default first."""
        ...

    @property
    def keys_by(self) -> KeyOrder: ...

    def set_num_threads(self, num_threads: int) -> None:
        """From the next step on. On the thread that runs the steps."""
        ...

    def numerics(self) -> dict[str, str | int]:
        """What decides bits beyond the model itself; part of the cache fingerprint."""
        ...

    def run(self, rows: StepRows, kv: KVBlocks) -> StepResult:
        """Write the rows' K and V, and compute the logits of those selected."""
        ...
