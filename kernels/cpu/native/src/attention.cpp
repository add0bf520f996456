// Attention over blocks: softmax tile by tile (Milakov and Gimelshein, "Online normalizer calculation for softmax",
// 2018). A tile's result is a maximum, a sum and outputs; results are combined in the order of the tiles, in the same
// way whether they come one by one (a chunk of rows) or from elsewhere (parts made by several threads).
#include "attend_tile.h"
#include "variant.h"

CHATKV_NS_BEGIN

// A part: maximum, sum, then from here the outputs, so that they keep the part's alignment. Without any key its sum is
// 0; with one it is 1 at least, or NaN.
constexpr int PART_OUTPUTS = TILE;
constexpr int MAX_QUERIES = 96; // that read a tile one after the other, from the cache

struct Totals {
    float maximum = -__builtin_inff();
    float sum = 0.0f;
};

// Adds a tile's result to what came of the tiles before.
CHATKV_INLINE void combine(Totals& all, float* all_outputs, const Totals& tile, const float* outputs, int head_dim) {
    if (tile.sum == 0.0f) return;
    if (all.sum == 0.0f) {
        all = tile;
        memcpy(all_outputs, outputs, sizeof(float) * size_t(head_dim));
        return;
    }
    const float highest = all.maximum > tile.maximum ? all.maximum : tile.maximum;
    const vf16 old_factor = exp(splat(all.maximum - highest)), factor = exp(splat(tile.maximum - highest));
    store_first(&all.sum, fma(splat(all.sum), old_factor, splat(tile.sum) * factor), 1);
    all.maximum = highest;
    for (int d = 0; d < head_dim; d += TILE)
        store(all_outputs + d, fma(load(all_outputs + d), old_factor, load(outputs + d) * factor));
}

CHATKV_INLINE void normalise(const float* outputs, float sum, int head_dim, float* to) {
    for (int d = 0; d < head_dim; d += TILE) store(to + d, load(outputs + d) / splat(sum));
}

// The queries of one KV head in one span, numbered row after row, head after head, and where their keys lie.
struct Queries {
    const Step& step;
    const Op& op;
    const Span& span;
    const int kv_head;
    const int group = step.num_heads / step.pool.num_kv_heads;
    const int head_dim = step.pool.head_dim;

    int column_of(int query) const { return (kv_head * group + query % group) * head_dim; }
    int64_t row_of(int query) const { return span.first_row + query / group; }
    const float* numbers_of(int query) const {
        const Register& source = step.registers[op.source];
        return source.data + row_of(query) * source.stride + column_of(query);
    }
    float* target_of(int query) const {
        const Register& target = step.registers[op.target];
        return target.data + row_of(query) * target.stride + column_of(query);
    }
    int end_key(int query) const { return span.start_position + query / group + 1; }
    int begin_key(int query) const {
        return op.window > 0 && end_key(query) > op.window ? end_key(query) - op.window : 0;
    }
    Query over_tile(int query, int key_tile) const {
        int begin = begin_key(query) - key_tile * KEY_TILE, end = end_key(query) - key_tile * KEY_TILE;
        begin = begin < 0 ? 0 : begin;
        end = end > KEY_TILE ? KEY_TILE : end;
        return begin < end ? Query{numbers_of(query), begin, end} : Query{numbers_of(query), 0, 0};
    }
};

template <class Number> KeyTile<Number> find_tile(const Queries& queries, int first, int last, int key_tile) {
    const Pool& pool = queries.step.pool;
    const int64_t keys_of_head = int64_t(queries.op.layer) * 2 * pool.num_kv_heads + queries.kv_head;
    const int64_t values_of_head = keys_of_head + pool.num_kv_heads;
    const int64_t image_bytes = int64_t(pool.head_dim) * TILE * sizeof(Number);
    const int begin = queries.begin_key(first) / TILE, end = (queries.end_key(last) + TILE - 1) / TILE;
    const auto find_block = [&](int index) {
        index = index < begin ? begin : index < end ? index : end - 1; // nobody sees it: any that is there
        return pool.data + queries.span.block_table[index] * pool.block_bytes;
    };
    KeyTile<Number> tile;
    tile.has_scales = pool.format == KV_INT8;
    tile.head_dim = pool.head_dim;
    for (int i = 0; i < TILE_BLOCKS; i++) {
        const uint8_t* block = find_block(key_tile * TILE_BLOCKS + i);
        const uint8_t* next_block = find_block((key_tile + 1) * TILE_BLOCKS + i);
        tile.keys[i] = reinterpret_cast<const Number*>(block + keys_of_head * image_bytes);
        tile.values[i] = reinterpret_cast<const Number*>(block + values_of_head * image_bytes);
        tile.next_keys[i] = reinterpret_cast<const Number*>(next_block + keys_of_head * image_bytes);
        if (!tile.has_scales) continue;
        const float* scales = reinterpret_cast<const float*>(block + pool.scales_offset);
        tile.key_scales[i] = scales + keys_of_head * TILE;
        tile.value_scales[i] = scales + values_of_head * TILE;
        fetch(tile.key_scales[i]);
        fetch(tile.value_scales[i]);
    }
    return tile;
}

