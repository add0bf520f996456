"""The sheets over the main screen: settings of a chat, models, cache, help."""

from __future__ import annotations

import pytest
from fake_service import FakeService, refused
from pilots import main_screen, open_chat, press, running, screen_text, wait_for, wait_until

SIZES = [(120, 36), (80, 24), (60, 16), (50, 12)]


async def test_settings_of_a_chat_are_checked_and_saved():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"), num_tokens=3098)
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        await press(pilot, "f2")
        await wait_for(pilot, "system prompt · a change reads all 3.1k tokens again")
        pilot.app.screen.query_one("#system").load_text("You plan trips.")
        pilot.app.screen.query_one("#temperature").value = "9"
        await press(pilot, "f2")
        await wait_for(pilot, "temperature: between 0 and 2")
        pilot.app.screen.query_one("#temperature").value = "0,5"
        await press(pilot, "f2")
        await wait_until(pilot, lambda: service.chats[chat_id].get("sampling"), "saved")
        assert service.chats[chat_id]["system"] == "You plan trips."
        assert service.chats[chat_id]["sampling"] == {"temperature": 0.5}
        await wait_for(pilot, "system prompt · temp 0.5")


async def test_where_the_kv_of_a_chat_is_kept_is_shown_and_chosen_while_it_is_new():
    service = FakeService()
    kept, private = service.add_chat("a", ("user", "q")), service.add_chat("b", ("user", "q"), is_private=True)
    async with running(service) as pilot:
        for chat_id, words in ((kept, "disk"), (private, "private: nothing of it is kept")):
            await open_chat(pilot, chat_id)
            await press(pilot, "f2")
            await wait_for(pilot, "keep KV")
            assert str(pilot.app.screen.query_one("#kept").render()).startswith(words)
            assert not pilot.app.screen.query("#private")
            await press(pilot, "escape")
        main_screen(pilot).action_new_chat()
        await wait_until(pilot, lambda: main_screen(pilot).session.chat_id is None, "a new chat")
        main_screen(pilot).fill("a secret")
        await press(pilot, "f2")
        await wait_for(pilot, "keep KV")
        await wait_for(pilot, "▐ ▌ private")
        pilot.app.screen.query_one("#private").value = True
        await wait_for(pilot, "▐X▌ private")
        pilot.app.screen.query_one("#temperature").value = "0,5"
        await press(pilot, "f2")
        await wait_until(pilot, lambda: service.called("create_chat"), "made")
        (made,) = [chat for chat in service.chats.values() if chat["id"] not in (kept, private)]
        assert made["is_private"]
        await wait_until(pilot, lambda: made.get("sampling") == {"temperature": 0.5}, "saved")
        assert main_screen(pilot).composer.text == "a secret"


async def test_models_are_loaded_fetched_cancelled_and_removed():
    service = FakeService()
    service.models[0]["installed"] = True
    async with running(service) as pilot:
        await press(pilot, "f3")
        await wait_for(pilot, "smollm2-135m", "loaded", "qwen3-4b", "to download")
        await press(pilot, "down", "enter")
        await wait_until(pilot, lambda: service.called("pull_model"), "pulled")
        service.emit("job", job={"id": "job-1", "name": "qwen3-4b", "stage": "download", "state": "running",
                                 "done_bytes": 5, "total_bytes": 10})  # fmt: skip
        await wait_for(pilot, "50 %")
        await press(pilot, "x")
        await wait_until(pilot, lambda: service.called("cancel_job"), "cancelled")
        await press(pilot, "up", "enter")
        await wait_until(pilot, lambda: service.called("load_model"), "loaded")
        await press(pilot, "d")
        await wait_for(pilot, "d again removes smollm2-135m")
        assert not service.called("remove_model")
        await press(pilot, "d")
        await wait_until(pilot, lambda: service.called("remove_model"), "removed")


async def test_a_refusal_in_the_models_sheet_is_shown_there():
    service = FakeService()
    service.refusals["pull_model"] = refused("No space: 2.4 GB needed, 1 GB free.", "no_space", 507)
    async with running(service) as pilot:
        await press(pilot, "f3")
        await wait_for(pilot, "qwen3-4b")
        await press(pilot, "down", "enter")
        await wait_for(pilot, "No space: 2.4 GB needed")


async def test_help_begins_with_the_pane_in_focus():
    async with running(FakeService()) as pilot:
        await press(pilot, "f1")
        await wait_for(pilot, "Help", "Composer")
        await press(pilot, "escape", "escape", "f1")
        await wait_for(pilot, "Conversation", "Copy the message")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("key", ["f1", "f2", "f3", "f4"])
async def test_every_sheet_opens_and_closes_at_every_size(size, key):
    async with running(FakeService(), size) as pilot:
        await press(pilot, key)
        await wait_until(pilot, lambda: pilot.app.screen is not main_screen(pilot), "sheet open")
        await pilot.pause()
        assert "╭" in screen_text(pilot.app)
        await press(pilot, "escape")
        await wait_until(pilot, lambda: pilot.app.screen is main_screen(pilot), "sheet closed")


@pytest.mark.parametrize("size", [(80, 24), (60, 16)])
async def test_what_is_wrong_with_a_setting_is_seen_at_every_size(size):
    async with running(FakeService(), size) as pilot:
        await press(pilot, "f2")
        await wait_until(pilot, lambda: pilot.app.screen is not main_screen(pilot), "sheet open")
        pilot.app.screen.query_one("#seed").value = "-1"
        await press(pilot, "f2")
        await wait_for(pilot, "seed: between 0 and")
        assert pilot.app.screen.focused.id == "seed"
