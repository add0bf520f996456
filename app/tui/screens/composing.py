"""From the composer to the service: commands, turns, edits, the queue, drafts, and the choice at a full context."""

from __future__ import annotations

from textual import on

from .. import editor
from ..commands import Parsed, parse
from ..drafts import NEW_CHAT
from ..messages import EditorRequested, PromptChanged, PromptSubmitted, QueuedWanted
from ..ports import RefusedError, ServiceLostError
from ..records import Message, OverflowChoice
from ..session import OVERFLOW_CODE, ContextOverflowError, QueuedTurnRefusedError
from .desk import LOST_TEXT
from .message_actions import MessageActions
from .sheets import Sheets

DRAFT_DELAY_S = 0.8
FLUSH_EVERY_S = 0.3


class Composing(MessageActions, Sheets):
    composed: dict[str, str]
    """What stands in the composer of each chat visited in this sitting."""
    _is_flushing = False

    @on(PromptSubmitted)
    def _submit(self, event: PromptSubmitted) -> None:
        text = event.text.strip("\n")
        if not text.strip():
            if self.is_first_run and self.editing is None:
                self.do(self.begin_first_run())
            return
        parsed = parse(text)
        if parsed is not None and self.editing is None:
            self._run_command(parsed)
            return
        if not self.board.is_connected:
            self.say("No service to send to yet. Your text stays here and is kept as a draft.", tone="warning")
            return
        self.composer.remember(text)
        self.fill("")
        editing, self.editing = self.editing, None
        self.do(self._send(text, editing))

    @on(PromptChanged)
    def _changed(self) -> None:
        if self.editing is not None:
            self.show_bars()
            return
        self._keep(self.composer.text)
        self.show_bars()

    @on(QueuedWanted)
    def _take_back_queued(self) -> None:
        text = self.session.take_back_queued()
        if text is not None:
            self.fill(text)
            self.show_conversation()

    @on(EditorRequested)
    def _open_editor(self) -> None:
        self.action_open_editor()

    def action_open_editor(self) -> None:
        try:
            with self.app.suspend():
                text = editor.edit(self.composer.text)
        except Exception as error:  # SuspendNotSupported has no public base; an editor can fail in any way.
            self.say(f"The editor could not be used: {error}", tone="error")
            return
        self.app.refresh(layout=True)
        self.fill(text)
        self.set_focus(self.composer)

    @property
    def chat_key(self) -> str:
        return self.session.chat_id or NEW_CHAT

    def fill(self, text: str) -> None:
        """Put text into the composer, and remember it as what stands there."""
        self.composer.set_text(text)
        if self.editing is None:
            self._keep(text)

    def keep_composed(self) -> None:
        if self.editing is None:
            self._keep(self.composer.text)
        self.editing = None

    def _keep(self, text: str) -> None:
        if self.composed.get(self.chat_key, "") == text:
            return
        self.composed[self.chat_key] = text
        if parse(text) is None:
            self.session.save_draft(self.session.chat_id, text)
            self.save_drafts_soon()

    async def flush_queue(self) -> None:
        """Send what waits, if it can go now; one attempt at a time."""
        if self._is_flushing or not self.session.queued:
            return
        self._is_flushing = True
        try:
            if self.session.chat_id in await self.session.flush_queue():
                self.show_conversation()
        except QueuedTurnRefusedError as error:
            self._return_queued(error)
        except ServiceLostError:
            pass  # The bar says so, and the turn still waits.
        finally:
            self._is_flushing = False

    def _return_queued(self, error: QueuedTurnRefusedError) -> None:
        """The text goes back to where it was typed."""
        if error.chat_id == self.session.chat_id:
            self.show_conversation()
            self._give_back(error.text)
            if error.refusal.code == OVERFLOW_CODE:
                self._ask_about_overflow(ContextOverflowError(error.text, error.refusal), None)
                return
        else:
            before = self.composed.get(error.chat_id, "")
            self.composed[error.chat_id] = "\n\n".join(part for part in (before, error.text) if part)
            self.session.save_draft(error.chat_id, self.composed[error.chat_id])
        self.say(
            f"A queued message was refused and is a draft again: {error.refusal.message}", tone="error", timeout=10
        )

    async def save_drafts(self) -> None:
        await self.session.drafts.flush(self._save_draft)
        self.show_bars()

    def save_drafts_soon(self) -> None:
        raise NotImplementedError

    def show_bars(self) -> None:
        raise NotImplementedError

    def _run_command(self, parsed: Parsed) -> None:
        self.fill("")
        if parsed.command is None:
            self.say(f"There is no command /{parsed.name}. A space before it sends it as text; /help lists all.")
            return
        action = getattr(self, f"action_{parsed.command.action}")
        if parsed.command.argument:
            action(parsed.argument)
        else:
            action()

    async def _send(self, text: str, editing: Message | None) -> None:
        """What was refused goes back into the composer, unless something else was typed there since."""
        try:
            sent = await (self.session.edit(editing, text) if editing else self.session.send(text))
        except ContextOverflowError as error:
            self._give_back(text)
            self._ask_about_overflow(error, editing)
            return
        except ServiceLostError:
            self._give_back(text)
            self.say(LOST_TEXT, tone="warning")
            return
        except RefusedError:
            self._give_back(text)
            raise
        self.show_conversation()
        if not sent and self.is_first_run:
            await self.begin_first_run()
        elif not sent:
            why = "this reply is done" if self.session.is_busy else "a model is ready"
            self.say(f"Kept: it is sent when {why}.")

    def _give_back(self, text: str) -> None:
        if not self.composer.text:
            self.fill(text)
        else:
            self.composer.remember(text)

    def _ask_about_overflow(self, error: ContextOverflowError, editing: Message | None) -> None:
        from .overflow import OverflowScreen

        def chosen(choice: OverflowChoice | None) -> None:
            if choice is None:
                return
            if self.composer.text == error.text:
                self.fill("")
            self.do(self._send_after_choice(choice, error.text, editing))

        self.app.push_screen(OverflowScreen(error, self.palette), chosen)

    async def _send_after_choice(self, choice: OverflowChoice, text: str, editing: Message | None) -> None:
        if choice.kind == "fork" and self.session.messages:
            chat_id = await self.session.fork(self.session.messages[-1])
            await self.session.open_chat(chat_id)
        await self.session.update_chat({"context_start_id": choice.context_start_id})
        await self._send(text, editing if choice.kind != "fork" else None)

    async def _save_draft(self, chat_id: str, text: str) -> None:
        if chat_id == NEW_CHAT:
            chat_id = await self.session.ensure_chat()
            self.composed[chat_id] = self.composed.pop(NEW_CHAT, text)
            self.show_list()
        await self.session.service.update_chat(chat_id, {"draft": text})
