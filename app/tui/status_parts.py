"""The parts of the status lines. They say what the service said last, or that it is silent; nothing is guessed."""

from __future__ import annotations

from collections.abc import Sequence

from .board import Board, LiveReply
from .cache_records import CacheReport
from .commands import matching
from .records import ChatSummary, Conversation
from .render import format
from .render.bar import Part
from .render.chat_rows import badge_text
from .render.palette import Palette
from .render.width import shorten
from .service_records import ModelState
from .session import Session
from .widgets.item import live_text

GAUGE_CELLS = 8
MIN_TITLE_CELLS, MAX_TITLE_CELLS = 12, 32
TOP_RIGHT_CELLS = 62
"""What the other parts of the top bar usually take."""
DETAILS_FROM_CELLS = 100
"""Narrower, the gauges have the room that weight format and device would take."""
SHORT_NAMES = {
    "temperature": "temp",
    "top_p": "top-p",
    "top_k": "top-k",
    "min_p": "min-p",
    "repetition_penalty": "rep",
    "max_tokens": "max",
}


def model_part(board: Board, width: int, palette: Palette) -> Part:
    model = board.status.model
    if not board.is_connected:
        if board.trouble:
            return [(f"{board.trouble} · trying again", palette.bad)]
        if board.is_known:
            return [("service lost · reconnecting", palette.bad)]
        return [("starting the service", palette.warn)]
    if model.state == "ready":
        facts = [model.weight_format.partition("-")[0], *device_words(board.status.device, model)]
        details = " ".join(part for part in facts if part) if width >= DETAILS_FROM_CELLS else ""
        return [(model.name, palette.good), (f" {details}" if details else "", palette.dim)]
    if model.state == "loading":
        return [(f"loading {model.name} {100 * model.progress:.0f} %", palette.warn)]
    if model.state == "unloaded":
        return [(model.name, palette.dim), (" unloaded, a message loads it", palette.dim)]
    if model.state == "failed":
        return [(f"{model.name or 'model'} failed: {model.error or 'see the log'}", palette.bad)]
    return [("no model · F3", palette.warn)]


def device_words(device: str, model: ModelState) -> list[str]:
    """The card's name without its maker's; on the CPU, which kernels."""
    if model.card:
        return [model.card.removeprefix("NVIDIA ").removeprefix("GeForce ")]
    return [device, model.kernels.partition(" ")[0]]


def top_right(board: Board, width: int, palette: Palette) -> list[Part]:
    """Model or trouble, the gauge of the batch, and the gauge of the KV pool."""
    parts: list[Part] = [model_part(board, width, palette)]
    if board.is_connected and board.status.model.state == "ready":
        status = board.status
        batch = f"batch {status.batch_size}"
        waiting = f" · {status.num_waiting} waiting" if status.num_waiting else ""
        parts.append([(batch, palette.good if status.batch_size else palette.dim), (waiting, palette.warn)])
        gauge = format.gauge(status.kv_usage, GAUGE_CELLS, palette.glyphs)
        parts.append([(f"KV {gauge} {format.percent(status.kv_usage)}", palette.dim)])
    return parts


def chat_left(
    live: LiveReply | None, conversation: Conversation | None, text: str, num_queued: int, palette: Palette
) -> list[Part]:
    """The phase of this chat's reply, and how it is set; while a command is typed, what it may become."""
    found = matching(text)
    if found:
        names = "  ".join(f"/{command.name} {command.argument}".rstrip() for command in found[:6])
        return [[(names, palette.text)], [("Tab completes", palette.dim)]]
    parts: list[Part] = []
    if live is not None:
        style = palette.good if live.phase == "writing" else palette.warn
        parts.append([(live_text(live), style)])
    if num_queued:
        parts.append([(f"{num_queued} queued", palette.warn)])
    if conversation is not None:
        facts = ["system prompt"] if conversation.system else []
        facts += [f"{SHORT_NAMES.get(name, name)} {value:g}" for name, value in conversation.sampling.items()]
        if facts:
            parts.append([(f" {palette.glyphs.separator} ".join(facts), palette.dim)])
    return parts


def keeping_parts(session: Session, palette: Palette) -> list[Part]:
    """Where a new chat will be kept, and of a private one that it is not."""
    if session.is_private:
        return [[("private: nothing is kept", palette.warn)]]
    report = session.cache.report
    if session.conversation is not None or not report.model:
        return []
    return [[(f"keep KV: {kept_words(report)}", palette.dim), ("  /private keeps nothing", palette.dim)]]


def kept_words(report: CacheReport) -> str:
    """Where the KV of chats that are not private is kept."""
    return "disk" if report.disk.state in ("on", "opening") else "memory only"


def chat_right(
    summary: ChatSummary | None, context_tokens: int, is_draft_saved: bool | None, palette: Palette
) -> list[Part]:
    """How full the context is, and whether the draft is safe."""
    parts: list[Part] = []
    if summary is not None and context_tokens and summary.num_tokens:
        share = summary.num_tokens / context_tokens
        style = palette.bad if share >= 0.95 else palette.warn if share >= 0.85 else palette.dim
        gauge = format.gauge(share, GAUGE_CELLS, palette.glyphs)
        counts = f"{format.tokens(summary.num_tokens)}/{format.tokens(context_tokens)}"
        parts.append([(f"ctx {gauge} {counts}", style)])
    if is_draft_saved is not None:
        parts.append([("draft saved" if is_draft_saved else "draft not saved yet", palette.dim)])
    return parts


def title_part(summary: ChatSummary | None, board: Board, width: int, palette: Palette) -> list[Part]:
    """Whose chat this is, and what goes on elsewhere; the title gives way before the gauges do."""
    parts: list[Part] = [[("chatkv", palette.assistant)]]
    title = summary.shown_title if summary else "New chat"
    cells = min(MAX_TITLE_CELLS, max(MIN_TITLE_CELLS, width - TOP_RIGHT_CELLS))
    parts.append([(shorten(title, cells, palette.glyphs.ellipsis), palette.strong)])
    others = [live for chat_id, live in board.live.items() if summary is None or chat_id != summary.id]
    if others:
        words = badge_text(others[0]) if len(others) == 1 else f"{len(others)} more busy"
        parts.append([(f"{palette.glyphs.writing} {words}", palette.good)])
    return parts


KEY_HINTS: dict[str, Sequence[tuple[str, str]]] = {
    "composer": (
        ("Enter", "send"),
        ("^J", "newline"),
        ("Esc", ""),
        ("^O", "chats"),
        ("^N", "new"),
        ("F3", "model"),
        ("F4", "cache"),
        ("^P", "commands"),
        ("F1", "help"),
    ),
    "transcript": (
        ("c", "copy"),
        ("C", "code"),
        ("e", "edit"),
        ("r", "again"),
        ("[ ]", "branches"),
        ("b", "fork"),
        ("End", "follow"),
        ("Esc", "write"),
        ("F1", "help"),
    ),
    "chats": (
        ("Enter", "open"),
        ("/", "search"),
        ("r", "rename"),
        ("p", "pin"),
        ("d", "delete"),
        ("u", "undo"),
        ("Esc", "write"),
        ("F1", "help"),
    ),
    "search": (("Enter", "to the list"), ("Esc", "clear"), ("F1", "help")),
}


def key_parts(focused_id: str | None, escape_does: str, palette: Palette) -> list[Part]:
    """The keys of the pane in focus; `escape_does` is what Esc means in the composer now."""
    hints = KEY_HINTS.get(focused_id or "", KEY_HINTS["composer"])
    return [[(key, palette.strong), (f" {what or escape_does}", palette.dim)] for key, what in hints]
