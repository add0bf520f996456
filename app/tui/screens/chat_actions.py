"""Actions on chats: open, new, rename, pin, delete and undo, search, models, settings, help."""

from __future__ import annotations

from dataclasses import replace

from textual.widgets import Input

from ..records import ChatSummary, SearchHit
from ..render.forgotten import cached_gone
from .composing import Composing
from .keeping import Keeping

SEARCH_DELAY_S = 0.2


class ChatActions(Composing, Keeping):
    hits: tuple[SearchHit, ...] = ()
    _deleted: list[ChatSummary]
    """Newest last, for undo."""

    def action_new_chat(self) -> None:
        self.after_typing(self._new_chat)

    def _new_chat(self) -> None:
        self.keep_composed()
        self.session.begin_new()
        self.show_conversation()
        self.close_list()
        self.set_focus(self.composer)

    def action_private_chat(self) -> None:
        """A new chat of which nothing is kept; in a new one: the other way round."""
        self.after_typing(self.switch_private)

    def switch_private(self) -> None:
        text, is_new = self.composer.text, self.session.chat_id is None
        if is_new:
            self.fill("")
        is_private = not (is_new and self.session.is_private)
        self.keep_composed()
        self.session.begin_new(is_private=is_private)
        self.show_conversation()
        self.close_list()
        self.set_focus(self.composer)
        if is_new:
            self.fill(text)
        kept = "gone when the service ends, and never on disk" if is_private else "kept"
        self.say(f"New chat: what is said in it is {kept}.")

    def action_chats(self) -> None:
        """Show the list and go to it; again: back to the composer."""
        if self.chat_list.has_focus:
            self.leave_list()
            return
        self.open_list()
        self.set_focus(self.chat_list)

    def action_toggle_list(self) -> None:
        if self.has_class("-list-open") or (self.has_class("-wide") and not self.has_class("-list-hidden")):
            self.close_list(is_hidden=True)
            self.set_focus(self.composer)
        else:
            self.open_list()

    def action_search(self) -> None:
        self.open_list()
        self.set_focus(self.query_one("#search", Input))

    def action_search_for(self, argument: str = "") -> None:
        self.action_search()
        self.query_one("#search", Input).value = argument

    def action_rename(self) -> None:
        chat = self.chosen_chat
        if chat is None:
            self.say("This chat is empty; write something first.")
            return
        from .rename import RenameScreen

        def renamed(title: str | None) -> None:
            if title:
                self.do(self._rename(chat, title))

        self.app.push_screen(RenameScreen(chat.title), renamed)

    def action_rename_to(self, argument: str = "") -> None:
        if argument and self.chosen_chat is not None:
            self.do(self._rename(self.chosen_chat, argument))
        else:
            self.action_rename()

    def action_pin(self) -> None:
        if self.chosen_chat is not None:
            self.do(self._pin(self.chosen_chat))

    def action_delete_chat(self) -> None:
        if self.chosen_chat is not None:
            self.do(self._delete(self.chosen_chat))
        else:
            self.say("This chat is empty.")

    def action_undo_delete(self) -> None:
        if self._deleted:
            self.do(self._restore(self._deleted.pop()))
        else:
            self.say("Nothing to undo. Deleted chats stay in the trash for 30 days.")

    def action_live_chat(self, step: int) -> None:
        """Go to the next chat that is being written."""
        ids = [chat.id for chat in sorted(self.board.chats.values(), key=lambda c: -c.updated_at)]
        live = [chat_id for chat_id in ids if chat_id in self.board.live]
        if not live:
            self.say("No chat is being written.")
            return
        current = self.session.chat_id
        position = live.index(current) + step if current in live else 0
        self.open(live[position % len(live)])

    def open(self, chat_id: str, message_id: str | None = None) -> None:
        def act() -> None:
            self.keep_composed()
            self.do(self._open(chat_id, message_id))

        self.after_typing(act)

    @property
    def chosen_chat(self) -> ChatSummary | None:
        """The chat under the bar when the list has the focus, else the open one."""
        if self.chat_list.has_focus:
            return self.board.chats.get(self.chat_list.highlighted_chat_id or "")
        return self.session.summary

    def open_list(self) -> None:
        self.remove_class("-list-hidden")
        if not self.has_class("-wide"):
            self.add_class("-list-open")
        self.show_list()
        self.watch_cache()

    def leave_list(self) -> None:
        """Back to the composer; what was searched for is done with."""
        self.query_one("#search", Input).value = ""
        self.close_list()
        self.set_focus(self.composer)

    def close_list(self, *, is_hidden: bool = False) -> None:
        self.remove_class("-list-open")
        self.set_class(is_hidden and self.has_class("-wide"), "-list-hidden")

    async def _open(self, chat_id: str, message_id: str | None) -> None:
        if not await self.session.open_chat(chat_id):
            return
        self.close_list()
        self.show_conversation()
        self.set_focus(self.composer)
        self.warm_opened_soon()
        if message_id is not None:
            await self._mark(message_id)

    async def _mark(self, message_id: str) -> None:
        """Go to a message, on its branch if it is on another one."""
        if not self.transcript.mark_message(message_id):
            await self.session.show_branch(message_id)
            self.show_conversation()
            self.transcript.mark_message(message_id)
        self.set_focus(self.transcript)

    async def _rename(self, chat: ChatSummary, title: str) -> None:
        await self.session.service.update_chat(chat.id, {"title": title})
        self.board.put_chat(replace(self.board.chats.get(chat.id, chat), title=title))
        self.show_list()

    async def _pin(self, chat: ChatSummary) -> None:
        await self.session.service.update_chat(chat.id, {"is_pinned": not chat.is_pinned})
        self.board.put_chat(replace(self.board.chats.get(chat.id, chat), is_pinned=not chat.is_pinned))
        self.show_list()

    async def _delete(self, chat: ChatSummary) -> None:
        answer = await self.session.service.delete_chat(chat.id)
        self._deleted.append(chat)
        self.board.drop_chat(chat.id)
        if self.session.chat_id == chat.id:
            self.session.begin_new()
            self.show_conversation()
        self.show_list()
        days = "while the service runs" if chat.is_private else "30 days"
        undo = f"u or /undo brings it back ({days})."
        self.say(f"Deleted “{chat.shown_title}”. {undo}\n{cached_gone(answer)}".strip())

    async def _restore(self, chat: ChatSummary) -> None:
        await self.session.service.restore_chat(chat.id)
        self.board.put_chat(replace(chat, state="idle"))
        if not self.chat_list.has_focus:
            await self._open(chat.id, None)
        elif await self.session.open_chat(chat.id):
            self.show_conversation()
            self.chat_list.highlight_chat(chat.id)

    async def search_messages(self, query: str) -> None:
        found = await self.session.service.search(query) if query.strip() else []
        self.hits = tuple(SearchHit.from_json(hit) for hit in found)
        self.show_list()
