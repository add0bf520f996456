"""Block images of every KV dtype, taken out of one pool and put into another that is poisoned, give the same bits.

C9: scales travel inside the image. C11: a shift by one position must fail the very check that a true copy passes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny import BASE, KINDS, decoder_of_kind, logits_of, random_ids, runner_of, sequence
from torch import Tensor

from chatkv.engine.models.decoder import Decoder
from chatkv.kernels.kv_blocks import KVBlocks

NUM_HIT_TOKENS, NUM_TOKENS = 19 * 16, 19 * 16 + 21
SOURCE_BLOCKS = range(3, 24)
TARGET_BLOCKS = range(39, 18, -1)


LLAMA = BASE | {"architectures": ["LlamaForCausalLM"]}


@pytest.fixture(params=KINDS, scope="module")
def model(request: pytest.FixtureRequest) -> Decoder:
    return decoder_of_kind(request.param, LLAMA)


@pytest.fixture(params=["torch int8", "native int8"], scope="module")
def int8_model(request: pytest.FixtureRequest) -> Decoder:
    return decoder_of_kind(request.param, LLAMA)


def check_round_trip(model: Decoder, damage: Callable[[KVBlocks], None] | None = None) -> None:
    """`damage` changes views of the images on their way, [19 blocks, ...]."""
    ids = random_ids(NUM_TOKENS, 211, seed=11)
    source, target = runner_of(model, num_blocks=40), runner_of(model, num_blocks=40)
    (whole,) = logits_of(source, sequence(ids, 0, SOURCE_BLOCKS))
    num_hit_blocks = NUM_HIT_TOKENS // 16
    images = [bytes(source.images.read(block)) for block in SOURCE_BLOCKS[:num_hit_blocks]]
    assert {len(image) for image in images} == {model.layout.block_bytes, source.images.image_bytes}
    stored = torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8).view(num_hit_blocks, -1)
    if damage:
        damage(model.layout.views(stored))
    for block, image in zip(TARGET_BLOCKS, stored, strict=False):
        target.images.write(block, image.numpy().data)
    (rest,) = logits_of(target, sequence(ids[NUM_HIT_TOKENS:], NUM_HIT_TOKENS, TARGET_BLOCKS))
    assert rest.isfinite().all()
    assert torch.equal(rest, whole[NUM_HIT_TOKENS:])


def test_images_give_the_same_bits_in_a_poisoned_pool(model: Decoder) -> None:
    check_round_trip(model)


def shifted(numbers: Tensor, position_dim: int) -> Tensor:
    """Every number one position later, over the edges of blocks."""
    in_order = numbers.movedim(position_dim, 1)
    rolled = in_order.flatten(0, 1).roll(1, 0).view(in_order.shape)
    return rolled.movedim(1, position_dim)


def all_views(kv: KVBlocks) -> list[Tensor]:
    return [view for view in (kv.keys, kv.values, kv.key_scales, kv.value_scales) if view is not None]


def shift_all(kv: KVBlocks) -> None:
    for view in all_views(kv):
        view.copy_(shifted(view, 3).clone())


def swap_blocks(kv: KVBlocks) -> None:
    for view in all_views(kv):
        view[[4, 5]] = view[[5, 4]]


def swap_layers(kv: KVBlocks) -> None:
    for view in all_views(kv):
        view[:, [0, 1]] = view[:, [1, 0]]


@pytest.mark.parametrize("damage", [shift_all, swap_blocks, swap_layers])
def test_images_in_the_wrong_place_fail_the_check(model: Decoder, damage: Callable[[KVBlocks], None]) -> None:
    with pytest.raises(AssertionError, match="equal"):
        check_round_trip(model, damage)


def scales_of(kv: KVBlocks) -> tuple[Tensor, Tensor]:
    assert kv.key_scales is not None
    assert kv.value_scales is not None
    return kv.key_scales, kv.value_scales


def shift_scales(kv: KVBlocks) -> None:
    for scales in scales_of(kv):
        scales.copy_(shifted(scales, 3).clone())


def swap_scales_of_heads(kv: KVBlocks) -> None:
    for scales in scales_of(kv):
        scales[:, :, [0, 1]] = scales[:, :, [1, 0]]


def swap_scales_of_keys_and_values(kv: KVBlocks) -> None:
    keys, values = scales_of(kv)
    before = keys.clone()
    keys.copy_(values)
    values.copy_(before)


def lose_scales(kv: KVBlocks) -> None:
    for scales in scales_of(kv):
        scales.fill_(1.0)


@pytest.mark.parametrize("damage", [shift_scales, swap_scales_of_heads, swap_scales_of_keys_and_values, lose_scales])
def test_wrong_scales_fail_the_check(int8_model: Decoder, damage: Callable[[KVBlocks], None]) -> None:
    with pytest.raises(AssertionError, match="equal"):
        check_round_trip(int8_model, damage)


def test_bytes_behind_the_end_do_not_matter(model: Decoder) -> None:
    """A tail block is begun empty, whatever it held; what padding holds is never read."""
    ids = random_ids(40, 211, seed=2)
    runner = runner_of(model, num_blocks=8)
    (expected,) = logits_of(runner, sequence(ids, 0, range(3)))
    for poison in (0xFF, 0x7F, 0x80):
        runner.pool.fill_(poison)
        (found,) = logits_of(runner, sequence(ids, 0, [5, 6, 7]))
        assert torch.equal(found, expected), hex(poison)
        (row,) = logits_of(runner, sequence(ids[-1:], 39, [5, 6, 7]))
        assert torch.equal(row[0], expected[-1]), hex(poison)
        runner.pool[:, model.layout.used_bytes :] = poison ^ 0x55
        (row,) = logits_of(runner, sequence(ids[-1:], 39, [5, 6, 7]))
        assert torch.equal(row[0], expected[-1]), hex(poison)
