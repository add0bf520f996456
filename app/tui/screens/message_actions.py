"""Actions on messages: stop, continue, regenerate, edit, branch, fork, copy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from textual import on

from .. import clipboard
from ..messages import MessagePicked
from ..records import Message, OverflowChoice
from ..refusals import ContextOverflowError
from ..render.palette import Palette
from ..render.stream import MarkdownStream
from .sheets import Sheets

EXPORT_NAME = "chat.md"


class MessageActions(Sheets):
    editing: Message | None = None
    """The message that the composer's text will replace, as a branch."""
    _code_position: int = 0
    """How many code blocks of the marked reply were copied already, from its end."""

    @on(MessagePicked)
    def _picked(self) -> None:
        self._code_position = 0

    def action_stop(self) -> None:
        if self.session.is_busy:
            self.do(self.session.stop())
        else:
            self.say("Nothing is being written in this chat.")

    def action_continue_reply(self) -> None:
        self.do(self._write(self.session.continue_reply))

    def action_regenerate(self) -> None:
        marked = self._marked()
        reply = marked if marked is not None and marked.is_reply else self.session.thread.last_reply
        if reply is None:
            self.say("There is no reply yet.")
            return
        self.do(self._write(lambda: self.session.regenerate(reply)))

    def action_edit_message(self) -> None:
        marked = self._marked()
        message = marked if marked is not None and not marked.is_reply else self.session.thread.last_prompt
        if message is None:
            self.say("There is no message of yours yet.")
            return
        self.begin_edit(message, message.content)

    def begin_edit(self, message: Message, text: str) -> None:
        """The composer holds `text` until it is sent in place of `message`; what stood there comes back then."""
        self.keep_composed()
        self.editing = message
        self.composer.set_text(text)
        self.set_focus(self.composer)

    def action_branch(self, step: int) -> None:
        message = self._marked()
        if message is None or len(self.session.siblings(message)) < 2:
            message = next((m for m in reversed(self.session.messages) if len(self.session.siblings(m)) > 1), None)
        if message is None:
            self.say("This chat has no branches.")
            return
        self.do(self._switch(message, step))

    def action_fork(self) -> None:
        message = self._marked()
        if message is None:
            self.say("There is nothing to fork yet.")
            return
        self.do(self._fork(message))

    def action_copy_message(self) -> None:
        message = self._marked()
        if message is not None:
            self.copy(message.content, "message")

    def action_copy_code(self) -> None:
        """Copy the last code block of the marked (else the last) reply; again: the one before."""
        marked = self._marked()
        reply = marked if marked is not None and marked.is_reply else self.session.thread.last_reply
        blocks = code_blocks(reply.content) if reply else []
        if not blocks:
            self.say("There is no code block here.")
            return
        self._code_position += 1
        index = -1 - (self._code_position - 1) % len(blocks)
        self.copy(blocks[index], f"code block ({len(blocks) + index + 1} of {len(blocks)})")

    def action_copy_to(self, argument: str = "") -> None:
        reply = self.session.thread.last_reply
        if reply is None:
            self.say("There is no reply yet.")
        elif argument.startswith(">"):
            self.write_file(Path(argument[1:].strip()), reply.content)
        else:
            self.copy(reply.content, "reply")

    def action_export_to(self, argument: str = "") -> None:
        if self.session.chat_id is None:
            self.say("This chat is empty.")
        else:
            self.do(self._export(self.session.chat_id, Path(argument or EXPORT_NAME)))

    def copy(self, text: str, what: str) -> None:
        # What is private is in no file of ours.
        file = self.state_dir / "clipboard.txt" if self.state_dir and not self.session.is_private else None
        copied = clipboard.copy(text, self.app.copy_to_clipboard, file)
        self.say(f"Copied the {what} {copied.how}" if copied.is_certain else f"The {what} was {copied.how}.")

    def write_file(self, file: Path, text: str) -> None:
        """Write a new file; one that exists is left alone."""
        file = file.expanduser()
        try:
            with file.open("x", encoding="utf-8") as out:
                out.write(text)
        except OSError as error:
            self.say(f"Cannot write {file}: {error.strerror}.", tone="error")
            return
        self.say(f"Written to {file}")

    async def _write(self, write: Callable[[], Awaitable[None]]) -> None:
        """Have a reply written; when the context is full, after a choice."""

        async def act(choice: OverflowChoice) -> None:
            await self.session.make_room(choice)
            await self._write(write)

        try:
            await write()
        except ContextOverflowError as error:
            self.ask_about_overflow(error, act)
        self.show_conversation()

    async def _switch(self, message: Message, step: int) -> None:
        shown_id = await self.session.switch_branch(message, step)
        if shown_id is None:
            self.say("No further branch on this side.")
        else:
            self.show_conversation(keep_position=True)
            self.transcript.mark_message(shown_id)

    async def _fork(self, message: Message) -> None:
        chat_id = await self.session.fork(message)
        await self.session.open_chat(chat_id)
        self.show_conversation()
        self.say("Forked: this is the new chat.")

    async def _export(self, chat_id: str, file: Path) -> None:
        if file.expanduser().is_dir():
            file /= EXPORT_NAME
        text = await self.session.service.export_chat(chat_id, "json" if file.suffix == ".json" else "markdown")
        self.write_file(file, text)

    def _marked(self) -> Message | None:
        """The message under the mark; one that still waits to be sent does not count."""
        marked = self.transcript.marked
        ids = {message.id for message in self.session.messages}
        return marked if marked is not None and marked.id in ids else None


def code_blocks(markdown: str) -> list[str]:
    stream = MarkdownStream(80, Palette())
    stream.feed(markdown)
    stream.finish()
    return ["\n".join(block.lines) for block in stream.code_blocks]
