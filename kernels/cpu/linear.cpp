// Linear layers in bf16, for processors that multiply bf16 pairs (AVX512-BF16); elsewhere this file is empty. The weights are
// bf16, or int8 with a scale for each column (with AVX512-VBMI).
//
// A tile of up to 12 rows by one panel of 32 columns stays in registers, so up to 12 rows read the weight once, in order.
// More rows are several tiles on each panel; of an int8 panel the first tile leaves the widened panel to the others, in the
// cache. Each output is one chain of fp32 sums along K, in order: a row's result does not depend on the rows beside it.
// Where the processor has matrix tiles (AMX), they multiply any number of rows (`tiles.h`), in blocks of up to 32.
// Threads take panels. Rows of x that would share few cache sets are copied further apart first. Subnormal numbers count as
// zero. Strides in elements, rows of x contiguous, the output contiguous.
//
// Loops over sums are unrolled by name: the compiler then keeps them in registers alone, without a second copy on the stack.

#include "prefetch.h"
#include "calls.h"
#include "elementwise.h"
#include "thread_pool.h"
#include "vec.h"

#ifdef __AVX512BF16__

#include <algorithm>
#include <vector>

#include "panels.h"
#include "scratch.h"
#include "tiles.h"

namespace disagg {
namespace {

constexpr int64_t STREAM_AHEAD = 8192;
constexpr int64_t PANELS_A_RUN = 3;

// Up to so many rows of bf16, a processor with a small first-level cache is fastest with its hardware prefetching alone: that
// has more lines in flight than software can request, as long as loads come densely. With several threads, which share the
// memory, each has time for more rows between two lines. docs/benchmarks/kernels.md
constexpr int64_t MAX_UNPREFETCHED_ROWS = 6;
constexpr int64_t MAX_UNPREFETCHED_ROWS_SHARED = 8;

// Rows that lie a multiple of CACHE_WAY bytes apart share the few places of the first-level cache that one address may have (of
// 64 sets of lines, one), and a tile of CROWD of them pushes its own rows out.
constexpr int64_t CACHE_WAY = 4096;
constexpr int64_t CROWD = 8;
constexpr int64_t SPREAD_ROWS = 480;

struct Linear {
    const bf16* x;
    int64_t x_stride, num_rows;
    const void* packed;
    const float* scales;  // null: the panels are bf16
    int64_t num_columns, depth;
    const bf16* bias;  // may be null
    bf16* out;
};

inline vu splat_pair(const bf16* p, int count) {
    uint32_t pair = 0;
    std::memcpy(&pair, p, count * sizeof(bf16));
    return vu{} + pair;
}

// Sums of rows [row, row + ROWS) and a panel, whose first column is `column`, become outputs.
template <int ROWS>
[[gnu::always_inline]] inline void finish(const Linear& args, int64_t row, int64_t column, const vf (&acc)[ROWS][VECS]) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
        const int64_t at = column + v * LANES, left = args.num_columns - at;
        if (left <= 0) return;
        const int n = left < LANES ? static_cast<int>(left) : LANES;
        const vf scale = args.scales ? load(args.scales + at, n) : splat(1.0f);
        const vf bias = args.bias ? load(args.bias + at, n) : vf{};
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) store(args.out + (row + r) * args.num_columns + at, acc[r][v] * scale + bias, n);
    }
}

// While it computes, a tile prefetches AHEAD_LINES cache lines from `ahead` on for each pair of inputs, into the cache of that
// LEVEL.
template <int ROWS, int AHEAD_LINES, int LEVEL, class Source>
void tile(const Linear& args, int64_t row, int64_t column, Source source, const char* ahead) {
    const bf16* x = args.x + row * args.x_stride;
    vf acc[ROWS][VECS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) acc[r][v] = vf{};
    const auto step = [&](int64_t k, int count) {
        vu weights[VECS];
        source.next(weights);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const vu pair = splat_pair(x + r * args.x_stride + k, count);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v)
                acc[r][v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)pair, (__m512bh)weights[v]);
        }
    };
    int64_t k = 0;
    for (; k + 2 <= args.depth; k += 2) {
        for (int line = 0; line < AHEAD_LINES; ++line, ahead += LINE) prefetch<LEVEL>(ahead);
        step(k, 2);
    }
    if (k < args.depth) step(k, 1);
    finish<ROWS>(args, row, column, acc);
}

