// Causal attention of a chunk of one sequence over its paged context.
//
// K and V of the context are packed once from their blocks into the order in which the products read them, of a few KV heads at
// a time; threads share the tokens. Then, for each query head and tile of query tokens, and for each piece of the context
// (`order.h`): scores = Q K^T as far as each block of rows can see, weights of each row up to its own position, sums = P V, which
// are put together with those of the pieces before; threads take tiles. Tiles are small enough for their scores of a piece to stay
// in the second-level cache.
//
// Products work on words (`words.h`). Sums and weights are fp32; P is rounded to bf16 where words are pairs, as in torch's own CPU
// kernel. Of a cache in 8 bits (`int8_rows.h`) words are fp32: scores are multiplied by the scales of their keys, weights by those of
// their values.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "int8_rows.h"
#include "order.h"
#include "scratch.h"
#include "thread_pool.h"
#include "vec.h"
#include "words.h"

namespace disagg {
namespace {

constexpr int KEY_VECS = 4;
constexpr int KEY_TILE = KEY_VECS * LANES;
constexpr int ROW_TILE = SUM_REGISTERS / REGISTERS >= 6 ? 6 : SUM_REGISTERS / REGISTERS;  // rows of which one vector's sums fit
constexpr int SCORE_ROWS = REGISTERS == 2 ? 4 : ROW_TILE;  // rows of which one vector's scores fit, while other chains are kept
constexpr int64_t MAX_TILE = LANES * ROW_TILE;
constexpr int64_t SCORE_STRIDE = PIECE_TOKENS + LANES;  // rows a power of two apart would share few sets of the cache
constexpr int64_t PACKED_WORDS = 1 << 20;

// c[r][v] = sum over k < size of a[r][k] * b[k][v], for ROWS rows and VECS vectors of columns. Loops are unrolled by name:
// the compiler then keeps the sums in registers alone, without a second copy on the stack.
template <class Mul, int ROWS, int VECS>
void product(const Word* a, int64_t a_stride, const Word* b, int64_t b_stride, int64_t size, float* c, int64_t c_stride) {
    vf acc[ROWS][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) acc[r][v] = splat(0.0f);
    for (int64_t k = 0; k < size; ++k) {
        typename Mul::Words row[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) row[v] = Mul::words(b + k * b_stride + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const typename Mul::Words word = Mul::splat_word(a + r * a_stride + k);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) acc[r][v] = Mul::madd(acc[r][v], word, row[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) store(c + r * c_stride + v * LANES, acc[r][v]);
}

// Scores of ROWS rows and sixteen keys.
template <int ROWS>
struct Scores {
    vf of[ROWS];
};

// The sum of 2^LEVEL chains, the first of which begins at `a` and `b` and goes on CHAINS times PARTS words further: PARTS words are 32
// bits of T.
template <class Mul, int PARTS, int ROWS, int LEVEL>
[[gnu::always_inline]] inline Scores<ROWS> chains(const Word* a, int64_t words, const Word* b) {
    Scores<ROWS> sums;
    if constexpr (LEVEL == 0) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) sums.of[r] = splat(0.0f);
        for (int64_t k = 0; k < words; k += CHAINS * PARTS)
#pragma GCC unroll 2
            for (int64_t w = k; w < k + PARTS; ++w) {
                const typename Mul::Words keys = Mul::words(b + w * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) sums.of[r] = Mul::madd(sums.of[r], Mul::splat_word(a + r * words + w), keys);
            }
    } else {
        constexpr int HALF = PARTS << (LEVEL - 1);
        sums = chains<Mul, PARTS, ROWS, LEVEL - 1>(a, words, b);
        const Scores<ROWS> others = chains<Mul, PARTS, ROWS, LEVEL - 1>(a + HALF, words, b + HALF * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) sums.of[r] += others.of[r];
    }
    return sums;
}

// c[r] = the scores of ROWS rows of `words` words and sixteen keys of S, [word][key], times the scales of these, if they have some.
template <class S, class Mul, int ROWS>
void score_tile(const Word* a, int64_t words, const Word* b, [[maybe_unused]] const float* scales, float* c, int64_t c_stride) {
    constexpr int PARTS = sizeof(Word) / NUMBER_BYTES<S> / Mul::PER_WORD, LEVELS = 3;
    static_assert(1 << LEVELS == CHAINS);
    Scores<ROWS> scores = chains<Mul, PARTS, ROWS, LEVELS>(a, words, b);
    if constexpr (SCALE_BYTES<S> > 0) {
        const vf scale = load(scales);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) scores.of[r] = scores.of[r] * scale;
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) store(c + r * c_stride, scores.of[r]);
}

// `product` of up to ROW_TILE rows and KEY_VECS vectors, as many vectors at a time as there are registers for their sums.
template <class Mul>
void product_of(int64_t rows, int64_t vecs, const Word* a, int64_t a_stride, const Word* b, int64_t b_stride, int64_t size,
                float* c, int64_t c_stride) {
    constexpr int AT_ONCE = std::min(SUM_REGISTERS / (ROW_TILE * REGISTERS), KEY_VECS);
    for (; vecs > 0; vecs -= AT_ONCE, b += AT_ONCE * LANES, c += AT_ONCE * LANES)
        with_constant<ROW_TILE>(rows, [=](auto num_rows) {
            with_constant<AT_ONCE>(vecs, [=](auto num_vecs) {
                product<Mul, num_rows(), num_vecs()>(a, a_stride, b, b_stride, size, c, c_stride);
            });
        });
}

struct Prefill {
    int32_t is_bf16, is_int8;  // queries and results; the cache
    int32_t dim, value_dim;    // rows of values are as far apart as those of keys
    const void* q;
    int64_t q_stride_token, q_stride_head;
    const void* keys;
    const void* values;
    int64_t block_stride, num_blocks, num_kv_heads, block_size;
    const int32_t* table;
    int64_t start, num_tokens, num_heads;
    Form form;
    const float* sinks;  // of each query head, or null
    void* out;
};

// What a thread keeps from tile to tile.
struct Scratch {
    std::vector<Word> queries;
    std::vector<float> scores, sums, piece_sums;
};

// Queries are of T, the cache of S.
template <class T, class S, class Mul>
class Attention {
    static constexpr bool IS_SCALED = SCALE_BYTES<S> > 0;

