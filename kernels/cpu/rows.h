// Products of query heads and rows of K and V in decode attention: a few heads and a run of adjacent rows, in the order of
// `order.h`.

#pragma once

#include "int8_rows.h"
#include "order.h"
#include "vec.h"
#include "words.h"

namespace disagg {

// Of rows of values. DIM is their size, and but for a scale how far they are apart; 0 for what is known at run time only (then the
// last vector of a row may be short).
template <int DIM>
struct Shape {
    static constexpr int VECS = ((DIM ? DIM : MAX_HEAD_DIM) + LANES - 1) / LANES;
    int dim, row_stride;
    template <class S>
    int stride() const { return DIM ? DIM + SCALE_BYTES<S> : row_stride; }
    int vecs() const { return DIM ? VECS : (dim + LANES - 1) / LANES; }
    int lanes(int v) const { return DIM ? LANES : (dim - v * LANES < LANES ? dim - v * LANES : LANES); }
};

// ---------------------------------------------------------------- scores

// A register holds one number of each chain (`order.h`) of some rows of K; or of half of the chains of one, where it is short.
constexpr int KEYS_A_REGISTER = REGISTER_LANES > CHAINS ? REGISTER_LANES / CHAINS : 1;
constexpr int REGISTERS_A_UNIT = REGISTER_LANES < CHAINS ? CHAINS / REGISTER_LANES : 1;
constexpr int64_t UNIT_BYTES = CHAINS * sizeof(Word);
constexpr int KEYS_AT_ONCE = 4 * KEYS_A_REGISTER;

// Whether the two bf16 numbers of a word are multiplied one after the other.
template <class T>
constexpr bool ARE_SPLIT = std::is_same_v<T, bf16> && std::is_same_v<WordsOf<T>, Single>;

// The registers of a query for each unit of a row.
template <class T>
constexpr int QUERY_REGISTERS = REGISTERS_A_UNIT * (ARE_SPLIT<T> ? 2 : 1);

// A query for `score`, from a row with zeros behind it up to a whole unit. Integers meet fp32 queries.
template <class T>
void load_query(const T* row, int units, vr* query) {
    for (int u = 0; u < units; ++u)
        for (int part = 0; part < REGISTERS_A_UNIT; ++part, query += QUERY_REGISTERS<T> / REGISTERS_A_UNIT) {
            vru words;
            constexpr size_t BYTES = std::min<size_t>(UNIT_BYTES, sizeof words);
            for (size_t at = 0; at < sizeof words; at += BYTES)
                std::memcpy(reinterpret_cast<char*>(&words) + at, reinterpret_cast<const char*>(row) + u * UNIT_BYTES + part * BYTES, BYTES);
            if constexpr (ARE_SPLIT<T>)
                query[0] = (vr)(words << 16), query[1] = (vr)(words & 0xffff0000u);
            else
                query[0] = (vr)words;
        }
}

// The words of S at `p`, and, where a register holds those of two rows, those `other` bytes behind.
template <class S>
inline vr load_words(const char* p, [[maybe_unused]] int64_t other) {
    if constexpr (std::is_same_v<S, int8_t>) {
        int8_t words[REGISTER_LANES];
        constexpr size_t BYTES = std::min<size_t>(CHAINS, sizeof words);
        for (size_t at = 0; at < sizeof words; at += BYTES) std::memcpy(words + at, p + (at ? other : 0), BYTES);
        return load_register(words);
    }
#ifdef __AVX512F__
    const auto unit = [](const char* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); };
    return (vr)_mm512_inserti64x4(_mm512_castsi256_si512(unit(p)), unit(p + other), 1);
#else
    vr x;
    std::memcpy(&x, p, sizeof x);
    return x;
#endif
}

// Sums of neighbouring lanes: in each 128 bits those of a, then those of b.
inline vr neighbours(vr a, vr b) {
#if defined(__AVX512F__)
    return (vr)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88) + (vr)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xdd);
#elif defined(__AVX2__)
    return (vr)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88) + (vr)_mm256_shuffle_ps((__m256)a, (__m256)b, 0xdd);
#else
    return shuffled<0, 2, 4, 6>(a, b) + shuffled<1, 3, 5, 7>(a, b);
#endif
}

// In each 128 bits the sums of four lanes of four registers.
inline vr fours(const vr (&x)[4]) { return neighbours(neighbours(x[0], x[1]), neighbours(x[2], x[3])); }

