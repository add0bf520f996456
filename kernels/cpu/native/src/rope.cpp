// Queries and keys get their norm and their rotation; keys and values go to their places in the pool.
#include "variant.h"
#include "vec.h"

CHATKV_NS_BEGIN

namespace rope {

constexpr float LARGEST_QUANTUM = 127.0f;
constexpr float SMALLEST_SCALE = 0x1p-126f; // a head of zeros has this one

CHATKV_INLINE void norm(float* numbers, const float* weight, float eps, int head_dim) {
    vf16 sums = zero();
    for (int d = 0; d < head_dim; d += TILE) sums = fma(load(numbers + d), load(numbers + d), sums);
    const vf16 mean = splat(reduce_add(sums)) / splat(float(head_dim));
    const vf16 factor = splat(1.0f) / sqrt(mean + splat(eps));
    for (int d = 0; d < head_dim; d += TILE) store(numbers + d, load(numbers + d) * factor * load(weight + d));
}

CHATKV_INLINE void rotate_16(float* first, float* second, const float* cos, const float* sin) {
    const vf16 a = load(first), b = load(second), c = load(cos), s = load(sin);
    store(first, fma(a, c, -(b * s)));
    store(second, fma(b, c, a * s));
}

// Number d of the first half and of the second are a point; cos and sin: [head_dim / 2].
CHATKV_INLINE void rotate(float* numbers, const float* cos, const float* sin, int head_dim) {
    const int half = head_dim / 2;
    int d = 0;
    for (; d + TILE <= half; d += TILE) rotate_16(numbers + d, numbers + half + d, cos + d, sin + d);
    if (d == half) return;
    // Half of a vector is left: head_dim is a multiple of 16, not of 32.
    const size_t bytes = sizeof(float) * size_t(half - d);
    float rest[4][TILE] = {};
    const float* sources[4] = {numbers + d, numbers + half + d, cos + d, sin + d};
    for (int i = 0; i < 4; i++) memcpy(rest[i], sources[i], bytes);
    rotate_16(rest[0], rest[1], rest[2], rest[3]);
    memcpy(numbers + d, rest[0], bytes);
    memcpy(numbers + half + d, rest[1], bytes);
}

// One head's numbers go to `to`, `stride` apart: 1 for V, TILE for K.
CHATKV_INLINE void store_halves(const float* numbers, int head_dim, uint8_t* to, int stride) {
    for (int d = 0; d < head_dim; d += TILE) {
        uint16_t halves[TILE];
        store_half(halves, load(numbers + d));
        for (int i = 0; i < TILE; i++) memcpy(to + 2 * int64_t(d + i) * stride, halves + i, 2);
    }
}

// The same as `quantise_rows` of kernels/reference.py. Numbers that are not finite: quanta 0 and scale NaN.
CHATKV_INLINE void store_quanta(const float* numbers, int head_dim, uint8_t* to, int stride, float* scale) {
    vi16 largest = splat(0); // of magnitudes: their bits are in the same order, NaN and infinity above all others
    for (int d = 0; d < head_dim; d += TILE) largest = higher(largest, bits(absolute(load(numbers + d))));
    const int32_t largest_bits = reduce_max(largest);
    float largest_magnitude;
    memcpy(&largest_magnitude, &largest_bits, sizeof largest_magnitude);
    const bool is_finite = largest_bits < 0x7f800000;
    const float wanted = largest_magnitude / LARGEST_QUANTUM;
    *scale = !is_finite ? __builtin_nanf("") : wanted < SMALLEST_SCALE ? SMALLEST_SCALE : wanted;
    for (int d = 0; d < head_dim; d += TILE) {
        int8_t quanta[TILE];
        store_int8(quanta, is_finite ? to_int(load(numbers + d) / splat(*scale)) : splat(0));
        for (int i = 0; i < TILE; i++) memcpy(to + int64_t(d + i) * stride, quanta + i, 1);
    }
}

// part: 0 for K, 1 for V.
CHATKV_INLINE void store_head(
    const float* numbers, const Pool& pool, int layer, int part, int kv_head, int32_t slot) {
    const int head_dim = pool.head_dim, offset = slot % TILE, stride = part ? 1 : TILE;
    const int64_t image = (int64_t(layer) * 2 + part) * pool.num_kv_heads + kv_head;
    const int64_t first = image * TILE * head_dim + (part ? int64_t(offset) * head_dim : offset);
    uint8_t* block = pool.data + slot / TILE * pool.block_bytes;
    if (pool.format == KV_INT8) {
        float* scales = reinterpret_cast<float*>(block + pool.scales_offset);
        store_quanta(numbers, head_dim, block + first, stride, scales + image * TILE + offset);
    } else {
        store_halves(numbers, head_dim, block + 2 * first, stride);
    }
}

} // namespace rope

void rope_store(const Step& step, const Op& op, int row_begin, int row_end) {
    const Pool& pool = step.pool;
    const Register& source = step.registers[op.source];
    const int head_dim = pool.head_dim, num_rotated = step.num_heads + pool.num_kv_heads;
    for (int row = row_begin; row < row_end; row++) {
        float* heads = source.data + row * source.stride;
        const int64_t angles = int64_t(row) * (head_dim / 2);
        for (int head = 0; head < num_rotated; head++) {
            float* numbers = heads + head * head_dim;
            if (op.weight) rope::norm(numbers, op.weight + head * head_dim, op.eps, head_dim);
            if (op.flags & HAS_ROPE) rope::rotate(numbers, step.cos + angles, step.sin + angles, head_dim);
            if (head >= step.num_heads) continue;
            for (int d = 0; d < head_dim; d += TILE) store(numbers + d, load(numbers + d) * splat(step.scale));
        }
        if (step.slots[row] < 0) continue;
        for (int part = 0; part < 2; part++)
            for (int head = 0; head < pool.num_kv_heads; head++)
                rope::store_head(
                    heads + (step.num_heads + part * pool.num_kv_heads + head) * head_dim, pool, op.layer, part, head,
                    step.slots[row]);
    }
}

CHATKV_NS_END
