"""Whose cached blocks are whose: kept with the chats, shared by forks, gone without a trace at the end."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from chatkv.app.chats import database
from chatkv.app.chats.blocks import HASH_BYTES, OwnedBlocks
from chatkv.app.chats.errors import ChatStateError
from chatkv.app.chats.store import ChatStore

from .conftest import Clock, Talk

FIRST, SECOND = b"f" * 32, b"g" * 32
RNG = random.Random(5)


def _hashes(number: int) -> list[bytes]:
    return [RNG.randbytes(HASH_BYTES) for _ in range(number)]


def _own(store: ChatStore, chat_id: str, hashes: Sequence[bytes], fingerprint: bytes = FIRST) -> None:
    store.add_block_owners(fingerprint, [(chat_id, value) for value in hashes])


def _bytes_of_all_files(store: ChatStore) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(store.file.parent.glob("chats.db*")))


def test_a_chat_knows_its_blocks_and_which_of_them_others_own(store: ChatStore) -> None:
    one, two = (store.create_chat(title).id for title in ("one", "two"))
    head, rest, other = _hashes(3), _hashes(4), _hashes(2)
    store.add_block_owners(FIRST, [(owner, value) for value in head for owner in (one, two)])
    _own(store, one, [*head, *rest])
    _own(store, one, other, SECOND)
    assert store.owned_blocks(one) == {
        FIRST: OwnedBlocks(frozenset(head + rest), frozenset(head)),
        SECOND: OwnedBlocks(frozenset(other), frozenset()),
    }
    assert store.owned_blocks(two) == {FIRST: OwnedBlocks(frozenset(head), frozenset(head))}
    store.drop_block_owners(one)
    assert store.owned_blocks(one) == {}
    assert store.owned_blocks(two) == {FIRST: OwnedBlocks(frozenset(head), frozenset())}


def test_clients_without_chats_own_nothing(store: ChatStore) -> None:
    chat, (value,) = store.create_chat().id, _hashes(1)
    store.add_block_owners(FIRST, [("", value), (chat, value)])
    assert store.owned_blocks(chat) == {FIRST: OwnedBlocks(frozenset([value]), frozenset())}
    store.add_block_owners(FIRST, [("", value)])
    assert store.owned_blocks("") == {}


def test_blocks_of_a_deleted_chat_are_refused_with_their_group(store: ChatStore) -> None:
    kept, gone = store.create_chat().id, store.create_chat().id
    store.trash(gone)
    for owner in (gone, "0" * 24, "p" + "0" * 24):
        with pytest.raises(ChatStateError, match=owner):
            store.add_block_owners(FIRST, [(kept, *_hashes(1)), (owner, *_hashes(1))])
    assert store.owned_blocks(kept) == {}
    store.restore(gone)
    _own(store, gone, _hashes(1))
    assert store.owned_blocks(gone)


def test_owners_and_chains_survive_a_restart(store: ChatStore, db_file: Path) -> None:
    chat, hashes, life = store.create_chat().id, _hashes(3), store.owners_id
    _own(store, chat, hashes)
    store.set_chain(chat, FIRST, 50, hashes)
    store.close()
    with ChatStore(db_file) as again:
        assert again.owned_blocks(chat)[FIRST].owned == frozenset(hashes)
        assert [chain.hashes for chain in again.chains(FIRST)] == [tuple(hashes)]
        assert again.owners_id == life


def test_the_chain_of_the_last_request_replaces_the_one_before(store: ChatStore, clock: Clock) -> None:
    one, two = store.create_chat().id, store.create_chat().id
    first, longer, other = _hashes(2), _hashes(5), _hashes(1)
    store.set_chain(one, FIRST, 40, first)
    store.set_chain(two, FIRST, 3, [])
    store.set_chain(one, SECOND, 16, other)
    store.set_chain(one, FIRST, 90, longer)
    found = store.chains(FIRST)
    assert [(chain.chat_id, chain.num_tokens, chain.hashes) for chain in found] == [
        (one, 90, tuple(longer)),
        (two, 3, ()),
    ]
    assert found[0].updated_at > found[1].updated_at
    assert [chain.chat_id for chain in store.chains(FIRST, 1)] == [one]
    assert [chain.num_tokens for chain in store.chains(SECOND)] == [16]


def test_a_deleted_chat_gets_no_chain(store: ChatStore) -> None:
    chat = store.create_chat().id
    store.trash(chat)
    store.set_chain(chat, FIRST, 16, _hashes(1))
    store.set_chain("0" * 24, FIRST, 16, _hashes(1))
    assert store.chains(FIRST) == []


def test_pinned_chats_name_their_blocks(store: ChatStore) -> None:
    pinned, empty, plain = (store.create_chat(str(number)).id for number in range(3))
    mine = _hashes(3)
    _own(store, pinned, mine)
    _own(store, pinned, _hashes(1), SECOND)
    _own(store, plain, _hashes(2))
    for chat in (pinned, empty):
        store.update_chat(chat, is_pinned=True)
    assert {chat: sorted(hashes) for chat, hashes in store.pinned_blocks(FIRST).items()} == {pinned: sorted(mine)}
    store.trash(pinned)
    assert store.pinned_blocks(FIRST) == {}


def test_a_purge_takes_the_rows_along(store: ChatStore, talk: Talk) -> None:
    _, reply = talk.exchange("a", "b")
    fork = store.fork(talk.chat.id, reply.id).id
    hashes = _hashes(2)
    for chat in (talk.chat.id, fork):
        _own(store, chat, hashes)
        store.set_chain(chat, FIRST, 32, hashes)
    store.purge_chat(talk.chat.id)
    assert store.owned_blocks(talk.chat.id) == {}
    assert store.owned_blocks(fork) == {FIRST: OwnedBlocks(frozenset(hashes), frozenset())}
    assert [chain.chat_id for chain in store.chains(FIRST)] == [fork]


def test_blocks_of_a_private_chat_stay_in_memory(store: ChatStore, talk: Talk) -> None:
    private = store.create_chat(is_private=True).id
    shared, own = _hashes(2), _hashes(2)
    store.add_block_owners(FIRST, [(talk.chat.id, shared[0]), (private, shared[0]), (private, own[0])])
    store.set_chain(private, FIRST, 20, [own[0]])
    store.set_chain(talk.chat.id, FIRST, 16, [shared[0]])
    assert own[0] not in _bytes_of_all_files(store)
    assert private.encode() not in _bytes_of_all_files(store)
    assert store.owned_blocks(private) == {FIRST: OwnedBlocks(frozenset([shared[0], own[0]]), frozenset([shared[0]]))}
    # A private chat ends with the service; it must not keep blocks of a deleted one on the disk.
    assert store.owned_blocks(talk.chat.id) == {FIRST: OwnedBlocks(frozenset([shared[0]]), frozenset())}
    assert [chain.chat_id for chain in store.chains(FIRST)] == [talk.chat.id, private]
    store.drop_block_owners(private)
    assert store.owned_blocks(private) == {}


@pytest.mark.parametrize("seed", [29, 30])
def test_nothing_of_a_forgotten_chat_stays_in_the_files(
    store: ChatStore, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With the first seed SQLite has left copies of deleted rows in pages that it had rebalanced."""
    rng = random.Random(seed)
    monkeypatch.setattr(database.secrets, "token_hex", lambda num_bytes: rng.randbytes(num_bytes).hex())
    chats = [store.create_chat().id for _ in range(rng.choice([3, 12, 40]))]
    own: dict[str, list[bytes]] = {chat: [] for chat in chats}
    for _ in range(rng.choice([30, 100])):
        chat, number = rng.choice(chats), rng.choice([1, 20, 100])
        new = [rng.randbytes(HASH_BYTES) for _ in range(number)]
        if rng.random() < 0.3 and any(own.values()):
            new += own[rng.choice([other for other in chats if own[other]])][:20]
        own[chat] += new
        _own(store, chat, new)
        store.set_chain(chat, FIRST, 16 * len(own[chat]), own[chat])
    tables = store._disk.rows("select name, sql from sqlite_master order by name")
    forgotten, kept = chats[: len(chats) // 2], chats[len(chats) // 2 :]
    for chat in forgotten:
        store.drop_block_owners(chat)
    left = _bytes_of_all_files(store)
    of_kept = {value for chat in kept for value in own[chat]}
    assert not [value for chat in forgotten for value in own[chat] if value not in of_kept and value in left]
    assert not [chat for chat in forgotten if store.owned_blocks(chat)]
    for chat in kept:
        assert (FIRST in store.owned_blocks(chat)) == bool(own[chat])
        assert not own[chat] or store.owned_blocks(chat)[FIRST].owned == set(own[chat])
    assert {chain.chat_id: list(chain.hashes) for chain in store.chains(FIRST)} == {
        chat: own[chat] for chat in kept if own[chat]
    }
    assert store._disk.rows("select name, sql from sqlite_master order by name") == tables


def test_a_cleared_cache_leaves_no_rows(store: ChatStore, talk: Talk) -> None:
    chats = (talk.chat.id, store.create_chat(is_private=True).id)
    hashes = _hashes(50)
    for chat in chats:
        for fingerprint in (FIRST, SECOND):
            _own(store, chat, hashes, fingerprint)
            store.set_chain(chat, fingerprint, 800, hashes)
    store.clear_block_owners()
    assert [store.owned_blocks(chat) for chat in chats] == [{}, {}]
    assert [store.chains(fingerprint) for fingerprint in (FIRST, SECOND)] == [[], []]
    left = _bytes_of_all_files(store)
    assert not [value for value in hashes if value in left]


def test_a_few_hundred_rows_take_a_few_milliseconds(store: ChatStore) -> None:
    chat = store.create_chat().id
    times_s = []
    for _ in range(9):
        pairs = [(chat, value) for value in _hashes(300)]
        start = time.perf_counter()
        store.add_block_owners(FIRST, pairs)
        times_s.append(time.perf_counter() - start)
    assert sorted(times_s)[4] < 0.02


def test_a_salvage_loses_the_rows_and_says_so_by_another_id(store: ChatStore, talk: Talk, db_file: Path) -> None:
    talk.exchange("a", "b")
    _own(store, talk.chat.id, _hashes(500))
    store.set_chain(talk.chat.id, FIRST, 8000, _hashes(500))
    life = store.owners_id
    store.close()
    with db_file.open("r+b") as file:
        file.write(b"no database here")
    with ChatStore(db_file) as again:
        assert again.salvage_report is not None
        assert (again.salvage_report.num_lost, again.salvage_report.num_set_aside) == (0, 0)
        assert Talk(again, talk.chat).texts() == ["a", "b"]
        assert again.owned_blocks(talk.chat.id) == {}
        assert again.chains(FIRST) == []
        assert again.owners_id != life


def test_a_lost_id_is_another_one_from_then_on(store: ChatStore, db_file: Path) -> None:
    life = store.owners_id
    store.close()
    connection = sqlite3.connect(db_file)
    connection.execute("delete from meta where key = 'owners_id'")
    connection.commit()
    connection.close()
    with ChatStore(db_file) as again:
        new = again.owners_id
        assert new not in ("", life)
        assert again.owners_id == new
