"""Start-up imports, key rules, and getting text out."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_service import FakeService
from pilots import main_screen, open_chat, press, running, wait_for, wait_until
from textual.binding import Binding

from chatkv.app.tui import bindings, clipboard
from chatkv.app.tui.screens.message_actions import code_blocks

HEAVY = ("torch", "transformers", "numpy", "chatkv.engine", "chatkv.kernels")
LATE = ("pygments.lexers", "markdown_it.main", "httpx")


def modules_after(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_app_imports_neither_torch_nor_the_engine():
    loaded = modules_after("import chatkv.app.tui.app, chatkv.app.tui.run, chatkv.app.cli")
    assert not loaded & set(HEAVY)
    assert not loaded & set(LATE), "imported when the first answer needs them"


def all_bindings() -> list[Binding]:
    tables = (
        bindings.MAIN_BINDINGS,
        bindings.TRANSCRIPT_BINDINGS,
        bindings.CHAT_LIST_BINDINGS,
        bindings.COMPOSER_BINDINGS,
    )
    return [binding for table in tables for binding in table if isinstance(binding, Binding)]


def test_every_binding_has_an_id_of_its_own_and_a_text_for_the_help():
    ids = [binding.id for binding in all_bindings()]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    assert all(binding.description for binding in all_bindings())


def test_no_key_is_one_that_terminals_keep():
    rejected = {f"ctrl+{key}" for key in ("a", "b", "s", "h", "i", "m", "left_square_bracket", "backslash", "tab")}
    rejected |= {"f10", "f11", *(f"alt+{digit}" for digit in range(10))}
    used = {key for binding in all_bindings() for key in binding.key.split(",")}
    assert not used & rejected
    assert not any(key.startswith("ctrl+shift+") for key in used)


async def test_keys_can_be_moved_by_their_id():
    async with running(FakeService()) as pilot:
        pilot.app.set_keymap({"main.help": "f9"})
        await press(pilot, "f9")
        await wait_for(pilot, "arrows scroll", "F9")


async def test_copying_says_honestly_where_the_text_went(tmp_path, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "TMUX"):
        monkeypatch.delenv(name, raising=False)
    service = FakeService()
    chat_id = service.add_chat("a", ("user", "q"), ("assistant", "see\n```sh\nls\n```\nand\n```sh\npwd\n```\n"))
    async with running(service, state_dir=tmp_path) as pilot:
        await open_chat(pilot, chat_id)
        await press(pilot, "escape", "c")
        await wait_until(pilot, lambda: any("clipboard.txt" in said for said in notices(pilot)), "told")
        assert "which does not confirm" in notices(pilot)[-1]
        assert pilot.app.clipboard == service.messages[chat_id][-1]["content"]
        await press(pilot, "C")
        assert pilot.app.clipboard == "pwd"
        await press(pilot, "C")
        assert pilot.app.clipboard == "ls"
        assert (tmp_path / "clipboard.txt").read_text() == "ls"
        target = tmp_path / "reply.md"
        main_screen(pilot).action_copy_to(f"> {target}")
        assert target.read_text().startswith("see")
        main_screen(pilot).action_copy_to(f"> {target}")
        await wait_until(pilot, lambda: any("Cannot write" in said for said in notices(pilot)), "refused to overwrite")
        assert target.read_text().startswith("see")


def notices(pilot) -> list[str]:
    return [notice.message for notice in pilot.app._notifications]


def test_a_tool_that_answers_is_believed(tmp_path, monkeypatch):
    tool = tmp_path / "wl-copy"
    tool.write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n")
    tool.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    copied = clipboard.copy("text", lambda _: pytest.fail("OSC 52 is the last resort"), None)
    assert copied == clipboard.Copied(True, "with wl-copy")
    assert (tmp_path / "copied").read_text() == "text"


def test_code_blocks_of_a_reply():
    assert code_blocks("a\n```\nx\n\ny\n```\n- b\n  ```py\n  z\n  ```") == ["x\n\ny", "z"]
