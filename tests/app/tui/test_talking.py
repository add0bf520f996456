"""Turns, streams, stop, queue, branches: what a person does in a chat."""

from __future__ import annotations

import pytest
from fake_service import FakeService, refused
from pilots import main_screen, open_chat, press, running, screen_text, type_text, wait_for, wait_gone, wait_until


async def test_a_turn_streams_and_ends_with_its_proof():
    service = FakeService()
    async with running(service) as pilot:
        await type_text(pilot, "hello there")
        await press(pilot, "enter")
        await wait_for(pilot, "hello there", "waiting")
        chat_id = next(iter(service.chats))
        service.emit("reply_progress", chat_id=chat_id, message_id=service.messages[chat_id][-1]["id"], phase="reading",
                     num_prompt_tokens=100, num_computed_tokens=43)  # fmt: skip
        await wait_for(pilot, "reading prompt 43 %", "read 43 %")
        service.write(chat_id, "Good **mor")
        await wait_for(pilot, "writing 31 tok/s", "Good **mor▍")
        service.write(chat_id, "ning**")
        service.finish(chat_id)
        await wait_for(pilot, "reused 64/100 tok (64%) · TTFT 0.19 s · 31.4 tok/s", "Good morning")
        assert "▍" not in screen_text(pilot.app)
        assert "tok/s" not in main_screen(pilot).query_one("#chat-bar").text


async def test_several_chats_are_written_at_once_and_only_the_open_one_is_drawn():
    service = FakeService()
    chats = [service.add_chat(f"chat {index}", ("user", "q")) for index in range(4)]
    async with running(service) as pilot:
        await open_chat(pilot, chats[0])
        for chat_id in chats:
            service.begin_reply(chat_id)
            service.write(chat_id, f"answer of {chat_id}", tokens_per_s=10 + chats.index(chat_id))
        await wait_for(pilot, f"answer of {chats[0]}", "10 tok/s", "11 tok/s", "12 tok/s", "13 tok/s", "3 more busy")
        assert f"answer of {chats[1]}" not in screen_text(pilot.app)
        await press(pilot, "alt+pagedown")
        await wait_until(pilot, lambda: main_screen(pilot).session.chat_id in chats[1:], "next live chat")
        await wait_for(pilot, f"answer of {main_screen(pilot).session.chat_id}")


async def test_escape_stops_this_chat_and_keeps_what_was_written():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        service.begin_reply(chat_id)
        service.write(chat_id, "partial")
        await wait_for(pilot, "partial▍")
        await press(pilot, "escape")
        await wait_for(pilot, "stopped · F7 continues it", "partial")
        assert service.called("cancel") == [("cancel", chat_id)]
        await press(pilot, "f7")
        await wait_until(pilot, lambda: service.called("continue_reply"), "continued")
        service.write(chat_id, " and the rest")
        service.finish(chat_id)
        await wait_for(pilot, "partial and the rest")


async def test_a_turn_typed_while_the_reply_runs_waits_and_is_sent_after_it():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        service.begin_reply(chat_id)
        service.write(chat_id, "busy")
        await wait_for(pilot, "busy▍")
        await type_text(pilot, "next one")
        await press(pilot, "enter")
        await wait_for(pilot, "not sent yet", "1 queued")
        assert not service.called("send_turn")
        service.finish(chat_id)
        await wait_until(pilot, lambda: service.called("send_turn"), "sent")
        await wait_gone(pilot, "not sent yet")


async def test_a_queued_turn_that_is_refused_is_a_draft_again():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        service.begin_reply(chat_id)
        await wait_for(pilot, "waiting")
        await type_text(pilot, "second")
        await press(pilot, "enter")
        await wait_for(pilot, "not sent yet")
        service.refusals["send_turn"] = refused("The disk is full.", "refused")
        service.finish(chat_id)
        await wait_gone(pilot, "not sent yet")
        await wait_until(pilot, lambda: main_screen(pilot).composer.text == "second", "given back")


async def test_up_takes_a_queued_turn_back():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        service.begin_reply(chat_id)
        await wait_for(pilot, "waiting")
        await type_text(pilot, "second")
        await press(pilot, "enter")
        await wait_for(pilot, "not sent yet")
        await press(pilot, "up")
        await wait_gone(pilot, "not sent yet")
        assert main_screen(pilot).composer.text == "second"
        assert main_screen(pilot).session.queued == {}


async def test_regenerate_makes_a_branch_and_brackets_switch():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"), ("assistant", "first answer"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        await press(pilot, "f5")
        await wait_until(pilot, lambda: service.called("regenerate"), "regenerated")
        service.write(chat_id, "second answer")
        service.finish(chat_id)
        await wait_for(pilot, "second answer", "◀ 2/2 ▶")
        await press(pilot, "alt+up", "[")
        await wait_until(pilot, lambda: any("tip_id" in call[2] for call in service.called("update_chat")), "switched")


