"""The engine: requests go in, steps run, outputs come out. One thread at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from .active_requests import ActiveRequests
from .batch import OverlappedRunner, Runner
from .block_hash import BlockHasher
from .block_tree import BlockNode, BlockTree
from .config import BLOCK_SIZE, EngineConfig
from .errors import InvalidRequestError, QueueFullError
from .forgetting import ForgetResult, Forgetting
from .kv_cache import KVCacheManager
from .loads import LoadSet
from .metrics import EngineCounters, EngineStats, take_stats
from .output_processor import OutputProcessor, TextStreamFactory
from .placement import Placement, place
from .prompt import PreparedPrompt, as_background_work, check_prompt, prepare_prompt
from .request import FinishReason, GenerationRequest, RequestOutput
from .scheduler import Scheduler
from .sequence import ActiveRequest, SequenceState
from .step_runner import StepRunner
from .stores import StoreSet
from .tiers.load_planner import LoadPlanner
from .tiers.tier import BlockImages, LowerTier
from .tiers.tier_manager import TierManager

MAX_IDLE_COPY_BYTES = 128 << 20
"""Copied in one go while nobody waits for a step; a cancel waits for it."""


class Engine:
    """Runs many requests on one runner. With one that launches, a step's outputs come while the next one runs.

    `new_text_stream`: without one, outputs carry ids and no text. `poison` (debugging): is told each block id whose
    content has just become meaningless. `clock`: seconds, monotonic. `tiers`: below the device, fastest first; they
    need `images`, and the engine closes them. `constants`: `planner.constants` of an earlier engine of the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner | OverlappedRunner,
        hasher: BlockHasher,
        new_text_stream: TextStreamFactory | None,
        model_eos_ids: frozenset[int],
        *,
        poison: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tiers: Sequence[LowerTier] = (),
        images: BlockImages | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        self.config = config
        self.lower_tiers = tuple(tiers)
        self._runner = runner
        self._hasher = hasher
        self._new_text_stream = new_text_stream
        self._eos_ids = model_eos_ids
        self._poison = poison
        self._clock = clock
        self._images = images
        self._num_arrivals = 0
        self.counters = EngineCounters()
        image_bytes = images.image_bytes if images is not None else 0
        self.planner = LoadPlanner(lambda name: self.tiers.read_rate(name), image_bytes, constants)
        self._set_up()

    def reset(self) -> None:
        """Forgets all requests, without outputs, and all blocks of the device. Also the way out of a broken invariant:
        losing cached data is cheap, wrong data is not."""
        self._abandon()
        pins = self.tiers.pins()
        for owner in pins:
            self.tiers.set_pinned(owner, (), is_pinned=False)
        self._set_up()
        for owner, block_hashes in pins.items():
            self.set_pinned(owner, block_hashes, is_pinned=True)

    def _set_up(self) -> None:
        config = self.config
        tree = BlockTree(self._hasher.root_hash)
        self.tiers = TierManager(tree, self.lower_tiers, self._images)
        self.kv = KVCacheManager(config.num_blocks, self._hasher, tree, self.tiers, self._poison, self._clock)
        self.loads = LoadSet(self.kv, self.tiers, self._images, self.counters, self._clock)
        self.stores = StoreSet(self.kv.pool, self.tiers, self._images)
        self.scheduler = Scheduler(config, self.kv, self.tiers, self.loads, self.planner, self.counters, self._clock)
        self._steps = StepRunner(self._runner, self.kv, self.scheduler.budget, self.planner, self.counters, self._clock)
        self._outputs = OutputProcessor(self._new_text_stream, self._eos_ids, self._clock)
        self._active = ActiveRequests(self.kv, self.scheduler, self._outputs, self.counters)
        self._late_outputs: list[RequestOutput] = []
        self._is_waiting = False

    @property
    def max_context_tokens(self) -> int:
        """Prompt plus answer of one request: the model's context, or what the whole pool holds."""
        return min(self.config.max_context_tokens, self.config.num_blocks * BLOCK_SIZE)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._active.by_id or self._late_outputs or self._steps.is_flying)

    @property
    def is_waiting(self) -> bool:
        """A further step would change nothing until a request or a report of a tier comes, or `wait_s` has passed."""
        return self._is_waiting

    @property
    def wait_s(self) -> float | None:
        """How long tiers may go on without a report before a further step would do something. None: for ever."""
        waits_until_s = self.scheduler.waits_until_s
        return None if waits_until_s is None else max(waits_until_s - self._clock(), 0.0)

    def validate(self, request: GenerationRequest) -> None:
        """Raises InvalidRequestError or PromptTooLongError for what can never run. Any thread may ask."""
        check_prompt(request.prompt_token_ids, self.max_context_tokens)
        if not 1 <= request.n <= self.config.max_num_seqs:
            raise InvalidRequestError(f"n must be between 1 and {self.config.max_num_seqs}, got {request.n}", "n")
        if request.request_id in self._active.by_id:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")

    def check_queue(self, num_more: int = 0) -> None:
        """Raises QueueFullError when no further request may wait; `num_more` wait elsewhere."""
        num_waiting = self.scheduler.queues.num_waiting + num_more
        if num_waiting >= self.config.max_num_waiting:
            raise QueueFullError(num_waiting)

    def prepare(self, request: GenerationRequest) -> PreparedPrompt:
        """What `add_request` would else do on the engine's thread. Any thread may ask, with a valid request."""
        return prepare_prompt(self._hasher, request)

    def add_request(self, request: GenerationRequest, prompt: PreparedPrompt | None = None) -> None:
        """Queues a request; `prompt`: what `prepare` made of it. Raises what `validate` and `check_queue` raise."""
        self.validate(request)
        self.check_queue()
        self._num_arrivals += 1
        prompt = prompt or self.prepare(request)
        if request.warm:
            request = as_background_work(request)
        active = ActiveRequest(request, prompt, self._num_arrivals, self._max_num_tokens(request))
        sequence = SequenceState(active, choice=0, block_hashes=list(prompt.block_hashes))
        sequence.is_done = request.warm is not None and sequence.num_tokens == 0
        active.sequences.append(sequence)
        self._active.by_id[request.request_id] = active
        self.scheduler.add(sequence)
        self._is_waiting = False

    def cancel(self, request_id: str) -> list[RequestOutput]:
        """Gives the request's blocks back now, whatever it was doing. One last output per unfinished choice; none if
        the request is unknown or has ended."""
        return self._active.end(request_id, FinishReason.CANCELLED)

    def step(self) -> list[RequestOutput]:
        """Runs one batch. Outputs are in the order of the batch, then the progress of those that wait or read."""
        if self.scheduler.must_settle:
            self._settle()
        elif self._steps.must_land_first:
            self._land()
        outputs, self._late_outputs = self._late_outputs, []
        self.tiers.poll()
        self.scheduler.take_loaded(self._copy_budget_bytes)
        scheduled = self.scheduler.schedule()
        outputs += self._active.end_done()
        was_settled = self.kv.pool.is_settled
        finished = self._steps.run(scheduled)
        for step in finished:
            outputs += self._active.take(step)
        is_idle = not (scheduled or finished)
        self.stores.advance(self._copy_budget_bytes, is_idle)
        is_copying = self.loads.has_ready or self.stores.is_reading
        self._is_waiting = is_idle and was_settled and not (outputs or is_copying or self.tiers.can_store_more)
        if is_idle:
            self._wait_for_copies()
        if self.config.check_integrity:
            self.check_integrity()
        return outputs + self.report_progress()

    def report_progress(self) -> list[RequestOutput]:
        """Where waiting and reading requests stand, as far as it has changed since the last report."""
        return self._outputs.report_progress(self.scheduler.waiting, self.scheduler.queues.admitted)

    def count_cached(self, prompt_token_ids: Sequence[int], cache_salt: bytes = b"") -> int:
        """Tokens of a prompt that the device holds now. Touches nothing; any thread may ask."""
        nodes = self.kv.find_chain(prompt_token_ids, cache_salt)
        return sum(node.device_block_id is not None for node in nodes) * BLOCK_SIZE

    def place(self, block_hashes: Sequence[bytes]) -> Placement:
        """Where a chain of blocks lies, and what it would take to have it on the device. Any thread may ask."""
        return place(list(self.kv.tree.chain(block_hashes)), len(block_hashes), self.planner)

    def place_tokens(self, token_ids: Sequence[int], cache_salt: bytes = b"") -> Placement:
        """The same for a prompt's full blocks."""
        return place(self.kv.find_chain(token_ids, cache_salt), len(token_ids) // BLOCK_SIZE, self.planner)

    def forget(self, owner: str, owned: Collection[bytes] = (), shared: Collection[bytes] = ()) -> ForgetResult:
        """Removes a chat's blocks from every tier, and wipes them on the device: those that it has held since the
        engine started, and those of the names `owned`. Blocks that others hold too, here or by the names `shared`,
        stay, with all before them. Requests of the owner that still run end first."""
        assert owner, "blocks without an owner are nobody's to delete"
        self._cancel_all_of(owner)
        self._settle()
        self.tiers.set_pinned(owner, (), is_pinned=False)
        nodes = [node for node in self.kv.tree.nodes() if owner in node.owners] + self._named(owned)
        return self._forgetting().forget(nodes, owner, shared)

    def drop_all(self) -> ForgetResult:
        """Removes every block that no running request holds, from every tier."""
        self._settle()
        return self._forgetting().forget(self.kv.tree.nodes(), None, ())

    def offload(self, block_hashes: Collection[bytes]) -> int:
        """Drops device copies that a lower tier has too and that nobody holds. Returns how many."""
        self._settle()
        return self._forgetting().offload(self._named(block_hashes))

    def set_pinned(self, owner: str, block_hashes: Collection[bytes], is_pinned: bool) -> None:
        """The owner's blocks, of those names, held since the engine started or to come, are kept from eviction."""
        held = [node for node in self.kv.tree.nodes() if owner in node.owners] if is_pinned else []
        self.tiers.set_pinned(owner, held + self._named(block_hashes), is_pinned)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stores what can be stored within the time, then closes the lower tiers."""
        self._abandon()
        self.tiers.close(timeout_s)

    def _land(self) -> None:
        """What was launched is over and taken."""
        for step in self._steps.land_all():
            self._late_outputs += self._active.take(step)

    def _settle(self) -> None:
        """The device does nothing any more: also what is being copied has come."""
        self._land()
        self._wait_for_copies()
        self.stores.settle()

    def _abandon(self) -> None:
        """The same for what nobody wants."""
        self._steps.abandon()
        self.loads.abandon()
        self.stores.abandon()

    def _wait_for_copies(self) -> None:
        self.loads.wait()
        self.stores.wait()

    def check_integrity(self) -> None:
        """Recomputes every invariant. Raises AssertionError."""
        self.scheduler.check_integrity(self.stores.held_block_ids())
        self._steps.check_integrity(self.scheduler.queues)
        self.tiers.check_integrity()

    @property
    def _copy_budget_bytes(self) -> int:
        return self.config.max_copy_bytes if self.scheduler.running else MAX_IDLE_COPY_BYTES

    def _named(self, block_hashes: Collection[bytes]) -> list[BlockNode]:
        return [node for block_hash in block_hashes for node in self.kv.tree.named(block_hash)]

    def _forgetting(self) -> Forgetting:
        held = {node for sequence in self.scheduler.queues for node in sequence.nodes} | set(self.loads.nodes())
        return Forgetting(self.kv, self.tiers, self._images, held)

    def _cancel_all_of(self, owner: str) -> None:
        for active in list(self._active.by_id.values()):
            if active.request.owner == owner:
                self._late_outputs += self.cancel(active.request.request_id)

    def _max_num_tokens(self, request: GenerationRequest) -> int:
        num_answer = request.sampling.max_tokens or self.max_context_tokens
        return min(len(request.prompt_token_ids) + num_answer, self.max_context_tokens)

    def step_stats(self) -> EngineStats:
        """Without the lower tiers; cheap after every step. On the engine's thread."""
        return take_stats(self.kv.pool, self.scheduler, self.counters)

    def stats(self) -> EngineStats:
        """On the engine's thread."""
        return replace(self.step_stats(), tiers=self.tiers.stats())
