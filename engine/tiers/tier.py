"""What the engine asks of a tier below the device. Host and disk answer alike.

All methods of a tier are called from the engine thread; a tier's own threads never touch the tree or the pool. What
they have done is fetched with `poll` and `LoadJob.take`; they call the `on_change` of the tier when there is something
to fetch.

The device's blocks are bytes to a tier: `BlockImages` copies them at once, and is all that the CPU needs. A device that
copies by itself has `CopyingImages` too, and then the engine's thread never waits for a copy:

    store   step over -> published -> start_read ... is_done -> images given to the tiers -> release
    load    reserved -> images taken -> start_write ... is_done -> published -> a step may read it -> release

Who copies, orders the copies of one direction one after another and nothing else: no copy waits for a step and no step
for a copy. The engine never starts something before it knows that to be over which must come before, that is: `wait`
has returned or `is_done` has been true. So `start_read` gets blocks whose last writer is known to be over, and nobody
writes into them or reuses them until the copy is; `start_write` gets blocks that nobody else reads or writes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from ..config import BLOCK_SIZE

_IDS = struct.Struct(f"<{BLOCK_SIZE}I")
Owners = Callable[[], Collection[str]]
"""Who owns a block now. Any thread may ask."""


class BlockRecord(NamedTuple):
    """What a block is, without its bytes: enough to prove that a stored image is the one that was asked for."""

    block_hash: bytes
    """16 bytes."""
    parent_hash: bytes
    """16 bytes; the hasher's root hash for the first block of a chain."""
    position: int
    """Index of the block in its chain."""
    packed_ids: bytes
    """BLOCK_SIZE token ids, u32 little endian."""
    extra: bytes

    @property
    def token_ids(self) -> tuple[int, ...]:
        return _IDS.unpack(self.packed_ids)


class CopyState(Enum):
    QUEUED = "queued"
    """Accepted, not yet safe: cannot be loaded."""
    STORED = "stored"
    GONE = "gone"
    """Evicted, forgotten, damaged, or never written. Final."""


@dataclass(slots=True, eq=False)
class TierCopy:
    """One block's copy in one tier. The node and the tier hold the same object. `state` and the fields below it are
    the tier's to write, under its lock; everybody may read them."""

    record: BlockRecord
    parent: TierCopy | None
    """In the same tier: every tier is prefix-closed. None for the first block of a chain."""
    slot: int
    """Where it lies; -1 while it has no place."""
    state: CopyState
    num_children: int = 0
    """Copies in this tier that name it as parent: only leaves may be evicted."""
    num_pins: int = 0
    """Pinned chats that own it."""
    num_readers: int = 0
    """Loads that read it now."""
    hits: float = 0.0
    """Decayed count as of `hit_at_s`."""
    hit_at_s: float = 0.0
    """Wall clock, seconds."""
    is_evicted: bool = False
    """GONE to make room: it is not stored again before somebody uses it, unlike what was lost."""


class LoadJob(Protocol):
    """Reads copies of one chain, first to last. Every image that `take` gives has been verified."""

    def take(self) -> list[memoryview]:
        """Images that have become ready since the last call, in chain order without gaps. Each must be given back with
        `release` once it was copied. Never blocks."""
        ...

    def release(self, image: memoryview) -> None: ...

    @property
    def is_done(self) -> bool:
        """`take` has given all it ever will: all copies, or those before the first that failed, was late, or was
        cancelled."""
        ...

    def cancel(self) -> None:
        """Nothing more comes. A read that is under way keeps its bounce buffer until it returns."""
        ...


@dataclass(frozen=True, slots=True)
class TierStats:
    """One moment of one tier."""

    num_blocks: int
    num_queued: int
    used_bytes: int
    """The disk tier counts every allocated byte of its directory."""
    limit_bytes: int
    read_bytes_per_s: float
    """Measured, verification included; 0 while unknown."""
    num_loaded: int = 0
    """Blocks, since the tier was opened."""
    num_stored: int = 0
    num_skipped: int = 0
    """Refused because the queue was full, or nothing could be evicted."""
    num_evicted: int = 0
    num_damaged: int = 0
    notice: str | None = None
    """What a person should know: the disk is full, all is pinned, writes fail."""


