"""The reader of the event stream: connects, reads until it breaks, connects again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from .board import Board
from .ports import ChatService, ServiceLostError, UserError

FIRST_DELAY_S = 0.2
LAST_DELAY_S = 3.0


async def read_events(
    service: ChatService,
    board: Board,
    on_trouble: Callable[[UserError], None],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Runs until cancelled. `on_trouble` hears once of each different reason why the service cannot be started."""
    delay = FIRST_DELAY_S
    last_trouble = ""
    while True:
        trouble = ""
        try:
            await service.ensure_service()
            async with aclosing(service.events()) as events:
                async for event in events:
                    board.apply(event)
                    delay, last_trouble = FIRST_DELAY_S, ""
        except ServiceLostError:
            pass
        except UserError as error:
            trouble = error.message
            if trouble != last_trouble:
                last_trouble = trouble
                on_trouble(error)
        board.disconnect(trouble)
        await sleep(delay)
        delay = min(LAST_DELAY_S, delay * 2)