template <class Source>
using Tile = void (*)(const Linear&, int64_t, int64_t, Source, const char*);

template <class Source, int LINES, int LEVEL>
constexpr Tile<Source> TILES[] = {
    tile<1, LINES, LEVEL, Source>,  tile<2, LINES, LEVEL, Source>,  tile<3, LINES, LEVEL, Source>,
    tile<4, LINES, LEVEL, Source>,  tile<5, LINES, LEVEL, Source>,  tile<6, LINES, LEVEL, Source>,
    tile<7, LINES, LEVEL, Source>,  tile<8, LINES, LEVEL, Source>,  tile<9, LINES, LEVEL, Source>,
    tile<10, LINES, LEVEL, Source>, tile<11, LINES, LEVEL, Source>, tile<12, LINES, LEVEL, Source>};

template <class Source, int AHEAD_LINES>
Tile<Source> tile_of(int64_t num_rows) {
    constexpr int SECOND = AHEAD_LINES ? 2 : 1;  // without prefetches both levels are the same
    const auto& tiles = PREFETCH_INTO_L2 ? TILES<Source, AHEAD_LINES, SECOND> : TILES<Source, AHEAD_LINES, 1>;
    return tiles[num_rows - 1];
}
constexpr int64_t MAX_ROWS = 12;

inline int64_t num_tiles(int64_t num_rows) { return (num_rows + MAX_ROWS - 1) / MAX_ROWS; }

// The rows of tile t of `num_tiles`, nearly equal shares.
struct Rows {
    int64_t first, count;
};
inline Rows rows_of(int64_t t, int64_t num_tiles, int64_t num_rows) {
    const int64_t first = t * num_rows / num_tiles;
    return {first, (t + 1) * num_rows / num_tiles - first};
}

// The first line that one of several tiles will write in each row: by the end of the tile they have arrived.
[[gnu::always_inline]] inline void prefetch_outputs(const Linear& args, Rows rows, int64_t column) {
    for (int64_t r = rows.first; r < rows.first + rows.count; ++r) prefetch_for_write(args.out + r * args.num_columns + column);
}

// One tile of rows is bound by memory: it prefetches its own panel, a little ahead. Of several, the first two prefetch half of
// the next panel each, and all find their own in the cache.
void panel_of_bf16(const Linear& args, int64_t column, const bf16* panel, int64_t panel_size, int64_t num_tiles) {
    const char* start = reinterpret_cast<const char*>(panel);
    if (num_tiles == 1) {
        const int64_t most = num_threads() > 1 ? MAX_UNPREFETCHED_ROWS_SHARED : MAX_UNPREFETCHED_ROWS;
        const bool prefetches = !PREFETCH_INTO_L2 || args.num_rows > most;
        const auto choose = prefetches ? tile_of<Bf16Source, VECS> : tile_of<Bf16Source, 0>;
        return choose(args.num_rows)(args, 0, column, {panel}, start + STREAM_AHEAD);
    }
    const int64_t panel_bytes = panel_size * static_cast<int64_t>(sizeof(bf16));
    for (int64_t t = 0; t < num_tiles; ++t) {
        const Rows rows = rows_of(t, num_tiles, args.num_rows);
        prefetch_outputs(args, rows, column);
        const auto choose = t < VECS ? tile_of<Bf16Source, 1> : tile_of<Bf16Source, 0>;
        choose(rows.count)(args, rows.first, column, {panel}, start + panel_bytes + t * panel_bytes / VECS);
    }
}

#ifdef __AVX512VBMI__

void panel_of_int8(const Linear& args, int64_t column, const int8_t* panel, int64_t panel_size, int64_t num_tiles) {
    thread_local std::vector<bf16> memory;
    const char* ahead = reinterpret_cast<const char*>(panel) + STREAM_AHEAD;
    if (num_tiles == 1) return tile_of<Int8Source, 1>(args.num_rows)(args, 0, column, Int8Source(panel), ahead);
    bf16* widened = at_least(memory, panel_size);
    const Rows first = rows_of(0, num_tiles, args.num_rows);
    prefetch_outputs(args, first, column);
    tile_of<KeepingSource, 1>(first.count)(args, 0, column, KeepingSource(panel, widened), ahead);
    for (int64_t t = 1; t < num_tiles; ++t) {
        const Rows rows = rows_of(t, num_tiles, args.num_rows);
        prefetch_outputs(args, rows, column);
        tile_of<Bf16Source, 0>(rows.count)(args, rows.first, column, {widened}, ahead);
    }
}

