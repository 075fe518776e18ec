// Panels of floats of 4 bits with a power of two as their scale (MXFP4): weights that are multiplied as the bf16 numbers that they are;
// see `groups.h` and `codes.cpp`.
//
//   weight = E2M1(code) * 2^(exponent - 127)          one exponent, a byte, for 32 inputs of a column
//
// E2M1 is a sign and one of 0, 1/2, 1, 3/2, 2, 3, 4 and 6. A product with a power of two is exact in fp32 and in bf16, also where it is
// subnormal, and infinite where bf16's is: nothing is rounded, and every exponent but 255 is computed as it is.
//
// A weight [N, K], K a multiple of 32, is packed as [N / 32][K / 32]: in a panel, for each group of inputs, 32 exponents and 32 times 32
// codes. Where pairs of bf16 are multiplied (AVX512-BF16), codes lie as those of `groups.h` do. Elsewhere that of column 4 u + p and
// input 8 b + 4 n + 2 q + r is
//   byte 128 b + 16 u + 8 q + 2 p + r, bits 4 n
// so that a table of bytes, looked up for the upper and for the lower halves of bf16 numbers, gives two inputs of each column side by
// side when both are interleaved, in registers of any width.

#pragma once

#include "panels.h"

namespace disagg {

struct Floats4 {
    static constexpr bool ARE_4_BITS = true;
    static constexpr Offset OF = Offset::NONE;
    static constexpr int64_t HEADER = COLUMNS;
    static constexpr int64_t BYTES = HEADER + GROUP * COLUMNS / 2;  // of a group of a panel
    static constexpr int64_t BLOCK_LINES = BYTES / 2 / 64;
};

inline constexpr float E2M1[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// 2^(exponent - 127) of each byte; that of 0 is subnormal.
inline vr load_powers(const uint8_t* exponents) {
    constexpr int32_t LEAST = 0x00400000;
#if defined(__AVX512F__)
    const vri bits = (vri)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents))) << 23;
#elif defined(__AVX2__)
    const vri bits = (vri)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents))) << 23;
#else
    typedef uint8_t vrb __attribute__((vector_size(REGISTER_LANES)));
    vrb bytes;
    std::memcpy(&bytes, exponents, sizeof bytes);
    const vri bits = __builtin_convertvector(bytes, vri) << 23;
#endif
    const vri least = vri{} + LEAST;
    return (vr)(bits > least ? bits : least);
}

#ifndef __AVX512BF16__

// A register of bytes.
typedef uint8_t vrc __attribute__((vector_size(4 * REGISTER_LANES)));

// The lower and the upper bytes of E2M1 numbers as bf16, of codes 0 to 15.
struct FloatBytes {
    vrc low, high;
};

inline constexpr uint8_t E2M1_LOW[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
inline constexpr uint8_t E2M1_HIGH[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                          0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};

inline FloatBytes bytes_of(vrc codes) {
#if defined(__AVX512BW__)
    const auto found = [&](const uint8_t* table) {
        const __m512i tables = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
        return (vrc)_mm512_shuffle_epi8(tables, (__m512i)codes);
    };
    return {found(E2M1_LOW), found(E2M1_HIGH)};
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const auto found = [&](const uint8_t* table) {
        const __m256i tables = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
        return (vrc)_mm256_shuffle_epi8(tables, (__m256i)codes);
    };
    return {found(E2M1_LOW), found(E2M1_HIGH)};
#elif defined(__ARM_NEON)
    return {(vrc)vqtbl1q_u8(vld1q_u8(E2M1_LOW), (uint8x16_t)codes), (vrc)vqtbl1q_u8(vld1q_u8(E2M1_HIGH), (uint8x16_t)codes)};
#else
    const vrc magnitude = codes & 7, one = vrc{} + 1;
    const vrc low = (vrc)(magnitude > one) & (magnitude << 6);
    return {low, ((vrc)(magnitude > vrc{}) & ((magnitude >> 2) + 0x3f)) | (codes & 8) << 4};
#endif
}

// Of each 16 bytes of both registers, the 8 from FIRST on, in turns.
template <int FIRST, int... I>
inline vru interleaved(vrc a, vrc b, std::integer_sequence<int, I...>) {
    constexpr int SIZE = sizeof(vrc);
#ifdef DISAGG_SHUFFLE
    return (vru)__builtin_shufflevector(a, b, (I / 16 * 16 + FIRST + I % 16 / 2 + I % 2 * SIZE)...);
#else
    return (vru)__builtin_shuffle(a, b, vrc{static_cast<uint8_t>(I / 16 * 16 + FIRST + I % 16 / 2 + I % 2 * SIZE)...});
#endif
}

template <int FIRST>
inline vru interleaved(FloatBytes bytes) {
    return interleaved<FIRST>(bytes.low, bytes.high, std::make_integer_sequence<int, sizeof(vrc)>{});
}

// The weights of one group, of VECS registers of columns from `column` on.
template <int VECS>
class FloatGroup {
   public:
    FloatGroup(const char* group, int64_t column) : codes_(group + Floats4::HEADER + 4 * column) {
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v)
            powers_[v] = load_powers(reinterpret_cast<const uint8_t*>(group) + column + v * REGISTER_LANES);
    }

    // Calls `use(v, input, weight, next)` with the weights of that input and of the one behind it: of each register the inputs in order,
    // four of one register after four of another.
    template <class Use>
    [[gnu::always_inline]] void each_pair(Use use) const {
        for (int64_t block = 0; block < GROUP / 8; ++block)
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half)
#pragma GCC unroll 8
                for (int v = 0; v < VECS; ++v) {
                    vrc codes;
                    std::memcpy(&codes, codes_ + block * 4 * COLUMNS + v * 4 * REGISTER_LANES, sizeof codes);
                    const FloatBytes bytes = bytes_of(half == 0 ? codes & 15 : codes >> 4);
                    const auto scaled = [&](int64_t i, vru pairs) __attribute__((always_inline)) {
                        use(v, i, (vr)(pairs << 16) * powers_[v], (vr)(pairs & 0xffff0000u) * powers_[v]);
                    };
                    scaled(8 * block + 4 * half, interleaved<0>(bytes));
                    scaled(8 * block + 4 * half + 2, interleaved<8>(bytes));
                }
    }

   private:
    const char* codes_;
    vr powers_[VECS];
};

#endif

}  // namespace disagg
