"""Blocks of a device on their way to the host and back, beside the device's steps: a stream and a page-locked slab for
each direction."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from chatkv.kernels.triton.stream import DeviceStream, Mark, host_tensor
from chatkv.kernels.triton.transfer import gather_blocks, scatter_blocks

SLAB_BYTES = 64 << 20
"""Of each direction: twice what is copied between two steps."""
LARGE_IMAGE_BYTES = 1 << 20
"""Images from this size on are copied one by one; smaller ones are gathered first, since each copy costs its start."""
GATHERED_BYTES = 8 << 20
"""Device memory for that, of each direction."""


class DeviceImages:
    """`pool`: uint8 [num_blocks, block_bytes] on a device. Implements `CopyingImages`. Off CUDA all copies are over
    when they have been started."""

    def __init__(self, pool: Tensor) -> None:
        self.image_bytes = pool.shape[1]
        self._pool = pool
        self._out = _Direction(pool)
        self._in = _Direction(pool)

    def warm_up(self) -> None:
        """Compiles what copies need. Nothing is written into blocks."""
        for direction in (self._out, self._in):
            direction.warm_up()

    @property
    def num_free_reads(self) -> int:
        return self._out.num_free

    @property
    def num_free_writes(self) -> int:
        return self._in.num_free

    def read(self, block_id: int) -> memoryview:
        with self._out.stream.active():
            return memoryview(self._pool[block_id].cpu().numpy().data)

    def write(self, block_id: int, image: memoryview) -> None:
        copied = torch.from_numpy(np.frombuffer(image, np.uint8, self.image_bytes).copy())
        with self._in.stream.active():
            self._pool[block_id].copy_(copied)
        self._in.stream.synchronize()

    def start_read(self, block_ids: Sequence[int]) -> StartedCopy:
        slots = self._out.take(len(block_ids))
        with self._out.stream.active():
            for piece in self._out.pieces(len(slots)):
                self._out.fetch(block_ids[piece], slots[piece])
        return StartedCopy(self._out, slots, self._out.stream.mark())

    def start_write(self, block_ids: Sequence[int], images: Sequence[memoryview]) -> StartedCopy:
        direct: dict[int, Tensor] = {}
        if not self._in.is_gathering:
            locked = ((block_id, _page_locked(image)) for block_id, image in zip(block_ids, images, strict=True))
            direct = {block_id: memory for block_id, memory in locked if memory is not None}
        staged = [pair for pair in zip(block_ids, images, strict=True) if pair[0] not in direct]
        slots = self._in.take(len(staged))
        with self._in.stream.active():
            for block_id, memory in direct.items():
                self._pool[block_id].copy_(memory, non_blocking=True)
            # The device copies one piece while the next is put into the slab.
            for piece in self._in.pieces(len(slots)):
                self._in.bring(staged[piece], slots[piece])
        return StartedCopy(self._in, slots, self._in.stream.mark())


class _Direction:
    """A stream, and slots of page-locked memory for one image each."""

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        num_blocks, image_bytes = pool.shape
        num_slots = max(min(SLAB_BYTES // image_bytes, num_blocks), 1)
        self.stream = DeviceStream(pool.device)
        self._slab = host_tensor(num_slots * image_bytes, torch.uint8, pool.device).view(num_slots, image_bytes)
        self.rows = self._slab.numpy()
        self._free_slots = set(range(num_slots))
        self._gathered: Tensor | None = None
        if image_bytes < LARGE_IMAGE_BYTES:
            num_gathered = min(max(GATHERED_BYTES // image_bytes, 1), num_slots)
            with self.stream.active():
                self._gathered = torch.empty(num_gathered, image_bytes, dtype=torch.uint8, device=pool.device)

    def warm_up(self) -> None:
        if self._gathered is None:
            return
        with self.stream.active():
            block_ids, images = self._on_device([0]), self._gathered[:1]
            gather_blocks(self._pool, block_ids, images)
            scatter_blocks(images, block_ids, images)
        self.stream.synchronize()

    @property
    def is_gathering(self) -> bool:
        return self._gathered is not None

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    def take(self, num_slots: int) -> list[int]:
        assert num_slots <= self.num_free, f"{num_slots} images, and room for {self.num_free}"
        slots = sorted(self._free_slots)[:num_slots]
        self._free_slots.difference_update(slots)
        return slots

    def give_back(self, slots: Sequence[int]) -> None:
        self._free_slots.update(slots)

    def pieces(self, num_images: int) -> list[slice]:
        """Images that are gathered together."""
        size = 1 if self._gathered is None else len(self._gathered)
        return [slice(start, min(start + size, num_images)) for start in range(0, num_images, size)]

    def fetch(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Blocks -> slots, on the stream."""
        if self._gathered is None:
            for block_id, slot in zip(block_ids, slots, strict=True):
                self._slab[slot].copy_(self._pool[block_id], non_blocking=True)
            return
        gathered = self._gathered[: len(slots)]
        gather_blocks(self._pool, self._on_device(block_ids), gathered)
        for start, stop in _runs(slots):
            self._slab[slots[start] : slots[stop - 1] + 1].copy_(gathered[start:stop], non_blocking=True)

    def bring(self, images: Sequence[tuple[int, memoryview]], slots: Sequence[int]) -> None:
        """Images -> slots; slots -> blocks, on the stream."""
        for slot, (_, image) in zip(slots, images, strict=True):
            _copy(self._slab[slot], image)
        if self._gathered is None:
            for slot, (block_id, _) in zip(slots, images, strict=True):
                self._pool[block_id].copy_(self._slab[slot], non_blocking=True)
            return
        gathered = self._gathered[: len(slots)]
        for start, stop in _runs(slots):
            gathered[start:stop].copy_(self._slab[slots[start] : slots[stop - 1] + 1], non_blocking=True)
        scatter_blocks(self._pool, self._on_device([block_id for block_id, _ in images]), gathered)

    def _on_device(self, block_ids: Sequence[int]) -> Tensor:
        ids = host_tensor(len(block_ids), torch.int32, self._pool.device)
        ids.numpy()[:] = block_ids
        return ids.to(self._pool.device, non_blocking=True)


