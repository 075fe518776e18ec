// Causal attention of a chunk of one sequence over its paged context.
//
// K and V of the context are packed once from their blocks into the order in which the products read them, of a few KV heads at
// a time; threads share the tokens. Then, for each query head and tile of query tokens: scores = Q K^T as far as each block of
// rows can see, softmax of each row up to its own position, out = P V; threads take tiles. Tiles are small enough for their
// scores to stay in the second-level cache.
//
// Products work on 32-bit words: one fp32 number, or, where the processor multiplies bf16 pairs (AVX512-BF16), two bf16
// numbers along the summed dimension. Sums and softmax are fp32; P is rounded to bf16 in the latter case, as in torch's own
// CPU kernel.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "scratch.h"
#include "thread_pool.h"
#include "vec.h"

namespace disagg {
namespace {

constexpr int KEY_VECS = 4;
constexpr int KEY_TILE = KEY_VECS * LANES;
constexpr int ROW_TILE = SUM_REGISTERS / REGISTERS >= 6 ? 6 : SUM_REGISTERS / REGISTERS;  // rows of which one vector's sums fit
constexpr int64_t SUM_TILE = 256;
constexpr int64_t SCORE_WORDS = 1 << 16;
constexpr int64_t MAX_TILE = 16 * ROW_TILE;
constexpr int64_t PACKED_WORDS = 1 << 20;

using Word = uint32_t;

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// One number a word.
struct Single {
    static constexpr int PER_WORD = 1;
    using Words = vf;
    static Words words(const Word* p) { return load(reinterpret_cast<const float*>(p)); }
    static Words splat_word(const Word* p) {
        float x;
        std::memcpy(&x, p, sizeof x);
        return splat(x);
    }
    static vf madd(const vf& acc, const vf& a, const vf& b) { return fma(a, b, acc); }

    template <class T>
    static void pack(const T* row, int dim, int padded_dim, Word* words) {
        for (int i = 0; i < padded_dim; i += LANES)
            store(reinterpret_cast<float*>(words) + i, i < dim ? load(row + i, std::min(dim - i, LANES)) : vf{});
    }
    static void store_weights(Word* row, int64_t i, vf x) { store(reinterpret_cast<float*>(row) + i, x); }
};

#ifdef __AVX512BF16__
// Two bf16 numbers a word.
struct Pair {
    static constexpr int PER_WORD = 2;
    using Words = __m512i;
    static Words words(const Word* p) { return _mm512_loadu_si512(p); }
    static Words splat_word(const Word* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }
    static vf madd(vf acc, Words a, Words b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }

