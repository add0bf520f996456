"""All keys in one place. Each has an id, so that the settings can move it.

Not used on purpose: what terminals, tmux or screen keep (^A ^B ^S, ^H ^I ^M ^[, ^\\, Alt+digit, F10, F11). Each action
is also in the palette and, where it makes sense, a slash command: nothing depends on a key getting through.
"""

from __future__ import annotations

from textual.binding import Binding, BindingType


def _key(keys: str, action: str, what: str, id: str, *, priority: bool = False) -> Binding:
    return Binding(keys, action, what, show=False, id=id, priority=priority)


MAIN_BINDINGS: list[BindingType] = [
    _key(
        "escape", "escape", "Close what is open, else stop the reply, else change focus", "main.escape", priority=True
    ),
    _key("ctrl+c", "interrupt", "Copy the selection, else stop, else twice to quit", "main.interrupt", priority=True),
    _key("ctrl+o", "chats", "Chats and search", "main.chats", priority=True),
    _key("ctrl+n", "new_chat", "New chat", "main.new", priority=True),
    _key("f1", "help", "Help", "main.help", priority=True),
    _key("f2", "chat_settings", "Settings of this chat", "main.settings", priority=True),
    _key("f3", "models", "Models", "main.models", priority=True),
    _key("f4", "cache", "KV cache", "main.cache", priority=True),
    _key("f5", "regenerate", "Another answer", "main.regenerate", priority=True),
    _key("f6", "toggle_list", "Show or hide the chat list", "main.pane", priority=True),
    _key("f7", "continue_reply", "Continue a stopped reply", "main.continue", priority=True),
    _key("alt+up", "move_mark(-1)", "Mark the message before", "main.mark-up", priority=True),
    _key("alt+down", "move_mark(1)", "Mark the message after", "main.mark-down", priority=True),
    _key("alt+pageup", "live_chat(-1)", "Previous live chat", "main.live-previous", priority=True),
    _key("alt+pagedown", "live_chat(1)", "Next live chat", "main.live-next", priority=True),
    _key("pageup", "scroll_transcript(-1)", "Scroll up", "main.page-up"),
    _key("pagedown", "scroll_transcript(1)", "Scroll down", "main.page-down"),
    _key("ctrl+q", "quit", "Quit", "main.quit", priority=True),
]
"""Priority, so that keys typed in one burst act in order: `^N` and a text must not put the text into the old chat."""

TRANSCRIPT_BINDINGS: list[BindingType] = [
    _key("k,up", "scroll_line(-1)", "Up", "transcript.up"),
    _key("j,down", "scroll_line(1)", "Down", "transcript.down"),
    _key("pageup", "scroll_page(-1)", "Page up", "transcript.page-up"),
    _key("pagedown", "scroll_page(1)", "Page down", "transcript.page-down"),
    _key("home", "home", "To the start", "transcript.home"),
    _key("end", "follow", "To the end, and follow", "transcript.end"),
    _key("c", "screen.copy_message", "Copy the message", "transcript.copy"),
    _key("C", "screen.copy_code", "Copy the code block (again: the one before)", "transcript.copy-code"),
    _key("e", "screen.edit_message", "Edit and send again, as a branch", "transcript.edit"),
    _key("r", "screen.regenerate", "Another answer, as a branch", "transcript.regenerate"),
    _key("b", "screen.fork", "Fork the chat here", "transcript.fork"),
    _key("[", "screen.branch(-1)", "Branch before", "transcript.branch-previous"),
    _key("]", "screen.branch(1)", "Branch after", "transcript.branch-next"),
    _key("u", "screen.undo_delete", "Undo the last delete", "transcript.undo"),
]

CHAT_LIST_BINDINGS: list[BindingType] = [
    _key("k,up", "move(-1)", "Up", "list.up"),
    _key("j,down", "move(1)", "Down", "list.down"),
    _key("pageup", "move(-10)", "Page up", "list.page-up"),
    _key("pagedown", "move(10)", "Page down", "list.page-down"),
    _key("home", "move(-100000)", "First", "list.home"),
    _key("end", "move(100000)", "Last", "list.end"),
    _key("enter", "choose", "Open", "list.open"),
    _key("r", "screen.rename", "Rename", "list.rename"),
    _key("d,delete", "screen.delete_chat", "Delete (u brings it back)", "list.delete"),
    _key("u", "screen.undo_delete", "Undo the last delete", "list.undo"),
    _key("p", "screen.pin", "Pin or unpin", "list.pin"),
    _key("/", "screen.search", "Search", "list.search"),
]

CHAIN_LIST_BINDINGS: list[BindingType] = [
    _key("k,up", "move(-1)", "Up", "chains.up"),
    _key("j,down", "move(1)", "Down", "chains.down"),
    _key("pageup", "move(-10)", "Page up", "chains.page-up"),
    _key("pagedown", "move(10)", "Page down", "chains.page-down"),
    _key("home", "move(-100000)", "First", "chains.home"),
    _key("end", "move(100000)", "Last", "chains.end"),
    _key("enter", "choose", "Open the chat", "chains.open"),
]

COMPOSER_BINDINGS: list[BindingType] = [
    _key("ctrl+g", "open_editor", "Write in $EDITOR", "composer.editor"),
    _key("pageup", "screen.scroll_transcript(-1)", "Scroll the conversation up", "composer.page-up"),
    _key("pagedown", "screen.scroll_transcript(1)", "Scroll the conversation down", "composer.page-down"),
]

COMPOSER_KEYS = (
    ("Enter", "Send (queued while a reply is being written)"),
    ("Ctrl+J", "New line; also Shift+Enter, or \\ then Enter"),
    ("Up, Down", "Earlier prompts, at the first and last line"),
    ("Tab", "Complete a /command"),
)
"""Keys that the composer handles itself, for the help."""
