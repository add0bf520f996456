"""Numbers by their bits: what no hardware below sm_89 converts, and maxima that keep NaN.

Device functions; they see values in registers, of any shape.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def largest_magnitude(rows):
    """float32 [n, width] -> [n]: max |x| of each row, NaN if any is NaN; `tl.max` would drop it.

    Without the sign, floats are in the order of their bits, infinity above all numbers and NaN above infinity.
    """
    bits = rows.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=1).to(tl.float32, bitcast=True)
