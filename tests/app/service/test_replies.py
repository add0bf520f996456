"""Chats: messages are safe before anything else, replies go on by themselves, and every event is told once."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from chatkv.app.chats.errors import StoreFullError
from chatkv.app.chats.records import MessageStatus
from chatkv.app.chats.store import ChatStore
from chatkv.app.client import RefusedError
from chatkv.app.service import events as events_module

from .fake_engine import FakeText, encode, fake_installed
from .support import FakeModels, Json, Running, running_service, until


class Watcher:
    """Collects events in the background."""

    def __init__(self, running: Running):
        self.events: list[Json] = []
        self._task = asyncio.create_task(self._collect(running))

    async def _collect(self, running: Running) -> None:
        async for event in running.client.events():
            self.events.append(event)

    async def __aenter__(self) -> Watcher:
        await until(lambda: bool(self.events))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    def of(self, kind: str) -> list[Json]:
        return [event for event in self.events if event["type"] == kind]


async def test_a_turn_is_answered_stored_and_titled(running: Running) -> None:
    chat = await running.client.create_chat(system="be kind")
    begun = await running.client.send_turn(chat["id"], "say hello there")
    assert begun["message"]["content"] == "say hello there"
    assert begun["reply"]["status"] == "incomplete"
    shown = await running.settled(chat["id"])
    assert [message["content"] for message in shown["messages"]] == ["say hello there", "hello there"]
    reply = shown["messages"][1]
    assert reply["status"] == "complete"
    assert reply["stats"]["num_cached_tokens"] == 7
    assert reply["stats"]["num_tokens"] == reply["num_tokens"] == 11
    assert reply["stats"]["ttft_s"] > 0
    assert shown["chat"]["title"] == "say hello there"
    prompt = running.engine.requests[-1].prompt_token_ids
    assert prompt[1 : 1 + len("be kind")] == tuple(encode("be kind"))


async def test_the_next_turn_carries_the_exact_ids_of_the_answer(running: Running) -> None:
    chat = await running.client.create_chat()
    await running.client.send_turn(chat["id"], "say é")
    await running.settled(chat["id"])
    await running.client.send_turn(chat["id"], "say b")
    await running.settled(chat["id"])
    first, second = running.engine.requests[-2:]
    grown = first.prompt_token_ids + tuple(encode("é"))
    assert second.prompt_token_ids[: len(grown)] == grown


async def test_the_message_is_on_disk_before_the_engine_hears_of_it(running: Running, monkeypatch: Any) -> None:
    chat = await running.client.create_chat()
    submit = running.engine.submit
    stored: list[str] = []

    def checked(*arguments: Any) -> None:
        with ChatStoreReader(running.paths.chats_db) as contents:
            stored.extend(contents)
        submit(*arguments)

    monkeypatch.setattr(running.engine, "submit", checked)
    await running.client.send_turn(chat["id"], "say hi")
    await running.settled(chat["id"])
    assert "say hi" in stored


async def test_a_chat_takes_the_next_message_as_soon_as_its_reply_is_told_to_be_done(
    running: Running, monkeypatch: Any
) -> None:
    replies, events = running.service.replies, running.service.events
    chat = await running.client.create_chat()
    publish, states = events.publish, []

    def watched(kind: str, **fields: Any) -> None:
        publish(kind, **fields)
        if kind == "reply_done":  # nobody can have heard of it before the loop turns
            asyncio.get_running_loop().call_soon(lambda: states.append(replies.state(chat["id"])))

    async def note_chain(reply: Any) -> None:
        await asyncio.sleep(0)  # as a database does

    monkeypatch.setattr(events, "publish", watched)
    monkeypatch.setattr(replies, "_note_chain", note_chain)
    await running.client.send_turn(chat["id"], "say hi")
    await running.settled(chat["id"])
    assert states == ["idle"]


class ChatStoreReader:
    """What another process would find in the database now."""

    def __init__(self, path: Path):
        import sqlite3

        self.connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)

    def __enter__(self) -> list[str]:
        return [row[0] for row in self.connection.execute("select content from messages")]

    def __exit__(self, *_: object) -> None:
        self.connection.close()


@pytest.fixture
async def unhurried(home: Path) -> AsyncIterator[Running]:
    """An engine slow enough to be watched at work."""
    async with running_service(FakeModels(tokens_per_s=500, prefill_chunk=4)) as service:
        yield await service.ready()


async def test_events_tell_everything_in_order_and_add_up(unhurried: Running) -> None:
    running = unhurried
    chat = await running.client.create_chat()
    async with Watcher(running) as watcher:
        assert watcher.events[0]["type"] == "hello"
        assert watcher.events[0]["status"]["model"]["state"] == "ready"
        await running.client.send_turn(chat["id"], "count 30")
        await until(lambda: bool(watcher.of("reply_done")))
    numbers = [event["seq"] for event in watcher.events[1:]]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert [event["message"]["role"] for event in watcher.of("message_added")] == ["user", "assistant"]
    text = ""
    for event in watcher.of("reply_delta"):
        assert event["offset"] == len(text)
        text += event["text"]
    done = watcher.of("reply_done")[0]["message"]
    assert text == done["content"] == " ".join(map(str, range(1, 31)))
    assert done["status"] == "complete"
    phases = [event["phase"] for event in watcher.of("reply_progress")]
    assert phases[0] == "waiting"
    assert "reading" in phases


async def test_a_chat_that_is_read_while_it_is_written_misses_no_character(unhurried: Running) -> None:
    running = unhurried
    chat = await running.client.create_chat()
    async with Watcher(running) as watcher:
        await running.client.send_turn(chat["id"], "count 90")
        await until(lambda: len(watcher.of("reply_delta")) > 3)
        seen = await running.client.get_chat(chat["id"])
        assert seen["chat"]["state"] == "writing"
        await until(lambda: bool(watcher.of("reply_done")))
    text = seen["messages"][-1]["content"]
    for event in watcher.of("reply_delta"):
        if event["seq"] > seen["seq"]:
            assert event["offset"] == len(text)
            text += event["text"]
    assert text == watcher.of("reply_done")[0]["message"]["content"]


async def test_stopping_keeps_the_partial_answer_and_continuing_goes_on_after_its_ids(unhurried: Running) -> None:
    running = unhurried
    chat = await running.client.create_chat()
    await running.client.send_turn(chat["id"], "count 90")
    await until(lambda: running.engine.stats().num_generated_tokens > 20)
    assert await running.client.cancel(chat["id"])
    stopped = (await running.settled(chat["id"]))["messages"][-1]
    assert stopped["status"] == "stopped"
    assert stopped["content"].startswith("1 2 3")
    assert running.engine.num_active == 0
    await running.client.continue_reply(chat["id"])
    whole = (await running.settled(chat["id"]))["messages"][-1]
    assert whole["id"] == stopped["id"]
    assert whole["status"] == "complete"
    assert whole["content"] == " ".join(map(str, range(1, 91)))
    request = running.engine.requests[-1]
    assert request.prompt_token_ids[-len(stopped["content"]) :] == tuple(encode(stopped["content"]))
    assert request.resume_text == stopped["content"]
    num_new = whole["num_tokens"] - stopped["num_tokens"]
    shown = await running.client.get_chat(chat["id"])
    assert shown["chat"]["num_tokens"] == len(request.prompt_token_ids) + num_new, "the old part counts once"
    with pytest.raises(RefusedError, match="complete"):
        await running.client.continue_reply(chat["id"])


async def test_continuing_in_a_fork_leaves_the_other_chat_as_it_is(running: Running) -> None:
    chat = await running.client.create_chat(sampling={"max_tokens": 5})
    await running.client.send_turn(chat["id"], "count 20")
    before = await running.settled(chat["id"])
    fork = await running.client.fork_chat(chat["id"], before["messages"][-1]["id"])
    async with Watcher(running) as watcher:
        await running.client.continue_reply(fork["id"])
        shown = await running.settled(fork["id"])
        await until(lambda: bool(watcher.of("reply_done")))
    assert shown["messages"][-1]["content"] == "1 2 3 4 5 "
    assert {event["chat_id"] for event in watcher.of("reply_delta")} == {fork["id"]}
    after = await running.client.get_chat(chat["id"])
    assert after["messages"] == before["messages"]


async def test_ids_that_the_text_does_not_show_are_dropped_before_a_reply_goes_on(
    unhurried: Running, monkeypatch: Any
) -> None:
    """A kill between two bytes of a character leaves more ids than text; a second kill must find them in order."""
    running = unhurried
    chat = await running.client.create_chat()

    def killed(store: ChatStore) -> str:
        _, reply = store.begin_turn(chat["id"], None, "count 90", "fake")
        store.append_reply(reply.id, "1 2", [*encode("1 2"), 256 + 0xF0], FakeText.tokenizer_hash)
        return store.finish_reply(reply.id, MessageStatus.STOPPED).id

    reply_id = await running.service.chats.run(killed)
    await running.client.continue_reply(chat["id"])
    seen: tuple[str, tuple[int, ...] | None] = ("", ())
    while len(seen[0]) < 10:
        seen = await running.service.chats.run(
            lambda store: (
                (message := store.get_message(reply_id, tokenizer_hash=FakeText.tokenizer_hash)).content,
                message.token_ids,
            )
        )
    assert seen[1] == tuple(encode(seen[0]))
    await running.client.cancel(chat["id"])
    await running.settled(chat["id"])


async def test_regenerating_makes_another_version_with_another_seed(running: Running) -> None:
    chat = await running.client.create_chat(sampling={"seed": 7})
    first = (await running.client.send_turn(chat["id"], "say hi"))["reply"]
    await running.settled(chat["id"])
    second = await running.client.regenerate(chat["id"])
    shown = await running.settled(chat["id"])
    assert second["parent_id"] == first["parent_id"]
    assert shown["siblings"][second["id"]] == [first["id"], second["id"]]
    assert [request.sampling.seed for request in running.engine.requests] == [7, 8]
    assert running.engine.requests[0].prompt_token_ids == running.engine.requests[1].prompt_token_ids


async def test_an_edited_message_is_a_new_branch_even_at_the_root(running: Running) -> None:
    chat = await running.client.create_chat()
    await running.client.send_turn(chat["id"], "say one")
    await running.settled(chat["id"])
    await running.client.send_turn(chat["id"], "say two", parent_id=None)
    shown = await running.settled(chat["id"])
    assert [message["content"] for message in shown["messages"]] == ["say two", "two"]
    assert len(shown["siblings"][shown["messages"][0]["id"]]) == 2


async def test_one_reply_at_a_time_in_a_chat_and_many_in_many(running: Running) -> None:
    chats = [await running.client.create_chat() for _ in range(4)]
    for chat in chats:
        await running.client.send_turn(chat["id"], "hold")
    with pytest.raises(RefusedError) as refused:
        await running.client.send_turn(chats[0]["id"], "say hi")
    assert refused.value.status == 409
    await until(lambda: running.engine.stats().num_running == 4)
    listed = await running.client.list_chats()
    assert {chat["state"] for chat in listed} <= {"reading", "writing", "waiting"}
    for chat in chats:
        await running.client.cancel(chat["id"])
    for chat in chats:
        await running.settled(chat["id"])


async def test_a_prompt_that_does_not_fit_is_kept_as_draft_and_comes_with_ways_out(home: Path) -> None:
    async with running_service(FakeModels(fake_installed(context_tokens=300))) as running:
        await running.ready()
        chat = await running.client.create_chat()
        for number in range(3):
            await running.client.send_turn(chat["id"], f"say {number} {'x' * 40}")
            await running.settled(chat["id"])
        text = "say " + "y" * 60
        with pytest.raises(RefusedError) as refused:
            await running.client.send_turn(chat["id"], text)
        details = refused.value.details
        assert details["code"] == "context_length_exceeded"
        assert details["n_prompt_tokens"] >= details["n_ctx"] == 300
        drop = next(choice for choice in details["choices"] if choice["kind"] == "drop_oldest")
        assert {choice["kind"] for choice in details["choices"]} == {"drop_oldest", "fork"}
        assert drop["num_tokens_after"] <= 225
        shown = await running.client.get_chat(chat["id"])
        assert shown["chat"]["draft"] == text
        assert len(shown["messages"]) == 6
        await running.client.update_chat(chat["id"], {"context_start_id": drop["context_start_id"]})
        await running.client.send_turn(chat["id"], text)
        shown = await running.settled(chat["id"])
        assert shown["messages"][-1]["status"] == "complete"
        assert shown["chat"]["draft"] == ""
        assert len(running.engine.requests[-1].prompt_token_ids) == drop["num_tokens_after"]


async def test_a_turn_is_taken_while_the_model_loads_and_answered_when_it_is_there(home: Path) -> None:
    models = FakeModels()
    models.load_gate.clear()
    async with running_service(models) as running:
        chat = await running.client.create_chat()
        begun = await running.client.send_turn(chat["id"], "say hi")
        assert begun["reply"]["status"] == "incomplete"
        assert running.service.replies.state(chat["id"]) == "waiting"
        other = await running.client.create_chat()
        await running.client.send_turn(other["id"], "say hi")
        await running.client.cancel(other["id"])
        assert (await running.settled(other["id"]))["messages"][-1]["status"] == "stopped"
        models.load_gate.set()
        assert (await running.settled(chat["id"]))["messages"][-1]["content"] == "hi"


async def test_without_a_model_the_text_stays_as_the_draft(home: Path) -> None:
    models = FakeModels()
    models.models.clear()
    async with running_service(models) as running:
        assert (await running.unix.get("/health")).json() == {"status": "no_model"}
        chat = await running.client.create_chat()
        with pytest.raises(RefusedError) as refused:
            await running.client.send_turn(chat["id"], "say hi")
        assert refused.value.code == "model_not_found"
        assert (await running.client.get_chat(chat["id"]))["chat"]["draft"] == "say hi"


async def test_a_failed_reply_keeps_what_came_and_says_why(running: Running) -> None:
    chat = await running.client.create_chat()
    await running.client.send_turn(chat["id"], "fail")
    failed = (await running.settled(chat["id"]))["messages"][-1]
    assert failed["status"] == "error"
    assert failed["content"] == "oh"
    assert "on purpose" in failed["error"]


async def test_a_refusing_template_is_told_before_anything_is_stored(running: Running) -> None:
    chat = await running.client.create_chat()
    with pytest.raises(RefusedError) as refused:
        await running.client.send_turn(chat["id"], "template refuses")
    assert refused.value.code == "template_error"
    assert (await running.client.get_chat(chat["id"]))["messages"] == []


async def test_deleting_a_chat_stops_its_reply_and_undo_brings_all_back(running: Running) -> None:
    chat = await running.client.create_chat()
    await running.client.send_turn(chat["id"], "hold")
    await until(lambda: running.engine.stats().num_generated_tokens > 3)
    await running.client.delete_chat(chat["id"])
    assert running.engine.num_active == 0
    assert await running.client.list_chats() == []
    assert [found["id"] for found in await running.client.list_chats(in_trash=True)] == [chat["id"]]
    with pytest.raises(RefusedError):
        await running.client.send_turn(chat["id"], "say hi")
    await running.client.restore_chat(chat["id"])
    shown = await running.client.get_chat(chat["id"])
    assert shown["messages"][-1]["status"] == "stopped"
    assert shown["messages"][-1]["content"].startswith("hol")


async def test_a_reply_goes_on_when_its_client_leaves_unless_it_is_streamed(running: Running) -> None:
    chat = await running.client.create_chat()
    await running.client.send_turn(chat["id"], "hold")
    await until(lambda: running.engine.num_active == 1)
    other = await running.client.create_chat()
    stream = running.client.stream_turn(other["id"], "hold")
    assert (await anext(stream))["type"] == "turn"
    await until(lambda: running.engine.num_active == 2)
    await stream.aclose()
    await until(lambda: running.engine.num_active == 1)
    assert (await running.settled(other["id"]))["messages"][-1]["status"] == "stopped"
    assert running.service.replies.state(chat["id"]) != "idle"


async def test_a_streamed_turn_ends_with_its_reply(running: Running) -> None:
    chat = await running.client.create_chat()
    events = [event async for event in running.client.stream_turn(chat["id"], "say a\u2028b")]
    assert next(event["type"] for event in events) == "turn"
    assert events[-1]["type"] == "reply_done"
    assert "".join(event.get("text", "") for event in events) == "a\u2028b"


async def test_a_subscriber_gets_what_is_told_before_it_reads(home: Path) -> None:
    """The answer's headers may wait for a slow socket while the reply has already begun, or failed."""
    hub = events_module.EventHub()
    subscriber = hub.subscribe("m")
    hub.publish("reply_delta", message_id="m", text="a")
    hub.publish("reply_delta", message_id="other", text="x")
    hub.publish("reply_done", message={"id": "m"})
    writes = [data async for data in subscriber.stream({"type": "turn"}, keep_alive_s=10)]
    assert len(writes) == 2, "what waits comes together"
    lines = b"".join(writes).split(b"\n\n")[:-1]
    assert [json.loads(line[6:])["type"] for line in lines] == ["turn", "reply_delta", "reply_done"]
    hub.unsubscribe(subscriber)
    assert hub.num_subscribers == 0


