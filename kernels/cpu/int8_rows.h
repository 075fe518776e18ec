// Rows of a KV cache in 8 bits: the integers of a head of a token, and their scale behind them, as fp16. `kernels/kv_rows.py`
// says which they are. Products of integers are fp32 at every level: they are exact there, and no wider than what they meet.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vec.h"

namespace disagg {

// What is behind the numbers of a row of S, in bytes and in numbers.
template <class S>
constexpr int SCALE_BYTES = std::is_same_v<S, int8_t> ? 2 : 0;

// Bytes of a number of S where it is multiplied.
template <class S>
constexpr int64_t NUMBER_BYTES = std::is_same_v<S, int8_t> ? sizeof(float) : sizeof(S);

constexpr uint16_t NAN_HALF = 0x7e00;

inline float float_of_half(uint32_t bits) {
    if (bits < 0x400) return static_cast<float>(bits) * 0x1p-24f;
    const uint32_t moved = (bits << 13) + (112u << 23);
    float x;
    std::memcpy(&x, &moved, sizeof x);
    return x;
}

// The smallest fp16 number of which 127 times are at least `most`; NaN where there is none.
inline uint16_t scale_for(float most) {
    constexpr float LARGEST = 65504.0f;
    if (!(most <= 127.0f * LARGEST)) return NAN_HALF;
    const float quotient = most / 127.0f;
    uint32_t bits;
    if (quotient < 0x1p-14f) {
        bits = static_cast<uint32_t>(quotient * 0x1p24f);
    } else {
        std::memcpy(&bits, &quotient, sizeof bits);
        bits = (bits - (112u << 23)) >> 13;
    }
    while (127.0f * float_of_half(bits) < most) ++bits;
    return static_cast<uint16_t>(bits);
}

template <class T>
void widen(const T* x, int64_t dim, float* out) {
    for (int64_t i = 0; i < dim; i += LANES) {
        const int n = static_cast<int>(std::min<int64_t>(dim - i, LANES));
        store(out + i, load(x + i, n), n);
    }
}

// Writes the row of `dim` numbers.
template <class T>
void quantize_row(const T* x, int64_t dim, int8_t* row) {
    float numbers[MAX_HEAD_DIM];
    widen(x, dim, numbers);
    // Of numbers without their sign the bits are in their order, and those of NaN are the largest.
    int32_t largest = 0;
    for (int64_t i = 0; i < dim; ++i) {
        int32_t bits;
        std::memcpy(&bits, numbers + i, sizeof bits);
        largest = std::max(largest, bits & 0x7fffffff);
    }
    float most;
    std::memcpy(&most, &largest, sizeof most);
    const uint16_t scale = scale_for(most);
    if (scale == 0 || scale == NAN_HALF) {
        std::memset(row, 0, dim);
    } else {
        const float inverse = 1.0f / float_of_half(scale);
        for (int64_t i = 0; i < dim; ++i) {
            constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
            const float rounded = numbers[i] * inverse + MAGIC;
            int32_t bits;
            std::memcpy(&bits, &rounded, sizeof bits);
            row[i] = static_cast<int8_t>(bits);
        }
    }
    std::memcpy(row + dim, &scale, sizeof scale);
}

// The scales of the first `count` <= 16 rows, `stride` bytes apart, of which the first one is at `first`; then zeros.
inline vf scales_of(const int8_t* first, int64_t stride, int count) {
    alignas(4 * LANES) uint16_t halves[LANES] = {};
    for (int i = 0; i < count; ++i) std::memcpy(halves + i, first + i * stride, sizeof halves[i]);
#if defined(__AVX512F__)
    return load_fp16(halves);
#else
    return each_part<vr>([&](int i) { return load_fp16(halves + i * REGISTER_LANES); });
#endif
}

}  // namespace disagg
