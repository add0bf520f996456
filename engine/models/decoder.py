"""One decoder for the whole Llama family: what differs between models is in `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from chatkv.kernels import KernelChoice, executor_for
from chatkv.kernels.executor import OnProgress, StepResult, StepRows
from chatkv.kernels.kv_blocks import KVBlocks

from ..config import BLOCK_SIZE
from ..kv_layout import KVLayout
from .config import ModelConfig
from .program import TensorReader, program_of

FORMAT_VERSION = 1
"""Raised when these facts, or what a block image holds, take another form."""
NUMERICS_EPOCH = 2
"""Raised by hand whenever the same weights and tokens give other bits than before: old caches then go stale."""

AUTO = "auto"
"""The KV dtype that the kernels prefer."""


@dataclass(frozen=True, slots=True)
class WeightFacts:
    """Where the numbers come from, for the fingerprint."""

    content_sha256: str
    """Of the weights as they were imported."""
    weight_format: str
    """Of those that run."""
    quantiser: Mapping[str, str | int] | None = None
    """How these were made of those; None: they are those."""
    origin: str = ""
    """The same for people."""


class Decoder:
    """Weights, and the forward pass over a paged KV pool."""

    def __init__(
        self,
        config: ModelConfig,
        read: TensorReader,
        facts: WeightFacts,
        choice: KernelChoice,
        on_progress: OnProgress | None = None,
        kv_dtype: str = AUTO,
    ):
        """`read` gives each packed tensor by its Hugging Face name; it is not used after construction.

        kv_dtype: how K and V are stored: "auto" (what the kernels prefer), or one of the kernels' `kv_dtypes`. Raises
        ValueError for another.
        """
        self.config = config
        self._facts = facts
        self._inverse_frequencies = config.rope.inverse_frequencies(config.head_dim)
        self.program = program_of(config, read)
        self.executor = executor_for(choice, self.program, on_progress)
        kv_dtypes = self.executor.kv_dtypes
        if kv_dtype not in (AUTO, *kv_dtypes):
            raise ValueError(f"kv_dtype {kv_dtype!r} is unknown here: {AUTO!r}, {', '.join(map(repr, kv_dtypes))}")
        kv_dtype = kv_dtypes[0] if kv_dtype == AUTO else kv_dtype
        self.layout = KVLayout.of(config, kv_dtype, self.executor.keys_by)

    @property
    def device(self) -> torch.device:
        return self.executor.device

    @property
    def kernels(self) -> str:
        """For people: which kernels run it, on how many threads."""
        return self.executor.description

    @property
    def weight_format(self) -> str:
        """Of most of the weights that run, such as "int4-affine-g32"."""
        return self._facts.weight_format

    @property
    def weight_origin(self) -> str:
        """For people: where they come from."""
        return self._facts.origin

    @property
    def weight_bytes(self) -> int:
        """What its weights take in memory."""
        return self.executor.weight_bytes

    def run(self, rows: StepRows, kv: KVBlocks) -> StepResult:
        """Run every row through all layers, writing its K and V. kv: `KVLayout.views` of the pool."""
        return self.executor.run(rows, kv)

    def set_num_threads(self, num_threads: int) -> None:
        """From the next step on. On the thread that runs the steps."""
        self.executor.set_num_threads(num_threads)

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
        facts = {
            "format_version": FORMAT_VERSION,
            "numerics_epoch": NUMERICS_EPOCH,
            "numerics": self.executor.numerics(),
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
        # Not a null where there is none: names of blocks that were stored before stay valid.
        return facts if self._facts.quantiser is None else facts | {"quantiser": dict(self._facts.quantiser)}
