"""Numbers by their bits: what no hardware below sm_89 converts, and maxima that keep NaN.

Device functions; they see values in registers, of any shape.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..reference import SMALLEST_SCALE as SMALLEST

SMALLEST_SCALE = tl.constexpr(SMALLEST)


@triton.jit
def e4m3_to_float16(byte):
    """uint8 e4m3fn -> float16, exact. The bytes of NaN (0x7F, 0xFF) become 480 and -480: a row that is not finite is
    told by its scale.

    Exponent and mantissa are moved to where float16 has them; the exponents' biases differ by 8.
    """
    wide = byte.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True) * 256.0


@triton.jit
def float32_to_e4m3(number):
    """float32 -> uint8 e4m3fn: the nearest, ties to even, 448 at most. NaN gives any byte.

    Normal numbers are rounded on their bits. Below 2^-6 all are multiples of 2^-9, which is the last place of
    2^14 + x, so that the sum's own rounding is the one wanted.
    """
    magnitude = tl.abs(number)
    sign = (number.to(tl.uint32, bitcast=True) >> 24) & 0x80
    bits = magnitude.to(tl.uint32, bitcast=True)
    rounded = bits + 0x0007FFFF + ((bits >> 20) & 1)
    normal = (((rounded >> 23) - 120) << 3) | ((rounded >> 20) & 7)
    subnormal = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    byte = tl.where(magnitude < 0.015625, subnormal, normal)
    byte = tl.where(magnitude >= 448.0, 0x7E, byte)
    return (byte | sign).to(tl.uint8)


@triton.jit
def float32_to_int8(number):
    """float32 of magnitude up to 127 -> int8: the nearest, ties to even. NaN gives any.

    1.5 * 2^23 + x has x in its last places, rounded by the addition.
    """
    return ((number + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def magnitude_bits(numbers):
    """float32 -> int32 in the order of |x|: infinity above all numbers, NaN above infinity. `tl.max` over floats would
    drop NaN."""
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(largest_bits, largest_quantum: tl.constexpr):
    """Largest of the `magnitude_bits` of a row -> its scale, as `reference.quantise_rows`: NaN or infinite if the row
    is not finite."""
    scale = tl.div_rn(largest_bits.to(tl.float32, bitcast=True), largest_quantum)
    return tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