def _copy(target: Tensor, image: memoryview) -> None:
    """Into host memory. By torch on several threads, where it can look into `image`."""
    if image.readonly:
        target.numpy()[:] = np.frombuffer(image, np.uint8, len(target))
    else:
        target.copy_(torch.frombuffer(image, dtype=torch.uint8, count=len(target)))


def _page_locked(image: memoryview) -> Tensor | None:
    """The image, if the device can read it where it lies."""
    if image.readonly:
        return None
    memory = torch.frombuffer(image, dtype=torch.uint8)
    return memory if memory.is_pinned() else None


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Where slots follow one another: (start, stop) in the sorted `slots`."""
    breaks = [index + 1 for index, (slot, after) in enumerate(pairwise(slots)) if after != slot + 1]
    return list(pairwise([0, *breaks, len(slots)]))


class StartedCopy:
    """Implements `ImageCopy`."""

    def __init__(self, direction: _Direction, slots: Sequence[int], mark: Mark) -> None:
        self._direction = direction
        self._slots = slots
        self._mark = mark
        self._is_done = False

    @property
    def is_done(self) -> bool:
        if not self._is_done:
            self._is_done = True  # also when the device has failed
            self._is_done = self._mark.is_reached
        return self._is_done

    def wait(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._mark.wait()

    @property
    def images(self) -> list[memoryview]:
        assert self._is_done, "images are read before the device has brought them"
        return [memoryview(self._direction.rows[slot]) for slot in self._slots]

    def release(self) -> None:
        assert self._is_done, "memory is given back while the device copies"
        self._direction.give_back(self._slots)
        self._slots = ()
