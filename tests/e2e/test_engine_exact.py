"""Scheduler and real model together: an answer's ids are those it has alone, whatever happens beside it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.config import EngineConfig
from chatkv.engine.engine import Engine
from chatkv.engine.model_runner import ModelRunner
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.models.native import load_model
from chatkv.engine.request import GenerationRequest, SamplingParams
from chatkv.engine.sampler import Sampler
from tests.running_service import MODEL

Answers = dict[tuple[str, int], list[int]]
SAMPLING = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def decoder(models_dir: Path) -> Decoder:
    return load_model(models_dir / MODEL)


def new_engine(decoder: Decoder, num_blocks: int, *, max_num_batched_tokens: int = 512) -> Engine:
    config = EngineConfig(
        max_context_tokens=num_blocks * 16,
        num_blocks=num_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        check_integrity=True,
    )
    hasher = BlockHasher(b"k" * 32, CacheFingerprint.from_facts(decoder.fingerprint_facts()))
    runner = ModelRunner(decoder, num_blocks, Sampler(decoder.config.vocab_size), frozenset({2}))
    return Engine(config, runner, hasher, None, frozenset({2}))


def run(engine: Engine, requests: Iterable[GenerationRequest]) -> Answers:
    answers: Answers = {}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished:
        for output in engine.step():
            assert output.error is None
            answers.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    return answers


@pytest.fixture(scope="module")
def requests() -> list[GenerationRequest]:
    """Five that begin alike; one asks for two answers."""
    source = random.Random(5)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(source.randrange(100, 40_000) for _ in range(count))

    system = ids(96)
    return [
        GenerationRequest(f"r{number}", system + ids(40 + 7 * number), SAMPLING, n=2 if number == 1 else 1)
        for number in range(5)
    ]


@pytest.fixture(scope="module")
def alone(decoder: Decoder, requests: list[GenerationRequest]) -> Answers:
    answers: Answers = {}
    for request in requests:
        answers |= run(new_engine(decoder, 64), [request])
    assert all(len(ids) == 24 for ids in answers.values())
    assert answers["r1", 0] != answers["r1", 1]
    return answers


def test_in_company(decoder: Decoder, requests: list[GenerationRequest], alone: Answers) -> None:
    assert run(new_engine(decoder, 64), requests) == alone


def test_in_a_pool_that_is_too_small_for_all(
    decoder: Decoder, requests: list[GenerationRequest], alone: Answers
) -> None:
    engine = new_engine(decoder, 18)
    assert run(engine, requests) == alone
    assert engine.stats().num_preemptions > 0


def test_through_a_prefix_hit(decoder: Decoder, requests: list[GenerationRequest], alone: Answers) -> None:
    engine = new_engine(decoder, 64)
    run(engine, requests[:1])
    assert run(engine, requests[:1])["r0", 0] == alone["r0", 0]
    assert engine.stats().num_prefix_hit_tokens >= len(requests[0].prompt_token_ids) - 16


def test_read_in_small_chunks(decoder: Decoder, requests: list[GenerationRequest], alone: Answers) -> None:
    engine = new_engine(decoder, 64, max_num_batched_tokens=16)
    assert run(engine, requests[4:])["r4", 0] == alone["r4", 0]
