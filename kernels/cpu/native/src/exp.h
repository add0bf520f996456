// exp by range reduction and a polynomial, so that no library's exp decides the bits.
#pragma once
#include "vec.h"

CHATKV_NS_BEGIN

// Below -87: 0. Above 88: infinity. NaN stays NaN. Else within 3e-7 of e^x, relative.
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its series to the 7th power (remainder 6e-9); 2^n by its exponent's bits.
CHATKV_INLINE vf16 exp(vf16 x) {
    const vf16 lowest = splat(-87.0f), highest = splat(88.0f);
    const vm16 is_small = less(x, lowest), is_large = less(highest, x);
    const vf16 clamped = select(is_small, lowest, select(is_large, highest, x));
    const vi16 n = to_int(clamped * splat(1.44269504f));
    // ln 2 in two parts; n has few bits, so n * the first is exact.
    vf16 r = fma(to_float(n), splat(-0.693359375f), clamped);
    r = fma(to_float(n), splat(2.12194440e-4f), r);
    vf16 p = splat(1.0f / 5040.0f);
    p = fma(p, r, splat(1.0f / 720.0f));
    p = fma(p, r, splat(1.0f / 120.0f));
    p = fma(p, r, splat(1.0f / 24.0f));
    p = fma(p, r, splat(1.0f / 6.0f));
    p = fma(p, r, splat(0.5f));
    p = fma(p, r, splat(1.0f));
    p = fma(p, r, splat(1.0f));
    const vf16 power = from_bits(shift_left<23>(n + splat(127)));
    const vf16 result = p * power;
    return select(is_small, zero(), select(is_large, splat(__builtin_inff()), result));
}

CHATKV_NS_END
