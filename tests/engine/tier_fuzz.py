"""The same random work with tiers below the device that wait, refuse, fail, lose and evict, and with chats that are
opened, drafted, pinned, moved away and deleted in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fake_tier import FakeTier
from fuzz import Answer, Fuzz
from integer_runner import IntegerImages, held_ids

from chatkv.engine.block_hash import BlockHasher
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.request import FinishReason, GenerationRequest, RequestOutput, WarmMode

PLANTED_ID = 0xDEC0FFE1
"""In the prompts of some transient requests, and nowhere else; no text in a file has its bytes."""
OWNERS = ("", "anna", "bert", "carl")


class TierFuzz(Fuzz):
    num_remembered = 30

    def __init__(
        self,
        seed: int,
        num_blocks: int = 14,
        hasher: BlockHasher | None = None,
        tiers: Sequence[FakeTier] | None = None,
        image_bytes: int = 256,
    ) -> None:
        if tiers is None:
            host = FakeTier("host", capacity=16)
            disk = FakeTier("disk", capacity=100, queue_limit=5, is_prompt=False)
            tiers = [host, disk]
        super().__init__(seed, num_blocks, hasher, tiers, image_bytes)
        self.tiers = tiers
        self.is_planting = False

    def run(self, num_steps: int) -> None:
        super().run(num_steps)
        stats = self.engine.stats()
        self.seen.update({f"hit {name}": num for name, num in stats.num_hit_tokens_by_tier.items()})
        assert stats.num_loading == 0
        for name, tier in stats.tiers.items():
            self.seen[f"skipped {name}"] = tier.num_skipped

    def _step(self) -> None:
        self._tick()
        super()._step()
        self.seen["loading"] += self.engine.stats().num_loading
        for sequence in self.engine.scheduler.queues:
            owners = {sequence.request.owner} - {""}
            assert all(owners <= node.owners for node in sequence.nodes), "who holds a block does not own it"
        self._check_tiers()

    def _tick(self) -> None:
        """Something happens in the tiers."""
        for tier in self.tiers:
            if not tier.is_prompt:
                tier.tick(self.random)

    def _check_tiers(self) -> None:
        self._check_contents()
        self._check_copies()

    def _act(self) -> None:
        super()._act()
        random, engine = self.random, self.engine
        names = [node.block_hash for node in engine.kv.tree.nodes()]
        for sequence in list(engine.scheduler.loading):
            request_id = sequence.request.request_id
            if request_id in self.requests and random.random() < 0.1:  # two of its choices may be loading
                self.seen["cancelled loads"] += 1
                self._cancel(request_id)
        if random.random() < 0.05:
            self.seen["offloaded"] += engine.offload(random.sample(names, len(names) // 2))
        if random.random() < 0.02:
            owner = random.choice(OWNERS[1:])
            engine.set_pinned(owner, random.sample(names, len(names) // 4), random.random() < 0.6)
        if random.random() < 0.005:
            self._forget(random.choice(OWNERS[1:]), random.sample(names, len(names) // 10))
        if random.random() < 0.001:
            self.seen["dropped"] += engine.drop_all().num_removed
        engine.check_integrity()

    def _forget(self, owner: str, owned: list[bytes]) -> None:
        shared = self.random.sample(owned, len(owned) // 3)
        result = self.engine.forget(owner, owned, shared)
        self.seen["forgotten"] += result.num_removed
        self.seen["shared"] += result.num_shared
        assert not any(owner in node.owners for node in self.engine.kv.tree.nodes())
        for request in self.requests.values():
            if request.owner == owner:
                self.seen["ended by forgetting"] += 1
        assert not any(active.request.owner == owner for active in self.engine._active.by_id.values())

    def _new_request(self) -> GenerationRequest:
        random = self.random
        self.is_planting = random.random() < 0.1
        request = replace(
            super()._new_request(),
            owner=random.choice(OWNERS),
            is_transient=self.is_planting or random.random() < 0.2,
            warm=random.choice((None, None, None, WarmMode.LOAD, WarmMode.COMPUTE)),
        )
        if self.is_planting:
            request = replace(request, prompt_token_ids=(*request.prompt_token_ids[:40], PLANTED_ID))
        if request.warm:
            request = replace(request, n=1)
        self.is_planting = False
        return request

    def _remember(self, token_ids: tuple[int, ...]) -> None:
        if not self.is_planting and PLANTED_ID not in token_ids:
            super()._remember(token_ids)

    def _compare(self, request: GenerationRequest, choice: int, answer: Answer) -> None:
        if request.warm is None:
            super()._compare(request, choice, answer)
            return
        assert answer.token_ids == []
        assert answer.reason in (FinishReason.STOP, FinishReason.CANCELLED)
        self.seen[f"warm {request.warm.value}"] += 1

    def _take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.seen["gave up"] += output.load is not None and output.load.num_loaded_tokens < output.load.num_tokens
            assert sum(output.cached_by_tier.values()) == output.num_cached_tokens
        super()._take(outputs)

    def _check_contents(self) -> None:
        """Every copy in every tier is what its node says."""
        for node in self.engine.kv.tree.nodes():
            first = node.position * BLOCK_SIZE
            expected = [(token, first + offset) for offset, token in enumerate(node.token_ids)]
            if node.device_block_id is not None:
                assert held_ids(self.runner, node.device_block_id) == expected, "a wrong block on the device"
        for tier in self.tiers:
            for copy, image in tier.images.items():
                first = copy.record.position * BLOCK_SIZE
                slots = IntegerImages._SLOT.iter_unpack(image)
                held = [(token - 1, position - 1) for token, position in slots]
                assert held == [(token, first + i) for i, token in enumerate(copy.record.token_ids)], "a wrong image"
                assert PLANTED_ID not in copy.record.token_ids, "a transient block has left memory"

    def _check_copies(self) -> None:
        """No read goes on for nobody, and no node keeps a copy that its tier has given up."""
        loads = self.engine.loads._loads.values()
        reading = [part.job for load in loads for part in load.parts]
        for tier in self.tiers:
            assert all(job in reading for job in tier.jobs), "a read goes on for nobody"
            assert tier.jobs or all(copy.num_readers == 0 for copy in tier.images)
            unreported = tier.unreported
            for node in self.engine.kv.tree.nodes():
                copy = node.host_copy if tier.name == "host" else node.disk_copy
                assert copy is None or copy in tier.images or copy in unreported, "a node keeps a copy that is gone"
