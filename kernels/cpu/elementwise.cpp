// The small ops between the GEMMs, each in one pass and one call: rows of the embedding, RMS norm (with the residual
// sum), silu(gate) * up, gelu(gate) * up, sums, functions of a number, arg-max, a draw. They round where the torch references round between two ops, so that bf16 results agree.
// Threads take rows where there is enough to do. Strides in elements, the last dim contiguous, outputs contiguous.

#include "elementwise.h"

#include <algorithm>

#include "calls.h"
#include "thread_pool.h"

namespace disagg {
namespace {

constexpr int64_t MIN_PARALLEL_NUMBERS = 8192;

// `body(row)` for each row of `size` numbers.
template <class Body>
void for_rows(int64_t num_rows, int64_t size, Body body) {
    if (num_rows < 2 || num_rows * size < MIN_PARALLEL_NUMBERS) {
        for (int64_t row = 0; row < num_rows; ++row) body(row);
        return;
    }
    parallel_for(num_rows, body);
}

inline int lanes_left(int64_t size, int64_t at) { return size - at < LANES ? static_cast<int>(size - at) : LANES; }

// out = weight * rounded(x / rms(x)), or (1 + weight) * (x / rms(x)), where the sum of the squares is given.
template <class T>
void scale_row(const T* x, const T* weight, T* out, int64_t size, vf squares, float eps, bool plus_one) {
    const float inverse = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
    if (plus_one) {
        for (int64_t i = 0; i < size; i += LANES) {
            const int n = lanes_left(size, i);
            store(out + i, load(x + i, n) * inverse * (1.0f + load(weight + i, n)), n);
        }
        return;
    }
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = lanes_left(size, i);
        store(out + i, rounded<T>(load(x + i, n) * inverse) * load(weight + i, n), n);
    }
}

template <class T>
void rms_norm_row(const T* x, const T* weight, T* out, int64_t size, float eps, bool plus_one) {
    vf squares = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const vf part = load(x + i, lanes_left(size, i));
        squares = fma(part, part, squares);
    }
    scale_row(x, weight, out, size, squares, eps, plus_one);
}

template <class T>
void add_rms_norm_row(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t size, float eps,
                      bool plus_one) {
    vf squares = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = lanes_left(size, i);
        const vf part = rounded<T>(load(x + i, n) + load(residual + i, n));
        store(total + i, part, n);
        squares = fma(part, part, squares);
    }
    scale_row(total, weight, out, size, squares, eps, plus_one);
}

template <class T>
void silu_mul_row(const T* gate, const T* up, T* out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = lanes_left(size, i);
        const vf x = load(gate + i, n);
        store(out + i, rounded<T>(x / (1.0f + exp(-x))) * load(up + i, n), n);
    }
}

// gelu(x) by the approximation 0.5 x (1 + tanh(u)), which is x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline vf gelu_tanh(vf x) {
    const vf u = (x + x * x * x * 0.044715f) * 0.79788456080286536f;
    return x / (1.0f + exp(u * -2.0f));
}

template <class T>
void gelu_tanh_mul_row(const T* gate, const T* up, T* out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = lanes_left(size, i);
        store(out + i, rounded<T>(gelu_tanh(load(gate + i, n))) * load(up + i, n), n);
    }
}

enum class Pointwise : int32_t { MULTIPLY, DIVIDE, SOFT_CAP };

template <class T>
void pointwise_row(const T* x, T* out, int64_t size, Pointwise function, float number) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = lanes_left(size, i);
        const vf part = load(x + i, n);
        vf result = part * number;
        if (function == Pointwise::DIVIDE) result = part / splat(number);
        if (function == Pointwise::SOFT_CAP) result = tanh(part / splat(number)) * number;
        store(out + i, result, n);
    }
}

template <class T>
void add_row(const T* x, const T* y, T* out, int64_t size) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = lanes_left(size, i);
        store(out + i, load(x + i, n) + load(y + i, n), n);
    }
}

template <class T>
float sum_of_squares(const T* x, int64_t size) {
    vf squares = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const vf part = load(x + i, lanes_left(size, i));
        squares = fma(part, part, squares);
    }
    return sum(squares);
}

