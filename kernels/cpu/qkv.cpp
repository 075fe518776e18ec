// What lies between the QKV GEMM and attention, in one pass: the norm of each head, or of all heads, where the model has one,
// rotary embedding of the first dims by position, and K and V into the paged cache. It rounds where separate ops would round. Threads take tokens.

#include "calls.h"
#include "int8_rows.h"
#include "thread_pool.h"
#include "vec.h"

namespace disagg {
namespace {

constexpr int64_t MIN_PARALLEL_TOKENS = 8;

struct Qkv {
    int32_t is_bf16, is_int8;  // rows; the cache
    const void* qkv;  // a row holds the heads of q, then of k, then of v
    int64_t stride, num_tokens, num_heads, num_kv_heads, dim, rotary_dim;
    const void *q_norm, *k_norm;  // null without
    float eps;
    int32_t plus_one, is_whole;  // whole: the norm is over all heads
    const float* squares;        // sums of squares of all of q and all of k, two a token; null where they are all here
    const int64_t* positions;
    const void *cos, *sin;
    int64_t num_positions;
    const void* query_scales;  // of each position; null without
    void *keys, *values;
    int64_t block_stride, num_blocks, block_size;
    int64_t q_size, k_size;  // numbers in a sum of squares
    const int64_t* slots;
    void* q_out;
};

inline int lanes_left(int64_t size, int64_t at) { return size - at < LANES ? static_cast<int>(size - at) : LANES; }

template <class T>
float sum_of_squares(const T* x, int64_t size) {
    vf squares = splat(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        const vf part = load(x + i, lanes_left(size, i));
        squares = fma(part, part, squares);
    }
    return sum(squares);
}

inline float inverse_rms(float squares, int64_t size, float eps) {
    return 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
}

// out = weight * rounded(x * inverse), or (1 + weight) * (x * inverse), rounded.
template <class T>
void norm_head(const T* x, const T* weight, T* out, int64_t dim, float inverse, bool plus_one) {
    for (int64_t i = 0; i < dim; i += LANES) {
        const int n = lanes_left(dim, i);
        const vf scaled = load(x + i, n) * inverse;
        store(out + i, plus_one ? scaled * (1.0f + load(weight + i, n)) : rounded<T>(scaled) * load(weight + i, n), n);
    }
}

// out[i] = x[i] cos[i] - x[i + R/2] sin[i];  out[i + R/2] = x[i + R/2] cos[i + R/2] + x[i] sin[i + R/2].
template <class T>
void rotate_head(const T* x, const T* cos, const T* sin, T* out, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        const int n = lanes_left(half, i);
        const vf low = load(x + i, n), high = load(x + half + i, n);
        store(out + i, rounded<T>(low * load(cos + i, n)) - rounded<T>(high * load(sin + i, n)), n);
        store(out + half + i, rounded<T>(high * load(cos + half + i, n)) + rounded<T>(low * load(sin + half + i, n)), n);
    }
}

// PLAIN: all dims of a head are rotated, and nothing else is done with it.
template <class T, bool PLAIN>
void token_of(const Qkv& args, int64_t t) {
    const int64_t dim = args.dim, rotary_dim = args.rotary_dim, position = args.positions[t], slot = args.slots[t];
    const auto* x = static_cast<const T*>(args.qkv) + t * args.stride;
    const auto* cos = static_cast<const T*>(args.cos) + position * rotary_dim;
    const auto* sin = static_cast<const T*>(args.sin) + position * rotary_dim;
    // All heads of q, or all of k, each where `place(head)` says; `squares` is the token's sum over all ranks, where there is one.
    const auto rotate_heads = [&](int64_t num_heads, const void* norm, const float* squares, int64_t size, auto place, auto done) {
        if constexpr (PLAIN) {
            for (int64_t h = 0; h < num_heads; done(h), ++h, x += dim) rotate_head(x, cos, sin, place(h), dim / 2);
            return;
        }
        const auto* weight = static_cast<const T*>(norm);
        float inverse = 0.0f;
        if (weight && args.is_whole)
            inverse = inverse_rms(squares ? *squares : sum_of_squares(x, num_heads * dim), size, args.eps);
        for (int64_t h = 0; h < num_heads; done(h), ++h, x += dim) {
            T normed[MAX_HEAD_DIM];
            T* out = place(h);
            if (weight && !args.is_whole) inverse = inverse_rms(sum_of_squares(x, dim), dim, args.eps);
            if (weight) norm_head(x, args.is_whole ? weight + h * dim : weight, normed, dim, inverse, args.plus_one);
            const T* head = weight ? normed : x;
            rotate_head(head, cos, sin, out, rotary_dim / 2);
            std::memcpy(out + rotary_dim, head + rotary_dim, (dim - rotary_dim) * sizeof(T));
        }
    };
    const float* squares = args.squares ? args.squares + 2 * t : nullptr;
    T* q_out = static_cast<T*>(args.q_out) + t * args.num_heads * dim;
    const auto nothing = [](int64_t) {};
    rotate_heads(args.num_heads, args.q_norm, squares, args.q_size, [&](int64_t h) { return q_out + h * dim; }, nothing);
    if (!PLAIN && args.query_scales) {
        const float scale = load(static_cast<const T*>(args.query_scales) + position, 1)[0];
        for (int64_t i = 0; i < args.num_heads * dim; i += LANES) {
            const int n = lanes_left(args.num_heads * dim, i);
            store(q_out + i, load(q_out + i, n) * scale, n);
        }
    }
    if (slot < 0) return;
    const float* k_squares = squares ? squares + 1 : nullptr;
    const int64_t row_numbers = dim + (args.is_int8 ? SCALE_BYTES<int8_t> : 0), head_stride = args.block_size * row_numbers;
    const int64_t at = slot / args.block_size * args.block_stride + slot % args.block_size * row_numbers;
    if (args.is_int8) {
        T rotated[MAX_HEAD_DIM];
        int8_t *keys = static_cast<int8_t*>(args.keys) + at, *values = static_cast<int8_t*>(args.values) + at;
        rotate_heads(args.num_kv_heads, args.k_norm, k_squares, args.k_size, [&](int64_t) { return rotated; },
                     [&](int64_t h) { quantize_row(rotated, dim, keys + h * head_stride); });
        for (int64_t h = 0; h < args.num_kv_heads; ++h, x += dim) quantize_row(x, dim, values + h * head_stride);
        return;
    }
    T *keys = static_cast<T*>(args.keys) + at, *values = static_cast<T*>(args.values) + at;
    rotate_heads(args.num_kv_heads, args.k_norm, k_squares, args.k_size, [&](int64_t h) { return keys + h * head_stride; }, nothing);
    for (int64_t h = 0; h < args.num_kv_heads; ++h, x += dim) std::memcpy(values + h * head_stride, x, dim * sizeof(T));
}

template <class T>
void token(const Qkv& args, int64_t t) {
    const bool is_plain = !args.q_norm && !args.k_norm && !args.query_scales && args.rotary_dim == args.dim;
    is_plain ? token_of<T, true>(args, t) : token_of<T, false>(args, t);
}

// Of latent attention: rows of the cache are a latent, then k, which all heads share.
struct Latent {
    int32_t is_bf16;
    const void* latents;
    int64_t latent_stride;
    const void* k;
    int64_t k_stride;
    const void* absorbed;
    int64_t absorbed_stride_token, absorbed_stride_head;
    const void* q;
    int64_t q_stride_token, q_stride_head;
    int64_t num_tokens, num_heads, latent_dim, rotary_dim;
    const int64_t* positions;
    const void *cos, *sin;
    int64_t num_positions;
    void* cache;
    int64_t block_stride, num_blocks, block_size;
    const int64_t* slots;
    void* q_out;
};

template <class T>
void token(const Latent& args, int64_t t) {
    const int64_t size = args.latent_dim, dim = size + args.rotary_dim, slot = args.slots[t];
    const auto* cos = static_cast<const T*>(args.cos) + args.positions[t] * args.rotary_dim;
    const auto* sin = static_cast<const T*>(args.sin) + args.positions[t] * args.rotary_dim;
    const auto write = [&](const T* first, const T* rotated, T* out) {
        std::memcpy(out, first, size * sizeof(T));
        rotate_head(rotated, cos, sin, out + size, args.rotary_dim / 2);
    };
    const auto* absorbed = static_cast<const T*>(args.absorbed) + t * args.absorbed_stride_token;
    const auto* q = static_cast<const T*>(args.q) + t * args.q_stride_token;
    T* q_out = static_cast<T*>(args.q_out) + t * args.num_heads * dim;
    for (int64_t h = 0; h < args.num_heads; ++h)
        write(absorbed + h * args.absorbed_stride_head, q + h * args.q_stride_head, q_out + h * dim);
    if (slot < 0) return;
    write(static_cast<const T*>(args.latents) + t * args.latent_stride, static_cast<const T*>(args.k) + t * args.k_stride,
          static_cast<T*>(args.cache) + slot / args.block_size * args.block_stride + slot % args.block_size * dim);
}

template <class T, class Args>
void run(const Args& args) {
    if (args.num_tokens < MIN_PARALLEL_TOKENS) {
        for (int64_t t = 0; t < args.num_tokens; ++t) token<T>(args, t);
        return;
    }
    parallel_for(args.num_tokens, [&](int64_t t) { token<T>(args, t); });
}

// Returns -1, or the first token whose slot or position lies outside. A slot of -1 is a token without KV.
template <class Args>
int64_t run_within(const Args& args) {
    for (int64_t t = 0; t < args.num_tokens; ++t) {
        const bool has_slot = args.slots[t] >= -1 && args.slots[t] < args.num_blocks * args.block_size;
        if (!has_slot || args.positions[t] < 0 || args.positions[t] >= args.num_positions) return t;
    }
    args.is_bf16 ? run<bf16>(args) : run<float>(args);
    return DONE;
}

}  // namespace
}  // namespace disagg

extern "C" int64_t disagg_qkv_rope_write(const void* p) { return disagg::run_within(disagg::args_as<disagg::Qkv>(p)); }

extern "C" int64_t disagg_latent_rope_write(const void* p) { return disagg::run_within(disagg::args_as<disagg::Latent>(p)); }
