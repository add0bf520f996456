// Declarations of one variant's functions, included by the files that are compiled once for each instruction set.
#pragma once
#include "kernels.h"

#ifndef CHATKV_VARIANT
#error "compile with -DCHATKV_VARIANT=scalar, avx2, avx512 or neon"
#endif

namespace chatkv::CHATKV_VARIANT {

void embed(const Matrix& table, const int32_t* token_ids, int row_begin, int row_end, const Register& target);
void norm_quantise(
    const Register& source, const float* weight, float eps, int num_columns, int row_begin, int row_end,
    const Activations& to);
void quantise(const Register& source, int num_columns, int row_begin, int row_end, const Activations& to);
void silu_mul_quantise(const Register& source, int num_columns, int row_begin, int row_end, const Activations& to);
void linear(
    const Matrix& matrix, const Activations& from, int row_begin, int row_end, int tile_begin, int tile_end,
    const Register& target, bool adds);
void rope_store(const Step& step, const Op& op, int row_begin, int row_end);
void attend_chunk(
    const Step& step, const Op& op, const Span& span, int kv_head, int row_begin, int row_end, Scratch& scratch);
void attend_part(
    const Step& step, const Op& op, const Span& span, int kv_head, int row_begin, int row_end, int key_tile,
    float* part, Scratch& scratch);
void attend_combine(
    const Step& step, const Op& op, int row, int head, const float* parts, int num_parts, int64_t stride);

} // namespace chatkv::CHATKV_VARIANT
