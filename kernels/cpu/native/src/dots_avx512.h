// dots.h by AVX-512 VNNI: one instruction adds the products of four columns for all rows of a tile.
#pragma once

CHATKV_NS_BEGIN

constexpr int MAX_ROWS = 6;  // 12 integer and 12 float sums for two tiles, of 32 registers
constexpr int MAX_TILES = 2; // that share each broadcast of activations

// The instruction takes weights without a sign: q + 128 for INT8. What that adds is a multiple of the quanta's sum.
template <int format> constexpr int ZERO_POINT_LOG2 = format == INT8 ? 7 : 3;

template <int format, int rows, int tiles>
CHATKV_INLINE void dots_of_group(
    const uint8_t* tile, int64_t tile_stride, const int8_t* quanta, int64_t quanta_stride, const int32_t* sums,
    int64_t sums_stride, vi16 (&dots)[tiles][rows]) {
    constexpr int num_chunks = format == INT8 ? 8 : 4;
    const uint8_t* packed = tile + HEADER_BYTES[format];
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < rows; m++) dots[t][m] = {_mm512_setzero_si512()};
    for (int c = 0; c < num_chunks; c++) {
        __m512i first[tiles], second[tiles]; // columns 8 c .. 8 c + 3 and 8 c + 4 .. 8 c + 7; INT8: 4 c .. 4 c + 3
        for (int t = 0; t < tiles; t++) {
            const __m512i bytes = _mm512_loadu_si512(packed + t * tile_stride + 64 * c);
            if (format == INT8) {
                first[t] = _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
            } else {
                first[t] = _mm512_and_si512(bytes, _mm512_set1_epi8(15));
                second[t] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), _mm512_set1_epi8(15));
            }
        }
        for (int m = 0; m < rows; m++) {
            const int8_t* x = quanta + m * quanta_stride + (format == INT8 ? 4 : 8) * c;
            const __m512i x_first = _mm512_set1_epi32(four_bytes(x));
            for (int t = 0; t < tiles; t++) dots[t][m].v = _mm512_dpbusd_epi32(dots[t][m].v, first[t], x_first);
            if (format == INT8) continue;
            const __m512i x_second = _mm512_set1_epi32(four_bytes(x + 4));
            for (int t = 0; t < tiles; t++) dots[t][m].v = _mm512_dpbusd_epi32(dots[t][m].v, second[t], x_second);
        }
    }
    if (format == INT4_AFFINE) return;
    for (int m = 0; m < rows; m++) {
        const vi16 excess = shift_left<ZERO_POINT_LOG2<format>>(splat(sums[m * sums_stride]));
        for (int t = 0; t < tiles; t++) dots[t][m] = dots[t][m] - excess;
    }
}

CHATKV_NS_END