class LowerTier(Protocol):
    name: str
    """"host" or "disk"."""
    image_bytes: int
    """Bytes of one block's image."""
    on_change: Callable[[], None]
    """Set by the engine's thread; called from any thread."""

    def copies(self) -> Sequence[TierCopy]:
        """All STORED copies, parents before children. Asked once, when the tier is attached to a tree."""
        ...

    def store(
        self, record: BlockRecord, parent: TierCopy | None, image: memoryview, owners: Owners, is_pinned: bool
    ) -> TierCopy | None:
        """Accept a block: `image` is copied before the call returns; `owners` is asked when it is about to be safe.
        None: refused (queue full, parent gone, nothing to evict); it may be offered again. Never blocks on the
        disk."""
        ...

    def start_load(self, copies: Sequence[TierCopy], deadline_s: float) -> LoadJob:
        """`copies` follow one another in a chain. They cannot be evicted until the job is done. `deadline_s` from now,
        for the whole job."""
        ...

    def touch(self, copies: Sequence[TierCopy]) -> None:
        """They were hit: counts for eviction."""
        ...

    def pin(self, copies: Sequence[TierCopy], is_pinned: bool) -> None: ...

    def remove(self, copies: Sequence[TierCopy], *, is_forgotten: bool) -> None:
        """GONE at once, with all copies below them; queued writes are cancelled. `is_forgotten`: nothing of them may
        remain in any file once `flush` has returned."""
        ...

    def poll(self) -> Sequence[TierCopy]:
        """Copies that the tier itself has moved to STORED or GONE since the last call, in order of the changes."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything accepted is safe and everything removed is gone. False: not within the time. With 0 it
        only hurries. May be called from any thread."""
        ...

    def stats(self) -> TierStats:
        """From any thread."""
        ...

    def close(self) -> None:
        """Flush within a few seconds, stop the threads. The tier's files stay."""
        ...


class BlockImages(Protocol):
    """The device pool as bytes; used on the engine thread between steps."""

    image_bytes: int

    def read(self, block_id: int) -> memoryview:
        """The image of a block, valid until the next step."""
        ...

    def write(self, block_id: int, image: memoryview) -> None:
        """Copy an image into a block."""
        ...


class ImageCopy(Protocol):
    """Images on their way. Used on the engine thread alone."""

    @property
    def is_done(self) -> bool:
        """Every byte is where it belongs: the device touches neither the blocks nor the host's memory any more. Never
        blocks; once true, always true. Raises what went wrong on the device, and is done then."""
        ...

    def wait(self) -> None:
        """Returns when it is done; raises the same."""
        ...

    @property
    def images(self) -> Sequence[memoryview]:
        """What a read has brought, one image per block in the order asked for. Valid from `is_done` to `release`."""
        ...

    def release(self) -> None:
        """Called once, after `is_done`, for reads and for writes: memory that the copy used may be used again."""
        ...


@runtime_checkable
class CopyingImages(BlockImages, Protocol):
    """`BlockImages` of a device that copies beside its steps. `read` and `write` stay: they return when the copy is
    over, and are called while no step and no other copy is under way."""

    @property
    def num_free_reads(self) -> int:
        """Blocks that `start_read` takes now, all calls together, until something is released: memory that the device
        can reach is bounded."""
        ...

    @property
    def num_free_writes(self) -> int:
        """The same for `start_write`."""
        ...

    def start_read(self, block_ids: Sequence[int]) -> ImageCopy:
        """Device to host, into memory of its own. At least one block. Copies of this direction end in order."""
        ...

    def start_write(self, block_ids: Sequence[int], images: Sequence[memoryview]) -> ImageCopy:
        """Host to device. The caller keeps `images` (image_bytes each, any host memory, page locked or not) unchanged
        until the copy is done. Copies of this direction end in order."""
        ...
