// A small model on several threads, for runs under sanitizers: every operation, mixed batches, long contexts shared by
// their keys. Memory is allocated to the byte, so that what reads or writes beside it is found. Exit status 0: the
// threads, and all instruction sets, have computed what one thread computes in plain C++. A digest of it is printed.
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "step.h"

using namespace chatkv;

namespace {

constexpr int HIDDEN = 64, HEAD_DIM = 16, NUM_HEADS = 6, NUM_KV_HEADS = 2, INNER = 96, VOCAB = 83, NUM_LAYERS = 2;
constexpr int WIDTH = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM, NUM_BLOCKS = 120, MAX_ROWS = 64;

uint32_t seed = 1;
uint32_t next() { return seed = seed * 1664525u + 1013904223u; }
float small() { return (static_cast<int>(next() >> 16) % 2001 - 1000) * 1e-3f; }

std::vector<float> floats(int count) {
    std::vector<float> made(count);
    for (float& number : made) number = small();
    return made;
}

struct Weights {
    std::vector<uint8_t> tiles;
    std::vector<float> bias;
    Matrix matrix;
};

// Owns what the operations point to.
struct Model {
    std::vector<std::unique_ptr<Weights>> weights;
    std::vector<std::unique_ptr<std::vector<float>>> norms;
    std::vector<Op> ops;

    const Matrix* matrix(int num_rows, int num_columns, int format) {
        weights.push_back(std::make_unique<Weights>());
        Weights& made = *weights.back();
        int num_tiles = (num_rows + TILE - 1) / TILE * (num_columns / GROUP), bytes = TILE_BYTES[format];
        made.tiles.resize(size_t(num_tiles) * bytes);
        for (int tile = 0; tile < num_tiles; tile++)
            for (int i = 0; i < bytes; i++) {
                bool is_number = i < (format == INT4_AFFINE ? 64 : 32);
                uint8_t half = i % 2 ? 0x18 | (next() >> 28 & 3) : next() >> 24; // about 0.003
                uint8_t quantum = next() >> 24;
                made.tiles[size_t(tile) * bytes + i] = is_number ? half : quantum == 128 ? 1 : quantum;
            }
        made.bias = floats(num_rows);
        made.matrix = {made.tiles.data(), made.bias.data(), num_rows, num_columns, format, 0};
        return &made.matrix;
    }

    const float* norm(int count) {
        norms.push_back(std::make_unique<std::vector<float>>(floats(count)));
        return norms.back()->data();
    }

    Op& add(OpKind kind, int source, int target, int num_columns, int flags = 0) {
        ops.push_back({});
        Op& op = ops.back();
        op.kind = kind, op.source = source, op.target = target, op.num_columns = num_columns, op.eps = 1e-5f;
        op.flags = flags;
        return op;
    }

    void linear(OpKind kind, int target, int num_rows, int num_columns, int format, int flags = 0) {
        const Matrix* made = matrix(num_rows, num_columns, format);
        Op& op = add(kind, 0, target, num_columns, flags);
        op.matrices = made, op.num_matrices = 1;
    }

