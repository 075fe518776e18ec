// Sixteen floats at a time, at every level of processors: one register of AVX-512, two of AVX2, four of NEON or SSE. All
// arithmetic is fp32; bf16 is widened on load and rounded to nearest even on store.
//
// Functions are written for one register (`vr`), in the vector extensions that gcc and clang share; `vf` is as many registers as
// sixteen floats take. A vector of the extensions that is wider than a register would be kept in memory by gcc, its sums too.
//
// Results have the same bits at all levels with fused multiply-adds, whatever the compiler: it fuses nothing by itself
// (-ffp-contract=off), `fma` says where, and sums over lanes are trees of sixteen.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace disagg {

constexpr int LANES = 16;
constexpr int MAX_HEAD_DIM = 576;
#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__AVX2__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif
constexpr int REGISTERS = LANES / REGISTER_LANES;

// Registers that sums may take in an inner loop, beside those of operands: of 32 or of 16.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int SUM_REGISTERS = 24;
#else
constexpr int SUM_REGISTERS = 12;
#endif

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
#define DISAGG_FMA 1
#endif

typedef float vr __attribute__((vector_size(4 * REGISTER_LANES)));
typedef int32_t vri __attribute__((vector_size(4 * REGISTER_LANES)));
typedef uint32_t vru __attribute__((vector_size(4 * REGISTER_LANES)));
typedef uint16_t vrh __attribute__((vector_size(2 * REGISTER_LANES)));

struct bf16 {
    uint16_t bits;
};

// ---------------------------------------------------------------- one register

inline vr splat_register(float x) {
#if defined(__AVX512F__)
    return (vr)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (vr)_mm256_set1_ps(x);
#else
    return vr{x, x, x, x};
#endif
}

template <class Number>
inline vr load_register(const Number* p) {
    vr x;
    static_assert(sizeof(Number) == sizeof(float), "one number a lane");
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline vr load_register(const bf16* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (vr)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16);
#else
    vrh bits;
    std::memcpy(&bits, p, sizeof bits);
    return (vr)(__builtin_convertvector(bits, vru) << 16);
#endif
}

inline vr load_register(const int8_t* p) {
#if defined(__AVX512F__)
    return (vr)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
    return (vr)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    typedef int8_t vrb __attribute__((vector_size(REGISTER_LANES)));
    vrb bytes;
    std::memcpy(&bytes, p, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, vri), vr);
#endif
}

// From fp16.
inline vr load_fp16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (vr)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
    return (vr)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
    vrh halves;
    std::memcpy(&halves, p, sizeof halves);
    const vru bits = __builtin_convertvector(halves, vru), sign = (bits & 0x8000u) << 16;
    const vru magnitude = (bits & 0x7fffu) << 13, finite = (vru)((vr)magnitude * splat_register(0x1p112f));
    return (vr)(sign | ((bits & 0x7c00u) == 0x7c00u ? magnitude | 0x7f800000u : finite));
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
inline constexpr vru UPPER_HALVES = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                     0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};
#endif

// Every second one of a row of numbers, from the first or the second on: widened in one instruction.
inline vr even_of_pairs(const bf16* p) {
    vru pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    return (vr)(pairs << 16);
}

inline vr odd_of_pairs(const bf16* p) {
    vru pairs;
    std::memcpy(&pairs, p, sizeof pairs);
#if defined(__AVX2__) && !defined(__AVX512F__)
    // By name: else the compiler keeps the mask in a register, and a sum on the stack.
    asm("vpand %1, %0, %0" : "+x"(pairs) : "m"(UPPER_HALVES));
    return (vr)pairs;
#else
    return (vr)(pairs & 0xffff0000u);
#endif
}

inline void store_register(float* p, vr x) { std::memcpy(p, &x, sizeof x); }

// a * b + c, rounded once where the processor can.
inline vr fma(vr a, vr b, vr c) {
#if defined(__AVX512F__)
    return (vr)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vr)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (vr)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

inline vr max(vr a, vr b) { return a > b ? a : b; }

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define DISAGG_SHUFFLE 1
#endif
#endif

