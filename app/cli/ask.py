"""`chatkv ask`: one question, the answer streams to stdout."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatkv.app.errors import UserError
from chatkv.app.hub.reports import human_bytes

from . import EXIT_INTERRUPTED
from .chats import find_chat
from .models import pull_with_display
from .output import EXIT_ERROR, EXIT_LENGTH, EXIT_OK, confirm, is_terminal, say, show
from .running import with_client

if TYPE_CHECKING:
    from chatkv.app.client import Client


@dataclass(frozen=True)
class MissingModel:
    name: str
    download_bytes: int


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
    if private and (is_continued or chat):
        raise UserError("Only a new chat can be private.", "Leave out --private, or -c and --chat.")
    prompt = _prompt(words or [])
    fields = _fields(model, system, {"temperature": temperature, "max_tokens": max_tokens, "seed": seed})

    async def run(client: Client) -> int | MissingModel:
        if missing := await _missing_model(client, model):
            return missing
        return await _ask(client, prompt, fields, chat, is_continued, private)

    try:
        code = with_client(run)
        if isinstance(code, MissingModel):
            _offer_to_pull(code)
            code = with_client(run)
    except KeyboardInterrupt:
        # The closed connection has stopped the reply; what came is in the chat.
        print(flush=True)
        code = EXIT_INTERRUPTED
    raise typer.Exit(code if isinstance(code, int) else EXIT_ERROR)


def _fields(model: str | None, system: str | None, sampling: dict[str, float | int | None]) -> dict[str, Any]:
    """What was said about the chat, and nothing that was not."""
    given = {key: value for key, value in sampling.items() if value is not None}
    for name, value in given.items():
        if not math.isfinite(value):
            raise UserError(f"--{name} must be a number, got {value}.")
    said = {key: value for key, value in {"model": model, "system": system}.items() if value is not None}
    return {"sampling": given} | said


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


async def _missing_model(client: Client, model: str | None) -> MissingModel | None:
    """A fresh home has no model.

    Raises:
        UserError: the catalogue does not know it either, or nobody is there who could be asked.
    """
    rows = await client.list_models()
    if any(row["installed"] for row in rows if model in (None, row["name"])):
        return None
    from chatkv.app.settings import load_settings

    sizes = {row["name"]: int(row["download_bytes"] or 0) for row in rows}
    wanted = model or load_settings(client.paths).model
    if wanted not in sizes:
        raise UserError(f"There is no model called '{wanted}'.", "See: chatkv models")
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(f"The model {wanted} is not installed.", f"Install it: chatkv pull {wanted}")
    return MissingModel(wanted, sizes[wanted])


def _offer_to_pull(missing: MissingModel) -> None:
    size = human_bytes(missing.download_bytes)
    if not confirm(f"The model {missing.name} is not installed. Download {size} now?", default=True):
        raise UserError(f"Without a model there is no answer. Later: chatkv pull {missing.name}")
    with_client(lambda client: pull_with_display(client, missing.name))


async def _ask(
    client: Client, prompt: str, fields: dict[str, Any], chat: str | None, is_continued: bool, is_private: bool
) -> int:
    from chatkv.app.client import RefusedError, ServiceLostError

    chat_id = await _open_chat(client, fields, chat, is_continued, is_private)
    try:
        async with aclosing(client.stream_turn(chat_id, prompt)) as events:
            return await _stream(events)
    except RefusedError:
        if not (chat or is_continued):
            await client.delete_chat(chat_id)  # Nothing was said in it.
        raise
    except ServiceLostError as error:
        if is_terminal():
            print(flush=True)
        raise UserError(
            "The service ended before the answer was complete.",
            f"What came is kept: chatkv chats show {chat_id}\nThe log of the service: {client.paths.log_file}",
        ) from error


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
    from chatkv.app.client import ServiceLostError

    raise ServiceLostError("the answer has no end")


def _exit_code(message: dict[str, Any]) -> int:
    status, stats = message["status"], message["stats"] or {}
    if status == "error":
        say(message["error"] or "The answer failed.")
        return EXIT_ERROR
    if is_terminal() and sys.stderr.isatty() and stats:
        say(proof_line(stats))
    if status == "length":
        say("The answer was cut by the token limit. Go on: chatkv ask -c ...")
        return EXIT_LENGTH
    return EXIT_OK


def proof_line(stats: dict[str, Any]) -> str:
    parts = [f"reused {stats['num_cached_tokens']:,}/{stats['num_prompt_tokens']:,} tok"]
    if stats["ttft_s"] is not None:
        parts.append(f"TTFT {stats['ttft_s']:.2f} s")
    if stats["tokens_per_s"] is not None:  # Two tokens at least.
        parts.append(f"{stats['tokens_per_s']:.1f} tok/s")
    return " · ".join(parts)
