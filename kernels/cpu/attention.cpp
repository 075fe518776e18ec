// Paged decode attention, whose threads take pieces of contexts. Sizes and strides in elements.
//
// Decode attention reads the cache where it lies. Neighbouring rows of a call with the same blocks, such as several rows of one
// sequence, meet what they share together, on one thread, so that it is read once. A context is cut into pieces (`order.h`),
// however many threads there are. For each piece there are two passes over its blocks: scores of all query heads
// (each K row is loaded once for up to four heads of a group), weights, then the weighted sums of V rows; all KV heads of a block in
// turn, because they lie together. The pieces of a row are put together at the end, in order (flash
// decoding: https://pytorch.org/blog/flash-decoding). Everything between load and store is fp32; where the processor multiplies
// bf16 pairs, both sums are of such products, added in fp32: the weights are rounded to bf16 then, as in prefill, and subnormal
// numbers count as zero. Of a cache in 8 bits (`int8_rows.h`) all products are fp32; scores of a run are multiplied by the scales
// of its keys, and weights by those of its values.

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "order.h"
#include "prefetch.h"
#include "rows.h"
#include "scratch.h"
#include "thread_pool.h"

namespace disagg {
namespace {

constexpr int64_t AHEAD_BYTES = 8 << 10;
constexpr int64_t MOST_ROWS = 16, SCORE_NUMBERS = 1 << 16;
constexpr int64_t SCORES_STRIDE = PIECE_TOKENS + LANES;  // rows a power of two apart would share few sets of the cache

// A cache of one layer: [num_blocks, K, B, D] with the inner [K, B, D] contiguous; in 8 bits rows are longer than D by their scale.
// Values may be the first numbers of the keys' rows.
struct Cache {
    const void* keys;
    const void* values;
    int64_t block_stride;
    int64_t num_blocks, num_kv_heads, block_size;
};

struct Decode {
    int32_t is_bf16, is_int8;  // queries and results; the cache
    const void* q;
    int64_t q_stride_seq, q_stride_head;
    Cache cache;
    const int32_t* tables;
    int64_t table_stride, table_width;
    const int32_t* lengths;
    int64_t num_seqs, num_heads, dim, value_dim;
    Form form;
    const float* sinks;  // of each query head, or null
    void* out;
};

// A piece of the contexts of neighbouring rows that have the same blocks there.
struct Piece {
    int64_t neighbours;         // its index in `Plan::neighbours`
    int64_t row, num_rows;
    int64_t start;              // the tokens from `start` on
    int64_t longest;            // the row that sees furthest
    int64_t num_tokens, least;  // how far that row sees, and the one that sees least far
    int64_t first, last_first;  // the first token that a row sees, and that of the row that begins last
};

// Rows from `first` to `end` that may meet in pieces.
struct Neighbours {
    int64_t first, end, num_pieces;
};

// How far a row sees into the piece that begins at `start`.
inline int64_t tokens_from(const Decode& args, int64_t row, int64_t start) {
    return std::min<int64_t>(args.lengths[row] - start, PIECE_TOKENS);
}

// The first token of the context that a row sees.
inline int64_t first_seen(const Decode& args, int64_t row) { return args.form.first_seen(args.lengths[row] - 1); }

inline int64_t first_piece(const Decode& args, int64_t row) { return first_seen(args, row) / PIECE_TOKENS; }

inline bool sees(const Decode& args, int64_t row, int64_t start) {
    return args.lengths[row] > start && first_seen(args, row) < start + PIECE_TOKENS;
}

// Whether both rows see something of the piece that begins at `start`, and have the same blocks there, from `first` on as far as both
// see.
bool have_same_blocks(const Decode& args, int64_t a, int64_t b, int64_t start, int64_t first) {
    const int64_t end = start + std::min(tokens_from(args, a, start), tokens_from(args, b, start)), size = args.cache.block_size;
    const int32_t *these = args.tables + a * args.table_stride, *those = args.tables + b * args.table_stride;
    return sees(args, a, start) && sees(args, b, start) &&
           (first >= end || std::equal(these + first / size, these + (end + size - 1) / size, those + first / size));
}

// What a call computes, in the order of the contexts.
struct Plan {
    struct Place {
        int64_t piece, row;  // the row's index in the piece
    };

