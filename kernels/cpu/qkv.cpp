// What lies between the QKV GEMM and attention, in one pass: the norm of each head where the model has one, rotary
// embedding by position, and K and V into the paged cache. It rounds where separate ops would round. Threads take tokens.

#include "calls.h"
#include "thread_pool.h"
#include "vec.h"

namespace disagg {
namespace {

constexpr int64_t MIN_PARALLEL_TOKENS = 8;

struct Qkv {
    int32_t is_bf16;
    const void* qkv;  // a row holds the heads of q, then of k, then of v
    int64_t stride, num_tokens, num_heads, num_kv_heads, dim;
    const void *q_norm, *k_norm;  // null without
    float eps;
    const int64_t* positions;
    const void *cos, *sin;
    int64_t num_positions;
    void *keys, *values;
    int64_t block_stride, num_blocks, block_size;
    const int64_t* slots;
    void* q_out;
};

inline int lanes_left(int64_t size, int64_t at) { return size - at < LANES ? static_cast<int>(size - at) : LANES; }

// out = weight * rounded(x / rms(x)), rounded.
template <class T>
void norm_head(const T* x, const T* weight, T* out, int64_t dim, float eps) {
    vf squares = splat(0.0f);
    for (int64_t i = 0; i < dim; i += LANES) {
        const vf part = load(x + i, lanes_left(dim, i));
        squares = fma(part, part, squares);
    }
    const float inverse = 1.0f / std::sqrt(sum(squares) / static_cast<float>(dim) + eps);
    for (int64_t i = 0; i < dim; i += LANES) {
        const int n = lanes_left(dim, i);
        store(out + i, rounded<T>(load(x + i, n) * inverse) * load(weight + i, n), n);
    }
}

// out[i] = x[i] cos[i] - x[i + D/2] sin[i];  out[i + D/2] = x[i + D/2] cos[i + D/2] + x[i] sin[i + D/2].
template <class T>
void rotate_head(const T* x, const T* cos, const T* sin, T* out, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int n = lanes_left(half, i);
        const vf low = load(x + i, n), high = load(x + half + i, n);
        store(out + i, rounded<T>(low * load(cos + i, n)) - rounded<T>(high * load(sin + i, n)), n);
        store(out + half + i, rounded<T>(high * load(cos + half + i, n)) + rounded<T>(low * load(sin + half + i, n)), n);
    }
}

template <class T>
void token(const Qkv& args, int64_t t) {
    const int64_t dim = args.dim, slot = args.slots[t];
    const auto* x = static_cast<const T*>(args.qkv) + t * args.stride;
    const auto* cos = static_cast<const T*>(args.cos) + args.positions[t] * dim;
    const auto* sin = static_cast<const T*>(args.sin) + args.positions[t] * dim;
    const auto rotate = [&](const T* head, const void* norm, T* out) {
        T normed[MAX_HEAD_DIM];
        if (norm) norm_head(head, static_cast<const T*>(norm), normed, dim, args.eps);
        rotate_head(norm ? normed : head, cos, sin, out, dim / 2);
    };
    for (int64_t h = 0; h < args.num_heads; ++h, x += dim)
        rotate(x, args.q_norm, static_cast<T*>(args.q_out) + (t * args.num_heads + h) * dim);
    if (slot < 0) return;
    const int64_t at = slot / args.block_size * args.block_stride + slot % args.block_size * dim;
    const int64_t head_stride = args.block_size * dim;
    for (int64_t h = 0; h < args.num_kv_heads; ++h, x += dim)
        rotate(x, args.k_norm, static_cast<T*>(args.keys) + at + h * head_stride);
    for (int64_t h = 0; h < args.num_kv_heads; ++h, x += dim)
        std::memcpy(static_cast<T*>(args.values) + at + h * head_stride, x, dim * sizeof(T));
}

template <class T>
void run(const Qkv& args) {
    if (args.num_tokens < MIN_PARALLEL_TOKENS) {
        for (int64_t t = 0; t < args.num_tokens; ++t) token<T>(args, t);
        return;
    }
    parallel_for(args.num_tokens, [&](int64_t t) { token<T>(args, t); });
}

}  // namespace
}  // namespace disagg

// Returns -1, or the first token whose slot or position lies outside. A slot of -1 is a token without KV.
extern "C" int64_t disagg_qkv_rope_write(const void* p) {
    using namespace disagg;
    const auto& args = args_as<Qkv>(p);
    for (int64_t t = 0; t < args.num_tokens; ++t) {
        const bool has_slot = args.slots[t] >= -1 && args.slots[t] < args.num_blocks * args.block_size;
        if (!has_slot || args.positions[t] < 0 || args.positions[t] >= args.num_positions) return t;
    }
    args.is_bf16 ? run<bf16>(args) : run<float>(args);
    return DONE;
}
