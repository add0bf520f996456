"""The engine, asked without a service around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event

from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.config import EngineConfig
from chatkv.engine.device_runner import DeviceRunner
from chatkv.engine.engine import Engine
from chatkv.engine.request import GenerationRequest, RequestOutput, SamplingParams
from chatkv.engine.tiers.tier import LowerTier

KEY = b"k" * 32
WAIT_S = 60.0


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    block_hashes: tuple[bytes, ...] = ()


class AskedEngine:
    """Greedy answers."""

    def __init__(self, runner: DeviceRunner, num_blocks: int, context_tokens: int, tiers: Sequence[LowerTier]) -> None:
        hasher = BlockHasher(KEY, CacheFingerprint.from_facts(runner.model.fingerprint_facts()))
        config = EngineConfig(context_tokens, num_blocks)
        images = runner.images if tiers else None
        self.engine = Engine(config, runner, hasher, None, frozenset(), tiers=tiers, images=images)
        self._news = Event()
        for tier in tiers:
            tier.on_change = self._news.set

    def ask(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Answer]:
        """Answers of `num_tokens`, all at the same time. Raises RuntimeError when one fails."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, num_logprobs=0)
        answers = {str(number): Answer() for number in range(len(prompts))}
        for name, prompt in zip(answers, prompts, strict=True):
            self.engine.add_request(GenerationRequest(name, tuple(prompt), sampling))
        while self.engine.has_unfinished:
            for output in self.engine.step():
                _take(answers[output.request_id], output)
            if self.engine.is_waiting and self.engine.has_unfinished:
                self._news.wait(self.engine.wait_s or WAIT_S)
                self._news.clear()
        return list(answers.values())

    def store_all(self, tier: LowerTier) -> None:
        """Until the tier has every full block, and has it safe."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            self.engine.step()
            if self.engine.is_waiting:
                break
        tier.flush(WAIT_S)
        self.engine.step()

    def close(self) -> None:
        with suppress(OSError):
            self.engine.close()


def _take(answer: Answer, output: RequestOutput) -> None:
    if output.error:
        raise RuntimeError(output.error)
    answer.token_ids += output.token_ids
    answer.logprobs += [logprob.logprob for logprob in output.logprobs]
    if output.num_prompt_tokens:
        answer.cached_by_tier = dict(output.cached_by_tier)
    if output.finish_reason:
        answer.block_hashes = output.block_hashes
