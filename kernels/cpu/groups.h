// Panels of codes in groups: weights of 4 or 8 bits that are multiplied as the bf16 numbers that they stand for; see `linear.cpp`
// and `panels.h`.
//
//   weight = bf16(scale * code + minimum)          one scale and one minimum for 32 inputs of a column
//   weight = bf16(scale * (code - zero))           the same with a zero
//   weight = bf16(scale * code)
//
// Scales, minimums and zeros are fp16; the sum is fp32, rounded once, then once to bf16. So a product has the same bits as that of
// the bf16 weight, in every way to multiply, for any number of rows.
//
// A weight [N, K], K a multiple of 32, is packed as [N / 32][K / 32]: in a panel, for each group of inputs, 32 scales, 32 minimums
// or zeros where there are any, and 32 times 32 codes. Of 4 bits they are unsigned, of 8 signed. Where pairs of bf16 are multiplied
// (AVX512-BF16), the code of column 8 v + c and input p of pair i is
//   4 bits   in block i / 8, word 16 v + 2 c + p, bits 4 (i % 8)          8 bits   byte 64 i + 16 v + 2 c + p
// elsewhere that of column c and input i is
//   4 bits   in block i % 4, word c, bits 4 (i / 4)                       8 bits   byte 32 i + c

#pragma once

#include <type_traits>

#include "floats4.h"
#include "panels.h"

namespace disagg {

template <int BITS, Offset OFFSET>
struct Codes {
    static constexpr bool ARE_4_BITS = BITS == 4;
    static constexpr Offset OF = OFFSET;
    static constexpr int64_t HEADER = COLUMNS * 2 * (OFFSET == Offset::NONE ? 1 : 2);
    static constexpr int64_t BYTES = HEADER + GROUP * COLUMNS * BITS / 8;  // of a group of a panel
    static constexpr int64_t BLOCK_LINES = BYTES / 2 / 64;
};

// Scales and what is added to their products, of some columns of a group.
struct Scales {
    vr scale, offset;
};

template <class CODES>
Scales load_scales(const char* group, int64_t column) {
    if constexpr (std::is_same_v<CODES, Floats4>) {
        return {load_powers(reinterpret_cast<const uint8_t*>(group) + column), splat_register(0.0f)};
    } else {
        const auto* numbers = reinterpret_cast<const uint16_t*>(group) + column;
        const vr scale = load_fp16(numbers);
        if constexpr (CODES::OF == Offset::NONE) return {scale, splat_register(0.0f)};
        const vr other = load_fp16(numbers + COLUMNS);
        return {scale, CODES::OF == Offset::ZERO ? -(other * scale) : other};
    }
}

// x rounded to bf16, as fp32, for 0 and for numbers from 2^-110 to 2^110: the sum with 1.5 * 2^16 times its power of two has as many
// bits behind the point.
inline vr rounded_to_bf16(vr x) {
    const vr power = (vr)((vru)x & 0x7f800000u), shift = splat_register(0x1.8p16f);
    return fma(power, -shift, fma(power, shift, x));
}

// The weights of one group, of VECS registers of columns from `column` on, one input after the other.
template <class CODES, int VECS>
class WideGroup {
   public:
    static constexpr int BLOCKS = 4, NIBBLES = GROUP / BLOCKS;

    WideGroup(const char* group, int64_t column) : codes_(group + CODES::HEADER + column * (CODES::ARE_4_BITS ? 4 : 1)) {
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) {
            const Scales scales = load_scales<CODES>(group, column + v * REGISTER_LANES);
            scale_[v] = scales.scale, offset_[v] = scales.offset;
        }
    }

    // Calls `use(input, weight)`, in order; `weight(v)` is a register.
    template <class Use>
    [[gnu::always_inline]] void each(Use use) {
        if constexpr (CODES::ARE_4_BITS)
            nibbles(use, std::make_integer_sequence<int, NIBBLES>{});
        else
            for (int64_t i = 0; i < GROUP; ++i, codes_ += COLUMNS)
                use(i, [&](int v) { return weight(v, load_register(reinterpret_cast<const int8_t*>(codes_) + v * REGISTER_LANES)); });
    }

   private:
    [[gnu::always_inline]] vr weight(int v, vr code) const {
        if constexpr (CODES::OF == Offset::NONE) return rounded_to_bf16(scale_[v] * code);
        return rounded_to_bf16(fma(scale_[v], code, offset_[v]));
    }

    // Inputs whose codes are nibble N of the blocks' words. They are multiplied where they stand, by a scale as much smaller.
    template <int N, class Use>
    [[gnu::always_inline]] void nibble(Use use) {
        constexpr bool IS_LAST = N == NIBBLES - 1;  // its bits would be a sign
        for (int64_t block = 0; block < BLOCKS; ++block)
            use(N * BLOCKS + block, [&](int v) {
                vru words;
                std::memcpy(&words, codes_ + block * 4 * COLUMNS + v * 4 * REGISTER_LANES, sizeof words);
                const vru code = IS_LAST ? words >> (4 * N) : words & (15u << (4 * N));
                return weight(v, to_numbers((vri)code));
            });
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) scale_[v] = scale_[v] * splat_register(N == NIBBLES - 2 ? 0x1p24f : 0x1p-4f);
    }

    template <class Use, int... N>
    [[gnu::always_inline]] void nibbles(Use use, std::integer_sequence<int, N...>) {
        (nibble<N>(use), ...);
    }

    static vr to_numbers(vri x) { return __builtin_convertvector(x, vr); }

    const char* codes_;
    vr scale_[VECS], offset_[VECS];
};

