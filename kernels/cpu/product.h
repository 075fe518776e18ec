// A linear layer as the kernels are given it, and what all ways to compute one have in common; see `linear.cpp`.

#pragma once

#include "groups.h"
#include "panels.h"
#include "prefetch.h"
#include "vec.h"

namespace disagg {

constexpr int64_t STREAM_AHEAD = 8192;
constexpr int64_t PANELS_A_RUN = 3;

// Up to so many rows of bf16, a processor with a small first-level cache is fastest with its hardware prefetching alone: that
// has more lines in flight than software can request, as long as loads come densely. With several threads, which share the
// memory, each has time for more rows between two lines. docs/benchmarks/kernels.md
constexpr int64_t MAX_UNPREFETCHED_ROWS = 6;
constexpr int64_t MAX_UNPREFETCHED_ROWS_SHARED = 8;

// Rows of a call that are copied at a time, so that the memory of the copies, which is kept, is small.
constexpr int64_t COPIED_ROWS = 480;

// Numbers of rows to copy from which threads share that.
constexpr int64_t MIN_PARALLEL_NUMBERS = 1 << 15;

// x, bias and out are bf16, or fp32 where the weights are.
struct Linear {
    Weights weights;
    const void* x;
    int64_t x_stride, num_rows;
    const void* packed;
    const float* scales;  // of each column, for int8; else null
    int64_t num_columns, depth;
    const void* bias;  // may be null
    void* out;
    int64_t out_stride;  // of rows; their numbers are side by side

    int64_t num_panels() const { return (num_columns + COLUMNS - 1) / COLUMNS; }
    int64_t panel_size() const { return (depth + 1) / 2 * PAIR; }  // numbers, of other weights than codes
};

// `rows` sums of the columns from `column` on, sixteen at a time, become outputs of the rows from `row` on.
template <class T, class Sums>
[[gnu::always_inline]] inline void finish(const Linear& args, int64_t row, int rows, int64_t column, int vecs, Sums sums) {
    T* out = static_cast<T*>(args.out) + row * args.out_stride;
#pragma GCC unroll 4
    for (int v = 0; v < vecs; ++v) {
        const int64_t at = column + v * LANES, left = args.num_columns - at;
        if (left <= 0) return;
        const int n = left < LANES ? static_cast<int>(left) : LANES;
        const vf scale = args.scales ? load(args.scales + at, n) : splat(1.0f);
        const vf bias = args.bias ? load(static_cast<const T*>(args.bias) + at, n) : splat(0.0f);
#pragma GCC unroll 12
        for (int r = 0; r < rows; ++r) store(out + r * args.out_stride + at, fma(sums(r, v), scale, bias), n);
    }
}

inline int64_t num_tiles(int64_t num_rows, int64_t max_rows) { return (num_rows + max_rows - 1) / max_rows; }

// The rows of tile t of `num_tiles`, nearly equal shares.
struct TileRows {
    int64_t first, count;
};
inline TileRows rows_of(int64_t t, int64_t num_tiles, int64_t num_rows) {
    const int64_t first = t * num_rows / num_tiles;
    return {first, (t + 1) * num_rows / num_tiles - first};
}

// The first line that one of several tiles will write in each row: by the end of the tile they have arrived.
template <class T>
[[gnu::always_inline]] inline void prefetch_outputs(const Linear& args, TileRows rows, int64_t column) {
    const T* out = static_cast<const T*>(args.out);
    for (int64_t r = rows.first; r < rows.first + rows.count; ++r) prefetch_for_write(out + r * args.out_stride + column);
}

}  // namespace disagg