#endif

#ifdef __AMX_BF16__

constexpr int64_t WIDENED_AHEAD = 2 * TILE_DEPTH;

template <int TILES, class Prepare>
void multiply(const BlockRows& rows, const bf16* panel, const char* ahead, int64_t lines, BlockSums& sums, Prepare prepare) {
    PREFETCH_INTO_L2 ? multiply_block<TILES, 2>(rows, panel, ahead, lines, sums, prepare)
                     : multiply_block<TILES, 1>(rows, panel, ahead, lines, sums, prepare);
}

// `prepare(k)` makes the pairs of inputs k to k + 32 of `panel`, for the first block; the others find them there. The only block
// prefetches its own panel, which is `panel_bytes` from `start` on, a little ahead; several share the next one.
template <class Prepare>
void panel_by_tiles(const Linear& args, const TiledRows& tiled, int64_t column, const bf16* panel, const char* start,
                    int64_t panel_bytes, Prepare prepare) {
    alignas(64) BlockSums sums;
    const int64_t num_blocks = (tiled.num_tiles + BLOCK_TILES - 1) / BLOCK_TILES;
    const int64_t steps = std::max<int64_t>(args.depth / TILE_DEPTH, 1);
    const int64_t lines = (panel_bytes + LINE * steps * num_blocks - 1) / (LINE * steps * num_blocks);
    const char* ahead = start + (num_blocks > 1 ? panel_bytes : STREAM_AHEAD);
    for (int64_t t = 0; t < tiled.num_tiles; t += BLOCK_TILES, ahead += lines * steps * LINE) {
        const int64_t num_tiles = std::min(BLOCK_TILES, tiled.num_tiles - t);
        const int64_t firsts[BLOCK_TILES] = {tiled.first(t), tiled.first(t + num_tiles - 1)};
        const BlockRows rows = {{args.x + firsts[0] * args.x_stride, args.x + firsts[1] * args.x_stride},
                                args.x_stride,
                                tiled.size,
                                args.depth};
        for (int64_t b = 0; b < num_tiles; ++b) prefetch_outputs(args, {firsts[b], tiled.size}, column);
        const auto ready = [](int64_t) {};
        if (t == 0)
            num_tiles == 2 ? multiply<2>(rows, panel, ahead, lines, sums, prepare) : multiply<1>(rows, panel, ahead, lines, sums, prepare);
        else
            num_tiles == 2 ? multiply<2>(rows, panel, ahead, lines, sums, ready) : multiply<1>(rows, panel, ahead, lines, sums, ready);
        for (int64_t b = 0; b < num_tiles; ++b)
            for (int64_t r = 0; r < tiled.size; ++r) {
                vf acc[1][VECS];
                for (int v = 0; v < VECS; ++v) acc[0][v] = load(sums[b][r] + v * LANES);
                finish<1>(args, firsts[b] + r, column, acc);
            }
    }
}

void panels_by_tiles(const Linear& args, int64_t first, int64_t end) {
    if (args.num_rows == 0) return;
    const TiledRows tiled(args.num_rows);
    const TileRegisters registers(tiled.size);
    const int64_t panel_size = (args.depth + 1) / 2 * PAIR;
    for (int64_t p = first; p < end; ++p) {
#ifdef __AVX512VBMI__
        if (args.scales) {
            static thread_local std::vector<bf16> memory;
            bf16* widened = at_least(memory, panel_size);
            const int8_t* panel = static_cast<const int8_t*>(args.packed) + p * panel_size;
            KeepingSource source(panel, widened);
            int64_t made = 0;
            const auto widen = [&](int64_t k) {  // WIDENED_AHEAD: what was stored just now cannot be read yet without waiting
                const int64_t end = std::min(k + WIDENED_AHEAD + TILE_DEPTH, args.depth);
                KeepingSource pairs = source;
                vu weights[VECS];
                for (int64_t at = made; at < end; at += 2) pairs.next(weights);
                source = pairs;
                made = end + end % 2;
                memory_fence_of_compiler();
            };
            panel_by_tiles(args, tiled, p * COLUMNS, widened, reinterpret_cast<const char*>(panel), panel_size, widen);
            continue;
        }
#endif
        const bf16* panel = static_cast<const bf16*>(args.packed) + p * panel_size;
        const int64_t bytes = panel_size * static_cast<int64_t>(sizeof(bf16));
        panel_by_tiles(args, tiled, p * COLUMNS, panel, reinterpret_cast<const char*>(panel), bytes, [](int64_t) {});
    }
}

