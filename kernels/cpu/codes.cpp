// Products of weights that are codes in groups (`groups.h`): tiles by fp32 multiply-adds (`fma.h`) and by pairs of bf16 (`pairs.h`).
//
// A file of its own, so that it is compiled beside `linear.cpp`.

#include <algorithm>
#include <vector>

#include "fma.h"
#include "pairs.h"
#include "scratch.h"

namespace disagg {
namespace {

#ifdef __AVX512BF16__

// The tile of weights that are codes in groups, of the first rows. It prefetches its own panel, from `ahead` on. Where it KEEPS, it
// leaves what it widened, as a bf16 panel.
template <int ROWS, int LEVEL, bool KEEPS, class CODES>
void tile_of_codes(const Linear& args, int64_t column, const char* panel, const char* ahead, bf16* widened) {
    const bf16* x = static_cast<const bf16*>(args.x);
    vf acc[ROWS][VECS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) acc[r][v] = vf{};
    GroupSource<CODES> source(panel);
    for (int64_t k = 0; k < args.depth; k += GROUP) {
        source.begin_group();
        for (int block = 0; block < source.BLOCKS; ++block, x += 2 * source.BLOCK_PAIRS) {
            for (int64_t line = 0; line < CODES::BLOCK_LINES; ++line, ahead += LINE) prefetch<LEVEL>(ahead);
            source.begin_block();
#pragma GCC unroll 8
            for (int i = 0; i < source.BLOCK_PAIRS; ++i) {
                vru weights[VECS];
                source.pair(i, weights);
                if constexpr (KEEPS) {
                    for (int v = 0; v < VECS; ++v) std::memcpy(widened + v * 2 * LANES, &weights[v], sizeof weights[v]);
                    widened += PAIR;
                }
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    const vru pair = splat_pair(x + r * args.x_stride + 2 * i, 2);
#pragma GCC unroll 4
                    for (int v = 0; v < VECS; ++v)
                        acc[r][v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)pair, (__m512bh)weights[v]);
                }
            }
        }
    }
    finish<bf16>(args, 0, ROWS, column, VECS, [&](int r, int v) { return acc[r][v]; });
}

using TileOfCodes = void (*)(const Linear&, int64_t, const char*, const char*, bf16*);

template <class CODES, int LEVEL>
constexpr TileOfCodes TILES_OF_CODES[] = {
    tile_of_codes<1, LEVEL, false, CODES>, tile_of_codes<2, LEVEL, false, CODES>, tile_of_codes<3, LEVEL, false, CODES>,
    tile_of_codes<4, LEVEL, false, CODES>, tile_of_codes<5, LEVEL, false, CODES>, tile_of_codes<6, LEVEL, false, CODES>,
    tile_of_codes<7, LEVEL, false, CODES>, tile_of_codes<8, LEVEL, false, CODES>, tile_of_codes<8, LEVEL, true, CODES>};
constexpr int64_t MAX_ROWS_OF_CODES = 8;

// More rows than the first tile's find the panel widened, in the cache.
template <class CODES>
void panel_of_codes(const Linear& args, int64_t column, const char* panel) {
    static thread_local std::vector<vf> memory;
    const auto& of_codes = PREFETCH_INTO_L2 ? TILES_OF_CODES<CODES, 2> : TILES_OF_CODES<CODES, 1>;
    const char* ahead = panel + STREAM_AHEAD;
    if (args.num_rows <= MAX_ROWS_OF_CODES) return of_codes[args.num_rows - 1](args, column, panel, ahead, nullptr);
    bf16* widened = reinterpret_cast<bf16*>(at_least(memory, args.panel_size() / (2 * LANES)));
    prefetch_outputs<bf16>(args, {0, MAX_ROWS_OF_CODES}, column);
    of_codes[MAX_ROWS_OF_CODES](args, column, panel, ahead, widened);
    const int64_t left = args.num_rows - MAX_ROWS_OF_CODES, tiles = num_tiles(left, MAX_ROWS);
    for (int64_t t = 0; t < tiles; ++t) {
        TileRows rows = rows_of(t, tiles, left);
        rows.first += MAX_ROWS_OF_CODES;
        prefetch_outputs<bf16>(args, rows, column);
        tile_of<Bf16Source, 0>(rows.count)(args, rows.first, column, {widened}, nullptr);
    }
}

#else

