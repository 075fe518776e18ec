// The experts of a row and their weights; the rules are those of `kernels/routing.py`.

#pragma once

#include <algorithm>
#include <cmath>

#include "vec.h"

namespace disagg {

constexpr int64_t MAX_EXPERTS = 1024, MAX_TOP_K = 64;
constexpr float SMALLEST_SUM = 1e-20f;

enum class Score : int64_t { SOFTMAX = 0, SOFTMAX_OF_TOP = 1, SIGMOID = 2 };
enum class GroupScore : int64_t { LARGEST = 0, TWO_LARGEST = 1 };

struct Routing {
    int64_t num_experts, top_k;
    Score score;
    int64_t groups, top_groups;
    GroupScore group_score;
    bool renormalizes;
    float scale;
    const float* choice_bias;  // may be null
};

// e^x of each number, or 1 / (1 + e^-x); numbers behind the last one are overwritten up to a multiple of sixteen.
inline void exp_all(float* x, int64_t count, float largest) {
    for (int64_t i = 0; i < count; i += LANES) store(x + i, exp(load(x + i) - splat(largest)));
}
inline void sigmoid_all(float* x, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store(x + i, splat(1.0f) / (1.0f + exp(-load(x + i))));
}

inline float sum_in_order(const float* x, int64_t count) {
    float total = 0.0f;
    for (int64_t i = 0; i < count; ++i) total += x[i];
    return total;
}

inline void softmax(float* x, int64_t count) {
    exp_all(x, count, *std::max_element(x, x + count));
    const float total = sum_in_order(x, count);
    for (int64_t i = 0; i < count; ++i) x[i] /= total;
}

// Sets `is_chosen` of the `most` largest values, of equal ones the first.
inline void choose(const float* values, int64_t count, int64_t most, bool* is_chosen) {
    std::fill_n(is_chosen, count, false);
    for (int64_t n = 0; n < most; ++n) {
        int64_t best = -1;
        for (int64_t i = 0; i < count; ++i)
            if (!is_chosen[i] && (best < 0 || values[i] > values[best])) best = i;
        is_chosen[best] = true;
    }
}

inline float score_of_group(GroupScore kind, const float* values, int64_t count) {
    float first = -INFINITY, second = -INFINITY;
    for (int64_t i = 0; i < count; ++i)
        if (values[i] > first)
            second = first, first = values[i];
        else
            second = std::max(second, values[i]);
    return kind == GroupScore::LARGEST ? first : first + second;
}

// Values of experts outside of the best groups become -inf.
inline void keep_best_groups(const Routing& routing, float* values) {
    const int64_t size = routing.num_experts / routing.groups;
    float scores[MAX_EXPERTS];
    bool is_kept[MAX_EXPERTS];
    for (int64_t g = 0; g < routing.groups; ++g) scores[g] = score_of_group(routing.group_score, values + g * size, size);
    choose(scores, routing.groups, routing.top_groups, is_kept);
    for (int64_t g = 0; g < routing.groups; ++g)
        if (!is_kept[g]) std::fill_n(values + g * size, size, -INFINITY);
}

// `ids` ascending, with their weights, `top_k` of each.
inline void route(const Routing& routing, const float* logits, int32_t* ids, float* weights) {
    const int64_t count = routing.num_experts, top_k = routing.top_k;
    if (std::any_of(logits, logits + count, [](float x) { return std::isnan(x); })) {
        for (int64_t i = 0; i < top_k; ++i) ids[i] = static_cast<int32_t>(i), weights[i] = NAN;
        return;
    }
    alignas(64) float scores[MAX_EXPERTS], values[MAX_EXPERTS], top[MAX_TOP_K];
    std::fill(std::copy_n(logits, count, scores), scores + (count + LANES - 1) / LANES * LANES, 0.0f);
    if (routing.score == Score::SOFTMAX) softmax(scores, count);
    if (routing.score == Score::SIGMOID) sigmoid_all(scores, count);
    const bool are_logits = routing.score != Score::SIGMOID && !routing.choice_bias;
    for (int64_t e = 0; e < count; ++e)
        values[e] = are_logits ? logits[e] : scores[e] + (routing.choice_bias ? routing.choice_bias[e] : 0.0f);
    if (routing.groups > 1) keep_best_groups(routing, values);
    bool is_chosen[MAX_EXPERTS];
    choose(values, count, top_k, is_chosen);
    std::fill_n(top, MAX_TOP_K, 0.0f);
    for (int64_t e = 0, i = 0; e < count; ++e)
        if (is_chosen[e]) ids[i] = static_cast<int32_t>(e), top[i++] = scores[e];
    if (routing.score == Score::SOFTMAX_OF_TOP) softmax(top, top_k);
    const float divisor = routing.renormalizes ? sum_in_order(top, top_k) + SMALLEST_SUM : 1.0f;
    for (int64_t i = 0; i < top_k; ++i) weights[i] = top[i] / divisor * routing.scale;
}

}  // namespace disagg