// Lane i of the result is lane INDICES[i] of both, one behind the other.
template <int... INDICES>
inline vr shuffled(vr a, vr b) {
#ifdef DISAGG_SHUFFLE
    return __builtin_shufflevector(a, b, INDICES...);
#else
    return __builtin_shuffle(a, b, vri{INDICES...});
#endif
}

template <int WIDTH, int... LANE>
inline vr moved_down(vr x, std::integer_sequence<int, LANE...>) {
    return shuffled<((LANE + WIDTH) % REGISTER_LANES)...>(x, x);
}

// The lanes as one, by halves: the upper half meets the lower one, and so on.
template <int WIDTH = REGISTER_LANES / 2, class Meet>
inline float folded(vr x, Meet meet) {
    if constexpr (WIDTH == 0)
        return x[0];
    else
        return folded<WIDTH / 2>(meet(x, moved_down<WIDTH>(x, std::make_integer_sequence<int, REGISTER_LANES>{})), meet);
}

inline vru rounded_bits(vr x) {
    const vru bits = (vru)x;
    const vru rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const vru quiet_nan = (bits >> 16) | 0x40u;
    return x == x ? rounded : quiet_nan;
}

// x as n ln2 + r with |r| <= ln2 / 2, for x clamped to [-87, 88]; NaN stays NaN. n is rounded by adding 1.5 * 2^23.
struct Reduced {
    vr n, shifted, r;
};

inline Reduced reduced(vr x) {
#ifdef __AVX512F__
    x = (vr)_mm512_max_ps((__m512)splat_register(-87.0f), (__m512)x);  // of a NaN and a number, the second
    x = (vr)_mm512_min_ps((__m512)splat_register(88.0f), (__m512)x);
#elif defined(__AVX2__)
    x = (vr)_mm256_max_ps((__m256)splat_register(-87.0f), (__m256)x);
    x = (vr)_mm256_min_ps((__m256)splat_register(88.0f), (__m256)x);
#else
    x = x < splat_register(-87.0f) ? splat_register(-87.0f) : x;
    x = x > splat_register(88.0f) ? splat_register(88.0f) : x;
#endif
    const vr magic = splat_register(12582912.0f);
    const vr shifted = fma(x, splat_register(1.44269504088896341f), magic);
    const vr n = shifted - magic;
    vr r = fma(n, splat_register(-0.693359375f), x);
    r = fma(n, splat_register(2.12194440e-4f), r);
    return {n, shifted, r};
}

// (e^r - 1) / r by its Taylor series to r^6.
inline vr slope_of_exp(vr r) {
    vr p = splat_register(1.0f / 5040.0f);
    p = fma(p, r, splat_register(1.0f / 720.0f));
    p = fma(p, r, splat_register(1.0f / 120.0f));
    p = fma(p, r, splat_register(1.0f / 24.0f));
    p = fma(p, r, splat_register(1.0f / 6.0f));
    p = fma(p, r, splat_register(0.5f));
    return fma(p, r, splat_register(1.0f));
}

// 2^n, by writing the exponent.
inline vr power_of_two(const Reduced& x) { return (vr)(((vri)x.shifted - 0x4b400000 + 127) << 23); }

// e^x to about 1e-7 relative, for x clamped to [-87, 88]; NaN stays NaN.
inline vr exp(vr x) {
    const Reduced reduced_x = reduced(x);
    const vr p = fma(slope_of_exp(reduced_x.r), reduced_x.r, splat_register(1.0f));
#ifdef __AVX512F__
    return (vr)_mm512_scalef_ps((__m512)p, (__m512)reduced_x.n);
#else
    return p * power_of_two(reduced_x);
#endif
}

// To about 2e-7 relative; NaN stays NaN. From e = e^2x - 1, so that small results are as precise as large ones.
inline vr tanh(vr x) {
    const Reduced twice = reduced(x + x);
    const vr power = power_of_two(twice);
    const vr e = fma(slope_of_exp(twice.r) * twice.r, power, power - splat_register(1.0f));
    return e / (e + splat_register(2.0f));
}

// ---------------------------------------------------------------- sixteen lanes

#if defined(__AVX512F__)

using vf = vr;
using vi = vri;