   public:
    explicit Attention(const Prefill& args)
        : args_(args),
          begin_(args.form.first_seen(args.start)),
          end_(args.start + args.num_tokens),
          origin_(begin_ / KEY_TILE * KEY_TILE),
          padded_dim_(static_cast<int>(round_up(args.dim, LANES))),
          padded_value_dim_(static_cast<int>(round_up(args.value_dim, LANES))),
          row_words_(padded_dim_ / Mul::PER_WORD),
          padded_tokens_(round_up(end_ - origin_, KEY_TILE)),
          head_words_(padded_tokens_ * row_words_),
          group_(args.num_heads / args.num_kv_heads) {
        num_tiles_ = (args.num_tokens + MAX_TILE - 1) / MAX_TILE;
        tile_ = round_up((args.num_tokens + num_tiles_ - 1) / num_tiles_, ROW_TILE);
        num_tiles_ = (args.num_tokens + tile_ - 1) / tile_;
    }

    void run() {
        static thread_local std::vector<Word> packed;
        static thread_local std::vector<float> scales;
        const int64_t at_once = std::clamp<int64_t>(PACKED_WORDS / (2 * head_words_), 1, args_.num_kv_heads);
        keys_ = at_least(packed, 2 * at_once * head_words_);
        values_ = keys_ + at_once * head_words_;
        if constexpr (IS_SCALED) {
            key_scales_ = at_least(scales, 2 * at_once * padded_tokens_);
            value_scales_ = key_scales_ + at_once * padded_tokens_;
        }
        for (int64_t first = 0; first < args_.num_kv_heads; first += at_once)
            run(first, std::min(at_once, args_.num_kv_heads - first));
    }

   private:
    // Each thread begins with heads of its own, with the last tile of each, which sees most; the last that are left are small.
    void run(int64_t first_kv_head, int64_t num_kv_heads) {
        parallel_for(num_kv_heads * padded_tokens_ / KEY_TILE, [&](int64_t piece) {
            const int64_t kv_head = piece * KEY_TILE / padded_tokens_;
            const int64_t first = origin_ + piece * KEY_TILE % padded_tokens_;
            pack(first_kv_head + kv_head, kv_head * head_words_, first);
            if constexpr (IS_SCALED) take_scales(first_kv_head + kv_head, kv_head * padded_tokens_ + first - origin_, first);
        });
        parallel_for_dynamic(num_kv_heads * group_ * num_tiles_, 1, [&](int64_t item, int64_t end) {
            for (; item < end; ++item) {
                const int64_t head = item / num_tiles_, first = (num_tiles_ - 1 - item % num_tiles_) * tile_;
                attend(first_kv_head * group_ + head, head / group_, first, std::min(tile_, args_.num_tokens - first));
            }
        });
    }

