// Multiplies and adds in registers alone, with as many independent sums as keep the units going: what the processor can do at
// most, by the instructions that its level has for products of bf16 weights.
#include "../../kernels/cpu/vec.h"

#ifdef __AMX_BF16__
#include "../../kernels/cpu/tiles.h"
#endif

namespace {

constexpr int kSums = 12;

#ifdef __AMX_BF16__
int64_t by_tiles(int64_t rounds) {
    alignas(64) static const char zeros[1024] = {};
    const disagg::TileRegisters registers(disagg::TILE_ROWS);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, zeros, 64);
    _tile_loadd(6, zeros, 64);
    for (int64_t i = 0; i < rounds; ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 6);
        _tile_dpbf16ps(2, 4, 6);
        _tile_dpbf16ps(3, 4, 6);
        disagg::memory_fence_of_compiler();
    }
    return rounds * 4 * 16 * 16 * 32 * 2;
}
#endif

template <class Vector, class Multiply>
int64_t by_vectors(int64_t rounds, int64_t flop, Vector factor, Multiply multiply) {
    disagg::vr sums[kSums];
    for (int s = 0; s < kSums; ++s) sums[s] = disagg::splat_register(static_cast<float>(s));  // none is like another
    for (int64_t i = 0; i < rounds; ++i)
#pragma GCC unroll 12
        for (int s = 0; s < kSums; ++s) sums[s] = multiply(sums[s], factor);
    float total = 0.0f;
    for (const disagg::vr& sum : sums) total += sum[0];
    return total == 1.0f ? 0 : rounds * kSums * flop;
}

}  // namespace

// Returns how many operations it has made.
extern "C" int64_t disagg_multiply(int64_t rounds) {
    volatile float given = 0.5f;
    const float x = given;
#ifdef __AMX_BF16__
    if (disagg::tiles_are_usable()) return by_tiles(rounds);
#endif
#ifdef __AVX512BF16__
    return by_vectors(rounds, 4 * disagg::REGISTER_LANES, _mm512_castps_si512(_mm512_set1_ps(x)), [](disagg::vr sum, __m512i y) {
        return (disagg::vr)_mm512_dpbf16_ps((__m512)sum, (__m512bh)y, (__m512bh)y);
    });
#else
    return by_vectors(rounds, 2 * disagg::REGISTER_LANES, disagg::splat_register(x),
                      [](disagg::vr sum, disagg::vr y) { return disagg::fma(sum, y, y); });
#endif
}
