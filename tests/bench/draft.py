"""A draft of 1,500 tokens is typed over 20 s while another chat is being answered; then Enter is pressed."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from tests.running_service import RunningService, Timing

from .report import Report, percentile
from .text import prompt_of, words

NUM_TOKENS = 1500
TYPED_OVER_S = 20.0
UPDATES_PER_S = 3
"""How often the terminal app tells the service of the draft."""


async def measure_draft(service: RunningService, report: Report) -> None:
    cold_s = await send(service, await new_chat(service), prompt_of(NUM_TOKENS, seed=71))
    chat_id = await new_chat(service)
    await send(service, chat_id, words(10, seed=72))
    writer = asyncio.create_task(write_beside(service))
    draft = prompt_of(NUM_TOKENS, seed=73)
    await type_draft(service, chat_id, draft)
    timing = await writer
    warm_s = await send(service, chat_id, draft)
    report.add(f"TTFT of a message of {NUM_TOKENS} tokens, cold", cold_s, "s")
    report.add("TTFT after it was typed as a draft", warm_s, "s", against=cold_s, limit="ratio <= 0.25")
    report.add("p99 gap of a chat beside the typing", percentile(timing.gaps_s, 0.99), "s", limit="<= 0.5")


async def write_beside(service: RunningService) -> Timing:
    """A chat that is answered for about as long as the person types."""
    started = time.perf_counter()
    whole = Timing()
    while time.perf_counter() - started < TYPED_OVER_S - 2:
        timing = await service.chat([{"role": "user", "content": words(20, seed=int(time.time()))}], 64)
        offset = whole.arrivals_s[-1] if whole.arrivals_s else 0.0
        gaps = timing.gaps_s
        for gap in gaps:
            offset += gap
            whole.arrivals_s.append(offset)
    return whole


async def type_draft(service: RunningService, chat_id: str, draft: str) -> None:
    num_updates = int(TYPED_OVER_S * UPDATES_PER_S)
    async with service.client() as client:
        for number in range(1, num_updates + 1):
            await asyncio.sleep(1 / UPDATES_PER_S)
            typed = draft[: len(draft) * number // num_updates]
            await client.post(f"/chatkv/chats/{chat_id}/warm", json={"draft": typed})


async def new_chat(service: RunningService) -> str:
    body: dict[str, Any] = {"sampling": {"max_tokens": 1, "temperature": 0}}
    async with service.client() as client:
        return str((await client.post("/chatkv/chats", json=body)).json()["chat"]["id"])


async def send(service: RunningService, chat_id: str, text: str) -> float:
    """Seconds from Enter to the first piece of the answer (to its end, when its one token shows nothing)."""
    started = time.perf_counter()
    first_s = 0.0
    async with service.client() as client:
        body = {"text": text, "stream": True}
        async with client.stream("POST", f"/chatkv/chats/{chat_id}/turns", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["type"] in ("reply_delta", "reply_done"):
                    first_s = first_s or time.perf_counter() - started
    return first_s