#ifdef __AVX512BF16__

// The vectors of the pairs of one group after the other. A block is eight pairs.
template <class CODES>
class GroupSource {
   public:
    static constexpr int BLOCKS = 2, BLOCK_PAIRS = 8;

    explicit GroupSource(const void* panel) : at_(static_cast<const char*>(panel)) {
        for (int i = 0; i < LANES; ++i) numbers_[i] = std::is_same_v<CODES, Floats4> ? E2M1[i] : static_cast<float>(i);
    }

    void begin_group() {
        const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        const __m512i high = _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
        for (int v = 0; v < VECS; ++v) {
            const Scales scales = load_scales<CODES>(at_, v * LANES);
            const __m512 scale = (__m512)scales.scale, offset = (__m512)scales.offset;
            scale_[2 * v] = _mm512_permutexvar_ps(low, scale), scale_[2 * v + 1] = _mm512_permutexvar_ps(high, scale);
            offset_[2 * v] = _mm512_permutexvar_ps(low, offset), offset_[2 * v + 1] = _mm512_permutexvar_ps(high, offset);
        }
        at_ += CODES::HEADER;
    }

    void begin_block() {
        if constexpr (CODES::ARE_4_BITS) {
            for (int v = 0; v < PARTS; ++v) words_[v] = _mm512_loadu_si512(at_ + 64 * v);
            at_ += 64 * PARTS;
        }
    }

    // Pair `i` of the block.
    [[gnu::always_inline]] void pair(int i, vru (&weights)[VECS]) {
        __m512 parts[PARTS];
#pragma GCC unroll 4
        for (int v = 0; v < PARTS; ++v) {
            __m512 number;
            if constexpr (CODES::ARE_4_BITS)  // of the index, four bits count
                number = _mm512_permutexvar_ps(_mm512_srli_epi32(words_[v], 4 * i), (__m512)numbers_);
            else
                number = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at_ + 16 * v))));
            parts[v] = CODES::OF == Offset::NONE ? _mm512_mul_ps(scale_[v], number) : _mm512_fmadd_ps(scale_[v], number, offset_[v]);
        }
        if constexpr (!CODES::ARE_4_BITS) at_ += 16 * PARTS;
#pragma GCC unroll 2
        for (int v = 0; v < VECS; ++v) weights[v] = (vru)_mm512_cvtne2ps_pbh(parts[2 * v + 1], parts[2 * v]);
    }

   private:
    static constexpr int PARTS = 2 * VECS;
    const char* at_;
    vr numbers_;
    __m512i words_[PARTS];
    __m512 scale_[PARTS], offset_[PARTS];
};

// A panel of codes as a bf16 panel.
template <class CODES>
void widen_panel(const char* panel, int64_t depth, bf16* widened) {
    GroupSource<CODES> source(panel);
    for (int64_t k = 0; k < depth; k += GROUP) {
        source.begin_group();
        for (int block = 0; block < GroupSource<CODES>::BLOCKS; ++block) {
            source.begin_block();
#pragma GCC unroll 8
            for (int i = 0; i < GroupSource<CODES>::BLOCK_PAIRS; ++i, widened += PAIR) {
                vru weights[VECS];
                source.pair(i, weights);
                for (int v = 0; v < VECS; ++v) std::memcpy(widened + v * 2 * LANES, &weights[v], sizeof weights[v]);
            }
        }
    }
}

#else

// A panel of codes as a bf16 panel.
template <class CODES>
void widen_panel(const char* panel, int64_t depth, bf16* widened) {
    for (int64_t k = 0; k < depth; k += GROUP, panel += CODES::BYTES, widened += GROUP / 2 * PAIR)
        for (int64_t c = 0; c < COLUMNS; c += REGISTER_LANES) {
            const auto put = [&](int64_t i, vru pairs) { std::memcpy(widened + i / 2 * PAIR + 2 * c, &pairs, sizeof pairs); };
            if constexpr (std::is_same_v<CODES, Floats4>) {
                FloatGroup<1>(panel, c).each_pair([&](int, int64_t i, vr even, vr odd) { put(i, (vru)even >> 16 | (vru)odd); });
            } else {
                vru evens{};
                WideGroup<CODES, 1>(panel, c).each([&](int64_t i, auto weight) {
                    const vru bits = (vru)weight(0);
                    if (i % 2 == 0)
                        evens = bits >> 16;
                    else
                        put(i, evens | bits);
                });
            }
        }
}

#endif

// `body` with the codes of weights of this kind.
template <class Body>
auto with_codes(Weights weights, Body body) {
    if (weights == Weights::FLOATS4) return body(Floats4{});
    if (weights == Weights::CODES8) return body(Codes<8, Offset::NONE>{});
    if (weights == Weights::CODES4_ZERO) return body(Codes<4, Offset::ZERO>{});
    return body(Codes<4, Offset::MINIMUM>{});
}

}  // namespace disagg