    std::vector<Piece> pieces;
    std::vector<Neighbours> neighbours;
    std::vector<int64_t> first_place;  // of each row
    std::vector<Place> places;         // of each row and piece

    // At most `most_rows` rows meet in a piece.
    void make(const Decode& args, int64_t most_rows) {
        pieces.clear();
        neighbours.clear();
        first_place.assign(1, 0);
        for (int64_t s = 0; s < args.num_seqs; ++s)
            first_place.push_back(first_place[s] + (args.lengths[s] + PIECE_TOKENS - 1) / PIECE_TOKENS - first_piece(args, s));
        places.resize(first_place.back());
        for (int64_t first = 0, end = 0; first < args.num_seqs; first = end) {
            int64_t longest = args.lengths[first], begin = first_piece(args, first) * PIECE_TOKENS;
            for (end = first + 1; end < args.num_seqs && end < first + most_rows && may_meet(args, end - 1, end); ++end) {
                longest = std::max<int64_t>(longest, args.lengths[end]);
                begin = std::min(begin, first_piece(args, end) * PIECE_TOKENS);
            }
            neighbours.push_back({first, end, 0});
            for (int64_t start = begin; start < longest; start += PIECE_TOKENS)
                for (int64_t row = first; row < end; ++row)
                    if (sees(args, row, start)) row = add(args, row, end, start);
        }
    }

   private:
    // Whether rows have the same blocks in the first piece of which both see something.
    static bool may_meet(const Decode& args, int64_t a, int64_t b) {
        const int64_t start = std::max(first_piece(args, a), first_piece(args, b)) * PIECE_TOKENS;
        return have_same_blocks(args, a, b, start, std::max({start, first_seen(args, a), first_seen(args, b)}));
    }

    // The piece of the rows from `row` on that begins at `start`; returns the last one of them.
    int64_t add(const Decode& args, int64_t row, int64_t end, int64_t start) {
        const auto first_of = [&](int64_t r) { return std::max(first_seen(args, r), start); };
        const int64_t seen = tokens_from(args, row, start);
        Piece piece{static_cast<int64_t>(neighbours.size()) - 1, row, 0, start, row, seen, seen, first_of(row), first_of(row)};
        for (; row < end; ++row, ++piece.num_rows) {
            // What any row sees is read by the table of the one that sees furthest.
            const int64_t first = std::min(piece.first, first_of(row));
            if (!have_same_blocks(args, piece.longest, row, start, first)) break;
            const int64_t tokens = tokens_from(args, row, start);
            piece.least = std::min(piece.least, tokens);
            piece.first = first;
            piece.last_first = std::max(piece.last_first, first_of(row));
            if (tokens > piece.num_tokens) piece.longest = row, piece.num_tokens = tokens;
            places[first_place[row] + start / PIECE_TOKENS - first_piece(args, row)] = {static_cast<int64_t>(pieces.size()),
                                                                                          piece.num_rows};
        }
        pieces.push_back(piece);
        ++neighbours.back().num_pieces;
        return row - 1;
    }
};

// What a piece leaves, in vectors: for each row the tops and the totals of its query heads, then the sums of values, for each
// KV head those of all rows. The cache is of S.
template <class S, int DIM>
struct Partial {
    static constexpr int VECS = Rows<S, DIM>::VECS;
    vf* at;
    int64_t num_heads, num_rows;

    int64_t head_vecs() const { return (num_heads + LANES - 1) / LANES; }
    int64_t size() const { return num_rows * (2 * head_vecs() + num_heads * VECS); }
    vf* tops(int64_t row) const { return at + row * head_vecs(); }
    vf* totals(int64_t row) const { return at + (num_rows + row) * head_vecs(); }
    vf (*sums() const)[VECS] { return reinterpret_cast<vf(*)[VECS]>(at + 2 * num_rows * head_vecs()); }
    // The sums of the first query head of a KV head.
    vf (*sums(int64_t kv_head, int64_t row, int64_t group) const)[VECS] { return sums() + (kv_head * num_rows + row) * group; }
};

// The rows of each KV head in each block of a piece, first the keys, then the values, and then the keys of the piece that
// comes next: what is read, in order.
template <class S>
class Chunks {
   public:
    Chunks(const Decode& args, const Piece& piece, const Piece& following) : args_(args), piece_(&piece), following_(&following) {
        begin();
    }

