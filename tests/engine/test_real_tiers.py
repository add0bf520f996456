"""The engine on the real host and disk tiers: random work with threads, files and quotas, then a new engine on what is
left."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from device_fuzz import OnDevice
from harness import GREEDY_10, Harness, prompt
from integer_runner import held_ids, new_hasher
from test_loads import ONE, by_tier, evict_all
from tier_fuzz import PLANTED_ID, TierFuzz

from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.store.directory import DiskStore
from chatkv.engine.tiers.disk_tier import DiskTier
from chatkv.engine.tiers.host_tier import HostTier
from chatkv.engine.tiers.tier import LowerTier

IMAGE_BYTES = 4096
KEY = b"k" * 32
WAIT_S = 20.0


def open_store(folder: Path, quota_bytes: int = 64 << 20) -> tuple[DiskStore, DiskTier]:
    store = DiskStore.open(folder, KEY, quota_bytes)
    return store, store.tier_for(new_hasher().fingerprint.digest, IMAGE_BYTES, "integer", "0" * 64)


class RealTierFuzz(TierFuzz):
    """Loads come when the disk gives them: while nothing else is to do, the fuzz waits for that."""

    def __init__(self, seed: int, tiers: list[LowerTier]) -> None:
        super().__init__(seed, tiers=tiers, image_bytes=IMAGE_BYTES)  # type: ignore[arg-type]
        self.has_news = threading.Event()
        for tier in tiers:
            tier.on_change = self.has_news.set

    def _tick(self) -> None:
        if self.engine.is_waiting and self.engine.has_unfinished:
            self.has_news.wait(WAIT_S)
        self.has_news.clear()
        if self.random.random() < 0.3:
            self.engine.lower_tiers[-1].flush(WAIT_S)

    def _check_tiers(self) -> None:
        for node in self.engine.kv.tree.nodes():
            if node.device_block_id is not None:
                first = node.position * BLOCK_SIZE
                expected = [(token, first + offset) for offset, token in enumerate(node.token_ids)]
                assert held_ids(self.runner, node.device_block_id) == expected


class DeviceFuzz(OnDevice, RealTierFuzz):
    """Over a device that copies beside its steps."""


@pytest.mark.parametrize(
    ("fuzz_type", "seed"), [(RealTierFuzz, 0), (RealTierFuzz, 1), (DeviceFuzz, 2), (DeviceFuzz, 3)]
)
def test_fuzz_on_the_real_tiers(tmp_path: Path, fuzz_type: type[RealTierFuzz], seed: int) -> None:
    store, disk = open_store(tmp_path / "kv")
    host = HostTier(IMAGE_BYTES, 8 * IMAGE_BYTES)
    fuzz = fuzz_type(seed, [host, disk])
    fuzz.run(500)
    assert fuzz.seen["hit host"] > 0
    assert fuzz.seen["hit disk"] > 0
    fuzz.engine.close()
    store.close()
    files = b"".join(path.read_bytes() for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert PLANTED_ID.to_bytes(4, "little") not in files, "a transient block has reached a file"
    store, disk = open_store(tmp_path / "kv")
    later = fuzz_type(seed + 1, [disk])
    assert later.engine.kv.tree.nodes()
    later.engine.check_integrity()
    later.run(50)
    later.engine.close()
    store.close()


def test_b5_a_chat_comes_back_after_the_store_was_closed(tmp_path: Path) -> None:
    store, disk = open_store(tmp_path / "kv")
    h = Harness(tiers=[disk], image_bytes=IMAGE_BYTES)
    first = h.ask("a", prompt(100), GREEDY_10, owner="chat")
    h.engine.close()
    store.close()
    store, disk = open_store(tmp_path / "kv")
    h = Harness(tiers=[disk], image_bytes=IMAGE_BYTES)
    has_news = threading.Event()
    disk.on_change = has_news.set
    h.add("b", prompt(100) + tuple(first.token_ids) + (1, 2), ONE)
    while h.engine.has_unfinished:
        h.step()
        if h.engine.is_waiting and h.engine.has_unfinished:
            assert has_news.wait(WAIT_S)
            has_news.clear()
    assert by_tier(h.answers["b", 0]) == {"disk": 96}
    evict_all(h)
    assert h.engine.forget("chat", [node.block_hash for node in h.engine.kv.tree.nodes()]).num_removed == 7
    h.engine.close()
    store.close()
