// Matrix tiles (AMX): GEMMs of blocks of rows by one panel of a packed weight; see `linear.cpp` and `panels.h`.
//
// A panel is what the instructions read: 16 pairs of inputs of 16 columns are one tile, of which a panel has two side by side. A
// block of up to two tiles of rows needs all eight tile registers: four of sums, two of rows, two of weights. All tiles of rows
// of a call have one size, at most 16, so the last one may begin within the one before; its rows have the same bits again.
// The sums of an output are those of 32 inputs at a time, in order, whatever the number of rows.

#pragma once

#include "product.h"

#ifdef __AMX_BF16__

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "scratch.h"

namespace disagg {

constexpr int64_t TILE_ROWS = 16, TILE_DEPTH = 32;
constexpr int64_t TILE_PAIRS = TILE_DEPTH / 2;
constexpr int64_t BLOCK_TILES = 2;
constexpr int64_t PANEL_STRIDE = PAIR * sizeof(bf16);

// Whether the system lets this process use tiles: it asks once, as Linux saves their state only for those that asked.
inline bool tiles_are_usable() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool granted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return granted;
}

// What the compiler does not know: tile instructions read and write memory.
[[gnu::always_inline]] inline void memory_fence_of_compiler() { asm volatile("" ::: "memory"); }

// The tile registers of this thread, until it goes: sums and rows of `num_rows` rows.
class TileRegisters {
   public:
    explicit TileRegisters(int64_t num_rows) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int t = 0; t < 8; ++t) {
            config.row_bytes[t] = 64;
            config.rows[t] = static_cast<uint8_t>(t < 6 ? num_rows : TILE_PAIRS);
        }
        memory_fence_of_compiler();
        _tile_loadconfig(&config);
    }
    ~TileRegisters() { _tile_release(); }
    TileRegisters(const TileRegisters&) = delete;
    TileRegisters& operator=(const TileRegisters&) = delete;
};

// How the rows of a call are divided into tiles of one size.
struct TiledRows {
    int64_t num_rows, num_tiles, size;

    explicit TiledRows(int64_t rows)
        : num_rows(rows), num_tiles((rows + TILE_ROWS - 1) / TILE_ROWS), size((rows + num_tiles - 1) / num_tiles) {}
    int64_t first(int64_t tile) const { return std::min(tile * size, num_rows - size); }
};

// Rows of bf16 that are multiplied: the tiles of rows of one block.
struct BlockRows {
    const bf16* tiles[BLOCK_TILES];
    int64_t stride, size, depth;
};

// Sums of a block in order of its tiles: [tile][row][COLUMNS].
using BlockSums = float[BLOCK_TILES][TILE_ROWS][COLUMNS];