    // Whether the next rows are of a block that does not follow the one before it, or of the first one of a pass.
    bool is_jump() const { return block_ == first_ || blocks_[block_] != blocks_[block_ - 1] + 1; }

    const S* next() {
        const Cache& cache = args_.cache;
        const auto* base = static_cast<const S*>(at_values_ ? cache.values : cache.keys);
        const int64_t skipped = std::max<int64_t>(begin_ - block_ * cache.block_size, 0);
        const S* rows = base + blocks_[block_] * cache.block_stride + (head_ * cache.block_size + skipped) * (args_.dim + SCALE_BYTES<S>);
        if (++head_ < cache.num_kv_heads) return rows;
        head_ = 0;
        if (++block_ * cache.block_size < piece_->start + piece_->num_tokens) return rows;
        if (at_values_) piece_ = following_;
        at_values_ = !at_values_;
        begin();
        return rows;
    }

   private:
    void begin() {
        blocks_ = args_.tables + piece_->longest * args_.table_stride;
        begin_ = piece_->first / LANES * LANES;
        block_ = first_ = begin_ / args_.cache.block_size;
    }

    const Decode& args_;
    const Piece *piece_, *following_;
    const int32_t* blocks_ = nullptr;
    int64_t begin_ = 0, block_ = 0, first_ = 0, head_ = 0;
    bool at_values_ = false;
};

// `body(count, first)` on tiles of up to MOST of `num` heads, nearly equal shares.
template <int MOST, class Body>
[[gnu::always_inline]] inline void in_tiles(int64_t num, Body body) {
    const auto tile = [&](int64_t first, int64_t end) __attribute__((always_inline)) {
        with_constant<MOST>(end - first, [&](auto count) __attribute__((always_inline)) { body(count, first); });
    };
    if (num <= MOST) return tile(0, num);
    const int64_t tiles = (num + MOST - 1) / MOST;
    for (int64_t t = 0; t < tiles; ++t) tile(t * num / tiles, (t + 1) * num / tiles);
}

// `body` with a number of the type that queries and results have beside a cache of S: that one, but where it is in 8 bits.
template <class S, class Body>
void with_rows(const Decode& args, Body body) {
    if constexpr (!std::is_same_v<S, int8_t>)
        body(S{});
    else if (args.is_bf16)
        body(bf16{});
    else
        body(float{});
}

// Attention of the rows of one piece, with a cache of S; `following` is the piece that this thread probably takes then.
template <class S, int DIM>
class Attend {
    using RowOps = Rows<S, DIM>;
    using Weight = typename RowOps::Weight;
    using Number = std::conditional_t<std::is_same_v<S, int8_t>, float, S>;  // of queries where they are multiplied
    static constexpr bool IS_SCALED = std::is_same_v<S, int8_t>;
    static constexpr int UNITS = DIM * sizeof(Number) % UNIT_BYTES ? 0 : DIM * sizeof(Number) / UNIT_BYTES;
    static constexpr int SCORE_TILE = SUM_REGISTERS >= 24 ? 4 : IS_SCALED ? 3 : 2, VALUE_TILE = DIM && DIM <= 64 ? 4 : 2, WEIGH_TILE = 4;

   public:
    Attend(const Decode& args, const Piece& piece, const Piece& following, Partial<S, DIM> out)
        : args_(args),
          piece_(piece),
          out_(out),
          shape_{static_cast<int>(args.value_dim), static_cast<int>(args.dim) + SCALE_BYTES<S>},
          group_(args.num_heads / args.cache.num_kv_heads),
          chunks_(args, piece, following),
          ahead_(args, piece, following) {
        const int64_t chunk_bytes = args.cache.block_size * cached_bytes();
        for (int64_t bytes = 0; bytes < AHEAD_BYTES; bytes += chunk_bytes) ahead_.next();
    }

