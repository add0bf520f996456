"""C5, C7: whatever the disk does, the engine answers as if there were none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from engine_life import IMAGE_BYTES, ONE, Ids, Life
from faulty_files import EIO, ENOSPC, FaultyFiles, Hang, failing
from harness import prompt
from integer_runner import held_ids
from slab_damage import DAMAGES, REGIONS, SLOT_BYTES, drop_index, flip, slab_file

from chatkv.engine.request import FinishReason, RequestStatus
from chatkv.engine.store import reader
from chatkv.engine.store.record import HEADER_BYTES
from chatkv.engine.store.slab_header import SLAB_HEADER_BYTES

assert SLOT_BYTES == HEADER_BYTES + IMAGE_BYTES


@pytest.fixture
def directory(quick_path: Path) -> Path:
    return quick_path / "store"


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def life(directory: Path, files: FaultyFiles) -> Iterator[Life]:
    running = Life(directory, files)
    yield running
    files.hook = None
    running.end()


def first_life(directory: Path) -> Ids:
    """A chat of six full blocks, on disk after the end."""
    life = Life(directory)
    _, chat = life.say(prompt(90))
    life.settle()
    life.end()
    return chat


def test_b5_the_next_life_computes_new_tokens_only(directory: Path) -> None:
    chat = first_life(directory)
    life = Life(directory)
    answer, _ = life.say(chat + prompt(20, first=5))
    assert life.num_disk_tokens(answer) == 96
    assert answer.num_cached_tokens == 96
    life.end()


@pytest.mark.parametrize("offset", REGIONS.values(), ids=REGIONS)
@pytest.mark.parametrize("has_index", [True, False], ids=["with the index", "without an index"])
def test_c5_a_flipped_bit_is_no_wrong_token(directory: Path, offset: int, has_index: bool) -> None:
    chat = first_life(directory)
    flip(slab_file(directory), SLAB_HEADER_BYTES + 2 * SLOT_BYTES + offset)
    if not has_index:
        drop_index(directory)
    life = Life(directory)
    answer, longer = life.say(chat + prompt(20, first=5))
    assert life.num_disk_tokens(answer) == 2 * 16, "the good leading part is kept, the rest is computed"
    life.settle()
    life.leave_device()
    again, _ = life.say(longer + prompt(5, first=6))
    assert life.num_disk_tokens(again) >= 6 * 16, "what was computed instead is stored"
    life.end()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_c5_a_damaged_slab_is_no_wrong_token(directory: Path, damage: Callable[[Path], None]) -> None:
    chat = first_life(directory)
    damage(slab_file(directory))
    life = Life(directory)
    life.say(chat + prompt(20, first=5))
    life.end()


def test_c5_bits_that_flip_under_a_running_engine(life: Life, directory: Path) -> None:
    _, chat = life.say(prompt(90))
    life.settle()
    life.leave_device()
    flip(slab_file(directory), SLAB_HEADER_BYTES + 3 * SLOT_BYTES + HEADER_BYTES + 100)
    answer, _ = life.say(chat + prompt(20, first=5))
    load = answer.outputs[-1].load
    assert load is not None
    assert load.num_loaded_tokens == life.num_disk_tokens(answer) == 3 * 16
    assert life.disk.stats().num_damaged == 1


@pytest.mark.parametrize("operation", ["write", "sync"])
@pytest.mark.parametrize("number", [ENOSPC, EIO])
def test_c6_answers_go_on_while_nothing_can_be_stored(
    life: Life, files: FaultyFiles, operation: str, number: int
) -> None:
    files.hook = failing(operation, number)
    _, chat = life.say(prompt(90))
    life.disk.flush(0.5)
    _, chat = life.say(chat + prompt(20, first=5))
    assert life.disk.stats().notice
    files.hook = None
    while life.disk.stats().num_blocks < len(chat) // 16 - 1:  # stored later, by the engine's own catching up
        life.step()
        life.disk.flush(1.0)
    life.leave_device()
    answer, _ = life.say(chat + prompt(20, first=6))
    assert life.num_disk_tokens(answer) >= 96


def test_c5_answers_go_on_while_nothing_can_be_read(life: Life, files: FaultyFiles) -> None:
    _, chat = life.say(prompt(90))
    life.settle()
    life.leave_device()
    files.hook = failing("read", EIO)
    answer, _ = life.say(chat + prompt(20, first=5))
    assert life.num_disk_tokens(answer) == 0


def begin_hanging_load(life: Life, files: FaultyFiles, chat: Ids) -> tuple[Hang, set[int]]:
    """Until its read hangs; the device blocks that wait for it."""
    hang = Hang("read")
    files.hook = hang
    life.add("slow", chat + prompt(20, first=5))
    life.step()
    assert life.engine.scheduler.queues.loading[0].status is RequestStatus.LOADING
    assert hang.has_begun.wait(30)
    return hang, set(life.engine.loads.reserved_block_ids())


def test_c5_a_read_that_hangs_holds_up_nobody_and_writes_nothing_when_it_returns(
    life: Life, files: FaultyFiles
) -> None:
    _, chat = life.say(prompt(90))
    life.settle()
    life.leave_device()
    hang, reserved = begin_hanging_load(life, files, chat)
    assert reserved
    life.say(prompt(30, first=8), owner="another")
    life.now_s += 3.0
    slow = life.finish("slow")
    assert slow.token_ids == life.expected(chat + prompt(20, first=5))
    assert slow.outputs[-1].cached_by_tier.get("disk", 0) == 0
    before = list(life.runner.slots)
    hang.release()
    assert life.disk.flush(30.0)
    life.step()
    assert life.runner.slots == before, "a late read has written into the pool"
    files.hook = None
    life.say(chat + prompt(20, first=5) + prompt(3, first=9))


def test_c5_a_cancel_during_a_load_writes_nothing_into_the_pool(life: Life, files: FaultyFiles) -> None:
    _, chat = life.say(prompt(90))
    life.settle()
    life.leave_device()
    hang, reserved = begin_hanging_load(life, files, chat)
    outputs = life.engine.cancel("slow")
    assert [output.finish_reason for output in outputs] == [FinishReason.CANCELLED]
    assert life.engine.kv.pool.num_free == life.engine.config.num_blocks
    hang.release()
    files.hook = None
    life.settle()
    assert all(held_ids(life.runner, block_id) == [None] * 16 for block_id in reserved)
    life.engine.check_integrity()
    answer, _ = life.say(chat + prompt(20, first=5))
    assert life.num_disk_tokens(answer) == 96


def test_forgetting_a_chat_that_is_being_loaded_ends_the_load(life: Life, files: FaultyFiles) -> None:
    _, chat = life.say(prompt(90), owner="planted")
    life.settle()
    life.leave_device()
    hang, _ = begin_hanging_load(life, files, chat)
    life.engine.cancel("slow")
    life.engine.forget("planted")
    hang.release()
    files.hook = None
    life.settle()
    answer, _ = life.say(chat, ONE)
    assert answer.num_cached_tokens == 0


class Storm:
    """Chats grow, fork, are forgotten, leave the device and live through restarts, on a disk that fails and rots."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.random = Random(seed)
        self.files = FaultyFiles()
        self.life = Life(directory, self.files, num_blocks=24)
        self.chats: dict[str, Ids] = {}
        self.num_disk_tokens = self.num_flips = 0

    def run(self, num_rounds: int) -> None:
        actions = [self.speak] * 10 + [self.leave_device] * 4 + [self.flip_a_bit] * 2
        actions += [self.restart, self.forget, self.fail_for_a_while]
        for _ in range(num_rounds):
            self.random.choice(actions)()
        self.life.end()

    def speak(self) -> None:
        random = self.random
        if not self.chats or random.random() < 0.2:
            self.chats[f"chat {random.randrange(1000)}"] = prompt(
                random.randrange(20, 60), first=random.randrange(1, 40)
            )
        name = random.choice(sorted(self.chats))
        history = self.chats[name]
        if len(history) > 300:
            history = history[: random.randrange(16, 200)]  # a fork
        tail = tuple(random.randrange(50) for _ in range(random.randrange(1, 20)))
        answer, self.chats[name] = self.life.say(history + tail, owner=name)
        self.num_disk_tokens += self.life.num_disk_tokens(answer)

    def leave_device(self) -> None:
        self.life.settle()
        self.life.leave_device()

    def flip_a_bit(self) -> None:
        slab = slab_file(self.directory)
        size = slab.stat().st_size
        if size > SLAB_HEADER_BYTES:
            flip(slab, self.random.randrange(SLAB_HEADER_BYTES, size), self.random.randrange(8))
            self.num_flips += 1

    def restart(self) -> None:
        self.life.end()
        if self.random.random() < 0.3:
            drop_index(self.directory)
        self.life = Life(self.directory, self.files, num_blocks=24)

    def forget(self) -> None:
        if self.chats:
            name = self.random.choice(sorted(self.chats))
            del self.chats[name]
            self.life.engine.forget(name)

    def fail_for_a_while(self) -> None:
        operation = self.random.choice(("read", "write", "sync"))
        self.files.hook = failing(operation, self.random.choice((EIO, ENOSPC)))
        for _ in range(2):
            self.speak()
        self.files.hook = None


@pytest.mark.parametrize("seed", range(2))
def test_c7_no_storm_makes_a_wrong_token(directory: Path, seed: int) -> None:
    storm = Storm(directory, seed)
    storm.run(120)
    assert storm.num_disk_tokens > 500, "hardly anything ever came from disk: nothing was proven"
    assert storm.num_flips > 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_c7_no_storm_makes_a_wrong_token_more_seeds(directory: Path, seed: int) -> None:
    Storm(directory, seed).run(400)


def test_a_control_that_believes_every_image_gives_a_wrong_token(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = first_life(directory)
    flip(slab_file(directory), SLAB_HEADER_BYTES + 2 * SLOT_BYTES + HEADER_BYTES)
    monkeypatch.setattr(reader, "check_payload", lambda header, payload: None)
    life = Life(directory)
    with pytest.raises(AssertionError):
        life.say(chat + prompt(20, first=5))
    life.end()