// Multiplies a block of TILES tiles of rows by a panel. `prepare(k)` is called before the panel's pairs of inputs k to k + 32 are
// read, and meanwhile `lines` cache lines are prefetched from `ahead` on, into the cache of that LEVEL.
template <int TILES, int LEVEL, class Prepare>
void multiply_block(const BlockRows& rows, const bf16* panel, const char* ahead, int64_t lines, BlockSums& sums, Prepare prepare) {
    const int64_t x_stride = rows.stride * static_cast<int64_t>(sizeof(bf16));
    const auto step = [&](const bf16* const (&x)[BLOCK_TILES], int64_t stride, const bf16* weights) __attribute__((always_inline)) {
        _tile_loadd(6, weights, PANEL_STRIDE);
        _tile_loadd(4, x[0], stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + 2 * LANES, PANEL_STRIDE);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (TILES == 2) {
            _tile_loadd(5, x[1], stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t k = 0;
    for (; k + TILE_DEPTH <= rows.depth; k += TILE_DEPTH) {
        for (int64_t line = 0; line < lines; ++line, ahead += LINE) prefetch<LEVEL>(ahead);
        prepare(k);
        const bf16* x[BLOCK_TILES] = {rows.tiles[0] + k, rows.tiles[1] + k};
        step(x, x_stride, panel + k / 2 * PAIR);
    }
    if (k < rows.depth) {  // the rest, with zeros behind it
        alignas(64) bf16 x_rest[BLOCK_TILES][TILE_ROWS][TILE_DEPTH] = {}, weights[TILE_PAIRS][PAIR] = {};
        prepare(k);
        for (int t = 0; t < TILES; ++t)
            for (int64_t r = 0; r < rows.size; ++r) std::copy_n(rows.tiles[t] + r * rows.stride + k, rows.depth - k, x_rest[t][r]);
        std::copy_n(panel + k / 2 * PAIR, (rows.depth - k + 1) / 2 * PAIR, weights[0]);
        memory_fence_of_compiler();
        const bf16* x[BLOCK_TILES] = {x_rest[0][0], x_rest[1][0]};
        step(x, sizeof x_rest[0][0], weights[0]);
    }
    _tile_stored(0, sums[0], sizeof sums[0][0]);
    _tile_stored(1, sums[0][0] + LANES, sizeof sums[0][0]);
    if constexpr (TILES == 2) {
        _tile_stored(2, sums[1], sizeof sums[0][0]);
        _tile_stored(3, sums[1][0] + LANES, sizeof sums[0][0]);
    }
    memory_fence_of_compiler();
}

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
    const bf16* x = static_cast<const bf16*>(args.x);
    const int64_t num_blocks = (tiled.num_tiles + BLOCK_TILES - 1) / BLOCK_TILES;
    const int64_t steps = std::max<int64_t>(args.depth / TILE_DEPTH, 1);
    const int64_t lines = (panel_bytes + LINE * steps * num_blocks - 1) / (LINE * steps * num_blocks);
    const char* ahead = start + (num_blocks > 1 ? panel_bytes : STREAM_AHEAD);
    for (int64_t t = 0; t < tiled.num_tiles; t += BLOCK_TILES, ahead += lines * steps * LINE) {
        const int64_t num_tiles = std::min(BLOCK_TILES, tiled.num_tiles - t);
        const int64_t firsts[BLOCK_TILES] = {tiled.first(t), tiled.first(t + num_tiles - 1)};
        const BlockRows rows = {{x + firsts[0] * args.x_stride, x + firsts[1] * args.x_stride},
                                args.x_stride,
                                tiled.size,
                                args.depth};
        for (int64_t b = 0; b < num_tiles; ++b) prefetch_outputs<bf16>(args, {firsts[b], tiled.size}, column);
        const auto ready = [](int64_t) {};
        if (t == 0)
            num_tiles == 2 ? multiply<2>(rows, panel, ahead, lines, sums, prepare) : multiply<1>(rows, panel, ahead, lines, sums, prepare);
        else
            num_tiles == 2 ? multiply<2>(rows, panel, ahead, lines, sums, ready) : multiply<1>(rows, panel, ahead, lines, sums, ready);
        for (int64_t b = 0; b < num_tiles; ++b)
            for (int64_t r = 0; r < tiled.size; ++r)
                finish<bf16>(args, firsts[b] + r, 1, column, VECS, [&](int, int v) { return load(sums[b][r] + v * LANES); });
    }
}

// The panels from `first` to `end`.
inline void panels_by_tiles(const Linear& args, int64_t first, int64_t end) {
    if (args.num_rows == 0) return;
    const TiledRows tiled(args.num_rows);
    const TileRegisters registers(tiled.size);
    const int64_t panel_size = args.panel_size();
    for (int64_t p = first; p < end; ++p) {
#ifdef DISAGG_INT8_PAIRS
        if (args.weights == Weights::INT8) {
            static thread_local std::vector<bf16> memory;
            bf16* widened = at_least(memory, panel_size);
            const int8_t* panel = static_cast<const int8_t*>(args.packed) + p * panel_size;
            KeepingSource source(panel, widened);
            int64_t made = 0;
            const auto widen = [&](int64_t k) {  // WIDENED_AHEAD: what was stored just now cannot be read yet without waiting
                const int64_t end = std::min(k + WIDENED_AHEAD + TILE_DEPTH, args.depth);
                KeepingSource pairs = source;
                vru weights[VECS];
                for (int64_t at = made; at < end; at += 2) pairs.next(weights);
                source = pairs;
                made = end + end % 2;
                memory_fence_of_compiler();
            };
            panel_by_tiles(args, tiled, p * COLUMNS, widened, reinterpret_cast<const char*>(panel), panel_size, widen);
            continue;
        }
#endif
        if (are_codes(args.weights)) {
            static thread_local std::vector<bf16> memory;
            bf16* widened = at_least(memory, panel_size);
            with_codes(args.weights, [&](auto codes) {
                const int64_t bytes = args.depth / GROUP * decltype(codes)::BYTES;
                const char* panel = static_cast<const char*>(args.packed) + p * bytes;
                widen_panel<decltype(codes)>(panel, args.depth, widened);
                memory_fence_of_compiler();
                panel_by_tiles(args, tiled, p * COLUMNS, widened, panel, bytes, [](int64_t) {});
            });
            continue;
        }
        const bf16* panel = static_cast<const bf16*>(args.packed) + p * panel_size;
        const int64_t bytes = panel_size * static_cast<int64_t>(sizeof(bf16));
        panel_by_tiles(args, tiled, p * COLUMNS, panel, reinterpret_cast<const char*>(panel), bytes, [](int64_t) {});
    }
}

}  // namespace disagg

#endif