// The first index of the largest number; -1 where that is infinite or some are NaN. Each lane of each chain keeps its own.
template <class T>
int64_t argmax_row(const T* x, int64_t size) {
    constexpr int CHAINS = 4;
    vf best[CHAINS];
    vi first[CHAINS] = {}, nan = {};
    for (vf& one : best) one = splat(-INFINITY);
    int64_t i = 0;
    for (; i + CHAINS * LANES <= size; i += CHAINS * LANES)
        for (int c = 0; c < CHAINS; ++c) {
            const vf part = load(x + i + c * LANES);
            const vi larger = part > best[c];
            best[c] = select(larger, part, best[c]);
            first[c] = select(larger, splat_int(static_cast<int32_t>(i + c * LANES)), first[c]);
            nan |= part != part;
        }
    float top = -INFINITY;
    int64_t at = -1;
    for (int c = 0; c < CHAINS; ++c)
        for (int lane = 0; lane < LANES; ++lane) {
            if (nan[lane]) return -1;
            const float one = best[c][lane];
            const int64_t where = first[c][lane] + lane;
            if (one > top || (one == top && where < at)) top = one, at = where;
        }
    for (; i < size; ++i) {
        const float one = load(x + i, 1)[0];
        if (std::isnan(one)) return -1;
        if (one > top) top = one, at = i;
    }
    return std::isfinite(top) ? at : -1;
}

// The weights of `kernels/weights.py`, of numbers that are divided by the temperature already.
constexpr uint64_t COEFFICIENTS[] = {1073741824, 744257238, 257890130, 59371512, 9880746, 1013080};
constexpr float STEPS = 1512775.375f, MOST_STEPS = 43 << 20;

inline uint64_t weight(float value, float top) {
    const float distance = (top - value) * STEPS;
    const auto steps = static_cast<uint32_t>(static_cast<int32_t>(distance < MOST_STEPS ? distance : MOST_STEPS));
    const uint64_t f = steps & 0xFFFFF;
    uint64_t power = COEFFICIENTS[5];
    for (int k = 4; k >= 0; --k) power = COEFFICIENTS[k] - ((static_cast<uint32_t>(power) * f) >> 20);
    return (power << 12) >> (steps >> 20);
}

constexpr int64_t DRAW_CHUNK = 1024, MAX_DRAWN = 1 << 20;

// The numbers from x on over the temperature; those behind the last one hold anything.
template <class T>
void scale_chunk(const T* x, int64_t size, float temperature, float* out) {
    for (int64_t i = 0; i < size; i += LANES) store(out + i, load(x + i, lanes_left(size, i)) / splat(temperature));
}

// The first index whose running sum of weights passes `at` (in [0, 1)) of the whole; -1 as `argmax_row`.
template <class T>
int64_t draw_row(const T* x, int64_t size, float temperature, double at) {
    const int64_t largest = argmax_row(x, size);
    if (largest < 0) return -1;
    const float top = load(x + largest, 1)[0] / temperature;
    if (!std::isfinite(top)) return -1;
    alignas(64) float values[DRAW_CHUNK + LANES];
    uint64_t sums[MAX_DRAWN / DRAW_CHUNK], total = 0;
    for (int64_t first = 0; first < size; first += DRAW_CHUNK) {
        const int64_t count = std::min(DRAW_CHUNK, size - first);
        scale_chunk(x + first, count, temperature, values);
        uint64_t sum = 0;
        for (int64_t i = 0; i < count; ++i) sum += weight(values[i], top);
        sums[first / DRAW_CHUNK] = sum;
        total += sum;
    }
    uint64_t goal = std::min(static_cast<uint64_t>(at * static_cast<double>(total)), total - 1);
    int64_t chunk = 0;
    while (goal >= sums[chunk]) goal -= sums[chunk++];
    const int64_t first = chunk * DRAW_CHUNK;
    scale_chunk(x + first, std::min(DRAW_CHUNK, size - first), temperature, values);
    int64_t i = 0;
    for (uint64_t one = weight(values[0], top); goal >= one; one = weight(values[++i], top)) goal -= one;
    return first + i;
}

struct RmsNorm {
    int32_t is_bf16;
    const void* x;
    int64_t stride_token, stride_head;
    const void* weight;
    void* out;
    int64_t num_tokens, num_heads, size;
    float eps;
    int32_t plus_one;
};

