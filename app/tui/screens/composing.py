"""From the composer to the service: commands, turns, edits, the queue, drafts, and the choice at a full context."""

from __future__ import annotations

from textual import on

from .. import editor
from ..commands import Parsed, matching, parse
from ..messages import EditorRequested, PromptChanged, QueuedWanted
from ..ports import RefusedError, ServiceLostError
from ..records import Message, OverflowChoice
from ..refusals import OVERFLOW_CODE, ContextOverflowError, QueuedTurnRefusedError
from .desk import LOST_TEXT
from .message_actions import MessageActions
from .warming import Warming

DRAFT_DELAY_S = 0.8
FLUSH_EVERY_S = 0.3


class Composing(MessageActions, Warming):
    composed: dict[str, str]
    """What stands in the composer of each chat visited in this sitting, by the chat's key."""
    _composer_key = ""
    """Key of the chat whose text stands in the composer now."""
    _is_flushing = False

    def submit(self, text: str) -> None:
        """Enter in the composer."""
        text = text.strip("\n")
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
        editing = self.editing
        self._empty_composer()
        self.do(self._send(text, editing, self.session.chat_key))

    @on(PromptChanged)
    def _changed(self) -> None:
        if self.editing is not None:
            self.show_bars()
            return
        self._keep(self.composer.text)
        self.warm_draft_soon()
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

    def fill(self, text: str) -> None:
        """Put text into the composer, and remember it as what stands there."""
        self.composer.set_text(text)
        if self.editing is None:
            self._keep(text)

    def _empty_composer(self) -> None:
        """What stood there is on its way; behind an edit is the draft from before."""
        if self.editing is not None:
            self.editing = None
            self.show_composed()
        else:
            self.fill("")

    def keep_composed(self) -> None:
        if self.editing is None:
            self._keep(self.composer.text)
        self.editing = None

    def show_composed(self) -> None:
        """The open chat's draft and prompts in the composer, unless they are there already."""
        key = self.session.chat_key
        if key != self._composer_key:
            if self.session.made_from(self._composer_key) == key:
                self.composed[key] = self.composed.pop(self._composer_key, "")
            elif self._composer_key:
                self.keep_composed()
            self._composer_key = key
        if self.editing is not None:
            return
        waiting = self.session.waiting
        self.composer.has_queued = bool(waiting)
        text = self.composed.setdefault(key, "" if waiting else self._draft_of(key))
        if text != self.composer.text:
            self.composer.set_text(text)
        self.composer.show_prompts([message.content for message in self.session.messages if not message.is_reply])

    def _draft_of(self, key: str) -> str:
        """As the service has it, unless a newer one is still to be saved."""
        pending = self.session.drafts.pending(key)
        if pending is not None:
            return pending
        return self.session.conversation.draft if self.session.conversation else ""

    def _keep(self, text: str) -> None:
        key = self.session.made_from(self._composer_key) or self._composer_key
        if self.composed.get(key, "") == text:
            return
        self.composed[key] = text
        if parse(text) is None and not matching(text):
            self.session.save_draft(key, text)
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
        self.show_conversation()
        self._give_back(error.text, error.chat_id)
        if error.chat_id == self.session.chat_id and error.refusal.code == OVERFLOW_CODE:
            self._ask_about_room(ContextOverflowError(error.refusal), error.text, None)
            return
        self.say(
            f"A queued message was refused and is a draft again: {error.refusal.message}", tone="error", timeout=10
        )

    async def save_drafts(self) -> None:
        await self.session.drafts.flush(self.session.write_draft)
        self.show_composed()
        self.show_bars()

    def save_drafts_soon(self) -> None:
        raise NotImplementedError

    def show_bars(self) -> None:
        raise NotImplementedError

    def _run_command(self, parsed: Parsed) -> None:
        if parsed.command is None:
            self.say(f"There is no command /{parsed.name}. A space before it sends it as text; /help lists all.")
            return
        self.composer.remember(self.composer.text)
        self.fill("")
        action = getattr(self, f"action_{parsed.command.action}")
        if parsed.command.argument:
            action(parsed.argument)
        else:
            action()

    async def _send(self, text: str, editing: Message | None, key: str) -> None:
        """What was refused goes back to where it was typed."""
        try:
            if editing is not None:
                sent = await self.session.edit(editing, text, key)
            else:
                sent = await self.session.send(text, key)
        except ContextOverflowError as error:
            self._give_back(text, key, editing)
            self._ask_about_room(error, text, editing)
            return
        except ServiceLostError:
            self._give_back(text, key, editing)
            self.say(LOST_TEXT, tone="warning")
            return
        except RefusedError:
            self._give_back(text, key, editing)
            raise
        self.show_conversation()
        if not sent and self.is_first_run:
            await self.begin_first_run()
        elif not sent:
            why = "this reply is done" if self.session.is_busy else "a model is ready"
            self.say(f"Kept: it is sent when {why}.")

    def _give_back(self, text: str, key: str, editing: Message | None = None) -> None:
        """A text that was not taken stands in its chat's composer again, before what was typed there since."""
        key = self.session.made_from(key) or key
        if key != self.session.chat_key or self.editing is not None:
            self.composed[key] = "\n\n".join(part for part in (text, self.composed.get(key, "")) if part)
            self.session.save_draft(key, self.composed[key])
            self.save_drafts_soon()
        elif editing is not None:
            self.begin_edit(editing, text)
        else:
            self.fill("\n\n".join(part for part in (text, self.composer.text) if part))

    def _ask_about_room(self, error: ContextOverflowError, text: str, editing: Message | None) -> None:
        async def act(choice: OverflowChoice) -> None:
            if self.composer.text == text:
                self._empty_composer()
            await self.session.make_room(choice)
            await self._send(text, editing, self.session.chat_key)

        self.ask_about_overflow(error, act)
