// vec.h by AVX2: two registers hold eight lanes each.
#pragma once
#include <immintrin.h>

CHATKV_NS_BEGIN

struct vf16 {
    __m256 lo, hi;
};
struct vi16 {
    __m256i lo, hi;
};
struct vm16 {
    __m256 lo, hi;
};

CHATKV_INLINE __m256i load_256(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
CHATKV_INLINE __m128i load_128(const void* from) { return _mm_loadu_si128(static_cast<const __m128i*>(from)); }

CHATKV_INLINE vf16 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
CHATKV_INLINE vi16 load(const int32_t* from) { return {load_256(from), load_256(from + 8)}; }
CHATKV_INLINE vi16 load_int8(const int8_t* from) {
    const __m128i quanta = load_128(from);
    return {_mm256_cvtepi8_epi32(quanta), _mm256_cvtepi8_epi32(_mm_srli_si128(quanta, 8))};
}
CHATKV_INLINE vf16 load_half(const void* from) {
    const __m128i* halves = static_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
CHATKV_INLINE void store(float* to, vf16 a) {
    _mm256_storeu_ps(to, a.lo);
    _mm256_storeu_ps(to + 8, a.hi);
}
CHATKV_INLINE void store(int32_t* to, vi16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), a.hi);
}
CHATKV_INLINE void store_int8(int8_t* to, vi16 a) {
    // Packing works within 128 bits: the words come out as lanes 0-3 8-11 | 4-7 12-15.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), _MM_SHUFFLE(3, 1, 2, 0));
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to),
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
CHATKV_INLINE void store_half(void* to, vf16 a) {
    __m128i* halves = static_cast<__m128i*>(to);
    _mm_storeu_si128(halves, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128(halves + 1, _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

CHATKV_INLINE vf16 splat(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
CHATKV_INLINE vi16 splat(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
CHATKV_INLINE vi16 iota() {
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}

#define CHATKV_HALVES2(f) {f(a.lo, b.lo), f(a.hi, b.hi)}
CHATKV_INLINE vf16 operator+(vf16 a, vf16 b) { return CHATKV_HALVES2(_mm256_add_ps); }
CHATKV_INLINE vf16 operator-(vf16 a, vf16 b) { return CHATKV_HALVES2(_mm256_sub_ps); }
CHATKV_INLINE vf16 operator*(vf16 a, vf16 b) { return CHATKV_HALVES2(_mm256_mul_ps); }
CHATKV_INLINE vf16 operator/(vf16 a, vf16 b) { return CHATKV_HALVES2(_mm256_div_ps); }
CHATKV_INLINE vf16 fma(vf16 a, vf16 b, vf16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
CHATKV_INLINE vf16 select(vm16 mask, vf16 a, vf16 b) {
    return {_mm256_blendv_ps(b.lo, a.lo, mask.lo), _mm256_blendv_ps(b.hi, a.hi, mask.hi)};
}
CHATKV_INLINE vf16 larger(vf16 a, vf16 b) { return CHATKV_HALVES2(_mm256_max_ps); }
CHATKV_INLINE vf16 sqrt(vf16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }

CHATKV_INLINE vm16 less(vf16 a, vf16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ)};
}
CHATKV_INLINE vm16 less(vi16 a, vi16 b) {
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(b.lo, a.lo)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(b.hi, a.hi))};
}
CHATKV_INLINE vm16 equal(vf16 a, vf16 b) {
    return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)};
}

CHATKV_INLINE vi16 bits(vf16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
CHATKV_INLINE vf16 from_bits(vi16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
CHATKV_INLINE vf16 to_float(vi16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
CHATKV_INLINE vi16 to_int(vf16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }

CHATKV_INLINE vi16 operator+(vi16 a, vi16 b) { return CHATKV_HALVES2(_mm256_add_epi32); }
CHATKV_INLINE vi16 operator-(vi16 a, vi16 b) { return CHATKV_HALVES2(_mm256_sub_epi32); }
CHATKV_INLINE vi16 operator&(vi16 a, vi16 b) { return CHATKV_HALVES2(_mm256_and_si256); }
CHATKV_INLINE vi16 operator^(vi16 a, vi16 b) { return CHATKV_HALVES2(_mm256_xor_si256); }
CHATKV_INLINE vi16 lower(vi16 a, vi16 b) { return CHATKV_HALVES2(_mm256_min_epi32); }
CHATKV_INLINE vi16 higher(vi16 a, vi16 b) { return CHATKV_HALVES2(_mm256_max_epi32); }
#undef CHATKV_HALVES2
template <int n> CHATKV_INLINE vi16 shift_left(vi16 a) {
    return {_mm256_slli_epi32(a.lo, n), _mm256_slli_epi32(a.hi, n)};
}
template <int n> CHATKV_INLINE vi16 shift_right(vi16 a) {
    return {_mm256_srai_epi32(a.lo, n), _mm256_srai_epi32(a.hi, n)};
}

CHATKV_INLINE float reduce_add(vf16 a) {
    const __m256 of8 = _mm256_add_ps(a.lo, a.hi);
    const __m128 of4 = _mm_add_ps(_mm256_castps256_ps128(of8), _mm256_extractf128_ps(of8, 1));
    const __m128 of2 = _mm_add_ps(of4, _mm_movehl_ps(of4, of4));
    return _mm_cvtss_f32(_mm_add_ss(of2, _mm_movehdup_ps(of2)));
}
CHATKV_INLINE float reduce_larger(vf16 a) {
    const __m256 of8 = _mm256_max_ps(a.lo, a.hi);
    const __m128 of4 = _mm_max_ps(_mm256_castps256_ps128(of8), _mm256_extractf128_ps(of8, 1));
    const __m128 of2 = _mm_max_ps(of4, _mm_movehl_ps(of4, of4));
    return _mm_cvtss_f32(_mm_max_ss(of2, _mm_movehdup_ps(of2)));
}
CHATKV_INLINE int32_t reduce_add(vi16 a) {
    const __m256i of8 = _mm256_add_epi32(a.lo, a.hi);
    const __m128i of4 = _mm_add_epi32(_mm256_castsi256_si128(of8), _mm256_extracti128_si256(of8, 1));
    const __m128i of2 = _mm_add_epi32(of4, _mm_shuffle_epi32(of4, _MM_SHUFFLE(3, 2, 3, 2)));
    return _mm_cvtsi128_si32(_mm_add_epi32(of2, _mm_shuffle_epi32(of2, _MM_SHUFFLE(1, 1, 1, 1))));
}
CHATKV_INLINE int32_t reduce_max(vi16 a) {
    const __m256i of8 = _mm256_max_epi32(a.lo, a.hi);
    const __m128i of4 = _mm_max_epi32(_mm256_castsi256_si128(of8), _mm256_extracti128_si256(of8, 1));
    const __m128i of2 = _mm_max_epi32(of4, _mm_shuffle_epi32(of4, _MM_SHUFFLE(3, 2, 3, 2)));
    return _mm_cvtsi128_si32(_mm_max_epi32(of2, _mm_shuffle_epi32(of2, _MM_SHUFFLE(1, 1, 1, 1))));
}

CHATKV_NS_END
