// Linear layers in bf16, for processors that multiply bf16 pairs (AVX512-BF16). Elsewhere this file is empty, and
// also where there are AMX tiles: those multiply many rows faster, and oneDNN knows how to use them.
//
// The weight [N, K] is packed as [N / 32][K / 2][32][2], padded with zeros: panels of 32 columns, and in a panel two vectors
// for each pair of inputs. A tile of up to 12 rows by 32 columns stays in registers, so up to 12 rows read the weight once,
// in order. Each output is one chain of fp32 sums along K, in order: a row's result does not depend on the rows beside it.
// Threads take panels.
// Subnormal numbers count as zero. Plain C ABI: strides in elements, rows of x contiguous, the output contiguous.

#include "team.h"
#include "vec.h"

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

namespace disagg {
namespace {

constexpr int VECS = 2;
constexpr int64_t COLUMNS = VECS * LANES;
constexpr int64_t LINE = 64;
constexpr int64_t STREAM_AHEAD = 8192;

struct Linear {
    const bf16* x;
    int64_t x_stride, num_rows;
    const bf16* packed;
    int64_t num_columns, depth;
    const bf16* bias;
    bf16* out;
};

// What a tile asks for while it computes: `lines` cache lines for each pair of inputs.
struct Ahead {
    const char* start;
    int lines;
};

inline vu load_pairs(const bf16* p) {
    vu x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline vu splat_pair(const bf16* p, int count) {
    uint32_t pair = 0;
    std::memcpy(&pair, p, count * sizeof(bf16));
    return vu{} + pair;
}

// Rows [row, row + ROWS) of one panel, whose first column is `column`.
template <int ROWS>
void tile(const Linear& args, int64_t row, int64_t column, const bf16* panel, Ahead ahead) {
    const bf16* x = args.x + row * args.x_stride;
    vf acc[ROWS][VECS] = {};
    const auto step = [&](int64_t k, int count) {
        vu weights[VECS];
        for (int v = 0; v < VECS; ++v) weights[v] = load_pairs(panel + k * COLUMNS + v * 2 * LANES);
        for (int r = 0; r < ROWS; ++r) {
            const vu pair = splat_pair(x + r * args.x_stride + k, count);
            for (int v = 0; v < VECS; ++v)
                acc[r][v] = (vf)_mm512_dpbf16_ps((__m512)acc[r][v], (__m512bh)pair, (__m512bh)weights[v]);
        }
    };
    int64_t k = 0;
    for (; k + 2 <= args.depth; k += 2) {
        for (int line = 0; line < ahead.lines; ++line, ahead.start += LINE) __builtin_prefetch(ahead.start);
        step(k, 2);
    }
    if (k < args.depth) step(k, 1);
    for (int v = 0; v < VECS; ++v) {
        const int64_t at = column + v * LANES, left = args.num_columns - at;
        if (left <= 0) return;
        const int n = left < LANES ? static_cast<int>(left) : LANES;
        const vf bias = args.bias ? load(args.bias + at, n) : vf{};
        for (int r = 0; r < ROWS; ++r) store(args.out + (row + r) * args.num_columns + at, acc[r][v] + bias, n);
    }
}

using Tile = void (*)(const Linear&, int64_t, int64_t, const bf16*, Ahead);
constexpr Tile TILES[] = {tile<1>, tile<2>, tile<3>, tile<4>,  tile<5>,  tile<6>,
                          tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>};
constexpr int64_t MAX_ROWS = sizeof TILES / sizeof *TILES;

// One tile of rows is bound by memory: it asks for its own panel, a little ahead. Of several, the first two ask for half of
// the next panel each, and all find their own in the cache.
Ahead ahead_of(const bf16* panel, int64_t panel_size, int64_t tile, int64_t num_tiles) {
    const char* start = reinterpret_cast<const char*>(panel);
    if (num_tiles == 1) return {start + STREAM_AHEAD, VECS};
    const int64_t panel_bytes = panel_size * static_cast<int64_t>(sizeof(bf16));
    return {start + panel_bytes + tile * panel_bytes / VECS, tile < VECS ? 1 : 0};
}

void panels(const Linear& args, int64_t first, int64_t end) {
    const int64_t panel_size = (args.depth + 1) / 2 * 2 * COLUMNS;
    const int64_t num_tiles = (args.num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const bf16* panel = args.packed + first * panel_size;
    for (int64_t column = first * COLUMNS; column < end * COLUMNS; column += COLUMNS, panel += panel_size)
        for (int64_t t = 0; t < num_tiles; ++t) {
            const int64_t row = t * args.num_rows / num_tiles, next = (t + 1) * args.num_rows / num_tiles;
            TILES[next - row - 1](args, row, column, panel, ahead_of(panel, panel_size, t, num_tiles));
        }
}

void linear(const Linear& args) {
    const int64_t num_panels = (args.num_columns + COLUMNS - 1) / COLUMNS;
    in_parts([&](int part, int num_parts) {
        panels(args, part * num_panels / num_parts, (part + 1) * num_panels / num_parts);
    });
}

}  // namespace
}  // namespace disagg

extern "C" {

void disagg_silu_mul(int32_t is_bf16, const void* gate_up, int64_t stride, void* out, int64_t num_tokens, int64_t size);
void disagg_add_rms_norm(int32_t is_bf16, const void* x, int64_t x_stride, const void* residual, int64_t residual_stride,
                         const void* weight, void* out, void* new_residual, int64_t num_tokens, int64_t size, float eps);

// out = x @ weight.T + bias, all bf16, rounded once; `bias` may be null.
void disagg_linear(const void* x, int64_t x_stride, int64_t num_rows, const void* packed, int64_t num_columns, int64_t depth,
                   const void* bias, void* out) {
    using disagg::bf16;
    disagg::linear({static_cast<const bf16*>(x), x_stride, num_rows, static_cast<const bf16*>(packed), num_columns, depth,
                    static_cast<const bf16*>(bias), static_cast<bf16*>(out)});
}

// out = silu(gate) * up of the product, which is left in `gate_up`.
void disagg_linear_silu_mul(const void* x, int64_t x_stride, int64_t num_rows, const void* packed, int64_t num_columns,
                            int64_t depth, const void* bias, void* gate_up, void* out) {
    disagg_linear(x, x_stride, num_rows, packed, num_columns, depth, bias, gate_up);
    disagg_silu_mul(1, gate_up, num_columns, out, num_rows, num_columns / 2);
}

// new_residual = product + residual; out = its RMS norm. The product is overwritten by the sum, vector by vector.
void disagg_linear_add_rms_norm(const void* x, int64_t x_stride, int64_t num_rows, const void* packed, int64_t num_columns,
                                int64_t depth, const void* bias, const void* residual, int64_t residual_stride,
                                const void* norm, float eps, void* new_residual, void* out) {
    disagg_linear(x, x_stride, num_rows, packed, num_columns, depth, bias, new_residual);
    disagg_add_rms_norm(1, new_residual, num_columns, residual, residual_stride, norm, out, new_residual, num_rows,
                        num_columns, eps);
}

}  // extern "C"

#endif
