"""Speed of a pair: decode, prefill, and the first token of what is cached."""

from __future__ import annotations

import asyncio

from tests.running_service import Timing

from .peer_client import Messages
from .peer_report import Samples
from .peer_servers import Pair, Server
from .report import Report
from .text import prompt_of, words

NUM_DECODED = 160
DECODE_LIMITS = {1: ">= 1.3", 4: ">= 2.5", 8: ">= 3"}
PREFILL_LIMITS = {256: "", 1000: "", 2000: ">= 2", 4000: ">= 4"}
SHARED_TOKENS = 1900
"""Of the system prompt; with a question and its answer the chat has about 2,000."""
REUSE_LIMIT = "<= 0.3333"


def user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


async def measure_decode(pair: Pair, report: Report) -> None:
    samples = Samples()
    async with pair.running() as servers:
        for repeat in range(pair.repeats):
            for num_chats in DECODE_LIMITS:
                for server in servers:
                    rate = await decode_rate(server, num_chats, seed=10_000 * num_chats + 100 * repeat)
                    samples.add(f"decode, {num_chats} chats", server.name, rate)
    samples.report(report, "tok/s", {f"decode, {number} chats": limit for number, limit in DECODE_LIMITS.items()})


async def decode_rate(server: Server, num_chats: int, seed: int) -> float:
    """Tokens per second of all chats, while all of them are being answered."""
    prompts = [user(words(24, seed=seed + chat)) for chat in range(num_chats)]
    timings = await asyncio.gather(*(server.chat(prompt, NUM_DECODED) for prompt in prompts))
    await server.settle()
    return rate_together(timings)


def rate_together(timings: list[Timing]) -> float:
    """From the last chat's first token to the first chat's last one. An event may carry several tokens."""
    begin = max(timing.arrivals_s[0] for timing in timings)
    end = min(timing.arrivals_s[-1] for timing in timings)
    assert end > begin, "the chats did not run together"
    num_tokens = sum(
        sum(begin < arrival <= end for arrival in timing.arrivals_s) * timing.num_tokens / len(timing.arrivals_s)
        for timing in timings
    )
    return num_tokens / (end - begin)


async def measure_prefill(pair: Pair, report: Report) -> None:
    """Prompts of other words each time. Only what the chat template says to every chat may come from a cache."""
    samples = Samples()
    async with pair.running() as servers:
        for repeat in range(pair.repeats):
            for length in PREFILL_LIMITS:
                prompt = user(prompt_of(length, seed=100_000 + 10 * length + repeat))
                for server in servers:
                    timing = await server.chat(prompt, 1)
                    await server.settle()
                    num_computed = timing.num_prompt_tokens - timing.num_cached_tokens
                    assert num_computed > 0.8 * timing.num_prompt_tokens, "found in a cache: not a measure of computing"
                    samples.add(f"prefill, {length} tokens", server.name, num_computed / timing.ttft_s)
    limits = {f"prefill, {length} tokens": limit for length, limit in PREFILL_LIMITS.items()}
    samples.report(report, "tok/s", limits)


async def measure_reuse(pair: Pair, report: Report) -> None:
    """The second turn of a chat of 2,000 tokens, and another chat that begins with the same system prompt."""
    ttfts, computed = Samples(), Samples()
    async with pair.running() as servers:
        for repeat in range(pair.repeats):
            for server in servers:
                for name, timing in (await reuse_of(server, repeat)).items():
                    ttfts.add(f"TTFT {name}", server.name, timing.ttft_s)
                    num_computed = timing.num_prompt_tokens - timing.num_cached_tokens
                    computed.add(f"computed, {name}", server.name, num_computed)
    limits = {f"TTFT {name}": REUSE_LIMIT for name in ("second turn", "same system prompt")}
    ttfts.report(report, "s", limits)
    computed.report(report, "tok", {})


async def reuse_of(server: Server, repeat: int) -> dict[str, Timing]:
    system = {"role": "system", "content": prompt_of(SHARED_TOKENS, seed=200_000 + repeat)}
    history: Messages = [system, {"role": "user", "content": words(60, seed=201_000 + repeat)}]
    first = await server.chat(history, 24)
    await server.settle()
    # With the template's, about 24 new tokens.
    history += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": words(13, seed=202_000 + repeat)},
    ]
    second = await server.chat(history, 1)
    await server.settle()
    other = await server.chat([system, {"role": "user", "content": words(13, seed=203_000 + repeat)}], 1)
    await server.settle()
    return {"2,000 tokens, cold": first, "second turn": second, "same system prompt": other}
