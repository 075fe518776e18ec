// Products of matrices of bf16 (Arm's BFMMLA): GEMMs of a few rows by one panel of a packed weight; see `linear.cpp` and
// `panels.h`.
//
// The instruction multiplies two rows of four inputs by two columns of them. Two pairs of inputs of two columns are what a panel
// has in two registers, of which one interleaving makes the operand. Rows are copied before, two side by side, the last one beside
// zeros where their number is odd. Each output is one chain of the instruction's sums of four inputs, in order, whatever the
// number of rows. It is not tuned: it ran on an emulator only.

#pragma once

#include "product.h"

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
#define DISAGG_BFMMLA 1

#include <algorithm>
#include <vector>

#include "scratch.h"
#include "thread_pool.h"

namespace disagg {

constexpr int MAX_ROW_PAIRS = 3;
constexpr int64_t QUAD = 4;  // inputs

// Pairs of rows, in groups of four inputs: [pair of rows][group][row][input].
struct RowPairs {
    const bf16* at;
    int64_t num_groups, num_input_pairs;
};

// sums[r][c] of 2 * PAIRS rows and the sixteen columns from `panel` on.
template <int PAIRS>
void bfmmla_tile(const RowPairs& x, const bf16* panel, float (*sums)[COLUMNS]) {
    float32x4_t acc[PAIRS][LANES / 2];
#pragma GCC unroll 3
    for (int p = 0; p < PAIRS; ++p)
#pragma GCC unroll 8
        for (int v = 0; v < LANES / 2; ++v) acc[p][v] = vdupq_n_f32(0.0f);
    alignas(16) static const uint32_t no_inputs[LANES] = {};
    for (int64_t group = 0; group < x.num_groups; ++group, panel += 2 * PAIR) {
        const auto* first = reinterpret_cast<const uint32_t*>(panel);
        const auto* second = 2 * group + 1 < x.num_input_pairs ? first + COLUMNS : no_inputs;
        bfloat16x8_t rows[PAIRS];
#pragma GCC unroll 3
        for (int p = 0; p < PAIRS; ++p)
            rows[p] = vld1q_bf16(reinterpret_cast<const bfloat16_t*>(x.at) + (p * x.num_groups + group) * 2 * QUAD);
#pragma GCC unroll 4
        for (int v = 0; v < LANES / 4; ++v) {
            const uint32x4_t low = vld1q_u32(first + 4 * v), high = vld1q_u32(second + 4 * v);
            const bfloat16x8_t columns[2] = {vreinterpretq_bf16_u32(vzip1q_u32(low, high)),
                                             vreinterpretq_bf16_u32(vzip2q_u32(low, high))};
#pragma GCC unroll 3
            for (int p = 0; p < PAIRS; ++p)
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) acc[p][2 * v + i] = vbfmmlaq_f32(acc[p][2 * v + i], rows[p], columns[i]);
        }
    }
#pragma GCC unroll 3
    for (int p = 0; p < PAIRS; ++p)
#pragma GCC unroll 8
        for (int v = 0; v < LANES / 2; ++v) {
            vst1_f32(sums[2 * p] + 2 * v, vget_low_f32(acc[p][v]));
            vst1_f32(sums[2 * p + 1] + 2 * v, vget_high_f32(acc[p][v]));
        }
}

// The outputs of one panel.
inline void panel_by_bfmmla(const Linear& args, const RowPairs& x, int64_t column, const bf16* panel) {
    constexpr void (*TILES[])(const RowPairs&, const bf16*, float (*)[COLUMNS]) = {bfmmla_tile<1>, bfmmla_tile<2>, bfmmla_tile<3>};
    const int64_t pairs = (args.num_rows + 1) / 2, tiles = num_tiles(pairs, MAX_ROW_PAIRS);
    float sums[2 * MAX_ROW_PAIRS][COLUMNS];
    for (int64_t at = 0; at < COLUMNS; at += LANES)
        for (int64_t t = 0; t < tiles; ++t) {
            const TileRows tile = rows_of(t, tiles, pairs);
            const RowPairs rows{x.at + tile.first * x.num_groups * 2 * QUAD, x.num_groups, x.num_input_pairs};
            TILES[tile.count - 1](rows, panel + 2 * at, sums);
            const int64_t first = 2 * tile.first, count = std::min(2 * tile.count, args.num_rows - first);
            finish<bf16>(args, first, static_cast<int>(count), column + at, 1, [&](int r, int) { return load(sums[r]); });
        }
}

inline int64_t num_groups(int64_t depth) { return (depth + QUAD - 1) / QUAD; }

// Row r of those that begin at `rows`, zeros behind its last input. Where the number of rows is odd the last pair has half a row
// of anything, which is in no output that is kept.
inline void put_row_of_pair(const bf16* x, int64_t depth, bf16* rows, int64_t r) {
    const int64_t groups = num_groups(depth);
    bf16* out = rows + (r / 2 * groups * 2 + r % 2) * QUAD;
    for (int64_t group = 0; group < groups; ++group, out += 2 * QUAD) {
        const int64_t count = std::min(QUAD, depth - group * QUAD);
        std::fill(std::copy_n(x + group * QUAD, count, out), out + QUAD, bf16{0});
    }
}

// The panels from `first` to `end`.
inline void panels_by_bfmmla(const Linear& args, const RowPairs& x, int64_t first, int64_t end) {
    if (are_codes(args.weights)) {
        static thread_local std::vector<bf16> memory;
        bf16* widened = at_least(memory, args.panel_size());
        return with_codes(args.weights, [&](auto codes) {
            const int64_t bytes = args.depth / GROUP * decltype(codes)::BYTES;
            for (int64_t p = first; p < end; ++p) {
                widen_panel<decltype(codes)>(static_cast<const char*>(args.packed) + p * bytes, args.depth, widened);
                panel_by_bfmmla(args, x, p * COLUMNS, widened);
            }
        });
    }
    const auto* packed = static_cast<const bf16*>(args.packed);
    for (int64_t p = first; p < end; ++p) panel_by_bfmmla(args, x, p * COLUMNS, packed + p * args.panel_size());
}

inline void multiply_by_bfmmla(const Linear& args) {
    static thread_local std::vector<bf16> memory;
    const int64_t groups = num_groups(args.depth);
    Linear block = args;
    for (int64_t first = 0; first < args.num_rows; first += COPIED_ROWS) {
        block.num_rows = std::min(COPIED_ROWS, args.num_rows - first);
        block.out = static_cast<bf16*>(args.out) + first * args.out_stride;
        bf16* copies = at_least(memory, (block.num_rows + 1) / 2 * groups * 2 * QUAD);
        const auto copy = [&](int64_t r) {
            put_row_of_pair(static_cast<const bf16*>(args.x) + (first + r) * args.x_stride, args.depth, copies, r);
        };
        if (block.num_rows * args.depth < MIN_PARALLEL_NUMBERS)
            for (int64_t r = 0; r < block.num_rows; ++r) copy(r);
        else
            parallel_for(block.num_rows, copy);
        const RowPairs x{copies, groups, (args.depth + 1) / 2};
        parallel_for_dynamic(args.num_panels(), PANELS_A_RUN,
                             [&](int64_t p, int64_t end) { panels_by_bfmmla(block, x, p, end); });
    }
}

}  // namespace disagg

#endif
