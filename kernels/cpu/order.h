// The order of sums of attention, which both kernels share: a token has the same bits in a prompt, as a decode and as one of several
// rows of its sequence, whatever was cached before and however many tokens are computed beside it.
//
//   A context is cut into pieces of PIECE_TOKENS tokens at absolute positions. In a piece:
//   a score       has CHAINS chains of multiply-adds along the head's words of 32 bits, word w in chain w % CHAINS, in order; the
//                 two bf16 numbers of a word are multiplied as a pair (`words.h`), or else one after the other. The chains
//                 are added as a tree of neighbours: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
//   the top       is the largest score, times the scale
//   a weight      is e^(score * scale - top), rounded to bf16 where words are pairs
//   the total     of the weights before that rounding has a chain for each of sixteen lanes, token i in lane i % 16, which are
//                 added as a tree (`sum`)
//   each value    of the result is one chain of multiply-adds along the tokens, two at a time where words are pairs
//   Pieces are put together from left to right (`join`), and the result is divided by the total (`inverse_of`).
//
// A token that a row does not see has no part in it: where it is met for the sake of other rows its weight is zero, which
// changes no sum but the sign of a zero, and `finished` has no negative zeros.

#pragma once

#include <algorithm>
#include <cfloat>

#include "vec.h"
#include "words.h"

namespace disagg {

constexpr int64_t PIECE_TOKENS = 256;
constexpr int CHAINS = 8;  // the lanes of a register of AVX2, or of half of one of AVX-512, which then has the words of two keys

alignas(4 * LANES) inline constexpr float LANE_NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Memory that is read as vectors is not written as floats by name: compilers may assume that they do not alias.
inline void put(void* floats, int64_t i, float x) { std::memcpy(static_cast<char*>(floats) + i * sizeof x, &x, sizeof x); }

// In place, for ROWS rows of scores of one piece, `stride` apart: weights, as numbers of type Weight, zeros behind the last token
// that a row sees, up to the next multiple of sixteen of the row that sees most. The first row sees `seen` > -16 tokens, each
// other one `more` than the row before it, none more than a piece has. Tops and totals are as many numbers.
template <class Weight, int ROWS>
void weigh(float* scores, int64_t stride, int64_t seen, int64_t more, float scale, void* tops, void* totals) {
    const int64_t whole = std::min(seen, PIECE_TOKENS) / LANES * LANES, most = std::min(seen + (ROWS - 1) * more, PIECE_TOKENS);
    const vf lanes = load(LANE_NUMBERS);
    const auto is_seen = [&](int r, int64_t i) { return splat(static_cast<float>(seen + r * more - i)) > lanes; };
    vf top[ROWS], total[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) top[r] = splat(-INFINITY), total[r] = splat(0.0f);
    for (int64_t i = 0; i < whole; i += LANES)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) top[r] = max(load(scores + r * stride + i), top[r]);
    for (int64_t i = whole; i < most; i += LANES)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
            top[r] = max(select(is_seen(r, i), load(scores + r * stride + i), splat(-INFINITY)), top[r]);
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
    for (int64_t i = 0; i < whole; i += LANES)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) keep(r, i, weight_of(r, i));
    for (int64_t i = whole; i < most; i += LANES)
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) keep(r, i, select(is_seen(r, i), weight_of(r, i), splat(0.0f)));
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) put(totals, r, sum(total[r]));
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

inline vf finished(vf sums, float inverse) { return sums * splat(inverse) + splat(0.0f); }

}  // namespace disagg
