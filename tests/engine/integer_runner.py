"""An exact stand-in for the model. Keys and values are (token, position): it writes them through the slot mapping,
reads the whole context back through the block table, and derives the next token from what it reads. Any wrong block,
stale block or missing copy changes the answer or is noticed here."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from chatkv.engine.batch import NO_SLOT, Batch, BatchResult, SampleSpec, ScheduledSequence, SequenceResult
from chatkv.engine.block_hash import BlockHasher, CacheFingerprint
from chatkv.engine.config import BLOCK_SIZE
from chatkv.engine.request import SamplingParams

VOCAB_SIZE = 50
EOS_ID = 0


def new_hasher() -> BlockHasher:
    return BlockHasher(b"k" * 32, CacheFingerprint.from_facts({"model": "integer"}))


def next_token(context: Sequence[int], sampling: SamplingParams, choice: int) -> int:
    """Depends on every token before it, and on seed, choice and position."""
    message = array("q", [*context, sampling.seed, choice, len(context)]).tobytes()
    return blake2b(message, digest_size=4).digest()[0] % VOCAB_SIZE


def naive_answer(
    prompt: Sequence[int], sampling: SamplingParams, choice: int, max_context_tokens: int
) -> tuple[list[int], str]:
    """What a request is answered alone and without any cache: ids and finish reason."""
    context, answer = list(prompt), []
    while True:
        token = next_token(context, sampling, choice)
        context.append(token)
        answer.append(token)
        is_stop = token in sampling.stop_token_ids or (token == EOS_ID and not sampling.ignore_eos)
        if is_stop and len(answer) > sampling.min_tokens:
            return answer, "stop"
        if len(answer) == sampling.max_tokens or len(context) >= max_context_tokens:
            return answer, "length"


class IntegerRunner:
    """With `poison` given to the engine, a slot is written once between two poisonings: never over what is shared."""

    def __init__(self, num_blocks: int, is_recording: bool = False) -> None:
        self.slots: list[tuple[int, int] | None] = [None] * (num_blocks * BLOCK_SIZE)
        self.num_tokens_run = 0
        self.batches: list[Batch] = []
        self._is_recording = is_recording
        self._is_poisoning = False
        self._copied_blocks: set[int] = set()
        """They may hold more than the tail that was forked."""

    def poison(self, block_id: int) -> None:
        """The engine says that the block's content is meaningless."""
        self._is_poisoning = True
        self._copied_blocks.discard(block_id)
        start = block_id * BLOCK_SIZE
        self.slots[start : start + BLOCK_SIZE] = [None] * BLOCK_SIZE

    def execute(self, batch: Batch) -> BatchResult:
        if self._is_recording:
            self.batches.append(batch)
        for source, destination in batch.block_copies:
            copied = self.slots[source * BLOCK_SIZE : (source + 1) * BLOCK_SIZE]
            self.slots[destination * BLOCK_SIZE : (destination + 1) * BLOCK_SIZE] = copied
            self._copied_blocks.add(destination)
        for sequence in batch.sequences:
            self._write(sequence)
        self.num_tokens_run += batch.num_tokens
        return BatchResult([self._run(sequence) for sequence in batch.sequences])

    def _write(self, sequence: ScheduledSequence) -> None:
        assert len(sequence.slot_mapping) == len(sequence.token_ids)
        for offset, (token, slot) in enumerate(zip(sequence.token_ids, sequence.slot_mapping, strict=True)):
            if slot != NO_SLOT:
                is_blank = self.slots[slot] is None or slot // BLOCK_SIZE in self._copied_blocks
                assert is_blank or not self._is_poisoning, f"slot {slot} is written over"
                self.slots[slot] = (token, sequence.start_position + offset)

    def _run(self, sequence: ScheduledSequence) -> SequenceResult:
        num_tokens = sequence.start_position + len(sequence.token_ids)
        assert len(sequence.block_table) == -(-num_tokens // BLOCK_SIZE), "the table is longer than the tokens"
        context = self._read(sequence.block_table, num_tokens)
        assert context[sequence.start_position :] == list(sequence.token_ids)
        return SequenceResult([self._draw(context, spec) for spec in sequence.samples])

    def _read(self, block_table: Sequence[int], num_tokens: int) -> list[int]:
        held: list[tuple[int, int] | None] = []
        for block_id in block_table:
            held += self.slots[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE]
        context = []
        for position, entry in enumerate(held[:num_tokens]):
            assert entry is not None, f"position {position} is read but holds nothing"
            assert entry[1] == position, f"position {position} holds {entry}"
            context.append(entry[0])
        return context

    def _draw(self, context: list[int], spec: SampleSpec) -> int:
        assert spec.position == len(context)
        assert context == [*spec.prompt_token_ids, *spec.output_token_ids]
        return next_token(context, spec.sampling, spec.choice)


class IntegerImages:
    """The runner's slots as bytes: token and position, both plus one, so that zeros are a blank slot."""

    _SLOT = struct.Struct("<qq")

    def __init__(self, runner: IntegerRunner, image_bytes: int = 0) -> None:
        """`image_bytes`: at least so many, zeros at the end; disks want whole pages."""
        self._runner = runner
        self._used_bytes = BLOCK_SIZE * self._SLOT.size
        self.image_bytes = max(image_bytes, self._used_bytes)

    def read(self, block_id: int) -> memoryview:
        entries = self._runner.slots[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE]
        assert all(entry is not None for entry in entries), "a block is stored that is not full"
        image = b"".join(self._SLOT.pack(token + 1, position + 1) for token, position in entries)  # type: ignore[misc]
        return memoryview(image.ljust(self.image_bytes, b"\0"))

    def write(self, block_id: int, image: memoryview) -> None:
        pairs = self._SLOT.iter_unpack(bytes(image[: self._used_bytes]))
        entries = [(token - 1, position - 1) if token else None for token, position in pairs]
        slots = slice(block_id * BLOCK_SIZE, (block_id + 1) * BLOCK_SIZE)
        is_blank = all(entry is None for entry in self._runner.slots[slots])
        assert is_blank or entries == [None] * BLOCK_SIZE, f"block {block_id} is loaded over what it holds"
        self._runner.slots[slots] = entries


def held_ids(runner: IntegerRunner, block_id: int) -> list[tuple[int, int] | None]:
    return runner.slots[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE]
