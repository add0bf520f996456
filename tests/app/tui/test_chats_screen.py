"""The chat list, search, drafts, delete and undo, first run, lost service, sizes."""

from __future__ import annotations

import time

import pytest
from fake_service import NO_MODEL, READY, FakeService
from pilots import main_screen, open_chat, press, running, screen_text, type_text, wait_for, wait_gone, wait_until


async def test_chats_are_listed_and_opened_with_the_keyboard():
    service = FakeService()
    service.add_chat("Rust borrow checker", ("user", "why"), updated_at=time.time() - 10)
    service.add_chat("Porto", ("user", "where"), updated_at=time.time() - 20)
    async with running(service) as pilot:
        await wait_for(pilot, "TODAY", "Rust borrow checker", "Porto")
        await press(pilot, "ctrl+o", "down", "enter")
        await wait_for(pilot, "where")
        assert main_screen(pilot).composer.has_focus


async def test_search_looks_in_titles_at_once_and_in_messages_through_the_service():
    service = FakeService()
    chat_id = service.add_chat("Porto", ("user", "the bridge"), ("assistant", "Dom Luís"))
    service.add_chat("Rust")
    message_id = service.messages[chat_id][0]["id"]
    service.hits = [{"chat_id": chat_id, "title": "Porto", "message_id": message_id, "snippet": "…the bridge…"}]
    async with running(service) as pilot:
        await press(pilot, "ctrl+o", "/")
        await type_text(pilot, "bridge")
        await wait_for(pilot, "IN MESSAGES", "…the bridge…")
        assert "Rust" not in screen_text(pilot.app)
        await press(pilot, "enter", "enter")
        await wait_until(pilot, lambda: main_screen(pilot).transcript.cursor == 0, "found message marked")


