// Products of query heads and rows of K and V in decode attention: a few heads and a run of adjacent rows.

#pragma once

#include "vec.h"

namespace disagg {

// DIM is the head dim, or 0 for one that is known at run time only (then the last vector of a row may be short).
template <int DIM>
struct Shape {
    static constexpr int VECS = DIM ? DIM / LANES : MAX_HEAD_DIM / LANES;
    int dim;
    int vecs() const { return DIM ? VECS : (dim + LANES - 1) / LANES; }
    int lanes(int v) const { return DIM ? LANES : (dim - v * LANES < LANES ? dim - v * LANES : LANES); }
};

// scores[h][t] = scale * q[h] . k[t], and sums[h] += sum over t of weights[h][t] * v[t], for H heads
// and `count` <= 16 rows. Scores past `count` may hold anything. They are functions of their own, and their loops are unrolled by
// name: else the compiler writes what is added up to the stack, too, after each run of rows. As many rows, or vectors of a row,
// are met at a time as there are registers for their sums; each sum is one chain along the row, or over the rows.
template <class T, int DIM>
struct Rows {
    using Weight = float;
    static constexpr int VECS = Shape<DIM>::VECS;

    static void load_query(const T* q, Shape<DIM> shape, vf* query) {
        for (int v = 0; v < shape.vecs(); ++v) query[v] = load(q + v * LANES, shape.lanes(v));
    }

    template <int H>
    [[gnu::noinline]] static void score(const vf (*q)[VECS], Shape<DIM> shape, const T* rows, int count, float scale,
                                        float* scores, int64_t stride) {
        constexpr int AT_ONCE = 4 * (H + 1) <= SUM_REGISTERS ? 4 : 2;
        vf partial[H][LANES];
        for (int t = 0; t < count; t += AT_ONCE)
#pragma GCC unroll 4
            for (int part = 0; part < REGISTERS; ++part) {
                vr acc[AT_ONCE][H];
                const T* row[AT_ONCE];
#pragma GCC unroll 4
                for (int i = 0; i < AT_ONCE; ++i) {
                    row[i] = rows + static_cast<int64_t>(t + i < count ? t + i : 0) * shape.dim;
#pragma GCC unroll 4
                    for (int h = 0; h < H; ++h) acc[i][h] = splat_register(0.0f);
                }
                for (int v = 0; v < shape.vecs(); ++v) {
                    vr keys[AT_ONCE];
#pragma GCC unroll 4
                    for (int i = 0; i < AT_ONCE; ++i) keys[i] = load_part(row[i], shape, v, part);
#pragma GCC unroll 4
                    for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
                        for (int i = 0; i < AT_ONCE; ++i) acc[i][h] = fma(part_of(q[h][v], part), keys[i], acc[i][h]);
                }
#pragma GCC unroll 4
                for (int i = 0; i < AT_ONCE; ++i)
#pragma GCC unroll 4
                    for (int h = 0; h < H; ++h) part_of(partial[h][t + i], part) = acc[i][h];
            }
        for (int h = 0; h < H; ++h) store(scores + h * stride, sum_each(partial[h]) * scale);
    }

