"""A chat's answer is the same alone and in company, computed now, found in the pool or restored from a lower tier:
every logit of every schedule equals, bit for bit, that of the request alone on a fresh machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from fake_tier import FakeTier
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import BASE, random_ids, tiled_decoder_of
from torch import Tensor

from chatkv.engine.batch import SampleSpec
from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.config import EngineConfig
from chatkv.engine.engine import Engine
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.request import GenerationRequest, SamplingParams, TokenLogprob
from chatkv.kernels import KernelChoice

WAIT_S = 20.0
MAX_CONTEXT = 420
LONGEST = 380
HEAD = random_ids(70, 211, seed=5)
"""What all conversations begin with."""
CONVERSATIONS = [tuple(HEAD + random_ids(LONGEST - len(HEAD), 211, seed=seed)) for seed in range(3)]
CONFIG = BASE | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}

asks = st.tuples(
    st.integers(0, len(CONVERSATIONS) - 1),
    st.integers(1, LONGEST),
    st.integers(1, 12),
    st.integers(0, 12),
)
"""Which conversation, how much of it, tokens to write, the step at which it comes."""


class LogitsKeeper:
    """By prompt and position."""

    def __init__(self) -> None:
        self.rows: dict[tuple[Sequence[int], int], Tensor] = {}

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec], eos_ids: frozenset[int]
    ) -> list[tuple[int, TokenLogprob | None]]:
        for row, spec in zip(logits, specs, strict=True):
            self.rows[tuple(spec.prompt_token_ids), spec.position] = row.clone()
        return [(int(token), None) for token in logits.argmax(-1)]


@cache
def model_on(kv_dtype: str, num_threads: int) -> Decoder:
    choice = KernelChoice(num_threads=num_threads)
    model = tiled_decoder_of(CONFIG, "int4-affine", choice, kv_dtype=kv_dtype)
    assert model.kernels.startswith("native")
    return model


class Machine:
    def __init__(self, model: Decoder, num_blocks: int, budget: int, tier: FakeTier | None = None) -> None:
        self.sampler = LogitsKeeper()
        self.num_blocks = num_blocks
        self.runner = ModelRunner(model, num_blocks, self.sampler)
        self.runner.pool.fill_(255)
        config = EngineConfig(MAX_CONTEXT, num_blocks, max_num_batched_tokens=budget, check_integrity=True)
        hasher = BlockHasher(b"k" * 32, CacheFingerprint.from_facts(model.fingerprint_facts()))
        tiers = [tier] if tier else []
        self.engine = Engine(config, self.runner, hasher, None, frozenset(), tiers=tiers, images=self.runner.images)
        self.has_news = threading.Event()
        for each in tiers:
            each.on_change = self.has_news.set

    def run(self, requests: Sequence[tuple[int, GenerationRequest]]) -> None:
        """(step, request) each."""
        waiting = sorted(requests, key=lambda item: item[0])
        step = 0
        while waiting or self.engine.has_unfinished:
            while waiting and (waiting[0][0] <= step or not self.engine.has_unfinished):
                self.engine.add_request(waiting.pop(0)[1])
            for output in self.engine.step():
                assert output.error is None
            step += 1
            if self.engine.is_waiting and self.engine.has_unfinished:
                assert self.has_news.wait(WAIT_S)
                self.has_news.clear()

    def evict_all(self) -> None:
        blank = self.engine.kv.pool.allocate(self.num_blocks)
        self.engine.kv.pool.free(blank)
        self.runner.pool.fill_(255)


def request_of(name: str, prompt: tuple[int, ...], num_tokens: int) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))


@cache
def rows_alone(kv_dtype: str, prompt: tuple[int, ...]) -> dict[tuple[Sequence[int], int], Tensor]:
    machine = Machine(model_on(kv_dtype, 1), 40, 512)
    machine.run([(0, request_of("alone", prompt, 12))])
    return machine.sampler.rows


@pytest.mark.parametrize("kv_dtype", ["fp16", "int8"])
@settings(max_examples=100)
@given(
    first=st.lists(asks, min_size=1, max_size=5),
    second=st.lists(asks, max_size=3),
    num_blocks=st.integers(28, 90),
    budget=st.sampled_from([16, 33, 100, 512]),
    num_threads=st.integers(1, 3),
    has_tier=st.booleans(),
)
def test_every_schedule_gives_the_same_bits(
    kv_dtype: str,
    first: list[tuple[int, int, int, int]],
    second: list[tuple[int, int, int, int]],
    num_blocks: int,
    budget: int,
    num_threads: int,
    has_tier: bool,
) -> None:
    model = model_on(kv_dtype, num_threads)
    tier = FakeTier(image_bytes=model.layout.block_bytes) if has_tier else None
    machine = Machine(model, num_blocks, budget, tier)
    for turn, chosen in enumerate((first, second)):
        requests = [
            (step, request_of(f"{turn}.{number}", CONVERSATIONS[which][:length], num_tokens))
            for number, (which, length, num_tokens, step) in enumerate(chosen)
        ]
        machine.run(requests)
        machine.evict_all()
    for (prompt, position), row in machine.sampler.rows.items():
        alone = rows_alone(kv_dtype, tuple(prompt))[prompt, position]
        assert torch.equal(row, alone), f"{len(prompt)} tokens, position {position}"


def test_a_tier_that_gives_the_next_block_is_noticed() -> None:
    model = model_on("fp16", 1)
    tier = FakeTier(image_bytes=model.layout.block_bytes)
    machine = Machine(model, 40, 512, tier)
    machine.run([(0, request_of("first", CONVERSATIONS[0][:200], 1))])
    machine.evict_all()
    tier.shift = 1
    machine.run([(0, request_of("second", CONVERSATIONS[0][:220], 12))])
    rows = machine.sampler.rows
    alone = rows_alone("fp16", CONVERSATIONS[0][:220])
    assert not all(torch.equal(rows[place], row) for place, row in alone.items())
