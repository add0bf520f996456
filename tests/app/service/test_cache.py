"""The cache as a person sees it: where chats lie, forgetting them, pins, checks, and why a prompt missed."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from chatkv.app.chats.blocks import ChatChain
from chatkv.app.client import RefusedError
from chatkv.app.paths import Paths
from chatkv.app.service.cache_view import SharedHead, shared_heads
from chatkv.engine.errors import StoreUnavailableError
from chatkv.engine.request import LoadDecision, Miss

from .fake_engine import encode, fake_installed
from .fake_store import FakeTier
from .support import TIMEOUT_S, FakeModels, Json, Running, running_service, until
from .test_kv_store import talk

SYSTEM = "you know all of the stars by their names"


def tier_of(running: Running, name: str = "fake") -> FakeTier:
    return running.models.store.tiers[name.encode()]


async def chain_of(running: Running, chat_id: str) -> Json:
    chats = (await running.client.cache())["chats"]
    (found,) = [chat for chat in chats if chat["chat_id"] == chat_id]
    return dict(found)


def chain(name: str, hashes: str) -> ChatChain:
    return ChatChain(name, 0, tuple(character.encode() for character in hashes), 0.0)


def test_shared_heads_are_the_longest_common_beginnings() -> None:
    chains = [chain("a", "xyzq"), chain("b", "xyz"), chain("c", "xw"), chain("d", "v"), chain("e", "")]
    assert list(shared_heads(chains)) == [SharedHead(1, ("a", "b", "c")), SharedHead(3, ("a", "b"))]
    assert list(shared_heads([chain("a", "xy"), chain("b", "xy")])) == [SharedHead(2, ("a", "b"))]
    assert list(shared_heads([])) == []


async def test_every_chat_is_shown_with_its_places_and_what_it_shares(running: Running) -> None:
    first, second = [await talk(running, f"say a text that is {name} long", system=SYSTEM) for name in ("so", "as")]
    cache = await running.client.cache()
    assert (cache["model"], cache["block_size"], cache["block_bytes"]) == ("fake", 16, 4096)
    assert [chat["chat_id"] for chat in cache["chats"]] == [second, first]
    shown = cache["chats"][1]
    num_blocks = sum(number for _, number in shown["runs"])
    assert shown["runs"] == [["device", num_blocks]]
    assert shown["num_tokens"] // 16 == num_blocks
    assert (shown["title"], shown["is_pinned"], shown["is_private"]) == ("say a text that is so long", False, False)
    assert (shown["resume_s"], shown["compute_s"], shown["is_running"]) == (0.25, 4.0, False)
    (head,) = cache["shared"]
    assert head["num_blocks"] == shown["num_shared_blocks"] == (len(SYSTEM) + 3 + len("say a text that is ")) // 16
    assert (head["num_tokens"], set(head["chat_ids"])) == (head["num_blocks"] * 16, {first, second})
    assert cache["evicts_next"] == first
    tiers = cache["tiers"]
    assert tiers["host"] is None
    assert (tiers["disk"]["state"], tiers["disk"]["num_blocks"]) == ("on", len(tier_of(running).hashes))
    assert tiers["disk"]["slabs"] == [
        {
            "model": "fake",
            "num_blocks": len(tier_of(running).hashes),
            "bytes": 4096,
            "last_used_at": 1.0,
            "is_open": True,
        }
    ]
    assert tiers["device"]["hit_tokens_24h"] == 14
    assert cache["prompt_tokens_24h"] == 14 + cache["computed_tokens_24h"] > 14
    assert (cache["model_state"], cache["kv_dtype"], tiers["disk"]["is_encrypted"]) == ("ready", "fp32", False)
    status = await running.client.status()
    assert set(status["tiers"]) == {"device", "host", "disk"}
    assert status["tiers"]["disk"]["num_blocks"] == tiers["disk"]["num_blocks"]


async def test_offload_leaves_the_copy_below_and_what_others_need(running: Running) -> None:
    chat_id = await talk(running)
    assert (await chain_of(running, chat_id))["runs"][0][0] == "device"
    num_offloaded = (await running.client.offload_chat(chat_id))["num_offloaded"]
    assert num_offloaded == sum(number for _, number in (await chain_of(running, chat_id))["runs"]) > 0
    assert (await chain_of(running, chat_id))["runs"][0][0] == "disk"
    with pytest.raises(RefusedError) as refused:
        await running.client.offload_chat("no-such-chat")
    assert refused.value.status == 404


async def test_deleting_a_chat_forgets_its_blocks_before_it_answers(running: Running) -> None:
    first, second = [await talk(running, f"say a text that is {name} long", system=SYSTEM) for name in ("so", "as")]
    num_shared = (await chain_of(running, first))["num_shared_blocks"]
    before = set(tier_of(running).hashes)
    answer = await running.client.delete_chat(first)
    assert answer["chat"]["in_trash"]
    assert answer["cache"] == {
        "num_removed": len(before) - len(tier_of(running).hashes),
        "num_shared": num_shared,
        "is_complete": True,
    }
    assert answer["cache"]["num_removed"] > 0
    assert not tier_of(running).unflushed, "something was still in a file"
    rest = await chain_of(running, second)
    assert rest["runs"] == [["device", rest["num_tokens"] // 16]]
    owned = await running.service.chats.run(lambda store: store.owned_blocks(first))
    assert owned == {}
    assert (await running.client.delete_chat(second))["cache"]["num_shared"] == 0
    assert not tier_of(running).hashes
    assert not running.engine.engine.device


async def test_a_fork_keeps_the_blocks_that_it_took_over(running: Running) -> None:
    chat_id = await talk(running)
    reply_id = (await running.client.get_chat(chat_id))["chat"]["tip_id"]
    await running.client.send_turn(chat_id, "say more of the chat that was begun here")
    await running.settled(chat_id)
    fork = await running.client.fork_chat(chat_id, reply_id)
    shared = sum(number for _, number in (await chain_of(running, fork["id"]))["runs"])
    forgotten = (await running.client.delete_chat(chat_id))["cache"]
    assert forgotten["num_shared"] == len(tier_of(running).hashes) == shared > 0
    assert forgotten["num_removed"] > 0


async def test_a_fork_made_while_its_model_is_away_owns_its_blocks_once_it_is_back(home: Path) -> None:
    async with running_service(FakeModels(fake_installed(), fake_installed("other"))) as running:
        await running.ready()
        chat_id = await talk(running, model="fake")
        await running.complete("say hi", model="other")
        fork = await running.client.fork_chat(chat_id, (await running.client.get_chat(chat_id))["chat"]["tip_id"])
        assert running.service.models.current_name == "other"
        await running.complete("say hi", model="fake")
        async with asyncio.timeout(TIMEOUT_S):
            while not await running.service.chats.run(lambda store: store.owned_blocks(fork["id"])):
                await asyncio.sleep(0.002)
        assert (await chain_of(running, fork["id"]))["num_shared_blocks"] > 0


async def test_blocks_of_a_model_that_is_not_loaded_are_forgotten_too(home: Path) -> None:
    async with running_service(FakeModels(fake_installed(), fake_installed("other"))) as running:
        await running.ready()
        chat_id = await talk(running, model="fake")
        kept = await talk(running, "say another that is to stay in its place", model="fake")
        num_blocks = len(tier_of(running).hashes)
        await running.complete("say hi", model="other")
        forgotten = await running.client.forget_cache(chat_id)
        assert forgotten["is_complete"]
        assert forgotten["num_removed"] == num_blocks - len(tier_of(running).hashes) > 0
        assert tier_of(running).hashes, "another chat's blocks went with them"
        assert not tier_of(running).unflushed
        await running.complete("say hi", model="fake")
        assert sum(number for place, number in (await chain_of(running, kept))["runs"] if place == "disk") > 0


async def test_a_chat_at_work_is_not_forgotten(running: Running) -> None:
    chat = await running.client.create_chat()
    await running.client.send_turn(chat["id"], "hold")
    with pytest.raises(RefusedError) as refused:
        await running.client.forget_cache(chat["id"])
    assert refused.value.code == "chat_busy"
    await running.client.delete_chat(chat["id"])
    assert running.engine.num_active == 0


async def test_rows_that_a_write_under_way_brings_are_forgotten_in_the_same_call(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_id = await talk(running)
    tier, late = tier_of(running), b"l" * 16
    really_flush = tier.flush

    def flush(timeout_s: float) -> bool:
        monkeypatch.setattr(tier, "flush", really_flush)
        tier.put(chat_id, [late])
        return really_flush(timeout_s)

    monkeypatch.setattr(tier, "flush", flush)
    assert (await running.client.forget_cache(chat_id))["is_complete"]
    assert not tier.hashes


async def test_what_could_not_be_removed_is_said_and_can_be_tried_again(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_id = await talk(running)
    monkeypatch.setattr(tier_of(running), "flush", lambda timeout_s: False)
    assert not (await running.client.forget_cache(chat_id))["is_complete"]
    assert await running.service.chats.run(lambda store: store.owned_blocks(chat_id))
    monkeypatch.undo()
    assert (await running.client.forget_cache(chat_id))["is_complete"]
    assert not tier_of(running).unflushed


async def test_what_evicted_blocks_left_in_files_goes_with_the_chat(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_id = await talk(running)
    store = running.models.store
    tier_of(running).hashes.clear()  # Evicted: no tier knows them any more.
    store.scrub_error = OSError(5, "Input/output error")
    assert not (await running.client.forget_cache(chat_id))["is_complete"]
    store.scrub_error = None
    assert (await running.client.delete_chat(chat_id))["cache"]["is_complete"]
    assert store.num_scrubs == 2
    await running.client.delete_chat(await talk(running, private=True))
    assert store.num_scrubs == 2, "nothing of a private chat was ever stored"


async def test_what_is_removed_and_shared_is_counted_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = [await talk(running, f"say a text that is {name} long", system=SYSTEM) for name in ("so", "as")]
    (blocks,) = (await running.service.chats.run(lambda store: store.owned_blocks(first))).values()
    monkeypatch.setattr(tier_of(running), "flush", lambda timeout_s: False)
    forgotten = await running.client.forget_cache(first)
    assert not forgotten["is_complete"]
    assert (forgotten["num_removed"], forgotten["num_shared"]) == (
        len(blocks.owned - blocks.shared),
        len(blocks.shared),
    )


async def test_what_a_store_holds_that_cannot_be_used_now_is_not_called_gone(home: Path) -> None:
    """The folder is read-only, or another service has it."""
    models = FakeModels()
    async with running_service(models) as running:
        await running.ready()
        gone, kept = [await talk(running, f"say a text that is {name} long") for name in ("so", "as")]
    kv_dir = Paths.from_env().kv_dir
    kv_dir.mkdir(parents=True, exist_ok=True)
    (kv_dir / "0.slab").touch()
    models.store.error = StoreUnavailableError("The folder is read-only.")
    async with running_service(models) as running:
        await running.ready()
        assert not (await running.client.forget_cache(kept))["is_complete"]
        assert not (await running.client.delete_chat(gone))["cache"]["is_complete"]
        assert not (await running.client.clear_cache())["is_complete"]
    models.store.error = None
    async with running_service(models) as running:
        await running.ready()
        assert (await running.client.forget_cache(kept))["is_complete"]
        await until(lambda: not tier_of(running).hashes)


async def test_two_chats_that_are_deleted_at_once_leave_nothing_of_what_they_share(home: Path) -> None:
    async with running_service(FakeModels()) as running:
        await running.ready()
        chats = [await talk(running, f"say a text that is {name} long", system=SYSTEM) for name in ("so", "as")]
        assert tier_of(running).hashes
        await asyncio.gather(*(running.client.delete_chat(chat_id) for chat_id in chats))
        assert not tier_of(running).hashes


async def test_a_model_without_its_tier_still_has_blocks_on_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = FakeModels()
    async with running_service(models) as running:
        await running.ready()
        chat_id = await talk(running)
    tier = tier_of(running)
    tier.is_open = False

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(models.store, "tier_for", refuse)
    async with running_service(models) as running:
        await running.ready()
        assert (await running.client.forget_cache(chat_id))["is_complete"]
        assert not tier.hashes


async def test_a_deletion_that_was_cut_off_is_finished_at_the_next_start(home: Path) -> None:
    models = FakeModels()
    async with running_service(models) as running:
        await running.ready()
        gone, kept = [await talk(running, f"say a text that is {name} long", system=SYSTEM) for name in ("so", "as")]
        await running.service.chats.run(lambda store: store.trash(gone))
        tier = tier_of(running)
        num_blocks = len(tier.hashes)
    async with running_service(models) as running:
        await running.ready()
        await until(lambda: len(tier.hashes) < num_blocks and not tier.unflushed)
        shown = await chain_of(running, kept)
        assert shown["runs"] == [["disk", shown["num_tokens"] // 16]]


async def test_a_chat_deleted_while_the_store_opens_is_forgotten(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = FakeModels()
    async with running_service(models) as running:
        await running.ready()
        chat_id = await talk(running)
        tier = tier_of(running)
    may_open, really_open = threading.Event(), models.store.open

    def slow(*arguments: Any) -> Any:
        assert may_open.wait(20)
        return really_open(*arguments)

    monkeypatch.setattr(models.store, "open", slow)
    async with running_service(models) as running:
        deleting = asyncio.create_task(running.client.delete_chat(chat_id))
        await until(lambda: running.service.kv_store.state == "opening")
        may_open.set()
        assert (await deleting)["cache"]["num_removed"] > 0
        assert not tier.hashes


async def test_blocks_whose_tier_opens_while_they_are_forgotten_are_forgotten_by_the_engine(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat_id = await talk(running)
    loaded = running.service.models.loaded
    looks = iter([None])

    class Models:
        """Sees no model at first, as one who asks a moment too early."""

        loaded = property(lambda self: next(looks, loaded))
        is_unloading = False
        state = running.service.models.state

    cache = running.service.cache
    blocks = (await running.service.chats.run(lambda store: store.owned_blocks(chat_id)))[loaded.fingerprint]
    monkeypatch.setattr(cache, "_models", Models())
    forgotten = await cache._forget_in(chat_id, loaded.fingerprint, blocks)
    assert forgotten.is_complete
    assert forgotten.num_removed > 0
    assert not tier_of(running).hashes


async def test_clear_removes_everything_of_everybody(running: Running) -> None:
    chat_id = await talk(running)
    await running.complete("say something of more than sixteen tokens")
    cleared = await running.client.clear_cache()
    assert cleared["is_complete"]
    assert cleared["num_removed"] > 0
    assert not tier_of(running).hashes
    assert not running.engine.engine.device
    assert (await running.client.cache())["chats"] == []
    assert await running.client.why_missed() is None
    assert await running.service.chats.run(lambda store: store.owned_blocks(chat_id)) == {}


async def test_private_chats_are_shown_and_forgotten_and_never_stored(running: Running) -> None:
    chat_id = await talk(running, private=True)
    assert not tier_of(running).hashes
    shown = await chain_of(running, chat_id)
    assert shown["is_private"]
    assert shown["runs"][0][0] == "device"
    assert all(request.is_transient for request in running.engine.requests + running.engine.warm_requests)
    assert (await running.client.delete_chat(chat_id))["cache"]["num_removed"] > 0
    assert not running.engine.engine.device


async def test_pins_reach_the_engine_and_come_back_with_the_model(home: Path) -> None:
    models = FakeModels()
    async with running_service(models) as running:
        await running.ready()
        chat_id = await talk(running)
        await running.client.update_chat(chat_id, {"is_pinned": True})
        assert running.engine.engine.pinned == {chat_id: tier_of(running).hashes}
    async with running_service(models) as running:
        await running.ready()
        await until(lambda: bool(running.engine.engine.pinned))
        assert running.engine.engine.pinned == {chat_id: tier_of(running).hashes}
        await running.client.update_chat(chat_id, {"is_pinned": False})
        assert running.engine.engine.pinned == {}


async def test_verify_tells_how_far_it_is_and_which_chats_lost_blocks(running: Running) -> None:
    chat_id = await talk(running)
    running.models.store.damaged = {next(iter(tier_of(running).hashes))}
    events = [event async for event in running.client.verify_cache()]
    num_blocks = len(tier_of(running).hashes)
    assert events[:-1] == [
        {"type": "progress", "num_checked": number, "num_blocks": num_blocks} for number in range(1, num_blocks + 1)
    ]
    assert events[-1] == {"type": "done", "num_checked": num_blocks, "num_damaged": 1}
    assert (await chain_of(running, chat_id))["num_damaged"] == 1


async def test_a_store_that_cannot_be_read_to_its_end_says_so(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(running.models.store, "verify", fail)
    (event,) = [event async for event in running.client.verify_cache()]
    assert event["type"] == "error"
    assert "Input/output error" in event["message"]


async def test_leaving_ends_a_check(running: Running) -> None:
    await talk(running)
    store = running.models.store
    store.verify_gate.clear()
    events = running.client.verify_cache()
    await anext(events)
    await events.aclose()
    await until(store.verify_gate.is_set)  # The store sets it when it sees that nobody waits any more.


async def test_prune_names_the_installed_models(running: Running) -> None:
    assert await running.client.prune_cache() == {"num_slabs": 1, "num_blocks": 1, "freed_bytes": 4096}


MISS = Miss(16, tuple(encode("someone else's")), tuple(encode("my own text")))
LOAD = LoadDecision(32, 0.5, 2.0, True, 32)
LOAD_JSON = {"num_tokens": 32, "load_s": 0.5, "compute_s": 2.0, "is_loaded": True, "num_loaded_tokens": 32}


async def test_a3_a_miss_names_the_first_differing_text_to_the_app_and_own_text_to_others(home: Path) -> None:
    async with running_service(FakeModels(miss=MISS, load=LOAD)) as running:
        await running.ready()
        body: Json = {"messages": [{"role": "user", "content": "say hi"}], "chatkv": True}
        over_tcp = (await running.tcp.post("/v1/chat/completions", json=body)).json()["chatkv"]
        assert over_tcp["miss"] == {"position": 16, "text": "my own text"}
        assert over_tcp["load"] == LOAD_JSON
        over_unix = (await running.unix.post("/v1/chat/completions", json=body)).json()["chatkv"]
        assert over_unix["miss"]["expected_text"] == "someone else's"
        *_, last = await running.chunks("say hi", chatkv=True)
        assert last["chatkv"] == over_unix
        why = await running.client.why_missed()
        assert why is not None
        assert (why["chat_id"], why["model"], why["miss"], why["load"]) == (None, "fake", over_unix["miss"], LOAD_JSON)


async def test_replies_tell_what_was_found_and_the_database_keeps_no_others_text(home: Path) -> None:
    async with running_service(FakeModels(miss=MISS, load=LOAD)) as running:
        await running.ready()
        chat_id = await talk(running)
        stats = (await running.client.get_chat(chat_id))["messages"][1]["stats"]
        assert stats["chatkv"]["cached_by_tier"] == {"device": 7}
        assert stats["chatkv"]["load"] == LOAD_JSON
        assert stats["chatkv"]["miss"]["text"] == "my own text"
        assert stats["chatkv"]["miss"]["is_other_kept"]
        assert stats["chatkv"]["num_recomputed_tokens"] == 0, "all of a first turn is new"
        assert "expected_text" not in json.dumps(stats)
        last: Json = {}
        async for event in running.client.stream_turn(chat_id, "say hi"):
            last = event
        assert last["message"]["stats"]["chatkv"]["miss"]["expected_text"] == "someone else's"
        why: Any = await running.client.why_missed(chat_id)
        assert why["miss"]["expected_text"] == "someone else's"
        assert why["chat_id"] == chat_id
        for other in ("", "no-such-chat"):
            assert await running.client.why_missed(other) is None
        await running.client.forget_cache(chat_id)
        assert await running.client.why_missed(chat_id) is None, "a forgotten chat's text was still told"


async def test_metrics_tell_of_the_tiers(home: Path) -> None:
    async with running_service(FakeModels(load=LOAD)) as running:
        await running.ready()
        await talk(running)
        num_blocks = len(tier_of(running).hashes)
        lines = (await running.tcp.get("/metrics")).text.splitlines()
        for line in (
            f'chatkv_tier_used_bytes{{tier="disk"}} {float(num_blocks * 4096)}',
            f'chatkv_tier_stored_blocks_total{{tier="disk"}} {float(num_blocks)}',
            'chatkv_tier_hit_tokens_total{tier="device"} 7.0',
            'chatkv_load_decisions_total{decision="load"} 1.0',
            'chatkv_tier_limit_bytes{tier="device"} 262144.0',
        ):
            assert line in lines