struct Room {
    float* scores;  // [MAX_QUERIES][KEY_TILE]
    float* outputs; // [MAX_QUERIES][head_dim]
    float* few;     // [MAX_TOGETHER][head_dim]

    Room(Scratch& scratch, int head_dim) {
        scores = scratch.floats(MAX_QUERIES * (KEY_TILE + head_dim) + MAX_TOGETHER * head_dim);
        outputs = scores + MAX_QUERIES * KEY_TILE;
        few = outputs + MAX_QUERIES * head_dim;
    }
};

// Where the results of queries go, query after query.
struct Results {
    Totals* totals;
    float* outputs;
    int stride; // of outputs
};

// Adds one tile's keys. Scores of all queries come first, then values: K and V do not push each other out of the first
// cache.
template <class Number>
void attend_tile(const KeyTile<Number>& tile, const Query* queries, int count, const Room& room, const Results& to) {
    const int head_dim = tile.head_dim;
    score(tile, queries, count, room.scores);
    Totals totals[MAX_QUERIES];
    // One after the other for all queries: the latencies of one query's reductions hide behind the next's.
    for (int i = 0; i < count; i++)
        if (queries[i].end > 0) totals[i].maximum = mask_hidden(queries[i], room.scores + i * KEY_TILE);
    for (int i = 0; i < count; i++)
        if (queries[i].end > 0)
            totals[i].sum = exponentiate(tile, queries[i], totals[i].maximum, room.scores + i * KEY_TILE);
    for (int first = 0; first < count; first += MAX_TOGETHER) {
        const int together = count - first < MAX_TOGETHER ? count - first : MAX_TOGETHER;
        sum_values(tile, queries + first, together, room.scores + first * KEY_TILE, room.few);
        for (int i = 0; i < together; i++) {
            const int query = first + i;
            combine(
                to.totals[query], to.outputs + query * to.stride, totals[query], room.few + i * head_dim, head_dim);
        }
    }
}

// Adds the keys of one tile to the results of queries [first, first + count), count <= MAX_QUERIES.
template <class Number>
void attend_stored(const Queries& queries, int first, int count, int key_tile, const Room& room, const Results& to) {
    Query seen[MAX_QUERIES];
    for (int i = 0; i < count; i++) seen[i] = queries.over_tile(first + i, key_tile);
    attend_tile(find_tile<Number>(queries, first, first + count - 1, key_tile), seen, count, room, to);
}

CHATKV_INLINE void attend(
    const Queries& queries, int first, int count, int key_tile, const Room& room, const Results& to) {
    if (queries.step.pool.format == KV_INT8)
        attend_stored<int8_t>(queries, first, count, key_tile, room, to);
    else
        attend_stored<Half>(queries, first, count, key_tile, room, to);
}

void attend_chunk(
    const Step& step, const Op& op, const Span& span, int kv_head, int row_begin, int row_end, Scratch& scratch) {
    const Queries queries{step, op, span, kv_head};
    const int head_dim = queries.head_dim, end = row_end * queries.group;
    const Room room(scratch, head_dim);
    for (int first = row_begin * queries.group; first < end; first += MAX_QUERIES) {
        const int count = end - first < MAX_QUERIES ? end - first : MAX_QUERIES;
        Totals totals[MAX_QUERIES];
        const int last_tile = (queries.end_key(first + count - 1) - 1) / KEY_TILE;
        for (int tile = queries.begin_key(first) / KEY_TILE; tile <= last_tile; tile++)
            attend(queries, first, count, tile, room, {totals, room.outputs, head_dim});
        for (int i = 0; i < count; i++)
            normalise(room.outputs + i * head_dim, totals[i].sum, head_dim, queries.target_of(first + i));
    }
}

void attend_part(
    const Step& step, const Op& op, const Span& span, int kv_head, int row_begin, int row_end, int key_tile,
    float* part, Scratch& scratch) {
    const Queries queries{step, op, span, kv_head};
    const int floats = part_floats(queries.head_dim), end = row_end * queries.group;
    const Room room(scratch, queries.head_dim);
    for (int first = row_begin * queries.group; first < end; first += MAX_QUERIES) {
        const int count = end - first < MAX_QUERIES ? end - first : MAX_QUERIES;
        Totals totals[MAX_QUERIES];
        attend(queries, first, count, key_tile, room, {totals, part + PART_OUTPUTS, floats});
        for (int i = 0; i < count; i++, part += floats) {
            part[0] = totals[i].maximum;
            part[1] = totals[i].sum;
        }
    }
}

void attend_combine(
    const Step& step, const Op& op, int row, int head, const float* parts, int num_parts, int64_t stride) {
    const int head_dim = step.pool.head_dim;
    const Register& target = step.registers[op.target];
    float* to = target.data + row * target.stride + head * head_dim;
    Totals totals;
    for (int i = 0; i < num_parts; i++, parts += stride)
        combine(totals, to, {parts[0], parts[1]}, parts + PART_OUTPUTS, head_dim);
    normalise(to, totals.sum, head_dim, to);
}

CHATKV_NS_END