inline vf splat(float x) { return splat_register(x); }

template <class Number>
inline vf load(const Number* p) {
    return load_register(p);
}

inline void store(float* p, vf x) { store_register(p, x); }

inline float sum(vf x) {
    return folded(x, [](vr a, vr b) { return a + b; });
}

inline float max(vf x) {
    return folded(x, [](vr a, vr b) { return max(a, b); });
}

inline vrh round_to_bf16(vf x) {
#ifdef __AVX512BF16__
    return (vrh)_mm512_cvtneps_pbh((__m512)x);
#else
    return __builtin_convertvector(rounded_bits(x), vrh);
#endif
}

inline void store(bf16* p, vf x) {
    const vrh bits = round_to_bf16(x);
    std::memcpy(p, &bits, sizeof bits);
}

// One of the registers.
inline vr& part_of(vf& x, int) { return x; }
inline const vr& part_of(const vf& x, int) { return x; }

template <class Lanes>
inline Lanes select(vi mask, Lanes a, Lanes b) {
    return mask ? a : b;
}
inline vi splat_int(int32_t x) { return vi{} + x; }

#else

// Operators and functions are those of the registers, one by one.
template <class Register>
struct Wide {
    Register part[REGISTERS];

    auto operator[](int lane) const { return part[lane / REGISTER_LANES][lane % REGISTER_LANES]; }
};

template <class Register, class Make>
[[gnu::always_inline]] inline Wide<Register> each_part(Make make) {
    Wide<Register> x;
#pragma GCC unroll 4
    for (int i = 0; i < REGISTERS; ++i) x.part[i] = make(i);
    return x;
}

struct alignas(4 * LANES) vf : Wide<vr> {
    vf() = default;
    vf(const Wide<vr>& x) : Wide<vr>(x) {}
};
using vi = Wide<vri>;

// One of the registers.
inline vr& part_of(vf& x, int i) { return x.part[i]; }
inline const vr& part_of(const vf& x, int i) { return x.part[i]; }

inline vf splat(float x) {
    return each_part<vr>([=](int) { return splat_register(x); });
}
inline vf operator+(const vf& a, const vf& b) {
    return each_part<vr>([&](int i) { return a.part[i] + b.part[i]; });
}
inline vf operator-(const vf& a, const vf& b) {
    return each_part<vr>([&](int i) { return a.part[i] - b.part[i]; });
}
inline vf operator*(const vf& a, const vf& b) {
    return each_part<vr>([&](int i) { return a.part[i] * b.part[i]; });
}
inline vf operator/(const vf& a, const vf& b) {
    return each_part<vr>([&](int i) { return a.part[i] / b.part[i]; });
}
inline vf operator-(const vf& a) {
    return each_part<vr>([&](int i) { return -a.part[i]; });
}
inline vf& operator+=(vf& a, const vf& b) { return a = a + b; }
inline vf operator*(const vf& a, float b) { return a * splat(b); }
inline vf operator+(float a, const vf& b) { return splat(a) + b; }
inline vi operator>(const vf& a, const vf& b) {
    return each_part<vri>([&](int i) { return a.part[i] > b.part[i]; });
}
inline vi operator!=(const vf& a, const vf& b) {
    return each_part<vri>([&](int i) { return a.part[i] != b.part[i]; });
}
inline vi& operator|=(vi& a, const vi& b) {
    return a = each_part<vri>([&](int i) { return a.part[i] | b.part[i]; });
}
inline vf fma(const vf& a, const vf& b, const vf& c) {
    return each_part<vr>([&](int i) { return fma(a.part[i], b.part[i], c.part[i]); });
}
inline vf max(const vf& a, const vf& b) {
    return each_part<vr>([&](int i) { return max(a.part[i], b.part[i]); });
}
inline vf exp(const vf& x) {
    return each_part<vr>([&](int i) { return exp(x.part[i]); });
}
inline vf tanh(const vf& x) {
    return each_part<vr>([&](int i) { return tanh(x.part[i]); });
}
template <class Register>
inline Wide<Register> select(const vi& mask, const Wide<Register>& a, const Wide<Register>& b) {
    return each_part<Register>([&](int i) { return mask.part[i] ? a.part[i] : b.part[i]; });
}
inline vi splat_int(int32_t x) {
    return each_part<vri>([=](int) { return vri{} + x; });
}