    const S* cached_row(const void* cache, int64_t kv_head, int64_t position) const {
        const int64_t block = args_.table[position / args_.block_size];
        return static_cast<const S*>(cache) + block * args_.block_stride +
               (kv_head * args_.block_size + position % args_.block_size) * (args_.dim + SCALE_BYTES<S>);
    }

    // The scales of KEY_TILE tokens from `first` on, zeros for those that nobody sees, to the places from `at` on.
    void take_scales(int64_t kv_head, int64_t at, int64_t first) const {
        const auto take = [&](const void* cache, float* scales) {
            for (int64_t t = 0; t < KEY_TILE; ++t) {
                uint16_t half = 0;
                if (is_seen(first + t)) std::memcpy(&half, cached_row(cache, kv_head, first + t) + args_.dim, sizeof half);
                scales[t] = half == NAN_HALF ? NAN : float_of_half(half);
            }
        };
        take(args_.keys, key_scales_ + at);
        take(args_.values, value_scales_ + at);
    }

    // KEY_TILE tokens from `first` on, zeros for those that nobody sees.
    // keys_: [sixteen keys][word][key];  values_: [token / PER_WORD][dim], the tokens of a word side by side. Both begin with token
    // `origin_`.
    void pack(int64_t kv_head, int64_t at, int64_t first) const {
        Word row[MAX_HEAD_DIM];
        for (int64_t t = 0; t < KEY_TILE; ++t) {
            if (is_seen(first + t))
                Mul::pack(cached_row(args_.keys, kv_head, first + t), args_.dim, padded_dim_, row);
            else
                std::fill_n(row, row_words_, 0);
            Word* column = keys_ + at + (first - origin_ + t / LANES * LANES) * row_words_ + t % LANES;
            for (int w = 0; w < row_words_; ++w) column[w * LANES] = row[w];
        }
        const int64_t from = std::max(first, begin_ / Mul::PER_WORD * Mul::PER_WORD);
        for (int64_t t = from; t < std::min(first + KEY_TILE, end_); t += Mul::PER_WORD)
            pack_value(kv_head, t, values_ + at + (t - origin_) / Mul::PER_WORD * padded_value_dim_);
    }

    bool is_seen(int64_t token) const { return token >= begin_ && token < end_; }

    void pack_value(int64_t kv_head, int64_t t, Word* words) const {
        if constexpr (Mul::PER_WORD == 1) {
            Mul::pack(cached_row(args_.values, kv_head, t), args_.value_dim, padded_value_dim_, words);
        } else {
            static constexpr S ZEROS[MAX_HEAD_DIM] = {};
            const S* first = is_seen(t) ? cached_row(args_.values, kv_head, t) : ZEROS;
            const S* second = is_seen(t + 1) ? cached_row(args_.values, kv_head, t + 1) : ZEROS;
            for (int d = 0; d < args_.value_dim; ++d) words[d] = first[d].bits | static_cast<Word>(second[d].bits) << 16;
            std::fill(words + args_.value_dim, words + padded_value_dim_, 0);
        }
    }