// sums[r][c] of ROWS rows and the columns from `column` on.
template <int ROWS, class CODES>
void fma_tile_of_codes(const WideRows& x, const char* panel, int64_t column, float (*sums)[COLUMNS]) {
    constexpr int VECS = fma_columns(ROWS) / REGISTER_LANES;
    vr acc[ROWS][VECS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) acc[r][v] = vr{};
    const float* rows[ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) rows[r] = x.at + r * x.stride;
    for (int64_t k = 0; k < 2 * x.num_pairs; k += GROUP, panel += CODES::BYTES) {
        if constexpr (std::is_same_v<CODES, Floats4>) {
            const FloatGroup<VECS> group(panel, column);
            if constexpr (ROWS == 1) {
                group.each_pair([&](int v, int64_t i, vr weight, vr next) __attribute__((always_inline)) {
                    acc[0][v] = fma(splat_register(rows[0][k + i]), weight, acc[0][v]);
                    acc[0][v] = fma(splat_register(rows[0][k + i + 1]), next, acc[0][v]);
                });
            } else {  // weights go through memory: making them takes the registers of the sums
                vr weights[GROUP][VECS];
                group.each_pair([&](int v, int64_t i, vr weight, vr next) __attribute__((always_inline)) {
                    weights[i][v] = weight;
                    weights[i + 1][v] = next;
                });
                for (int64_t i = 0; i < GROUP; ++i) add_input(acc, rows, k + i, [&](int v) { return weights[i][v]; });
            }
        } else {
            WideGroup<CODES, VECS>(panel, column).each([&](int64_t i, auto weight) __attribute__((always_inline)) {
                add_input(acc, rows, k + i, weight);
            });
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) store_register(sums[r] + v * REGISTER_LANES, acc[r][v]);
}

template <class CODES, int... ROW>
auto fma_tile_of_codes(int64_t num_rows, std::integer_sequence<int, ROW...>) {
    static constexpr void (*TILES[])(const WideRows&, const char*, int64_t, float (*)[COLUMNS]) = {fma_tile_of_codes<ROW + 1, CODES>...};
    return TILES[num_rows - 1];
}

// The outputs of one panel. Several tiles share what was widened once.
template <class CODES>
void panel_of_codes_by_fma(const Linear& args, const WideRows& x, int64_t column, const char* panel) {
    if (args.num_rows > MAX_FMA_ROWS) {
        static thread_local std::vector<bf16> memory;
        bf16* widened = at_least(memory, args.panel_size());
        widen_panel<CODES>(panel, args.depth, widened);
        return panel_by_fma<bf16, Bf16Inputs>(args, x, column, widened, false);
    }
    alignas(64) float sums[MAX_FMA_ROWS][COLUMNS];
    const int64_t columns = fma_columns(args.num_rows);
    for (int64_t at = 0; at < COLUMNS; at += columns) {
        fma_tile_of_codes<CODES>(args.num_rows, std::make_integer_sequence<int, MAX_FMA_ROWS>{})(x, panel, at, sums);
        finish<bf16>(args, 0, static_cast<int>(args.num_rows), column + at, static_cast<int>(columns / LANES),
                     [&](int r, int v) { return load(sums[r] + v * LANES); });
    }
}

#endif

// `body` with the codes of the weights, the first panel and the bytes of each.
template <class Body>
void with_panels(const Linear& args, Body body) {
    with_codes(args.weights, [&](auto codes) {
        body(codes, static_cast<const char*>(args.packed), args.depth / GROUP * decltype(codes)::BYTES);
    });
}

}  // namespace

#ifdef __AVX512BF16__

void panels_of_codes_by_pairs(const Linear& args, int64_t first, int64_t end) {
    if (args.num_rows == 0) return;
    with_panels(args, [&](auto codes, const char* panels, int64_t bytes) {
        for (int64_t p = first; p < end; ++p) panel_of_codes<decltype(codes)>(args, p * COLUMNS, panels + p * bytes);
    });
}

#else

void panels_of_codes_by_fma(const Linear& args, const WideRows& x, int64_t first, int64_t end) {
    if (args.num_rows == 0) return;
    with_panels(args, [&](auto codes, const char* panels, int64_t bytes) {
        for (int64_t p = first; p < end; ++p) panel_of_codes_by_fma<decltype(codes)>(args, x, p * COLUMNS, panels + p * bytes);
    });
}

#endif

}  // namespace disagg
