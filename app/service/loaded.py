"""What the service needs of a loaded model: an engine, its text side, a few facts. Imports no torch."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from chatkv.app.hub.installed import InstalledModel
from chatkv.engine.metrics import EngineStats
from chatkv.engine.request import GenerationRequest, Miss, RequestOutput
from chatkv.engine.text.messages import ChatMessage
from chatkv.engine.text.miss import MissReason
from chatkv.engine.text.transcript import Rendered
from chatkv.engine.tiers.tier import LowerTier

T = TypeVar("T")


def _nothing() -> None: ...


class Forgotten(Protocol):
    """What forgetting a chat's blocks came to."""

    @property
    def num_removed(self) -> int: ...

    @property
    def num_shared(self) -> int:
        """Blocks that stay, because others own them too."""
        ...


class Placement(Protocol):
    """Where the blocks of one chain lie."""

    @property
    def num_by_run(self) -> Sequence[tuple[str, int]]:
        """From the root: ("device" | "host" | "disk" | "missing", number of blocks)."""
        ...

    @property
    def load_s(self) -> float | None: ...

    @property
    def compute_s(self) -> float | None: ...


class EngineCache(Protocol):
    """The engine's blocks (`chatkv.engine.engine.Engine`). All but `place` belong on the engine's thread."""

    def forget(self, owner: str, owned: Collection[bytes], shared: Collection[bytes]) -> Forgotten: ...

    def set_pinned(self, owner: str, hashes: Collection[bytes], is_pinned: bool) -> None: ...

    def offload(self, hashes: Collection[bytes]) -> int: ...

    def drop_all(self) -> Forgotten: ...

    def place(self, block_hashes: Sequence[bytes]) -> Placement: ...


class EngineHandle(Protocol):
    """The engine thread (`chatkv.engine.engine_thread.EngineThread`), or the scripted one of the tests."""

    @property
    def engine(self) -> EngineCache: ...

    def run(self, work: Callable[[Any], T]) -> Future[T]:
        """`work(engine)` on the engine's thread, between steps. Raises EngineClosedError."""
        ...

    def submit(self, request: GenerationRequest, on_output: Callable[[RequestOutput], None]) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats: ...

    def count_cached(self, prompt_token_ids: Sequence[int]) -> int: ...

    def close(self) -> None: ...


class TextSide(Protocol):
    """Text to ids and back. Every method may take long: call it in the text pool, not on the event loop."""

    @property
    def tokenizer_hash(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    def min_num_tokens(self, text: str) -> int:
        """A lower bound, quick: a text that cannot fit is refused without tokenising it."""
        ...

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        continue_final: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        today: dt.date | None = None,
    ) -> Rendered:
        """Prompt ids by the model's chat template, which may know the date. Raises TemplateError."""
        ...

    def remember(
        self,
        prompt_token_ids: Sequence[int],
        text: str,
        sampled_ids: Sequence[int],
        block_hash: bytes | None = None,
    ) -> None:
        """Keep how an answer was sampled, for a client that sends it back as text only; as long as the block is kept
        that is the last full one of prompt and answer."""
        ...

    def forget_answers(self) -> None:
        """All that only this process remembers."""
        ...

    def answer_ids(self, sampled_ids: Sequence[int], visible_text: str) -> tuple[int, ...]:
        """The ids to keep of an answer that is seen as `visible_text`."""
        ...

    def explain_miss(self, prompt_token_ids: Sequence[int], miss: Miss) -> MissReason: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """On what a model runs."""

    device: Literal["cpu", "cuda"] = "cpu"
    card: str = ""
    """The GPU's name."""
    plan: str = ""
    """What lies there, and what it costs: sentences."""
    note: str = ""
    """Why there, where that needs a word: sentences."""
    notice: str = ""
    """What a person should be told of it, unasked."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """One model in memory. `close` ends its engine thread and frees it."""

    installed: InstalledModel
    context_tokens: int
    """The smaller of the setting and what the model was trained for."""
    num_embd: int
    place: ModelPlace
    weight_format: str
    """Of most of the weights that run; those of `installed` may be finer."""
    describe_kernels: Callable[[], str]
    """For people: which kernels run it, on how many threads."""
    set_num_threads: Callable[[int], None]
    """On the engine's thread."""
    default_sampling: Mapping[str, float]
    """Of the model's own generation_config.json: SamplingParams fields."""
    block_bytes: int
    engine: EngineHandle
    text: TextSide
    fingerprint: bytes
    """Names what its blocks mean, in every tier."""
    hash_blocks: Callable[[Sequence[int]], Sequence[bytes]]
    """Token ids from the start of a prompt -> the names of its full blocks."""
    weights: str = ""
    """For people: in which format they run, and how they came to it."""
    kv_dtype: str = "fp32"
    tiers: Sequence[LowerTier] = ()
    """Below the device, fastest first. The engine closes them."""
    on_closed: Callable[[], None] = _nothing
    """Called once its engine has ended."""

    @property
    def name(self) -> str:
        return self.installed.name

    @property
    def device(self) -> str:
        return self.place.device

    @property
    def kernels(self) -> str:
        return self.describe_kernels()

    @property
    def has_disk_tier(self) -> bool:
        return any(tier.name == "disk" for tier in self.tiers)

    def flush(self, timeout_s: float) -> bool:
        """Wait until what left the device is safe and what was removed is gone; False: not within the time."""
        are_flushed = [tier.flush(timeout_s) for tier in self.tiers]
        return all(are_flushed)

    def close(self) -> None:
        """Long: what the tiers have not stored yet is made safe first."""
        self.engine.close()
        self.on_closed()


Loader = Callable[[InstalledModel, Callable[[float], None]], LoadedModel]
"""Loads an installed model; reports progress from 0 to 1. Runs in a thread of its own; imports torch."""