    // `kv_head` counts those that are packed.
    void attend(int64_t head, int64_t kv_head, int64_t first, int64_t rows) const {
        static thread_local Scratch scratch;
        const Word *keys = keys_ + kv_head * head_words_, *values = values_ + kv_head * head_words_;
        const float *key_scales = key_scales_ + kv_head * padded_tokens_, *value_scales = value_scales_ + kv_head * padded_tokens_;
        Word* queries = at_least(scratch.queries, tile_ * row_words_);
        float* scores = at_least(scratch.scores, tile_ * SCORE_STRIDE);
        float* sums = at_least(scratch.sums, tile_ * padded_value_dim_);
        float* piece_sums = at_least(scratch.piece_sums, tile_ * padded_value_dim_);
        for (int64_t r = 0; r < rows; ++r)
            Mul::pack(static_cast<const T*>(args_.q) + (first + r) * args_.q_stride_token + head * args_.q_stride_head,
                      args_.dim, padded_dim_, queries + r * row_words_);
        const int64_t before = args_.start + first;
        const int64_t first_piece = args_.form.first_seen(before) / PIECE_TOKENS * PIECE_TOKENS;
        Joined joined[MAX_TILE / LANES];
        for (int64_t piece = first_piece; piece < before + rows; piece += PIECE_TOKENS) {
            const int64_t end = rows_that_see(before, rows, piece + PIECE_TOKENS);
            score(before, rows, piece, queries, keys, key_scales, scores);
            vf tops[MAX_TILE / LANES], totals[MAX_TILE / LANES];
            for (vf& each : tops) each = splat(-INFINITY);  // of rows that do not see this piece
            for (vf& each : totals) each = splat(0.0f);
            in_blocks(piece, before, end, [&](int64_t r, int64_t count) {
                with_constant<ROW_TILE>(count, [&](auto num_rows) {
                    weigh<typename Mul::Weight, num_rows()>(scores + r * SCORE_STRIDE, SCORE_STRIDE, before + r + 1 - piece, 1,
                                                            args_.form, reinterpret_cast<float*>(tops) + r,
                                                            reinterpret_cast<float*>(totals) + r);
                });
                if constexpr (IS_SCALED) multiply(before + r, count, piece, value_scales, scores + r * SCORE_STRIDE);
            });
            add_values(before, end, piece, reinterpret_cast<const Word*>(scores), values, piece > first_piece ? piece_sums : sums);
            // Rows from `begun` on saw nothing before this piece.
            const int64_t begun = piece > first_piece ? rows_that_see(before, rows, piece) : 0;
            for (int64_t r = 0; r < rows; r += LANES) {
                Joined& those = joined[r / LANES];
                const vf top = tops[r / LANES], total = totals[r / LANES];
                if (piece == first_piece || begun <= r) {
                    those = {top, total};
                    if (piece > first_piece) copy_rows(r, std::min(r + LANES, rows), piece_sums, sums);
                    continue;
                }
                const int64_t group_end = std::min(r + LANES, rows), joined_end = std::min(group_end, begun);
                join_rows(join(those, top, total), r, std::max(r, piece - before), joined_end, piece_sums, sums);
                if (joined_end < group_end) {
                    const vi is_joined = splat(static_cast<float>(begun - r)) > load(LANE_NUMBERS);
                    those = {select(is_joined, those.top, top), select(is_joined, those.total, total)};
                    copy_rows(joined_end, group_end, piece_sums, sums);
                }
            }
        }
        for (int64_t r = 0; r < rows; r += LANES) {
            const vf inverse = args_.sinks ? inverse_of(joined[r / LANES], splat(args_.sinks[head])) : inverse_of(joined[r / LANES]);
            for (int64_t i = r; i < std::min(r + LANES, rows); ++i) {
                T* out = static_cast<T*>(args_.out) + ((first + i) * args_.num_heads + head) * args_.value_dim;
                for (int d = 0; d < args_.value_dim; d += LANES)
                    store(out + d, finished(load(sums + i * padded_value_dim_ + d), inverse[i - r]),
                          std::min(args_.value_dim - d, LANES));
            }
        }
    }

    // The weights in a piece of `count` rows, of which the first has `before` keys before its own, times the scales of the values.
    void multiply(int64_t before, int64_t count, int64_t piece, const float* scales, float* weights) const {
        const int64_t begin = std::max<int64_t>(args_.form.first_seen(before) - piece, 0) / LANES * LANES;
        const int64_t end = std::min(before + count - piece, PIECE_TOKENS);
        for (int64_t i = begin; i < end; i += LANES) {
            const vf scale = load(scales + piece - origin_ + i);
            for (int64_t r = 0; r < count; ++r) {
                float* at = weights + r * SCORE_STRIDE + i;
                store(at, load(at) * scale);
            }
        }
    }

    // The sums of rows from `first` to `end`; `shares` are those of the rows from `lanes` on.
    void join_rows(const Shares& shares, int64_t lanes, int64_t first, int64_t end, const float* piece_sums, float* sums) const {
        for (int64_t r = first; r < end; ++r) {
            const float before = shares.before[r - lanes], piece = shares.piece[r - lanes];
            for (int64_t d = r * padded_value_dim_; d < (r + 1) * padded_value_dim_; d += LANES)
                store(sums + d, join(load(sums + d), load(piece_sums + d), before, piece));
        }
    }

    void copy_rows(int64_t first, int64_t end, const float* piece_sums, float* sums) const {
        std::copy(piece_sums + first * padded_value_dim_, piece_sums + end * padded_value_dim_, sums + first * padded_value_dim_);
    }

