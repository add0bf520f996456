"""The main screen: chats at the left, the conversation and the composer at the right, status above and below."""

from __future__ import annotations

import time
from pathlib import Path

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.timer import Timer
from textual.widgets import Input, Static

from .. import status_parts
from ..bindings import MAIN_BINDINGS
from ..board import Changes, LiveReply, ReplyDone
from ..messages import ChatChosen
from ..records import Message
from ..render.chat_rows import chat_rows
from ..render.palette import Palette
from ..session import Session
from ..thread import Shown
from ..warming import Warmer
from ..widgets.bar import Bar
from ..widgets.chat_list import ChatList
from ..widgets.composer import Composer
from ..widgets.first_run import FirstRun
from ..widgets.item import TranscriptItem
from ..widgets.notice import NoticeBar
from ..widgets.transcript import Transcript
from .chat_actions import SEARCH_DELAY_S
from .composing import DRAFT_DELAY_S, FLUSH_EVERY_S
from .keeping import ASK_EVERY_S
from .leaving import Leaving
from .sizes import CLASSES, size_class

FRAMES_PER_S = 15
AGES_EVERY_S = 30.0


class MainScreen(Leaving):
    CSS_PATH = "main.tcss"
    BINDINGS = MAIN_BINDINGS
    AUTO_FOCUS = "#composer"

    def __init__(self, session: Session, palette: Palette, state_dir: Path | None, default_model: str):
        super().__init__(session, palette, state_dir)
        self.default_model = default_model
        self.composed = {}
        self.warmer = Warmer(session)
        self._deleted = []
        self._draft_timer: Timer | None = None
        self._search_timer: Timer | None = None

    def compose(self) -> ComposeResult:
        yield Bar(id="top-bar")
        with Horizontal(id="body"):
            with Vertical(id="sidebar"):
                yield Input(placeholder="/ search chats", id="search")
                yield ChatList(self.palette, id="chats")
                yield Static("", id="kept", markup=False)
            with Vertical(id="talk"):
                yield Transcript(self.palette, id="transcript")
                yield FirstRun(id="first-run")
                yield NoticeBar(id="notice")
                with Horizontal(id="ask"):
                    yield Static(self.palette.glyphs.prompt, id="prompt", markup=False)
                    yield Composer(self.submit, id="composer")
                yield Bar(id="chat-bar")
        yield Bar(id="keys")
        yield Static("too small, need 40x10", id="too-small")

    def on_mount(self) -> None:
        self.session.drafts.read_file()
        if self.session.drafts.new_chats:
            self.session.begin_new(self.session.drafts.new_chats[0])
        self.show_conversation()
        self.show_list()
        self.set_interval(1 / FRAMES_PER_S, self.drain)
        self.set_interval(AGES_EVERY_S, self.show_list)
        self.set_interval(FLUSH_EVERY_S, self._flush_queue_if_any)
        self.set_interval(ASK_EVERY_S, self.watch_cache)

    def _flush_queue_if_any(self) -> None:
        if self.session.queued:
            self.do(self.flush_queue())

    # Events of the service

    def drain(self) -> None:
        """Show what happened since the last frame."""
        changes = self.board.take_changes()
        if not changes:
            return
        if changes.is_resync_due:
            self.do(self._resync())
        self._show_open_chat(changes)
        if changes.is_list_changed:
            self.show_list()
        if changes.are_jobs_changed or changes.is_status_changed:
            self.follow_jobs()
            self.show_first_run()
        if changes.is_status_changed:
            self.show_notices()
            self.warm_when_ready()
        self.show_bars()

    async def _resync(self) -> None:
        await self.session.refresh()
        self.show_conversation(keep_position=True)
        self.watch_cache()
        if not self.session.drafts.is_saved:
            self.save_drafts_soon()
        if self.is_first_run:
            await self.find_offer()

    def _show_open_chat(self, changes: Changes) -> None:
        for event in changes.open_chat:
            if isinstance(event, ReplyDone):
                self.warm_draft_soon()
                if event.message.status != "stopped":
                    self.reply_ended_at = time.monotonic()
            shown = self.session.apply(event)
            if shown is not None:
                self._show_change(shown)
        if self.transcript.items and changes.is_list_changed:
            index = len(self.session.messages) - 1
            if index >= 0:
                self.transcript.set_live(index, self._live_of(self.session.messages[index]))

    def _show_change(self, shown: Shown) -> None:
        if shown.kind == "reload" or len(self.transcript.items) < shown.index:
            self.do(self._reload())
            return
        message = self.session.messages[shown.index]
        if shown.kind == "append":
            if self.session.waiting:
                self.show_conversation(keep_position=True)
            else:
                self.transcript.append(self._item(message))
        elif shown.kind == "extend":
            self.transcript.extend(shown.index, message, shown.text)
        else:
            self.transcript.replace(shown.index, message, None)

    async def _reload(self) -> None:
        await self.session.reload()
        self.show_conversation(keep_position=True)

    # Drawing

    def show_conversation(self, *, keep_position: bool = False) -> None:
        items = [self._item(message) for message in self.session.messages]
        items += [
            TranscriptItem(Message(f"queued-{index}", content=text), note="not sent yet · Up takes it back")
            for index, text in enumerate(self.session.waiting)
        ]
        self.transcript.show(items, keep_position=keep_position)
        self.show_composed()
        self.show_first_run()
        self.show_list()
        self.show_bars()

    def _item(self, message: Message) -> TranscriptItem:
        siblings = self.session.siblings(message)
        branch = (siblings.index(message.id) + 1, len(siblings)) if len(siblings) > 1 else None
        conversation = self.session.conversation
        item = TranscriptItem(
            message, branch, is_context_start=conversation is not None and conversation.context_start_id == message.id
        )
        item.live = self._live_of(message)
        return item

    def _live_of(self, message: Message) -> LiveReply | None:
        live = self.board.live.get(self.session.chat_id or "")
        if live is None or not message.is_reply or message.status != "incomplete":
            return None
        return live if live.message_id in ("", message.id) else None

    def show_list(self) -> None:
        query = self.query_one("#search", Input).value
        rows = chat_rows(
            list(self.board.chats.values()),
            self.board.live,
            time.time(),
            self.palette,
            query,
            self.hits if query else (),
            self.kept,
        )
        self.chat_list.show(rows, self.session.chat_id)

    def show_first_run(self) -> None:
        self.set_class(self.is_first_run, "-first-run")
        if self.is_first_run:
            self.query_one(FirstRun).show(self.offer, self.first_job, self.board.status.model, self.palette)

    def show_bars(self) -> None:
        palette, summary = self.palette, self.session.summary
        right = status_parts.top_right(self.board, self.size.width, palette)
        title = status_parts.title_part(summary, self.board, self.size.width, palette)
        self.query_one("#top-bar", Bar).show(title, right)
        num_queued = len(self.session.waiting)
        live = self.board.live.get(self.session.chat_id or "")
        left = status_parts.chat_left(live, self.session.conversation, self.composer.text, num_queued, palette)
        left += status_parts.keeping_parts(self.session, palette)
        if self.editing is not None:
            left = [[("editing: Enter sends a new branch, Esc leaves", palette.warn)]]
        is_saved = self.session.drafts.is_saved if self.composer.text and self.editing is None else None
        context_tokens = self.board.status.model.context_tokens
        self.query_one("#chat-bar", Bar).show(left, status_parts.chat_right(summary, context_tokens, is_saved, palette))
        focused = self.focused.id if self.focused else None
        self.query_one("#keys", Bar).show(status_parts.key_parts(focused, self.escape_does(), palette))

    def set_palette(self, palette: Palette) -> None:
        self.palette = palette
        self.transcript.set_palette(palette)
        self.chat_list.set_palette(palette)
        self.show_kept()
        self.show_first_run()
        self.show_bars()

    # Keys and messages

    def action_move_mark(self, step: int) -> None:
        self.set_focus(self.transcript)
        self.transcript.move_cursor(step)

    def action_scroll_transcript(self, step: int) -> None:
        self.transcript.scroll_pages(step)

    @on(ChatChosen)
    def _chosen(self, event: ChatChosen) -> None:
        self.open(event.chat_id, event.message_id)

    @on(Input.Changed, "#search")
    def _search_changed(self, event: Input.Changed) -> None:
        self.hits = ()
        self.show_list()
        if self._search_timer is not None:
            self._search_timer.stop()
        query = event.value
        self._search_timer = self.set_timer(SEARCH_DELAY_S, lambda: self.do(self.search_messages(query)))

    @on(Input.Submitted, "#search")
    def _search_submitted(self) -> None:
        self.set_focus(self.chat_list)
        self.chat_list.action_move(-100_000)

    def save_drafts_soon(self) -> None:
        if self._draft_timer is not None:
            self._draft_timer.stop()
        self._draft_timer = self.set_timer(DRAFT_DELAY_S, lambda: self.do(self.save_drafts()))

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        self.show_bars()

    def on_resize(self, event: events.Resize) -> None:
        fitting = size_class(*event.size)
        for name in CLASSES:
            self.set_class(name == fitting, name)
        if fitting == "-wide":
            self.remove_class("-list-open")
        self.show_bars()
