"""The cache inspector: how full each tier is, where the blocks of each chat lie, and what can be done about it."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Iterable
from contextlib import aclosing
from typing import Any, ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Static

from ..cache_records import Chain, Reuse
from ..ports import RefusedError, ServiceLostError
from ..render import format
from ..render.cache_tree import SORTS, chain_rows
from ..render.chain_row import titles
from ..render.forgotten import forgotten_text
from ..render.miss import reuse_text
from ..render.palette import Palette
from ..render.sanitize import sanitize_line
from ..render.tier_lines import model_words, tier_lines
from ..render.width import Run
from ..session import Session
from ..widgets.chain_list import ChainList
from .sheet import Sheet

ASK_EVERY_S = 2.0
AGES_EVERY_S = 30.0
VERIFY_CELLS = 16
SAID_STAYS_S = 10.0
"""What came of a key can be read that long, whatever is drawn meanwhile."""
WARM_REASONS = {
    "chat_busy": "Its reply is being written; it is on the device.",
    "model_not_loaded": "Its model is not loaded.",
    "in_trash": "It is in the trash.",
}
NOTHING = "Nothing is kept yet."
NOTHING_ASKED = "nothing was asked since the start, or it is forgotten"


class CacheScreen(Sheet[str]):
    """Dismissed with the id of the chat that should be opened, if any."""

    sheet_title = "KV cache"
    sheet_keys = "p pin  w warm  o offload  x drop  v verify  s sort  y why  Enter  Esc"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pin", "Pin: it is never evicted", show=False, id="cache.pin"),
        Binding("w", "warm", "Warm: bring it to the device", show=False, id="cache.warm"),
        Binding("o", "offload", "Offload: leave the device to others", show=False, id="cache.offload"),
        Binding("x", "drop", "Drop what is kept; the text stays", show=False, id="cache.drop"),
        Binding("v", "verify", "Read and check every stored block", show=False, id="cache.verify"),
        Binding("s", "sort", "Sort by last use, tokens or time saved", show=False, id="cache.sort"),
        Binding("y", "why", "Why its last prompt was not reused further", show=False, id="cache.why"),
    ]

    def __init__(self, session: Session, palette: Palette):
        super().__init__()
        self._session = session
        self._palette = palette
        self._sort = next(iter(SORTS))
        self._to_confirm: str | None = None
        self._is_verifying = False
        self._said_until = 0.0

    def contents(self) -> Iterable[Widget]:
        yield Static("asking the service", id="tiers", markup=False)
        yield Static("", id="titles", markup=False)
        yield ChainList(self.dismiss, self._palette, id="chains")
        yield Static("", id="said", markup=False)

    def on_mount(self) -> None:
        self.query_one(ChainList).focus()
        self._refresh()
        self.set_interval(ASK_EVERY_S, self._refresh_if_due)
        self.set_interval(AGES_EVERY_S, self._show)

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._show)

    # Drawing

    def _refresh_if_due(self) -> None:
        if self._session.cache.is_due:
            self._refresh()

    def _refresh(self) -> None:
        self.run_worker(self._ask(), group="cache", exit_on_error=False)

    async def _ask(self) -> None:
        await self._session.cache.ask()
        self._show()

    def _show(self) -> None:
        cache, palette, chains = self._session.cache, self._palette, self.query_one(ChainList)
        report, width = cache.report, chains.size.width
        if not width:
            return
        device = self._session.board.status.device
        self.query_one("#sheet").border_title = f"KV cache  {model_words(report)}"
        tiers = tier_lines(report, device, width, palette)
        self.query_one("#tiers", Static).update(_text(tiers) if tiers else Text(cache.trouble or NOTHING, palette.dim))
        self.query_one("#titles", Static).update(Text(titles(width), palette.dim))
        chains.show(chain_rows(report, self._sort, time.time(), palette.glyphs), self._session.chat_id)
        if self._to_confirm is None and not self._is_verifying and time.monotonic() > self._said_until:
            self.query_one("#said", Static).update(self._idle_text)

    @property
    def _idle_text(self) -> str:
        report = self._session.cache.report
        following = report.by_chat.get(report.evicts_next)
        words = [f"evicts next: {following.title}"] if following else []
        return "   ".join([f"sorted by {self._sort}", *words]) if report.chains else ""

    def _say(self, text: str) -> None:
        self._said_until = time.monotonic() + SAID_STAYS_S
        self.query_one("#said", Static).update(text)

    # Keys

    def action_pin(self) -> None:
        if chain := self._chosen:
            fields = {"is_pinned": not chain.is_pinned}
            words = "no longer pinned" if chain.is_pinned else "pinned: it is not evicted"
            self._do(self._act(self._session.service.update_chat(chain.chat_id, fields), f"{chain.title} is {words}."))

    def action_warm(self) -> None:
        if chain := self._chosen:
            self._do(self._warm(chain))

    def action_offload(self) -> None:
        if chain := self._chosen:
            self._do(self._offload(chain))

    def action_drop(self) -> None:
        chain = self._chosen
        if chain is None:
            return
        if self._to_confirm != chain.chat_id:
            self._to_confirm = chain.chat_id
            self._say(f"x again drops what is kept of “{chain.title}”; its text stays.")
            return
        self._to_confirm = None
        self._do(self._drop(chain))

    def action_verify(self) -> None:
        """Begin; again: stop."""
        if self._is_verifying:
            self.workers.cancel_group(self, "verify")
            self._say("Reading the store was stopped.")
        else:
            self.run_worker(self._guarded(self._verify()), group="verify", exclusive=True, exit_on_error=False)

    def action_sort(self) -> None:
        names = list(SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self._said_until = 0.0
        self._show()

    def action_why(self) -> None:
        if chain := self._chosen:
            self._do(self._why(chain))

    @property
    def _chosen(self) -> Chain | None:
        row = self.query_one(ChainList).highlighted_row
        chain = self._session.cache.report.by_chat.get(row.chat_id or "") if row else None
        if chain is None or self._to_confirm not in (None, chain.chat_id):
            self._to_confirm = None
        return chain

    # Calls

    async def _warm(self, chain: Chain) -> None:
        answer = await self._session.service.warm_chat(chain.chat_id, None)
        reason = WARM_REASONS.get(str(answer.get("reason")), "It cannot be warmed now.")
        is_refused = answer.get("is_started") is False
        await self._done(reason if is_refused else f"{chain.title} is brought to the device.")

    async def _offload(self, chain: Chain) -> None:
        answer = await self._session.service.offload_chat(chain.chat_id)
        num_blocks = int(answer.get("num_offloaded") or 0)
        await self._done(f"{format.blocks(num_blocks)} left the device, kept below.")

    async def _drop(self, chain: Chain) -> None:
        await self._done(forgotten_text(await self._session.service.forget_cache(chain.chat_id)))

    async def _why(self, chain: Chain) -> None:
        answer = await self._session.service.why_missed(chain.chat_id)
        words = reuse_text(Reuse.from_json(answer)) if answer else NOTHING_ASKED
        self._say(f"{chain.title}: {words}")

    async def _verify(self) -> None:
        self._is_verifying = True
        self._say("reading the store   v stops")
        try:
            async with aclosing(self._session.service.verify_cache()) as events_:
                async for event in events_:
                    self._say(self._verify_text(event))
        finally:
            self._is_verifying = False
        self._session.board.num_cache_changes += 1

    def _verify_text(self, event: dict[str, Any]) -> str:
        if event.get("type") == "error":
            return sanitize_line(str(event.get("message")))
        checked, total = int(event.get("num_checked") or 0), int(event.get("num_blocks") or 0)
        if event.get("type") == "done":
            damaged = int(event.get("num_damaged") or 0)
            return f"{format.blocks(checked)} read: " + (
                f"{damaged:,} damaged, removed" if damaged else "all are whole"
            )
        share = checked / total if total else 0.0
        gauge = format.gauge(share, VERIFY_CELLS, self._palette.glyphs)
        return f"{gauge} {checked:,}/{total:,} blocks read   v stops"

    async def _act(self, call: Coroutine[Any, Any, object], done: str) -> None:
        await call
        await self._done(done)

    async def _done(self, words: str) -> None:
        await self._ask()
        self._say(words)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        self.run_worker(self._guarded(work), group="calls", exit_on_error=False)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except RefusedError as error:
            self._say(f"{error.message} {error.hint}".strip())
        except ServiceLostError:
            self._say("The service does not answer.")


def _text(lines: list[list[Run]]) -> Text:
    text = Text("\n").join(Text.assemble(*line) for line in lines)
    text.no_wrap = True
    return text
