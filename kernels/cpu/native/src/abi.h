// What crosses from Python to the native step: plain structs, mirrored field by field in abi.py.
//
// One call runs a list of operations (`Op`) over the rows of a mixed batch. All memory that results go to is the
// caller's. Rows of a step lie sequence after sequence, as in `kernels.reference_attention.SequenceSpan`.
#pragma once
#include <cstdint>

namespace chatkv {

constexpr int GROUP = 32;     // columns of a weight or an activation that share one scale
constexpr int TILE = 16;      // output rows in a weight tile, lanes of a vector, positions in a block
constexpr int KEY_TILE = 128; // keys that attention treats at once, counted from position 0
constexpr int NUM_REGISTERS = 8;

// A tile is TILE rows x GROUP columns; tiles lie [num_rows / TILE][num_columns / GROUP], the last rows padded by zeros.
//   INT4_AFFINE  fp16 scale[16], fp16 minimum[16], nibbles[256]   value = scale * q + minimum        q in 0 .. 15
//   INT4         fp16 scale[16], nibbles[256]                     value = scale * (q - 8)
//   INT8         fp16 scale[16], int8 [512]                       value = scale * q                  q in -127 .. 127
// nibbles: byte [64 c + 4 r + j] = q[r][8 c + j] | q[r][8 c + 4 + j] << 4   (c < 4, r < 16, j < 4)
// int8:    byte [64 c + 4 r + j] = q[r][4 c + j]                            (c < 8)
enum Format : int32_t { INT4_AFFINE = 0, INT4 = 1, INT8 = 2 };
constexpr int TILE_BYTES[] = {320, 288, 544};

struct Matrix {
    const uint8_t* tiles; // any alignment
    const float* bias;    // [num_rows] or null
    int32_t num_rows;
    int32_t num_columns;  // a multiple of GROUP
    int32_t format;
    int32_t first_output; // column of the target register where row 0 goes
};

// Quantised rows: number = quantum * scale. Row m of n columns: quanta [m n ..], scales, sums, offsets [m n / 32 ..].
// Fine rows have quanta of 16 bits, in two planes: LOW_QUANTA * quanta + low, each in -127 .. 127.
struct Activations {
    int8_t* quanta;
    float* scales;
    int32_t* sums;  // of the quanta of a group
    float* offsets; // scale * float(sum)
    int8_t* low;    // as `quanta`; null: not fine
};
constexpr int LOW_QUANTA = 254; // what a quantum of the high plane is worth

struct Register {
    float* data;    // row after row
    int64_t stride; // floats from row to row
};

// Rows of one sequence. `block_table`: blocks of positions 0 .. start_position + num_rows - 1.
struct Span {
    const int32_t* block_table;
    int32_t first_row;
    int32_t num_rows;
    int32_t start_position;
    int32_t unused;
};

enum KvFormat : int32_t { KV_FP16 = 0, KV_INT8 = 1 };

// A block's image: values [num_layers][K, V][num_kv_heads], each K as [head_dim][TILE], each V as [TILE][head_dim],
// TILE the position in the block; then, for KV_INT8, float32 scales [num_layers][2][num_kv_heads][TILE].
struct Pool {
    uint8_t* data;
    int64_t block_bytes;
    int64_t scales_offset; // bytes from a block's start
    int32_t num_layers;
    int32_t num_kv_heads;
    int32_t head_dim; // a multiple of TILE
    int32_t format;
};

enum OpKind : int32_t {
    EMBED = 0,             // target[m] = row token_ids[m] of matrices[0]
    NORM_QUANTISE = 1,     // activations = quantise(rms_norm(source, weight, eps)), `num_columns` wide
    QUANTISE = 2,          // activations = quantise(source)
    SILU_MUL_QUANTISE = 3, // activations = quantise(silu(source[:n]) * source[n:2n]), n = num_columns
    LINEAR = 4,            // target = activations x matrices, side by side from their first_output
    LINEAR_ADD = 5,        // target += the same
    ROPE_STORE = 6,        // source (q, k, v side by side): q and k normed (weight, if any), rotated (flag HAS_ROPE), q
                           // scaled, in place; k and v written to `slots` in `layer`
    ATTENTION = 7,         // target = attention of the queries in source over the pool's `layer`
    SELECT = 8,            // target[i] = source[selected[i]]; is_finite[m] for every row m of source
};
// OVER_SELECTED: rows are those of SELECT. FINE: activations are written, or read, as fine rows.
enum OpFlags : int32_t { HAS_ROPE = 1, OVER_SELECTED = 2, FINE = 4 };

struct Op {
    const Matrix* matrices;
    const float* weight;
    int32_t kind;
    int32_t source;
    int32_t target;
    int32_t num_matrices;
    int32_t num_columns;
    int32_t layer;
    int32_t window; // 0: none
    int32_t flags;
    float eps;
    int32_t unused;
};

struct Step {
    const Op* ops;
    const int32_t* token_ids; // [num_rows]
    const int32_t* slots;     // [num_rows]: block * TILE + offset; negative: not written
    const float* cos;         // [num_rows][head_dim / 2]
    const float* sin;
    const Span* spans;
    const int32_t* selected;  // [num_selected]
    uint8_t* is_finite;       // [num_rows]
    int64_t* op_ns;           // [num_ops], added to; null: not measured
    Register registers[NUM_REGISTERS];
    Activations activations;
    Pool pool;
    int32_t num_ops;
    int32_t num_rows;
    int32_t num_spans;
    int32_t num_selected;
    int32_t num_heads;
    float scale; // of queries
};

} // namespace chatkv
