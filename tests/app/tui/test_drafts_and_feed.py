from __future__ import annotations

import asyncio
import stat

import pytest
from fake_service import FakeService, refused

from chatkv.app.errors import UserError
from chatkv.app.tui.board import Board
from chatkv.app.tui.drafts import Drafts, new_chat_key
from chatkv.app.tui.feed import read_events
from chatkv.app.tui.ports import ServiceLostError


async def test_drafts_go_to_the_service_and_are_forgotten_then():
    drafts, saved = Drafts(), []

    async def save(chat_id: str, text: str) -> None:
        saved.append((chat_id, text))

    drafts.put("a", "text")
    drafts.put(new_chat_key(), "  ")
    assert await drafts.flush(save)
    assert saved == [("a", "text")], "an empty draft makes no chat"
    assert drafts.is_saved


async def test_what_is_typed_while_a_draft_is_saved_is_saved_next():
    drafts = Drafts()
    drafts.put("a", "one")

    async def save(chat_id: str, text: str) -> None:
        drafts.put("a", "two")

    await drafts.flush(save)
    assert drafts.pending("a") == "two"


async def test_drafts_no_service_took_survive_in_a_private_file(tmp_path):
    file = tmp_path / "state" / "drafts.json"
    drafts = Drafts(file)
    drafts.put("a", "typed")
    key = new_chat_key()
    drafts.put(key, "new")

    async def lost(chat_id: str, text: str) -> None:
        raise ServiceLostError

    assert not await drafts.flush(lost)
    drafts.write_file()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = Drafts(file)
    again.read_file()
    assert (again.pending("a"), again.pending(key), again.new_chats) == ("typed", "new", [key])

    async def save(chat_id: str, text: str) -> None: ...

    assert await again.flush(save)
    again.write_file()
    assert not file.exists()


async def test_a_draft_of_a_chat_that_is_gone_does_not_block_the_others():
    drafts, saved = Drafts(), []

    async def save(chat_id: str, text: str) -> None:
        if chat_id == "gone":
            raise refused("no such chat", "chat_not_found", 404)
        saved.append(chat_id)

    drafts.put("gone", "x")
    drafts.put("here", "y")
    await drafts.flush(save)
    assert saved == ["here"]
    assert drafts.is_saved


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 5}', "\udce9"])
def test_a_damaged_drafts_file_counts_as_empty(tmp_path, content):
    file = tmp_path / "drafts.json"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    drafts = Drafts(file)
    drafts.read_file()
    assert drafts.is_saved


class Sleeper:
    """Counts the pauses and ends the reader after some of them."""

    def __init__(self, num_pauses: int):
        self.delays: list[float] = []
        self._num_pauses = num_pauses

    async def __call__(self, delay: float) -> None:
        self.delays.append(delay)
        if len(self.delays) == self._num_pauses:
            raise asyncio.CancelledError


async def read_until_cancelled(service, board, sleeper) -> list[UserError]:
    troubles: list[UserError] = []
    with pytest.raises(asyncio.CancelledError):
        await read_events(service, board, troubles.append, sleeper)
    return troubles


async def test_a_lost_service_is_asked_again_ever_more_slowly():
    service, board, sleeper = FakeService(), Board(), Sleeper(6)
    service.is_lost = True
    await read_until_cancelled(service, board, sleeper)
    assert sleeper.delays == sorted(sleeper.delays)
    assert sleeper.delays[-1] <= 3.0
    assert not board.is_connected


async def test_a_connection_that_ends_is_told_and_made_again():
    service, board = FakeService(), Board()
    service.emit_status(batch_size=3)
    service.break_connection()
    service.is_lost = False
    seen = []

    async def pause(delay: float) -> None:
        seen.append((board.is_connected, board.is_known, board.status.batch_size))
        raise asyncio.CancelledError

    await read_until_cancelled(service, board, pause)
    assert seen == [(False, True, 3)]


async def test_a_service_that_cannot_start_says_why_once():
    service = FakeService()

    async def fail() -> dict[str, object]:
        raise UserError("The port is taken.", "Choose another.")

    service.ensure_service = fail
    troubles = await read_until_cancelled(service, Board(), Sleeper(4))
    assert [str(trouble) for trouble in troubles] == ["The port is taken.\nChoose another."]
