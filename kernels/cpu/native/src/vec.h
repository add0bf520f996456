// Sixteen lanes of float (vf16) or int32 (vi16), with the same bits on every instruction set. Four files provide them:
// AVX-512, AVX2 (two halves), NEON (four quarters) and plain loops, which read as the specification of the others.
//
//   load, store, load_half, store_half (round to nearest even), load_int8, store_int8, splat, iota
//   + - * / negation, fma(a, b, c) = a * b + c with one rounding, sqrt, larger(a, b) = a > b ? a : b
//   less, equal -> vm16; select(mask, a, b) = mask ? a : b
//   to_int (to nearest even, |x| < 2^22), to_float, bits, from_bits, shift_left<n>, shift_right<n> (of the sign)
//   lower(a, b), higher(a, b) of integers
//
// Everything stands in the variant's own namespace and is inlined: a function that two variants shared by name would
// be one function to the linker, which might pick the copy with instructions that this machine lacks.
#pragma once
#include <cstdint>
#include <cstring>

#ifndef CHATKV_VARIANT
#error "compile with -DCHATKV_VARIANT=scalar, avx2, avx512 or neon"
#endif

#define CHATKV_NS_BEGIN namespace chatkv { namespace CHATKV_VARIANT {
#define CHATKV_NS_END } }
#define CHATKV_INLINE static inline __attribute__((always_inline))

#if defined(CHATKV_AVX512)
#include "vec_avx512.h"
#elif defined(CHATKV_AVX2)
#include "vec_avx2.h"
#elif defined(CHATKV_NEON)
#include "vec_neon.h"
#else
#include "vec_scalar.h"
#endif

CHATKV_NS_BEGIN

CHATKV_INLINE vf16 zero() { return splat(0.0f); }
CHATKV_INLINE vf16 operator-(vf16 a) { return from_bits(bits(a) ^ splat(INT32_MIN)); }
CHATKV_INLINE vf16 absolute(vf16 a) { return from_bits(bits(a) & splat(INT32_MAX)); }

// The first `count` lanes alone are written.
CHATKV_INLINE void store_first(float* to, vf16 a, int count) {
    float lanes[16];
    store(lanes, a);
    memcpy(to, lanes, sizeof(float) * size_t(count));
}

CHATKV_NS_END
