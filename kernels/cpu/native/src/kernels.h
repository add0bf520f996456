// The operations that one instruction set provides. Each works on a range, so that any number of threads can share it,
// and each number comes from one fixed sequence of roundings: whatever the range, the thread and the instruction set,
// the bits are the same. The sequences are those of vec.h: 16 lanes, explicit fma, sums of lanes in one order.
#pragma once
#include "abi.h"

namespace chatkv {

// Of one thread; grows as needed, never shared.
struct Scratch {
    float* floats(int64_t count);
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch();

  private:
    float* data_ = nullptr; // 64-byte aligned
    int64_t capacity_ = 0;
};

struct Kernels {
    const char* name;

    void (*embed)(const Matrix& table, const int32_t* token_ids, int row_begin, int row_end, const Register& target);

    // Rows [row_begin, row_end) of `source`, num_columns wide, into the same rows of `to`.
    void (*norm_quantise)(
        const Register& source, const float* weight, float eps, int num_columns, int row_begin, int row_end,
        const Activations& to);
    void (*quantise)(const Register& source, int num_columns, int row_begin, int row_end, const Activations& to);
    void (*silu_mul_quantise)(
        const Register& source, int num_columns, int row_begin, int row_end, const Activations& to);

    // Output rows of tiles [tile_begin, tile_end) for activation rows [row_begin, row_end).
    void (*linear)(
        const Matrix& matrix, const Activations& from, int row_begin, int row_end, int tile_begin, int tile_end,
        const Register& target, bool adds);

    void (*rope_store)(const Step& step, const Op& op, int row_begin, int row_end);

    // All keys of rows [row_begin, row_end) of a span, for the query heads of one KV head: tile after tile.
    void (*attend_chunk)(
        const Step& step, const Op& op, const Span& span, int kv_head, int row_begin, int row_end, Scratch& scratch);
    // One key tile for rows of a span (query heads of one KV head) into `part`: [rows][group] x { maximum, sum,
    // unused up to TILE, o[head_dim] }. A tile without a visible key gives maximum -inf.
    void (*attend_part)(
        const Step& step, const Op& op, const Span& span, int kv_head, int row_begin, int row_end, int key_tile,
        float* part, Scratch& scratch);
    // The parts of one (row, head), `num_parts` at distances of `stride` floats, in order, into the target register.
    // Same arithmetic as attend_chunk.
    void (*attend_combine)(
        const Step& step, const Op& op, int row, int head, const float* parts, int num_parts, int64_t stride);
};

inline int part_floats(int head_dim) { return head_dim + TILE; }

// Defined by each variant that the library was built with; null where the build lacks it.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

} // namespace chatkv
