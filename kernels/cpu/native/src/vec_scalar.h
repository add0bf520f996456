// vec.h by plain loops.
#pragma once

CHATKV_NS_BEGIN

struct vf16 {
    float lane[16];
};
struct vi16 {
    int32_t lane[16];
};
struct vm16 {
    bool lane[16];
};

CHATKV_INLINE int32_t bits_of(float a) {
    int32_t b;
    memcpy(&b, &a, 4);
    return b;
}
CHATKV_INLINE float float_of(int32_t a) {
    float b;
    memcpy(&b, &a, 4);
    return b;
}

CHATKV_INLINE float float_from_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000) << 16;
    const uint32_t rest = half & 0x7fff;
    if (rest >= 0x7c00) {  // infinity; NaN, made quiet
        return float_of(int32_t(sign | 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000 : 0)));
    }
    // A half's exponent is 112 less than a float's. The product is exact, also for subnormal halves.
    return float_of(int32_t(sign | bits_of(float_of(int32_t(rest << 13)) * 0x1p112f)));
}

CHATKV_INLINE uint16_t half_from_float(float a) {
    const uint32_t all = uint32_t(bits_of(a));
    const uint32_t sign = all >> 16 & 0x8000;
    const uint32_t rest = all & 0x7fffffff;
    if (rest > 0x7f800000) return uint16_t(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) return uint16_t(sign | 0x7c00);  // 65520 and more round to infinity
    if (rest < 0x38800000) {  // subnormal: the sum's last bit is worth 2^-24, so the hardware's rounding is ours
        return uint16_t(sign | uint32_t(bits_of(float_of(int32_t(rest)) + 0.5f) - bits_of(0.5f)));
    }
    const uint32_t to_even = 0xfff + (rest >> 13 & 1);
    return uint16_t(sign | (rest + to_even - (112u << 23)) >> 13);
}

#define CHATKV_LANES for (int i = 0; i < 16; i++)
#define CHATKV_EACH(type, expression) \
    type r; \
    CHATKV_LANES r.lane[i] = (expression); \
    return r

CHATKV_INLINE vf16 load(const float* from) { CHATKV_EACH(vf16, from[i]); }
CHATKV_INLINE vi16 load(const int32_t* from) { CHATKV_EACH(vi16, from[i]); }
CHATKV_INLINE vi16 load_int8(const int8_t* from) { CHATKV_EACH(vi16, from[i]); }
CHATKV_INLINE vf16 load_half(const void* from) {
    uint16_t halves[16];
    memcpy(halves, from, 32);
    CHATKV_EACH(vf16, float_from_half(halves[i]));
}
CHATKV_INLINE void store(float* to, vf16 a) { CHATKV_LANES to[i] = a.lane[i]; }
CHATKV_INLINE void store(int32_t* to, vi16 a) { CHATKV_LANES to[i] = a.lane[i]; }
CHATKV_INLINE void store_int8(int8_t* to, vi16 a) { CHATKV_LANES to[i] = int8_t(a.lane[i]); }
CHATKV_INLINE void store_half(void* to, vf16 a) {
    uint16_t halves[16];
    CHATKV_LANES halves[i] = half_from_float(a.lane[i]);
    memcpy(to, halves, 32);
}

CHATKV_INLINE vf16 splat(float a) { CHATKV_EACH(vf16, a); }
CHATKV_INLINE vi16 splat(int32_t a) { CHATKV_EACH(vi16, a); }
CHATKV_INLINE vi16 iota() { CHATKV_EACH(vi16, i); }