template <class T>
void rms_norm(const RmsNorm& args) {
    const auto* x = static_cast<const T*>(args.x);
    const auto* weight = static_cast<const T*>(args.weight);
    for_rows(args.num_tokens * args.num_heads, args.size, [&](int64_t row) {
        const int64_t at = row / args.num_heads * args.stride_token + row % args.num_heads * args.stride_head;
        rms_norm_row(x + at, weight, static_cast<T*>(args.out) + row * args.size, args.size, args.eps, args.plus_one);
    });
}

struct AddRmsNorm {
    int32_t is_bf16;
    const void* x;
    int64_t x_stride;
    const void* residual;
    int64_t residual_stride;
    const void* weight;
    void *out, *new_residual;
    int64_t num_tokens, size;
    float eps;
    int32_t plus_one;
};

template <class T>
void add_rms_norm(const AddRmsNorm& args) {
    add_rms_norm_rows(static_cast<const T*>(args.x), args.x_stride, static_cast<const T*>(args.residual), args.residual_stride,
                      static_cast<const T*>(args.weight), static_cast<T*>(args.out), static_cast<T*>(args.new_residual),
                      args.num_tokens, args.size, args.eps, args.plus_one);
}

struct Activation {
    int32_t is_bf16;
    const void* gate_up;
    int64_t stride;
    void* out;
    int64_t num_tokens, size;
};

template <class T>
void silu_mul(const Activation& args) {
    silu_mul_rows(static_cast<const T*>(args.gate_up), args.stride, static_cast<T*>(args.out), args.num_tokens, args.size);
}

template <class T>
void gelu_tanh_mul(const Activation& args) {
    gelu_tanh_mul_rows(static_cast<const T*>(args.gate_up), args.stride, static_cast<T*>(args.out), args.num_tokens, args.size);
}

struct Add {
    int32_t is_bf16;
    const void* x;
    int64_t x_stride;
    const void* y;
    int64_t y_stride;
    void* out;
    int64_t num_tokens, size;
};

template <class T>
void add(const Add& args) {
    const auto *x = static_cast<const T*>(args.x), *y = static_cast<const T*>(args.y);
    for_rows(args.num_tokens, args.size, [&](int64_t t) {
        add_row(x + t * args.x_stride, y + t * args.y_stride, static_cast<T*>(args.out) + t * args.size, args.size);
    });
}

struct PointwiseOfRows {
    int32_t is_bf16;
    const void* x;
    int64_t stride;
    void* out;
    int64_t num_tokens, size;
    Pointwise function;
    float number;
};

template <class T>
void pointwise(const PointwiseOfRows& args) {
    const auto* x = static_cast<const T*>(args.x);
    for_rows(args.num_tokens, args.size, [&](int64_t t) {
        pointwise_row(x + t * args.stride, static_cast<T*>(args.out) + t * args.size, args.size, args.function, args.number);
    });
}

struct HeadSquares {
    int32_t is_bf16;
    const void* qkv;
    int64_t stride, num_tokens, q_size, k_size;
    float* out;
};

template <class T>
void head_squares(const HeadSquares& args) {
    const auto* qkv = static_cast<const T*>(args.qkv);
    for_rows(args.num_tokens, args.q_size + args.k_size, [&](int64_t t) {
        const T* row = qkv + t * args.stride;
        args.out[2 * t] = sum_of_squares(row, args.q_size);
        args.out[2 * t + 1] = sum_of_squares(row + args.q_size, args.k_size);
    });
}

struct Embed {
    const int64_t* token_ids;
    int64_t num_tokens;
    const char* rows;
    int64_t num_rows, stride_bytes, row_bytes;
    char* out;
};

struct Argmax {
    int32_t is_bf16;
    const void* logits;
    int64_t stride, num_rows, size;
    int64_t* out;
};

template <class T>
void argmax(const Argmax& args) {
    const auto* logits = static_cast<const T*>(args.logits);
    for_rows(args.num_rows, args.size, [&](int64_t row) { args.out[row] = argmax_row(logits + row * args.stride, args.size); });
}

struct Draw {
    int32_t is_bf16;
    const void* logits;
    int64_t stride, num_rows, size;
    const float* temperatures;
    const double* at;
    int64_t* out;
};

template <class T>
void draw(const Draw& args) {
    const auto* logits = static_cast<const T*>(args.logits);
    for_rows(args.num_rows, args.size, [&](int64_t row) {
        args.out[row] = draw_row(logits + row * args.stride, args.size, args.temperatures[row], args.at[row]);
    });
}

}  // namespace

