// vec.h by AVX-512: a register holds the sixteen lanes.
#pragma once
#include <immintrin.h>

CHATKV_NS_BEGIN

struct vf16 {
    __m512 v;
};
struct vi16 {
    __m512i v;
};
struct vm16 {
    __mmask16 v;
};

CHATKV_INLINE vf16 load(const float* from) { return {_mm512_loadu_ps(from)}; }
CHATKV_INLINE vi16 load(const int32_t* from) { return {_mm512_loadu_si512(from)}; }
CHATKV_INLINE vi16 load_int8(const int8_t* from) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}
CHATKV_INLINE vf16 load_half(const void* from) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)))};
}
CHATKV_INLINE void store(float* to, vf16 a) { _mm512_storeu_ps(to, a.v); }
CHATKV_INLINE void store(int32_t* to, vi16 a) { _mm512_storeu_si512(to, a.v); }
CHATKV_INLINE void store_int8(int8_t* to, vi16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(a.v));
}
CHATKV_INLINE void store_half(void* to, vf16 a) {
    _mm256_storeu_si256(
        static_cast<__m256i*>(to), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

CHATKV_INLINE vf16 splat(float a) { return {_mm512_set1_ps(a)}; }
CHATKV_INLINE vi16 splat(int32_t a) { return {_mm512_set1_epi32(a)}; }
CHATKV_INLINE vi16 iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }

CHATKV_INLINE vf16 operator+(vf16 a, vf16 b) { return {_mm512_add_ps(a.v, b.v)}; }
CHATKV_INLINE vf16 operator-(vf16 a, vf16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
CHATKV_INLINE vf16 operator*(vf16 a, vf16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
CHATKV_INLINE vf16 operator/(vf16 a, vf16 b) { return {_mm512_div_ps(a.v, b.v)}; }
CHATKV_INLINE vf16 fma(vf16 a, vf16 b, vf16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
CHATKV_INLINE vf16 larger(vf16 a, vf16 b) { return {_mm512_max_ps(a.v, b.v)}; }
CHATKV_INLINE vf16 sqrt(vf16 a) { return {_mm512_sqrt_ps(a.v)}; }

CHATKV_INLINE vm16 less(vf16 a, vf16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
CHATKV_INLINE vm16 less(vi16 a, vi16 b) { return {_mm512_cmplt_epi32_mask(a.v, b.v)}; }
CHATKV_INLINE vm16 equal(vf16 a, vf16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
CHATKV_INLINE vf16 select(vm16 mask, vf16 a, vf16 b) { return {_mm512_mask_blend_ps(mask.v, b.v, a.v)}; }

CHATKV_INLINE vi16 bits(vf16 a) { return {_mm512_castps_si512(a.v)}; }
CHATKV_INLINE vf16 from_bits(vi16 a) { return {_mm512_castsi512_ps(a.v)}; }
CHATKV_INLINE vf16 to_float(vi16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
CHATKV_INLINE vi16 to_int(vf16 a) { return {_mm512_cvtps_epi32(a.v)}; }

CHATKV_INLINE vi16 operator+(vi16 a, vi16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
CHATKV_INLINE vi16 operator-(vi16 a, vi16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
CHATKV_INLINE vi16 operator&(vi16 a, vi16 b) { return {_mm512_and_si512(a.v, b.v)}; }
CHATKV_INLINE vi16 operator^(vi16 a, vi16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
CHATKV_INLINE vi16 lower(vi16 a, vi16 b) { return {_mm512_min_epi32(a.v, b.v)}; }
CHATKV_INLINE vi16 higher(vi16 a, vi16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int n> CHATKV_INLINE vi16 shift_left(vi16 a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> CHATKV_INLINE vi16 shift_right(vi16 a) { return {_mm512_srai_epi32(a.v, n)}; }

CHATKV_INLINE float reduce_add(vf16 a) {
    const __m256 of8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 of4 = _mm_add_ps(_mm256_castps256_ps128(of8), _mm256_extractf128_ps(of8, 1));
    const __m128 of2 = _mm_add_ps(of4, _mm_movehl_ps(of4, of4));
    return _mm_cvtss_f32(_mm_add_ss(of2, _mm_movehdup_ps(of2)));
}
CHATKV_INLINE float reduce_larger(vf16 a) {
    const __m256 of8 = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 of4 = _mm_max_ps(_mm256_castps256_ps128(of8), _mm256_extractf128_ps(of8, 1));
    const __m128 of2 = _mm_max_ps(of4, _mm_movehl_ps(of4, of4));
    return _mm_cvtss_f32(_mm_max_ss(of2, _mm_movehdup_ps(of2)));
}
CHATKV_INLINE int32_t reduce_add(vi16 a) { return _mm512_reduce_add_epi32(a.v); }
CHATKV_INLINE int32_t reduce_max(vi16 a) { return _mm512_reduce_max_epi32(a.v); }

CHATKV_NS_END
