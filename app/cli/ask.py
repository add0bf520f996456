"""`chatkv ask`: one question, the answer streams to stdout."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import typer
from chatkv.app.errors import UserError
from chatkv.app.hub.reports import human_bytes

from .chats import find_chat
from .output import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_LENGTH, EXIT_OK, is_terminal, say, show
from .running import with_client

if TYPE_CHECKING:
    from chatkv.app.client import Client


def ask(
    words: Annotated[list[str] | None, typer.Argument(help="The question. Piped input comes before it.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="An installed model.")] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System prompt.")] = None,
    is_continued: Annotated[bool, typer.Option("--continue", "-c", help="Go on with the last chat.")] = False,
    chat: Annotated[str | None, typer.Option("--chat", help="Go on with this chat: id or part of the title.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 always takes the likeliest token.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answer.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Keep nothing of it on disk.")] = False,
) -> None:
    """Ask one question; the answer streams to stdout. Ctrl-C stops it and keeps what came."""
    prompt = _prompt(words or [])
    sampling = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    fields: dict[str, Any] = {"sampling": {key: value for key, value in sampling.items() if value is not None}}
    fields |= {key: value for key, value in {"model": model, "system": system}.items() if value is not None}

    async def run(client: Client) -> int:
        await _require_model(client, model)
        chat_id = await _open_chat(client, fields, chat, is_continued, private)
        async with aclosing(client.stream_turn(chat_id, prompt)) as events:
            return await _stream(events)

    try:
        code = with_client(run)
    except KeyboardInterrupt:
        # The closed connection has stopped the reply; what came is in the chat.
        print(flush=True)
        code = EXIT_INTERRUPTED
    raise typer.Exit(code)


def _prompt(words: list[str]) -> str:
    parts = [" ".join(words)] if words else []
    if not sys.stdin.isatty():
        try:
            piped = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                "The piped input is not UTF-8 text.", "Convert it first, for example with iconv."
            ) from error
        parts.insert(0, piped.strip("\n"))
    prompt = "\n\n".join(part for part in parts if part.strip())
    if not prompt:
        raise UserError("There is no question.", 'Use: chatkv ask "..."  or pipe text into it.')
    return prompt


async def _require_model(client: Client, model: str | None) -> None:
    """A fresh home has no model: offer to pull, or say how."""
    rows = await client.list_models()
    if any(row["installed"] for row in rows if model in (None, row["name"])):
        return
    from chatkv.app.settings import load_settings

    names = {row["name"]: row for row in rows}
    wanted = model or load_settings(client.paths).model
    if wanted not in names:
        raise UserError(f"There is no model called '{wanted}'.", "See: chatkv models")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(f"The model {wanted} is not installed.", f"Install it: chatkv pull {wanted}")
    from .models import pull_with_display

    say(f"The model {wanted} is not installed. Download {human_bytes(names[wanted]['download_bytes'])} now? [Y/n]")
    if (await asyncio.to_thread(sys.stdin.readline)).strip().lower() not in ("", "y", "yes"):
        raise UserError(f"Without a model there is no answer. Later: chatkv pull {wanted}")
    await pull_with_display(client, wanted)


async def _open_chat(
    client: Client, fields: dict[str, Any], chat: str | None, is_continued: bool, is_private: bool
) -> str:
    if chat or is_continued:
        chats = await client.list_chats("", 1)
        if not chat and not chats:
            raise UserError("There is no chat to go on with.", "Ask without -c first.")
        chat_id = await find_chat(client, chat) if chat else str(chats[0]["id"])
        if not fields["sampling"]:
            fields = {key: value for key, value in fields.items() if key != "sampling"}
        if fields:
            await client.update_chat(chat_id, fields)
        return chat_id
    return str((await client.create_chat(**fields, private=is_private))["id"])


async def _stream(events: AsyncIterator[dict[str, Any]]) -> int:
    """Write the reply as it comes; the exit code says how it ended."""
    last = ""
    async for event in events:
        if event["type"] == "reply_delta":
            last = event["text"] or last
            print(show(event["text"]), end="", flush=True)
        elif event["type"] == "reply_done":
            if not last.endswith("\n"):
                print(flush=True)
            return _exit_code(event["message"])
    raise UserError("The service ended before the answer was complete.", "What came is kept: chatkv chats show")


def _exit_code(message: dict[str, Any]) -> int:
    status, stats = message["status"], message["stats"] or {}
    if status == "error":
        say(message["error"] or "The answer failed.")
        return EXIT_ERROR
    if is_terminal() and sys.stderr.isatty() and stats:
        reused = f"reused {stats['num_cached_tokens']:,}/{stats['num_prompt_tokens']:,} tok"
        say(f"{reused} · TTFT {stats['ttft_s']:.2f} s · {stats['tokens_per_s']:.1f} tok/s")
    if status == "length":
        say("The answer was cut by the token limit. Go on: chatkv ask -c ...")
        return EXIT_LENGTH
    return EXIT_OK
