// dots.h by NEON's dot product of four columns.
#pragma once

CHATKV_NS_BEGIN

template <int planes> constexpr int MAX_ROWS = 4;
constexpr int MAX_TILES = 1;

template <int format, int planes, int rows, int tiles>
CHATKV_INLINE void dots_of_group(
    const uint8_t* tile, int64_t, const Quanta& quanta, const int32_t* sums, int64_t sums_stride,
    vi16 (&dots)[tiles][rows]) {
    constexpr int lines = planes * rows;
    const uint8_t* packed = tile + HEADER_BYTES[format];
    for (int quarter = 0; quarter < 4; quarter++) {
        int32x4_t sum[lines];
        for (int m = 0; m < lines; m++) sum[m] = vdupq_n_s32(0);
        for (int c = 0; c < (format == INT8 ? 8 : 4); c++) {
            const uint8x16_t bytes = vld1q_u8(packed + 64 * c + 16 * quarter);
            for (int m = 0; m < lines; m++) {
                const int8_t* x = line_of<rows>(quanta, m) + (format == INT8 ? 4 : 8) * c;
                const int8x16_t x_first = vreinterpretq_s8_s32(vdupq_n_s32(four_bytes(x)));
                if (format == INT8) {
                    sum[m] = vdotq_s32(sum[m], vreinterpretq_s8_u8(bytes), x_first);
                    continue;
                }
                const int8x16_t x_second = vreinterpretq_s8_s32(vdupq_n_s32(four_bytes(x + 4)));
                sum[m] = vdotq_s32(sum[m], vreinterpretq_s8_u8(vandq_u8(bytes, vdupq_n_u8(15))), x_first);
                sum[m] = vdotq_s32(sum[m], vreinterpretq_s8_u8(vshrq_n_u8(bytes, 4)), x_second);
            }
        }
        for (int m = 0; m < rows; m++) {
            if (planes == 2) sum[m] = vmlaq_n_s32(sum[lines - rows + m], sum[m], LOW_QUANTA);
            if (format == INT4) sum[m] = vsubq_s32(sum[m], vdupq_n_s32(8 * sums[m * sums_stride]));
            dots[0][m].q[quarter] = sum[m];
        }
    }
}

CHATKV_NS_END
