// Attention of a few queries over one tile of keys. Queries that share K and V (the heads of a group, rows of a prompt)
// are treated MAX_TOGETHER at a time: a vector of K or V, once loaded, serves them all, and their sums stay in
// registers. Each score is one fma chain over d, each output one over the keys in order, so that how many queries are
// treated together changes no bit.
#pragma once
#include "exp.h"
#include "kernels.h"
#include "vec.h"

CHATKV_NS_BEGIN

constexpr int TILE_BLOCKS = KEY_TILE / TILE;
constexpr int MAX_TOGETHER = 6;
constexpr int LINE_BYTES = 64;

// Vectors side by side for which sums of `num_queries` fit in the registers: 32 of 16 lanes, 16 of 8, 32 of 4.
constexpr int num_vectors(int num_queries) {
#if defined(CHATKV_AVX512)
    return num_queries > 0 ? 4 : 0;
#else
    return num_queries > 3 ? 1 : 2;
#endif
}

struct Half {
    uint16_t bits;
};

CHATKV_INLINE vf16 load_numbers(const Half* from) { return load_half(from); }
CHATKV_INLINE vf16 load_numbers(const int8_t* from) { return to_float(load_int8(from)); }

// One KV head's part of the blocks of a tile. Pointers of blocks that no query sees are not for reading.
template <class Number> struct KeyTile {
    const Number* keys[TILE_BLOCKS];      // each [head_dim][TILE]
    const Number* values[TILE_BLOCKS];    // each [TILE][head_dim]
    const Number* next_keys[TILE_BLOCKS]; // of the tile that comes after
    const float* key_scales[TILE_BLOCKS]; // each [TILE]; int8 alone
    const float* value_scales[TILE_BLOCKS];
    bool has_scales;
    int head_dim;
};

// Blocks lie apart in the pool, so the processor's own reading ahead stops at each block's end. While K of a block is
// read, its V comes, line by line; while V is read, K of the next tile.
CHATKV_INLINE void fetch(const void* ahead) { __builtin_prefetch(ahead); }

// It sees keys [begin, end) of the tile; begin = end = 0: none.
struct Query {
    const float* numbers;
    int begin, end;
};

template <int value_> struct Count {
    static constexpr int value = value_;
};

// body(Count<count>): so that the loops over queries are unrolled.
template <class Body> CHATKV_INLINE void with_count(int count, const Body& body) {
    static_assert(MAX_TOGETHER == 6, "one case each");
    switch (count) {
    case 1: return body(Count<1>());
    case 2: return body(Count<2>());
    case 3: return body(Count<3>());
    case 4: return body(Count<4>());
    case 5: return body(Count<5>());
    case 6: return body(Count<6>());
    }
}

// scores[r][..] of queries r < R with blocks [block, block + V).
template <int R, int V, class Number>
void score_blocks(const KeyTile<Number>& tile, int block, const Query* queries, float* scores) {
    const int head_dim = tile.head_dim;
    vf16 sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = zero();
    const Number *from[V], *ahead[V];
    for (int v = 0; v < V; v++) from[v] = tile.keys[block + v], ahead[v] = tile.values[block + v];
    const float* numbers[R];
    for (int r = 0; r < R; r++) numbers[r] = queries[r].numbers;
    for (int d = 0; d < head_dim; d++) {
        vf16 keys[V];
        for (int v = 0; v < V; v++) keys[v] = load_numbers(from[v] + d * TILE);
        // Each line holds two d at least.
        for (int v = 0; v < V; v++)
            if (v % 2 == d % 2) fetch(ahead[v] + (d - d % 2) * TILE);
        for (int r = 0; r < R; r++) {
            const vf16 number = splat(numbers[r][d]);
            for (int v = 0; v < V; v++) sums[r][v] = fma(number, keys[v], sums[r][v]);
        }
    }
    for (int v = 0; v < V; v++) {
        if (tile.has_scales) {
            const vf16 scales = load(tile.key_scales[block + v]);
            for (int r = 0; r < R; r++) sums[r][v] = sums[r][v] * scales;
        }
        for (int r = 0; r < R; r++) store(scores + r * KEY_TILE + (block + v) * TILE, sums[r][v]);
    }
}

// scores [num_queries][KEY_TILE]: set for the blocks of which a query of the same few sees a key.
template <class Number> void score(const KeyTile<Number>& tile, const Query* queries, int num_queries, float* scores) {
    for (int first = 0; first < num_queries; first += MAX_TOGETHER) {
        const int count = num_queries - first < MAX_TOGETHER ? num_queries - first : MAX_TOGETHER;
        int begin = KEY_TILE, end = 0;
        for (int i = first; i < first + count; i++) {
            if (queries[i].end == 0) continue;
            begin = queries[i].begin < begin ? queries[i].begin : begin;
            end = queries[i].end > end ? queries[i].end : end;
        }
        with_count(count, [&](auto queries_together) {
            constexpr int R = decltype(queries_together)::value, V = num_vectors(R);
            int block = begin / TILE;
            const int end_block = (end + TILE - 1) / TILE;
            for (; block + V <= end_block; block += V)
                score_blocks<R, V>(tile, block, queries + first, scores + first * KEY_TILE);
            for (; block < end_block; block++)
                score_blocks<R, 1>(tile, block, queries + first, scores + first * KEY_TILE);
        });
    }
}

