// What LoRA adapters add to the rows of a product: y[t] += scale * (x[t] A^T) B, with the A, B and scale of the slot of row t. Rows
// without an adapter (slot -1) are not touched.
//
// Sums are fp32. A number of x A^T is one chain of vectors along the inputs and a tree over their lanes; an output is one chain
// along the ranks, scaled, added to y and rounded once. So a row does not depend on the rows beside it, and its bits are
// those of all levels with fused multiply-adds.
//
// Threads take rows and parts of their outputs where there is enough to do.

#include <algorithm>
#include <vector>

#include "calls.h"
#include "scratch.h"
#include "thread_pool.h"
#include "vec.h"

namespace disagg {
namespace {

constexpr int64_t MAX_PARTS = 3;
constexpr int64_t MIN_PARALLEL = 1 << 16;  // multiplications
constexpr int RANKS = 4;                   // chains side by side; ranks are allocated in multiples of it, zeros behind the last
constexpr int VECTORS = 4;                 // outputs side by side, in vectors
constexpr int64_t COLUMNS = 512;           // outputs of an item

struct LoraAdd {
    int32_t is_bf16;
    const void* x;
    int64_t x_stride;
    void* y;
    int64_t y_stride, num_rows;
    const void* a;  // [slots, parts, max_rank, inputs]
    const void* b;  // [slots, max_rank, outputs]
    const int32_t* ranks;
    const float* scales;
    int64_t num_slots, num_parts, max_rank, inputs, outputs, ends[MAX_PARTS];
    const int32_t* slots;
    float* hidden;  // [rows, parts, max_rank]
};

inline int lanes_of(int64_t size, int64_t at) { return size - at < LANES ? static_cast<int>(size - at) : LANES; }

// The numbers of x A^T of `RANKS` ranks.
template <class T>
void shrink(const T* x, const T* a, int64_t inputs, float* hidden) {
    vf sums[RANKS];
    for (vf& one : sums) one = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= inputs; i += LANES) {
        const vf part = load(x + i);
        for (int r = 0; r < RANKS; ++r) sums[r] = fma(part, load(a + r * inputs + i), sums[r]);
    }
    if (i < inputs) {
        const int n = lanes_of(inputs, i);
        const vf part = load(x + i, n);
        for (int r = 0; r < RANKS; ++r) sums[r] = fma(part, load(a + r * inputs + i, n), sums[r]);
    }
    for (int r = 0; r < RANKS; ++r) hidden[r] = sum(sums[r]);
}

// Outputs [from, to) of one part.
template <class T>
void expand(const float* hidden, const T* b, int64_t stride, int64_t rank, float scale, T* y, int64_t from, int64_t to) {
    int64_t at = from;
    for (; at + VECTORS * LANES <= to; at += VECTORS * LANES) {
        vf sums[VECTORS];
        for (vf& one : sums) one = splat(0.0f);
        for (int64_t r = 0; r < rank; ++r) {
            const vf number = splat(hidden[r]);
            for (int v = 0; v < VECTORS; ++v) sums[v] = fma(number, load(b + r * stride + at + v * LANES), sums[v]);
        }
        for (int v = 0; v < VECTORS; ++v) store(y + at + v * LANES, load(y + at + v * LANES) + sums[v] * scale);
    }
    for (; at < to; at += LANES) {
        const int n = lanes_of(to, at);
        vf total = splat(0.0f);
        for (int64_t r = 0; r < rank; ++r) total = fma(splat(hidden[r]), load(b + r * stride + at, n), total);
        store(y + at, load(y + at, n) + total * scale, n);
    }
}

template <class T>
void run(const LoraAdd& args) {
    static thread_local std::vector<int64_t> memory;
    int64_t* rows = at_least(memory, args.num_rows);
    int64_t num_rows = 0;
    for (int64_t t = 0; t < args.num_rows; ++t)
        if (args.slots[t] >= 0) rows[num_rows++] = t;
    if (num_rows == 0) return;
    const int64_t groups = args.max_rank / RANKS, pieces = (args.outputs + COLUMNS - 1) / COLUMNS;
    const auto* a = static_cast<const T*>(args.a);
    const auto* b = static_cast<const T*>(args.b);

    const auto shrink_item = [&](int64_t item) {
        const int64_t row = rows[item / (args.num_parts * groups)], place = item % (args.num_parts * groups);
        const int64_t part = place / groups, first = place % groups * RANKS, slot = args.slots[row];
        if (first >= args.ranks[slot * args.num_parts + part]) return;
        const T* weights = a + ((slot * args.num_parts + part) * args.max_rank + first) * args.inputs;
        float* hidden = args.hidden + (row * args.num_parts + part) * args.max_rank + first;
        shrink(static_cast<const T*>(args.x) + row * args.x_stride, weights, args.inputs, hidden);
    };
    const auto expand_item = [&](int64_t item) {
        const int64_t row = rows[item / pieces], slot = args.slots[row];
        const int64_t from = item % pieces * COLUMNS, to = std::min(args.outputs, from + COLUMNS);
        for (int64_t part = 0; part < args.num_parts; ++part) {
            const int64_t begin = std::max(from, part ? args.ends[part - 1] : 0), end = std::min(to, args.ends[part]);
            const int64_t rank = args.ranks[slot * args.num_parts + part];
            if (begin >= end || rank == 0) continue;
            expand(args.hidden + (row * args.num_parts + part) * args.max_rank, b + slot * args.max_rank * args.outputs,
                   args.outputs, rank, args.scales[slot * args.num_parts + part],
                   static_cast<T*>(args.y) + row * args.y_stride, begin, end);
        }
    };

    int64_t work = 0;
    for (int64_t i = 0; i < num_rows; ++i)
        for (int64_t part = 0; part < args.num_parts; ++part)
            work += args.ranks[args.slots[rows[i]] * args.num_parts + part] * (args.inputs + args.outputs / args.num_parts);
    if (work == 0) return;
    if (work < MIN_PARALLEL) {
        for (int64_t item = 0; item < num_rows * args.num_parts * groups; ++item) shrink_item(item);
        for (int64_t item = 0; item < num_rows * pieces; ++item) expand_item(item);
        return;
    }
    parallel_for(num_rows * args.num_parts * groups, shrink_item);
    parallel_for(num_rows * pieces, expand_item);
}

}  // namespace
}  // namespace disagg

extern "C" {

// Returns -1, or the first row whose slot is not one.
int64_t disagg_lora_add(const void* p) {
    using namespace disagg;
    const auto& args = args_as<LoraAdd>(p);
    for (int64_t t = 0; t < args.num_rows; ++t)
        if (args.slots[t] < -1 || args.slots[t] >= args.num_slots) return t;
    args.is_bf16 ? run<bf16>(args) : run<float>(args);
    return DONE;
}

}  // extern "C"
