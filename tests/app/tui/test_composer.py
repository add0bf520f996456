"""Keys as terminals really send them, and what the composer makes of them."""

from __future__ import annotations

import pytest
from fake_service import FakeService
from pilots import burst, main_screen, open_chat, press, running, type_text, wait_for, wait_until
from textual import events
from textual._xterm_parser import XTermParser

from chatkv.app.tui.commands import COMMANDS, complete, matching, parse
from chatkv.app.tui.screens.main import MainScreen
from chatkv.app.tui.widgets.composer import NEWLINE_KEYS


def decoded(sequence: str) -> list[str]:
    parser = XTermParser()
    tokens = [*parser.feed(sequence), *parser.tick()]
    return [token.key for token in tokens if isinstance(token, events.Key)]


@pytest.mark.parametrize(
    ("sequence", "key"),
    [
        ("\r", "enter"),
        ("\n", "ctrl+j"),
        ("\x1b[13;2u", "shift+enter"),
        ("\x1b[27;2;13~", "shift+\r"),
        ("\x07", "ctrl+g"),
        ("\x0f", "ctrl+o"),
        ("\x0e", "ctrl+n"),
        ("\x1b[1;3A", "alt+up"),
        ("\x1b[1;3B", "alt+down"),
        ("\x1b[5;3~", "alt+pageup"),
        ("\x1b[6;3~", "alt+pagedown"),
        ("\x1bOP", "f1"),
        ("\x1b[15~", "f5"),
        ("\x1b[18~", "f7"),
    ],
)
def test_terminals_send_what_the_bindings_name(sequence, key):
    assert decoded(sequence) == [key]


def test_newline_keys_cover_both_forms_of_shift_enter():
    assert {*decoded("\n"), *decoded("\x1b[13;2u"), *decoded("\x1b[27;2;13~")} <= NEWLINE_KEYS


@pytest.mark.parametrize("key", sorted(NEWLINE_KEYS))
async def test_every_newline_key_makes_a_line_and_sends_nothing(key):
    service = FakeService()
    async with running(service) as pilot:
        composer = main_screen(pilot).composer
        await press(pilot, "a")
        composer.post_message(events.Key(key, None))
        await wait_until(pilot, lambda: composer.text == "a\n", key)
        await press(pilot, "b")
        assert composer.text == "a\nb"
        await wait_until(pilot, lambda: composer.size.height == 2, "two rows")
        assert not service.called("send_turn")


async def test_a_backslash_before_enter_makes_a_line():
    service = FakeService()
    async with running(service) as pilot:
        await press(pilot, "a", "\\", "enter", "b", "enter")
        await wait_until(pilot, lambda: service.called("send_turn"), "sent")
        assert service.called("send_turn")[0][2] == "a\nb"


async def test_pasted_lines_are_one_text_without_control_characters():
    service = FakeService()
    async with running(service) as pilot:
        composer = main_screen(pilot).composer
        composer.post_message(events.Paste("one\r\ntwo\rthree\x1b]0;x\x07\n" + "more\n" * 30))
        await wait_until(pilot, lambda: composer.text.startswith("one\ntwo\nthree␛]0;x\nmore"), "pasted")
        assert not service.called("send_turn")
        await wait_until(pilot, lambda: composer.size.height == 10, "it grows to ten lines and scrolls then")


async def test_earlier_prompts_come_back_with_up_and_go_with_down():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "first"), ("assistant", "1"), ("user", "second\nline"), ("assistant", "2"))
    async with running(service) as pilot:
        await open_chat(pilot, chat_id)
        composer = main_screen(pilot).composer
        await type_text(pilot, "unsent")
        await press(pilot, "up")
        assert composer.text == "second\nline"
        await press(pilot, "up")
        assert composer.text == "first"
        await press(pilot, "up")
        assert composer.text == "first"
        await press(pilot, "down")
        assert composer.text == "second\nline"
        await press(pilot, "down", "down")
        assert composer.text == "unsent"


async def test_commands_are_hinted_completed_and_run():
    service = FakeService()
    async with running(service) as pilot:
        await type_text(pilot, "/he")
        await wait_for(pilot, "/help", "Tab completes")
        await press(pilot, "tab", "enter")
        await wait_for(pilot, "arrows scroll")
        assert not service.called("send_turn")


