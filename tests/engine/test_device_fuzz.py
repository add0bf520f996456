"""C8: random work on a device that works behind the engine's back, with delays and in any order between its streams. No
block is read before it is written, free or written over before it is stored, or used again in flight; every answer is
what the request is answered alone. Seeded bugs of order must be caught, else the check is worth nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
from device_fuzz import DeviceFuzz, DeviceTierFuzz, OnDevice

from chatkv.engine import loads, stores
from chatkv.engine.active_requests import ActiveRequests
from chatkv.engine.block_pool import BlockPool
from chatkv.engine.block_tree import BlockNode
from chatkv.engine.engine import Engine
from chatkv.engine.flight import Flight
from chatkv.engine.loads import Load, LoadSet
from chatkv.engine.request import RequestOutput, RequestStatus
from chatkv.engine.step_runner import FinishedStep, StepRunner
from chatkv.engine.stores import StoreSet


@pytest.mark.parametrize("seed", range(5))
def test_c8_fuzz_on_a_device_equals_the_naive_model(seed: int) -> None:
    fuzz = DeviceFuzz(seed)
    fuzz.run(1400)
    assert fuzz.device.max_in_flight == 2
    for event in ("overlapped", "deferred", "preempted", "hit", "cancelled", "stop", "length", "failed"):
        assert fuzz.seen[event] > 5, f"the fuzz hardly ever meets {event!r}: {fuzz.seen}"


@pytest.mark.parametrize("seed", range(3))
def test_c8_fuzz_on_a_device_over_three_tiers_equals_the_naive_model(seed: int) -> None:
    fuzz = DeviceTierFuzz(seed)
    fuzz.run(1000)
    assert fuzz.device.max_in_flight == 2
    events = ("overlapped", "deferred", "copied", "preempted", "hit device", "hit host", "hit disk", "failed")
    for event in (*events, "cancelled", "cancelled loads", "loading", "gave up", "forgotten", "offloaded"):
        assert fuzz.seen[event] > 2, f"the fuzz hardly ever meets {event!r}: {fuzz.seen}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_c8_fuzz_on_a_device_more_seeds(seed: int) -> None:
    DeviceFuzz(seed, num_blocks=10 + seed % 30).run(2000)
    DeviceTierFuzz(seed, num_blocks=10 + seed % 30).run(1000)


def _free_at_once(self: BlockPool, block_ids, is_used: bool = True) -> None:  # type: ignore[no-untyped-def]
    deferred, self._deferred = self._deferred, deque()
    ORIGINAL_FREE(self, block_ids, is_used)
    self._deferred = deferred


def _free_before_the_step_is_over(self: StepRunner) -> FinishedStep:
    self._kv.pool.end_step()
    self._kv.pool.begin_step()
    return ORIGINAL_LAND(self)


def _publish_when_launched(self: StepRunner, runner, scheduled) -> None:  # type: ignore[no-untyped-def]
    ORIGINAL_LAUNCH(self, runner, scheduled)
    for item in scheduled:
        sequence = item.sequence
        num_computed, num_known = sequence.num_computed_tokens, min(sequence.num_launched_tokens, sequence.num_tokens)
        sequence.num_computed_tokens = num_known
        self._kv.publish(sequence)
        sequence.num_computed_tokens = num_computed


def _take_the_row_of_who_has_stopped(self: ActiveRequests, step: FinishedStep) -> list[RequestOutput]:
    for item in step.scheduled:
        item.sequence.status = RequestStatus.RUNNING
    return ORIGINAL_TAKE(self, step)


def _schedule_before_the_ids_are_known(self: Flight) -> bool:
    return False


def _give_a_pending_id_of_another_sample(self: Flight) -> None:
    ORIGINAL_TAKE_OFF(self)
    for item in self.scheduled:
        item.sequence.last_sample_index = 0


def _forget_while_the_device_works(self: Engine) -> None:
    if self.scheduler.must_settle:
        ORIGINAL_SETTLE(self)


def _reset_while_the_device_works(self: StepRunner) -> None:
    self._flights.clear()


def _store_without_holding(nodes: Sequence[BlockNode]) -> list[BlockNode]:
    return []


def _store_what_has_not_come(self: StoreSet) -> None:
    for reads in self._reads:
        self._tiers.offer_images(reads.nodes, reads.copy.images)
    self.wait()
    ORIGINAL_TAKE_DONE(self)


def _place_what_has_not_come(self: LoadSet, load: Load) -> None:
    for writes in load.writes:
        for block_id in writes.block_ids:
            self._kv.place_loaded(load.sequence, block_id)
        for image in writes.images:
            writes.part.job.release(image)
    load.writes.clear()


def _give_an_image_back_too_early(self: LoadSet, load: Load, images, num_blocks: int) -> None:  # type: ignore[no-untyped-def]
    ready = list(load.ready)[:num_blocks]
    ORIGINAL_START_WRITES(self, load, images, num_blocks)
    for image in ready:
        image[:] = bytes(len(image))


def _cancel_while_the_device_writes(load: Load) -> None:
    load.block_ids.extendleft(block_id for writes in load.writes for block_id in writes.block_ids)
    load.writes.clear()


ORIGINAL_SETTLE = Engine._settle
ORIGINAL_FREE = BlockPool.free
ORIGINAL_LAND = StepRunner._land
ORIGINAL_LAUNCH = StepRunner._launch
ORIGINAL_TAKE = ActiveRequests.take
ORIGINAL_TAKE_OFF = Flight.take_off
ORIGINAL_TAKE_DONE = StoreSet._take_done
ORIGINAL_START_WRITES = LoadSet._start_writes

SEEDED_BUGS: list[tuple[type[OnDevice], object, str, object]] = [
    (DeviceFuzz, BlockPool, "free", _free_at_once),
    (DeviceFuzz, StepRunner, "_land", _free_before_the_step_is_over),
    (DeviceTierFuzz, StepRunner, "_launch", _publish_when_launched),
    (DeviceFuzz, ActiveRequests, "take", _take_the_row_of_who_has_stopped),
    (DeviceFuzz, Flight, "must_land_first", property(_schedule_before_the_ids_are_known)),
    (DeviceFuzz, Flight, "take_off", _give_a_pending_id_of_another_sample),
    (DeviceTierFuzz, Engine, "_settle", _forget_while_the_device_works),
    (DeviceFuzz, StepRunner, "abandon", _reset_while_the_device_works),
    (DeviceTierFuzz, stores, "_with_ancestors", _store_without_holding),
    (DeviceTierFuzz, StoreSet, "_take_done", _store_what_has_not_come),
    (DeviceTierFuzz, LoadSet, "_finish_writes", _place_what_has_not_come),
    (DeviceTierFuzz, LoadSet, "_start_writes", _give_an_image_back_too_early),
    (DeviceTierFuzz, loads, "_wait", _cancel_while_the_device_writes),
]


def _run_seeds(fuzz: type[OnDevice]) -> None:
    for seed in range(4):
        fuzz(seed).run(600)


def _name(value: object) -> str:
    return getattr(getattr(value, "fget", value), "__name__", str(value)).lstrip("_")


@pytest.mark.parametrize(("fuzz", "owner", "name", "bug"), SEEDED_BUGS, ids=_name)
def test_c8_fuzz_catches_a_seeded_bug_of_order(
    monkeypatch: pytest.MonkeyPatch, fuzz: type[OnDevice], owner: object, name: str, bug: object
) -> None:
    monkeypatch.setattr(owner, name, bug)
    monkeypatch.setattr(fuzz, "reset_rate", 0.01)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        _run_seeds(fuzz)