async def test_a_full_disk_refuses_the_turn_and_loses_nothing_shown(running: Running, monkeypatch: Any) -> None:
    chat = await running.client.create_chat()

    def full(*_: object, **__: object) -> None:
        raise StoreFullError("There is no space left for the chats.", "Free some disk space.")

    monkeypatch.setattr(ChatStore, "begin_turn", full)
    with pytest.raises(RefusedError) as refused:
        await running.client.send_turn(chat["id"], "say hi")
    assert refused.value.status == 507
    assert running.engine.requests == []
    monkeypatch.undo()
    monkeypatch.setattr(ChatStore, "append_reply", full)
    await running.client.send_turn(chat["id"], "say hi")
    failed = (await running.settled(chat["id"]))["messages"][-1]
    assert failed["status"] == "error"
    assert failed["content"] == "hi"
    assert "no space" in failed["error"]
    assert running.engine.num_active == 0
    with pytest.raises(RefusedError) as refused:
        await running.client.send_turn(chat["id"], "say more")
    assert refused.value.status == 507
    monkeypatch.undo()
    await running.client.send_turn(chat["id"], "say more")
    shown = await running.settled(chat["id"])
    assert [message["content"] for message in shown["messages"]] == ["say hi", "hi", "say more", "more"]
    assert shown["messages"][1]["status"] == "complete"