template <class T>
void silu_mul_rows(const T* gate_up, int64_t stride, T* out, int64_t num_tokens, int64_t size) {
    for_rows(num_tokens, size, [&](int64_t t) {
        silu_mul_row(gate_up + t * stride, gate_up + t * stride + size, out + t * size, size);
    });
}
template void silu_mul_rows(const bf16*, int64_t, bf16*, int64_t, int64_t);
template void silu_mul_rows(const float*, int64_t, float*, int64_t, int64_t);

template <class T>
void gelu_tanh_mul_rows(const T* gate_up, int64_t stride, T* out, int64_t num_tokens, int64_t size) {
    for_rows(num_tokens, size, [&](int64_t t) {
        gelu_tanh_mul_row(gate_up + t * stride, gate_up + t * stride + size, out + t * size, size);
    });
}
template void gelu_tanh_mul_rows(const bf16*, int64_t, bf16*, int64_t, int64_t);
template void gelu_tanh_mul_rows(const float*, int64_t, float*, int64_t, int64_t);

template <class T>
void add_rms_norm_rows(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride, const T* weight, T* out,
                       T* new_residual, int64_t num_tokens, int64_t size, float eps, bool plus_one) {
    for_rows(num_tokens, size, [&](int64_t t) {
        add_rms_norm_row(x + t * x_stride, residual + t * residual_stride, weight, out + t * size, new_residual + t * size,
                         size, eps, plus_one);
    });
}
template void add_rms_norm_rows(const bf16*, int64_t, const bf16*, int64_t, const bf16*, bf16*, bf16*, int64_t, int64_t, float,
                                bool);
template void add_rms_norm_rows(const float*, int64_t, const float*, int64_t, const float*, float*, float*, int64_t, int64_t,
                                float, bool);

}  // namespace disagg

using namespace disagg;

extern "C" {

int64_t disagg_rms_norm(const void* p) {
    const auto& args = args_as<RmsNorm>(p);
    args.is_bf16 ? rms_norm<bf16>(args) : rms_norm<float>(args);
    return DONE;
}

int64_t disagg_add_rms_norm(const void* p) {
    const auto& args = args_as<AddRmsNorm>(p);
    args.is_bf16 ? add_rms_norm<bf16>(args) : add_rms_norm<float>(args);
    return DONE;
}

int64_t disagg_silu_mul(const void* p) {
    const auto& args = args_as<Activation>(p);
    args.is_bf16 ? silu_mul<bf16>(args) : silu_mul<float>(args);
    return DONE;
}

int64_t disagg_gelu_tanh_mul(const void* p) {
    const auto& args = args_as<Activation>(p);
    args.is_bf16 ? gelu_tanh_mul<bf16>(args) : gelu_tanh_mul<float>(args);
    return DONE;
}

int64_t disagg_add(const void* p) {
    const auto& args = args_as<Add>(p);
    args.is_bf16 ? add<bf16>(args) : add<float>(args);
    return DONE;
}

int64_t disagg_pointwise(const void* p) {
    const auto& args = args_as<PointwiseOfRows>(p);
    args.is_bf16 ? pointwise<bf16>(args) : pointwise<float>(args);
    return DONE;
}

int64_t disagg_head_squares(const void* p) {
    const auto& args = args_as<HeadSquares>(p);
    args.is_bf16 ? head_squares<bf16>(args) : head_squares<float>(args);
    return DONE;
}

// Returns -1, or the first token whose id is not a row of the embedding.
int64_t disagg_embed(const void* p) {
    const auto& args = args_as<Embed>(p);
    for (int64_t t = 0; t < args.num_tokens; ++t)
        if (args.token_ids[t] < 0 || args.token_ids[t] >= args.num_rows) return t;
    for (int64_t t = 0; t < args.num_tokens; ++t)
        std::memcpy(args.out + t * args.row_bytes, args.rows + args.token_ids[t] * args.stride_bytes, args.row_bytes);
    return DONE;
}

int64_t disagg_argmax(const void* p) {
    const auto& args = args_as<Argmax>(p);
    args.is_bf16 ? argmax<bf16>(args) : argmax<float>(args);
    return DONE;
}

int64_t disagg_draw(const void* p) {
    const auto& args = args_as<Draw>(p);
    args.is_bf16 ? draw<bf16>(args) : draw<float>(args);
    return DONE;
}

}  // extern "C"
