// Paged decode attention, whose threads take (sequence, KV head) pairs. Sizes and strides in elements.
//
// Decode attention reads the cache where it lies. For each (sequence, KV head) it makes two passes over the context, block by
// block: scores of all query heads of the group (each K row is loaded once for up to four of them), softmax, then the
// weighted sum of V rows with the accumulators in registers. Everything between load and store is fp32; where the processor
// multiplies bf16 pairs, both sums are of such products, added in fp32: the weights are rounded to bf16 then, as in prefill,
// and subnormal numbers count as zero.

#include <atomic>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "team.h"
#include "vec.h"

namespace disagg {
namespace {

constexpr int MAX_HEAD_DIM = 512;
constexpr int64_t AHEAD = 6;  // blocks; measured on Zen 5: 0 gives 9 GB/s, 3 22, 6 23, 12 22

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

// K or V of one sequence and KV head: rows of tokens, in blocks that are scattered over the cache.
template <class T>
struct Stream {
    const T* rows;  // of block 0 of the cache
    int64_t block_stride, block_size;
    int dim;
    const int32_t* table;
    int64_t length;

    Stream(const void* base, const Cache& cache, const int32_t* blocks, int64_t head, int64_t num_tokens, int head_dim)
        : rows(static_cast<const T*>(base) + head * cache.block_size * head_dim),
          block_stride(cache.block_stride),
          block_size(cache.block_size),
          dim(head_dim),
          table(blocks),
          length(num_tokens) {}
    int64_t num_blocks() const { return (length + block_size - 1) / block_size; }
    const T* block(int64_t i) const { return rows + table[i] * block_stride; }
};

// Visits runs of at most 16 rows that lie together. Scattered blocks are hidden from the processor's own prefetching: the block
// AHEAD places on is asked for by hand, and at the end the first blocks of `following`, which is read next.
template <class T, class Visit>
void walk(const Stream<T>& stream, const Stream<T>& following, Visit visit) {
    const int64_t num_blocks = stream.num_blocks(), num_following = following.num_blocks();
    const int64_t block_bytes = stream.block_size * stream.dim * static_cast<int64_t>(sizeof(T));
    for (int64_t block = 0; block < num_blocks; ++block) {
        const int64_t first = block * stream.block_size, next = block + AHEAD - num_blocks;
        if (next < 0)
            prefetch(stream.block(block + AHEAD), block_bytes);
        else if (next < num_following)
            prefetch(following.block(next), block_bytes);
        const T* rows = stream.block(block);
        const int64_t count = stream.length - first < stream.block_size ? stream.length - first : stream.block_size;
        for (int64_t t = 0; t < count; t += LANES)
            visit(rows + t * stream.dim, first + t, static_cast<int>(count - t < LANES ? count - t : LANES));
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

// How query heads meet rows: scores[h][t] = scale * q[h] . k[t], and acc[h] += sum over t of weights[h][t] * v[t], for H heads
// and `count` <= 16 rows. Scores past `count` may hold anything.
template <class T, int DIM>
struct Rows {
    using Weight = float;
    static constexpr int VECS = Shape<DIM>::VECS;

    static void load_query(const T* q, Shape<DIM> shape, vf* query) {
        for (int v = 0; v < shape.vecs(); ++v) query[v] = load(q + v * LANES, shape.lanes(v));
    }

    template <int H>
    static void score(const vf (*q)[VECS], Shape<DIM> shape, const T* rows, int count, float scale, float* scores,
                      int64_t stride) {
        vf partial[H][LANES] = {};
        for (int t = 0; t < count; ++t) {
            const T* row = rows + static_cast<int64_t>(t) * shape.dim;
            vf acc[H] = {};
            for (int v = 0; v < shape.vecs(); ++v) {
                const vf k = load(row + v * LANES, shape.lanes(v));
                for (int h = 0; h < H; ++h) acc[h] += q[h][v] * k;
            }
            for (int h = 0; h < H; ++h) partial[h][t] = acc[h];
        }
        for (int h = 0; h < H; ++h) store(scores + h * stride, sum_each(partial[h]) * scale);
    }

    template <int H>
    static void add(vf (*acc)[VECS], Shape<DIM> shape, const T* rows, int count, const float* weights, int64_t stride) {
        for (int t = 0; t < count; ++t) {
            const T* row = rows + static_cast<int64_t>(t) * shape.dim;
            for (int v = 0; v < shape.vecs(); ++v) {
                const vf value = load(row + v * LANES, shape.lanes(v));
                for (int h = 0; h < H; ++h) acc[h][v] += weights[h * stride + t] * value;
            }
        }
    }

    static void finish(const vf* acc, Shape<DIM> shape, float factor, T* out) {
        for (int v = 0; v < shape.vecs(); ++v) store(out + v * LANES, acc[v] * factor, shape.lanes(v));
    }
};

#ifdef __AVX512BF16__
// Two bf16 numbers a lane, where the head dim fills whole registers. A sum of weighted rows takes two rows at a time; their
// numbers are interleaved within 128-bit lanes, and sorted once at the end.
template <int DIM>
struct PairRows {
    using Weight = bf16;
    static constexpr int VECS = Shape<DIM>::VECS, PAIRS = DIM / 2 / LANES;

    static __m512i load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
    static vf madd(vf acc, __m512i a, __m512i b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }

    static void load_query(const bf16* q, Shape<DIM>, vf* query) { std::memcpy(query, q, DIM * sizeof(bf16)); }

    // Four vectors to one: in each 128-bit lane, their sums over that lane.
    static __m512 sum_lanes(const vf* x) {
        const auto add_halves = [](vf a, vf b) {
            return (__m512d)((vf)_mm512_unpacklo_ps((__m512)a, (__m512)b) + (vf)_mm512_unpackhi_ps((__m512)a, (__m512)b));
        };
        const __m512d a = add_halves(x[0], x[1]), b = add_halves(x[2], x[3]);
        return (__m512)((vf)_mm512_unpacklo_pd(a, b) + (vf)_mm512_unpackhi_pd(a, b));
    }

    // Four vectors to one: lane i of the result is the sum of the lanes, of 128 bits, of vector i.
    static __m512 sum_across(__m512 a, __m512 b) {
        return (__m512)((vf)_mm512_shuffle_f32x4(a, b, 0x88) + (vf)_mm512_shuffle_f32x4(a, b, 0xdd));
    }

    template <int H>
    static void score(const vf (*q)[VECS], Shape<DIM>, const bf16* rows, int count, float scale, float* scores,
                      int64_t stride) {
        __m512 quarters[H][4];
        for (int quarter = 0; quarter < 4; ++quarter) {
            vf acc[H][4] = {};
            for (int i = 0; i < 4; ++i) {
                const int t = 4 * quarter + i;
                const bf16* row = rows + (t < count ? t : 0) * DIM;
                for (int v = 0; v < PAIRS; ++v) {
                    const __m512i k = load_pairs(row + v * 2 * LANES);
                    for (int h = 0; h < H; ++h) acc[h][i] = madd(acc[h][i], (__m512i)q[h][v], k);
                }
            }
            for (int h = 0; h < H; ++h) quarters[h][quarter] = sum_lanes(acc[h]);
        }
        for (int h = 0; h < H; ++h) {
            const __m512 *x = quarters[h], total = sum_across(sum_across(x[0], x[1]), sum_across(x[2], x[3]));
            store(scores + h * stride, (vf)total * scale);
        }
    }

    template <int H>
    static void add(vf (*acc)[VECS], Shape<DIM>, const bf16* rows, int count, const bf16* weights, int64_t stride) {
        const auto add_two = [&](const bf16* row, const bf16* second, int t) {
            for (int v = 0; v < PAIRS; ++v) {
                const __m512i a = load_pairs(row + v * 2 * LANES);
                const __m512i b = second ? load_pairs(second + v * 2 * LANES) : __m512i{};
                const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
                for (int h = 0; h < H; ++h) {
                    int32_t pair;
                    std::memcpy(&pair, weights + h * stride + t, sizeof pair);
                    acc[h][2 * v] = madd(acc[h][2 * v], _mm512_set1_epi32(pair), low);
                    acc[h][2 * v + 1] = madd(acc[h][2 * v + 1], _mm512_set1_epi32(pair), high);
                }
            }
        };
        int t = 0;
        for (; t + 2 <= count; t += 2) add_two(rows + t * DIM, rows + (t + 1) * DIM, t);
        if (t < count) add_two(rows + t * DIM, nullptr, t);
    }

    static void finish(const vf* acc, Shape<DIM>, float factor, bf16* out) {
        const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        for (int v = 0; v < VECS; v += 2) {
            const __m512 low = (__m512)(acc[v] * factor), high = (__m512)(acc[v + 1] * factor);
            store(out + v * LANES, (vf)_mm512_permutex2var_ps(low, first, high));
            store(out + (v + 1) * LANES, (vf)_mm512_permutex2var_ps(low, second, high));
        }
    }
};
template <>
struct Rows<bf16, 32> : PairRows<32> {};
template <>
struct Rows<bf16, 64> : PairRows<64> {};
template <>
struct Rows<bf16, 96> : PairRows<96> {};
template <>
struct Rows<bf16, 128> : PairRows<128> {};
#endif

// In place: scores to e^(score - max), as numbers of type W. Returns 1 / their sum, and 0 for an empty row. `stride` is a
// multiple of 16.
template <class W>
inline float softmax(float* scores, int64_t length, int64_t stride) {
    if (length == 0) return 0.0f;
    for (int64_t i = length; i < stride; ++i) scores[i] = -INFINITY;
    vf best = splat(-INFINITY);
    for (int64_t i = 0; i < stride; i += LANES) best = max(load(scores + i), best);
    const vf top = splat(max(best));
    vf total = {};
    for (int64_t i = 0; i < stride; i += LANES) {
        const vf weight = exp(load(scores + i) - top);
        store(reinterpret_cast<W*>(scores) + i, weight);  // never past what was read
        total += weight;
    }
    return 1.0f / sum(total);
}

// K and V that one KV head of a sequence attends to, and K of the one that comes next.
template <class T>
struct Context {
    Stream<T> keys, values, next_keys;
};

// H query heads of one sequence that share a KV head. `scores` holds H rows of `stride` floats, at least length + 16: a short
// run of rows writes 16 scores, and the next run, or the softmax, writes over those past its end.
template <class T, int DIM, int H>
void attend(const T* q, int64_t q_stride, const Context<T>& context, Shape<DIM> shape, float scale, float* scores,
            int64_t stride, T* out) {
    constexpr int VECS = Shape<DIM>::VECS;
    using Meet = Rows<T, DIM>;
    using Weight = typename Meet::Weight;
    vf query[H][VECS];
    for (int h = 0; h < H; ++h) Meet::load_query(q + h * q_stride, shape, query[h]);
    walk(context.keys, context.values, [&](const T* rows, int64_t first, int count) {
        Meet::template score<H>(query, shape, rows, count, scale, scores + first, stride);
    });
    float inverse[H];
    for (int h = 0; h < H; ++h) inverse[h] = softmax<Weight>(scores + h * stride, context.keys.length, stride);
    const auto* weights = reinterpret_cast<const Weight*>(scores);
    constexpr int64_t WEIGHTS_PER_SCORE = sizeof(float) / sizeof(Weight);
    vf acc[H][VECS] = {};
    walk(context.values, context.next_keys, [&](const T* rows, int64_t first, int count) {
        Meet::template add<H>(acc, shape, rows, count, weights + first, stride * WEIGHTS_PER_SCORE);
    });
    for (int h = 0; h < H; ++h) Meet::finish(acc[h], shape, inverse[h], out + h * shape.dim);
}

struct Decode {
    int32_t is_bf16;
    const void* q;
    int64_t q_stride_seq, q_stride_head;
    Cache cache;
    const int32_t* tables;
    int64_t table_stride, table_width;
    const int32_t* lengths;
    int64_t num_seqs, num_heads, dim;
    float scale;
    void* out;
};

template <class T>
Stream<T> stream_of(const Decode& args, const void* base, int64_t s, int64_t head) {
    return {base, args.cache, args.tables + s * args.table_stride, head, args.lengths[s], static_cast<int>(args.dim)};
}

// Keys of a (sequence, KV head) pair; none past the last pair.
template <class T>
Stream<T> keys_of(const Decode& args, int64_t pair) {
    const int64_t s = pair / args.cache.num_kv_heads;
    if (s < args.num_seqs) return stream_of<T>(args, args.cache.keys, s, pair % args.cache.num_kv_heads);
    return {args.cache.keys, args.cache, args.tables, 0, 0, static_cast<int>(args.dim)};
}

// All query heads of one sequence that share a KV head; `next` is the pair that this thread probably takes then.
template <class T, int DIM>
void decode_group(const Decode& args, int64_t pair, int64_t next) {
    static thread_local std::vector<float> scores;
    const int64_t num_kv_heads = args.cache.num_kv_heads, s = pair / num_kv_heads, head = pair % num_kv_heads;
    const int64_t group = args.num_heads / num_kv_heads;
    const Shape<DIM> shape{static_cast<int>(args.dim)};
    constexpr int TILE = DIM && DIM <= 64 ? 4 : 2;
    const int64_t stride = (args.lengths[s] + 2 * LANES - 1) / LANES * LANES;
    if (scores.size() < static_cast<size_t>(TILE * stride)) scores.resize(TILE * stride);
    const Context<T> context{keys_of<T>(args, pair), stream_of<T>(args, args.cache.values, s, head), keys_of<T>(args, next)};
    for (int64_t n = head * group, end = n + group; n < end;) {
        const int64_t left = end - n;
        const T* q = static_cast<const T*>(args.q) + s * args.q_stride_seq + n * args.q_stride_head;
        T* out = static_cast<T*>(args.out) + (s * args.num_heads + n) * args.dim;
        const auto run = [&](auto heads) {
            attend<T, DIM, decltype(heads)::value>(q, args.q_stride_head, context, shape, args.scale, scores.data(), stride,
                                                   out);
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
    const int64_t num_pairs = args.num_seqs * args.cache.num_kv_heads;
    std::atomic<int64_t> unclaimed{0};  // contexts differ in length: whoever is free takes the next one
    in_parts([&](int, int num_parts) {
        for (int64_t pair; (pair = unclaimed.fetch_add(1, std::memory_order_relaxed)) < num_pairs;)
            decode_group<T, DIM>(args, pair, pair + num_parts);
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
int64_t first_invalid(const Decode& args) {
    for (int64_t s = 0; s < args.num_seqs; ++s) {
        const int64_t length = args.lengths[s];
        if (length < 0 || length > args.table_width * args.cache.block_size) return s;
        for (int64_t b = 0; b * args.cache.block_size < length; ++b) {
            const int32_t block = args.tables[s * args.table_stride + b];
            if (block < 0 || block >= args.cache.num_blocks) return s;
        }
    }
    return -1;
}

}  // namespace
}  // namespace disagg

// Returns -1, or the index of a sequence with an invalid length or block.
extern "C" int64_t disagg_decode_attention(const void* p) {
    using namespace disagg;
    const auto& args = args_as<Decode>(p);
    const int64_t invalid = first_invalid(args);
    if (invalid >= 0) return invalid;
    args.is_bf16 ? decode<bf16>(args) : decode<float>(args);
    return DONE;
}