async def test_edit_sends_a_branch_and_escape_leaves_it():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "one"), ("assistant", "1"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        await type_text(pilot, "draft")
        await press(pilot, "escape", "alt+up", "alt+up", "e")
        await wait_for(pilot, "editing")
        assert main_screen(pilot).composer.text == "one"
        await press(pilot, "escape")
        assert main_screen(pilot).composer.text == "draft"
        await press(pilot, "escape", "e", "!", "enter")
        await wait_until(pilot, lambda: service.called("send_turn"), "sent")
        assert service.called("send_turn")[0] == ("send_turn", chat_id, "one!", None)


async def test_a_full_context_asks_and_does_nothing_by_itself():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "one"), ("assistant", "1"))
    choices = [
        {"kind": "drop_oldest", "context_start_id": "m5", "num_turns": 11, "num_tokens_after": 6100},
        {"kind": "fork", "context_start_id": "m5", "num_turns": 11, "num_tokens_after": 6100},
    ]
    service.refusals["send_turn"] = refused(
        "too long", "context_length_exceeded", n_prompt_tokens=9000, n_ctx=8192, choices=choices
    )
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        await type_text(pilot, "more")
        await press(pilot, "enter")
        await wait_for(pilot, "The context is full", "9,000", "8,192", "oldest 11 turns", "6.1k tokens are read again")
        await press(pilot, "escape")
        await wait_gone(pilot, "The context is full")
        assert main_screen(pilot).composer.text == "more", "nothing is lost"
        assert not service.called("update_chat") or all(
            "context_start_id" not in c[2] for c in service.called("update_chat")
        )
        service.refusals["send_turn"] = refused("too long", "context_length_exceeded", choices=choices)
        await press(pilot, "enter")
        await wait_for(pilot, "The context is full")
        await press(pilot, "enter")
        await wait_until(pilot, lambda: len(service.called("send_turn")) == 3, "sent again")
        assert ("update_chat", chat_id, {"context_start_id": "m5"}) in service.calls
        await wait_until(pilot, lambda: main_screen(pilot).composer.text == "", "composer empty")


async def test_a_refused_turn_comes_back_into_the_composer():
    service = FakeService()
    service.refusals["send_turn"] = refused("The disk is full.", "store_full", 507)
    async with running(service) as pilot:
        await type_text(pilot, "keep me")
        await press(pilot, "enter")
        await wait_for(pilot, "The disk is full.")
        assert main_screen(pilot).composer.text == "keep me"


async def test_a_failed_reply_says_why():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        reply = service.begin_reply(chat_id)
        reply["error"] = "the model gave numbers that are not finite"
        service.finish(chat_id, "error")
        await wait_for(pilot, "failed: the model gave numbers that are not finite · F5 tries again")


async def test_an_escape_sequence_in_an_answer_is_shown_not_obeyed():
    service = FakeService()
    chat_id = service.add_chat("evil \x1b]0;pwn\x07 title", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        service.begin_reply(chat_id)
        service.write(chat_id, "x\x1b]52;c;aGk=\x07y `\x9b31m` &#27;]0;z&#7; \x1b")
        service.write(chat_id, "]0;t\x07")
        await wait_for(pilot, "x␛]52;c;aGk=y", "␛]0;t")
        strips = pilot.app.screen._compositor.render_strips()
        text = "".join(segment.text for strip in strips for segment in strip)
        assert not any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in text)


@pytest.mark.parametrize("ending", ["complete", "stopped", "length", "incomplete"])
async def test_every_ending_is_named(ending):
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"), ("assistant", "text"))
    service.messages[chat_id][-1]["status"] = ending
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        words = {"stopped": "stopped · F7", "length": "length limit · F7", "incomplete": "cut off", "complete": "text"}
        await wait_for(pilot, words[ending])


async def test_an_escape_that_comes_too_late_to_stop_stays_in_the_composer():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        service.begin_reply(chat_id)
        await wait_for(pilot, "Esc stop")
        service.finish(chat_id)
        await wait_for(pilot, "Esc conversation")
        await press(pilot, "escape")
        assert main_screen(pilot).composer.has_focus, "the next letters must not become commands"


async def test_an_edit_that_was_refused_is_still_an_edit():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "one"), ("assistant", "1"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        await type_text(pilot, "draft")
        main_screen(pilot).action_edit_message()
        await press(pilot, "!")
        service.refusals["send_turn"] = refused("The disk is full.", "refused")
        await press(pilot, "enter")
        await wait_for(pilot, "The disk is full.", "editing: Enter sends a new branch")
        assert main_screen(pilot).composer.text == "one!"
        await press(pilot, "enter")
        await wait_until(pilot, lambda: len(service.called("send_turn")) == 2, "sent")
        assert service.called("send_turn")[-1] == ("send_turn", chat_id, "one!", None)
        await wait_until(pilot, lambda: main_screen(pilot).composer.text == "draft", "the draft is back")


async def test_a_full_context_is_a_choice_for_continuing_too():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "one"), ("assistant", "1"))
    service.messages[chat_id][-1]["status"] = "length"
    choice = {"kind": "drop_oldest", "context_start_id": "m5", "num_turns": 4, "num_tokens_after": 900}
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        service.refusals["continue_reply"] = refused(
            "too long", "context_length_exceeded", n_prompt_tokens=8192, n_ctx=8192, choices=[choice]
        )
        await press(pilot, "f7")
        await wait_for(pilot, "The context is full", "Leave out the oldest 4 turns")
        await press(pilot, "enter")
        await wait_until(pilot, lambda: len(service.called("continue_reply")) == 2, "continued")
        assert ("update_chat", chat_id, {"context_start_id": "m5"}) in service.calls
