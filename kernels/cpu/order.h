// The order of sums of attention, which both kernels share: a token has the same bits in a prompt, as a decode and as one of several
// rows of its sequence, whatever was cached before and however many tokens are computed beside it.
//
//   A context is cut into pieces of PIECE_TOKENS tokens at absolute positions. In a piece:
//   a score       has CHAINS chains of multiply-adds along the head's words of 32 bits, word w in chain w % CHAINS, in order; the
//                 two bf16 numbers of a word are multiplied as a pair (`words.h`), or else one after the other. The chains
//                 are added as a tree of neighbours: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
//                 With a soft cap it is then capped: cap * tanh(score * (scale / cap)), with a scale of one from there on
//   the top       is the largest score, times the scale
//   a weight      is e^(score * scale - top), rounded to bf16 where words are pairs
//   the total     of the weights before that rounding has a chain for each of sixteen lanes, token i in lane i % 16, which are
//                 added as a tree (`sum`)
//   each value    of the result is one chain of multiply-adds along the tokens, two at a time where words are pairs
//   Pieces are put together from left to right (`join`), from the first one of which a row sees a token, and the result is
//   divided by the total (`inverse_of`), to which a sink adds as if it were a piece behind the others.
//
// A token that a row does not see has no part in it: where it is met for the sake of other rows its weight is zero, which
// changes no sum but the sign of a zero, and `finished` has no negative zeros. So a window moves no cut. Of what no row sees
// nothing is read, neither its entry of the table nor its keys and values, but for keys of the sixteen tokens of a block that
// begin with it.

#pragma once

#include <algorithm>
#include <cfloat>

#include "vec.h"
#include "words.h"

namespace disagg {

constexpr int64_t PIECE_TOKENS = 256;
constexpr int CHAINS = 8;  // the lanes of a register of AVX2, or of half of one of AVX-512, which then has the words of two keys

alignas(4 * LANES) inline constexpr float LANE_NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// How scores become weights: `ops.AttentionForm`.
struct Form {
    float scale, soft_cap;  // 0 for no cap
    int64_t window;         // more than any context where all tokens are seen

