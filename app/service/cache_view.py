"""What the cache holds, chat by chat."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from chatkv.engine.config import BLOCK_SIZE

from .loaded import LoadedModel

MAX_CHATS = 256


class Footprint(NamedTuple):
    chat_id: str
    token_ids: Sequence[int]


class Footprints:
    """The ids that each chat last had in the engine: enough to ask how much of them is still there."""

    def __init__(self) -> None:
        self._chat_to_ids: OrderedDict[str, tuple[str, array[int]]] = OrderedDict()

    def note(self, chat_id: str, model_name: str, token_ids: Sequence[int]) -> None:
        self._chat_to_ids[chat_id] = (model_name, array("I", token_ids))
        self._chat_to_ids.move_to_end(chat_id)
        if len(self._chat_to_ids) > MAX_CHATS:
            self._chat_to_ids.popitem(last=False)

    def drop(self, chat_id: str) -> None:
        self._chat_to_ids.pop(chat_id, None)

    def of_model(self, model_name: str) -> list[Footprint]:
        """Newest first; a copy, so that another thread may read it."""
        return [
            Footprint(chat_id, token_ids)
            for chat_id, (name, token_ids) in reversed(self._chat_to_ids.items())
            if name == model_name
        ]


def cache_report(model: LoadedModel | None, footprints: Sequence[Footprint]) -> dict[str, Any]:
    """Blocks that chats share are counted in each of them. Long: call it in the text pool."""
    if model is None:
        sizes = dict.fromkeys(("num_blocks", "num_used", "num_cached", "num_free"), 0)
        return {"block_size": BLOCK_SIZE, **sizes, "chats": []}
    stats = model.engine.stats()
    return {
        "block_size": BLOCK_SIZE,
        "num_blocks": stats.num_blocks,
        "num_used": stats.num_used,
        "num_cached": stats.num_cached,
        "num_free": stats.num_free,
        "chats": [
            {
                "chat_id": chat_id,
                "num_tokens": len(token_ids),
                "num_device_blocks": model.engine.count_cached(token_ids) // BLOCK_SIZE,
            }
            for chat_id, token_ids in footprints
        ],
    }
