// Paged decode attention, whose threads take (sequence, KV head) pairs, and the KV write. Plain C ABI: pointers, sizes and strides in elements.
//
// Decode attention reads the cache where it lies. For each (sequence, KV head) it makes two passes over the context, block by
// block: scores of all query heads of the group (each K row is loaded once for up to four of them), softmax, then the
// weighted sum of V rows with the accumulators in registers. Everything between load and store is fp32; where the processor
// multiplies bf16 pairs, q . k is summed from such products in fp32 (subnormal numbers count as zero).

#include <atomic>
#include <type_traits>
#include <vector>

#include "team.h"
#include "vec.h"

namespace disagg {
namespace {

constexpr int MAX_HEAD_DIM = 512;
constexpr int64_t AHEAD = 3;

// A cache of one layer: [num_blocks, K, B, D] with the inner [K, B, D] contiguous.
struct Cache {
    const void* keys;
    const void* values;
    int64_t block_stride;
    int64_t num_blocks, num_kv_heads, block_size;
};

inline void prefetch(const void* start, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(start) + at);
}

// Tokens [0, length) of one sequence and KV head, walked in runs of at most 16 rows that lie together. Blocks are scattered
// over the cache, which hides them from the processor's own prefetching: the block AHEAD places on is asked for by hand.
template <class T, class Visit>
void walk(const void* base, const Cache& cache, const int32_t* table, int64_t head, int64_t length, int dim, Visit visit) {
    const int64_t num_blocks = (length + cache.block_size - 1) / cache.block_size;
    const T* first_rows = static_cast<const T*>(base) + head * cache.block_size * dim;
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t first = block * cache.block_size;
        const T* rows = first_rows + table[block] * cache.block_stride;
        if (block + AHEAD < num_blocks)
            prefetch(first_rows + table[block + AHEAD] * cache.block_stride, cache.block_size * dim * sizeof(T));
        const int64_t count = length - first < cache.block_size ? length - first : cache.block_size;
        for (int64_t t = 0; t < count; t += LANES)
            visit(rows + t * dim, first + t, static_cast<int>(count - t < LANES ? count - t : LANES));
    }
}

// DIM is the head dim, or 0 for one that is known at run time only (then the last vector of a row may be short).
template <int DIM>
struct Shape {
    static constexpr int VECS = DIM ? DIM / LANES : MAX_HEAD_DIM / LANES;
    int dim;
    int size() const { return DIM ? DIM : dim; }
    int vecs() const { return DIM ? VECS : (dim + LANES - 1) / LANES; }
    int lanes(int v) const { return DIM ? LANES : (dim - v * LANES < LANES ? dim - v * LANES : LANES); }
};

// How a query head meets K rows: a register of q and the same part of a row, multiplied and added to fp32 sums.
template <class T, int DIM>
struct Dot {
    static constexpr int PER_REGISTER = LANES;
    static vf load_part(const T* p, int n) { return load(p, n); }
    static vf madd(vf acc, vf q, vf k) { return acc + q * k; }
};

#ifdef __AVX512BF16__
// Two bf16 numbers a lane, where the head dim fills whole registers.
struct DotPairs {
    static constexpr int PER_REGISTER = 2 * LANES;
    static vf load_part(const bf16* p, int) {
        vf pairs;
        std::memcpy(&pairs, p, sizeof pairs);
        return pairs;
    }
    static vf madd(vf acc, vf q, vf k) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)q, (__m512bh)k); }
};
template <>
struct Dot<bf16, 32> : DotPairs {};
template <>
struct Dot<bf16, 64> : DotPairs {};
template <>
struct Dot<bf16, 96> : DotPairs {};
template <>
struct Dot<bf16, 128> : DotPairs {};
#endif

// scores[h][t] = scale * q[h] . k[t] for H heads and `count` <= 16 rows; the lanes past `count` are written as zero.
template <class T, int DIM, int H>
inline void score_rows(const vf* q, Shape<DIM> shape, const T* rows, int count, float scale, float* scores,
                       int64_t stride) {
    using D = Dot<T, DIM>;
    vf partial[H][LANES];
    for (int t = 0; t < count; ++t) {
        const T* row = rows + static_cast<int64_t>(t) * shape.dim;
        vf acc[H] = {};
        for (int v = 0; v * D::PER_REGISTER < shape.size(); ++v) {
            const vf k = D::load_part(row + v * D::PER_REGISTER, shape.lanes(v));
            for (int h = 0; h < H; ++h) acc[h] = D::madd(acc[h], q[h * Shape<DIM>::VECS + v], k);
        }
        for (int h = 0; h < H; ++h) partial[h][t] = acc[h];
    }
    for (int h = 0; h < H; ++h) {
        for (int t = count; t < LANES; ++t) partial[h][t] = vf{};
        store(scores + h * stride, sum_each(partial[h]) * scale);
    }
}

