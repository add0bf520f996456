// Activations as one int8 or two, each group of 32 columns with its own scale; and rows of a quantised table as floats.
#include "exp.h"
#include "norm.h"
#include "variant.h"

CHATKV_NS_BEGIN

namespace {

constexpr int32_t INFINITY_BITS = 0x7f800000;
constexpr int LARGEST_QUANTUM = 127;

// Where the groups of one row go.
struct QuantisedRow {
    int8_t* quanta;
    float* scales;
    int32_t* sums;
    float* offsets;
    int8_t* low; // null: not fine
};

QuantisedRow row_of(const Activations& to, int row, int num_columns) {
    const int64_t first = int64_t(row) * num_columns, group = first / GROUP;
    int8_t* low = to.low ? to.low + first : nullptr;
    return {to.quanta + first, to.scales + group, to.sums + group, to.offsets + group, low};
}

// Sixteen quanta of a fine row. Where 127 and -127 would both do for the low plane, either does.
CHATKV_INLINE void store_planes(vi16 quanta, int8_t* high, int8_t* low) {
    const vi16 highs = to_int(to_float(quanta) * splat(1.0f / LOW_QUANTA));
    store_int8(high, highs);
    store_int8(low, quanta - (shift_left<8>(highs) - shift_left<1>(highs)));
}

// Columns 32 g .. 32 g + 31, held in two vectors. The largest magnitude is found among the bits, as integers: there
// infinity and NaN are larger than any number. A group with one of them gets the scale NaN, which reaches every output.
CHATKV_INLINE void quantise_group(vf16 first, vf16 second, int g, const QuantisedRow& to) {
    const int32_t largest_bits = reduce_max(higher(bits(absolute(first)), bits(absolute(second))));
    float largest;
    memcpy(&largest, &largest_bits, sizeof largest);
    const int largest_quantum = to.low ? LARGEST_QUANTUM * LOW_QUANTA : LARGEST_QUANTUM;
    float scale = largest / float(largest_quantum), inverse = float(largest_quantum) / largest;
    const bool is_finite = largest_bits < INFINITY_BITS;
    if (!(inverse < __builtin_inff())) scale = inverse = 0.0f;  // zeros, or so small that the inverse overflows
    if (!is_finite) {
        scale = __builtin_nanf("");
        first = second = zero();
        inverse = 0.0f;
    }
    const vi16 least = splat(-largest_quantum), most = splat(largest_quantum);
    const vi16 first_quanta = lower(higher(to_int(first * splat(inverse)), least), most);
    const vi16 second_quanta = lower(higher(to_int(second * splat(inverse)), least), most);
    int8_t* quanta = to.quanta + g * GROUP;
    if (to.low) {
        store_planes(first_quanta, quanta, to.low + g * GROUP);
        store_planes(second_quanta, quanta + TILE, to.low + g * GROUP + TILE);
    } else {
        store_int8(quanta, first_quanta);
        store_int8(quanta + TILE, second_quanta);
    }
    const int32_t sum = reduce_add(first_quanta + second_quanta);
    to.scales[g] = scale;
    to.sums[g] = sum;
    to.offsets[g] = scale * float(sum);
}

CHATKV_INLINE vf16 silu_mul(vf16 gate, vf16 up) { return gate / (splat(1.0f) + exp(-gate)) * up; }

// quanta[i] = q[row][i] of a tile, less the zero point of INT4. `packed` is what follows the tile's header.
void row_of_tile(const uint8_t* packed, Format format, int row, int8_t* quanta) {
    for (int column = 0; column < GROUP; column++) {
        const int j = column % 4;
        if (format == INT8) {
            quanta[column] = int8_t(packed[column / 4 * 64 + 4 * row + j]);
        } else {
            const uint8_t both = packed[column / 8 * 64 + 4 * row + j];
            const int8_t quantum = int8_t(column % 8 < 4 ? both & 15 : both >> 4);
            quanta[column] = int8_t(format == INT4 ? quantum - 8 : quantum);
        }
    }
}

} // namespace

void norm_quantise(
    const Register& source, const float* weight, float eps, int num_columns, int row_begin, int row_end,
    const Activations& to) {
    for (int row = row_begin; row < row_end; row++) {
        const float* x = source.data + row * source.stride;
        const vf16 scale = splat(inverse_rms(x, num_columns, eps));
        const QuantisedRow quantised = row_of(to, row, num_columns);
        for (int g = 0, i = 0; i < num_columns; g++, i += GROUP)
            quantise_group(
                load(x + i) * scale * load(weight + i), load(x + i + TILE) * scale * load(weight + i + TILE), g,
                quantised);
    }
}

void quantise(const Register& source, int num_columns, int row_begin, int row_end, const Activations& to) {
    for (int row = row_begin; row < row_end; row++) {
        const float* x = source.data + row * source.stride;
        const QuantisedRow quantised = row_of(to, row, num_columns);
        for (int g = 0, i = 0; i < num_columns; g++, i += GROUP)
            quantise_group(load(x + i), load(x + i + TILE), g, quantised);
    }
}

void silu_mul_quantise(const Register& source, int num_columns, int row_begin, int row_end, const Activations& to) {
    for (int row = row_begin; row < row_end; row++) {
        const float* gate = source.data + row * source.stride;
        const float* up = gate + num_columns;
        const QuantisedRow quantised = row_of(to, row, num_columns);
        for (int g = 0, i = 0; i < num_columns; g++, i += GROUP)
            quantise_group(
                silu_mul(load(gate + i), load(up + i)), silu_mul(load(gate + i + TILE), load(up + i + TILE)), g,
                quantised);
    }
}

void embed(const Matrix& table, const int32_t* token_ids, int row_begin, int row_end, const Register& target) {
    const Format format = Format(table.format);
    const int num_groups = table.num_columns / GROUP;
    const int64_t tile_bytes = TILE_BYTES[format];
    for (int row = row_begin; row < row_end; row++) {
        const int token = token_ids[row], row_in_tile = token % TILE;
        const uint8_t* tile = table.tiles + token / TILE * num_groups * tile_bytes;
        float* to = target.data + row * target.stride + table.first_output;
        for (int g = 0; g < num_groups; g++, tile += tile_bytes, to += GROUP) {
            float scales[TILE], minimums[TILE] = {};
            store(scales, load_half(tile));
            if (format == INT4_AFFINE) store(minimums, load_half(tile + 32));
            int8_t quanta[GROUP];
            row_of_tile(tile + (format == INT4_AFFINE ? 64 : 32), format, row_in_tile, quanta);
            const vf16 scale = splat(scales[row_in_tile]), minimum = splat(minimums[row_in_tile]);
            for (int i = 0; i < GROUP; i += TILE) {
                const vf16 value = to_float(load_int8(quanta + i)) * scale;
                store(to + i, format == INT4_AFFINE ? value + minimum : value);
            }
        }
    }
}

CHATKV_NS_END
