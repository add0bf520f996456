"""One message in the transcript: its record, its height, and its lines once it came into view."""

from __future__ import annotations

import time

from ..board import LiveReply
from ..records import Message
from ..render import format
from ..render.line import Line
from ..render.message import MessageHead, MessageLayout, estimate_height
from ..render.palette import Palette
from ..render.proof import proof_text, why_computed

CONTINUE_HINT = "F7 continues it"
ENDINGS = {
    "stopped": f"stopped · {CONTINUE_HINT}",
    "length": f"reached the length limit · {CONTINUE_HINT}",
    "incomplete": f"incomplete: it was cut off while being written · {CONTINUE_HINT}",
}


class TranscriptItem:
    __slots__ = ("_layout", "_live_foot", "branch", "height", "is_context_start", "live", "message", "note")

    def __init__(
        self,
        message: Message,
        branch: tuple[int, int] | None = None,
        note: str = "",
        is_context_start: bool = False,
    ):
        self.message = message
        self.branch = branch
        self.is_context_start = is_context_start
        self.note = note
        """In place of the time, for what is not sent yet."""
        self.live: LiveReply | None = None
        self.height = 0
        self._layout: MessageLayout | None = None
        self._live_foot = ""

    @property
    def is_laid_out(self) -> bool:
        return self._layout is not None

    @property
    def lines(self) -> list[Line]:
        return self._layout.lines if self._layout is not None else []

    def estimate(self, width: int) -> None:
        """Forget the lines and guess the height."""
        self._layout = None
        content = self.message.content
        self.height = estimate_height(len(content), content.count("\n"), width, self.message.is_reply)

    def lay_out(self, width: int, palette: Palette) -> int:
        """Make the lines if there are none; returns by how much the height changed."""
        if self._layout is None:
            message = self.message
            head = MessageHead(message.is_reply, message.model, self._right(), self.branch, self.is_context_start)
            self._layout = MessageLayout(head, self.message.content, width, palette, is_open=self.live is not None)
            self._layout.set_foot(self._foot())
        return self._measure()

    def replace(self, message: Message, live: LiveReply | None) -> None:
        """Another version of the same message; its lines have to be made again."""
        self.message, self.live, self._layout = message, live, None

    def extend(self, message: Message, text: str) -> None:
        """`message` is the record with `text` already at its end."""
        self.message = message
        if self._layout is None:
            return
        if self.live is None:
            self._layout = None
        else:
            self._layout.set_foot(self._foot())
            self._layout.extend(text)

    def set_live(self, live: LiveReply | None) -> bool:
        """Show or end the live state; True when the lines changed."""
        if (live is None) != (self.live is None):
            self.live, self._layout = live, None
            return True
        self.live = live
        foot = live_text(live) if live else ""
        if foot == self._live_foot or self._layout is None:
            return False
        self._layout.set_foot(self._foot())
        return True

    def measure(self) -> int:
        return self._measure() if self._layout is not None else 0

    def _measure(self) -> int:
        assert self._layout is not None
        change = len(self._layout.lines) - self.height
        self.height += change
        return change

    def _right(self) -> str:
        if self.note:
            return self.note
        clock = format.clock(self.message.created_at, time.time()) if self.message.created_at else ""
        count = f"{format.tokens(self.message.num_tokens)} tok" if self.message.num_tokens else ""
        return "  ".join(part for part in (clock, count) if part)

    def _foot(self) -> list[tuple[str, str]]:
        if not self.message.is_reply:
            return []
        if self.live is not None:
            self._live_foot = live_text(self.live)
            return [(self._live_foot, "dim")] if self.live.phase != "writing" else []
        foot = []
        if self.message.status == "error":
            foot.append((f"failed: {self.message.error or 'no reason was given'} · F5 tries again", "bad"))
        elif self.message.status in ENDINGS:
            foot.append((ENDINGS[self.message.status], "warn"))
        if self.message.stats is not None:
            foot.append((proof_text(self.message.stats), "dim"))
            reason = why_computed(self.message.stats)
            foot += [(reason, "dim")] if reason else []
        return foot


def live_text(live: LiveReply) -> str:
    """The phase of a reply, in the words used everywhere."""
    if live.phase == "writing":
        return f"writing {live.tokens_per_s:.0f} tok/s" if live.tokens_per_s else "writing"
    if live.phase == "reading":
        return f"reading prompt {100 * live.prompt_share:.0f} %"
    return f"waiting #{live.queue_position}" if live.queue_position else "waiting"