    static void pack(const bf16* row, int dim, int padded_dim, Word* words) {
        std::memset(words, 0, padded_dim * sizeof(bf16));
        std::memcpy(words, row, dim * sizeof(bf16));
    }
    static void store_weights(Word* row, int64_t i, vf x) { store(reinterpret_cast<bf16*>(row) + i, x); }
};
using ForBf16 = Pair;
#else
using ForBf16 = Single;
#endif

// c[r][v] (+)= sum over k < size of a[r][k] * b[k][v], for ROWS rows and VECS vectors of columns. Loops are unrolled by name:
// the compiler then keeps the sums in registers alone, without a second copy on the stack.
template <class Mul, int ROWS, int VECS>
void product(const Word* a, int64_t a_stride, const Word* b, int64_t b_stride, int64_t size, float* c, int64_t c_stride,
             bool add) {
    vf acc[ROWS][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) acc[r][v] = add ? load(c + r * c_stride + v * LANES) : vf{};
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

// `body(n)` with n, from 1 to MOST, as a constant of the compiler's.
template <int MOST, class Body>
void with_constant(int64_t n, Body body) {
    if constexpr (MOST > 1)
        if (n < MOST) return with_constant<MOST - 1>(n, body);
    body(std::integral_constant<int, MOST>{});
}

// The same for up to ROW_TILE rows and KEY_VECS vectors, as many vectors at a time as there are registers for their sums.
template <class Mul>
void product_of(int64_t rows, int64_t vecs, const Word* a, int64_t a_stride, const Word* b, int64_t b_stride, int64_t size,
                float* c, int64_t c_stride, bool add) {
    constexpr int AT_ONCE = std::min(SUM_REGISTERS / (ROW_TILE * REGISTERS), KEY_VECS);
    for (; vecs > 0; vecs -= AT_ONCE, b += AT_ONCE * LANES, c += AT_ONCE * LANES)
        with_constant<ROW_TILE>(rows, [=](auto num_rows) {
            with_constant<AT_ONCE>(vecs, [=](auto num_vecs) {
                product<Mul, num_rows(), num_vecs()>(a, a_stride, b, b_stride, size, c, c_stride, add);
            });
        });
}

struct Prefill {
    int32_t is_bf16, dim;
    const void* q;
    int64_t q_stride_token, q_stride_head;
    const void* keys;
    const void* values;
    int64_t block_stride, num_blocks, num_kv_heads, block_size;
    const int32_t* table;
    int64_t start, num_tokens, num_heads;
    float scale;
    void* out;
};

// What a thread keeps from tile to tile.
struct Scratch {
    std::vector<Word> queries, scores;
    std::vector<float> sums;
};

template <class T, class Mul>
class Attention {
   public:
    explicit Attention(const Prefill& args)
        : args_(args),
          end_(args.start + args.num_tokens),
          padded_dim_(static_cast<int>(round_up(args.dim, LANES))),
          row_words_(padded_dim_ / Mul::PER_WORD),
          padded_end_(round_up(end_, KEY_TILE)),
          score_stride_(padded_end_ + LANES),  // not a multiple of a page, whose rows would share few places of the cache
          head_words_(padded_end_ * row_words_),
          group_(args.num_heads / args.num_kv_heads) {
        const int64_t most = std::clamp<int64_t>(SCORE_WORDS / padded_end_ / ROW_TILE * ROW_TILE, ROW_TILE, MAX_TILE);
        num_tiles_ = (args.num_tokens + most - 1) / most;
        tile_ = round_up((args.num_tokens + num_tiles_ - 1) / num_tiles_, ROW_TILE);
        num_tiles_ = (args.num_tokens + tile_ - 1) / tile_;
    }

    void run() {
        static thread_local std::vector<Word> packed;
        const int64_t at_once = std::clamp<int64_t>(PACKED_WORDS / (2 * head_words_), 1, args_.num_kv_heads);
        keys_ = at_least(packed, 2 * at_once * head_words_);
        values_ = keys_ + at_once * head_words_;
        for (int64_t first = 0; first < args_.num_kv_heads; first += at_once)
            run(first, std::min(at_once, args_.num_kv_heads - first));
    }

   private:
    // Each thread begins with heads of its own, with the last tile of each, which sees most; the last that are left are small.
    void run(int64_t first_kv_head, int64_t num_kv_heads) {
        parallel_for(num_kv_heads * padded_end_ / KEY_TILE, [&](int64_t piece) {
            const int64_t kv_head = piece * KEY_TILE / padded_end_;
            pack(first_kv_head + kv_head, kv_head * head_words_, piece * KEY_TILE % padded_end_);
        });
        parallel_for_dynamic(num_kv_heads * group_ * num_tiles_, 1, [&](int64_t item, int64_t end) {
            for (; item < end; ++item) {
                const int64_t head = item / num_tiles_, first = (num_tiles_ - 1 - item % num_tiles_) * tile_;
                const int64_t at = head / group_ * head_words_, rows = std::min(tile_, args_.num_tokens - first);
                attend(first_kv_head * group_ + head, first, rows, keys_ + at, values_ + at);
            }
        });
    }

    const T* cached_row(const void* cache, int64_t kv_head, int64_t position) const {
        const int64_t block = args_.table[position / args_.block_size];
        return static_cast<const T*>(cache) + block * args_.block_stride +
               (kv_head * args_.block_size + position % args_.block_size) * args_.dim;
    }

    // KEY_TILE tokens from `first` on, zeros past the end.
    // keys_: [tile of keys][word][key];  values_: [token / PER_WORD][dim], the tokens of a word side by side.
    void pack(int64_t kv_head, int64_t at, int64_t first) const {
        Word row[MAX_HEAD_DIM];
        for (int64_t t = 0; t < KEY_TILE; ++t) {
            if (first + t < end_)
                Mul::pack(cached_row(args_.keys, kv_head, first + t), args_.dim, padded_dim_, row);
            else
                std::fill_n(row, row_words_, 0);
            Word* column = keys_ + at + first * row_words_ + t;
            for (int w = 0; w < row_words_; ++w) column[w * KEY_TILE] = row[w];
        }
        for (int64_t t = first; t < std::min(first + KEY_TILE, end_); t += Mul::PER_WORD)
            pack_value(kv_head, t, values_ + at + t / Mul::PER_WORD * padded_dim_);
    }

    void pack_value(int64_t kv_head, int64_t t, Word* words) const {
        const T* first = cached_row(args_.values, kv_head, t);
        if constexpr (Mul::PER_WORD == 1) {
            Mul::pack(first, args_.dim, padded_dim_, words);
        } else {
            const T* second = t + 1 < end_ ? cached_row(args_.values, kv_head, t + 1) : nullptr;
            for (int d = 0; d < args_.dim; ++d)
                words[d] = first[d].bits | (second ? static_cast<Word>(second[d].bits) << 16 : 0u);
            std::fill(words + args_.dim, words + padded_dim_, 0);
        }
    }

    void attend(int64_t head, int64_t first, int64_t rows, const Word* keys, const Word* values) const {
        static thread_local Scratch scratch;
        Word* queries = at_least(scratch.queries, tile_ * row_words_);
        Word* scores = at_least(scratch.scores, tile_ * score_stride_);
        float* sums = at_least(scratch.sums, tile_ * padded_dim_);
        for (int64_t r = 0; r < rows; ++r)
            Mul::pack(static_cast<const T*>(args_.q) + (first + r) * args_.q_stride_token + head * args_.q_stride_head,
                      args_.dim, padded_dim_, queries + r * row_words_);
        const int64_t before = args_.start + first;
        score(before, rows, queries, keys, reinterpret_cast<float*>(scores));
        float inverse[MAX_TILE];
        in_blocks(0, before, rows, [&](int64_t r, int64_t count) {
            with_constant<ROW_TILE>(count, [&](auto num_rows) {
                softmax<num_rows()>(scores + r * score_stride_, before + r + 1, inverse + r);
            });
        });
        for (int64_t token = 0; token < before + rows; token += SUM_TILE)
            add_values(before, rows, token, scores, values, sums);
        for (int64_t r = 0; r < rows; ++r) {
            T* out = static_cast<T*>(args_.out) + ((first + r) * args_.num_heads + head) * args_.dim;
            for (int d = 0; d < args_.dim; d += LANES)
                store(out + d, load(sums + r * padded_dim_ + d) * inverse[r], std::min(args_.dim - d, LANES));
        }
    }

    // `body(r, count)` on blocks of rows [r, r + count), from the first with a row that sees `position`. Row 0 has `before` keys
    // before its own.
    template <class Body>
    static void in_blocks(int64_t position, int64_t before, int64_t rows, Body body) {
        for (int64_t r = std::max<int64_t>(position - before, 0) / ROW_TILE * ROW_TILE; r < rows; r += ROW_TILE)
            body(r, std::min<int64_t>(ROW_TILE, rows - r));
    }

    // Scores of rows that have `before` keys and one more for each row before them; a block of rows as far as its last one sees.
    void score(int64_t before, int64_t rows, const Word* queries, const Word* keys, float* scores) const {
        for (int64_t key = 0; key < before + rows; key += KEY_TILE)
            in_blocks(key, before, rows, [&](int64_t r, int64_t count) {
                const int64_t vecs = std::min<int64_t>(KEY_VECS, (before + r + count - key + LANES - 1) / LANES);
                product_of<Mul>(count, vecs, queries + r * row_words_, row_words_, keys + key * row_words_, KEY_TILE, row_words_,
                                scores + r * score_stride_ + key, score_stride_, false);
            });
    }

    // In place, for a block of rows, the first of which sees `length` keys and each other one more: scores to weights
    // e^(score - max), 0 for keys that only later rows see. Their sums become `inverse`.
    template <int ROWS>
    void softmax(Word* block, int64_t length, float* inverse) const {
        float* scores = reinterpret_cast<float*>(block);
        const int64_t padded = round_up(length + ROWS - 1, LANES);
        for (int r = 0; r < ROWS; ++r)
            std::fill(scores + r * score_stride_ + length + r, scores + r * score_stride_ + padded, -INFINITY);
        vf top[ROWS], total[ROWS] = {};
        for (vf& each : top) each = splat(-INFINITY);
        for (int64_t i = 0; i < padded; i += LANES)
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) top[r] = max(load(scores + r * score_stride_ + i), top[r]);
        for (vf& each : top) each = splat(max(each) * args_.scale);
        for (int64_t i = 0; i < padded; i += LANES)
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const vf weight = exp(fma(load(scores + r * score_stride_ + i), splat(args_.scale), -top[r]));
                total[r] += weight;
                Mul::store_weights(block + r * score_stride_, i, weight);
            }
        for (int r = 0; r < ROWS; ++r) inverse[r] = 1.0f / sum(total[r]);
    }