async def test_an_unknown_command_is_not_sent_but_a_path_is():
    service = FakeService()
    async with running(service) as pilot:
        await type_text(pilot, "/nosuch")
        await press(pilot, "enter")
        await wait_for(pilot, "There is no command /nosuch.")
        assert main_screen(pilot).composer.text == "/nosuch", "what was typed stays"
        main_screen(pilot).fill("/usr/bin/env is what?")
        await press(pilot, "enter")
        await wait_until(pilot, lambda: service.called("send_turn"), "sent")


async def test_a_command_comes_back_with_up_in_every_chat():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "first"))
    async with running(service) as pilot:
        await type_text(pilot, "/copy > a b")
        await press(pilot, "enter")
        await wait_for(pilot, "There is no reply yet.")
        await open_chat(pilot, chat_id)
        await press(pilot, "up")
        assert main_screen(pilot).composer.text == "/copy > a b"
        await press(pilot, "up")
        assert main_screen(pilot).composer.text == "first"


async def test_keys_of_one_burst_act_in_order():
    service = FakeService()
    async with running(service) as pilot:
        burst(pilot, *"one", "enter", "enter", "ctrl+n", *"two", "ctrl+n", *"three", "enter", "ctrl+n")
        await wait_until(pilot, lambda: len(service.called("send_turn")) == 2, "both sent")
        assert sorted(call[2] for call in service.called("send_turn")) == ["one", "three"]
        assert len({call[1] for call in service.called("send_turn")}) == 2, "each in its own chat"
        await wait_until(
            pilot, lambda: sorted(chat.get("draft", "") for chat in service.chats.values()) == ["", "", "two"], "drafts"
        )
        assert len(service.chats) == 3
        assert main_screen(pilot).session.chat_id is None


async def test_a_burst_that_ends_with_quit_keeps_the_text(tmp_path):
    service = FakeService()
    async with running(service, state_dir=tmp_path) as pilot:
        burst(pilot, *"kept", "ctrl+q")
        await wait_until(pilot, lambda: pilot.app.return_value == 0, "quit")
        app = pilot.app
    await app.close()
    assert [chat["draft"] for chat in service.chats.values()] == ["kept"]


async def test_a_draft_of_a_new_chat_does_not_go_to_the_chat_opened_next():
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"), draft="its own")
    async with running(service) as pilot:
        await type_text(pilot, "mine")
        await open_chat(pilot, chat_id)
        await wait_until(pilot, lambda: len(service.chats) == 2, "a chat of its own")
        await wait_until(pilot, lambda: main_screen(pilot).session.drafts.is_saved, "saved")
        assert sorted(chat["draft"] for chat in service.chats.values()) == ["its own", "mine"]
        assert main_screen(pilot).composer.text == "its own"


async def test_the_editor_gets_the_text_and_gives_it_back(monkeypatch, tmp_path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf " edited\\nby hand\\n" >> "$1"\n')
    editor.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(editor))
    from chatkv.app.tui.editor import edit

    assert edit("draft") == "draft edited\nby hand"
    monkeypatch.setenv("VISUAL", "false")
    with pytest.raises(OSError, match="ended with status 1"):
        edit("draft")


@pytest.mark.parametrize(
    ("text", "name", "argument"),
    [("/new", "new", ""), ("/rename  a b ", "rename", "a b"), ("/system two\nlines", "system", "two\nlines")],
)
def test_commands_are_parsed(text, name, argument):
    parsed = parse(text)
    assert (parsed.name, parsed.argument) == (name, argument)
    assert parsed.command is not None


@pytest.mark.parametrize("text", ["/usr/bin", " /new", "/", "/2", "a /new", "/New"])
def test_what_is_no_command_is_a_message(text):
    assert parse(text) is None


def test_completion_offers_what_fits():
    assert complete("/hel") == "/help"
    assert complete("/help") is None
    assert complete("/ren") == "/rename "
    assert complete("hello") is None
    assert [command.name for command in matching("/re")] == ["rename", "regenerate", "restart"]


def test_every_command_has_its_action():
    for command in COMMANDS:
        assert callable(getattr(MainScreen, f"action_{command.action}")), command.name
