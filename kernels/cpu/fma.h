// Tiles of fp32 multiply-adds: GEMMs of a few rows by one panel of a packed weight, on every processor; see `linear.cpp` and
// `panels.h`.
//
// Rows are fp32, widened before; the numbers of a panel are widened in registers. Each output is one chain of sums along K, in
// order, each of them rounded once where the processor has fused multiply-adds: the same bits with AVX2, AVX-512 and NEON, for
// any number of rows, and for any number of columns at a time.
//
// A tile has as many rows as there are registers for its sums: with 32 registers of 16 numbers up to twelve rows of a panel, with
// 16 of 8 numbers up to six of half of one. A single row takes all of a panel, which then is read in order.

#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "product.h"
#include "scratch.h"
#include "thread_pool.h"

namespace disagg {

// The most rows of a tile: of half a panel, or of all of it where a register has half of its columns.
constexpr int64_t MAX_FMA_ROWS = SUM_REGISTERS / (REGISTERS > 1 ? REGISTERS : 2);

// Columns of a tile of `num_rows` rows: a panel's, or half of them.
constexpr int64_t fma_columns(int64_t num_rows) { return REGISTERS == 1 || num_rows == 1 ? COLUMNS : COLUMNS / 2; }

// A source gives the registers of one input after the other, of some columns of a panel: first the even inputs of all pairs.
class Bf16Inputs {
   public:
    using Number = bf16;

    Bf16Inputs(const void* panel, int64_t column) : at_(static_cast<const bf16*>(panel) + 2 * column) {}

    vr even(int v) const { return even_of_pairs(at_ + v * 2 * REGISTER_LANES); }
    vr odd(int v) const { return odd_of_pairs(at_ + v * 2 * REGISTER_LANES); }
    void next() { at_ += PAIR; }

   private:
    const bf16* at_;
};

class Int8Inputs {
   public:
    using Number = int8_t;

    Int8Inputs(const void* panel, int64_t column) : at_(static_cast<const int8_t*>(panel) + column) {}

    vr even(int v) const { return load_register(at_ + v * REGISTER_LANES); }
    vr odd(int v) const { return load_register(at_ + COLUMNS + v * REGISTER_LANES); }
    void next() { at_ += PAIR; }

   private:
    const int8_t* at_;
};

class Fp32Inputs {
   public:
    using Number = float;

    Fp32Inputs(const void* panel, int64_t column) : at_(static_cast<const float*>(panel) + column) {}

    vr even(int v) const { return load_register(at_ + v * REGISTER_LANES); }
    vr odd(int v) const { return load_register(at_ + COLUMNS + v * REGISTER_LANES); }
    void next() { at_ += PAIR; }

   private:
    const float* at_;
};

// Codes in groups; see `groups.h` and `codes.cpp`.
struct CodeInputs {};

// Rows of fp32 numbers, `stride` apart; their depth is even, zeros behind the last input.
struct WideRows {
    const float* at;
    int64_t stride, num_pairs;
};

// The products of one input. Registers keep the smaller of the two: the rows' numbers or the weights.
template <int ROWS, int VECS, class Weight>
[[gnu::always_inline]] inline void add_input(vr (&acc)[ROWS][VECS], const float* const (&rows)[ROWS], int64_t k, Weight weight) {
    if constexpr (ROWS < VECS) {
        vr x[ROWS];
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) x[r] = splat_register(rows[r][k]);
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) {
            const vr weights = weight(v);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) acc[r][v] = fma(x[r], weights, acc[r][v]);
        }
    } else {
        vr weights[VECS];
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) weights[v] = weight(v);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const vr x = splat_register(rows[r][k]);
#pragma GCC unroll 8
            for (int v = 0; v < VECS; ++v) acc[r][v] = fma(x, weights[v], acc[r][v]);
        }
    }
}

// sums[r][c] of ROWS rows and the columns that `source` begins with. For each pair of inputs, AHEAD_LINES cache lines from `ahead`
// on are prefetched into the cache of that LEVEL.
template <int ROWS, int AHEAD_LINES, int LEVEL, class Source>
void fma_tile(const WideRows& x, Source source, const char* ahead, float (*sums)[COLUMNS]) {
    constexpr int VECS = fma_columns(ROWS) / REGISTER_LANES;
    vr acc[ROWS][VECS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) acc[r][v] = vr{};
    const float* rows[ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) rows[r] = x.at + r * x.stride;
    for (int64_t pair = 0; pair < x.num_pairs; ++pair) {
        for (int line = 0; line < AHEAD_LINES; ++line, ahead += LINE) prefetch<LEVEL>(ahead);
        add_input(acc, rows, 2 * pair, [&](int v) { return source.even(v); });
        add_input(acc, rows, 2 * pair + 1, [&](int v) { return source.odd(v); });
        source.next();
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) store_register(sums[r] + v * REGISTER_LANES, acc[r][v]);
}

template <class Source>
using FmaTile = void (*)(const WideRows&, Source, const char*, float (*)[COLUMNS]);

template <class Source, int AHEAD_LINES, int LEVEL, int... ROW>
FmaTile<Source> fma_tile_of(int64_t num_rows, std::integer_sequence<int, ROW...>) {
    static constexpr FmaTile<Source> TILES[] = {fma_tile<ROW + 1, AHEAD_LINES, LEVEL, Source>...};
    return TILES[num_rows - 1];
}

