"""`chatkv gpu-check`."""

from __future__ import annotations

import typer


def gpu_check(context: typer.Context) -> None:
    """Check every kernel on this GPU, and measure it: some minutes."""
    from chatkv.app.gpu_check.command import main

    raise typer.Exit(main(context.args))
