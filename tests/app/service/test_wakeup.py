"""Waking readers on the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from chatkv.app.service.wakeup import LoopWaker, Wakeup


async def test_a_set_before_the_wait_counts_once() -> None:
    wakeup = Wakeup()
    wakeup.set()
    wakeup.set()
    assert await wakeup.wait()
    assert not await wakeup.wait(0.0)


async def test_a_waiter_is_woken_or_its_time_passes() -> None:
    wakeup = Wakeup()
    waiting = asyncio.create_task(wakeup.wait(60))
    await asyncio.sleep(0)
    wakeup.set()
    assert await waiting
    assert not await wakeup.wait(0.001)


async def test_a_cancelled_wait_loses_no_set() -> None:
    wakeup = Wakeup()
    waiting = asyncio.create_task(wakeup.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    wakeup.set()
    assert await wakeup.wait(0.0)


async def test_wakeups_of_one_moment_share_one_call_into_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    num_calls = 0
    call = loop.call_soon_threadsafe

    def counted(*args: object) -> object:
        nonlocal num_calls
        num_calls += 1
        return call(*args)  # type: ignore[arg-type]

    waker = LoopWaker()
    wakeups = [Wakeup() for _ in range(8)]
    for _ in range(3):
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        num_calls = 0
        thread = threading.Thread(target=lambda: [waker.wake(wakeup) for wakeup in wakeups])
        thread.start()
        thread.join()  # the loop stands still meanwhile
        assert num_calls == 1
        monkeypatch.undo()
        for wakeup in wakeups:
            assert await wakeup.wait(10)
