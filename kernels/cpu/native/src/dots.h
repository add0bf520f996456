// Dot products of weight tiles with quantised activations, exact in int32: what instruction sets do differently in
// `linear`. Each file defines
//
//   MAX_ROWS, MAX_TILES   how much of both the registers hold
//   dots_of_group<format, rows, tiles>(...)
//
// which gives dots[t][m][r] = sum over the group's columns of weight[t][r] * quantum[m]; the weight is q for
// INT4_AFFINE, q - 8 for INT4 and q for INT8. `tile`: first of the tiles, `tile_stride` bytes apart. `quanta`: the
// group's columns of the first row, `quanta_stride` bytes from row to row. `sums`: of the group, `sums_stride` apart.
#pragma once
#include "abi.h"
#include "vec.h"

CHATKV_NS_BEGIN

constexpr int HEADER_BYTES[] = {64, 32, 32}; // of a tile, by format: fp16 scales, and minimums

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