async def test_a_failed_flush_stops_the_reply_at_once_and_says_why(running: Running, monkeypatch: Any) -> None:
    def full(*_: object, **__: object) -> None:
        raise StoreFullError("There is no space left for the chats.", "Free some disk space.")

    monkeypatch.setattr(ChatStore, "append_reply", full)
    chat = await running.client.create_chat()
    async with Watcher(running) as watcher:
        await running.client.send_turn(chat["id"], "hold")
        await until(lambda: bool(watcher.of("reply_done")))
    await until(lambda: running.engine.num_active == 0)
    done = watcher.of("reply_done")[0]["message"]
    assert (done["status"], done["content"]) == ("error", "holding")
    assert "no space" in done["error"]


async def test_a_slow_disk_holds_up_no_event(running: Running) -> None:
    chat = await running.client.create_chat()
    is_free = threading.Event()
    async with Watcher(running) as watcher:
        running.engine.step_gate.clear()
        await running.client.send_turn(chat["id"], "count 30")
        await until(lambda: running.engine.num_active == 1)
        busy = asyncio.create_task(running.service.chats.run(lambda _: is_free.wait()))
        running.engine.tokens_per_s = 100
        running.engine.step_gate.set()
        text = " ".join(map(str, range(1, 31)))
        await until(lambda: "".join(event["text"] for event in watcher.of("reply_delta")) == text)
        assert not watcher.of("reply_done")
        is_free.set()
        await busy
        await until(lambda: bool(watcher.of("reply_done")))
    assert (await running.settled(chat["id"]))["messages"][-1]["content"] == text


