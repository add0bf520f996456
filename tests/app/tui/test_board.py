from __future__ import annotations

import pytest

from chatkv.app.tui.board import Board, MessageAdded, ReplyDone, TextAdded
from chatkv.app.tui.records import ChatSummary

HELLO = {"seq": 0, "type": "hello", "status": {"model": {"name": "m", "state": "ready"}, "batch_size": 2}}


@pytest.fixture
def board():
    board = Board()
    board.apply(HELLO)
    board.take_changes()
    return board


def delta(seq: int, text: str, chat_id: str = "c", **fields):
    return {"seq": seq, "type": "reply_delta", "chat_id": chat_id, "message_id": "r", "text": text, **fields}


def test_hello_tells_the_status_and_asks_for_a_fresh_look():
    board = Board()
    assert not board.is_known
    board.apply(HELLO)
    assert board.is_connected
    assert board.status.model.state == "ready"
    assert board.take_changes().is_resync_due
    assert not board.take_changes()


def test_text_of_the_open_chat_is_collected_in_one_piece_between_two_looks(board):
    board.open_chat_id = "c"
    board.apply(delta(1, "Hel", offset=0, tokens_per_s=31))
    board.apply(delta(2, "lo", offset=3))
    changes = board.take_changes()
    assert changes.open_chat == [TextAdded("r", "Hello", 0)]
    assert board.live["c"].tokens_per_s == 31


def test_other_chats_only_change_their_badge(board):
    board.open_chat_id = "c"
    board.apply(delta(1, "text", chat_id="other"))
    changes = board.take_changes()
    assert changes.open_chat == []
    assert changes.is_list_changed
    assert board.live["other"].phase == "writing"


def test_a_gap_in_the_numbers_asks_for_a_fresh_look(board):
    board.apply(delta(1, "a"))
    assert not board.take_changes().is_resync_due
    board.apply(delta(3, "b"))
    assert board.take_changes().is_resync_due


def test_a_subscriber_that_fell_behind_asks_for_a_fresh_look(board):
    board.apply({"seq": 9, "type": "resync"})
    assert board.take_changes().is_resync_due


def test_a_reply_goes_from_waiting_to_done(board):
    board.open_chat_id = "c"
    board.apply({"type": "message_added", "chat_id": "c", "message": {"id": "r", "role": "assistant"}})
    progress = {"type": "reply_progress", "chat_id": "c", "message_id": "r"}
    board.apply({**progress, "phase": "waiting", "queue_position": 2})
    assert board.live["c"].queue_position == 2
    board.apply({**progress, "phase": "reading", "num_prompt_tokens": 200, "num_computed_tokens": 86})
    assert board.live["c"].prompt_share == 0.43
    board.apply(delta(4, "x"))
    board.apply({"type": "reply_done", "chat_id": "c", "message": {"id": "r", "content": "x", "status": "complete"}})
    assert "c" not in board.live
    kinds = [type(event) for event in board.take_changes().open_chat]
    assert kinds == [MessageAdded, TextAdded, ReplyDone]


def test_an_end_that_overtakes_the_answer_leaves_no_chat_busy_for_ever(board):
    board.apply({"type": "reply_done", "chat_id": "c", "message": {"id": "r", "status": "complete"}})
    board.begin_reply("c", "r")
    assert board.live == {}
    board.begin_reply("c", "r2")
    assert "c" in board.live


def test_a_lost_service_leaves_nothing_live_and_says_so(board):
    board.apply(delta(1, "x"))
    board.disconnect()
    assert not board.is_connected
    assert board.is_known
    assert board.live == {}
    assert board.take_changes().is_status_changed


def test_the_list_follows_the_states_that_the_service_names(board):
    board.set_chats([ChatSummary("a", state="reading"), ChatSummary("b")])
    assert list(board.live) == ["a"]
    board.apply({"type": "chat_updated", "chat": {"id": "a", "state": "idle"}})
    assert board.live == {}
    board.begin_reply("b", "r")
    board.apply({"type": "chat_updated", "chat": {"id": "b", "state": "idle"}})
    assert list(board.live) == ["b"], "that word was older than the reply"
    board.apply({"type": "chat_deleted", "chat": {"id": "a"}})
    assert list(board.chats) == ["b"]


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"type": "news"},
        {"type": "reply_delta"},
        {"type": "reply_done"},
        {"type": "message_added", "chat_id": None},
        {"type": "job", "job": None},
        {"type": "status"},
        {"type": "model", "model": {"name": 5, "progress": "much"}},
        {"type": "chat_updated", "chat": {"title": ["x"], "updated_at": None}},
    ],
)
def test_odd_events_do_no_harm(board, event):
    board.apply(event)
    board.take_changes()