template <class Number>
inline vf load(const Number* p) {
    return each_part<vr>([=](int i) { return load_register(p + i * REGISTER_LANES); });
}

inline void store(float* p, const vf& x) {
    for (int i = 0; i < REGISTERS; ++i) store_register(p + i * REGISTER_LANES, x.part[i]);
}

inline void store(bf16* p, const vf& x) {
#ifdef __AVX2__
    const __m256i packed = _mm256_packus_epi32((__m256i)rounded_bits(x.part[0]), (__m256i)rounded_bits(x.part[1]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
#else
    for (int i = 0; i < REGISTERS; ++i) {
        const vrh bits = __builtin_convertvector(rounded_bits(x.part[i]), vrh);
        std::memcpy(p + i * REGISTER_LANES, &bits, sizeof bits);
    }
#endif
}

template <class Meet>
inline float folded(const vf& x, Meet meet) {
    if constexpr (REGISTERS == 2)
        return folded(meet(x.part[0], x.part[1]), meet);
    else
        return folded(meet(meet(x.part[0], x.part[2]), meet(x.part[1], x.part[3])), meet);
}

inline float sum(const vf& x) {
    return folded(x, [](vr a, vr b) { return a + b; });
}

inline float max(const vf& x) {
    return folded(x, [](vr a, vr b) { return max(a, b); });
}

#endif

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
#if defined(__AVX512F__)
    return (vf)(__builtin_convertvector(round_to_bf16(x), vru) << 16);
#else
    return each_part<vr>([&](int i) { return (vr)(rounded_bits(x.part[i]) << 16); });
#endif
}

// Lane i of the result is the sum of the lanes of x[i]: of neighbours, then of neighbouring sums, and so on.
inline vf sum_each(const vf* x) {
#if defined(__AVX512F__)
    vf a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i)
        a[i] = shuffled<0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30>(x[2 * i], x[2 * i + 1]) +
               shuffled<1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31>(x[2 * i], x[2 * i + 1]);
    for (int i = 0; i < 4; ++i)
        b[i] = shuffled<0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29>(a[2 * i], a[2 * i + 1]) +
               shuffled<2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31>(a[2 * i], a[2 * i + 1]);
    for (int i = 0; i < 2; ++i)
        c[i] = shuffled<0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27>(b[2 * i], b[2 * i + 1]) +
               shuffled<4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31>(b[2 * i], b[2 * i + 1]);
    return shuffled<0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23>(c[0], c[1]) +
           shuffled<8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31>(c[0], c[1]);
#elif defined(__AVX2__)
    const auto neighbours = [](vr a, vr b) {
        return shuffled<0, 2, 8, 10, 4, 6, 12, 14>(a, b) + shuffled<1, 3, 9, 11, 5, 7, 13, 15>(a, b);
    };
    return each_part<vr>([&](int half) {
        vr sums[2];
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
            vr fours[2];
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const vf* rows = x + 8 * half + 4 * i;
                fours[i] = neighbours(neighbours(rows[0].part[part], rows[1].part[part]),
                                      neighbours(rows[2].part[part], rows[3].part[part]));
            }
            sums[part] = shuffled<0, 1, 2, 3, 8, 9, 10, 11>(fours[0], fours[1]) +
                         shuffled<4, 5, 6, 7, 12, 13, 14, 15>(fours[0], fours[1]);
        }
        return sums[0] + sums[1];
    });
#else
    const auto neighbours = [](vr a, vr b) { return shuffled<0, 2, 4, 6>(a, b) + shuffled<1, 3, 5, 7>(a, b); };
    return each_part<vr>([&](int quarter) {
        const vf* rows = x + 4 * quarter;
        vr sums[4];
#pragma GCC unroll 4
        for (int part = 0; part < 4; ++part)
            sums[part] = neighbours(neighbours(rows[0].part[part], rows[1].part[part]),
                                    neighbours(rows[2].part[part], rows[3].part[part]));
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    });
#endif
}

}  // namespace disagg