async def test_a_slow_subscriber_is_told_to_fetch_anew_and_blocks_nobody(running: Running, monkeypatch: Any) -> None:
    monkeypatch.setattr(events_module, "MAX_BEHIND", 50)
    reader, writer = await asyncio.open_unix_connection(running.paths.socket_path, limit=2**26)
    writer.write(b"GET /chatkv/events HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"hello")
    writer.transport.pause_reading()
    chat = await running.client.create_chat(title="t" * 200_000)
    for _ in range(200):
        await running.client.update_chat(chat["id"], {"is_pinned": True})
    writer.transport.resume_reading()
    rest = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 20)
    last = [line for line in rest.split(b"\n") if line.startswith(b"data: ")][-1]
    assert json.loads(last.removeprefix(b"data: "))["type"] == "resync"
    assert running.service.events.num_subscribers == 0
    writer.close()


async def test_search_export_fork_and_settings(running: Running) -> None:
    chat = await running.client.create_chat(draft="unsent")
    assert chat["draft"] == "unsent"
    begun = await running.client.send_turn(chat["id"], "say zebra")
    await running.settled(chat["id"])
    hits = await running.client.search("zebra")
    assert {hit["chat_id"] for hit in hits} == {chat["id"]}
    assert json.loads(await running.client.export_chat(chat["id"]))
    assert "zebra" in await running.client.export_chat(chat["id"], "markdown")
    fork = await running.client.fork_chat(chat["id"], begun["message"]["id"])
    assert [message["content"] for message in (await running.client.get_chat(fork["id"]))["messages"]] == ["say zebra"]
    changed = await running.client.update_chat(chat["id"], {"system": "s", "sampling": {"top_p": 0.5}, "title": "T"})
    assert (changed["system"], changed["sampling"], changed["title"]) == ("s", {"top_p": 0.5}, "T")
    for wrong in ({"temperature": 9}, {"temperature": "warm"}, {"top_k": 1.5}):
        with pytest.raises(RefusedError) as refused:
            await running.client.update_chat(chat["id"], {"sampling": wrong})
        assert refused.value.status == 400
    cache = await running.client.cache()
    assert [entry["chat_id"] for entry in cache["chats"]] == [chat["id"]]