    void run() {
        load_queries();
        walk(args_.cache.keys, args_.dim, UNIT_BYTES,
             [&](int64_t kv_head, const S* rows, int64_t row_bytes, int64_t token, [[maybe_unused]] int count) {
            in_tiles<SCORE_TILE>(piece_.num_rows * group_, [&](auto heads, int64_t n) __attribute__((always_inline)) {
                const int64_t at = place(kv_head, 0, n);
                score<S, heads(), UNITS>(queries_ + at * query_registers_, query_registers_, num_units_, rows, row_bytes,
                                         scores_ + at * SCORES_STRIDE + token, SCORES_STRIDE);
            });
            if constexpr (IS_SCALED) multiply(kv_head, token, scales_of(rows + args_.dim, row_bytes, count));
        });
        for (int64_t r = 0; r < piece_.num_rows; ++r) weigh_row(r);
        std::fill_n(out_.sums()[0], piece_.num_rows * args_.num_heads * RowOps::VECS, splat(0.0f));
        walk(args_.cache.values, args_.value_dim, sizeof(S),
             [&](int64_t kv_head, const S* rows, [[maybe_unused]] int64_t row_bytes, int64_t token, int count) {
            if constexpr (IS_SCALED) multiply(kv_head, token, scales_of(rows + args_.dim, row_bytes, count));
            if (piece_.start + token >= piece_.last_first && (piece_.num_rows == 1 || token + LANES <= piece_.least))
                return add(kv_head, 0, piece_.num_rows, rows, token, count);
            for (int64_t r = 0; r < piece_.num_rows; ++r) add_some(kv_head, r, rows, token, count);
        });
    }

   private:
    // Bytes of a row of the cache.
    int64_t cached_bytes() const { return args_.dim * static_cast<int64_t>(sizeof(S)) + SCALE_BYTES<S>; }

    // The scores or weights of the sixteen tokens from `token` on, of all heads and rows of a KV head, times their scales.
    void multiply(int64_t kv_head, int64_t token, const vf& scales) {
        for (int64_t n = 0; n < piece_.num_rows * group_; ++n) {
            float* at = scores_ + place(kv_head, 0, n) * SCORES_STRIDE + token;
            store(at, load(at) * scales);
        }
    }

    void load_queries() {
        static thread_local std::vector<vf> queries;
        static thread_local std::vector<vf> scores;
        const int64_t num_queries = args_.num_heads * piece_.num_rows, row_bytes = args_.dim * static_cast<int64_t>(sizeof(Number));
        num_units_ = static_cast<int>(round_up(row_bytes, UNIT_BYTES) / UNIT_BYTES);
        query_registers_ = num_units_ * QUERY_REGISTERS<Number>;
        queries_ = reinterpret_cast<vr*>(at_least(queries, (num_queries * query_registers_ + REGISTERS - 1) / REGISTERS));
        scores_ = reinterpret_cast<float*>(at_least(scores, num_queries * SCORES_STRIDE / LANES));
        Number padded[MAX_HEAD_DIM + LANES] = {};
        with_rows<S>(args_, [&](auto number) {
            using T = decltype(number);
            for (int64_t r = 0; r < piece_.num_rows; ++r)
                for (int64_t n = 0; n < args_.num_heads; ++n) {
                    const T* q = static_cast<const T*>(args_.q) + (piece_.row + r) * args_.q_stride_seq + n * args_.q_stride_head;
                    const Number* row = padded;
                    if constexpr (!std::is_same_v<T, Number>)
                        widen(q, args_.dim, padded);
                    else if (row_bytes % UNIT_BYTES)
                        std::copy_n(q, args_.dim, padded);
                    else
                        row = q;
                    load_query(row, num_units_, queries_ + place(n / group_, r, n % group_) * query_registers_);
                }
        });
    }

    // Where a query head is among those of the piece: for each KV head those of all rows.
    int64_t place(int64_t kv_head, int64_t row, int64_t head) const { return (kv_head * piece_.num_rows + row) * group_ + head; }

