// The numbers of which attention multiplies: words of 32 bits along the summed dimension, one fp32 number each, or, where the
// processor multiplies bf16 pairs (AVX512-BF16), two bf16 numbers.

#pragma once

#include <algorithm>
#include <type_traits>

#include "vec.h"

namespace disagg {

using Word = uint32_t;

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// One number a word.
struct Single {
    static constexpr int PER_WORD = 1;
    using Weight = float;
    using Words = vf;
    static Words words(const Word* p) { return load(reinterpret_cast<const float*>(p)); }
    static Words splat_word(const Word* p) {
        float x;
        std::memcpy(&x, p, sizeof x);
        return splat(x);
    }
    static vf madd(const vf& acc, const vf& a, const vf& b) { return fma(a, b, acc); }
    static vr madd_register(vr acc, vr a, vr b) { return fma(a, b, acc); }

    template <class T>
    static void pack(const T* row, int dim, int padded_dim, Word* words) {
        for (int i = 0; i < padded_dim; i += LANES)
            store(reinterpret_cast<float*>(words) + i, i < dim ? load(row + i, std::min(dim - i, LANES)) : splat(0.0f));
    }
};

#ifdef __AVX512BF16__
// Two bf16 numbers a word. Subnormal numbers count as zero.
struct Pair {
    static constexpr int PER_WORD = 2;
    using Weight = bf16;
    using Words = __m512i;
    static Words words(const Word* p) { return _mm512_loadu_si512(p); }
    static Words splat_word(const Word* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }
    static vf madd(vf acc, Words a, Words b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }
    static vr madd_register(vr acc, vr a, vr b) { return madd(acc, (Words)a, (Words)b); }

    static void pack(const bf16* row, int dim, int padded_dim, Word* words) {
        std::memset(words, 0, padded_dim * sizeof(bf16));
        std::memcpy(words, row, dim * sizeof(bf16));
    }
};
using ForBf16 = Pair;
#else
using ForBf16 = Single;
#endif

// The words of heads of T.
template <class T>
using WordsOf = std::conditional_t<std::is_same_v<T, bf16>, ForBf16, Single>;

// `body(n)` with n, from 1 to MOST, as a constant of the compiler's.
template <int MOST, class Body>
[[gnu::always_inline]] inline void with_constant(int64_t n, Body body) {
    if constexpr (MOST > 1)
        if (n < MOST) return with_constant<MOST - 1>(n, body);
    body(std::integral_constant<int, MOST>{});
}

}  // namespace disagg