    // The number of rows, from the first on, that see a token before `position`. Row 0 has `before` keys before its own.
    int64_t rows_that_see(int64_t before, int64_t rows, int64_t position) const {
        return std::min(rows, position + args_.form.window - 1 - before);
    }

    // `body(r, count)` on blocks of SIZE rows [r, r + count), from the first with a row that sees `position`. Row 0 has `before` keys
    // before its own.
    template <int SIZE = ROW_TILE, class Body>
    static void in_blocks(int64_t position, int64_t before, int64_t rows, Body body) {
        for (int64_t r = std::max<int64_t>(position - before, 0) / SIZE * SIZE; r < rows; r += SIZE)
            body(r, std::min<int64_t>(SIZE, rows - r));
    }

    // Scores in a piece of rows that have `before` keys and one more for each row before them; a block of rows as far as its last
    // one sees.
    void score(int64_t before, int64_t rows, int64_t piece, const Word* queries, const Word* keys, const float* scales,
               float* scores) const {
        const int64_t first = std::max(piece, args_.form.first_seen(before) / KEY_TILE * KEY_TILE);
        for (int64_t key = first; key < std::min(before + rows, piece + PIECE_TOKENS); key += KEY_TILE)
            in_blocks<SCORE_ROWS>(key, before, rows_that_see(before, rows, key + KEY_TILE), [&](int64_t r, int64_t count) {
                const int64_t seen = std::min<int64_t>(KEY_TILE, before + r + count - key);
                with_constant<SCORE_ROWS>(count, [&](auto num_rows) {
                    for (int64_t k = 0; k < seen; k += LANES)
                        score_tile<S, Mul, num_rows()>(queries + r * row_words_, row_words_, keys + (key - origin_ + k) * row_words_,
                                                       scales + key - origin_ + k, scores + r * SCORE_STRIDE + key - piece + k,
                                                       SCORE_STRIDE);
                });
            });
    }

    // sums = weights of the tokens of a piece times their values, a block of rows from the first token of its first row as far as its
    // last one sees.
    void add_values(int64_t before, int64_t rows, int64_t piece, const Word* weights, const Word* values, float* sums) const {
        for (int64_t d = 0; d < padded_value_dim_; d += KEY_TILE)
            in_blocks(piece, before, rows, [&](int64_t r, int64_t count) {
                const int64_t begin = std::max(args_.form.first_seen(before + r), piece) / Mul::PER_WORD;  // in words
                const int64_t end = round_up(std::min(before + r + count, piece + PIECE_TOKENS), Mul::PER_WORD) / Mul::PER_WORD;
                const Word* first = values + (begin - origin_ / Mul::PER_WORD) * padded_value_dim_ + d;
                product_of<Mul>(count, std::min<int64_t>(KEY_VECS, (padded_value_dim_ - d) / LANES),
                                weights + r * SCORE_STRIDE + begin - piece / Mul::PER_WORD, SCORE_STRIDE, first, padded_value_dim_,
                                end - begin, sums + r * padded_value_dim_ + d, padded_value_dim_);
            });
    }

    const Prefill& args_;
    const int64_t begin_, end_, origin_;  // the tokens that some row sees, and the first one that is packed
    const int padded_dim_, padded_value_dim_, row_words_;
    const int64_t padded_tokens_, head_words_, group_;
    int64_t num_tiles_, tile_;
    Word *keys_ = nullptr, *values_ = nullptr;
    float *key_scales_ = nullptr, *value_scales_ = nullptr;  // of each KV head and token
};

}  // namespace
}  // namespace disagg

// Returns -1, or the index of a block of the table that is outside the cache; then nothing was computed.
extern "C" int64_t disagg_prefill_attention(const void* p) {
    using namespace disagg;
    const auto& args = args_as<Prefill>(p);
    for (int64_t b = args.form.first_seen(args.start) / args.block_size; b * args.block_size < args.start + args.num_tokens; ++b)
        if (args.table[b] < 0 || args.table[b] >= args.num_blocks) return b;
    if (args.num_tokens == 0) return DONE;
    if (args.is_int8)
        args.is_bf16 ? Attention<bf16, int8_t, Single>(args).run() : Attention<float, int8_t, Single>(args).run();
    else
        args.is_bf16 ? Attention<bf16, bf16, ForBf16>(args).run() : Attention<float, float, Single>(args).run();
    return DONE;
}
