"""What a request asks for, where it stands, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from .errors import InvalidRequestError


class Priority(IntEnum):
    """Lower runs first."""

    INTERACTIVE = 0
    EDITOR = 1
    BACKGROUND = 2


class RequestStatus(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    """Its blocks come from a lower tier; the batch goes on without it."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class WarmMode(Enum):
    """What a request without an answer is for."""

    LOAD = "load"
    """Bring the blocks that a lower tier holds to the device."""
    COMPUTE = "compute"
    """And compute the full blocks that no tier holds."""


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Values out of range raise `InvalidRequestError` naming the field."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 is off."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    """Noise is a function of seed, choice and position only. The edge draws one when the client names none."""
    num_logprobs: int | None = None
    """None: none. 0: the sampled token's. k: also the k best."""
    max_tokens: int | None = None
    """None: up to the end of the context."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    """Beside the model's own end-of-turn ids."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def check(ok: bool, param: str, expected: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{param} must be {expected}, got {getattr(self, param)!r}", param)

        check(0.0 <= self.temperature <= 2.0, "temperature", "between 0 and 2")
        check(self.top_k >= 0, "top_k", "0 (off) or more")
        check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        check(0.0 <= self.min_p < 1.0, "min_p", "between 0 and 1")
        check(0.0 < self.repetition_penalty <= 10.0, "repetition_penalty", "above 0 and at most 10")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        check(self.num_logprobs is None or 0 <= self.num_logprobs <= 20, "num_logprobs", "between 0 and 20")
        check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "1 or more")
        check(self.min_tokens >= 0, "min_tokens", "0 or more")
        check(len(self.stop) <= 16, "stop", "at most 16 strings")
        check(-(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """The next draw depends on which tokens were drawn last, not only on how many."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, `n` answers. What the service hands to the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    priority: Priority = Priority.INTERACTIVE
    cache_salt: bytes = b""
    """Extra key of the first block: requests with different salts share nothing."""
    is_transient: bool = False
    """Never leaves memory (drafts, private chats)."""
    owner: str = ""
    """The chat that the blocks belong to; "" for clients that have no chats here. Deleting the chat forgets them."""
    warm: WarmMode | None = None
    """Set: only the full blocks of the prompt matter, nothing is sampled; one last output with STOP and no tokens."""
    resume_text: str = ""
    """Text at the end of the prompt that belongs to the answer (continuing a stopped reply)."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob), best first."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the prefix ended where it did: the first token that no cached block holds."""

    position: int
    """Index into the prompt."""
    expected_token_ids: tuple[int, ...] = ()
    """What the nearest cached sibling holds from that position on (at most one block)."""
    prompt_token_ids: tuple[int, ...] = ()
    """What the prompt holds from that position on (at most one block)."""


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Load what lower tiers hold of a prompt, or compute it: what each would take, and what was done."""

    num_tokens: int
    """Tokens that lower tiers hold beyond the device's."""
    load_s: float
    compute_s: float
    is_loaded: bool
    num_loaded_tokens: int = 0
    """That really came: fewer when a read failed or was late."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a request stands before its first token."""

    status: RequestStatus
    num_prompt_tokens: int
    num_computed_tokens: int
    queue_position: int | None = None
    """1 is next; None once it runs."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step brought for one choice of a request. Emitted on the engine thread."""

    request_id: str
    index: int
    """Which of the n choices."""
    text: str = ""
    """New text that is safe to show: whole characters, no part of a stop string."""
    token_ids: tuple[int, ...] = ()
    """New sampled ids, exactly as sampled."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    progress: Progress | None = None
    """Set when no token came: queued, or reading the prompt."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed, because blocks held them."""
    cached_by_tier: Mapping[str, int] = field(default_factory=dict)
    """"device", "host", "disk" -> tokens; sums up to `num_cached_tokens`."""
    miss: Miss | None = None
    load: LoadDecision | None = None
    """None: no lower tier held more than the device."""
    block_hashes: tuple[bytes, ...] = ()
    """With the last output of a choice: names of the full blocks that it held, first to last."""
