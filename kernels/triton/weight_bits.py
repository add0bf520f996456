"""Packed weights and activations as floats, by their bits: no conversion from integers, which GPUs do slowly.

Device functions over words of 32 bits in registers, of any shape. What comes in pairs are the two halves of a word:
the compiler keeps them together, so that one instruction serves both. Every result is exact.

`one`, `ones`: kernels get the bits of 1.0, or of 1024 or 128 twice, as a number, and add `tl.program_id(2)`, 0:
the compiler must not know them, since and-then-or is one instruction only where one of its constants is in a register.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PAIR_OF_ONES = {torch.float16: 0x64006400, torch.bfloat16: 0x43004300}
"""Compute dtype -> a word of two floats whose last place is 1: 1024 or 128."""
FLOAT_ONE = 0x3F800000
FP8_FACTOR = tl.constexpr(256.0)
"""What `fp8_pair` leaves to be multiplied where it gives float16: the exponents' biases differ by 8."""


@triton.jit
def as_pair(bits, CDT: tl.constexpr):
    """int32 -> its low and its high half."""
    return bits.to(tl.int16).to(CDT, bitcast=True), (bits >> 16).to(tl.int16).to(CDT, bitcast=True)


@triton.jit
def int4_pair(words, ones, J: tl.constexpr, CDT: tl.constexpr):
    """quantum - 8 of columns 8 J + 2 w and the next, w the word's place in its block (`Int4Matrix`).

    In the last places of 1024 (128) a quantum is 1024 + quantum; four places higher, which float16 has, 16 times that.
    """
    if tl.float16 == CDT:
        if J % 2 == 0:
            first, second = as_pair(((words >> (4 * J)) & 0x000F000F) | ones, CDT)
            return first - 1032.0, second - 1032.0
        else:
            first, second = as_pair(((words >> (4 * J - 4)) & 0x00F000F0) | ones, CDT)
            return first * 0.0625 - 72.0, second * 0.0625 - 72.0
    else:
        first, second = as_pair(((words >> (4 * J)) & 0x000F000F) | ones, CDT)
        return first - 136.0, second - 136.0


@triton.jit
def int8_pair(words, ones, J: tl.constexpr, CDT: tl.constexpr):
    """Bytes J and J + 2 of int8 words.

    The low 7 bits count from 1024 (128) upwards; what is subtracted is that, and 128 more where the sign bit is set.
    """
    shifted = words >> (8 * J)
    first, second = as_pair((shifted & 0x007F007F) | ones, CDT)
    first_zero, second_zero = as_pair((shifted & 0x00800080) | ones, CDT)
    return first - first_zero, second - second_zero


@triton.jit
def fp8_pair(words, J: tl.constexpr, CDT: tl.constexpr):
    """Bytes J and J + 2 of e4m3fn words; in float16 divided by FP8_FACTOR. NaN becomes 480.

    Sign, exponent and mantissa are moved to where the wider float has them.
    """
    shifted = words << (8 - 8 * J)
    signs = shifted & -0x7FFF8000
    if tl.float16 == CDT:
        return as_pair(((shifted >> 1) & 0x3F803F80) | signs, CDT)
    else:
        BIAS: tl.constexpr = 2.0**120
        first, second = as_pair(((shifted >> 4) & 0x07F007F0) | signs, CDT)
        return first * BIAS, second * BIAS


@triton.jit
def float_pair(pairs, CDT: tl.constexpr):
    """Two neighbouring activations in a word -> float32."""
    if tl.float16 == CDT:
        first, second = as_pair(pairs, CDT)
        return first.to(tl.float32), second.to(tl.float32)
    else:
        return (pairs << 16).to(tl.float32, bitcast=True), (pairs & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def counted_up(shifted, one, PLACE: tl.constexpr, NUM_BITS: tl.constexpr):
    """float32 1 + bits * 2^(PLACE - 23): the NUM_BITS bits at PLACE, within a mantissa of 1.0."""
    return ((shifted & (((1 << NUM_BITS) - 1) << PLACE)) | one).to(tl.float32, bitcast=True)


@triton.jit
def of_each_word(scales, NUM_WORDS: tl.constexpr):
    """[outputs, blocks] -> [outputs, NUM_WORDS * blocks].

    Tiles of words have two dimensions everywhere: the compiler gives those that are loaded in three a worse layout.
    """
    spread = tl.broadcast_to(scales[:, :, None], [scales.shape[0], scales.shape[1], NUM_WORDS])
    return tl.reshape(spread, [scales.shape[0], scales.shape[1] * NUM_WORDS])
