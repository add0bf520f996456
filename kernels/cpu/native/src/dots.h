// Dot products of weight tiles with quantised activations, exact in int32: what instruction sets do differently in
// `linear`. Each file defines
//
//   MAX_ROWS<planes>, MAX_TILES   how much of both the registers hold
//   dots_of_group<format, planes, rows, tiles>(...)
//
// which gives dots[t][m][r] = sum over the group's columns of weight[t][r] * quantum[m]; the weight is q for
// INT4_AFFINE, q - 8 for INT4 and q for INT8. `tile`: first of the tiles, `tile_stride` bytes apart. `quanta`: the
// group's columns of the first row. `sums`: of the group, `sums_stride` apart.
//
// Two planes are twice as many lines to multiply with a piece of a tile that is unpacked once; a row's two products are
// joined in int32, which holds them: 127 * 127 * 32 * 254 < 2^31.
#pragma once
#include "abi.h"
#include "vec.h"

CHATKV_NS_BEGIN

constexpr int HEADER_BYTES[] = {64, 32, 32}; // of a tile, by format: fp16 scales, and minimums

struct Quanta {
    const int8_t* high;
    const int8_t* low; // of two planes
    int64_t stride;    // bytes from row to row
};

// Lines 0 .. rows - 1 are the high plane's, those after them the low plane's.
template <int rows> CHATKV_INLINE const int8_t* line_of(const Quanta& quanta, int line) {
    return line < rows ? quanta.high + line * quanta.stride : quanta.low + (line - rows) * quanta.stride;
}

CHATKV_INLINE int32_t four_bytes(const int8_t* from) {
    int32_t four;
    memcpy(&four, from, 4);
    return four;
}

CHATKV_NS_END

#if defined(CHATKV_AVX512)
#include "dots_avx512.h"
#elif defined(CHATKV_AVX2)
#include "dots_avx2.h"
#elif defined(CHATKV_NEON)
#include "dots_neon.h"
#else
#include "dots_scalar.h"
#endif