async def test_delete_is_undone():
    service = FakeService()
    chat_id = service.add_chat("Porto", ("user", "where"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        await press(pilot, "ctrl+o", "d")
        await wait_for(pilot, "Deleted “Porto”")
        await wait_until(pilot, lambda: main_screen(pilot).session.chat_id is None, "closed")
        await press(pilot, "u")
        await wait_until(pilot, lambda: main_screen(pilot).session.chat_id == chat_id, "back")
        assert service.called("restore_chat") == [("restore_chat", chat_id)]


async def test_deleting_goes_on_with_the_chat_below_and_never_with_one_that_is_not_marked():
    service = FakeService()
    first, second, third = (service.add_chat(f"chat {n}", ("user", "q"), updated_at=100.0 - n) for n in range(3))
    async with running(service) as pilot:
        await open_chat(pilot, first)
        await press(pilot, "ctrl+o", "down", "d")
        await wait_until(pilot, lambda: second in service.trash, "deleted")
        await press(pilot, "d")
        await wait_until(pilot, lambda: third in service.trash, "the one below")
        await press(pilot, "u")
        await wait_until(pilot, lambda: third in service.chats, "back")
        assert main_screen(pilot).chat_list.has_focus
        assert main_screen(pilot).chosen_chat.id == third


async def test_a_message_found_on_another_branch_is_shown_on_its_branch():
    service = FakeService()
    chat_id = service.add_chat("Porto", ("user", "the bridge"))
    async with running(service) as pilot:
        service.messages["elsewhere"] = []
        found = service.add_message("elsewhere", "user", "the other bridge")
        main_screen(pilot).open(chat_id, found["id"])
        await wait_until(pilot, lambda: ("update_chat", chat_id, {"tip_id": found["id"]}) in service.calls, "switched")


async def test_rename_and_pin():
    service = FakeService()
    chat_id = service.add_chat("Porto")
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        await press(pilot, "ctrl+o", "p")
        await wait_for(pilot, "PINNED")
        await press(pilot, "r")
        await wait_for(pilot, "Rename the chat")
        await press(pilot, "!", "enter")
        await wait_until(pilot, lambda: service.chats[chat_id]["title"] != "Porto", "renamed")
        await type_slash(pilot, "/rename Lisbon and back")
        await wait_until(pilot, lambda: service.chats[chat_id]["title"] == "Lisbon and back", "renamed by command")


async def type_slash(pilot, text: str) -> None:
    main_screen(pilot).composer.focus()
    await type_text(pilot, text)
    await press(pilot, "enter")


async def test_a_draft_is_saved_with_its_chat_and_comes_back():
    service = FakeService()
    first, second = service.add_chat("one", ("user", "a")), service.add_chat("two", ("user", "b"), draft="from before")
    async with running(service) as pilot:
        await open_chat(pilot, first)
        await type_text(pilot, "unsent")
        await wait_for(pilot, "draft not saved yet")
        await wait_for(pilot, "draft saved")
        assert service.chats[first]["draft"] == "unsent"
        await open_chat(pilot, second)
        assert main_screen(pilot).composer.text == "from before"
        await open_chat(pilot, first)
        assert main_screen(pilot).composer.text == "unsent"


async def test_a_draft_in_a_new_chat_makes_the_chat():
    service = FakeService()
    async with running(service) as pilot:
        await type_text(pilot, "first thought")
        await wait_until(pilot, lambda: any(c["draft"] for c in service.chats.values() if "draft" in c), "saved")
        await wait_for(pilot, "New chat", "draft saved")
        await press(pilot, "!", "enter")
        await wait_until(pilot, lambda: service.called("send_turn"), "sent")
        assert len(service.chats) == 1


async def test_without_a_model_one_enter_downloads_loads_and_sends():
    service = FakeService(NO_MODEL)
    async with running(service) as pilot:
        await wait_for(pilot, "No model is here yet.", "smollm2-135m · 101 MB · Apache-2.0", "no model · F3")
        await type_text(pilot, "my first words")
        await press(pilot, "enter")
        await wait_for(pilot, "my first words", "not sent yet · Up takes it back", "Preparing smollm2-135m")
        job = {
            "id": "job-1",
            "name": "smollm2-135m",
            "stage": "download",
            "state": "running",
            "total_bytes": 101_000_000,
        }
        service.emit("job", job={**job, "done_bytes": 61_000_000, "rate_bytes_s": 18e6})
        await wait_for(pilot, "Downloading smollm2-135m", "60 %", "61 MB of 101 MB · 18 MB/s")
        service.models[0]["installed"] = True
        service.emit("job", job={**job, "done_bytes": 101_000_000, "state": "done"})
        await wait_until(pilot, lambda: service.called("load_model"), "loaded by itself")
        service.set_model(progress=0.43)
        await wait_for(pilot, "loading smollm2-135m 43 %")
        assert not service.called("send_turn")
        service.set_model(**READY)
        await wait_until(pilot, lambda: service.called("send_turn"), "the kept words are sent")
        await wait_gone(pilot, "not sent yet")


async def test_without_a_model_one_enter_in_an_empty_composer_downloads_too():
    service = FakeService(NO_MODEL)
    async with running(service) as pilot:
        await wait_for(pilot, "Enter downloads it")
        await press(pilot, "enter")
        await wait_for(pilot, "Preparing smollm2-135m")
        await type_text(pilot, "one")
        await press(pilot, "enter")
        await wait_for(pilot, "not sent yet")
        assert len(service.called("pull_model")) == 1, "a message does not begin a second download"


async def test_without_a_model_an_installed_one_is_loaded_by_a_message():
    service = FakeService(NO_MODEL)
    service.models[0]["installed"] = True
    async with running(service) as pilot:
        await wait_for(pilot, "Enter loads it")
        await type_text(pilot, "one")
        await press(pilot, "enter")
        await wait_until(pilot, lambda: service.called("load_model"), "loaded")


async def test_a_failed_download_says_why_and_offers_again():
    service = FakeService(NO_MODEL)
    async with running(service) as pilot:
        await wait_for(pilot, "Enter downloads it")
        await press(pilot, "enter")
        await wait_for(pilot, "Preparing")
        service.emit(
            "job", job={"id": "job-1", "name": "smollm2-135m", "state": "failed", "error": "no route to the hub"}
        )
        await wait_for(pilot, "The download failed: no route to the hub", "Enter downloads it")
        await press(pilot, "enter")
        await wait_until(pilot, lambda: len(service.called("pull_model")) == 2, "again")
        await wait_for(pilot, "Preparing")
        await press(pilot, "escape")
        await wait_until(pilot, lambda: service.called("cancel_job"), "cancelled")


async def test_a_lost_service_is_named_and_nothing_typed_is_lost(tmp_path):
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service, state_dir=tmp_path) as pilot:
        await open_chat(pilot, chat_id)
        service.break_connection()
        await wait_for(pilot, "service lost · reconnecting")
        await type_text(pilot, "still here")
        await press(pilot, "enter")
        await wait_for(pilot, "kept as a draft")
        assert main_screen(pilot).composer.text == "still here"
        app = pilot.app
    await app.close()
    assert "still here" in (tmp_path / "unsaved-drafts.json").read_text()
    service = FakeService()
    service.chats[chat_id] = {"id": chat_id, "title": "a", "state": "idle"}
    service.messages[chat_id] = []
    async with running(service, state_dir=tmp_path) as pilot:
        await wait_until(pilot, lambda: service.chats[chat_id].get("draft") == "still here", "handed over")


async def test_the_service_comes_back_and_the_open_chat_is_fetched_again():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        service.break_connection()
        await wait_for(pilot, "service lost")
        service.add_message(chat_id, "assistant", "written meanwhile")
        service.is_lost = False
        await wait_for(pilot, "written meanwhile")
        assert "service lost" not in screen_text(pilot.app)


async def test_the_gauge_shows_batch_and_kv():
    service = FakeService()
    async with running(service) as pilot:
        service.emit_status(batch_size=4, num_waiting=1, kv_usage=0.38)
        await wait_for(pilot, "smollm2-135m int4 cpu", "batch 4 · 1 waiting", "KV ▓▓▓░░░░░ 38 %")
        service.set_model(state="failed", error="weights are damaged")
        await wait_for(pilot, "failed: weights are damaged")


async def test_an_unloaded_model_is_no_missing_one_and_a_message_wakes_it():
    service = FakeService()
    service.model |= {"state": "unloaded", "context_tokens": None}
    async with running(service) as pilot:
        await wait_for(pilot, "smollm2-135m unloaded, a message loads it")
        assert "Enter downloads" not in screen_text(pilot.app)
        await type_text(pilot, "hello")
        await press(pilot, "enter")
        await wait_until(pilot, lambda: service.called("send_turn"), "sent at once")


async def test_interrupt_asks_before_it_quits():
    async with running(FakeService()) as pilot:
        await press(pilot, "ctrl+c")
        await wait_for(pilot, "Ctrl+C again to quit.")
        await press(pilot, "ctrl+c")
        await wait_until(pilot, lambda: pilot.app.return_value == 0, "quit")


SIZES = [(120, 36), (80, 24), (60, 16), (50, 12), (30, 8)]


@pytest.mark.parametrize("size", SIZES)
async def test_every_size_shows_what_fits(size):
    service = FakeService()
    chat_id = service.add_chat("Porto", ("user", "where to?"), ("assistant", "# Ribeira\n\n- the **river**"))
    async with running(service, size) as pilot:
        await open_chat(pilot, chat_id)
        text = screen_text(pilot.app)
        lines = text.split("\n")
        assert len(lines) == size[1]
        if size == (30, 8):
            assert text.strip() == "too small, need 40x10"
            return
        await wait_for(pilot, "the river", "❯")
        assert ("PINNED" in text or "OLDER" in text) is (size[0] >= 100), (
            "the list stands beside only when there is room"
        )
        assert ("smollm2-135m" in lines[0]) is (size[0] >= 60 and size[1] >= 16)
        assert ("Enter send" in lines[-1]) is (size[0] >= 60 and size[1] >= 16)


async def test_on_a_narrow_screen_the_list_comes_over_the_chat_and_goes():
    service = FakeService()
    service.add_chat("Porto")
    async with running(service, (80, 24)) as pilot:
        assert "Porto" not in screen_text(pilot.app)
        await press(pilot, "ctrl+o")
        await wait_for(pilot, "Porto")
        await press(pilot, "escape")
        await wait_gone(pilot, "Porto")
        assert main_screen(pilot).composer.has_focus


async def test_plain_ascii_on_request():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"), ("assistant", "- x"), is_pinned=True)
    async with running(service, is_ascii=True) as pilot:
        await open_chat(pilot, chat_id)
        service.begin_reply(chat_id)
        service.write(chat_id, "text")
        await wait_for(pilot, "text_")
        for glyph in "•●◐★▓░❯▍▌":
            assert glyph not in screen_text(pilot.app), glyph
