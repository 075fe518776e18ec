// Paged decode attention, whose threads take pieces of contexts. Sizes and strides in elements.
//
// Decode attention reads the cache where it lies. A context is cut into pieces of about PIECE_TOKENS tokens, in whole blocks;
// the last one is half to one and a half as long (a shorter context is one piece), however many threads there are. For each
// piece there are two passes over its blocks: scores of all query heads (each K row is loaded once for up to four heads of a
// group), softmax, then the weighted sums of V rows; all KV heads of a block in turn, because they lie together. The sums of
// the pieces of a sequence are put together at the end, in order (flash decoding: https://pytorch.org/blog/flash-decoding).
// Everything between load and store is fp32; where the processor multiplies bf16 pairs, both sums are of such products, added
// in fp32: the weights are rounded to bf16 then, as in prefill, and subnormal numbers count as zero.

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <type_traits>
#include <vector>

#include "prefetch.h"
#include "calls.h"
#include "rows.h"
#include "scratch.h"
#include "thread_pool.h"

namespace disagg {
namespace {

constexpr int64_t PIECE_TOKENS = 256;
constexpr int64_t AHEAD_BYTES = 8 << 10;

// A cache of one layer: [num_blocks, K, B, D] with the inner [K, B, D] contiguous.
struct Cache {
    const void* keys;
    const void* values;
    int64_t block_stride;
    int64_t num_blocks, num_kv_heads, block_size;
};

// Memory that is read as vectors is not written as floats by name: compilers may assume that they do not alias.
inline void put(void* floats, int64_t i, float x) { std::memcpy(static_cast<char*>(floats) + i * sizeof x, &x, sizeof x); }

// What a softmax divides by, and the score that it was taken from.
struct Softmax {
    float top, total;
};

// In place: `length` > 0 scores to e^(score - top), as numbers of type W. `stride` is a multiple of 16.
template <class W>
inline Softmax softmax(float* scores, int64_t length, int64_t stride) {
    for (int64_t i = length; i < stride; ++i) put(scores, i, -INFINITY);
    vf best = splat(-INFINITY);
    for (int64_t i = 0; i < stride; i += LANES) best = max(load(scores + i), best);
    const float top = max(best), finite = top > -FLT_MAX ? top : -FLT_MAX;  // one piece may have nothing but -inf
    vf total = splat(0.0f);
    for (int64_t i = 0; i < stride; i += LANES) {
        const vf weight = exp(load(scores + i) - splat(finite));
        store(reinterpret_cast<W*>(scores) + i, weight);  // never past what was read
        total += weight;
    }
    return {top, sum(total)};
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

// Part of a sequence's context: whole blocks, but for the last one.
struct Piece {
    int64_t seq;
    const int32_t* blocks;
    int64_t num_blocks, num_tokens;
};

void cut(const Decode& args, std::vector<Piece>& pieces) {
    const int64_t block_size = args.cache.block_size;
    const int64_t usual = block_size < PIECE_TOKENS ? PIECE_TOKENS / block_size * block_size : block_size;
    pieces.clear();
    for (int64_t s = 0; s < args.num_seqs; ++s)
        for (int64_t first = 0; first < args.lengths[s];) {
            const int64_t left = args.lengths[s] - first, num_tokens = 2 * left < 3 * usual ? left : usual;
            const int32_t* blocks = args.tables + s * args.table_stride + first / block_size;
            pieces.push_back({s, blocks, (num_tokens + block_size - 1) / block_size, num_tokens});
            first += num_tokens;
        }
}

// What a piece leaves, in vectors: top and total of each query head, then their weighted sums.
template <int DIM>
struct Partial {
    vf* at;
    int64_t num_heads;
    int64_t head_vecs() const { return (num_heads + LANES - 1) / LANES; }
    int64_t size() const { return 2 * head_vecs() + num_heads * Shape<DIM>::VECS; }
    vf* tops() const { return at; }
    vf* totals() const { return at + head_vecs(); }
    vf (*sums() const)[Shape<DIM>::VECS] { return reinterpret_cast<vf(*)[Shape<DIM>::VECS]>(at + 2 * head_vecs()); }
    Partial piece(int64_t i) const { return {at + i * size(), num_heads}; }
};

// The rows of each KV head in each block of a piece, first the keys, then the values, and then the keys of the piece that
// comes next: what is read, in order.
template <class T>
class Chunks {
   public:
    Chunks(const Decode& args, const Piece& piece, const Piece& following)
        : cache_(args.cache), dim_(args.dim), piece_(&piece), following_(&following) {}

    // Whether the next rows are of a block that does not follow the one before it, or of the first one of a pass.
    bool is_jump() const { return block_ == 0 || piece_->blocks[block_] != piece_->blocks[block_ - 1] + 1; }

    const T* next() {
        const auto* base = static_cast<const T*>(at_values_ ? cache_.values : cache_.keys);
        const T* rows = base + piece_->blocks[block_] * cache_.block_stride + head_ * cache_.block_size * dim_;
        if (++head_ < cache_.num_kv_heads) return rows;
        head_ = 0;
        if (++block_ < piece_->num_blocks) return rows;
        block_ = 0;
        if (at_values_) piece_ = following_;
        at_values_ = !at_values_;
        return rows;
    }

   private:
    const Cache cache_;
    const int64_t dim_;
    const Piece *piece_, *following_;
    int64_t block_ = 0, head_ = 0;
    bool at_values_ = false;
};

// `body(heads, first)` on tiles of query heads, as many as there are registers for.
template <int DIM, class Body>
void in_tiles(int64_t num_heads, Body body) {
    constexpr int TILE = DIM && DIM <= 64 ? 4 : 2;
    for (int64_t first = 0; first < num_heads;) {
        const int64_t left = num_heads - first;
        const auto take = [&](auto heads) {
            body(heads, first);
            first += heads();
        };
        if (left >= TILE)
            take(std::integral_constant<int, TILE>{});
        else if (TILE > 2 && left == 3)
            take(std::integral_constant<int, TILE - 1>{});
        else if (TILE > 2 && left == 2)
            take(std::integral_constant<int, 2>{});
        else
            take(std::integral_constant<int, 1>{});
    }
}

// All query heads of one piece; `following` is the piece that this thread probably takes then.
template <class T, int DIM>
void attend(const Decode& args, const Piece& piece, const Piece& following, Partial<DIM> out) {
    constexpr int VECS = Shape<DIM>::VECS;
    using RowOps = Rows<T, DIM>;
    using Weight = typename RowOps::Weight;
    using Query = vf[VECS];
    static thread_local std::vector<vf> queries, lines;
    const int64_t num_heads = args.num_heads, group = num_heads / args.cache.num_kv_heads;
    const Shape<DIM> shape{static_cast<int>(args.dim)};
    // a short run of rows writes 16 scores, and the next run, or the softmax, writes over those past its end
    const int64_t stride = (piece.num_tokens + 2 * LANES - 1) / LANES * LANES;
    const auto query = reinterpret_cast<Query*>(at_least(queries, num_heads * VECS));
    const auto scores = reinterpret_cast<float*>(at_least(lines, num_heads * stride / LANES));
    const T* q = static_cast<const T*>(args.q) + piece.seq * args.q_stride_seq;
    for (int64_t n = 0; n < num_heads; ++n) RowOps::load_query(q + n * args.q_stride_head, shape, query[n]);

    Chunks<T> chunks(args, piece, following), ahead(args, piece, following);
    const int64_t block_size = args.cache.block_size, row_bytes = args.dim * static_cast<int64_t>(sizeof(T));
    const int64_t chunk_bytes = block_size * row_bytes, run_bytes = std::min<int64_t>(block_size, LANES) * row_bytes;
    for (int64_t bytes = 0; bytes < AHEAD_BYTES; bytes += chunk_bytes) ahead.next();
    // `visit(rows, token, count, heads, n)` for runs of rows, and heads from n on which meet them. Before each run all rows of
    // another one, ahead of it, are prefetched. Where lines go into the first-level cache, adjacent blocks are left to the
    // hardware prefetcher, which detects the sequence of the reads.
    const auto walk = [&](auto visit) {
        for (int64_t first = 0; first < piece.num_tokens; first += block_size)
            for (int64_t n = 0; n < num_heads; n += group) {
                const bool prefetches = PREFETCH_INTO_L2 || ahead.is_jump();
                const T *rows = chunks.next(), *later = ahead.next();
                const int64_t left = piece.num_tokens - first;
                const int64_t count = std::min(left, block_size);
                for (int64_t t = 0; t < count; t += LANES) {
                    const int run = static_cast<int>(std::min<int64_t>(count - t, LANES));
                    if (prefetches) prefetch_range(later + t * shape.dim, run_bytes);
                    in_tiles<DIM>(group, [&](auto heads, int64_t tile) {
                        visit(rows + t * shape.dim, first + t, run, heads, n + tile);
                    });
                }
            }
    };
    walk([&](const T* rows, int64_t token, int count, auto heads, int64_t n) {
        RowOps::template score<heads()>(query + n, shape, rows, count, args.scale, scores + n * stride + token, stride);
    });
    for (int64_t n = 0; n < num_heads; ++n) {
        const Softmax found = softmax<Weight>(scores + n * stride, piece.num_tokens, stride);
        put(out.tops(), n, found.top);
        put(out.totals(), n, found.total);
        for (int v = 0; v < shape.vecs(); ++v) out.sums()[n][v] = vf{};
    }
    constexpr int64_t WEIGHTS_PER_SCORE = sizeof(float) / sizeof(Weight);
    walk([&](const T* rows, int64_t token, int count, auto heads, int64_t n) {
        const auto* weights = reinterpret_cast<const Weight*>(scores + n * stride) + token;
        RowOps::template add<heads()>(out.sums() + n, shape, rows, count, weights, stride * WEIGHTS_PER_SCORE);
    });
}

// The pieces of a sequence together, each by e^(its top - the largest top) / total; zeros without any.
template <class T, int DIM>
void put_together(const Decode& args, int64_t s, Partial<DIM> pieces, int64_t num_pieces) {
    const Shape<DIM> shape{static_cast<int>(args.dim)};
    auto* out = static_cast<T*>(args.out) + s * args.num_heads * args.dim;
    for (int64_t first = 0, i = 0; first < args.num_heads; first += LANES, ++i) {
        vf top = splat(-INFINITY), total = splat(0.0f);
        for (int64_t p = 0; p < num_pieces; ++p) top = max(pieces.piece(p).tops()[i], top);
        for (int64_t p = 0; p < num_pieces; ++p) {
            const Partial<DIM> piece = pieces.piece(p);
            piece.tops()[i] = exp(piece.tops()[i] - top);
            total = fma(piece.totals()[i], piece.tops()[i], total);
        }
        for (int64_t n = first; n < args.num_heads && n < first + LANES; ++n) {
            vf acc[Shape<DIM>::VECS] = {};
            for (int64_t p = 0; p < num_pieces; ++p) {
                const float share = pieces.piece(p).tops()[i][n - first] / total[n - first];
                for (int v = 0; v < shape.vecs(); ++v) acc[v] = fma(pieces.piece(p).sums()[n][v], splat(share), acc[v]);
            }
            Rows<T, DIM>::finish(acc, shape, out + n * args.dim);
        }
    }
}

template <class T, int DIM>
void decode(const Decode& args) {
    static thread_local std::vector<Piece> pieces;
    static thread_local std::vector<vf> memory;
    cut(args, pieces);
    const int64_t num_pieces = static_cast<int64_t>(pieces.size());
    const int64_t size = num_pieces * Partial<DIM>{nullptr, args.num_heads}.size();
    const Partial<DIM> partials{at_least(memory, size), args.num_heads};
    const Piece* piece = pieces.data();
    std::atomic<int64_t> unclaimed{0};  // a slower thread takes fewer of them
    on_each_thread([&](int, int num_parts) {
        for (int64_t i; (i = unclaimed.fetch_add(1, std::memory_order_relaxed)) < num_pieces;)
            attend<T, DIM>(args, piece[i], piece[i + num_parts < num_pieces ? i + num_parts : i], partials.piece(i));
    });
    for (int64_t s = 0, first = 0, end = 0; s < args.num_seqs; ++s, first = end) {
        while (end < num_pieces && piece[end].seq == s) ++end;
        put_together<T, DIM>(args, s, partials.piece(first), end - first);
    }
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