// The sums of `fours` of sixteen keys, KEYS_AT_ONCE each, those of their registers' lower halves first.
inline void store_scores(float* scores, const vr (&sums)[LANES / KEYS_AT_ONCE]) {
#if defined(__AVX512F__)
    const __m512 a = (__m512)sums[0], b = (__m512)sums[1];
    store_register(scores, (vr)_mm512_shuffle_f32x4(a, b, 0x88) + (vr)_mm512_shuffle_f32x4(a, b, 0xdd));
#elif defined(__AVX2__)
    for (int i = 0; i < 2; ++i)
        store_register(scores + i * REGISTER_LANES, shuffled<0, 1, 2, 3, 8, 9, 10, 11>(sums[2 * i], sums[2 * i + 1]) +
                                                        shuffled<4, 5, 6, 7, 12, 13, 14, 15>(sums[2 * i], sums[2 * i + 1]));
#else
    for (int i = 0; i < 4; ++i) store_register(scores + i * REGISTER_LANES, sums[i]);
#endif
}

// scores[h][t] of H heads, whose queries are `query_stride` registers apart, and sixteen rows of T, `stride` bytes apart, of whole
// units; without their scales. UNITS is their number, or 0 for one that is known at run time only. A function of its own, its loops unrolled by name:
// else the compiler keeps sums on the stack, too.
template <class T, int H, int UNITS>
[[gnu::noinline]] void score(const vr* queries, int64_t query_stride, int num_units, const T* rows, int64_t stride, float* scores,
                             int64_t score_stride) {
    constexpr int64_t WORD_BYTES = sizeof(Word) * sizeof(T) / NUMBER_BYTES<T>;
    const int units = UNITS ? UNITS : num_units;
    vr sums[H][LANES / KEYS_AT_ONCE];
#pragma GCC unroll 4
    for (int first = 0; first < LANES; first += KEYS_AT_ONCE)
#pragma GCC unroll 2
        for (int part = 0; part < REGISTERS_A_UNIT; ++part) {
            const char* keys = reinterpret_cast<const char*>(rows) + first * stride + part * REGISTER_LANES * WORD_BYTES;
            vr acc[H][4];
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h)
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) acc[h][i] = splat_register(0.0f);
            for (int u = 0; u < units; ++u) {
                const vr* query = queries + u * QUERY_REGISTERS<T> + part * (QUERY_REGISTERS<T> / REGISTERS_A_UNIT);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    const vr words = load_words<T>(keys + i * stride + u * CHAINS * WORD_BYTES, 4 * stride);
                    if constexpr (ARE_SPLIT<T>) {
                        const vr even = (vr)((vru)words << 16), odd = (vr)((vru)words & 0xffff0000u);
#pragma GCC unroll 4
                        for (int h = 0; h < H; ++h) acc[h][i] = fma(query[h * query_stride], even, acc[h][i]);
#pragma GCC unroll 4
                        for (int h = 0; h < H; ++h) acc[h][i] = fma(query[h * query_stride + 1], odd, acc[h][i]);
                    } else {
#pragma GCC unroll 4
                        for (int h = 0; h < H; ++h) acc[h][i] = WordsOf<T>::madd_register(acc[h][i], query[h * query_stride], words);
                    }
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h) {
                vr& sum = sums[h][first / KEYS_AT_ONCE];
                sum = part == 0 ? fours(acc[h]) : sum + fours(acc[h]);
            }
        }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) store_scores(scores + h * score_stride, sums[h]);
}

// ---------------------------------------------------------------- values

// sums[h] += sum over t of weights[h][t] * v[t], for H heads and `count` <= 16 rows. As many vectors of a row are met at a time as
// there are registers for their sums; each sum is one chain over the rows. Those of a head are VECS vectors, of which `in_order`
// gives vector v of the result.
template <class T, int DIM>
struct Rows {
    using Weight = float;
    static constexpr int VECS = Shape<DIM>::VECS;

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
                const T* row = rows + static_cast<int64_t>(t) * shape.template stride<T>();
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

    static vf in_order(const vf* sums, int v) { return sums[v]; }
};

#ifdef __AVX512BF16__
// Two rows at a time. The numbers of both are interleaved within 128-bit lanes: two vectors of sums are those of a unit of 32
// numbers, of which the last one of a row may be short.
template <int DIM>
struct PairRows {
    using Weight = bf16;
    static constexpr int UNIT = 2 * LANES, UNITS = ((DIM ? DIM : MAX_HEAD_DIM) + UNIT - 1) / UNIT, VECS = 2 * UNITS;

