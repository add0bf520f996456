"""One client for the length of one command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from chatkv.app.paths import Paths

from .output import say

if TYPE_CHECKING:
    from chatkv.app.client import Client

Result = TypeVar("Result")


def with_client(use: Callable[[Client], Awaitable[Result]], *, start: bool = True) -> Result:
    """Run `use` with a connected client; `start` brings the service up if none runs.

    Raises:
        UserError: the service refused, could not start, or does not run.
    """

    # Here, not above: the terminal app starts through this package and paints before it talks.
    from chatkv.app.client import Client

    async def run() -> Result:
        async with Client(Paths.from_env()) as client:
            if start:
                status = await client.ensure_service()
                if not client.is_same_version(status):
                    say(f"The running service is chatkv {status['version']}, this command another version.")
                    say("chatkv stop ends it; the next command starts the new one.")
            return await use(client)

    return asyncio.run(run())
