"""One line of the cache inspector, and the columns that all of them share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.style import Style

from . import format
from .kv_bar import bar_cells, kv_bar
from .palette import Palette
from .width import Run, cell_len, fit


class Columns(NamedTuple):
    """Cells of each column; one of 0 cells is not shown."""

    label: int
    tokens: int
    bar: int
    chats: int
    last: int
    resume: int
    compute: int


def columns(width: int) -> Columns:
    """What fits: the number of chats goes first, then the times; the bar takes what is left."""
    if width >= 100:
        label, tokens, chats, last, resume, compute = 34, 8, 7, 6, 9, 9
    elif width >= 66:
        label, tokens, chats, last, resume, compute = 22, 7, 0, 5, 8, 8
    else:
        label, tokens, chats, last, resume, compute = max(10, width // 3), 7, 0, 0, 0, 0
    bar = max(4, width - label - tokens - chats - last - resume - compute)
    return Columns(label, tokens, bar, chats, last, resume, compute)


def titles(width: int) -> str:
    """The line above the rows."""
    cells = columns(width)
    names = ["chain", "tokens", "  first to last block", "chats", "last", "resume", "compute"]
    texts = [fit(names[0], cells.label), names[1].rjust(cells.tokens), fit(names[2], cells.bar)]
    texts += [name.rjust(room) for name, room in zip(names[3:], cells[3:], strict=True) if room]
    return "".join(texts)


@dataclass(frozen=True)
class ChainRow:
    """A chat's chain, or (without a chat) the head that several share."""

    label: str
    num_tokens: int
    kept: tuple[tuple[str, int], ...] = ()
    """The blocks that are drawn here; those of a shared head are drawn above."""
    chat_id: str | None = None
    num_chats: int = 1
    last_used_at: float = 0.0
    resume_s: float | None = None
    compute_s: float | None = None
    is_running: bool = False
    num_damaged: int = 0
    is_pinned: bool = False
    is_private: bool = False
    lead: str = ""
    """The lines of the tree before the label."""
    longest: int = 0
    """Blocks of the longest chain: its bar is the whole column."""
    last: str = ""
    """How long ago it was used, in words."""

    @property
    def key(self) -> str | None:
        return self.chat_id

    owner_key = key

    def stamped(self, now: float) -> ChainRow:
        """With its age, so that rows differ only when something that is shown does."""
        last = format.age(max(0.0, now - self.last_used_at)) if self.last_used_at else ""
        return replace(self, last=last, last_used_at=0.0)

    def runs(self, width: int, palette: Palette, *, is_open: bool = False) -> list[Run]:
        cells, glyphs = columns(width), palette.glyphs
        runs: list[Run] = [(self.lead[-(cells.label // 2) :], palette.dim)]
        if self.chat_id is None:
            runs.append((f"{glyphs.opened} ", palette.dim))
        elif not self.lead:
            runs.append(("  ", palette.dim))
        if self.is_pinned or self.is_private:
            runs.append((f"{glyphs.private if self.is_private else glyphs.star} ", palette.warn))
        room = cells.label - sum(cell_len(text) for text, _ in runs)
        label_style = palette.strong if is_open else palette.text if self.chat_id is not None else palette.dim
        runs.append((fit(self.label, room, glyphs.ellipsis), label_style))
        runs.append((f"{self.num_tokens:,}".rjust(cells.tokens), palette.text))
        runs += self._bar(cells.bar, palette)
        for text, room in zip(self._figures(), cells[3:], strict=True):
            if room:
                runs.append((text.rjust(room), palette.dim))
        return runs

    def _bar(self, num_cells: int, palette: Palette) -> list[Run]:
        """The bar between two cells of space, and what is going on behind it."""
        note, style = self._note(palette)
        room = num_cells - 3 - (cell_len(note) + 1 if note else 0)
        length = bar_cells(sum(count for _, count in self.kept), self.longest, max(1, room))
        bar: list[Run] = [("  ", palette.dim)]
        if length:
            bar += [(text, palette.tier(tier)) for text, tier in kv_bar(self.kept, length, palette.glyphs)]
        bar.append((fit(f" {note}" if note else "", num_cells - 2 - length, palette.glyphs.ellipsis), style))
        return bar

    def _note(self, palette: Palette) -> tuple[str, Style]:
        if self.num_damaged:
            return f"{self.num_damaged} damaged", palette.bad
        if self.chat_id is not None and self.is_running:
            return "running", palette.good
        return "", palette.dim

    def _figures(self) -> tuple[str, str, str, str]:
        seconds = (self.resume_s, self.compute_s)
        resume, compute = ("-" if value is None else format.rough(value) for value in seconds)
        return str(self.num_chats), self.last, resume, compute