async def test_half_a_surrogate_pair_and_huge_numbers_are_never_a_fault_of_the_service(running: Running) -> None:
    chat = await running.client.create_chat(title="t\ud800", model="fake\udfff", system="s\udc00")
    assert (chat["title"], chat["model"], chat["system"]) == ("t\ufffd", "fake\ufffd", "s\ufffd")
    for body in ({"text": "say hi", "parent_id": "\ud800"}, {"text": "say \ud800"}):
        with pytest.raises(RefusedError) as refused:  # There is no such model.
            await running.client._send("POST", f"/chatkv/chats/{chat['id']}/turns", body)
        assert refused.value.status == 404
    with pytest.raises(RefusedError) as refused:
        await running.client.list_chats(offset=10**30)
    assert refused.value.status == 400
    assert await running.client.list_chats(query="zebra \udcff") == []
    with pytest.raises(RefusedError, match="There is no chat"):
        await running.client.get_chat("\udcff")
    other = await running.client.create_chat()
    await running.client.send_turn(other["id"], "say \ud83d")
    assert (await running.settled(other["id"]))["messages"][1]["content"] == "\ufffd"


async def test_private_chats_reach_neither_disk_nor_lasting_blocks(running: Running) -> None:
    chat = await running.client.create_chat(private=True)
    await running.client.send_turn(chat["id"], "say secret")
    shown = await running.settled(chat["id"])
    assert shown["chat"]["is_private"]
    assert running.engine.requests[-1].is_transient
    with ChatStoreReader(running.paths.chats_db) as contents:
        assert contents == []


