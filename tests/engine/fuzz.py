"""Random work for the engine, and the naive model that says what must come out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from integer_runner import EOS_ID, VOCAB_SIZE, IntegerImages, IntegerRunner, naive_answer, new_hasher

from chatkv.engine.batch import OverlappedRunner, Runner
from chatkv.engine.block_hash import BlockHasher
from chatkv.engine.config import EngineConfig
from chatkv.engine.engine import Engine
from chatkv.engine.errors import QueueFullError
from chatkv.engine.request import FinishReason, GenerationRequest, Priority, RequestOutput, SamplingParams
from chatkv.engine.tiers.tier import BlockImages, LowerTier

MAX_CONTEXT_TOKENS = 160


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None


class Fuzz:
    """Steps an engine whose pool is far too small for what it is asked, and checks everything after each step."""

    num_remembered = 12
    """Prompts that others begin with."""

    def __init__(
        self,
        seed: int,
        num_blocks: int = 14,
        hasher: BlockHasher | None = None,
        tiers: Sequence[LowerTier] = (),
        image_bytes: int = 256,
    ) -> None:
        self.random = Random(seed)
        self.runner, runner, images = self._new_runner(seed, num_blocks, image_bytes)
        config = EngineConfig(
            max_context_tokens=MAX_CONTEXT_TOKENS,
            num_blocks=num_blocks,
            max_num_seqs=6,
            max_num_waiting=10,
            max_num_batched_tokens=64,
            check_integrity=True,
        )
        # Seconds jump about, so the budget does as well.
        self.now_s = 0.0
        self.engine = Engine(
            config,
            runner,
            hasher or new_hasher(),
            None,
            frozenset({EOS_ID}),
            poison=self.runner.poison,
            clock=self._clock,
            tiers=tiers,
            images=images,
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.answers: dict[str, dict[int, Answer]] = {}
        self.old_prompts: list[tuple[int, ...]] = []
        self.seen: Counter[str] = Counter()
        self.num_steps = 0

    def _new_runner(
        self, seed: int, num_blocks: int, image_bytes: int
    ) -> tuple[IntegerRunner, Runner | OverlappedRunner, BlockImages]:
        """What holds the blocks, and the two sides of it that the engine sees."""
        runner = IntegerRunner(num_blocks)
        return runner, runner, IntegerImages(runner, image_bytes)

    def _clock(self) -> float:
        self.now_s += self.random.choice((0.01, 0.1, 0.3))
        return self.now_s

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._act()
            self._step()
        while self.engine.has_unfinished or self.engine.stores.is_reading:
            self._step()
        stats = self.engine.stats()
        assert stats.num_used == stats.num_running == stats.num_waiting == 0
        assert not self.answers, "a choice never got its last output"
        outputs = self.engine._outputs
        assert not outputs._streams, "a text stream outlives its answer"
        assert not outputs._reported, "a progress report outlives its request"
        self.seen["preempted"] = stats.num_preemptions
        self.seen["hit"] = stats.num_prefix_hit_tokens

    def _step(self) -> None:
        self._take(self.engine.step())
        self.num_steps += 1

    def _act(self) -> None:
        random = self.random
        busy = len(self.requests) > 8
        if random.random() < (0.05 if busy else 0.5):
            self._submit()
        if self.requests and random.random() < 0.015:
            self._cancel(random.choice(sorted(self.requests)))
        if random.random() < 0.002:
            for request_id in sorted(self.requests):
                self._cancel(request_id)

    def _submit(self) -> None:
        request = self._new_request()
        self.seen["submitted"] += 1
        try:
            self.engine.add_request(request)
        except QueueFullError:
            self.seen["refused"] += 1
            return
        self.requests[request.request_id] = request
        self.answers[request.request_id] = {choice: Answer() for choice in range(request.n)}

    def _new_request(self) -> GenerationRequest:
        random = self.random
        return GenerationRequest(
            request_id=f"r{self.seen['submitted']}",
            prompt_token_ids=self._prompt(),
            sampling=SamplingParams(
                seed=random.randrange(3),
                max_tokens=random.choice((1, 2, 17, 40, None)),
                min_tokens=random.choice((0, 0, 5)),
                stop_token_ids=frozenset(random.choice(((), (7,)))),
                ignore_eos=random.random() < 0.3,
            ),
            n=random.choice((1, 1, 1, 2, 4)),
            priority=random.choice(list(Priority)),
            cache_salt=random.choice((b"", b"", b"", b"salt")),
        )

    def _prompt(self) -> tuple[int, ...]:
        """New, or an old conversation that goes on or branches off, often at a block's edge."""
        random = self.random
        length = random.choice((1, 3, 15, 16, 17, 31, 32, 33, 48, 70, 100, MAX_CONTEXT_TOKENS - 1))
        head: tuple[int, ...] = ()
        if self.old_prompts and random.random() < 0.8:
            head = random.choice(self.old_prompts[-self.num_remembered :])
            head = head[: random.choice((len(head), len(head), 16, 32, random.randrange(len(head) + 1)))]
        fresh = random.choice((0, 1, length)) if head else length
        prompt = (head + tuple(random.randrange(VOCAB_SIZE) for _ in range(fresh)))[: MAX_CONTEXT_TOKENS - 1]
        self._remember(prompt or (1,))
        return prompt or (1,)

    def _cancel(self, request_id: str) -> None:
        self.seen["cancels"] += 1
        unfinished = len(self.answers[request_id])
        outputs = self.engine.cancel(request_id)
        assert len(outputs) == unfinished, "one last output for each unfinished choice"
        assert self.engine.cancel(request_id) == []
        self.engine.check_integrity()
        self._take(outputs)

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            answers = self.answers[output.request_id]
            answer = answers[output.index]
            answer.token_ids += output.token_ids
            if output.finish_reason is None:
                continue
            answer.reason = output.finish_reason
            self._compare(self.requests[output.request_id], output.index, answer)
            del answers[output.index]
            if not answers:
                request = self.requests.pop(output.request_id)
                del self.answers[output.request_id]
                self._remember((request.prompt_token_ids + tuple(answer.token_ids))[: MAX_CONTEXT_TOKENS - 1])

    def _remember(self, token_ids: tuple[int, ...]) -> None:
        """Another prompt may begin with them."""
        self.old_prompts.append(token_ids)

    def _compare(self, request: GenerationRequest, choice: int, answer: Answer) -> None:
        expected, reason = naive_answer(request.prompt_token_ids, request.sampling, choice, MAX_CONTEXT_TOKENS)
        assert answer.reason is not None
        self.seen[answer.reason.value] += 1
        if answer.reason is FinishReason.CANCELLED:
            assert answer.token_ids == expected[: len(answer.token_ids)]
        else:
            assert (answer.token_ids, answer.reason.value) == (expected, reason)
