// Causal attention of a chunk of one sequence over its paged context. Threads take tiles of rows; each packs the context.
//
// Per KV head, K and V of the context are packed once from their blocks into the order in which the products read them. Then,
// for each query head and tile of query tokens: scores = Q K^T as far as each block of rows can see, softmax of each row up to
// its own position, out = P V. Tiles are small enough for their scores to stay in the second-level cache.
//
// Products work on 32-bit words: one fp32 number, or, where the processor multiplies bf16 pairs (AVX512-BF16), two bf16
// numbers along the summed dimension. Sums and softmax are fp32; P is rounded to bf16 in the latter case, as in torch's own
// CPU kernel.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "calls.h"
#include "team.h"
#include "vec.h"

namespace disagg {
namespace {

constexpr int KEY_TILE = 4 * LANES;
constexpr int ROW_TILE = 6;
constexpr int64_t SUM_TILE = 256;
constexpr int64_t SCORE_WORDS = 1 << 16;

using Word = uint32_t;

inline vu load_words(const Word* p) {
    vu x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// One number a word.
struct Single {
    static constexpr int PER_WORD = 1;
    static vf madd(vf acc, vu a, vu b) { return acc + (vf)a * (vf)b; }

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
    static vf madd(vf acc, vu a, vu b) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b); }

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
    vf acc[ROWS][VECS] = {};
    if (add)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) acc[r][v] = load(c + r * c_stride + v * LANES);
    for (int64_t k = 0; k < size; ++k) {
        vu row[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) row[v] = load_words(b + k * b_stride + v * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const vu word = vu{} + a[r * a_stride + k];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; ++v) acc[r][v] = Mul::madd(acc[r][v], word, row[v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; ++v) store(c + r * c_stride + v * LANES, acc[r][v]);
}

// The same for up to ROW_TILE rows.
template <class Mul, int VECS>
void product_of(int64_t rows, const Word* a, int64_t a_stride, const Word* b, int64_t b_stride, int64_t size, float* c,
                int64_t c_stride, bool add) {
    if (rows == ROW_TILE) return product<Mul, ROW_TILE, VECS>(a, a_stride, b, b_stride, size, c, c_stride, add);
    for (int64_t r = 0; r < rows; ++r)
        product<Mul, 1, VECS>(a + r * a_stride, a_stride, b, b_stride, size, c + r * c_stride, c_stride, add);
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

template <class T, class Mul>
class Attention {
   public:
    explicit Attention(const Prefill& args)
        : args_(args),
          end_(args.start + args.num_tokens),
          padded_dim_(static_cast<int>(round_up(args.dim, LANES))),
          row_words_(padded_dim_ / Mul::PER_WORD),
          padded_end_(round_up(end_, KEY_TILE)),
          tile_(std::clamp<int64_t>(SCORE_WORDS / padded_end_ / ROW_TILE * ROW_TILE, ROW_TILE, 16 * ROW_TILE)),
          keys_(padded_end_ * row_words_),
          values_(padded_end_ / Mul::PER_WORD * padded_dim_),
          queries_(tile_ * row_words_),
          scores_(tile_ * padded_end_),
          sums_(tile_ * padded_dim_) {}

    // Every `num_parts`-th tile of rows from tile `part` on: later tiles see more keys, so neighbours go to different parts.
    void run(int part, int num_parts) {
        const int64_t group = args_.num_heads / args_.num_kv_heads;
        for (int64_t kv_head = 0; kv_head < args_.num_kv_heads; ++kv_head) {
            pack_context(kv_head);
            for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
                for (int64_t first = part * tile_; first < args_.num_tokens; first += num_parts * tile_)
                    attend(head, first, std::min(tile_, args_.num_tokens - first));
        }
    }

   private:
    const T* cached_row(const void* cache, int64_t kv_head, int64_t position) const {
        const int64_t block = args_.table[position / args_.block_size];
        return static_cast<const T*>(cache) + block * args_.block_stride +
               (kv_head * args_.block_size + position % args_.block_size) * args_.dim;
    }

    // keys_: [tile of 64 keys][word][key];  values_: [token / PER_WORD][dim], the tokens of a word side by side.
    void pack_context(int64_t kv_head) {
        row_.assign(2 * padded_dim_, 0);
        for (int64_t t = 0; t < end_; ++t) {
            Mul::pack(cached_row(args_.keys, kv_head, t), args_.dim, padded_dim_, row_.data());
            Word* column = keys_.data() + t / KEY_TILE * KEY_TILE * row_words_ + t % KEY_TILE;
            for (int w = 0; w < row_words_; ++w) column[w * KEY_TILE] = row_[w];
        }
        for (int64_t t = 0; t < end_; t += Mul::PER_WORD) pack_value(kv_head, t);
    }

    void pack_value(int64_t kv_head, int64_t t) {
        Word* words = values_.data() + t / Mul::PER_WORD * padded_dim_;
        const T* first = cached_row(args_.values, kv_head, t);
        if constexpr (Mul::PER_WORD == 1) {
            Mul::pack(first, args_.dim, padded_dim_, words);
        } else {
            const T* second = t + 1 < end_ ? cached_row(args_.values, kv_head, t + 1) : nullptr;
            for (int d = 0; d < args_.dim; ++d)
                words[d] = first[d].bits | (second ? static_cast<Word>(second[d].bits) << 16 : 0u);
        }
    }

    void attend(int64_t head, int64_t first, int64_t rows) {
        for (int64_t r = 0; r < rows; ++r)
            Mul::pack(static_cast<const T*>(args_.q) + (first + r) * args_.q_stride_token + head * args_.q_stride_head,
                      args_.dim, padded_dim_, queries_.data() + r * row_words_);
        const int64_t before = args_.start + first;
        score(before, rows);
        float inverse[16 * ROW_TILE];
        for (int64_t r = 0; r < rows; ++r) inverse[r] = softmax(scores_.data() + r * padded_end_, before + r + 1);
        for (int64_t token = 0; token < before + rows; token += SUM_TILE) add_values(before, rows, token);
        for (int64_t r = 0; r < rows; ++r) {
            T* out = static_cast<T*>(args_.out) + ((first + r) * args_.num_heads + head) * args_.dim;
            for (int d = 0; d < args_.dim; d += LANES)
                store(out + d, load(sums_.data() + r * padded_dim_ + d) * inverse[r], std::min(args_.dim - d, LANES));
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
    void score(int64_t before, int64_t rows) {
        float* scores = reinterpret_cast<float*>(scores_.data());
        for (int64_t key = 0; key < before + rows; key += KEY_TILE)
            in_blocks(key, before, rows, [&](int64_t r, int64_t count) {
                product_of<Mul, 4>(count, queries_.data() + r * row_words_, row_words_, keys_.data() + key * row_words_,
                                   KEY_TILE, row_words_, scores + r * padded_end_ + key, padded_end_, false);
            });
    }

    // In place: scores of the first `length` keys to weights e^(score - max), and 0 as far as a row of the same block may see.
    // 1 / their sum.
    float softmax(Word* row, int64_t length) {
        float* scores = reinterpret_cast<float*>(row);
        const int64_t padded = round_up(length, LANES), width = std::min(round_up(length + ROW_TILE, LANES), padded_end_);
        for (int64_t i = length; i < padded; ++i) scores[i] = -INFINITY;
        vf best = splat(-INFINITY);
        for (int64_t i = 0; i < padded; i += LANES) {
            const vf scaled = load(scores + i) * args_.scale;
            store(scores + i, scaled);
            best = max(scaled, best);
        }
        const vf top = splat(max(best));
        vf total = {};
        for (int64_t i = 0; i < padded; i += LANES) {
            const vf weight = exp(load(scores + i) - top);
            total += weight;
            Mul::store_weights(row, i, weight);
        }
        for (int64_t i = padded; i < width; i += LANES) Mul::store_weights(row, i, vf{});
        return 1.0f / sum(total);
    }

    // sums_ (+)= weights of up to SUM_TILE tokens from `token` on times their values, a block of rows as far as its last one
    // sees.
    void add_values(int64_t before, int64_t rows, int64_t token) {
        const Word* weights = scores_.data() + token / Mul::PER_WORD;
        const Word* values = values_.data() + token / Mul::PER_WORD * padded_dim_;
        const auto add = [&](auto vecs, int d) {
            in_blocks(token, before, rows, [&](int64_t r, int64_t count) {
                const int64_t seen = std::min(before + r + count - token, SUM_TILE);
                product_of<Mul, vecs()>(count, weights + r * padded_end_, padded_end_, values + d, padded_dim_,
                                        round_up(seen, Mul::PER_WORD) / Mul::PER_WORD, sums_.data() + r * padded_dim_ + d,
                                        padded_dim_, token > 0);
            });
        };
        int d = 0;
        for (; d + 4 * LANES <= padded_dim_; d += 4 * LANES) add(std::integral_constant<int, 4>{}, d);
        for (; d < padded_dim_; d += LANES) add(std::integral_constant<int, 1>{}, d);
    }

    const Prefill& args_;
    const int64_t end_;
    const int padded_dim_, row_words_;
    const int64_t padded_end_, tile_;
    std::vector<Word> keys_, values_, queries_, scores_, row_;
    std::vector<float> sums_;
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
    in_parts([&](int part, int num_parts) {
        if (args.is_bf16)
            Attention<bf16, ForBf16>(args).run(part, num_parts);
        else
            Attention<float, Single>(args).run(part, num_parts);
    });
    return DONE;
}
