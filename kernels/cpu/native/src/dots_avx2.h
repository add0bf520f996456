// dots.h by AVX2: products of neighbouring columns are added in 16 bits, then in 32.
#pragma once

CHATKV_NS_BEGIN

template <int planes> constexpr int MAX_ROWS = 4 / planes;
constexpr int MAX_TILES = 1;

// Eight rows of the tile, `packed` from their first byte on. The loops stay loops: unrolled, gcc keeps the other half's
// broadcasts and all products at once, far more than 16 registers hold, and loses a third of the speed.
template <int format, int planes, int rows>
CHATKV_INLINE void dots_of_half(const uint8_t* packed, const Quanta& quanta, __m256i (&joined)[rows]) {
    constexpr int lines = planes * rows;
    const __m256i ones = _mm256_set1_epi16(1), low_half = _mm256_set1_epi8(15);
    __m256i dots[lines];
    for (int m = 0; m < lines; m++) dots[m] = _mm256_setzero_si256();
    if (format == INT8) {
#pragma GCC unroll 1
        for (int c = 0; c < 8; c++) {
            // The instruction wants one factor without a sign: the weight's goes to the activation.
            const __m256i weights = load_256(packed + 64 * c), magnitudes = _mm256_abs_epi8(weights);
            for (int m = 0; m < lines; m++) {
                const __m256i x = _mm256_set1_epi32(four_bytes(line_of<rows>(quanta, m) + 4 * c));
                // At most 2 * 128 * 127 in 16 bits.
                const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(x, weights));
                dots[m] = _mm256_add_epi32(dots[m], _mm256_madd_epi16(pairs, ones));
            }
        }
    } else {
#pragma GCC unroll 1
        for (int c = 0; c < 4; c++) {
            const __m256i bytes = load_256(packed + 64 * c);
            const __m256i first = _mm256_and_si256(bytes, low_half);
            const __m256i second = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low_half);
            for (int m = 0; m < lines; m++) {
                const int8_t* x = line_of<rows>(quanta, m) + 8 * c;
                const __m256i x_first = _mm256_set1_epi32(four_bytes(x));
                const __m256i x_second = _mm256_set1_epi32(four_bytes(x + 4));
                // A 16-bit sum gets 16 products of at most 15 * 127: it holds them all.
                dots[m] = _mm256_add_epi16(dots[m], _mm256_maddubs_epi16(first, x_first));
                dots[m] = _mm256_add_epi16(dots[m], _mm256_maddubs_epi16(second, x_second));
            }
        }
        for (int m = 0; m < lines; m++) dots[m] = _mm256_madd_epi16(dots[m], ones);
    }
    for (int m = 0; m < rows; m++) {
        joined[m] = dots[m];
        if (planes == 1) continue;
        const __m256i high = _mm256_sub_epi32(_mm256_slli_epi32(dots[m], 8), _mm256_slli_epi32(dots[m], 1));
        joined[m] = _mm256_add_epi32(high, dots[lines - rows + m]);
    }
}

template <int format, int planes, int rows, int tiles>
CHATKV_INLINE void dots_of_group(
    const uint8_t* tile, int64_t, const Quanta& quanta, const int32_t* sums, int64_t sums_stride,
    vi16 (&dots)[tiles][rows]) {
    __m256i half[rows];
    dots_of_half<format, planes>(tile + HEADER_BYTES[format], quanta, half);
    for (int m = 0; m < rows; m++) dots[0][m].lo = half[m];
    dots_of_half<format, planes>(tile + HEADER_BYTES[format] + 32, quanta, half);
    for (int m = 0; m < rows; m++) dots[0][m].hi = half[m];
    if (format != INT4) return;
    for (int m = 0; m < rows; m++) dots[0][m] = dots[0][m] - splat(8 * sums[m * sums_stride]);
}

CHATKV_NS_END