// The largest score of a query; its hidden keys get -inf. NaN need not win: it comes through as a weight.
CHATKV_INLINE float mask_hidden(const Query& query, float* scores) {
    const vf16 nothing = splat(-__builtin_inff());
    vf16 largest = nothing;
    for (int block = query.begin / TILE; block * TILE < query.end; block++) {
        vf16 of_block = load(scores + block * TILE);
        const int begin = query.begin - block * TILE, end = query.end - block * TILE;
        if (begin > 0 || end < TILE) {
            const vi16 lanes = iota();
            of_block = select(less(lanes, splat(begin)), nothing, select(less(lanes, splat(end)), of_block, nothing));
            store(scores + block * TILE, of_block);
        }
        largest = larger(largest, of_block);
    }
    return reduce_larger(largest);
}

// Scores of one query to exp(score - maximum), in place; for V with scales, times these. Gives the sum.
template <class Number>
CHATKV_INLINE float exponentiate(const KeyTile<Number>& tile, const Query& query, float maximum, float* scores) {
    vf16 sums = zero();
    for (int block = query.begin / TILE; block * TILE < query.end; block++) {
        vf16 weights = exp(load(scores + block * TILE) - splat(maximum));
        sums = sums + weights;
        if (tile.has_scales) weights = weights * load(tile.value_scales[block]);
        store(scores + block * TILE, weights);
    }
    return reduce_add(sums);
}

// outputs[r][column ..] += weights[r][key] * values[key][column ..] over keys [begin, end) in order.
template <int R, int V, class Number>
void add_values(
    const KeyTile<Number>& tile, int begin, int end, int column, const float* weights, float* outputs) {
    const int head_dim = tile.head_dim;
    vf16 sums[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) sums[r][v] = load(outputs + r * head_dim + column + v * TILE);
    for (int key = begin; key < end;) {
        const int offset = key % TILE * head_dim + column;
        const Number *from = tile.values[key / TILE] + offset;
        const Number *ahead = tile.next_keys[key / TILE] + offset;
        const int block_end = key - key % TILE + TILE, stop = end < block_end ? end : block_end;
        for (; key < stop; key++, from += head_dim, ahead += head_dim) {
            for (int i = 0; i < V * TILE; i += LINE_BYTES / int(sizeof(Number))) fetch(ahead + i);
            vf16 values[V];
            for (int v = 0; v < V; v++) values[v] = load_numbers(from + v * TILE);
            for (int r = 0; r < R; r++) {
                const vf16 weight = splat(weights[r * KEY_TILE + key]);
                for (int v = 0; v < V; v++) sums[r][v] = fma(weight, values[v], sums[r][v]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(outputs + r * head_dim + column + v * TILE, sums[r][v]);
}

// The keys that all R queries see go together. The few others of each go before and after, alone: a weight of 0 would
// not do for a key that is hidden, whose value may be anything, NaN too.
template <int R, int V, class Number>
void add_visible(const KeyTile<Number>& tile, const Query* queries, int column, const float* weights, float* outputs) {
    int begin = 0, end = KEY_TILE;
    for (int r = 0; r < R; r++) {
        begin = queries[r].begin > begin ? queries[r].begin : begin;
        end = queries[r].end < end ? queries[r].end : end;
    }
    if (begin > end) begin = end = 0; // nothing together: each alone, from its begin
    for (int r = 0; r < R; r++)
        if (queries[r].begin < begin)
            add_values<1, V>(
                tile, queries[r].begin, begin, column, weights + r * KEY_TILE, outputs + r * tile.head_dim);
    if (begin < end) add_values<R, V>(tile, begin, end, column, weights, outputs);
    for (int r = 0; r < R; r++) {
        const int from = queries[r].begin > end ? queries[r].begin : end;
        if (from < queries[r].end)
            add_values<1, V>(tile, from, queries[r].end, column, weights + r * KEY_TILE, outputs + r * tile.head_dim);
    }
}

// outputs [count][head_dim] = weights [count][KEY_TILE] x values, count <= MAX_TOGETHER.
template <class Number>
void sum_values(const KeyTile<Number>& tile, const Query* queries, int count, const float* weights, float* outputs) {
    memset(outputs, 0, sizeof(float) * size_t(count) * size_t(tile.head_dim));
    with_count(count, [&](auto queries_together) {
        constexpr int R = decltype(queries_together)::value, V = num_vectors(R);
        int column = 0;
        for (; column + V * TILE <= tile.head_dim; column += V * TILE)
            add_visible<R, V>(tile, queries, column, weights, outputs);
        for (; column < tile.head_dim; column += TILE) add_visible<R, 1>(tile, queries, column, weights, outputs);
    });
}

CHATKV_NS_END