#endif

template <class Element, class Panel>
void panels(const Linear& args, int64_t first, int64_t end, Panel panel_of) {
    const int64_t panel_size = (args.depth + 1) / 2 * PAIR;
    const int64_t tiles = num_tiles(args.num_rows);
    const Element* packed = static_cast<const Element*>(args.packed);
    if (tiles == 0) return;
    for (int64_t p = first; p < end; ++p) panel_of(args, p * COLUMNS, packed + p * panel_size, panel_size, tiles);
}

void panels_in_runs(const Linear& args) {
    const int64_t num_panels = (args.num_columns + COLUMNS - 1) / COLUMNS;
    parallel_for_dynamic(num_panels, PANELS_A_RUN, [&](int64_t first, int64_t end) {
#ifdef __AMX_BF16__
        if (tiles_are_usable()) return panels_by_tiles(args, first, end);
#endif
#ifdef __AVX512VBMI__
        if (args.scales) return panels<int8_t>(args, first, end, panel_of_int8);
#endif
        panels<bf16>(args, first, end, panel_of_bf16);
    });
}

bool is_crowded(const Linear& args) {
    const int64_t tiles = num_tiles(args.num_rows), stride_bytes = args.x_stride * static_cast<int64_t>(sizeof(bf16));
    return args.num_rows >= CROWD * tiles && args.x_stride >= args.depth && stride_bytes % CACHE_WAY == 0;
}

// The same GEMM of copies of the rows, a line further apart; of so many at a time that the memory, which is kept, is small.
void spread(const Linear& args) {
    constexpr int64_t WAY = CACHE_WAY / sizeof(bf16), SPACE = LINE / sizeof(bf16);
    static thread_local std::vector<bf16> memory;
    Linear block = args;
    block.x_stride = (args.depth + WAY - 1) / WAY * WAY + SPACE;
    for (int64_t first = 0; first < args.num_rows; first += SPREAD_ROWS) {
        block.num_rows = std::min(SPREAD_ROWS, args.num_rows - first);
        bf16* copies = at_least(memory, block.num_rows * block.x_stride);
        parallel_for(block.num_rows, [&](int64_t r) {
            std::copy_n(args.x + (first + r) * args.x_stride, args.depth, copies + r * block.x_stride);
        });
        block.x = copies;
        block.out = args.out + first * args.num_columns;
        panels_in_runs(block);
    }
}

void linear(const Linear& args) { is_crowded(args) ? spread(args) : panels_in_runs(args); }

struct LinearSiluMul {
    Linear product;
    bf16* out;
};

struct LinearAddRmsNorm {
    Linear product;
    const bf16* residual;
    int64_t residual_stride;
    const bf16* norm;
    float eps;
    bf16* out;
};

}  // namespace
}  // namespace disagg

extern "C" {

// Whether int8 weights can be packed for this file, too: 1 or 0.
int64_t disagg_linear_takes_int8() {
#ifdef __AVX512VBMI__
    return 1;
#else
    return 0;
#endif
}

// out = x @ weight.T (times the scale of the column) + bias, rounded once.
int64_t disagg_linear(const void* args) {
    disagg::linear(disagg::args_as<disagg::Linear>(args));
    return disagg::DONE;
}

// out = silu(gate) * up of the GEMM's output, which is left in product.out.
int64_t disagg_linear_silu_mul(const void* p) {
    const auto& args = disagg::args_as<disagg::LinearSiluMul>(p);
    const disagg::Linear& product = args.product;
    disagg::linear(product);
    disagg::silu_mul_rows(product.out, product.num_columns, args.out, product.num_rows, product.num_columns / 2);
    return disagg::DONE;
}

// The GEMM's output y becomes y + residual, vector by vector; out = its RMS norm.
int64_t disagg_linear_add_rms_norm(const void* p) {
    const auto& args = disagg::args_as<disagg::LinearAddRmsNorm>(p);
    const disagg::Linear& product = args.product;
    disagg::linear(product);
    disagg::add_rms_norm_rows(product.out, product.num_columns, args.residual, args.residual_stride, args.norm, args.out,
                              product.out, product.num_rows, product.num_columns, args.eps);
    return disagg::DONE;
}

}  // extern "C"

#endif