    // sums (+)= weights of up to SUM_TILE tokens from `token` on times their values, a block of rows as far as its last one
    // sees.
    void add_values(int64_t before, int64_t rows, int64_t token, const Word* weights, const Word* values, float* sums) const {
        weights += token / Mul::PER_WORD;
        values += token / Mul::PER_WORD * padded_dim_;
        for (int64_t d = 0; d < padded_dim_; d += KEY_TILE)
            in_blocks(token, before, rows, [&](int64_t r, int64_t count) {
                const int64_t seen = std::min(before + r + count - token, SUM_TILE);
                product_of<Mul>(count, std::min<int64_t>(KEY_VECS, (padded_dim_ - d) / LANES), weights + r * score_stride_,
                                score_stride_, values + d, padded_dim_, round_up(seen, Mul::PER_WORD) / Mul::PER_WORD,
                                sums + r * padded_dim_ + d, padded_dim_, token > 0);
            });
    }

    const Prefill& args_;
    const int64_t end_;
    const int padded_dim_, row_words_;
    const int64_t padded_end_, score_stride_, head_words_, group_;
    int64_t num_tiles_, tile_;
    Word *keys_ = nullptr, *values_ = nullptr;
};

}  // namespace
}  // namespace disagg

// Returns -1, or the index of a block of the table that is outside the cache; then nothing was computed.
extern "C" int64_t disagg_prefill_attention(const void* p) {
    using namespace disagg;
    const auto& args = args_as<Prefill>(p);
    for (int64_t b = 0; b * args.block_size < args.start + args.num_tokens; ++b)
        if (args.table[b] < 0 || args.table[b] >= args.num_blocks) return b;
    if (args.num_tokens == 0) return DONE;
    args.is_bf16 ? Attention<bf16, ForBf16>(args).run() : Attention<float, Single>(args).run();
    return DONE;
}