    template <int H>
    [[gnu::noinline]] static void add(vf (*sums)[VECS], Shape<DIM> shape, const T* rows, int count, const float* weights,
                                      int64_t stride) {
        constexpr int MOST = SUM_REGISTERS / (H * REGISTERS) > 0 ? SUM_REGISTERS / (H * REGISTERS) : 1;
        constexpr int AT_ONCE = DIM == 0 ? 1 : MOST >= VECS ? VECS : VECS % MOST == 0 ? MOST : MOST >= 2 && VECS % 2 == 0 ? 2 : 1;
        for (int first = 0; first < shape.vecs(); first += AT_ONCE) {
            vf acc[H][AT_ONCE];
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
                for (int v = 0; v < AT_ONCE; ++v) acc[h][v] = sums[h][first + v];
            for (int t = 0; t < count; ++t) {
                const T* row = rows + static_cast<int64_t>(t) * shape.dim;
                vf values[AT_ONCE];
#pragma GCC unroll 8
                for (int v = 0; v < AT_ONCE; ++v) values[v] = load(row + (first + v) * LANES, shape.lanes(first + v));
#pragma GCC unroll 4
                for (int h = 0; h < H; ++h) {
                    const vf weight = splat(weights[h * stride + t]);
#pragma GCC unroll 8
                    for (int v = 0; v < AT_ONCE; ++v) acc[h][v] = fma(weight, values[v], acc[h][v]);
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
                for (int v = 0; v < AT_ONCE; ++v) sums[h][first + v] = acc[h][v];
        }
    }

    static void finish(const vf* acc, Shape<DIM> shape, T* out) {
        for (int v = 0; v < shape.vecs(); ++v) store(out + v * LANES, acc[v], shape.lanes(v));
    }

   private:
    // One register of vector v of a row.
    static vr load_part(const T* row, Shape<DIM> shape, int v, int part) {
        if constexpr (DIM != 0) return load_register(row + v * LANES + part * REGISTER_LANES);
        return part_of(load(row + v * LANES, shape.lanes(v)), part);
    }
};

#ifdef __AVX512BF16__
// Two bf16 numbers a lane, where the head dim fills whole registers. A sum of weighted rows takes two rows at a time; their
// numbers are interleaved within 128-bit lanes, and sorted once at the end.
template <int DIM>
struct PairRows {
    using Weight = bf16;
    static constexpr int VECS = Shape<DIM>::VECS, PAIRS = DIM / 2 / LANES;

    static __m512i load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
    static vf madd(vf acc, __m512i a, __m512i b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }

    static void load_query(const bf16* q, Shape<DIM>, vf* query) { std::memcpy(query, q, DIM * sizeof(bf16)); }

    // Four vectors to one: in each 128-bit lane, their sums over that lane.
    static __m512 sum_lanes(const vf* x) {
        const auto add_halves = [](vf a, vf b) {
            return (__m512d)((vf)_mm512_unpacklo_ps((__m512)a, (__m512)b) + (vf)_mm512_unpackhi_ps((__m512)a, (__m512)b));
        };
        const __m512d a = add_halves(x[0], x[1]), b = add_halves(x[2], x[3]);
        return (__m512)((vf)_mm512_unpacklo_pd(a, b) + (vf)_mm512_unpackhi_pd(a, b));
    }

    // Four vectors to one: lane i of the result is the sum of the lanes, of 128 bits, of vector i.
    static __m512 sum_across(__m512 a, __m512 b) {
        return (__m512)((vf)_mm512_shuffle_f32x4(a, b, 0x88) + (vf)_mm512_shuffle_f32x4(a, b, 0xdd));
    }

    template <int H>
    [[gnu::noinline]] static void score(const vf (*q)[VECS], Shape<DIM>, const bf16* rows, int count, float scale,
                                        float* scores, int64_t stride) {
        if (count == LANES)
            score_rows<H, true>(q, rows, count, scale, scores, stride);
        else
            score_rows<H, false>(q, rows, count, scale, scores, stride);
    }

    template <int H>
    [[gnu::noinline]] static void add(vf (*sums)[VECS], Shape<DIM>, const bf16* rows, int count, const bf16* weights,
                                      int64_t stride) {
        vf acc[H][VECS];
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; ++v) acc[h][v] = sums[h][v];
        for (int t = 0; t < count; t += 2) {
            const bf16 *row = rows + t * DIM, *second = t + 1 < count ? row + DIM : NO_ROW;
#pragma GCC unroll 4
            for (int v = 0; v < PAIRS; ++v) {
                const __m512i a = load_pairs(row + v * 2 * LANES), b = load_pairs(second + v * 2 * LANES);
                const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
                for (int h = 0; h < H; ++h) {
                    int32_t pair;
                    std::memcpy(&pair, weights + h * stride + t, sizeof pair);
                    acc[h][2 * v] = madd(acc[h][2 * v], _mm512_set1_epi32(pair), low);
                    acc[h][2 * v + 1] = madd(acc[h][2 * v + 1], _mm512_set1_epi32(pair), high);
                }
            }
        }
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; ++v) sums[h][v] = acc[h][v];
    }

