// The scale of an RMS norm (arXiv:1910.07467), for hidden states and for heads.
#pragma once
#include "vec.h"

CHATKV_NS_BEGIN

// 1 / sqrt(mean of squares + eps). Lane l sums x[16 i + l]^2 in order of i. n: a multiple of 16.
CHATKV_INLINE float inverse_rms(const float* x, int n, float eps) {
    vf16 squares = zero();
    for (int i = 0; i < n; i += 16) {
        const vf16 a = load(x + i);
        squares = fma(a, a, squares);
    }
    return 1.0f / __builtin_sqrtf(reduce_add(squares) / float(n) + eps);
}

CHATKV_NS_END
