// The small ops between the matrix products, each in one pass and one call: RMS norm (with the residual sum), rotary
// embedding, silu(gate) * up. They round where the torch references round between two ops, so that bf16 results agree.
// Plain C ABI: strides in elements, the last dim contiguous, outputs contiguous.

#include "vec.h"

namespace disagg {
namespace {

inline int lanes_left(int64_t size, int64_t at) { return size - at < LANES ? static_cast<int>(size - at) : LANES; }

// out = weight * rounded(x / rms(x)), where the sum of the squares is given.
template <class T>
void scale_row(const T* x, const T* weight, T* out, int64_t size, vf squares, float eps) {
    const float inverse = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = lanes_left(size, i);
        store(out + i, rounded<T>(load(x + i, n) * inverse) * load(weight + i, n), n);
    }
}

template <class T>
void rms_norm(const T* x, int64_t stride_token, int64_t stride_head, const T* weight, T* out, int64_t num_tokens,
              int64_t num_heads, int64_t size, float eps) {
    for (int64_t t = 0; t < num_tokens; ++t)
        for (int64_t h = 0; h < num_heads; ++h) {
            const T* row = x + t * stride_token + h * stride_head;
            vf squares = {};
            for (int64_t i = 0; i < size; i += LANES) {
                const vf part = load(row + i, lanes_left(size, i));
                squares += part * part;
            }
            scale_row(row, weight, out + (t * num_heads + h) * size, size, squares, eps);
        }
}

template <class T>
void add_rms_norm(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride, const T* weight, T* out,
                  T* new_residual, int64_t num_tokens, int64_t size, float eps) {
    for (int64_t t = 0; t < num_tokens; ++t) {
        T* total = new_residual + t * size;
        vf squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            const int n = lanes_left(size, i);
            const vf part = rounded<T>(load(x + t * x_stride + i, n) + load(residual + t * residual_stride + i, n));
            store(total + i, part, n);
            squares += part * part;
        }
        scale_row(total, weight, out + t * size, size, squares, eps);
    }
}

struct Heads {
    const void* x;
    int64_t stride_token, stride_head, num_heads;
    void* out;
};

// out[i] = x[i] cos[i] - x[i + D/2] sin[i];  out[i + D/2] = x[i + D/2] cos[i + D/2] + x[i] sin[i + D/2].
template <class T>
void rope_token(const Heads& heads, int64_t token, const T* cos, const T* sin, int64_t half) {
    for (int64_t h = 0; h < heads.num_heads; ++h) {
        const T* x = static_cast<const T*>(heads.x) + token * heads.stride_token + h * heads.stride_head;
        T* out = static_cast<T*>(heads.out) + (token * heads.num_heads + h) * 2 * half;
        for (int64_t i = 0; i < half; i += LANES) {
            const int n = lanes_left(half, i);
            const vf low = load(x + i, n), high = load(x + half + i, n);
            store(out + i, rounded<T>(low * load(cos + i, n)) - rounded<T>(high * load(sin + i, n)), n);
            store(out + half + i, rounded<T>(high * load(cos + half + i, n)) + rounded<T>(low * load(sin + half + i, n)), n);
        }
    }
}

template <class T>
void rope(const Heads& q, const Heads& k, const T* cos, int64_t cos_stride, const T* sin, int64_t sin_stride,
          int64_t num_tokens, int64_t dim) {
    for (int64_t t = 0; t < num_tokens; ++t) {
        rope_token(q, t, cos + t * cos_stride, sin + t * sin_stride, dim / 2);
        rope_token(k, t, cos + t * cos_stride, sin + t * sin_stride, dim / 2);
    }
}

template <class T>
void silu_mul(const T* gate_up, int64_t stride, T* out, int64_t num_tokens, int64_t size) {
    for (int64_t t = 0; t < num_tokens; ++t) {
        const T* gate = gate_up + t * stride;
        const T* up = gate + size;
        for (int64_t i = 0; i < size; i += LANES) {
            const int n = lanes_left(size, i);
            const vf x = load(gate + i, n);
            store(out + t * size + i, rounded<T>(x / (1.0f + exp(-x))) * load(up + i, n), n);
        }
    }
}

template <class T>
const T* in(const void* p) {
    return static_cast<const T*>(p);
}

template <class T>
T* to(void* p) {
    return static_cast<T*>(p);
}

}  // namespace
}  // namespace disagg

using namespace disagg;

extern "C" void disagg_rms_norm(int32_t is_bf16, const void* x, int64_t stride_token, int64_t stride_head, const void* weight,
                                void* out, int64_t num_tokens, int64_t num_heads, int64_t size, float eps) {
    if (is_bf16)
        rms_norm(in<bf16>(x), stride_token, stride_head, in<bf16>(weight), to<bf16>(out), num_tokens, num_heads, size, eps);
    else
        rms_norm(in<float>(x), stride_token, stride_head, in<float>(weight), to<float>(out), num_tokens, num_heads, size, eps);
}

extern "C" void disagg_add_rms_norm(int32_t is_bf16, const void* x, int64_t x_stride, const void* residual,
                                    int64_t residual_stride, const void* weight, void* out, void* new_residual,
                                    int64_t num_tokens, int64_t size, float eps) {
    if (is_bf16)
        add_rms_norm(in<bf16>(x), x_stride, in<bf16>(residual), residual_stride, in<bf16>(weight), to<bf16>(out),
                     to<bf16>(new_residual), num_tokens, size, eps);
    else
        add_rms_norm(in<float>(x), x_stride, in<float>(residual), residual_stride, in<float>(weight), to<float>(out),
                     to<float>(new_residual), num_tokens, size, eps);
}

extern "C" void disagg_rope(int32_t is_bf16, const void* q, int64_t q_stride_token, int64_t q_stride_head, int64_t num_heads,
                            void* q_out, const void* k, int64_t k_stride_token, int64_t k_stride_head, int64_t num_kv_heads,
                            void* k_out, const void* cos, int64_t cos_stride, const void* sin, int64_t sin_stride,
                            int64_t num_tokens, int64_t dim) {
    const Heads queries{q, q_stride_token, q_stride_head, num_heads, q_out};
    const Heads keys{k, k_stride_token, k_stride_head, num_kv_heads, k_out};
    if (is_bf16)
        rope(queries, keys, in<bf16>(cos), cos_stride, in<bf16>(sin), sin_stride, num_tokens, dim);
    else
        rope(queries, keys, in<float>(cos), cos_stride, in<float>(sin), sin_stride, num_tokens, dim);
}

extern "C" void disagg_silu_mul(int32_t is_bf16, const void* gate_up, int64_t stride, void* out, int64_t num_tokens,
                                int64_t size) {
    if (is_bf16)
        silu_mul(in<bf16>(gate_up), stride, to<bf16>(out), num_tokens, size);
    else
        silu_mul(in<float>(gate_up), stride, to<float>(out), num_tokens, size);
}
