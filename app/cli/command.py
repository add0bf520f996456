"""The subcommands together. Without one the terminal app opens."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from chatkv.app.errors import UserError

from . import ask, cache, chats, gpu_check, models, service
from .output import EXIT_ERROR, EXIT_OK, say

app = typer.Typer(
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("ask")(ask.ask)
app.command("serve")(service.serve)
app.command("stop")(service.stop)
app.command("status")(service.status)
app.command("threads")(service.threads)
app.command("pull")(models.pull)
app.command("models")(models.models)
app.command("rm")(models.rm)
app.command(
    "gpu-check",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)(gpu_check.gpu_check)
app.add_typer(chats.app, name="chats")
app.add_typer(cache.app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"chatkv {version('chatkv')}")
        raise typer.Exit()


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Local chat whose conversations resume instead of being computed again.

    Without a command it opens the terminal app.
    """
    if context.invoked_subcommand is None:
        raise typer.Exit(open_terminal_app())


def open_terminal_app() -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") in (None, "", "dumb"):
        raise UserError(
            "There is no terminal here for the chat app.",
            'For scripts and pipes: chatkv ask "..."  (see chatkv ask --help)',
        )
    from chatkv.app.paths import Paths
    from chatkv.app.settings import load_settings
    from chatkv.app.tui.run import run as run_app

    paths = Paths.from_env()
    settings = load_settings(paths)
    return run_app(paths, settings)


def run() -> int:
    """The exit code. Mistakes and conditions that a person can mend are sentences on stderr."""
    if not sys.platform.startswith("linux"):
        say("chatkv runs on Linux only for now.")
        return EXIT_ERROR
    try:
        _check_arguments()
        app()
    except UserError as error:
        say(str(error))
        return EXIT_ERROR
    except BrokenPipeError:
        # The reader of our output is gone (`chatkv chats list | head`): nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    return EXIT_OK


def _check_arguments() -> None:
    try:
        "".join(sys.argv).encode()
    except UnicodeEncodeError as error:
        raise UserError("An argument is not UTF-8 text.", "Pipe the text in, converted with iconv.") from error