template <class Source, int AHEAD_LINES>
FmaTile<Source> fma_tile_of(int64_t num_rows) {
    constexpr std::make_integer_sequence<int, MAX_FMA_ROWS> rows;
    if constexpr (AHEAD_LINES > 0)
        if (PREFETCH_INTO_L2) return fma_tile_of<Source, AHEAD_LINES, 2>(num_rows, rows);
    return fma_tile_of<Source, AHEAD_LINES, 1>(num_rows, rows);
}

// The tile that prefetches so many lines for each pair of inputs.
template <class Source>
FmaTile<Source> fma_tile_of(int64_t num_rows, int64_t ahead_lines) {
    constexpr int LINES = PAIR * sizeof(typename Source::Number) / LINE;
    if (ahead_lines == 0) return fma_tile_of<Source, 0>(num_rows);
    if (ahead_lines == 1) return fma_tile_of<Source, 1>(num_rows);
    if (ahead_lines == 2) return fma_tile_of<Source, std::min(LINES, 2)>(num_rows);
    return fma_tile_of<Source, LINES>(num_rows);
}

// The outputs of one panel. A single row is bound by memory: a processor with a small first-level cache is fastest with its hardware
// prefetching alone, others prefetch their own panel, a little ahead. Of more rows the first tiles share the lines of the next
// panel. docs/benchmarks/kernels.md
template <class T, class Source>
void panel_by_fma(const Linear& args, const WideRows& x, int64_t column, const typename Source::Number* panel, bool prefetches = true) {
    constexpr int64_t LINES = PAIR * sizeof(typename Source::Number) / LINE;
    const char* start = reinterpret_cast<const char*>(panel);
    const int64_t tiles = num_tiles(args.num_rows, MAX_FMA_ROWS);
    const int64_t columns = fma_columns((args.num_rows + tiles - 1) / tiles), passes = tiles * COLUMNS / columns;
    const int64_t shared = (LINES + passes - 1) / passes, next = x.num_pairs * LINE;
    alignas(64) float sums[MAX_FMA_ROWS][COLUMNS];
    int64_t pass = 0;
    for (int64_t at = 0; at < COLUMNS; at += columns)
        for (int64_t t = 0; t < tiles; ++t, ++pass) {
            const TileRows rows = rows_of(t, tiles, args.num_rows);
            prefetch_outputs<T>(args, rows, column + at);
            int64_t lines = args.num_rows == 1 ? (PREFETCH_INTO_L2 ? 0 : LINES) : pass * shared < LINES ? shared : 0;
            if (!prefetches) lines = 0;
            const char* ahead = start + (args.num_rows == 1 ? STREAM_AHEAD : (LINES + pass * shared) * next);
            const WideRows tile_rows{x.at + rows.first * x.stride, x.stride, x.num_pairs};
            fma_tile_of<Source>(rows.count, lines)(tile_rows, Source(panel, at), ahead, sums);
            finish<T>(args, rows.first, static_cast<int>(rows.count), column + at, static_cast<int>(columns / LANES),
                      [&](int r, int v) { return load(sums[r] + v * LANES); });
        }
}

// out[0 .. stride) = a row of x in fp32, zeros behind it.
template <class T>
void widen_row(const T* x, int64_t depth, float* out, int64_t stride) {
    int64_t i = 0;
    for (; i + LANES <= depth; i += LANES) store(out + i, load(x + i));
    for (; i < stride; i += LANES) store(out + i, i < depth ? load(x + i, static_cast<int>(depth - i)) : splat(0.0f));
}

// Numbers from one widened row to the next, an odd number of lines: rows a multiple of `CACHE_WAY` apart would share few places of
// a cache.
inline int64_t wide_stride(int64_t depth) {
    const int64_t lines = (depth + LANES - 1) / LANES;
    return (lines + 1 - lines % 2) * LANES;
}

// Those of weights that are codes; see `codes.cpp`.
void panels_of_codes_by_fma(const Linear& args, const WideRows& x, int64_t first, int64_t end);

// The panels from `first` to `end`.
template <class T, class Source>
void panels_by_fma(const Linear& args, const WideRows& x, int64_t first, int64_t end) {
    if constexpr (std::is_same_v<Source, CodeInputs>) {
        panels_of_codes_by_fma(args, x, first, end);
    } else {
        const auto* packed = static_cast<const typename Source::Number*>(args.packed);
        for (int64_t p = first; p < end; ++p) panel_by_fma<T, Source>(args, x, p * COLUMNS, packed + p * args.panel_size());
    }
}

template <class T, class Source>
void multiply_by_fma(const Linear& args) {
    static thread_local std::vector<vf> memory;
    const int64_t stride = wide_stride(args.depth);
    Linear block = args;
    for (int64_t first = 0; first < args.num_rows; first += COPIED_ROWS) {
        block.num_rows = std::min(COPIED_ROWS, args.num_rows - first);
        block.out = static_cast<T*>(args.out) + first * args.out_stride;
        float* wide = reinterpret_cast<float*>(at_least(memory, block.num_rows * stride / LANES));
        const auto widen = [&](int64_t r) {
            widen_row(static_cast<const T*>(args.x) + (first + r) * args.x_stride, args.depth, wide + r * stride, stride);
        };
        if (block.num_rows * args.depth < MIN_PARALLEL_NUMBERS)
            for (int64_t r = 0; r < block.num_rows; ++r) widen(r);
        else
            parallel_for(block.num_rows, widen);
        const WideRows x{wide, stride, (args.depth + 1) / 2};
        parallel_for_dynamic(args.num_panels(), PANELS_A_RUN,
                             [&](int64_t p, int64_t end) { panels_by_fma<T, Source>(block, x, p, end); });
    }
}

}  // namespace disagg