async def test_drafts_are_kept_until_they_are_sent(running: Running) -> None:
    chat = await running.client.create_chat()
    for draft in ("say h", "another thought"):
        await running.client.update_chat(chat["id"], {"draft": draft})
        await running.client.send_turn(chat["id"], "say hi")
        shown = await running.settled(chat["id"])
        assert shown["chat"]["draft"] == ("" if draft == "say h" else draft)
    for nothing in ("", "  \n "):
        with pytest.raises(RefusedError) as refused:
            await running.client.send_turn(chat["id"], nothing)
        assert refused.value.status == 400


async def test_a_reply_that_fills_the_context_cannot_be_continued_and_stays_as_it_is(home: Path) -> None:
    async with running_service(FakeModels(fake_installed(context_tokens=64), limits_context=True)) as running:
        await running.ready()
        chat = await running.client.create_chat()
        await running.client.send_turn(chat["id"], "count 90")
        full = (await running.settled(chat["id"]))["messages"][-1]
        assert full["status"] == "length"
        with pytest.raises(RefusedError) as refused:
            await running.client.continue_reply(chat["id"])
        assert refused.value.code == "context_length_exceeded"
        assert (await running.client.get_chat(chat["id"]))["messages"][-1] == full


async def test_a_chat_and_its_forks_keep_the_day_it_began_for_templates_with_a_date(running: Running) -> None:
    """A4: a date that changes at midnight would make every open chat read its whole history again."""
    chat = await running.client.create_chat()
    begun = await running.client.send_turn(chat["id"], "say hi")
    await running.settled(chat["id"])
    week_ago = begun["message"]["created_at"] - 7 * 86400
    with sqlite3.connect(running.paths.chats_db) as database:
        database.execute("update messages set created_at = ? where id = ?", (week_ago, begun["message"]["id"]))
    fork = await running.client.fork_chat(chat["id"], begun["reply"]["id"])
    model = running.service.models.loaded
    assert model is not None
    assert isinstance(model.text, FakeText)
    for chat_id in (chat["id"], fork["id"]):
        await running.client.send_turn(chat_id, "say ho")
        await running.settled(chat_id)
        assert model.text.days[-1] == dt.datetime.fromtimestamp(week_ago).astimezone().date()


async def test_a_trash_that_cannot_be_emptied_is_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(store: ChatStore, days: float = 30) -> list[str]:
        raise StoreFullError("There is no space left.")

    monkeypatch.setattr(ChatStore, "purge_expired", full)
    async with running_service(FakeModels()) as running:
        await until(lambda: bool(running.service.notices))
        (notice,) = (await running.client.status())["notices"]
        assert "There is no space left. The next start tries it again." in notice
