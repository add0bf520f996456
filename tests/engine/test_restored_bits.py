"""Evicted, poisoned and loaded again: the numbers are the same bits as in the run that never evicted."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fake_tier import FakeTier
from tiny import BASE, KINDS, decoder_of_kind, random_ids
from torch import Tensor

from chatkv.engine.batch import SampleSpec
from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.config import EngineConfig
from chatkv.engine.engine import Engine
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.request import GenerationRequest, RequestOutput, SamplingParams, TokenLogprob
from chatkv.engine.store.directory import DiskStore
from chatkv.engine.tiers.tier import LowerTier

NUM_BLOCKS = 24
WAIT_S = 20.0
SAMPLING = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
FIRST_TURN = tuple(random_ids(100, 211, seed=1))
SECOND_TURN = FIRST_TURN + tuple(random_ids(37, 211, seed=2))


class LogitsKeeper:
    def __init__(self) -> None:
        self.rows: list[Tensor] = []

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], eos_ids: frozenset[int]
    ) -> list[tuple[int, TokenLogprob | None]]:
        self.rows += list(logits.clone())
        return [(int(token), None) for token in logits.argmax(-1)]


class Machine:
    def __init__(self, model: Decoder, tiers: list[LowerTier]) -> None:
        self.sampler = LogitsKeeper()
        self.runner = ModelRunner(model, NUM_BLOCKS, self.sampler)
        self.runner.pool.fill_(255)
        config = EngineConfig(max_context_tokens=384, num_blocks=NUM_BLOCKS, check_integrity=True)
        hasher = BlockHasher(b"k" * 32, fingerprint_of(model))
        self.engine = Engine(config, self.runner, hasher, None, frozenset(), tiers=tiers, images=self.runner.images)
        self.has_news = threading.Event()
        for tier in tiers:
            tier.on_change = self.has_news.set

    def ask(self, name: str, token_ids: tuple[int, ...]) -> RequestOutput:
        self.engine.add_request(GenerationRequest(name, token_ids, SAMPLING))
        outputs: list[RequestOutput] = []
        while self.engine.has_unfinished:
            outputs += self.engine.step()
            if self.engine.is_waiting and self.engine.has_unfinished:
                self.has_news.wait(WAIT_S)
                self.has_news.clear()
        assert outputs[-1].error is None
        return outputs[-1]

    def evict_all(self) -> None:
        for tier in self.engine.lower_tiers:
            assert tier.flush(WAIT_S)
        blank = self.engine.kv.pool.allocate(NUM_BLOCKS)
        self.engine.kv.pool.free(blank)
        self.runner.pool.fill_(255)


def fingerprint_of(model: Decoder) -> CacheFingerprint:
    return CacheFingerprint.from_facts(model.fingerprint_facts())


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> Decoder:
    return decoder_of_kind(request.param, BASE | {"architectures": ["LlamaForCausalLM"]})


@pytest.fixture(scope="module")
def never_evicted(model: Decoder) -> list[Tensor]:
    machine = Machine(model, [])
    machine.ask("first", FIRST_TURN)
    machine.sampler.rows.clear()
    assert dict(machine.ask("second", SECOND_TURN).cached_by_tier) == {"device": 96}
    return machine.sampler.rows


def second_turn(machine: Machine) -> list[Tensor]:
    machine.sampler.rows.clear()
    output = machine.ask("second", SECOND_TURN)
    assert dict(output.cached_by_tier) == {machine.engine.lower_tiers[0].name: 96}
    return machine.sampler.rows


def is_bit_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_evicted_and_restored_is_bit_equal(model: Decoder, never_evicted: list[Tensor]) -> None:
    machine = Machine(model, [FakeTier(image_bytes=model.layout.block_bytes)])
    machine.ask("first", FIRST_TURN)
    machine.evict_all()
    assert is_bit_equal(second_turn(machine), never_evicted)


def test_restored_from_files_by_a_new_engine_is_bit_equal(
    model: Decoder, never_evicted: list[Tensor], tmp_path: Path
) -> None:
    def open_tier() -> tuple[DiskStore, LowerTier]:
        store = DiskStore.open(tmp_path / "kv", b"k" * 32, 64 << 20)
        return store, store.tier_for(fingerprint_of(model).digest, model.layout.block_bytes, "tiny", "0" * 64)

    store, tier = open_tier()
    machine = Machine(model, [tier])
    machine.ask("first", FIRST_TURN)
    written = machine.runner.pool.clone()
    places = {node.block_hash: node.device_block_id for node in machine.engine.kv.tree.nodes()}
    machine.engine.close()
    store.close()
    store, tier = open_tier()
    machine = Machine(model, [tier])
    assert is_bit_equal(second_turn(machine), never_evicted)
    loaded = [node for node in machine.engine.kv.tree.nodes() if node.block_hash in places and node.position < 6]
    assert len(loaded) == 6
    for node in loaded:
        assert torch.equal(machine.runner.pool[node.device_block_id], written[places[node.block_hash]])
    machine.engine.close()
    store.close()


def test_c11_a_shift_by_one_fails_the_same_comparison(model: Decoder, never_evicted: list[Tensor]) -> None:
    disk = FakeTier(image_bytes=model.layout.block_bytes)
    machine = Machine(model, [disk])
    machine.ask("first", FIRST_TURN)
    machine.evict_all()
    disk.shift = 1
    assert not is_bit_equal(second_turn(machine), never_evicted)


def test_a_forgotten_chat_leaves_zeros(model: Decoder) -> None:
    machine = Machine(model, [FakeTier(image_bytes=model.layout.block_bytes)])
    machine.runner.pool.zero_()
    machine.engine.add_request(GenerationRequest("a", FIRST_TURN, SAMPLING, owner="chat"))
    while machine.engine.has_unfinished:
        machine.engine.step()
    assert machine.runner.pool.count_nonzero() > 0
    assert machine.engine.forget("chat").num_removed == 7
    assert machine.runner.pool.count_nonzero() == 0
