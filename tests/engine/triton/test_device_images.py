"""Blocks of a device as bytes: what goes out and comes back, and the memory that it takes meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import chatkv.engine.device_images as device_images
from chatkv.engine.device_images import DeviceImages
from chatkv.engine.tiers.tier import CopyingImages

IMAGE_BYTES = 4096
NUM_BLOCKS = 12


@pytest.fixture(params=["gathered", "one by one"])
def images(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DeviceImages:
    """Room for 6 images each way."""
    monkeypatch.setattr(device_images, "SLAB_BYTES", 6 * IMAGE_BYTES)
    monkeypatch.setattr(device_images, "GATHERED_BYTES", 2 * IMAGE_BYTES)
    if request.param == "one by one":
        monkeypatch.setattr(device_images, "LARGE_IMAGE_BYTES", IMAGE_BYTES)
    return DeviceImages(new_pool())


def new_pool() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (NUM_BLOCKS, IMAGE_BYTES), dtype=torch.uint8, generator=generator)


def contents(images: DeviceImages, block_ids: Sequence[int]) -> list[bytes]:
    return [bytes(images.read(block_id)) for block_id in block_ids]


def test_it_copies_by_itself(images: DeviceImages) -> None:
    assert isinstance(images, CopyingImages)
    assert images.image_bytes == IMAGE_BYTES
    assert images.num_free_reads == images.num_free_writes == 6


def test_images_come_in_the_order_asked_for(images: DeviceImages) -> None:
    copy = images.start_read([7, 2, 11, 0, 3])
    copy.wait()
    assert copy.is_done
    assert [bytes(image) for image in copy.images] == contents(images, [7, 2, 11, 0, 3])


def test_what_is_written_reaches_its_blocks_and_no_others(images: DeviceImages) -> None:
    before = contents(images, range(NUM_BLOCKS))
    copy = images.start_write([9, 1, 4], [memoryview(before[block_id]) for block_id in (0, 2, 3)])
    assert copy.is_done
    copy.release()
    expected = {**dict(enumerate(before)), 9: before[0], 1: before[2], 4: before[3]}
    assert contents(images, range(NUM_BLOCKS)) == list(expected.values())


def test_room_is_bounded_and_comes_back_in_any_order(images: DeviceImages) -> None:
    first, second, third = (images.start_read([block_id, block_id + 6]) for block_id in range(3))
    assert images.num_free_reads == 0
    with pytest.raises(AssertionError, match="room for 0"):
        images.start_read([0])
    held = [bytes(image) for image in second.images] if second.is_done else []
    for copy in (first, third):
        assert copy.is_done
        copy.release()
    assert images.num_free_reads == 4
    scattered = images.start_read([8, 5, 10, 4])  # their places are not neighbours
    assert scattered.is_done
    assert [bytes(image) for image in scattered.images] == contents(images, [8, 5, 10, 4])
    assert [bytes(image) for image in second.images] == held == contents(images, [1, 7])
    assert images.num_free_writes == 6


def test_one_image_at_once(images: DeviceImages) -> None:
    image = bytes(range(256)) * (IMAGE_BYTES // 256)
    images.write(5, memoryview(image))
    assert bytes(images.read(5)) == image


def test_a_pool_smaller_than_the_slab_takes_no_more_than_itself() -> None:
    assert DeviceImages(new_pool()).num_free_reads == NUM_BLOCKS


def test_page_locked_memory_is_copied_from_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_images, "LARGE_IMAGE_BYTES", IMAGE_BYTES)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor[0] == 1)
    images = DeviceImages(new_pool())
    locked, other = bytearray(b"\1" * IMAGE_BYTES), bytearray(b"\2" * IMAGE_BYTES)
    copy = images.start_write([3, 4], [memoryview(locked), memoryview(other)])
    assert images.num_free_writes == NUM_BLOCKS - 1
    assert copy.is_done
    copy.release()
    assert contents(images, [3, 4]) == [locked, other]
    assert images.num_free_writes == NUM_BLOCKS
