"""The limit of the disk tier: every byte counts, at every moment, whoever looks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from random import Random

from disk_fixtures import Disk
from tier_blocks import WAIT_S, chain, image, store_chain

from chatkv.engine.tiers.tier import CopyState, TierCopy

QUOTA_BYTES = 4 << 20


class Observer:
    """Sums the folder all the time on a thread of its own."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._is_stopped = threading.Event()
        self.most_bytes = 0
        self.num_looks = 0
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Observer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_stopped.is_set():
            try:
                self.most_bytes = max(self.most_bytes, self._disk.used_bytes)
            except FileNotFoundError:  # a file went between the list and the look at it
                continue
            self.num_looks += 1


def check_integrity(copies: Sequence[TierCopy]) -> None:
    seen: set[TierCopy] = set()
    num_children: Counter[TierCopy] = Counter()
    for copy in copies:
        assert copy.state is CopyState.STORED
        assert copy.num_readers == 0
        if copy.parent is None:
            assert copy.record.position == 0
        else:
            assert copy.parent in seen, "prefix-closed, parents first"
            assert copy.parent.record.block_hash == copy.record.parent_hash
            num_children[copy.parent] += 1
        seen.add(copy)
    assert len({copy.slot for copy in copies}) == len(copies)
    assert all(copy.num_children == num_children[copy] for copy in copies)


def test_d1_the_quota_is_never_exceeded_by_a_byte_whoever_looks(disk: Disk) -> None:
    tier = disk.open(QUOTA_BYTES)
    random = Random(7)
    with Observer(disk) as observer:
        alive: list[list] = []
        for number in range(150):
            copies = store_chain(tier, chain(random.randrange(1, 30), number), f"chat {number}")
            alive.append(copies)
            if random.random() < 0.3:
                tier.flush(WAIT_S)
            if random.random() < 0.2:
                tier.remove(random.choice(alive)[-3:], is_forgotten=random.random() < 0.5)
            if random.random() < 0.3:
                chosen = [copy for copy in random.choice(alive) if copy.state is CopyState.STORED]
                for one, copy in zip(disk.load(chosen), chosen, strict=False):
                    assert one == bytes(image(copy.record))
        assert tier.flush(WAIT_S)
    assert observer.num_looks > 20
    assert observer.most_bytes <= QUOTA_BYTES
    assert tier.stats().num_evicted > 300
    assert tier.stats().used_bytes > QUOTA_BYTES * 0.5, "the room is used"
    check_integrity(tier.copies())
    known = {copy.record: copy.num_children for copy in tier.copies()}
    found = disk.open(QUOTA_BYTES).copies()
    check_integrity(found)
    assert {copy.record: copy.num_children for copy in found} == known
    for copy in found:
        assert disk.load([copy]) == [bytes(image(copy.record))]


def test_eviction_takes_the_coldest_leaves_and_keeps_shared_heads(disk: Disk) -> None:
    tier = disk.open(QUOTA_BYTES)
    head = disk.save(chain(5, 0))
    cold = [disk.save(chain(30, number)) for number in range(1, 4)]
    disk.pass_days(9)
    tier.touch(head)
    number = 100
    while tier.stats().num_evicted < 20:
        disk.save(chain(10, number))
        number += 1
    gone = [copy for copies in cold for copy in copies if copy.state is CopyState.GONE]
    assert len(gone) == tier.stats().num_evicted
    assert {copy.state for copy in head} == {CopyState.STORED}
    for copies in cold:
        states = [copy.state for copy in copies]
        assert states == sorted(states, key=[CopyState.STORED, CopyState.GONE].index), "leaves go first"


def test_all_pinned_it_refuses_says_so_and_recovers(disk: Disk) -> None:
    tier = disk.open(QUOTA_BYTES)
    pinned: list = []
    number = 0
    while not tier.stats().notice:
        pinned += disk.save(chain(20, number), is_pinned=True)
        number += 1
    assert "pin" in (tier.stats().notice or "").lower()
    assert {copy.state for copy in pinned} == {CopyState.STORED}
    assert store_chain(tier, chain(1, 500)) == []
    assert tier.stats().num_skipped > 1
    assert tier.stats().num_evicted == 0
    tier.pin(pinned, False)
    assert len(disk.save(chain(3, 501))) == 3
    assert tier.stats().notice is None


def test_a_chain_longer_than_the_quota_keeps_its_head(disk: Disk) -> None:
    tier = disk.open(QUOTA_BYTES, queue_blocks=2000)
    copies = store_chain(tier, chain(1000))
    assert tier.flush(WAIT_S)
    states = [copy.state for copy in copies]
    assert states[:50] == [CopyState.STORED] * 50
    assert states == sorted(states, key=[CopyState.STORED, CopyState.GONE].index)
    assert disk.used_bytes <= QUOTA_BYTES


def test_lowering_the_quota_shrinks_the_folder(disk: Disk) -> None:
    tier = disk.open(16 << 20)
    for number in range(20):
        disk.save(chain(40, number))
    assert disk.used_bytes > 6 << 20
    disk.store.set_quota(QUOTA_BYTES)
    assert disk.used_bytes <= QUOTA_BYTES
    assert tier.stats().num_blocks > 0
    alive = tier.copies()
    assert len(disk.load(alive[:1])) == 1
    assert len(disk.save(chain(5, 99))) == 5
    assert disk.used_bytes <= QUOTA_BYTES


def test_other_models_blocks_go_first_as_long_as_they_are_colder(disk: Disk) -> None:
    other = b"o" * 32
    disk.open(QUOTA_BYTES, fingerprint=other)
    disk.save(chain(40, 1))
    disk.pass_days(1)
    tier = disk.open(QUOTA_BYTES)
    number = 10
    while len(disk.save(chain(20, number))) == 20 and not tier.stats().num_evicted:
        number += 1
    assert tier.stats().num_evicted, "it had to evict"
    assert disk.used_bytes <= QUOTA_BYTES
    assert tier.copies()
    assert disk.open(QUOTA_BYTES, fingerprint=other).copies() == []


def test_other_models_blocks_stay_when_they_are_warmer(disk: Disk) -> None:
    other = b"o" * 32
    tier = disk.open(QUOTA_BYTES)
    number = 10
    while not tier.stats().num_evicted:
        disk.save(chain(20, number))
        number += 1
    num_evicted = tier.stats().num_evicted
    disk.pass_days(1)
    disk.open(QUOTA_BYTES, fingerprint=other)
    assert len(disk.save(chain(10, 1))) == 10
    disk.open(QUOTA_BYTES)
    assert len(disk.save(chain(20, 99))) == 20
    assert disk.tier.stats().num_evicted > 0
    assert num_evicted
    assert len(disk.open(QUOTA_BYTES, fingerprint=other).copies()) == 10
