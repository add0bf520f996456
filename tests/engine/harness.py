"""An engine on the integer runner, driven step by step by a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from integer_runner import EOS_ID, IntegerImages, IntegerRunner, naive_answer, new_hasher

from chatkv.engine.batch import Batch, BatchResult
from chatkv.engine.block_hash import BlockHasher
from chatkv.engine.config import EngineConfig
from chatkv.engine.engine import Engine
from chatkv.engine.output_processor import TextStreamFactory
from chatkv.engine.request import (
    FinishReason,
    GenerationRequest,
    Priority,
    RequestOutput,
    SamplingParams,
    WarmMode,
)
from chatkv.engine.tiers.tier import BlockImages, LowerTier

GREEDY_10 = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def prompt(num_tokens: int, first: int = 1) -> tuple[int, ...]:
    """Different ids everywhere; another `first` shares no block."""
    return tuple(range(first * 1000, first * 1000 + num_tokens))


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def num_cached_tokens(self) -> int:
        return self.outputs[-1].num_cached_tokens


class Harness:
    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_context_tokens: int = 512,
        max_num_seqs: int = 8,
        max_num_waiting: int = 8,
        max_num_batched_tokens: int = 64,
        target_step_s: float = 0.25,
        tokens_per_s: float = 1000.0,
        hasher: BlockHasher | None = None,
        new_text_stream: TextStreamFactory | None = None,
        tiers: Sequence[LowerTier] = (),
        max_copy_bytes: int = 32 << 20,
        image_bytes: int = 0,
    ) -> None:
        self.runner, images = self._new_runner(num_blocks, image_bytes)
        self.now_s = 0.0
        self.tokens_per_s = tokens_per_s
        self.max_context_tokens = min(max_context_tokens, num_blocks * 16)
        self.engine = Engine(
            EngineConfig(
                max_context_tokens=max_context_tokens,
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                max_num_waiting=max_num_waiting,
                max_num_batched_tokens=max_num_batched_tokens,
                target_step_s=target_step_s,
                max_copy_bytes=max_copy_bytes,
                check_integrity=True,
            ),
            self,
            hasher or new_hasher(),
            new_text_stream,
            frozenset({EOS_ID}),
            poison=self.runner.poison,
            clock=lambda: self.now_s,
            tiers=tiers,
            images=images,
        )
        self.answers: dict[tuple[str, int], Answer] = {}

    def _new_runner(self, num_blocks: int, image_bytes: int) -> tuple[IntegerRunner, BlockImages]:
        runner = IntegerRunner(num_blocks, is_recording=True)
        return runner, IntegerImages(runner, image_bytes)

    def execute(self, batch: Batch) -> BatchResult:
        """The runner, on a machine that needs 20 ms for a step and a fixed time per token."""
        self.now_s += 0.02 + batch.num_tokens / self.tokens_per_s
        return self.runner.execute(batch)

    @property
    def last_batch(self) -> Batch:
        return self.runner.batches[-1]

    def add(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        sampling: SamplingParams = GREEDY_10,
        *,
        n: int = 1,
        priority: Priority = Priority.INTERACTIVE,
        cache_salt: bytes = b"",
        owner: str = "",
        is_transient: bool = False,
        warm: WarmMode | None = None,
    ) -> None:
        request = GenerationRequest(
            request_id,
            token_ids,
            sampling,
            n=n,
            priority=priority,
            cache_salt=cache_salt,
            owner=owner,
            is_transient=is_transient,
            warm=warm,
        )
        self.engine.add_request(request)

    def step(self) -> list[RequestOutput]:
        return self.take(self.engine.step())

    def take(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        for output in outputs:
            answer = self.answers.setdefault((output.request_id, output.index), Answer())
            assert answer.reason is None, "an output after the last one"
            answer.token_ids += output.token_ids
            answer.text += output.text
            answer.reason = output.finish_reason
            answer.outputs.append(output)
        return outputs

    def run(self) -> None:
        while self.engine.has_unfinished:
            self.step()
            if self.engine.is_waiting and self.engine.wait_s is not None:
                self.now_s += self.engine.wait_s + 0.01  # a load has stalled for good

    def ask(
        self,
        request_id: str,
        token_ids: tuple[int, ...],
        sampling: SamplingParams = GREEDY_10,
        *,
        cache_salt: bytes = b"",
        owner: str = "",
        is_transient: bool = False,
    ) -> Answer:
        """One request alone, to its end; the answer is what the naive model says."""
        self.add(request_id, token_ids, sampling, cache_salt=cache_salt, owner=owner, is_transient=is_transient)
        self.run()
        answer = self.answers[request_id, 0]
        assert answer.token_ids == self.expected(token_ids, sampling)
        return answer

    def warm(
        self, request_id: str, token_ids: tuple[int, ...], mode: WarmMode, owner: str = "", is_transient: bool = False
    ) -> Answer:
        self.add(request_id, token_ids, owner=owner, is_transient=is_transient, warm=mode)
        self.run()
        answer = self.answers[request_id, 0]
        assert answer.token_ids == []
        assert answer.reason is FinishReason.STOP
        return answer

    def expected(self, token_ids: tuple[int, ...], sampling: SamplingParams = GREEDY_10, choice: int = 0) -> list[int]:
        return naive_answer(token_ids, sampling, choice, self.max_context_tokens)[0]

    def scheduled(self) -> dict[str, int]:
        """Tokens of the last batch per request."""
        counts: dict[str, int] = {}
        for sequence in self.last_batch.sequences:
            counts[sequence.request_id] = counts.get(sequence.request_id, 0) + len(sequence.token_ids)
        return counts