    void weigh_row(int64_t r) {
        const int64_t seen = args_.lengths[piece_.row + r] - piece_.start;
        const int64_t run = piece_.num_rows == 1 ? args_.num_heads : group_;  // heads side by side
        for (int64_t first = 0; first < args_.num_heads; first += run)
            in_tiles<WEIGH_TILE>(run, [&](auto heads, int64_t n) {
                const int64_t head = first + n, at = place(head / group_, r, head % group_);
                weigh<Weight, heads()>(scores_ + at * SCORES_STRIDE, SCORES_STRIDE, seen, 0, args_.form,
                                       reinterpret_cast<float*>(out_.tops(r)) + head, reinterpret_cast<float*>(out_.totals(r)) + head);
            });
    }

    // Of `count` tokens those that a row sees to its sums. A first one that is the second of a pair comes alone.
    void add_some(int64_t kv_head, int64_t r, const S* rows, int64_t token, int count) {
        const int64_t row = piece_.row + r, seen = tokens_from(args_, row, piece_.start) - token;
        const int64_t end = std::min<int64_t>(seen, count);
        int64_t first = std::max<int64_t>(first_seen(args_, row) - piece_.start - token, 0);
        if (first % 2 && first < end) {
            add(kv_head, r, 1, rows + first * (args_.dim + SCALE_BYTES<S>), token + first, 1);
            ++first;
        }
        if (first < end) add(kv_head, r, 1, rows + first * (args_.dim + SCALE_BYTES<S>), token + first, static_cast<int>(end - first));
    }

    // `count` tokens to the sums of the query heads of a KV head in `num_rows` rows.
    void add(int64_t kv_head, int64_t row, int64_t num_rows, const S* rows, int64_t token, int count) {
        constexpr int64_t WEIGHTS_STRIDE = SCORES_STRIDE * sizeof(float) / sizeof(Weight);
        in_tiles<VALUE_TILE>(num_rows * group_, [&](auto heads, int64_t n) __attribute__((always_inline)) {
            const int64_t at = place(kv_head, row, n);
            const auto* weights = reinterpret_cast<const Weight*>(scores_) + at * WEIGHTS_STRIDE + token;
            RowOps::template add<heads()>(out_.sums() + at, shape_, rows, count, weights, WEIGHTS_STRIDE);
        });
    }

    // `visit(kv_head, rows, row_bytes, token, count)` for runs of up to sixteen rows of a plane of the cache, `row_bytes` apart: a
    // multiple of `unit`. Rows have `dim` numbers. Before each run all rows of another one, ahead of it, are prefetched. Where lines go into the first-level
    // cache, adjacent blocks are left to the hardware prefetcher, which detects the sequence of the reads.
    template <class Visit>
    void walk(const void* plane, int64_t dim, int64_t unit, Visit visit) {
        const int64_t block_size = args_.cache.block_size, row_bytes = cached_bytes();
        if (block_size % LANES || args_.dim * NUMBER_BYTES<S> % UNIT_BYTES)
            return walk_copies(plane, dim, round_up(row_bytes, unit), visit);
        const int64_t begin = piece_.first / LANES * LANES, end = piece_.start + piece_.num_tokens;
        const int64_t row_numbers = args_.dim + SCALE_BYTES<S>;
        int64_t block_end = begin / block_size * block_size + block_size;
        for (int64_t first = begin; first < end; first = block_end, block_end += block_size) {
            const int64_t count = std::min(block_end, end) - first;
            for (int64_t kv_head = 0; kv_head < args_.cache.num_kv_heads; ++kv_head) {
                const bool prefetches = PREFETCH_INTO_L2 || ahead_.is_jump();
                const S *rows = chunks_.next(), *later = ahead_.next();
                for (int64_t t = 0; t < count; t += LANES) {
                    const int run = static_cast<int>(std::min<int64_t>(count - t, LANES));
                    if (prefetches) prefetch_range(later + t * row_numbers, LANES * row_bytes);
                    visit(kv_head, rows + t * row_numbers, row_bytes, first - piece_.start + t, run);
                }
            }
        }
    }

