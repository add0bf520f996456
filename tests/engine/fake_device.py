"""A device that works behind the engine's back: a stream of steps and one of copies in each direction, each in order in
itself and in no order between them. A seeded die says which stream gets on, a piece of an operation at a time.

Its memory knows who may touch which block. Streams are ordered only by what the host knew: an operation may rely on
another stream's only if the host had seen that one to be over before it started this one. So a race is found when it is
made, however the dice fall, and what then goes wrong in the integers is found as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from integer_runner import IntegerImages, IntegerRunner, next_token

from chatkv.engine.batch import Batch, BatchResult, SampleSpec, ScheduledSequence, SequenceResult
from chatkv.engine.config import BLOCK_SIZE

UNWRITTEN = 0xDD
RELEASED = 0xEE
NOT_FINITE = "not finite"


@dataclass(eq=False)
class Operation:
    """`reads`, `writes`: block ids."""

    stream: str
    reads: frozenset[int]
    writes: frozenset[int]
    pieces: Iterator[None]
    is_over: bool = False
    is_known: bool = False
    """The host has seen that it is over."""

    def conflicts_with(self, other: Operation) -> frozenset[int]:
        return (self.writes & (other.reads | other.writes)) | (self.reads & other.writes)


class FakeStep:
    """A `PendingResult`."""

    def __init__(self, device: FakeDevice, batch: Batch) -> None:
        self.device = device
        self.batch = batch
        self.sampled: list[int] = []
        self.results: list[SequenceResult] = []
        self.error: Exception | None = None
        self.operation: Operation

    def is_ready(self) -> bool:
        self.device.get_on()
        return self.operation.is_over

    def wait(self) -> BatchResult:
        self.device.finish(self.operation)
        if self.error is not None:
            raise self.error
        return BatchResult(self.results)


@dataclass(eq=False)
class FakeCopy:
    """An `ImageCopy`."""

    device: FakeDevice
    operation: Operation
    buffers: list[bytearray] = field(default_factory=list)
    is_released: bool = False

    @property
    def is_done(self) -> bool:
        self.device.get_on()
        if self.operation.is_over:
            self.wait()
        return self.operation.is_over

    def wait(self) -> None:
        is_known = self.operation.is_known
        self.device.finish(self.operation)
        if not is_known and self.device.fails_copy():
            raise RuntimeError("the copy failed")

    @property
    def images(self) -> Sequence[memoryview]:
        return [memoryview(buffer) for buffer in self.buffers]

    def release(self) -> None:
        self.device.check(self.operation.is_known, "memory of a copy is given back before the copy is known to be over")
        self.device.check(not self.is_released, "released twice")
        self.is_released = True
        self.device.num_unreleased[self.operation.stream] -= len(self.operation.reads | self.operation.writes)
        for buffer in self.buffers:
            buffer[:] = bytes([RELEASED]) * len(buffer)


class FakeDevice(IntegerRunner):
    """An `OverlappedRunner` and `CopyingImages` in one. `max_pieces`: how far it gets at most while the host does
    something; 0: only when the host waits."""

    # what a test breaks on purpose
    fails_launch: Callable[[Batch], bool] = staticmethod(lambda batch: False)
    fails_step: Callable[[Batch], bool] = staticmethod(lambda batch: False)
    fails_copy: Callable[[], bool] = staticmethod(lambda: False)
    fails_sequence: Callable[[ScheduledSequence], bool] = staticmethod(lambda sequence: False)

    def __init__(
        self, num_blocks: int, seed: int = 0, image_bytes: int = 0, max_pieces: int = 6, num_copies: int = 8
    ) -> None:
        super().__init__(num_blocks)
        self.random = Random(seed)
        self.max_pieces = max_pieces
        self.num_copies = num_copies
        """Blocks that may be under way, each way."""
        self.stalled: frozenset[str] = frozenset()
        """Streams that get on only when the host waits for them."""
        self.num_unreleased = {"read": 0, "write": 0}
        self.pending: dict[str, deque[Operation]] = {"compute": deque(), "read": deque(), "write": deque()}
        self.unknown: list[Operation] = []
        self.steps: list[FakeStep] = []
        """Launched and not yet waited for."""
        self.last_step: FakeStep | None = None
        self.num_launched = 0
        self.max_in_flight = 0
        self.faults: list[str] = []
        """The engine takes what a step raises for a failed step."""
        self.failed_requests: set[str] = set()
        self._bytes = IntegerImages(self, image_bytes)
        self.image_bytes = self._bytes.image_bytes

    # --- the runner ---

    def launch(self, batch: Batch) -> FakeStep:
        self.get_on()
        if self.fails_launch(batch):
            self.failed_requests |= {sequence.request_id for sequence in batch.sequences}
            raise RuntimeError("the launch failed")
        step = FakeStep(self, _snapshot(batch))
        reads = {block_id for sequence in batch.sequences for block_id in sequence.block_table}
        slots = {slot for sequence in batch.sequences for slot in sequence.slot_mapping if slot >= 0}
        sources, destinations = zip(*batch.block_copies, strict=True) if batch.block_copies else ((), ())
        writes = {slot // BLOCK_SIZE for slot in slots} | set(destinations)
        step.operation = self._start("compute", reads | set(sources), writes, self._run_step(step, self.last_step))
        self.last_step = step
        self.steps.append(step)
        self.num_launched += 1
        num_in_flight = sum(operation.stream == "compute" for operation in self.unknown)
        self.max_in_flight = max(self.max_in_flight, num_in_flight)
        self.check(num_in_flight <= 2, "more than two steps are in flight")
        return step

    def _run_step(self, step: FakeStep, previous: FakeStep | None) -> Iterator[None]:
        if self.fails_step(step.batch):
            step.error = RuntimeError("the step failed")
            self.failed_requests |= {sequence.request_id for sequence in step.batch.sequences}
        for source, destination in step.batch.block_copies:
            copied = self.slots[source * BLOCK_SIZE : (source + 1) * BLOCK_SIZE]
            self.slots[destination * BLOCK_SIZE : (destination + 1) * BLOCK_SIZE] = copied
            self._copied_blocks.add(destination)
            yield
        for sequence in step.batch.sequences:
            known = replace(sequence, token_ids=[self._known(token, previous) for token in sequence.token_ids])
            try:
                self._write(known)
                yield
                result = self._run(known)
            except AssertionError as error:
                self.faults.append(str(error))
                result = SequenceResult([0] * len(sequence.samples))
            step.sampled += result.token_ids
            if self.fails_sequence(sequence):
                self.failed_requests.add(sequence.request_id)
                result = SequenceResult(error=NOT_FINITE)
            step.results.append(result)
        self.num_tokens_run += step.batch.num_tokens

    def _known(self, token: int, previous: FakeStep | None) -> int:
        if token >= 0:
            return token
        assert previous is not None
        self.check(-1 - token < len(previous.sampled), "a pending id of another step")
        return previous.sampled[-1 - token]

    def _draw(self, context: list[int], spec: SampleSpec) -> int:
        """The host may be one token behind."""
        assert spec.position == len(context)
        told = [*spec.prompt_token_ids, *spec.output_token_ids]
        assert context[: len(told)] == told
        assert len(context) - len(told) <= (0 if spec.sampling.needs_history else 1), "a draw without its history"
        assert spec.is_eos_banned == (len(context) - len(spec.prompt_token_ids) < spec.sampling.min_tokens)
        return next_token(context, spec.sampling, spec.choice)

    def poison(self, block_id: int) -> None:
        """The engine says that nobody needs the block any more."""
        for operation in self.unknown:
            is_touched = block_id in operation.reads or block_id in operation.writes
            self.check(not is_touched, f"block {block_id} is free while a {operation.stream} may touch it")
        super().poison(block_id)

    # --- the images ---

    @property
    def num_free_reads(self) -> int:
        return self.num_copies - self.num_unreleased["read"]

    @property
    def num_free_writes(self) -> int:
        return self.num_copies - self.num_unreleased["write"]

    def start_read(self, block_ids: Sequence[int]) -> FakeCopy:
        assert 0 < len(block_ids) <= self.num_free_reads
        buffers = [bytearray([UNWRITTEN]) * self.image_bytes for _ in block_ids]

        def pieces() -> Iterator[None]:
            for block_id, buffer in zip(block_ids, buffers, strict=True):
                buffer[:] = self._bytes.read(block_id)
                yield

        return FakeCopy(self, self._start("read", block_ids, (), pieces()), buffers)

    def start_write(self, block_ids: Sequence[int], images: Sequence[memoryview]) -> FakeCopy:
        assert 0 < len(block_ids) <= self.num_free_writes

        def pieces() -> Iterator[None]:
            for block_id, image in zip(block_ids, images, strict=True):
                yield
                self._bytes.write(block_id, image)

        return FakeCopy(self, self._start("write", (), block_ids, pieces()))

    def read(self, block_id: int) -> memoryview:
        self.check(not self.unknown, "a block is read at once while the device works")
        return self._bytes.read(block_id)

    def write(self, block_id: int, image: memoryview) -> None:
        self.check(not self.unknown, "a block is written at once while the device works")
        self._bytes.write(block_id, image)

    # --- time ---

    def get_on(self) -> None:
        """Something else happens on the host meanwhile."""
        for _ in range(self.random.randrange(self.max_pieces + 1)):
            self._get_on_a_piece()

    def finish(self, operation: Operation) -> None:
        while not operation.is_over:
            self._get_on_a_piece(operation.stream)
        self.know(operation)

    def know(self, operation: Operation) -> None:
        """With what came before it in its stream."""
        if operation.is_known:
            return
        index = self.unknown.index(operation)
        for earlier in [other for other in self.unknown[: index + 1] if other.stream == operation.stream]:
            earlier.is_known = True
            self.unknown.remove(earlier)

    def check(self, is_right: bool, message: str) -> None:
        if not is_right:
            self.faults.append(message)
            raise AssertionError(message)

    def _start(self, stream: str, reads: Collection[int], writes: Collection[int], pieces: Iterator[None]) -> Operation:
        self.get_on()
        operation = Operation(stream, frozenset(reads), frozenset(writes), pieces)
        for other in self.unknown:
            if other.stream != stream and (blocks := operation.conflicts_with(other)):
                self.check(False, f"a {stream} races with a {other.stream} for blocks {sorted(blocks)}")
        if stream != "compute":
            self.num_unreleased[stream] += len(operation.reads | operation.writes)
        self.pending[stream].append(operation)
        self.unknown.append(operation)
        return operation

    def _get_on_a_piece(self, awaited: str = "") -> None:
        streams = [stream for stream in self.pending if stream == awaited or stream not in self.stalled]
        busy = [stream for stream in streams if self.pending[stream]]
        if not busy:
            return
        operations = self.pending[self.random.choice(busy)]
        try:
            next(operations[0].pieces)
        except StopIteration:
            operations.popleft().is_over = True


def _snapshot(batch: Batch) -> Batch:
    """What the step knows is what was known when it was launched."""
    sequences = [
        replace(
            sequence,
            samples=[replace(spec, output_token_ids=tuple(spec.output_token_ids)) for spec in sequence.samples],
        )
        for sequence in batch.sequences
    ]
    return replace(batch, sequences=sequences)
