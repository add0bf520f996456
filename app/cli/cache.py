"""`chatkv cache`: what is kept of the chats' attention state, where it lies, and how to be rid of it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from chatkv.app.errors import UserError
from chatkv.app.hub.reports import human_bytes
from chatkv.app.paths import Paths
from chatkv.app.tui.render import format

from .chats import ChatArgument, find_chat
from .output import (
    EXIT_ERROR,
    EXIT_OK,
    JsonOption,
    confirm,
    is_terminal,
    print_json,
    print_table,
    say,
    show,
)
from .running import with_client

if TYPE_CHECKING:
    from chatkv.app.client import Client

app = typer.Typer(help="What is kept so that chats resume.", no_args_is_help=False)

Result = TypeVar("Result")
LOADING_POLL_S = 0.1


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """What is kept so that chats resume instead of being computed again; without a subcommand the status."""
    if context.invoked_subcommand is None:
        status()


@app.command("status")
def status(as_json: JsonOption = False) -> None:
    """Sizes, hit rates and what was written, tier by tier. Starts no service."""
    directory = Paths.from_env().kv_dir
    found = _if_running(lambda client: client.cache())
    if found is None:
        used_bytes = _allocated_bytes(directory)
        if as_json:
            print_json({"running": False, "directory": str(directory), "used_bytes": used_bytes})
        else:
            print(show(f"No service runs. On disk {human_bytes(used_bytes)} are kept, in {directory}"))
    elif as_json:
        print_json({"running": True, "directory": str(directory), **found})
    else:
        from .cache_text import print_status

        print_status(found, str(directory))


@app.command("chats")
def chats(as_json: JsonOption = False) -> None:
    """Where each chat's blocks lie; how long it takes to resume it, and to compute it instead."""
    cache = with_client(_cache_of_loaded)
    if as_json:
        print_json({key: cache[key] for key in ("model", "block_size", "chats", "shared", "evicts_next")})
        return
    from chatkv.app.tui.cache_records import CacheReport

    from .cache_text import chat_fields, print_chats

    report = CacheReport.from_json(cache)
    if is_terminal() and report.chains:
        print_chats(report)
    else:
        nothing = "Nothing is kept of any chat yet."
        if not report.model:
            nothing = "No model is loaded, so it is not known which chats it would resume; a prompt loads it."
        print_table((), (chat_fields(chain, report) for chain in report.chains), nothing)


@app.command("forget")
def forget(chat: ChatArgument, as_json: JsonOption = False) -> None:
    """Remove what is kept of one chat, everywhere. Its text stays."""

    async def run(client: Client) -> dict[str, Any]:
        return await client.forget_cache(await find_chat(client, chat))

    done = with_client(run)
    if as_json:
        print_json(done)
        return
    print(f"{format.blocks(done['num_removed'])} removed.")
    if done["num_shared"]:
        them = "it" if done["num_shared"] == 1 else "them"
        print(f"{format.blocks(done['num_shared'])} kept, because other chats share {them}.")
    _say_if_incomplete(done)


@app.command("clear")
def clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False, as_json: JsonOption = False
) -> None:
    """Remove everything that is kept, of all chats and models. The texts of the chats stay."""
    if not yes and not sys.stdin.isatty():
        raise UserError("There is no terminal here to ask whether the cache may be cleared.", "Use --yes.")
    if not yes and not confirm("Every chat is computed again when it is next used. Clear the cache?", default=False):
        say("Nothing was removed.")
        raise typer.Exit(EXIT_ERROR)
    done = with_client(lambda client: client.clear_cache())
    if as_json:
        print_json(done)
        return
    print(f"The cache is empty: {format.blocks(done['num_removed'])} removed.")
    _say_if_incomplete(done)


@app.command("offload")
def offload(chat: ChatArgument, as_json: JsonOption = False) -> None:
    """Free a chat's blocks on the device where a lower tier holds them."""

    async def run(client: Client) -> dict[str, Any]:
        return await client.offload_chat(await find_chat(client, chat))

    done = _if_running(run) or {"num_offloaded": 0}
    print_json(done) if as_json else print(f"{format.blocks(done['num_offloaded'])} freed on the device.")


@app.command("prune")
def prune(as_json: JsonOption = False) -> None:
    """Remove what no installed model can use any more."""
    done = with_client(lambda client: client.prune_cache())
    if as_json:
        print_json(done)
    elif done["num_slabs"]:
        print(
            f"{format.blocks(done['num_blocks'])} of removed models are gone: {human_bytes(done['freed_bytes'])} freed."
        )
    else:
        print("Nothing to remove: all that is kept belongs to installed models.")


@app.command("verify")
def verify(as_json: JsonOption = False) -> None:
    """Read and check every block on disk; bad ones are removed. Exit code 1 when there were any."""

    async def run(client: Client) -> dict[str, Any]:
        async with aclosing(client.verify_cache()) as events:
            return await _draw_verify(events)

    done = with_client(run)
    if as_json:
        print_json(done)
    elif done["num_damaged"]:
        damaged = f"{done['num_damaged']:,} damaged ones removed: their chats compute them again"
        print(f"{format.blocks(done['num_checked'])} read, {damaged}.")
    else:
        print(f"{format.blocks(done['num_checked'])} read, all sound.")
    raise typer.Exit(EXIT_ERROR if done["num_damaged"] else EXIT_OK)


@app.command("why")
def why(
    chat: Annotated[
        str | None, typer.Argument(help="A chat's id or part of its title; default: the last prompt.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how much of the last prompt was reused, and at which text that ended."""

    async def run(client: Client) -> dict[str, Any] | None:
        return await client.why_missed(await find_chat(client, chat) if chat else None)

    request = with_client(run) if chat else _if_running(run)
    if as_json:
        print_json(request)
        return
    from .cache_text import why_lines

    for line in why_lines(request):
        print(show(line))


async def _draw_verify(events: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    """The last event. The bar is drawn where stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from chatkv.app.client import ServiceLostError

    console = Console(stderr=True)
    columns = (TextColumn("Checking blocks"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        async for event in events:
            if event["type"] == "error":
                raise UserError(event["message"])
            if event["type"] == "done":
                return event
            progress.update(task, completed=event["num_checked"], total=event["num_blocks"])
    raise ServiceLostError("the check has no end")


def _say_if_incomplete(done: dict[str, Any]) -> None:
    if not done["is_complete"]:
        say("Something could not be removed from the disk yet; `chatkv cache status` and the log say why. Try again.")


def _if_running(use: Callable[[Client], Awaitable[Result]]) -> Result | None:
    """None: no service runs, and none is started for this."""
    from chatkv.app.client import ServiceLostError

    try:
        return with_client(use, start=False)
    except ServiceLostError:
        return None


async def _cache_of_loaded(client: Client) -> dict[str, Any]:
    """A service that was just started reads its model first; before that no chain has a place."""
    while (await client.status())["model"]["state"] == "loading":
        await asyncio.sleep(LOADING_POLL_S)
    return await client.cache()


def _allocated_bytes(directory: Path) -> int:
    files = directory.rglob("*") if directory.is_dir() else ()
    return sum(os.lstat(file).st_blocks * 512 for file in files)