    Model() {
        const Matrix* table = matrix(VOCAB, HIDDEN, INT8);
        Op& embed = add(EMBED, 0, 0, HIDDEN);
        embed.matrices = table, embed.num_matrices = 1;
        for (int layer = 0; layer < NUM_LAYERS; layer++) {
            const float *before = norm(HIDDEN), *heads = norm((NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM), *after = norm(HIDDEN);
            add(NORM_QUANTISE, 0, 0, HIDDEN, FINE).weight = before;
            linear(LINEAR, 1, WIDTH, HIDDEN, layer ? INT4 : INT4_AFFINE, FINE);
            Op& rope = add(ROPE_STORE, 1, 1, WIDTH);
            rope.weight = layer ? heads : nullptr, rope.layer = layer, rope.flags = HAS_ROPE;
            Op& attention = add(ATTENTION, 1, 2, NUM_HEADS * HEAD_DIM);
            attention.layer = layer, attention.window = layer ? 300 : 0;
            add(QUANTISE, 2, 0, NUM_HEADS * HEAD_DIM);
            linear(LINEAR_ADD, 0, HIDDEN, NUM_HEADS * HEAD_DIM, INT4);
            add(NORM_QUANTISE, 0, 0, HIDDEN).weight = after;
            linear(LINEAR, 3, 2 * INNER, HIDDEN, INT4_AFFINE);
            add(SILU_MUL_QUANTISE, 3, 0, INNER);
            linear(LINEAR_ADD, 0, HIDDEN, INNER, INT8);
        }
        add(SELECT, 0, 4, HIDDEN);
        const float* last = norm(HIDDEN);
        add(NORM_QUANTISE, 4, 0, HIDDEN, OVER_SELECTED | FINE).weight = last;
        linear(LINEAR, 5, VOCAB, HIDDEN, INT8, OVER_SELECTED | FINE);
    }
};

struct Part {
    int num_rows, start;
};

// One step after the other on a pool of its own -> all logits.
std::vector<float> run(const Model& model, const Kernels& kernels, int num_threads, int format) {
    Threads threads(num_threads);
    seed = 7;
    int value_bytes = format == KV_FP16 ? 2 : 1, per_block = NUM_LAYERS * 2 * NUM_KV_HEADS * TILE;
    int64_t scales_offset = int64_t(per_block) * HEAD_DIM * value_bytes;
    int64_t block_bytes = scales_offset + (format == KV_INT8 ? per_block * 4 : 0);
    std::vector<uint8_t> pool(block_bytes * NUM_BLOCKS);
    std::vector<float> logits;
    const std::vector<std::vector<Part>> steps = {
        {{1, 0}}, {{MAX_ROWS, 0}}, {{40, 64}, {1, 3}, {5, 100}}, {{1, 600}}, {{3, 601}}, {{1, 604}, {1, 9}, {1, 130}}};
    for (int repeat = 0; repeat < 2; repeat++)
        for (const std::vector<Part>& parts : steps) {
            std::vector<std::vector<int32_t>> tables;
            std::vector<Span> spans;
            std::vector<int32_t> ids, slots, selected;
            for (const Part& part : parts) {
                std::vector<int32_t> table((part.start + part.num_rows + TILE - 1) / TILE);
                for (size_t i = 0; i < table.size(); i++) table[i] = int(i) + int(tables.size()) * 40;
                tables.push_back(table);
                spans.push_back({nullptr, int32_t(ids.size()), part.num_rows, part.start, 0});
                for (int i = 0; i < part.num_rows; i++) {
                    int position = part.start + i;
                    ids.push_back(next() % VOCAB);
                    slots.push_back(table[position / TILE] * TILE + position % TILE);
                }
                selected.push_back(int32_t(ids.size()) - 1);
            }
            for (size_t i = 0; i < spans.size(); i++) spans[i].block_table = tables[i].data();
            const int rows = int(ids.size()), chosen = int(selected.size());
            std::vector<float> cos = floats(rows * HEAD_DIM / 2), sin = floats(rows * HEAD_DIM / 2);
            const int widths[] = {HIDDEN, WIDTH, NUM_HEADS * HEAD_DIM, 2 * INNER};
            std::vector<std::vector<float>> registers;
            for (int width : widths) registers.emplace_back(rows * width);
            registers.emplace_back(chosen * HIDDEN);
            registers.emplace_back(chosen * VOCAB);
            std::vector<int8_t> quanta(rows * INNER), low(rows * INNER);
            std::vector<float> scales(rows * INNER / GROUP), offsets(rows * INNER / GROUP);
            std::vector<int32_t> sums(rows * INNER / GROUP);
            std::vector<uint8_t> is_finite(rows);
            Step step{};
            step.ops = model.ops.data(), step.num_ops = int(model.ops.size());
            step.token_ids = ids.data(), step.slots = slots.data(), step.cos = cos.data(), step.sin = sin.data();
            step.spans = spans.data(), step.num_spans = int(spans.size());
            step.selected = selected.data(), step.num_selected = chosen, step.is_finite = is_finite.data();
            for (size_t i = 0; i < registers.size(); i++) {
                int width = i < 4 ? widths[i] : i == 4 ? HIDDEN : VOCAB;
                step.registers[i] = {registers[i].data(), width};
            }
            step.activations = {quanta.data(), scales.data(), sums.data(), offsets.data(), low.data()};
            step.pool = {pool.data(), block_bytes, scales_offset, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, format};
            step.num_rows = rows, step.num_heads = NUM_HEADS, step.scale = 0.25f;
            run_step(threads, kernels, step);
            for (uint8_t one : is_finite)
                if (!one) std::puts("a row is not finite"), logits.push_back(0.0f / 0.0f);
            logits.insert(logits.end(), registers[5].begin(), registers[5].end());
        }
    return logits;
}

} // namespace

int main() {
    const Model model;
    int num_wrong = 0;
    for (int format : {KV_FP16, KV_INT8}) {
        const std::vector<float> expected = run(model, *scalar_kernels(), 1, format);
        uint64_t digest = 14695981039346656037u; // FNV-1a, of the bits
        for (float number : expected) {
            uint32_t bits;
            std::memcpy(&bits, &number, sizeof bits);
            digest = (digest ^ bits) * 1099511628211u;
        }
        std::printf("%016llx\n", static_cast<unsigned long long>(digest));
        for (const Kernels* kernels : {scalar_kernels(), avx2_kernels(), neon_kernels()})
            for (int num_threads : {1, 2, 8}) {
                if (kernels == nullptr) continue; // of another processor
                const std::vector<float> found = run(model, *kernels, num_threads, format);
                bool is_same = found.size() == expected.size() &&
                               std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0;
                if (!is_same) std::printf("%s, %d threads: other bits\n", kernels->name, num_threads), num_wrong++;
            }
    }
    return num_wrong;
}