    static void finish(const vf* acc, Shape<DIM>, bf16* out) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        for (int v = 0; v < VECS; v += 2) {
            const __m512 low = (__m512)acc[v], high = (__m512)acc[v + 1];
            store(out + v * LANES, (vf)_mm512_permutex2var_ps(low, first, high));
            store(out + (v + 1) * LANES, (vf)_mm512_permutex2var_ps(low, second, high));
        }
    }

   private:
    alignas(sizeof(vf)) static constexpr bf16 NO_ROW[DIM] = {};

    // WHOLE: `count` is 16.
    template <int H, bool WHOLE>
    static void score_rows(const vf (*q)[VECS], const bf16* rows, int count, float scale, float* scores, int64_t stride) {
        __m512 quarters[H][4];
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; ++quarter) {
            vf acc[H][4] = {};
            for (int i = 0; i < 4; ++i) {
                const int t = 4 * quarter + i;
                const bf16* row = rows + (WHOLE || t < count ? t : 0) * DIM;
                for (int v = 0; v < PAIRS; ++v) {
                    const __m512i k = load_pairs(row + v * 2 * LANES);
                    for (int h = 0; h < H; ++h) acc[h][i] = madd(acc[h][i], (__m512i)q[h][v], k);
                }
            }
            for (int h = 0; h < H; ++h) quarters[h][quarter] = sum_lanes(acc[h]);
        }
        for (int h = 0; h < H; ++h) {
            const __m512 *x = quarters[h], total = sum_across(sum_across(x[0], x[1]), sum_across(x[2], x[3]));
            store(scores + h * stride, (vf)total * scale);
        }
    }
};
template <int DIM>
using RowsOfPairs = PairRows<DIM>;
#else
// Rows of bf16 whose numbers are widened pair by pair: vector 2 v has the even ones of 32, vector 2 v + 1 the odd ones, and so do
// queries and sums, which are sorted at the end. A unit is a register of pairs.
template <int DIM>
struct SplitRows {
    using Weight = float;
    static constexpr int VECS = Shape<DIM>::VECS, UNITS = DIM / 2 / REGISTER_LANES;

    static void load_query(const bf16* q, Shape<DIM>, vf* query) {
        for (int unit = 0; unit < UNITS; ++unit) {
            part_of(query[2 * (unit / REGISTERS)], unit % REGISTERS) = even_of_pairs(q + unit * 2 * REGISTER_LANES);
            part_of(query[2 * (unit / REGISTERS) + 1], unit % REGISTERS) = odd_of_pairs(q + unit * 2 * REGISTER_LANES);
        }
    }

