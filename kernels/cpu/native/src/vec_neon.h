// vec.h by NEON: four registers hold four lanes each.
#pragma once
#include <arm_neon.h>

CHATKV_NS_BEGIN

struct vf16 {
    float32x4_t q[4];
};
struct vi16 {
    int32x4_t q[4];
};
struct vm16 {
    uint32x4_t q[4];
};

#define CHATKV_QUARTERS(type, expression) \
    type r; \
    for (int i = 0; i < 4; i++) r.q[i] = (expression); \
    return r

CHATKV_INLINE vf16 load(const float* from) { CHATKV_QUARTERS(vf16, vld1q_f32(from + 4 * i)); }
CHATKV_INLINE vi16 load(const int32_t* from) { CHATKV_QUARTERS(vi16, vld1q_s32(from + 4 * i)); }
CHATKV_INLINE vi16 load_int8(const int8_t* from) {
    const int8x16_t quanta = vld1q_s8(from);
    const int16x8_t low = vmovl_s8(vget_low_s8(quanta)), high = vmovl_high_s8(quanta);
    return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
}
CHATKV_INLINE vf16 load_half(const void* from) {
    uint16_t halves[16];
    memcpy(halves, from, 32);
    CHATKV_QUARTERS(vf16, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves + 4 * i))));
}
CHATKV_INLINE void store(float* to, vf16 a) {
    for (int i = 0; i < 4; i++) vst1q_f32(to + 4 * i, a.q[i]);
}
CHATKV_INLINE void store(int32_t* to, vi16 a) {
    for (int i = 0; i < 4; i++) vst1q_s32(to + 4 * i, a.q[i]);
}
CHATKV_INLINE void store_int8(int8_t* to, vi16 a) {
    const int16x8_t low = vcombine_s16(vmovn_s32(a.q[0]), vmovn_s32(a.q[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(a.q[2]), vmovn_s32(a.q[3]));
    vst1q_s8(to, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
CHATKV_INLINE void store_half(void* to, vf16 a) {
    uint16_t halves[16];
    for (int i = 0; i < 4; i++) vst1_u16(halves + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.q[i])));
    memcpy(to, halves, 32);
}

CHATKV_INLINE vf16 splat(float a) { CHATKV_QUARTERS(vf16, (static_cast<void>(i), vdupq_n_f32(a))); }
CHATKV_INLINE vi16 splat(int32_t a) { CHATKV_QUARTERS(vi16, (static_cast<void>(i), vdupq_n_s32(a))); }
CHATKV_INLINE vi16 iota() {
    const int32_t first[4] = {0, 1, 2, 3};
    CHATKV_QUARTERS(vi16, vaddq_s32(vld1q_s32(first), vdupq_n_s32(4 * i)));
}

CHATKV_INLINE vf16 operator+(vf16 a, vf16 b) { CHATKV_QUARTERS(vf16, vaddq_f32(a.q[i], b.q[i])); }
CHATKV_INLINE vf16 operator-(vf16 a, vf16 b) { CHATKV_QUARTERS(vf16, vsubq_f32(a.q[i], b.q[i])); }
CHATKV_INLINE vf16 operator*(vf16 a, vf16 b) { CHATKV_QUARTERS(vf16, vmulq_f32(a.q[i], b.q[i])); }
CHATKV_INLINE vf16 operator/(vf16 a, vf16 b) { CHATKV_QUARTERS(vf16, vdivq_f32(a.q[i], b.q[i])); }
CHATKV_INLINE vf16 fma(vf16 a, vf16 b, vf16 c) { CHATKV_QUARTERS(vf16, vfmaq_f32(c.q[i], a.q[i], b.q[i])); }
CHATKV_INLINE vf16 sqrt(vf16 a) { CHATKV_QUARTERS(vf16, vsqrtq_f32(a.q[i])); }

CHATKV_INLINE vm16 less(vf16 a, vf16 b) { CHATKV_QUARTERS(vm16, vcltq_f32(a.q[i], b.q[i])); }
CHATKV_INLINE vm16 less(vi16 a, vi16 b) { CHATKV_QUARTERS(vm16, vcltq_s32(a.q[i], b.q[i])); }
CHATKV_INLINE vm16 equal(vf16 a, vf16 b) { CHATKV_QUARTERS(vm16, vceqq_f32(a.q[i], b.q[i])); }
CHATKV_INLINE vf16 select(vm16 mask, vf16 a, vf16 b) { CHATKV_QUARTERS(vf16, vbslq_f32(mask.q[i], a.q[i], b.q[i])); }
// Not the instruction of that name: of 0 and -0 it takes 0, where the other variants take b.
CHATKV_INLINE vf16 larger(vf16 a, vf16 b) { return select(less(b, a), a, b); }

CHATKV_INLINE vi16 bits(vf16 a) { CHATKV_QUARTERS(vi16, vreinterpretq_s32_f32(a.q[i])); }
CHATKV_INLINE vf16 from_bits(vi16 a) { CHATKV_QUARTERS(vf16, vreinterpretq_f32_s32(a.q[i])); }
CHATKV_INLINE vf16 to_float(vi16 a) { CHATKV_QUARTERS(vf16, vcvtq_f32_s32(a.q[i])); }
CHATKV_INLINE vi16 to_int(vf16 a) { CHATKV_QUARTERS(vi16, vcvtnq_s32_f32(a.q[i])); }

CHATKV_INLINE vi16 operator+(vi16 a, vi16 b) { CHATKV_QUARTERS(vi16, vaddq_s32(a.q[i], b.q[i])); }
CHATKV_INLINE vi16 operator-(vi16 a, vi16 b) { CHATKV_QUARTERS(vi16, vsubq_s32(a.q[i], b.q[i])); }
CHATKV_INLINE vi16 operator&(vi16 a, vi16 b) { CHATKV_QUARTERS(vi16, vandq_s32(a.q[i], b.q[i])); }
CHATKV_INLINE vi16 operator^(vi16 a, vi16 b) { CHATKV_QUARTERS(vi16, veorq_s32(a.q[i], b.q[i])); }
CHATKV_INLINE vi16 lower(vi16 a, vi16 b) { CHATKV_QUARTERS(vi16, vminq_s32(a.q[i], b.q[i])); }
CHATKV_INLINE vi16 higher(vi16 a, vi16 b) { CHATKV_QUARTERS(vi16, vmaxq_s32(a.q[i], b.q[i])); }
template <int n> CHATKV_INLINE vi16 shift_left(vi16 a) { CHATKV_QUARTERS(vi16, vshlq_n_s32(a.q[i], n)); }
template <int n> CHATKV_INLINE vi16 shift_right(vi16 a) { CHATKV_QUARTERS(vi16, vshrq_n_s32(a.q[i], n)); }

#undef CHATKV_QUARTERS

CHATKV_INLINE float reduce_add(vf16 a) {
    const float32x4_t of4 = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
    const float32x2_t of2 = vadd_f32(vget_low_f32(of4), vget_high_f32(of4));
    return vget_lane_f32(of2, 0) + vget_lane_f32(of2, 1);
}
CHATKV_INLINE float reduce_larger(vf16 a) {
    float lanes[16];
    store(lanes, a);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    return lanes[0];
}
CHATKV_INLINE int32_t reduce_add(vi16 a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.q[0], a.q[1]), vaddq_s32(a.q[2], a.q[3])));
}
CHATKV_INLINE int32_t reduce_max(vi16 a) {
    return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.q[0], a.q[1]), vmaxq_s32(a.q[2], a.q[3])));
}

CHATKV_NS_END