CHATKV_INLINE vf16 operator+(vf16 a, vf16 b) { CHATKV_EACH(vf16, a.lane[i] + b.lane[i]); }
CHATKV_INLINE vf16 operator-(vf16 a, vf16 b) { CHATKV_EACH(vf16, a.lane[i] - b.lane[i]); }
CHATKV_INLINE vf16 operator*(vf16 a, vf16 b) { CHATKV_EACH(vf16, a.lane[i] * b.lane[i]); }
CHATKV_INLINE vf16 operator/(vf16 a, vf16 b) { CHATKV_EACH(vf16, a.lane[i] / b.lane[i]); }
CHATKV_INLINE vf16 fma(vf16 a, vf16 b, vf16 c) { CHATKV_EACH(vf16, __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i])); }
CHATKV_INLINE vf16 larger(vf16 a, vf16 b) { CHATKV_EACH(vf16, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
CHATKV_INLINE vf16 sqrt(vf16 a) { CHATKV_EACH(vf16, __builtin_sqrtf(a.lane[i])); }

CHATKV_INLINE vm16 less(vf16 a, vf16 b) { CHATKV_EACH(vm16, a.lane[i] < b.lane[i]); }
CHATKV_INLINE vm16 less(vi16 a, vi16 b) { CHATKV_EACH(vm16, a.lane[i] < b.lane[i]); }
CHATKV_INLINE vm16 equal(vf16 a, vf16 b) { CHATKV_EACH(vm16, a.lane[i] == b.lane[i]); }
CHATKV_INLINE vf16 select(vm16 mask, vf16 a, vf16 b) { CHATKV_EACH(vf16, mask.lane[i] ? a.lane[i] : b.lane[i]); }

CHATKV_INLINE vi16 bits(vf16 a) { CHATKV_EACH(vi16, bits_of(a.lane[i])); }
CHATKV_INLINE vf16 from_bits(vi16 a) { CHATKV_EACH(vf16, float_of(a.lane[i])); }
CHATKV_INLINE vf16 to_float(vi16 a) { CHATKV_EACH(vf16, float(a.lane[i])); }
CHATKV_INLINE vi16 to_int(vf16 a) {  // in 1.5 * 2^23 + a, the last bit is worth one
    CHATKV_EACH(vi16, int32_t(uint32_t(bits_of(a.lane[i] + 0x1.8p23f)) - 0x4b400000u));
}

CHATKV_INLINE vi16 operator+(vi16 a, vi16 b) { CHATKV_EACH(vi16, int32_t(uint32_t(a.lane[i]) + uint32_t(b.lane[i]))); }
CHATKV_INLINE vi16 operator-(vi16 a, vi16 b) { CHATKV_EACH(vi16, int32_t(uint32_t(a.lane[i]) - uint32_t(b.lane[i]))); }
CHATKV_INLINE vi16 operator&(vi16 a, vi16 b) { CHATKV_EACH(vi16, a.lane[i] & b.lane[i]); }
CHATKV_INLINE vi16 operator^(vi16 a, vi16 b) { CHATKV_EACH(vi16, a.lane[i] ^ b.lane[i]); }
CHATKV_INLINE vi16 lower(vi16 a, vi16 b) { CHATKV_EACH(vi16, a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]); }
CHATKV_INLINE vi16 higher(vi16 a, vi16 b) { CHATKV_EACH(vi16, a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]); }
template <int n> CHATKV_INLINE vi16 shift_left(vi16 a) { CHATKV_EACH(vi16, int32_t(uint32_t(a.lane[i]) << n)); }
template <int n> CHATKV_INLINE vi16 shift_right(vi16 a) { CHATKV_EACH(vi16, a.lane[i] >> n); }

#undef CHATKV_EACH
#undef CHATKV_LANES

// Lane l takes lane l + 8, then l + 4, l + 2, l + 1: the order of every variant.
CHATKV_INLINE float reduce_add(vf16 a) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a.lane[i] = a.lane[i] + a.lane[i + half];
    return a.lane[0];
}
CHATKV_INLINE float reduce_larger(vf16 a) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) a.lane[i] = a.lane[i] > a.lane[i + half] ? a.lane[i] : a.lane[i + half];
    return a.lane[0];
}
CHATKV_INLINE int32_t reduce_add(vi16 a) {
    uint32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += uint32_t(a.lane[i]);
    return int32_t(sum);
}
CHATKV_INLINE int32_t reduce_max(vi16 a) {
    int32_t highest = a.lane[0];
    for (int i = 1; i < 16; i++)
        if (a.lane[i] > highest) highest = a.lane[i];
    return highest;
}

CHATKV_NS_END
