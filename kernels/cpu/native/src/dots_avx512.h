// dots.h by AVX-512 VNNI: one instruction adds the products of four columns for all rows of a tile.
#pragma once

CHATKV_NS_BEGIN

// For two tiles 12 integer and 12 float sums, of 32 registers; of two planes 16 and 8.
template <int planes> constexpr int MAX_ROWS = planes == 1 ? 6 : 4;
constexpr int MAX_TILES = 2; // that share each broadcast of activations

// The instruction takes weights without a sign: q + 128 for INT8. What that adds is a multiple of the quanta's sum.
template <int format> constexpr int ZERO_POINT_LOG2 = format == INT8 ? 7 : 3;

template <int format, int planes, int rows, int tiles>
CHATKV_INLINE void dots_of_group(
    const uint8_t* tile, int64_t tile_stride, const Quanta& quanta, const int32_t* sums, int64_t sums_stride,
    vi16 (&dots)[tiles][rows]) {
    constexpr int num_chunks = format == INT8 ? 8 : 4, lines = planes * rows;
    const uint8_t* packed = tile + HEADER_BYTES[format];
    __m512i products[tiles][lines];
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < lines; m++) products[t][m] = _mm512_setzero_si512();
#pragma GCC unroll 8 // gcc gives up on the longest, and then keeps nothing in registers
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
        for (int m = 0; m < lines; m++) {
            const int8_t* x = line_of<rows>(quanta, m) + (format == INT8 ? 4 : 8) * c;
            const __m512i x_first = _mm512_set1_epi32(four_bytes(x));
            for (int t = 0; t < tiles; t++) products[t][m] = _mm512_dpbusd_epi32(products[t][m], first[t], x_first);
            if (format == INT8) continue;
            const __m512i x_second = _mm512_set1_epi32(four_bytes(x + 4));
            for (int t = 0; t < tiles; t++) products[t][m] = _mm512_dpbusd_epi32(products[t][m], second[t], x_second);
        }
    }
    for (int m = 0; m < rows; m++) {
        for (int t = 0; t < tiles; t++) {
            const vi16 high = {products[t][m]}, low = {products[t][lines - rows + m]};
            dots[t][m] = planes == 1 ? high : low + (shift_left<8>(high) - shift_left<1>(high));
        }
        if (format == INT4_AFFINE) continue;
        const vi16 excess = shift_left<ZERO_POINT_LOG2<format>>(splat(sums[m * sums_stride]));
        for (int t = 0; t < tiles; t++) dots[t][m] = dots[t][m] - excess;
    }
}

CHATKV_NS_END
