// The panels of a packed weight, and how their pairs of inputs become vectors; see `linear.cpp`.
//
// A weight [N, K] is packed as [N / 32][K / 2], zeros where N or K does not divide: panels of 32 columns, and in a panel, for
// each pair of inputs, 32 times 2 numbers. In bf16 they are in order, 128 bytes. In fp32 and int8 those of the first input come
// before those of the second. Where AVX512-VBMI widens int8 to pairs of bf16, its numbers are sign and magnitude, ordered so
// that no further permutation is needed: byte 16 g + 8 v + 2 i + p is column 16 v + 4 g + i, input p of the pair. All 255 values
// are exact in bf16, so a product is exact in them up to the scale of its column.

#pragma once

#include "vec.h"

namespace disagg {

enum class Weights : int32_t {
    BF16 = 0,
    INT8 = 1,
    FP32 = 2,
    CODES4_MINIMUM = 3,
    CODES4_ZERO = 4,
    CODES8 = 5,
    SUMS4_MINIMUM = 6,
    SUMS4_ZERO = 7,
    SUMS8 = 8,
    FLOATS4 = 9
};

// Whether weights of this kind are codes in groups that are multiplied as what they stand for; see `groups.h` and `floats4.h`.
constexpr bool are_codes(Weights weights) {
    return (weights >= Weights::CODES4_MINIMUM && weights <= Weights::CODES8) || weights == Weights::FLOATS4;
}

// Whether they are multiplied as sums of codes; see `sums.cpp`.
constexpr bool are_sums(Weights weights) { return weights >= Weights::SUMS4_MINIMUM && weights <= Weights::SUMS8; }

constexpr int VECS = 2;
constexpr int64_t COLUMNS = VECS * LANES;
constexpr int64_t PAIR = 2 * COLUMNS;

// Of weights that are codes: inputs that have a scale in common, and what is added to products with it.
constexpr int64_t GROUP = 32;
enum class Offset { NONE, MINIMUM, ZERO };

#ifdef __AVX512BF16__

inline vru load_pairs(const bf16* p) {
    vru x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// A source gives the vectors of the pairs of one panel, in order. Each is made for one pass.
struct Bf16Source {
    const bf16* panel;

    void next(vru (&weights)[VECS]) {
        for (int v = 0; v < VECS; ++v) weights[v] = load_pairs(panel + v * 2 * LANES);
        panel += PAIR;
    }
};

#ifdef __AVX512VBMI__
#define DISAGG_INT8_PAIRS 1

// The two bytes of every magnitude as bf16, for `vpermi2b`.
struct Magnitudes {
    alignas(64) uint8_t low[128], high[128];

    constexpr Magnitudes() : low(), high() {
        for (int magnitude = 1; magnitude < 128; ++magnitude) {
            int exponent = 0;
            while (magnitude >> (exponent + 1)) ++exponent;
            const int bits = (127 + exponent) << 7 | (magnitude << (7 - exponent) & 0x7f);
            low[magnitude] = static_cast<uint8_t>(bits);
            high[magnitude] = static_cast<uint8_t>(bits >> 8);
        }
    }
};
inline constexpr Magnitudes MAGNITUDES;

class Int8Source {
   public:
    explicit Int8Source(const int8_t* panel) : panel_(panel) {
        for (int half = 0; half < 2; ++half) {
            low_[half] = _mm512_load_si512(MAGNITUDES.low + 64 * half);
            high_[half] = _mm512_load_si512(MAGNITUDES.high + 64 * half);
        }
    }

    void next(vru (&weights)[VECS]) {
        constexpr int OR_MASKED = 0xF8;  // a | (b & c)
        const __m512i packed = _mm512_loadu_si512(panel_);
        const __m512i low = _mm512_permutex2var_epi8(low_[0], packed, low_[1]);
        const __m512i magnitude = _mm512_permutex2var_epi8(high_[0], packed, high_[1]);
        const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
        const __m512i high = _mm512_ternarylogic_epi32(magnitude, packed, sign, OR_MASKED);
        weights[0] = (vru)_mm512_unpacklo_epi8(low, high);
        weights[1] = (vru)_mm512_unpackhi_epi8(low, high);
        panel_ += PAIR;
    }

   private:
    const int8_t* panel_;
    __m512i low_[2], high_[2];
};

// Leaves what it widened, as a bf16 panel, for those who need it again.
class KeepingSource {
   public:
    KeepingSource(const int8_t* panel, bf16* widened) : source_(panel), widened_(widened) {}

    void next(vru (&weights)[VECS]) {
        source_.next(weights);
        for (int v = 0; v < VECS; ++v) std::memcpy(widened_ + v * 2 * LANES, &weights[v], sizeof weights[v]);
        widened_ += PAIR;
    }

   private:
    Int8Source source_;
    bf16* widened_;
};

#endif
#endif

}  // namespace disagg
