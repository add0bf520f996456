#include "step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <vector>

namespace chatkv {

namespace {

constexpr int CHUNKS_PER_THREAD = 4;     // so that a thread that starts late or is slow leaves little to wait for
constexpr int MIN_TILES_PER_CHUNK = 2;   // of one row: 10 KB of weights and more
constexpr int ROWS_PER_LINEAR = 128;     // their quanta stay in the second cache while tiles go by
constexpr int QUERY_ROWS_PER_CHUNK = 48; // rows x heads that share the reading of K and V
constexpr int MAX_ROWS_IN_PARTS = 4;

int divide_up(int a, int b) { return (a + b - 1) / b; }

// work(row_begin, row_end) over `num_rows`.
template <class Work> void over_rows(Threads& threads, int num_rows, const Work& work) {
    int rows = std::max(1, divide_up(num_rows, threads.count() * CHUNKS_PER_THREAD));
    threads.run(divide_up(num_rows, rows), [&](int chunk, int) {
        work(chunk * rows, std::min(num_rows, (chunk + 1) * rows));
    });
}

// What the operation writes or reads: without the low plane, unless it is fine.
Activations activations_of(const Step& step, const Op& op) {
    Activations activations = step.activations;
    if (!(op.flags & FINE)) activations.low = nullptr;
    return activations;
}

void run_linear(Threads& threads, const Kernels& kernels, const Step& step, const Op& op, int num_rows) {
    int num_tiles = 0;
    for (int i = 0; i < op.num_matrices; i++) num_tiles += divide_up(op.matrices[i].num_rows, TILE);
    int num_row_blocks = divide_up(num_rows, ROWS_PER_LINEAR);
    int rows = num_row_blocks ? divide_up(num_rows, num_row_blocks) : 0;
    int wanted = divide_up(threads.count() * CHUNKS_PER_THREAD, std::max(1, num_row_blocks));
    int tiles = std::max(MIN_TILES_PER_CHUNK, divide_up(num_tiles, wanted));
    int num_tile_chunks = divide_up(num_tiles, tiles);
    const Register& target = step.registers[op.target];
    const Activations activations = activations_of(step, op);
    // Chunks of one row block follow one another: its quanta are read while they are in the cache.
    threads.run(num_row_blocks * num_tile_chunks, [&](int chunk, int) {
        int row_begin = chunk / num_tile_chunks * rows, row_end = std::min(num_rows, row_begin + rows);
        int begin = chunk % num_tile_chunks * tiles, end = std::min(num_tiles, begin + tiles);
        for (int i = 0, first = 0; i < op.num_matrices && first < end; i++) {
            const Matrix& matrix = op.matrices[i];
            int count = divide_up(matrix.num_rows, TILE);
            int from = std::max(begin - first, 0), to = std::min(end - first, count);
            if (from < to)
                kernels.linear(matrix, activations, row_begin, row_end, from, to, target, op.kind == LINEAR_ADD);
            first += count;
        }
    });
}

// A piece of attention: rows of a span for one KV head, over all keys or over one tile of them.
struct Piece {
    const Span* span;
    int kv_head;
    int row_begin, row_end;
    int key_tile; // -1: all
    float* part;
};

// What is in parts: one row's keys [first_tile, end_tile).
struct Parts {
    const Span* span;
    int first_tile, num_tiles;
    int64_t offset; // floats, in the shared scratch: [kv_head][tile][row][group]
};

void run_attention(Threads& threads, const Kernels& kernels, const Step& step, const Op& op) {
    const int num_kv_heads = step.pool.num_kv_heads, group = step.num_heads / num_kv_heads;
    const int floats = part_floats(step.pool.head_dim);
    std::vector<Piece> pieces;
    std::vector<Parts> split;
    int64_t num_floats = 0;
    // With few rows in all, long contexts are shared by their keys.
    bool can_split = step.num_spans * num_kv_heads < threads.count() * CHUNKS_PER_THREAD && threads.count() > 1;
    for (int i = 0; i < step.num_spans; i++) {
        const Span& span = step.spans[i];
        int end = span.start_position + span.num_rows;
        int first_key = op.window > 0 ? std::max(0, span.start_position - op.window + 1) : 0;
        int first_tile = first_key / KEY_TILE, num_tiles = divide_up(end, KEY_TILE) - first_tile;
        if (can_split && span.num_rows <= MAX_ROWS_IN_PARTS && num_tiles > 2) {
            split.push_back({&span, first_tile, num_tiles, num_floats});
            num_floats += int64_t(num_kv_heads) * num_tiles * span.num_rows * group * floats;
        } else {
            int rows = std::max(1, QUERY_ROWS_PER_CHUNK / group);
            // The last rows have most keys: they come first.
            for (int from = (span.num_rows - 1) / rows * rows; from >= 0; from -= rows)
                for (int head = 0; head < num_kv_heads; head++)
                    pieces.push_back({&span, head, from, std::min(span.num_rows, from + rows), -1, nullptr});
        }
    }
    float* parts = num_floats ? threads.shared_scratch().floats(num_floats) : nullptr;
    for (const Parts& one : split) {
        int64_t tile_floats = int64_t(one.span->num_rows) * group * floats;
        for (int head = 0; head < num_kv_heads; head++)
            for (int tile = 0; tile < one.num_tiles; tile++) {
                float* part = parts + one.offset + (int64_t(head) * one.num_tiles + tile) * tile_floats;
                pieces.push_back({one.span, head, 0, one.span->num_rows, one.first_tile + tile, part});
            }
    }
    threads.run(static_cast<int>(pieces.size()), [&](int chunk, int thread) {
        const Piece& piece = pieces[chunk];
        Scratch& scratch = threads.scratch(thread);
        if (piece.key_tile < 0)
            kernels.attend_chunk(step, op, *piece.span, piece.kv_head, piece.row_begin, piece.row_end, scratch);
        else
            kernels.attend_part(
                step, op, *piece.span, piece.kv_head, piece.row_begin, piece.row_end, piece.key_tile, piece.part,
                scratch);
    });
    for (const Parts& one : split) {
        int num_rows = one.span->num_rows;
        int64_t tile_floats = int64_t(num_rows) * group * floats;
        threads.run(num_kv_heads, [&](int kv_head, int) {
            const float* first = parts + one.offset + int64_t(kv_head) * one.num_tiles * tile_floats;
            for (int row = 0; row < num_rows; row++)
                for (int i = 0; i < group; i++)
                    kernels.attend_combine(
                        step, op, one.span->first_row + row, kv_head * group + i, first + (row * group + i) * floats,
                        one.num_tiles, tile_floats);
        });
    }
}

void run_select(Threads& threads, const Step& step, const Op& op) {
    const Register& source = step.registers[op.source];
    over_rows(threads, step.num_rows, [&](int begin, int end) {
        for (int row = begin; row < end; row++) {
            const float* numbers = source.data + row * source.stride;
            bool is_finite = true;
            for (int i = 0; i < op.num_columns; i++) {
                uint32_t bits;
                std::memcpy(&bits, numbers + i, sizeof bits);
                is_finite &= (bits & 0x7f800000u) != 0x7f800000u;
            }
            step.is_finite[row] = is_finite;
        }
    });
    const Register& target = step.registers[op.target];
    for (int i = 0; i < step.num_selected; i++)
        std::memcpy(
            target.data + i * target.stride, source.data + step.selected[i] * source.stride,
            op.num_columns * sizeof(float));
}

void run_op(Threads& threads, const Kernels& kernels, const Step& step, const Op& op) {
    const int num_rows = op.flags & OVER_SELECTED ? step.num_selected : step.num_rows;
    const Register &source = step.registers[op.source], &target = step.registers[op.target];
    const Activations activations = activations_of(step, op);
    switch (op.kind) {
    case EMBED:
        over_rows(threads, num_rows, [&](int begin, int end) {
            kernels.embed(op.matrices[0], step.token_ids, begin, end, target);
        });
        break;
    case NORM_QUANTISE:
        over_rows(threads, num_rows, [&](int begin, int end) {
            kernels.norm_quantise(source, op.weight, op.eps, op.num_columns, begin, end, activations);
        });
        break;
    case QUANTISE:
        over_rows(threads, num_rows, [&](int begin, int end) {
            kernels.quantise(source, op.num_columns, begin, end, activations);
        });
        break;
    case SILU_MUL_QUANTISE:
        over_rows(threads, num_rows, [&](int begin, int end) {
            kernels.silu_mul_quantise(source, op.num_columns, begin, end, activations);
        });
        break;
    case LINEAR:
    case LINEAR_ADD:
        run_linear(threads, kernels, step, op, num_rows);
        break;
    case ROPE_STORE:
        over_rows(threads, num_rows, [&](int begin, int end) { kernels.rope_store(step, op, begin, end); });
        break;
    case ATTENTION:
        run_attention(threads, kernels, step, op);
        break;
    case SELECT:
        run_select(threads, step, op);
        break;
    default:
        break; // `abi.py` makes no others
    }
}

} // namespace

void run_step(Threads& threads, const Kernels& kernels, const Step& step) {
    using Clock = std::chrono::steady_clock;
    for (int i = 0; i < step.num_ops; i++) {
        if (step.op_ns == nullptr) {
            run_op(threads, kernels, step, step.ops[i]);
            continue;
        }
        Clock::time_point since = Clock::now();
        run_op(threads, kernels, step, step.ops[i]);
        step.op_ns[i] += std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - since).count();
    }
}

} // namespace chatkv