// acc[h] += sum over t of weights[h][t] * v[t].
template <class T, int DIM, int H>
inline void add_rows(vf (*acc)[Shape<DIM>::VECS], Shape<DIM> shape, const T* rows, int count, const float* weights,
                     int64_t stride) {
    for (int t = 0; t < count; ++t) {
        const T* row = rows + static_cast<int64_t>(t) * shape.dim;
        for (int v = 0; v < shape.vecs(); ++v) {
            const vf value = load(row + v * LANES, shape.lanes(v));
            for (int h = 0; h < H; ++h) acc[h][v] += weights[h * stride + t] * value;
        }
    }
}

// In place: scores to e^(score - max). Returns 1 / their sum, and 0 for an empty row. `stride` is a multiple of 16.
inline float softmax(float* scores, int64_t length, int64_t stride) {
    if (length == 0) return 0.0f;
    for (int64_t i = length; i < stride; ++i) scores[i] = -INFINITY;
    vf best = splat(-INFINITY);
    for (int64_t i = 0; i < stride; i += LANES) best = max(load(scores + i), best);
    const vf top = splat(max(best));
    vf total = {};
    for (int64_t i = 0; i < stride; i += LANES) {
        const vf weight = exp(load(scores + i) - top);
        store(scores + i, weight);
        total += weight;
    }
    return 1.0f / sum(total);
}

// H query heads of one sequence that share a KV head. `scores` holds H rows of `stride` floats, at least length + 16: a short
// run of rows writes 16 scores, and the next run, or the softmax, writes over those past its end.
template <class T, int DIM, int H>
void attend(const T* q, int64_t q_stride, const Cache& cache, const int32_t* table, int64_t head, int64_t length,
            Shape<DIM> shape, float scale, float* scores, int64_t stride, T* out) {
    constexpr int VECS = Shape<DIM>::VECS;
    using D = Dot<T, DIM>;
    vf query[H * VECS];
    for (int h = 0; h < H; ++h)
        for (int v = 0; v * D::PER_REGISTER < shape.size(); ++v)
            query[h * VECS + v] = D::load_part(q + h * q_stride + v * D::PER_REGISTER, shape.lanes(v));
    walk<T>(cache.keys, cache, table, head, length, shape.dim, [&](const T* rows, int64_t first, int count) {
        score_rows<T, DIM, H>(query, shape, rows, count, scale, scores + first, stride);
    });
    float inverse[H];
    for (int h = 0; h < H; ++h) inverse[h] = softmax(scores + h * stride, length, stride);
    vf acc[H][VECS] = {};
    walk<T>(cache.values, cache, table, head, length, shape.dim, [&](const T* rows, int64_t first, int count) {
        add_rows<T, DIM, H>(acc, shape, rows, count, scores + first, stride);
    });
    for (int h = 0; h < H; ++h)
        for (int v = 0; v < shape.vecs(); ++v)
            store(out + h * shape.dim + v * LANES, acc[h][v] * inverse[h], shape.lanes(v));
}

struct Decode {
    const void* q;
    int64_t q_stride_seq, q_stride_head;
    Cache cache;
    const int32_t* tables;
    int64_t table_stride;
    const int32_t* lengths;
    int64_t num_seqs, num_heads;
    int dim;
    float scale;
    void* out;
};

// All query heads of one sequence that share a KV head.
template <class T, int DIM>
void decode_group(const Decode& args, int64_t s, int64_t head) {
    static thread_local std::vector<float> scores;
    const int64_t group = args.num_heads / args.cache.num_kv_heads;
    const Shape<DIM> shape{args.dim};
    constexpr int TILE = DIM && DIM <= 64 ? 4 : 2;
    const int64_t length = args.lengths[s];
    const int64_t stride = (length + 2 * LANES - 1) / LANES * LANES;
    if (scores.size() < static_cast<size_t>(TILE * stride)) scores.resize(TILE * stride);
    const int32_t* table = args.tables + s * args.table_stride;
    for (int64_t n = head * group, end = n + group; n < end;) {
        const int64_t left = end - n;
        const T* q = static_cast<const T*>(args.q) + s * args.q_stride_seq + n * args.q_stride_head;
        T* out = static_cast<T*>(args.out) + (s * args.num_heads + n) * args.dim;
        const auto run = [&](auto heads) {
            attend<T, DIM, decltype(heads)::value>(q, args.q_stride_head, args.cache, table, head, length, shape, args.scale,
                                                   scores.data(), stride, out);
            n += decltype(heads)::value;
        };
        if (TILE >= 4 && left >= 4)
            run(std::integral_constant<int, TILE >= 4 ? 4 : 1>{});
        else if (TILE >= 4 && left == 3)
            run(std::integral_constant<int, TILE >= 4 ? 3 : 1>{});
        else if (left >= 2)
            run(std::integral_constant<int, 2>{});
        else
            run(std::integral_constant<int, 1>{});
    }
}

