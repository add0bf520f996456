// Quantised activations times a quantised matrix.
//
// With few rows the weights are read once, at the speed of memory. With many, a block of MAX_ROWS rows and MAX_TILES
// tiles has all its sums in registers, each piece of a tile that is unpacked serves all rows of the block, and each
// block fetches its share of the tiles that come next, so that memory and arithmetic are busy at the same time.
// However rows and tiles are cut, an output is the same sequence of roundings: exact dot products of the groups, added
// in order of the groups.
#include "dots.h"
#include "variant.h"

CHATKV_NS_BEGIN

namespace {

constexpr int STREAM_AHEAD_BYTES = 8192; // measured: 4096 and 16384 are slower
constexpr int CACHE_LINE = 64;

// What a block fetches for those after it: `bytes` for each group, from `next` on.
struct Prefetch {
    const uint8_t* next;
    int64_t bytes;
};

// The outputs of one row and one tile.
void finish_outputs(const Matrix& matrix, int row, int tile, vf16 sum, const Register& target, bool adds) {
    const int first = tile * TILE, count = matrix.num_rows - first;
    float* to = target.data + row * target.stride + matrix.first_output + first;
    if (count >= TILE) {
        const vf16 y = matrix.bias ? sum + load(matrix.bias + first) : sum;
        store(to, adds ? load(to) + y : y);
        return;
    }
    float lanes[TILE];
    store(lanes, sum);
    for (int i = 0; i < count; i++) {
        const float y = matrix.bias ? lanes[i] + matrix.bias[first + i] : lanes[i];
        to[i] = adds ? to[i] + y : y;
    }
}

template <int format, int planes, int rows, int tiles>
void linear_block(
    const Matrix& matrix, const Activations& from, int row, int tile, Prefetch prefetch, const Register& target,
    bool adds) {
    constexpr int tile_bytes = TILE_BYTES[format];
    const int64_t num_columns = matrix.num_columns, num_groups = num_columns / GROUP;
    const int64_t tile_stride = num_groups * tile_bytes;
    const uint8_t* weights = matrix.tiles + tile * tile_stride;
    Quanta quanta = {from.quanta + row * num_columns, nullptr, num_columns};
    if (planes == 2) quanta.low = from.low + row * num_columns;
    const float *scales = from.scales + row * num_groups, *offsets = from.offsets + row * num_groups;
    const int32_t* sums = from.sums + row * num_groups;
    vf16 acc[tiles][rows];
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < rows; m++) acc[t][m] = zero();
    for (int64_t g = 0; g < num_groups; g++) {
        for (int64_t i = 0; i < prefetch.bytes; i += CACHE_LINE) __builtin_prefetch(prefetch.next + i);
        prefetch.next += prefetch.bytes;
        vi16 dots[tiles][rows];
        dots_of_group<format, planes>(weights, tile_stride, quanta, sums + g, num_groups, dots);
        for (int t = 0; t < tiles; t++) {
            const vf16 scale = load_half(weights + t * tile_stride);
            for (int m = 0; m < rows; m++)
                acc[t][m] = fma(scale, to_float(dots[t][m]) * splat(scales[m * num_groups + g]), acc[t][m]);
            if (format != INT4_AFFINE) continue;
            const vf16 minimum = load_half(weights + t * tile_stride + 32);
            for (int m = 0; m < rows; m++)
                acc[t][m] = fma(minimum, splat(offsets[m * num_groups + g]), acc[t][m]);
        }
        weights += tile_bytes;
        quanta.high += GROUP;
        if (planes == 2) quanta.low += GROUP;
    }
    for (int t = 0; t < tiles; t++)
        for (int m = 0; m < rows; m++) finish_outputs(matrix, row + m, tile + t, acc[t][m], target, adds);
}

// A block of `num_rows` rows, 1 .. rows.
template <int format, int planes, int tiles, int rows = MAX_ROWS<planes>>
void linear_block_of(
    int num_rows, const Matrix& matrix, const Activations& from, int row, int tile, Prefetch prefetch,
    const Register& target, bool adds) {
    if constexpr (rows > 1) {
        if (num_rows < rows) {
            linear_block_of<format, planes, tiles, rows - 1>(num_rows, matrix, from, row, tile, prefetch, target, adds);
            return;
        }
    }
    linear_block<format, planes, rows, tiles>(matrix, from, row, tile, prefetch, target, adds);
}

template <int format, int planes>
void linear_of(
    const Matrix& matrix, const Activations& from, int row_begin, int row_end, int tile_begin, int tile_end,
    const Register& target, bool adds) {
    constexpr int max_rows = MAX_ROWS<planes>;
    const int num_rows = row_end - row_begin, num_blocks = (num_rows + max_rows - 1) / max_rows;
    const int64_t num_groups = matrix.num_columns / GROUP, tile_stride = num_groups * TILE_BYTES[format];
    for (int tile = tile_begin; tile < tile_end;) {
        // A single block is bound by memory, which is fastest in one stream.
        const int num_tiles = num_blocks == 1 || tile_end - tile < MAX_TILES ? 1 : MAX_TILES;
        const int64_t bytes_per_group = (num_tiles * TILE_BYTES[format] + num_blocks - 1) / num_blocks;
        const int64_t ahead = num_blocks == 1 ? STREAM_AHEAD_BYTES : num_tiles * tile_stride;
        Prefetch prefetch = {matrix.tiles + tile * tile_stride + ahead, bytes_per_group};
        for (int block = 0; block < num_blocks; block++) { // of nearly equal sizes
            const int row = row_begin + num_rows * block / num_blocks;
            const int next_row = row_begin + num_rows * (block + 1) / num_blocks;
            if (num_tiles == 1)
                linear_block_of<format, planes, 1>(next_row - row, matrix, from, row, tile, prefetch, target, adds);
            else
                linear_block_of<format, planes, MAX_TILES>(
                    next_row - row, matrix, from, row, tile, prefetch, target, adds);
            prefetch.next += num_groups * bytes_per_group;
        }
        tile += num_tiles;
    }
}

template <int format>
void linear_in_planes(
    const Matrix& matrix, const Activations& from, int row_begin, int row_end, int tile_begin, int tile_end,
    const Register& target, bool adds) {
    if (from.low == nullptr)
        linear_of<format, 1>(matrix, from, row_begin, row_end, tile_begin, tile_end, target, adds);
    else
        linear_of<format, 2>(matrix, from, row_begin, row_end, tile_begin, tile_end, target, adds);
}

} // namespace

void linear(
    const Matrix& matrix, const Activations& from, int row_begin, int row_end, int tile_begin, int tile_end,
    const Register& target, bool adds) {
    switch (matrix.format) {
    case INT4_AFFINE:
        linear_in_planes<INT4_AFFINE>(matrix, from, row_begin, row_end, tile_begin, tile_end, target, adds);
        break;
    case INT4:
        linear_in_planes<INT4>(matrix, from, row_begin, row_end, tile_begin, tile_end, target, adds);
        break;
    default:
        linear_in_planes<INT8>(matrix, from, row_begin, row_end, tile_begin, tile_end, target, adds);
    }
}

CHATKV_NS_END
