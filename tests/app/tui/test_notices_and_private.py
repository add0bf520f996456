"""What is told once and put away, the service of another version, and chats of which nothing is kept."""

from __future__ import annotations

from fake_service import FakeService
from pilots import main_screen, open_chat, press, running, screen_text, type_text, wait_for, wait_gone, wait_until

SALVAGED = "The chat file was damaged; 12 chats were recovered."
FULL = "The disk is full; nothing new is kept."


async def test_a_notice_stays_until_it_is_put_away_and_does_not_come_again():
    service = FakeService()
    async with running(service) as pilot:
        service.emit_status(notices=[SALVAGED])
        await wait_for(pilot, SALVAGED, "Esc puts it away")
        await type_text(pilot, "text")
        assert SALVAGED in screen_text(pilot.app)
        await press(pilot, "escape")
        await wait_gone(pilot, SALVAGED)
        assert main_screen(pilot).composer.has_focus
        service.emit_status(notices=[SALVAGED, FULL], batch_size=1)
        await wait_for(pilot, FULL)
        assert SALVAGED not in screen_text(pilot.app)


async def test_several_notices_come_one_after_the_other_and_what_is_over_goes():
    service = FakeService()
    async with running(service, (80, 24)) as pilot:
        service.emit_status(notices=[SALVAGED, FULL])
        await wait_for(pilot, f"{SALVAGED} (1 of 2)")
        await press(pilot, "escape")
        await wait_for(pilot, FULL)
        service.emit_status(notices=[SALVAGED])
        await wait_gone(pilot, FULL)


async def test_a_notice_goes_with_a_click():
    service = FakeService()
    async with running(service) as pilot:
        service.emit_status(notices=[SALVAGED])
        await wait_for(pilot, SALVAGED)
        await pilot.click("#notice")
        await wait_gone(pilot, SALVAGED)


async def test_escape_stops_a_reply_before_it_puts_a_notice_away():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        service.begin_reply(chat_id)
        service.emit_status(notices=[SALVAGED])
        await wait_for(pilot, SALVAGED, "Esc stop")
        await press(pilot, "escape")
        await wait_until(pilot, lambda: service.called("cancel"), "stopped")
        assert SALVAGED in screen_text(pilot.app)


async def test_a_service_of_another_version_is_named_and_restarted_on_request():
    service = FakeService()
    service.version = "0.9"
    async with running(service) as pilot:
        await wait_for(pilot, "The running service is chatkv 0.9", "/restart")
        await type_text(pilot, "/restart")
        await press(pilot, "enter")
        await wait_until(pilot, lambda: service.called("stop"), "ended")
        await wait_gone(pilot, "The running service is chatkv 0.9")
        await wait_until(pilot, lambda: pilot.app.session.board.is_connected, "and there again")


async def test_a_private_chat_is_made_private_and_marked():
    service = FakeService()
    async with running(service) as pilot:
        await wait_for(pilot, "keep KV: disk  /private keeps nothing")
        await type_text(pilot, "/private")
        await press(pilot, "enter")
        await wait_for(pilot, "private: nothing is kept")
        await type_text(pilot, "a secret")
        await press(pilot, "enter")
        await wait_until(pilot, lambda: service.called("send_turn"), "sent")
        assert service.called("create_chat") == [("create_chat", True)]
        await wait_for(pilot, "○ a secret")
        assert "private: nothing is kept" in screen_text(pilot.app)


async def test_private_again_in_a_new_chat_takes_it_back_and_keeps_the_text():
    service = FakeService()
    async with running(service) as pilot:
        main_screen(pilot).action_private_chat()
        await wait_for(pilot, "private: nothing is kept")
        main_screen(pilot).fill("not so secret")
        main_screen(pilot).action_private_chat()
        await wait_for(pilot, "keep KV: disk", "not so secret")
        assert not pilot.app.session.is_private


async def test_where_a_new_chat_is_kept_is_told_as_it_is():
    service = FakeService()
    service.cache_state["tiers"]["disk"]["state"] = "off"
    async with running(service) as pilot:
        await wait_for(pilot, "keep KV: memory only")


async def test_what_was_typed_in_a_private_chat_is_in_no_file(tmp_path):
    service = FakeService()
    chat_id = service.add_chat("secret", ("user", "q"), ("assistant", "a"), is_private=True)
    async with running(service, state_dir=tmp_path) as pilot:
        await open_chat(pilot, chat_id)
        service.break_connection()
        await wait_for(pilot, "service lost")
        await type_text(pilot, "PLANTED")
        await press(pilot, "escape", "c")
        main_screen(pilot).action_private_chat()
        await type_text(pilot, "PLANTED")
        app = pilot.app
    await app.close()
    for file in tmp_path.rglob("*"):
        assert "PLANTED" not in file.read_text()
    assert not (tmp_path / "clipboard.txt").exists()