    // The first token that the one at `position` sees.
    int64_t first_seen(int64_t position) const { return std::max<int64_t>(position + 1 - window, 0); }
};

// Memory that is read as vectors is not written as floats by name: compilers may assume that they do not alias.
inline void put(void* floats, int64_t i, float x) { std::memcpy(static_cast<char*>(floats) + i * sizeof x, &x, sizeof x); }

// In place, `cap * tanh(score * scale / cap)` of ROWS rows of scores from `first` to `end`.
template <int ROWS>
[[gnu::noinline]] void cap_scores(float* scores, int64_t stride, int64_t first, int64_t end, const Form& form) {
    const vf factor = splat(form.scale / form.soft_cap), cap = splat(form.soft_cap);
    for (int r = 0; r < ROWS; ++r)
        for (int64_t i = first; i < end; i += LANES) {
            float* at = scores + r * stride + i;
            store(at, tanh(load(at) * factor) * cap);
        }
}

// In place, for ROWS rows of scores of one piece, `stride` apart: weights, as numbers of type Weight, with zeros for tokens that a
// row does not see, from the multiple of sixteen at or before the first token that the first row sees, up to the one at or behind the
// last token that the last row sees. The first row sees the tokens before `seen` > -16, each other one those before `more` further
// ones, and of these the last `form.window`. Tops and totals are as many numbers. HAS_BEGIN: a window begins in this piece.
template <class Weight, int ROWS, bool HAS_BEGIN>
[[gnu::always_inline]] inline void weigh_piece(float* scores, int64_t stride, int64_t seen, int64_t more, const Form& form, void* tops, void* totals) {
    const int64_t most = std::min(seen + (ROWS - 1) * more, PIECE_TOKENS);
    int64_t unseen = 0, begin = 0, last_begin = 0, whole = std::min(seen, PIECE_TOKENS) / LANES * LANES;
    if constexpr (HAS_BEGIN) {
        unseen = seen - form.window;  // tokens before those that the first row sees
        begin = std::max<int64_t>(unseen, 0) / LANES * LANES;
        last_begin = round_up(std::min(unseen + (ROWS - 1) * more, most), LANES);
        whole = std::max(whole, last_begin);
    }
    float scale = form.scale;
    if (form.soft_cap > 0.0f) cap_scores<ROWS>(scores, stride, begin, most, form), scale = 1.0f;
    const vf lanes = load(LANE_NUMBERS);
    const auto is_behind = [&](int r, int64_t i, int64_t tokens) { return splat(static_cast<float>(tokens + r * more - i)) > lanes; };
    const auto if_seen = [&](int r, int64_t i, vf x, float other) {
        return select(is_behind(r, i, seen), x, splat(other));
    };
    const auto if_in_window = [&](int r, int64_t i, vf x, float other) {
        return select(is_behind(r, i, unseen), splat(other), if_seen(r, i, x, other));
    };
    vf top[ROWS], total[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) top[r] = splat(-INFINITY), total[r] = splat(0.0f);
    for (int64_t i = begin; i < last_begin; i += LANES)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) top[r] = max(if_in_window(r, i, load(scores + r * stride + i), -INFINITY), top[r]);
    for (int64_t i = last_begin; i < whole; i += LANES)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) top[r] = max(load(scores + r * stride + i), top[r]);
    for (int64_t i = whole; i < most; i += LANES)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
            top[r] = max(if_seen(r, i, load(scores + r * stride + i), -INFINITY), top[r]);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        const float largest = max(top[r]) * scale;
        put(tops, r, largest);
        top[r] = splat(largest > -FLT_MAX ? largest : -FLT_MAX);  // a piece may have nothing but -inf
    }
    const auto weight_of = [&](int r, int64_t i) { return exp(fma(load(scores + r * stride + i), splat(scale), -top[r])); };
    // Never past what was read.
    const auto keep = [&](int r, int64_t i, vf weight) {
        store(reinterpret_cast<Weight*>(scores + r * stride) + i, weight);
        total[r] += weight;
    };
    for (int64_t i = begin; i < last_begin; i += LANES)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) keep(r, i, if_in_window(r, i, weight_of(r, i), 0.0f));
    for (int64_t i = last_begin; i < whole; i += LANES)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) keep(r, i, weight_of(r, i));
    for (int64_t i = whole; i < most; i += LANES)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) keep(r, i, if_seen(r, i, weight_of(r, i), 0.0f));
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) put(totals, r, sum(total[r]));
}

template <class Weight, int ROWS>
[[gnu::noinline]] void weigh_begin(float* scores, int64_t stride, int64_t seen, int64_t more, const Form& form, void* tops, void* totals) {
    weigh_piece<Weight, ROWS, true>(scores, stride, seen, more, form, tops, totals);
}

template <class Weight, int ROWS>
inline void weigh(float* scores, int64_t stride, int64_t seen, int64_t more, const Form& form, void* tops, void* totals) {
    if (seen + (ROWS - 1) * more > form.window) return weigh_begin<Weight, ROWS>(scores, stride, seen, more, form, tops, totals);
    weigh_piece<Weight, ROWS, false>(scores, stride, seen, more, form, tops, totals);
}

// What was put together so far, sixteen rows or heads of them.
struct Joined {
    vf top, total;
};

// How sums are put together: those before times `before`, plus those of the piece times `piece`.
struct Shares {
    vf before, piece;
};

// The next piece.
inline Shares join(Joined& joined, vf top, vf total) {
    const vf larger = max(top, joined.top);
    const Shares shares{exp(joined.top - larger), exp(top - larger)};
    joined = {larger, fma(total, shares.piece, joined.total * shares.before)};
    return shares;
}

inline vf join(vf before, vf piece, float share_before, float share_piece) {
    return fma(piece, splat(share_piece), before * splat(share_before));
}

// One over the total; NaN where there were no scores but -inf.
inline vf inverse_of(const Joined& joined) { return splat(1.0f) / joined.total + (joined.top - joined.top); }

// The same with a sink; the sums are smaller by as much as the largest score is less than the sink.
inline vf inverse_of(Joined joined, vf sinks) {
    const vf before = join(joined, sinks, splat(1.0f)).before;
    return before * inverse_of(joined);
}

inline vf finished(vf sums, float inverse) { return sums * splat(inverse) + splat(0.0f); }

}  // namespace disagg
