// Tiles of sums of bf16 pairs (AVX512-BF16): GEMMs of up to 12 rows by one panel of a packed weight; see `linear.cpp`.
//
// Weights are bf16, int8 with a scale for each column (with AVX512-VBMI), or codes in groups. Of an int8 panel the first tile leaves the widened
// panel to the others, in the cache. Each output is one chain along K of sums of pairs, in order: a row's result does not depend
// on the rows beside it. Subnormal numbers count as zero.

#pragma once

#include "product.h"

#ifdef __AVX512BF16__

#include <vector>

#include "scratch.h"
#include "thread_pool.h"

namespace disagg {

inline vru splat_pair(const bf16* p, int count) {
    uint32_t pair = 0;
    std::memcpy(&pair, p, count * sizeof(bf16));
    return vru{} + pair;
}

constexpr int64_t MAX_ROWS = 12;

// While it computes, a tile prefetches AHEAD_LINES cache lines from `ahead` on for each pair of inputs, into the cache of that
// LEVEL.
template <int ROWS, int AHEAD_LINES, int LEVEL, class Source>
void tile(const Linear& args, int64_t row, int64_t column, Source source, const char* ahead) {
    const bf16* x = static_cast<const bf16*>(args.x) + row * args.x_stride;
    vf acc[ROWS][VECS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) acc[r][v] = vf{};
    const auto step = [&](int64_t k, int count) {
        vru weights[VECS];
        source.next(weights);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const vru pair = splat_pair(x + r * args.x_stride + k, count);
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
    finish<bf16>(args, row, ROWS, column, VECS, [&](int r, int v) { return acc[r][v]; });
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
// One tile of rows is bound by memory: it prefetches its own panel, a little ahead. Of several, the first two prefetch half of
// the next panel each, and all find their own in the cache.
inline void panel_of_bf16(const Linear& args, int64_t column, const bf16* panel, int64_t panel_size, int64_t num_tiles) {
    const char* start = reinterpret_cast<const char*>(panel);
    if (num_tiles == 1) {
        const int64_t most = num_threads() > 1 ? MAX_UNPREFETCHED_ROWS_SHARED : MAX_UNPREFETCHED_ROWS;
        const bool prefetches = !PREFETCH_INTO_L2 || args.num_rows > most;
        const auto choose = prefetches ? tile_of<Bf16Source, VECS> : tile_of<Bf16Source, 0>;
        return choose(args.num_rows)(args, 0, column, {panel}, start + STREAM_AHEAD);
    }
    const int64_t panel_bytes = panel_size * static_cast<int64_t>(sizeof(bf16));
    for (int64_t t = 0; t < num_tiles; ++t) {
        const TileRows rows = rows_of(t, num_tiles, args.num_rows);
        prefetch_outputs<bf16>(args, rows, column);
        const auto choose = t < VECS ? tile_of<Bf16Source, 1> : tile_of<Bf16Source, 0>;
        choose(rows.count)(args, rows.first, column, {panel}, start + panel_bytes + t * panel_bytes / VECS);
    }
}

#ifdef DISAGG_INT8_PAIRS

inline void panel_of_int8(const Linear& args, int64_t column, const int8_t* panel, int64_t panel_size, int64_t num_tiles) {
    static thread_local std::vector<bf16> memory;
    const char* ahead = reinterpret_cast<const char*>(panel) + STREAM_AHEAD;
    if (num_tiles == 1) return tile_of<Int8Source, 1>(args.num_rows)(args, 0, column, Int8Source(panel), ahead);
    bf16* widened = at_least(memory, panel_size);
    const TileRows first = rows_of(0, num_tiles, args.num_rows);
    prefetch_outputs<bf16>(args, first, column);
    tile_of<KeepingSource, 1>(first.count)(args, 0, column, KeepingSource(panel, widened), ahead);
    for (int64_t t = 1; t < num_tiles; ++t) {
        const TileRows rows = rows_of(t, num_tiles, args.num_rows);
        prefetch_outputs<bf16>(args, rows, column);
        tile_of<Bf16Source, 0>(rows.count)(args, rows.first, column, {widened}, ahead);
    }
}

#endif

// The panels from `first` to `end` of weights that are codes; see `codes.cpp`.
void panels_of_codes_by_pairs(const Linear& args, int64_t first, int64_t end);

// The panels from `first` to `end`.
template <class Element, class Panel>
void panels_by_pairs(const Linear& args, int64_t first, int64_t end, Panel panel_of) {
    const int64_t panel_size = args.panel_size(), tiles = num_tiles(args.num_rows, MAX_ROWS);
    const Element* packed = static_cast<const Element*>(args.packed);
    if (tiles == 0) return;
    for (int64_t p = first; p < end; ++p) panel_of(args, p * COLUMNS, packed + p * panel_size, panel_size, tiles);
}

}  // namespace disagg

#endif
