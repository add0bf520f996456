"""What requests found in the cache: for replies, for debugging clients, and for the question why one missed."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.request import LoadDecision, RequestOutput

from .loaded import LoadedModel

T = TypeVar("T")
MAX_CHATS = 256
COMPUTED = "computed"
DEVICE = "device"
_HOUR_S = 3600


def reuse_json(model: LoadedModel, prompt_token_ids: Sequence[int], facts: RequestOutput) -> dict[str, Any]:
    """For the app, which sees both sides of a miss."""
    miss = None
    if facts.miss is not None:
        reason = model.text.explain_miss(prompt_token_ids, facts.miss)
        miss = {
            "position": reason.position,
            "text_before": reason.text_before,
            "text": reason.text,
            "expected_text": reason.expected_text,
        }
    return _reuse(facts, miss)


def own_reuse_json(model: LoadedModel, facts: RequestOutput) -> dict[str, Any]:
    """For a TCP client, which sees its own text from the first block that nobody had. Not the first differing token:
    whoever learns it could guess another's text token by token."""
    miss = None
    if facts.miss is not None:
        miss = {"position": facts.miss.position, "text": model.text.decode(facts.miss.prompt_token_ids)}
    return _reuse(facts, miss)


def without_others(reuse: Mapping[str, Any]) -> dict[str, Any]:
    """What may be kept in a file: that other text is kept, but not which; it is not this chat's to keep."""
    miss = reuse["miss"]
    if miss is None:
        return dict(reuse)
    own = {name: value for name, value in miss.items() if name != "expected_text"}
    return {**reuse, "miss": own | {"is_other_kept": bool(miss["expected_text"])}}


def num_recomputed(facts: RequestOutput, num_earlier_tokens: int) -> int:
    """Prompt tokens that were part of the chat before this request and were not found; the block at the border, which
    the newest sampled token may have left open, does not count."""
    num_due = min(num_earlier_tokens, facts.num_prompt_tokens) // BLOCK_SIZE * BLOCK_SIZE
    missing = num_due - facts.num_cached_tokens
    return missing if missing > BLOCK_SIZE else 0


def _reuse(facts: RequestOutput, miss: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"cached_by_tier": dict(facts.cached_by_tier), "load": _load_json(facts.load), "miss": miss}


def _load_json(load: LoadDecision | None) -> dict[str, Any] | None:
    if load is None:
        return None
    return {
        "num_tokens": load.num_tokens,
        "load_s": round(load.load_s, 4),
        "compute_s": round(load.compute_s, 4),
        "is_loaded": load.is_loaded,
        "num_loaded_tokens": load.num_loaded_tokens,
    }


class RequestLog:
    """The newest request of each chat and of all, in memory only; and counts. Lives on the event loop."""

    def __init__(self, count: Callable[[str, int], None], clock: Callable[[], float] = time.time):
        self._count = count
        self._clock = clock
        self._by_chat: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._last: dict[str, Any] | None = None
        self._brought: OrderedDict[str, Counter[str]] = OrderedDict()
        """Tokens by tier that were brought to the device for each chat since its last turn."""
        self.num_load_decisions: Counter[str] = Counter()
        """By "load" and "compute"."""

    def note(
        self,
        model: LoadedModel,
        prompt_token_ids: Sequence[int],
        facts: RequestOutput,
        chat_id: str | None = None,
        num_earlier_tokens: int | None = None,
    ) -> dict[str, Any]:
        """Take in a request that has ended; its `reuse_json`. `num_earlier_tokens`: of the chat before it."""
        reuse = reuse_json(model, prompt_token_ids, facts)
        if num_earlier_tokens is not None:
            reuse["num_recomputed_tokens"] = num_recomputed(facts, num_earlier_tokens)
        entry = {
            "chat_id": chat_id,
            "model": model.name,
            "at": self._clock(),
            "num_prompt_tokens": facts.num_prompt_tokens,
            "num_cached_tokens": facts.num_cached_tokens,
            **reuse,
        }
        self._last = entry
        if chat_id is not None:
            _keep_newest(self._by_chat, chat_id, entry)
        for tier, num_tokens in self._found(facts, chat_id).items():
            self._count(tier, num_tokens)
        self._count(COMPUTED, facts.num_prompt_tokens - facts.num_cached_tokens)
        if facts.load is not None:
            self.num_load_decisions["load" if facts.load.is_loaded else "compute"] += 1
        return reuse

    def note_warm(self, facts: RequestOutput, chat_id: str) -> None:
        """Take in a warm request. What it brought from below, the chat's next turn finds on the device, and is counted
        then, as if the turn had brought it itself."""
        below = Counter({tier: number for tier, number in facts.cached_by_tier.items() if tier != DEVICE})
        if below.total():
            _keep_newest(self._brought, chat_id, self._brought.get(chat_id, Counter()) + below)

    def _found(self, facts: RequestOutput, chat_id: str | None) -> Counter[str]:
        """A prompt's cached tokens by the tier that they came from since the chat's last turn."""
        found = Counter(facts.cached_by_tier)
        for tier, num_brought in self._brought.pop(chat_id or "", Counter()).items():
            num_tokens = min(num_brought, found[DEVICE])
            found[DEVICE] -= num_tokens
            found[tier] += num_tokens
        return found

    def find(self, chat_id: str | None) -> dict[str, Any] | None:
        """None: nothing was asked since the service started, or it was forgotten."""
        return self._last if chat_id is None else self._by_chat.get(chat_id)

    def clear(self) -> None:
        """Something was forgotten: any entry may hold a piece of its text."""
        self._by_chat.clear()
        self._last = None


def _keep_newest(by_chat: OrderedDict[str, T], chat_id: str, value: T) -> None:
    by_chat[chat_id] = value
    by_chat.move_to_end(chat_id)
    if len(by_chat) > MAX_CHATS:
        by_chat.popitem(last=False)


class HitCounts:
    """Tokens by tier over the last 24 hours, for a service without a disk store."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self._by_hour: dict[int, Counter[str]] = {}

    def add(self, tier: str, num_tokens: int) -> None:
        self._by_hour.setdefault(self._hour(), Counter())[tier] += num_tokens

    def sums(self) -> Counter[str]:
        hour = self._hour()
        self._by_hour = {at: counts for at, counts in self._by_hour.items() if hour - 24 < at <= hour}
        return sum(self._by_hour.values(), Counter())

    def _hour(self) -> int:
        return int(self._clock() // _HOUR_S)
