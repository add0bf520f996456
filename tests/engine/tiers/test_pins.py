"""Owners of blocks: known to each block, and cheap where thousands of blocks have the same."""

from __future__ import annotations

import weakref

from chatkv.engine.block_tree import BlockNode
from chatkv.engine.tiers.pins import NUM_SETS_KEPT, Pins


def node(number: int) -> BlockNode:
    return BlockNode(None, number.to_bytes(16, "little"), b"", b"")


def test_d2_a_head_that_many_chats_share_keeps_one_set_of_owners() -> None:
    pins = Pins([])
    head = node(0)
    early = []
    for number in range(3 * NUM_SETS_KEPT):
        pins.hold(head, f"chat {number}")
        early.append(weakref.ref(head.owners))
    assert len(head.owners) == 3 * NUM_SETS_KEPT
    assert sum(owners() is not None for owners in early) <= NUM_SETS_KEPT


def test_blocks_of_one_chat_share_the_set_of_owners() -> None:
    pins = Pins([])
    blocks = [node(number) for number in range(10)]
    for block in blocks:
        pins.hold(block, "chat")
    assert all(block.owners is blocks[0].owners for block in blocks)
