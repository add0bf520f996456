"""The whole engine on the GPU's kernels, in the interpreter: the ids are the reference backend's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from device_models import (
    INTERPRETER,
    VOCAB_SIZE,
    clear_prompt,
    greedy_answer,
    largest_difference,
    model_of,
    reference_of,
)
from tiny import logits_of, runner_of, sequence

from chatkv.engine.batch import Batch
from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.config import EngineConfig
from chatkv.engine.device_runner import DeviceRunner, PendingStep
from chatkv.engine.engine import Engine
from chatkv.engine.models.decoder import Decoder
from chatkv.engine.request import GenerationRequest, RequestOutput, SamplingParams
from chatkv.engine.tiers.host_tier import HostTier
from chatkv.engine.tiers.tier import LowerTier

NUM_BLOCKS = 8
MAX_BATCHED_TOKENS = 32
ROUNDING = 0.05
"""Of logits of about 6: what the kernels' 16-bit numbers may change."""
MARGIN = 4 * ROUNDING
KINDS = [
    pytest.param("int4-affine", "auto", False, id="int4-affine"),
    pytest.param("int8", "auto", False, id="int8", marks=pytest.mark.slow),
    pytest.param("fp16", "auto", False, id="fp16", marks=pytest.mark.slow),
    pytest.param("int4", "int8", False, id="int4 with int8 KV", marks=pytest.mark.slow),
    pytest.param("int4", "auto", True, id="deterministic", marks=pytest.mark.slow),
]


class RecordingRunner(DeviceRunner):
    def __init__(self, model: Decoder) -> None:
        super().__init__(model, NUM_BLOCKS, VOCAB_SIZE, NUM_BLOCKS * 16)
        self.pool.fill_(0xFF)
        self.batches: list[Batch] = []

    def launch(self, batch: Batch) -> PendingStep:
        self.batches.append(batch)
        return super().launch(batch)

    @property
    def batch_rows(self) -> list[list[int]]:
        """Per step: the rows of each sequence."""
        return [[len(sequence.token_ids) for sequence in batch.sequences] for batch in self.batches]


def new_engine(model: Decoder, runner: RecordingRunner, tiers: Sequence[LowerTier] = ()) -> Engine:
    config = EngineConfig(
        max_context_tokens=NUM_BLOCKS * 16,
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        target_step_s=1e9,
        check_integrity=True,
    )
    hasher = BlockHasher(b"k" * 32, CacheFingerprint.from_facts(model.fingerprint_facts()))
    return Engine(config, runner, hasher, None, frozenset(), tiers=tiers, images=runner.images)


def run_until(engine: Engine, outputs: list[RequestOutput], is_over: Callable[[], bool]) -> None:
    while not is_over():
        outputs += engine.step()
        assert all(output.error is None for output in outputs)


def answer(outputs: list[RequestOutput], request_id: str) -> list[int]:
    return [token for output in outputs if output.request_id == request_id for token in output.token_ids]


@pytest.mark.parametrize(("weight_format", "kv_dtype", "is_deterministic"), KINDS)
def test_chunks_mixed_batches_hits_preemption_and_padded_decodes(
    weight_format: str, kv_dtype: str, is_deterministic: bool
) -> None:
    reference = reference_of(weight_format, kv_dtype)
    model = model_of(weight_format, replace(INTERPRETER, is_deterministic=is_deterministic), kv_dtype)
    lengths = {"long": 44, "early": 31, "late": 31}
    num_tokens = {"long": 10, "early": 5, "late": 5}
    prompts: dict[str, list[int]] = {}
    for name, length in lengths.items():
        prefix = prompts["long"][:16] if name == "late" else []
        prompts[name] = clear_prompt(reference, prefix, length, num_tokens[name], MARGIN)

    runner = RecordingRunner(model)
    engine = new_engine(model, runner)
    outputs: list[RequestOutput] = []
    for name, prompt in prompts.items():
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens[name], ignore_eos=True)
        engine.add_request(GenerationRequest(name, tuple(prompt), sampling))
        if name == "long":
            run_until(engine, outputs, lambda: len(answer(outputs, "long")) > 0)
    run_until(engine, outputs, lambda: not engine.has_unfinished)

    for name, prompt in prompts.items():
        expected = greedy_answer(reference, prompt, num_tokens[name], MARGIN)
        assert expected is not None, "its margins are too narrow"
        assert answer(outputs, name) == expected, name
    rows = runner.batch_rows
    assert rows[:2] == [[32], [12]], "the long prompt is read in chunks"
    assert any(1 in counts and max(counts) > 1 for counts in rows), "decodes beside a chunk"
    assert [1, 1, 1] in rows, "three decodes, padded to four"
    assert engine.counters.num_preemptions > 0
    assert max(output.num_cached_tokens for output in outputs if output.request_id == "late") >= 16


def test_blocks_come_back_from_host_memory() -> None:
    reference, model = reference_of("int4"), model_of("int4", INTERPRETER)
    prompt = clear_prompt(reference, [], 39, 3, MARGIN)
    expected = greedy_answer(reference, prompt, 3, MARGIN)
    runner = RecordingRunner(model)
    host = HostTier(model.layout.block_bytes, 6 * model.layout.block_bytes)
    engine = new_engine(model, runner, [host])
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    for name, num_cached in (("first", 0), ("again", 32)):
        outputs: list[RequestOutput] = []
        engine.add_request(GenerationRequest(name, tuple(prompt), sampling))
        run_until(engine, outputs, lambda: not engine.has_unfinished)
        assert answer(outputs, name) == expected
        assert outputs[-1].num_cached_tokens == num_cached
        run_until(engine, outputs, lambda: host.stats().num_blocks == 2)
        engine.kv.pool.free(engine.kv.pool.allocate(NUM_BLOCKS))  # evicts all
        runner.pool.fill_(0xFF)
    assert host.stats().num_loaded == 2


def test_rounding_is_far_below_the_margins_of_the_answers() -> None:
    reference, model = reference_of("int4-affine"), model_of("int4-affine", INTERPRETER)
    ids = clear_prompt(reference, [], 40, 1, MARGIN)
    expected, found = (logits_of(runner_of(each, 4), sequence(ids, 0, [2, 0, 1]))[0] for each in (reference, model))
    assert expected.abs().max() > 100 * ROUNDING
    assert largest_difference(expected, found) < ROUNDING
