"""`chatkv chats`: list, show, search, export."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chatkv.app.errors import UserError

from .output import human_age, print_table, say, show
from .running import with_client

if TYPE_CHECKING:
    from chatkv.app.client import Client

app = typer.Typer(help="Your conversations.", no_args_is_help=False)

ChatArgument = Annotated[str, typer.Argument(help="A chat's id, the beginning of one, or a part of its title.")]


@app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    """Your conversations; without a subcommand the newest ones."""
    if context.invoked_subcommand is None:
        list_chats()


@app.command("list")
def list_chats(
    query: Annotated[str, typer.Argument(help="Only chats whose title contains this.")] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000)] = 50,
    trash: Annotated[bool, typer.Option("--trash", help="The deleted ones (kept for 30 days).")] = False,
) -> None:
    """List chats, newest first."""

    async def read(client: Client) -> tuple[list[dict[str, Any]], str | None]:
        chats = await client.list_chats(query, limit, in_trash=trash)
        return chats, (await client.status())["notice"]

    chats, notice = with_client(read)
    if notice:
        say(notice)
    print_table(("id", "title", "messages", "age", "state"), map(_row, chats), "There are no chats yet.")


def _row(chat: dict[str, Any]) -> tuple[str, ...]:
    age = human_age(time.time() - chat["updated_at"])
    return chat["id"], chat["title"] or "(untitled)", str(chat["num_messages"]), age, chat["state"]


@app.command("show")
def show_chat(chat: ChatArgument) -> None:
    """Print one chat."""

    async def read(client: Client) -> dict[str, Any]:
        return await client.get_chat(await find_chat(client, chat))

    found = with_client(read)
    for message in found["messages"]:
        state = "" if message["status"] == "complete" else f" ({message['status']})"
        print(show(f"{message['role']}{state}:\n{message['content']}\n"))


@app.command("search")
def search(
    words: Annotated[list[str], typer.Argument(help="Words that a message contains; the last may be a beginning.")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000)] = 50,
) -> None:
    """Search the text of all chats."""
    hits = with_client(lambda client: client.search(" ".join(words), limit))
    rows = ((hit["chat_id"], hit["title"] or "(untitled)", hit["role"], hit["snippet"]) for hit in hits)
    print_table(("chat", "title", "who", "text"), rows, "Nothing found.")


@app.command("export")
def export(
    chat: ChatArgument,
    format: Annotated[str, typer.Option("--format", help="json (lossless) or markdown.")] = "markdown",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A file instead of stdout.")] = None,
) -> None:
    """Write one chat as Markdown or JSON."""
    if format not in ("json", "markdown"):
        raise UserError(f"There is no export format '{format}'.", "Use --format json or --format markdown.")

    async def read(client: Client) -> str:
        return await client.export_chat(await find_chat(client, chat), format)

    text = with_client(read)
    if output is None:
        print(show(text))
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"Cannot write {output}: {error.strerror}.") from error


async def find_chat(client: Client, wanted: str) -> str:
    """The id of the one chat that `wanted` names.

    Raises:
        UserError: none or several.
    """
    chats = await client.list_chats("", 10_000)
    found = [chat for chat in chats if chat["id"] == wanted]
    found = found or [chat for chat in chats if len(wanted) >= 4 and chat["id"].startswith(wanted)]
    found = found or [chat for chat in chats if wanted.lower() in (chat["title"] or "").lower()]
    if not found:
        raise UserError(f"No chat matches '{wanted}'.", "See: chatkv chats list")
    if len(found) > 1:
        several = "\n".join(f"  {chat['id']}  {chat['title']}" for chat in found[:10])
        raise UserError(f"'{wanted}' matches {len(found)} chats:\n{several}", "Use an id.")
    return str(found[0]["id"])