    // The same where runs are of several blocks, or rows of a number of bytes that does not fit: each is copied first.
    template <class Visit>
    void walk_copies(const void* plane, int64_t dim, int64_t row_bytes, Visit visit) {
        const Cache& cache = args_.cache;
        const int32_t* blocks = args_.tables + piece_.longest * args_.table_stride;
        alignas(4 * LANES) char copies[LANES * (MAX_HEAD_DIM * sizeof(S) + UNIT_BYTES)];
        const int64_t skipped = piece_.first - piece_.start;
        for (int64_t token = skipped / LANES * LANES; token < piece_.num_tokens; token += LANES) {
            const int64_t count = std::min<int64_t>(piece_.num_tokens - token, LANES);
            for (int64_t kv_head = 0; kv_head < cache.num_kv_heads; ++kv_head) {
                std::fill(copies, copies + LANES * row_bytes, 0);
                for (int64_t t = std::max<int64_t>(skipped - token, 0); t < count; ++t) {
                    const int64_t at = piece_.start + token + t, row = kv_head * cache.block_size + at % cache.block_size;
                    const S* block = static_cast<const S*>(plane) + blocks[at / cache.block_size] * cache.block_stride;
                    std::copy_n(block + row * (args_.dim + SCALE_BYTES<S>), dim + SCALE_BYTES<S>,
                                reinterpret_cast<S*>(copies + t * row_bytes));
                }
                visit(kv_head, reinterpret_cast<const S*>(copies), row_bytes, token, static_cast<int>(count));
            }
        }
    }