    template <int H>
    [[gnu::noinline]] static void score(const vf (*q)[VECS], Shape<DIM>, const bf16* rows, int count, float scale,
                                        float* scores, int64_t stride) {
        constexpr int AT_ONCE = 4 * (H + 1) <= SUM_REGISTERS ? 4 : 2;
        vf partial[H][LANES];
        for (int t = 0; t < count; t += AT_ONCE)
#pragma GCC unroll 4
            for (int part = 0; part < REGISTERS; ++part) {
                vr acc[AT_ONCE][H];
                const bf16* row[AT_ONCE];
#pragma GCC unroll 4
                for (int i = 0; i < AT_ONCE; ++i) {
                    row[i] = rows + (t + i < count ? t + i : 0) * DIM + part * 2 * REGISTER_LANES;
#pragma GCC unroll 4
                    for (int h = 0; h < H; ++h) acc[i][h] = splat_register(0.0f);
                }
#pragma GCC unroll 8
                for (int v = 0; v < VECS; ++v) {
                    vr keys[AT_ONCE];
#pragma GCC unroll 4
                    for (int i = 0; i < AT_ONCE; ++i) {
                        const bf16* at = row[i] + v / 2 * 2 * LANES;
                        keys[i] = v % 2 ? odd_of_pairs(at) : even_of_pairs(at);
                    }
#pragma GCC unroll 4
                    for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
                        for (int i = 0; i < AT_ONCE; ++i) acc[i][h] = fma(part_of(q[h][v], part), keys[i], acc[i][h]);
                }
#pragma GCC unroll 4
                for (int i = 0; i < AT_ONCE; ++i)
#pragma GCC unroll 4
                    for (int h = 0; h < H; ++h) part_of(partial[h][t + i], part) = acc[i][h];
            }
        for (int h = 0; h < H; ++h) store(scores + h * stride, sum_each(partial[h]) * scale);
    }

    template <int H>
    [[gnu::noinline]] static void add(vf (*sums)[VECS], Shape<DIM>, const bf16* rows, int count, const float* weights,
                                      int64_t stride) {
        constexpr int MOST = SUM_REGISTERS / (2 * H), AT_ONCE = MOST >= 4 && UNITS % 4 == 0 ? 4 : MOST >= 2 && UNITS % 2 == 0 ? 2 : 1;
        const auto sum = [&](int h, int unit, int odd) -> vr& {
            return part_of(sums[h][2 * (unit / REGISTERS) + odd], unit % REGISTERS);
        };
        for (int first = 0; first < UNITS; first += AT_ONCE) {
            vr acc[H][AT_ONCE][2];
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
                for (int u = 0; u < AT_ONCE; ++u) acc[h][u][0] = sum(h, first + u, 0), acc[h][u][1] = sum(h, first + u, 1);
            for (int t = 0; t < count; ++t) {
                const bf16* row = rows + t * DIM + first * 2 * REGISTER_LANES;
                vr weight[H];
#pragma GCC unroll 4
                for (int h = 0; h < H; ++h) weight[h] = splat_register(weights[h * stride + t]);
#pragma GCC unroll 4
                for (int u = 0; u < AT_ONCE; ++u)
#pragma GCC unroll 2
                    for (int odd = 0; odd < 2; ++odd) {
                        const bf16* at = row + u * 2 * REGISTER_LANES;
                        const vr values = odd ? odd_of_pairs(at) : even_of_pairs(at);
#pragma GCC unroll 4
                        for (int h = 0; h < H; ++h) acc[h][u][odd] = fma(weight[h], values, acc[h][u][odd]);
                    }
            }
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
                for (int u = 0; u < AT_ONCE; ++u) sum(h, first + u, 0) = acc[h][u][0], sum(h, first + u, 1) = acc[h][u][1];
        }
    }

    static void finish(const vf* acc, Shape<DIM>, bf16* out) {
        for (int unit = 0; unit < UNITS; ++unit) {
            const vr even = part_of(acc[2 * (unit / REGISTERS)], unit % REGISTERS);
            const vr odd = part_of(acc[2 * (unit / REGISTERS) + 1], unit % REGISTERS);
            const vru pairs = rounded_bits(even) | rounded_bits(odd) << 16;
            std::memcpy(out + unit * 2 * REGISTER_LANES, &pairs, sizeof pairs);
        }
    }
};
template <int DIM>
using RowsOfPairs = SplitRows<DIM>;
#endif

template <>
struct Rows<bf16, 32> : RowsOfPairs<32> {};
template <>
struct Rows<bf16, 64> : RowsOfPairs<64> {};
template <>
struct Rows<bf16, 96> : RowsOfPairs<96> {};
template <>
struct Rows<bf16, 128> : RowsOfPairs<128> {};

}  // namespace disagg
