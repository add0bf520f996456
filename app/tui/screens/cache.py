"""What the KV pool holds: how full it is, and how much of each chat is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.text import Text
from textual.containers import VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from ..ports import RefusedError, ServiceLostError
from ..render import format
from ..render.palette import Palette
from ..render.width import fit
from ..session import Session
from .sheet import Sheet

REFRESH_S = 1.0
GAUGE_CELLS = 16


class CacheScreen(Sheet[None]):
    sheet_title = "KV cache"

    def __init__(self, session: Session, palette: Palette):
        super().__init__()
        self._session = session
        self._palette = palette

    def contents(self) -> Iterable[Widget]:
        with VerticalScroll():
            yield Static("asking the service", id="body-text", markup=False)

    def on_mount(self) -> None:
        self._refresh()
        self.set_interval(REFRESH_S, self._refresh)

    def _refresh(self) -> None:
        self.run_worker(self._fetch(), exclusive=True, exit_on_error=False)

    async def _fetch(self) -> None:
        body = self.query_one("#body-text", Static)
        try:
            cache = await self._session.service.cache()
        except RefusedError as error:
            body.update(error.message)
        except ServiceLostError:
            body.update("The service does not answer.")
        else:
            titles = {chat.id: chat.shown_title for chat in self._session.board.chats.values()}
            body.update(cache_text(cache, titles, self._palette))


def cache_text(cache: Mapping[str, Any], titles: Mapping[str, str], palette: Palette) -> Text:
    num_blocks, block_size = int(cache.get("num_blocks") or 0), int(cache.get("block_size") or 16)
    num_used, num_cached = int(cache.get("num_used") or 0), int(cache.get("num_cached") or 0)
    text = Text(style=palette.text)
    if not num_blocks:
        return text.append("No model is loaded, so there is no pool yet.", palette.dim)
    text.append(f"{num_blocks:,} blocks of {block_size} tokens\n")
    for label, count, style in (
        ("in use", num_used, palette.good),
        ("kept for later", num_cached, palette.warn),
        ("free", max(0, num_blocks - num_used - num_cached), palette.dim),
    ):
        share = count / num_blocks
        text.append(f"{fit(label, 16)}{format.gauge(share, GAUGE_CELLS, palette.glyphs)} ", style)
        text.append(f"{count:>8,}  {format.percent(share)}\n", palette.dim)
    chats = sorted(cache.get("chats") or (), key=lambda chat: -int(chat.get("num_device_blocks") or 0))
    if chats:
        text.append(f"\n{fit('chat', 34)}{'tokens':>10}{'kept':>8}\n", palette.dim)
    for chat in chats:
        num_tokens = int(chat.get("num_tokens") or 0)
        kept = min(1.0, int(chat.get("num_device_blocks") or 0) * block_size / num_tokens) if num_tokens else 0.0
        title = titles.get(str(chat.get("chat_id")), "another chat")
        gauge = format.gauge(kept, 8, palette.glyphs)
        text.append(f"{fit(title, 33)} {format.tokens(num_tokens):>10}{100 * kept:>6.0f} %  {gauge}\n")
    return text
