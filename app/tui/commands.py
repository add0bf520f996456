"""Slash commands and the palette: every action by name, so that nothing depends on a key getting through."""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMMAND = re.compile(r"/([a-z]+)(?:[ \t]+(.*))?$", re.DOTALL)


@dataclass(frozen=True)
class Command:
    name: str
    what: str
    action: str
    """Action of the main screen. With `argument`, it gets the rest of the line."""
    argument: str = ""
    key: str = ""


COMMANDS = (
    Command("new", "New chat", "new_chat", key="^N"),
    Command("private", "New private chat: nothing of it is kept", "private_chat"),
    Command("chats", "Chats and search", "chats", key="^O"),
    Command("search", "Search titles and messages", "search_for", "[text]"),
    Command("rename", "Rename this chat", "rename_to", "[title]"),
    Command("pin", "Pin or unpin this chat", "pin"),
    Command("delete", "Delete this chat; /undo brings it back", "delete_chat"),
    Command("undo", "Undo the last delete", "undo_delete"),
    Command("model", "Models: download, load, remove", "model_named", "[name]", "F3"),
    Command("system", "Set the system prompt of this chat", "system_prompt", "[text]", "F2"),
    Command("settings", "System prompt and sampling of this chat", "chat_settings", key="F2"),
    Command("stop", "Stop this chat's reply", "stop", key="Esc"),
    Command("continue", "Continue a stopped reply", "continue_reply", key="F7"),
    Command("regenerate", "Another answer to the last message", "regenerate", key="F5"),
    Command("edit", "Edit your last message and send it again", "edit_message"),
    Command("fork", "Fork the chat at the marked message", "fork"),
    Command("copy", "Copy the last reply, or write it to a file", "copy_to", "[> file]"),
    Command("code", "Copy the last code block", "copy_code"),
    Command("export", "Write this chat to a file (.md or .json)", "export_to", "[file]"),
    Command("editor", "Write in $EDITOR", "open_editor", key="^G"),
    Command("cache", "What the KV cache holds", "cache", key="F4"),
    Command("restart", "Start the service anew", "restart_service"),
    Command("theme", "Choose a theme", "theme"),
    Command("help", "Keys and commands", "help", key="F1"),
    Command("quit", "Quit; replies go on in the service", "quit", key="^Q"),
)
_BY_NAME = {command.name: command for command in COMMANDS}


@dataclass(frozen=True)
class Parsed:
    name: str
    argument: str
    command: Command | None
    """None when there is no such command."""


def parse(text: str) -> Parsed | None:
    """The command that `text` is, or None when it is a message (`/usr/bin` is one; so is `/new` behind a space)."""
    match = _COMMAND.match(text.rstrip())
    if match is None:
        return None
    return Parsed(match[1], (match[2] or "").strip(), _BY_NAME.get(match[1]))


def matching(text: str) -> list[Command]:
    """Commands that a line being typed may become."""
    if not text.startswith("/") or " " in text or "\n" in text:
        return []
    return [command for command in COMMANDS if command.name.startswith(text[1:])]


def complete(text: str) -> str | None:
    """The line with its command completed, or None when there is nothing to complete."""
    found = matching(text)
    if not found or text == f"/{found[0].name}":
        return None
    return f"/{found[0].name}" + (" " if found[0].argument else "")
