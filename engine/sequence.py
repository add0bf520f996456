"""One choice of a request while it lives: its tokens, how far they are computed, and the blocks that hold them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .block_hash import BLOCK_ID_BYTES, pack_ids
from .block_tree import BlockNode
from .config import BLOCK_SIZE
from .prompt import PreparedPrompt
from .request import GenerationRequest, LoadDecision, Miss, Priority, RequestStatus, WarmMode


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """What the choices of one request share."""

    request: GenerationRequest
    prompt: PreparedPrompt
    arrival: int
    """Counts up; also tells the newest request."""
    max_num_tokens: int
    """Prompt and answer of a choice: with so many it ends."""
    sequences: list[SequenceState] = field(default_factory=list)
    """The unfinished ones. Before the first token there is only the first, which computes the prompt for all."""
    cached_by_tier: Counter[str] = field(default_factory=Counter)
    """Prompt tokens that blocks held, so that they were not computed, by where the blocks lay."""
    num_read_tokens: int = 0
    """Prompt tokens that were computed or found cached at some time: what a preemption makes read again counts once."""
    miss: Miss | None = None
    load: LoadDecision | None = None
    is_admitted: bool = False
    """Has run before: cached counts, miss and load are those of the first admission."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        return sum(self.cached_by_tier.values())

    def count_cached(self, num_tokens: int, tier_name: str) -> int:
        """The first `num_tokens` are there, the last of them from that tier. Returns how many are new."""
        num_new = self.read_up_to(min(num_tokens, self.num_prompt_tokens))
        if num_new:
            self.cached_by_tier[tier_name] += num_new
        return num_new

    def read_up_to(self, num_tokens: int) -> int:
        """Prompt tokens that are read for the first time."""
        num_new = max(num_tokens - self.num_read_tokens, 0)
        self.num_read_tokens += num_new
        return num_new


@dataclass(slots=True)
class HitMemo:
    """What a waiting sequence has found on the device."""

    num_evictions: int
    """By the pool's count: valid while it is the same."""
    nodes: list[BlockNode] = field(default_factory=list)
    """From the root."""


@dataclass(slots=True, eq=False)
class SequenceState:
    active: ActiveRequest
    choice: int
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    """Tokens whose K and V are in the block table, as far as it is known: the steps that wrote them are over."""
    num_flying_tokens: int = 0
    """Tokens after them that launched steps compute. Always 0 when a runner only executes."""
    num_flying_samples: int = 0
    """Ids that launched steps draw: the sequence is that much longer than what is known of it."""
    last_sample_index: int = 0
    """Which sample of its step the last of them is."""
    block_table: list[int] = field(default_factory=list)
    nodes: list[BlockNode] = field(default_factory=list)
    """nodes[i] names block_table[i]: the full blocks, which are shared and never written again."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Chain hashes of full blocks, as far as anyone has asked."""
    hit_memo: HitMemo | None = None
    pending_copy: tuple[int, int] | None = None
    """(source, destination): a fork's tail, copied when the sequence runs next. The source is held until then."""
    waits_until_s: float | None = None
    """By the clock: how long at most it waits, once, for blocks that a lower tier is about to have."""
    is_done: bool = False
    """Only a warm sequence: nothing is left that it may do, and it ends before the next step."""
    last_turn: int = 0
    """Counts up with every chunk that the scheduler gives to anyone: the smallest has waited longest."""

    @property
    def request(self) -> GenerationRequest:
        return self.active.request

    @property
    def priority(self) -> Priority:
        return self.request.priority

    @property
    def warm(self) -> WarmMode | None:
        return self.request.warm

    @property
    def order(self) -> tuple[int, int, int]:
        """Smaller runs first; the largest is preempted first."""
        return (self.request.priority, self.active.arrival, self.choice)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_launched_tokens(self) -> int:
        """Tokens that are computed, or will be when the launched steps are over."""
        return self.num_computed_tokens + self.num_flying_tokens

    @property
    def num_drawn_tokens(self) -> int:
        """Its length with the ids that launched steps draw."""
        return self.num_tokens + self.num_flying_samples

    @property
    def num_drawn_output_tokens(self) -> int:
        return len(self.output_token_ids) + self.num_flying_samples

    @property
    def num_uncomputed_tokens(self) -> int:
        """What no step has been launched for. 1 is a decode step; more is a prompt, or the tokens of a preempted
        sequence."""
        return self.num_drawn_tokens - self.num_launched_tokens

    @property
    def is_ending(self) -> bool:
        """An id that is being drawn is its last, whichever it is."""
        return self.num_flying_samples > 0 and self.num_drawn_tokens >= self.active.max_num_tokens

    @property
    def num_full_blocks(self) -> int:
        """Blocks that its known tokens fill, computed or not."""
        return self.num_tokens // BLOCK_SIZE

    @property
    def num_skippable_tokens(self) -> int:
        """Blocks may stand in for that many: who answers computes at least one token."""
        return self.num_tokens if self.warm else self.num_tokens - 1

    @property
    def num_blocks_ahead(self) -> int:
        """Blocks that its tokens of today still need."""
        return -(-self.num_drawn_tokens // BLOCK_SIZE) - len(self.block_table)

    @property
    def num_unused_slots(self) -> int:
        """Slots of its blocks that hold no token yet: fewer than a block's between steps."""
        return len(self.block_table) * BLOCK_SIZE - max(self.num_launched_tokens, len(self.nodes) * BLOCK_SIZE)

    @property
    def is_at_first_token(self) -> bool:
        """The next sampled token is the first: it is drawn for every choice of the request."""
        return not self.output_token_ids

    def packed_block(self, index: int) -> bytes:
        """Packed ids of the full block `index`."""
        start = index * BLOCK_ID_BYTES
        packed = self.active.prompt.packed_ids[start : start + BLOCK_ID_BYTES]
        if len(packed) == BLOCK_ID_BYTES:
            return packed
        return pack_ids(self.token_ids(index * BLOCK_SIZE, (index + 1) * BLOCK_SIZE))

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Ids at absolute positions start .. stop - 1."""
        prompt = self.request.prompt_token_ids
        num_prompt = len(prompt)
        return [
            *prompt[start:stop],
            *self.output_token_ids[max(start - num_prompt, 0) : max(stop - num_prompt, 0)],
        ]
