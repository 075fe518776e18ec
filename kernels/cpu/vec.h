// Sixteen floats at a time, in the vector extensions that gcc and clang share: the compiler lowers them to AVX-512, two
// AVX2 halves, or NEON quarters. All arithmetic is fp32; bf16 is widened on load and rounded to nearest even on store.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace disagg {

constexpr int LANES = 16;
constexpr int MAX_HEAD_DIM = 512;

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

struct bf16 {
    uint16_t bits;
};

inline vf splat(float x) { return vf{} + x; }

inline vf load(const float* p) {
    vf x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline vf load(const bf16* p) {
    vh bits;
    std::memcpy(&bits, p, sizeof bits);
    return (vf)(__builtin_convertvector(bits, vu) << 16);
}

inline void store(float* p, vf x) { std::memcpy(p, &x, sizeof x); }

inline vh round_to_bf16(vf x) {
#ifdef __AVX512BF16__
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    const vu bits = (vu)x;
    const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const vu quiet_nan = (bits >> 16) | 0x40u;
    return __builtin_convertvector(x == x ? rounded : quiet_nan, vh);
#endif
}

inline void store(bf16* p, vf x) {
    const vh bits = round_to_bf16(x);
    std::memcpy(p, &bits, sizeof bits);
}

// The first n lanes (0 < n <= 16); the rest are zero on load and not touched on store.
template <class T>
inline vf load(const T* p, int n) {
    if (n == LANES) return load(p);
    T padded[LANES];
    std::memset(padded, 0, sizeof padded);
    std::memcpy(padded, p, n * sizeof(T));
    return load(padded);
}

template <class T>
inline void store(T* p, vf x, int n) {
    if (n == LANES) return store(p, x);
    T padded[LANES];
    store(padded, x);
    std::memcpy(p, padded, n * sizeof(T));
}

// What a store and a load of T would leave of x: how torch rounds between two ops of a dtype.
template <class T>
inline vf rounded(vf x);
template <>
inline vf rounded<float>(vf x) {
    return x;
}
template <>
inline vf rounded<bf16>(vf x) {
    return (vf)(__builtin_convertvector(round_to_bf16(x), vu) << 16);
}

inline vf max(vf a, vf b) { return a > b ? a : b; }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define DISAGG_SHUFFLE 1
#endif
#endif

// The lanes as one, by halves: the upper half meets the lower one, and so on.
template <class Meet>
inline float folded(vf x, Meet meet) {
#ifdef DISAGG_SHUFFLE
    x = meet(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15));
    x = meet(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7));
    x = meet(x, __builtin_shufflevector(x, x, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3));
    x = meet(x, __builtin_shufflevector(x, x, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1));
#else
    for (int width = LANES / 2; width > 0; width /= 2) {
        vf upper = x;
        for (int i = 0; i < width; ++i) upper[i] = x[i + width];
        x = meet(x, upper);
    }
#endif
    return x[0];
}

inline float sum(vf x) {
    return folded(x, [](vf a, vf b) { return a + b; });
}

inline float max(vf x) {
    return folded(x, [](vf a, vf b) { return max(a, b); });
}

// Lane i of the result is the sum of the lanes of x[i].
inline vf sum_each(const vf* x) {
#ifdef DISAGG_SHUFFLE
    vf a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i)
        a[i] = __builtin_shufflevector(x[2 * i], x[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
               __builtin_shufflevector(x[2 * i], x[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    for (int i = 0; i < 4; ++i)
        b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(a[2 * i], a[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    for (int i = 0; i < 2; ++i)
        c[i] = __builtin_shufflevector(b[2 * i], b[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               __builtin_shufflevector(b[2 * i], b[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    return __builtin_shufflevector(c[0], c[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(c[0], c[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#else
    vf sums;
    for (int i = 0; i < LANES; ++i) sums[i] = sum(x[i]);
    return sums;
#endif
}

// e^x to about 1e-7 relative, for x clamped to [-87, 88]; NaN stays NaN. x = n ln2 + r with |r| <= ln2 / 2; e^r by its Taylor
// series to r^7. Without AVX-512, n is rounded by adding 1.5 * 2^23, and 2^n made by writing the exponent.
inline vf exp(vf x) {
#ifdef __AVX512F__
    x = (vf)_mm512_max_ps((__m512)splat(-87.0f), (__m512)x);  // of a NaN and a number, the second
    x = (vf)_mm512_min_ps((__m512)splat(88.0f), (__m512)x);
    const vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    x = x < splat(-87.0f) ? splat(-87.0f) : x;
    x = x > splat(88.0f) ? splat(88.0f) : x;
    const vf shifted = x * 1.44269504088896341f + 12582912.0f;
    const vf n = shifted - 12582912.0f;
#endif
    vf r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    vf p = splat(1.0f / 5040.0f);
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
#ifdef __AVX512F__
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const vi exponent = ((vi)shifted - 0x4b400000 + 127) << 23;
    return p * (vf)exponent;
#endif
}

}  // namespace disagg
