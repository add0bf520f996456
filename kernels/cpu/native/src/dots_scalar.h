// dots.h by plain loops.
#pragma once

CHATKV_NS_BEGIN

template <int planes> constexpr int MAX_ROWS = 1;
constexpr int MAX_TILES = 1;

template <int format, int planes, int rows, int tiles>
CHATKV_INLINE void dots_of_group(
    const uint8_t* tile, int64_t, const Quanta& quanta, const int32_t*, int64_t, vi16 (&dots)[tiles][rows]) {
    const uint8_t* packed = tile + HEADER_BYTES[format];
    int32_t sums[16] = {};
    for (int r = 0; r < 16; r++) {
        for (int i = 0; i < GROUP; i++) {
            int weight;
            if (format == INT8) {
                weight = int8_t(packed[i / 4 * 64 + 4 * r + i % 4]);
            } else {
                const uint8_t both = packed[i / 8 * 64 + 4 * r + i % 4];
                weight = (i % 8 < 4 ? both & 15 : both >> 4) - (format == INT4 ? 8 : 0);
            }
            sums[r] += weight * (planes == 1 ? quanta.high[i] : LOW_QUANTA * quanta.high[i] + quanta.low[i]);
        }
    }
    dots[0][0] = load(sums);
}

CHATKV_NS_END