    const Decode& args_;
    const Piece& piece_;
    const Partial<S, DIM> out_;
    const Shape<DIM> shape_;
    const int64_t group_;
    Chunks<S> chunks_, ahead_;
    int num_units_ = 0;
    int64_t query_registers_ = 0;
    vr* queries_ = nullptr;
    float* scores_ = nullptr;
};

// The pieces of row s together, in order; zeros without any. `partial_of(piece)` is what a piece left.
template <class S, int DIM, class PartialOf>
void put_together(const Decode& args, int64_t s, const Plan& plan, PartialOf partial_of) {
    using RowOps = Rows<S, DIM>;
    const Shape<DIM> shape{static_cast<int>(args.value_dim), static_cast<int>(args.dim)};
    const int64_t group = args.num_heads / args.cache.num_kv_heads;
    const Plan::Place *begin = plan.places.data() + plan.first_place[s], *end = plan.places.data() + plan.first_place[s + 1];
    const int64_t first_out = s * args.num_heads * args.value_dim;
    if (begin == end)
        return with_rows<S>(args, [&](auto zero) {
            std::fill_n(static_cast<decltype(zero)*>(args.out) + first_out, args.num_heads * args.value_dim, zero);
        });
    for (int64_t first = 0, i = 0; first < args.num_heads; first += LANES, ++i) {
        Joined joined{partial_of(begin->piece).tops(begin->row)[i], partial_of(begin->piece).totals(begin->row)[i]};
        for (const Plan::Place* at = begin + 1; at < end; ++at) {
            vf &top = partial_of(at->piece).tops(at->row)[i], &total = partial_of(at->piece).totals(at->row)[i];
            const Shares shares = join(joined, top, total);
            top = shares.before, total = shares.piece;
        }
        const int num_lanes = static_cast<int>(std::min<int64_t>(args.num_heads - first, LANES));
        const vf inverse = args.sinks ? inverse_of(joined, load(args.sinks + first, num_lanes)) : inverse_of(joined);
        for (int64_t n = first; n < std::min<int64_t>(first + LANES, args.num_heads); ++n) {
            const auto sums_of = [&](const Plan::Place& place) -> const vf* {
                return partial_of(place.piece).sums(n / group, place.row, group)[n % group];
            };
            vf sums[RowOps::VECS];
            std::copy_n(sums_of(*begin), RowOps::VECS, sums);
            for (const Plan::Place* at = begin + 1; at < end; ++at) {
                const auto partial = partial_of(at->piece);
                const vf* next = sums_of(*at);
                const float before = partial.tops(at->row)[i][n - first], piece = partial.totals(at->row)[i][n - first];
                for (int v = 0; v < RowOps::VECS; ++v) sums[v] = join(sums[v], next[v], before, piece);
            }
            with_rows<S>(args, [&](auto number) {
                auto* out = static_cast<decltype(number)*>(args.out) + first_out + n * args.value_dim;
                for (int v = 0; v < shape.vecs(); ++v)
                    store(out + v * LANES, finished(RowOps::in_order(sums, v), inverse[n - first]), shape.lanes(v));
            });
        }
    }
}

template <class S, int DIM>
void decode(const Decode& args) {
    static thread_local Plan plan;
    static thread_local std::vector<vf> memory;
    static thread_local std::vector<int64_t> first_vec;
    // As many rows as have their scores in the second-level cache, but at least a piece for each thread where there are enough.
    int64_t most_rows = std::clamp<int64_t>(SCORE_NUMBERS / (args.num_heads * SCORES_STRIDE), 1, MOST_ROWS);
    plan.make(args, most_rows);
    for (; most_rows > 1 && static_cast<int64_t>(plan.pieces.size()) < num_threads(); plan.make(args, most_rows)) most_rows /= 2;
    const int64_t num_pieces = static_cast<int64_t>(plan.pieces.size());
    first_vec.assign(1, 0);
    for (const Piece& piece : plan.pieces)
        first_vec.push_back(first_vec.back() + Partial<S, DIM>{nullptr, args.num_heads, piece.num_rows}.size());
    vf* const partials = at_least(memory, first_vec.back());
    const Piece* const pieces = plan.pieces.data();
    const int64_t* const first = first_vec.data();
    const auto partial_of = [=, &args](int64_t i) { return Partial<S, DIM>{partials + first[i], args.num_heads, pieces[i].num_rows}; };
    static thread_local std::vector<std::atomic<int64_t>> counts;
    const size_t num_neighbours = plan.neighbours.size();
    if (counts.size() < num_neighbours) counts = std::vector<std::atomic<int64_t>>(num_neighbours);
    std::atomic<int64_t>* const missing = counts.data();  // pieces of neighbours
    for (size_t i = 0; i < num_neighbours; ++i) missing[i].store(plan.neighbours[i].num_pieces, std::memory_order_relaxed);
    const Plan& made = plan;
    std::atomic<int64_t> unclaimed{0};  // a slower thread takes fewer of them
    on_each_thread([&](int, int num_parts) {
        for (int64_t i; (i = unclaimed.fetch_add(1, std::memory_order_relaxed)) < num_pieces;) {
            Attend<S, DIM>(args, pieces[i], pieces[i + num_parts < num_pieces ? i + num_parts : i], partial_of(i)).run();
            const int64_t neighbours = pieces[i].neighbours;
            if (missing[neighbours].fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
            for (int64_t s = made.neighbours[neighbours].first; s < made.neighbours[neighbours].end; ++s)
                put_together<S, DIM>(args, s, made, partial_of);
        }
    });
    for (int64_t s = 0; s < args.num_seqs; ++s)
        if (args.lengths[s] == 0) put_together<S, DIM>(args, s, plan, partial_of);
}

template <class S>
void decode(const Decode& args) {
    if (args.value_dim != args.dim) return decode<S, 0>(args);
    switch (args.dim) {
        case 64: return decode<S, 64>(args);
        case 96: return decode<S, 96>(args);
        case 128: return decode<S, 128>(args);
        case 256: return decode<S, 256>(args);
    }
    if constexpr (!std::is_same_v<S, int8_t>)
        switch (args.dim) {
            case 16: return decode<S, 16>(args);
            case 32: return decode<S, 32>(args);
            case 80: return decode<S, 80>(args);
        }
    decode<S, 0>(args);
}

// Index of the first sequence whose length or blocks lie outside, or -1.
int64_t first_invalid(const Decode& args) {
    for (int64_t s = 0; s < args.num_seqs; ++s) {
        const int64_t length = args.lengths[s];
        if (length < 0 || length > args.table_width * args.cache.block_size) return s;
        for (int64_t b = first_seen(args, s) / args.cache.block_size; b * args.cache.block_size < length; ++b) {
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
    if (args.is_int8)
        decode<int8_t>(args);
    else
        args.is_bf16 ? decode<bf16>(args) : decode<float>(args);
    return DONE;
}
