"""The same random work on a device that works behind the engine's back, and that fails at times."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from fake_device import FakeDevice
from fuzz import MAX_CONTEXT_TOKENS, Answer, Fuzz
from integer_runner import naive_answer
from tier_fuzz import TierFuzz

from chatkv.engine.batch import Batch, ScheduledSequence
from chatkv.engine.request import FinishReason, GenerationRequest

WAIT_S = 20.0


class OnDevice(Fuzz):
    """`runner` is the device."""

    failure_rate = 0.002
    reset_rate = 0.001

    def _new_runner(self, seed: int, num_blocks: int, image_bytes: int) -> tuple[FakeDevice, FakeDevice, FakeDevice]:
        chance = Random(seed)
        self.device = device = FakeDevice(num_blocks, seed, image_bytes, max_pieces=chance.choice((1, 4, 12)))

        def fails_whole(batch: Batch) -> bool:
            return chance.random() < self.failure_rate

        def fails_alone(sequence: ScheduledSequence) -> bool:
            return chance.random() < self.failure_rate

        device.fails_launch = device.fails_step = fails_whole  # type: ignore[method-assign]
        device.fails_sequence = fails_alone  # type: ignore[method-assign]
        return device, device, device

    def run(self, num_steps: int) -> None:
        super().run(num_steps)
        self.engine.close()
        assert not self.device.unknown, "the engine is closed and the device works on"
        assert not self.device.faults, self.device.faults

    def _step(self) -> None:
        self.device.get_on()
        super()._step()
        assert not self.device.faults, self.device.faults
        self.seen["overlapped"] += self.engine._steps.is_flying
        self.seen["deferred"] += sum(1 for _ in self.engine.kv.pool.deferred_block_ids())
        self.seen["copied"] += self.engine.stores.is_reading

    def _act(self) -> None:
        super()._act()
        if self.random.random() < self.reset_rate:
            self._reset()

    def _reset(self) -> None:
        """Everything is lost, and nobody is told: that is the engine thread's business. What was queued in a tier would
        be stored a second time, which the fake tier takes for a mistake."""
        for tier in self.engine.lower_tiers:
            tier.flush(WAIT_S)
        self.engine.tiers.poll()
        self.engine.reset()
        for block_id in range(self.engine.config.num_blocks):
            self.device.poison(block_id)
        self.requests.clear()
        self.answers.clear()
        self.seen["resets"] += 1

    def _new_request(self) -> GenerationRequest:
        request = super()._new_request()
        if self.random.random() < 0.1:
            request = replace(request, sampling=replace(request.sampling, repetition_penalty=1.1))
        return request

    def _compare(self, request: GenerationRequest, choice: int, answer: Answer) -> None:
        if answer.reason is not FinishReason.ERROR:
            super()._compare(request, choice, answer)
            return
        assert request.request_id in self.device.failed_requests, "a request fails that did not"
        self.seen["failed"] += 1
        expected, _ = naive_answer(request.prompt_token_ids, request.sampling, choice, MAX_CONTEXT_TOKENS)
        assert answer.token_ids == expected[: len(answer.token_ids)]


class DeviceFuzz(OnDevice):
    """Without lower tiers."""


class DeviceTierFuzz(OnDevice, TierFuzz):
    """With both."""
