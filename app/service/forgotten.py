"""What came of forgetting a chat, or all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Forgotten:
    num_removed: int = 0
    num_shared: int = 0
    """Blocks that stay, because other chats need them."""
    is_complete: bool = True
    """False: something could not be removed from the disk yet; the log says what."""

    def __add__(self, other: Forgotten) -> Forgotten:
        return Forgotten(
            self.num_removed + other.num_removed,
            self.num_shared + other.num_shared,
            self.is_complete and other.is_complete,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