    template <int H>
    [[gnu::noinline]] static void add(vf (*sums)[VECS], Shape<DIM> shape, const bf16* rows, int count, const bf16* weights,
                                      int64_t stride) {
        constexpr int AT_ONCE = DIM == 0 ? 1 : DIM <= 128 ? UNITS : UNITS % 4 == 0 ? 4 : 1;
        const int dim = DIM ? DIM : shape.dim;
        for (int first = 0; first < (dim + UNIT - 1) / UNIT; first += AT_ONCE) {
            vf acc[H][2 * AT_ONCE];
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
                for (int v = 0; v < 2 * AT_ONCE; ++v) acc[h][v] = sums[h][2 * first + v];
            for (int t = 0; t < count; t += 2) {
                const bf16* row = rows + static_cast<int64_t>(t) * shape.template stride<bf16>();
                const bool has_second = t + 1 < count;
                int32_t pairs[H];
#pragma GCC unroll 4
                for (int h = 0; h < H; ++h) std::memcpy(&pairs[h], weights + h * stride + t, sizeof pairs[h]);
#pragma GCC unroll 4
                for (int u = 0; u < AT_ONCE; ++u) {
                    const int at = (first + u) * UNIT;
                    const __m512i a = load_unit(row, at, dim), b = has_second ? load_unit(row + shape.template stride<bf16>(), at, dim) : __m512i{};
                    const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
                    for (int h = 0; h < H; ++h) {
                        acc[h][2 * u] = Pair::madd(acc[h][2 * u], _mm512_set1_epi32(pairs[h]), low);
                        acc[h][2 * u + 1] = Pair::madd(acc[h][2 * u + 1], _mm512_set1_epi32(pairs[h]), high);
                    }
                }
            }
#pragma GCC unroll 4
            for (int h = 0; h < H; ++h)
#pragma GCC unroll 8
                for (int v = 0; v < 2 * AT_ONCE; ++v) sums[h][2 * first + v] = acc[h][v];
        }
    }

    static vf in_order(const vf* sums, int v) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        const __m512 low = (__m512)sums[v & ~1], high = (__m512)sums[v | 1];
        return (vf)_mm512_permutex2var_ps(low, v % 2 ? second : first, high);
    }

   private:
    static __m512i load_unit(const bf16* row, int at, int dim) {
        if constexpr (DIM != 0 && DIM % UNIT == 0) return _mm512_loadu_si512(row + at);
        const int left = dim - at;
        return left >= UNIT ? _mm512_loadu_si512(row + at) : _mm512_maskz_loadu_epi16((1u << left) - 1, row + at);
    }
};

template <int DIM>
struct Rows<bf16, DIM> : PairRows<DIM> {};
#else
// Rows of bf16 whose numbers are widened pair by pair: vector 2 v has the even ones of 32, vector 2 v + 1 the odd ones, and so do
// queries and sums, which are sorted at the end. A unit is a register of pairs.
template <int DIM>
struct SplitRows {
    using Weight = float;
    static constexpr int VECS = Shape<DIM>::VECS, UNITS = DIM / 2 / REGISTER_LANES;

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

    static vf in_order(const vf* sums, int v) {
        vf out;
#pragma GCC unroll 4
        for (int part = 0; part < REGISTERS; ++part) {
            const int unit = (v * REGISTERS + part) / 2, half = (v * REGISTERS + part) % 2;
            const vr even = part_of(sums[2 * (unit / REGISTERS)], unit % REGISTERS);
            const vr odd = part_of(sums[2 * (unit / REGISTERS) + 1], unit % REGISTERS);
            part_of(out, part) = alternating(even, odd, half, std::make_integer_sequence<int, REGISTER_LANES>{});
        }
        return out;
    }

   private:
    // The lanes of both in turns: of their first or of their second half.
    template <int... LANE>
    static vr alternating(vr even, vr odd, int half, std::integer_sequence<int, LANE...>) {
        constexpr int HALF = REGISTER_LANES / 2;
        return half ? shuffled<(HALF + LANE / 2 + LANE % 2 * REGISTER_LANES)...>(even, odd)
                    : shuffled<(LANE / 2 + LANE % 2 * REGISTER_LANES)...>(even, odd);
    }
};

template <>
struct Rows<bf16, 32> : SplitRows<32> {};
template <>
struct Rows<bf16, 64> : SplitRows<64> {};
template <>
struct Rows<bf16, 96> : SplitRows<96> {};
template <>
struct Rows<bf16, 128> : SplitRows<128> {};
template <>
struct Rows<bf16, 256> : SplitRows<256> {};
#endif

}  // namespace disagg