template <class T, int DIM>
void decode(const Decode& args) {
    const int64_t num_heads = args.cache.num_kv_heads, num_groups = args.num_seqs * num_heads;
    std::atomic<int64_t> next{0};  // contexts differ in length: whoever is free takes the next one
    in_parts([&](int, int) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_groups;)
            decode_group<T, DIM>(args, i / num_heads, i % num_heads);
    });
}

template <class T>
void decode(const Decode& args) {
    switch (args.dim) {
        case 16: return decode<T, 16>(args);
        case 32: return decode<T, 32>(args);
        case 64: return decode<T, 64>(args);
        case 80: return decode<T, 80>(args);
        case 96: return decode<T, 96>(args);
        case 128: return decode<T, 128>(args);
        default: return decode<T, 0>(args);
    }
}

// Index of the first sequence whose length or blocks lie outside, or -1.
int64_t first_invalid(const Decode& args, int64_t table_width) {
    for (int64_t s = 0; s < args.num_seqs; ++s) {
        const int64_t length = args.lengths[s];
        if (length < 0 || length > table_width * args.cache.block_size) return s;
        for (int64_t b = 0; b * args.cache.block_size < length; ++b) {
            const int32_t block = args.tables[s * args.table_stride + b];
            if (block < 0 || block >= args.cache.num_blocks) return s;
        }
    }
    return -1;
}

}  // namespace
}  // namespace disagg

// Returns -1, or the index of a sequence with an invalid length or block; then nothing was computed.
extern "C" int64_t disagg_decode_attention(int32_t is_bf16, const void* q, int64_t q_stride_seq, int64_t q_stride_head,
                                           const void* keys, const void* values, int64_t block_stride, int64_t num_blocks,
                                           int64_t num_kv_heads, int64_t block_size, const int32_t* tables,
                                           int64_t table_stride, int64_t table_width, const int32_t* lengths,
                                           int64_t num_seqs, int64_t num_heads, int64_t dim, float scale, void* out) {
    using namespace disagg;
    const Cache cache{keys, values, block_stride, num_blocks, num_kv_heads, block_size};
    const Decode args{q,        q_stride_seq, q_stride_head, cache, tables, table_stride, lengths,
                      num_seqs, num_heads,    static_cast<int>(dim), scale, out};
    const int64_t invalid = first_invalid(args, table_width);
    if (invalid >= 0) return invalid;
    is_bf16 ? decode<bf16>(args) : decode<float>(args);
    return -1;
}

// Copies rows of `row_bytes` (one head of one token); strides in bytes. Returns -1, or the first token whose slot is invalid.
extern "C" int64_t disagg_kv_write(const char* k, const char* v, int64_t k_stride_token, int64_t v_stride_token,
                                   int64_t k_stride_head, int64_t v_stride_head, char* keys, char* values,
                                   int64_t block_stride, int64_t num_blocks, int64_t num_kv_heads, int64_t block_size,
                                   const int64_t* slots, int64_t num_tokens, int64_t row_bytes) {
    for (int64_t t = 0; t < num_tokens; ++t)
        if (slots[t] < 0 || slots[t] >= num_blocks * block_size) return t;
    for (int64_t t = 0; t < num_tokens; ++t) {
        const int64_t at = slots[t] / block_size * block_stride + slots[t] % block_size * row_bytes;
        for (int64_t h = 0; h < num_kv_heads; ++h) {
            const int64_t to = at + h * block_size * row_bytes;
            std::memcpy(keys + to, k + t * k_stride_token + h * k_stride_head, row_bytes);
            std::memcpy(values + to, v + t * v_stride_token + h * v_stride_head, row_bytes);
        }
    }
    return -1;
}
