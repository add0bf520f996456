"""The engine: requests go in, steps run, outputs come out. One thread at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from .batch import BatchResult, Runner, SequenceResult
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
from .scheduler import ScheduledTokens, Scheduler
from .sequence import ActiveRequest, SequenceState
from .step_runner import StepRunner
from .tiers.load_planner import LoadPlanner
from .tiers.tier import BlockImages, LowerTier
from .tiers.tier_manager import TierManager

MAX_IDLE_COPY_BYTES = 128 << 20
"""Copied in one go while nobody waits for a step; a cancel waits for it."""


class Engine:
    """Runs many requests on one runner.

    `new_text_stream`: without one, outputs carry ids and no text. `poison` (debugging): is told each block id whose
    content has just become meaningless. `clock`: seconds, monotonic. `tiers`: below the device, fastest first; they
    need `images`, and the engine closes them. `constants`: `planner.constants` of an earlier engine of the model.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
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
        self.loads.abandon()
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
        self.scheduler = Scheduler(config, self.kv, self.tiers, self.loads, self.planner, self.counters, self._clock)
        self._steps = StepRunner(self._runner, self.kv, self.scheduler.budget, self.planner, self.counters, self._clock)
        self._outputs = OutputProcessor(self._new_text_stream, self._eos_ids, self.max_context_tokens, self._clock)
        self._active: dict[str, ActiveRequest] = {}
        self._late_outputs: list[RequestOutput] = []
        self._is_waiting = False

    @property
    def max_context_tokens(self) -> int:
        """Prompt plus answer of one request: the model's context, or what the whole pool holds."""
        return min(self.config.max_context_tokens, self.config.num_blocks * BLOCK_SIZE)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._active or self._late_outputs)

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
        if request.request_id in self._active:
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
        active = ActiveRequest(request, prompt, self._num_arrivals)
        sequence = SequenceState(active, choice=0, block_hashes=list(prompt.block_hashes))
        sequence.is_done = request.warm is not None and sequence.num_tokens == 0
        active.sequences.append(sequence)
        self._active[request.request_id] = active
        self.scheduler.add(sequence)
        self._is_waiting = False

    def cancel(self, request_id: str) -> list[RequestOutput]:
        """Frees the request's blocks now, whatever it was doing. One last output per unfinished choice; none if the
        request is unknown or has ended."""
        return self._end(request_id, FinishReason.CANCELLED, None)

    def step(self) -> list[RequestOutput]:
        """Runs one batch. Outputs are in the order of the batch, then the progress of those that wait or read."""
        outputs, self._late_outputs = self._late_outputs, []
        self.tiers.poll()
        self.scheduler.take_loaded(self._copy_budget_bytes)
        scheduled = self.scheduler.schedule()
        outputs += self._end_done()
        if scheduled:
            outputs += self._update(scheduled, self._steps.run(scheduled))
        self.tiers.store_some(self._copy_budget_bytes)
        self._is_waiting = not (scheduled or outputs or self.loads.has_ready or self.tiers.can_store_more)
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
        self.tiers.set_pinned(owner, (), is_pinned=False)
        nodes = [node for node in self.kv.tree.nodes() if owner in node.owners] + self._named(owned)
        return self._forgetting().forget(nodes, owner, shared)

    def drop_all(self) -> ForgetResult:
        """Removes every block that no running request holds, from every tier."""
        return self._forgetting().forget(self.kv.tree.nodes(), None, ())

    def offload(self, block_hashes: Collection[bytes]) -> int:
        """Drops device copies that a lower tier has too and that nobody holds. Returns how many."""
        return self._forgetting().offload(self._named(block_hashes))

    def set_pinned(self, owner: str, block_hashes: Collection[bytes], is_pinned: bool) -> None:
        """The owner's blocks, of those names, held since the engine started or to come, are kept from eviction."""
        held = [node for node in self.kv.tree.nodes() if owner in node.owners] if is_pinned else []
        self.tiers.set_pinned(owner, held + self._named(block_hashes), is_pinned)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stores what can be stored within the time, then closes the lower tiers."""
        self.loads.abandon()
        self.tiers.close(timeout_s)

    def check_integrity(self) -> None:
        """Recomputes every invariant. Raises AssertionError."""
        self.scheduler.check_integrity()
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
        for active in list(self._active.values()):
            if active.request.owner == owner:
                self._late_outputs += self.cancel(active.request.request_id)

    def _end_done(self) -> list[RequestOutput]:
        """Warm requests that have done what they could."""
        done = [sequence.request.request_id for sequence in self.scheduler.take_done()]
        return [output for request_id in done for output in self._end(request_id, FinishReason.STOP, None)]

    def _update(self, scheduled: Sequence[ScheduledTokens], result: BatchResult) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        for item, sequence_result in zip(scheduled, result.sequences, strict=True):
            sequence = item.sequence
            request_id = sequence.request.request_id
            if request_id not in self._active:
                continue  # another sequence of the same request has failed in this step
            if sequence_result.error is not None:
                self.counters.num_failed_requests += 1
                outputs += self._end(request_id, FinishReason.ERROR, sequence_result.error)
                continue
            self.kv.finish_copy(sequence)
            self.scheduler.advance(item)
            if sequence.warm and sequence.num_uncomputed_tokens == 0:
                sequence.is_done = True
                outputs += self._end_done()
            if sequence_result.token_ids:
                outputs += self._take_tokens(sequence, sequence_result)
        return outputs

    def _take_tokens(self, sequence: SequenceState, result: SequenceResult) -> list[RequestOutput]:
        is_forking = sequence.is_at_first_token and sequence.request.n > 1
        branches = self.scheduler.fork(sequence) if is_forking else [sequence]
        logprobs = result.logprobs or (None,) * len(branches)
        outputs = []
        for branch, token_id, logprob in zip(branches, result.token_ids, logprobs, strict=True):
            output = self._outputs.push(branch, token_id, logprob)
            self.counters.num_generated_tokens += 1
            if output.finish_reason is not None:
                self.scheduler.finish(branch)
            outputs.append(output)
        self._drop_if_finished(sequence.active)
        return outputs

    def _end(self, request_id: str, reason: FinishReason, error: str | None) -> list[RequestOutput]:
        active = self._active.get(request_id)
        if active is None:
            return []
        unstarted = self._outputs.end_unstarted(active, reason, error)
        outputs = []
        for sequence in list(active.sequences):
            outputs.append(self._outputs.end(sequence, reason, error))
            self.scheduler.finish(sequence)
        self._drop_if_finished(active)
        return outputs + unstarted

    def _drop_if_finished(self, active: ActiveRequest) -> None:
        if not active.sequences:
            del self._active[active.request.request_id]

    def step_stats(self) -> EngineStats:
        """Without the lower tiers; cheap after every step. On the engine's thread."""
        return take_stats(self.kv.pool, self.scheduler, self.counters)

    def stats(self) -> EngineStats:
        """On the engine's thread."""
        return replace(self.step_stats(), tiers=self.tiers.stats())
