// Products of the rows of each head with the head's own weight: y[t][n] = weight[n] x[t][n]. Weights of all heads stand one behind
// the other, packed as experts' are; each product is that of `linear.cpp`, so an output is one chain along K, whatever is beside it.
//
// Threads take whole heads, or panels of one head after the other where heads are few. Each lays out a head's rows for itself.

#include <algorithm>
#include <vector>

#include "calls.h"
#include "linear.h"
#include "scratch.h"
#include "thread_pool.h"

namespace disagg {
namespace {

// Heads for each thread from which threads take whole ones.
constexpr int64_t MANY_HEADS = 4;

struct LinearByHead {
    Linear first;  // the product of head 0
    int64_t num_heads, x_head_stride;
};

struct alignas(64) Line {
    char bytes[LINE];
};

template <class T>
void run(const LinearByHead& args) {
    const Linear& first = args.first;
    const int64_t panels = first.num_panels(), weight_size = panels * first.panel_size();
    const int64_t run_length = args.num_heads >= MANY_HEADS * num_threads() ? panels : PANELS_A_RUN;
    Linear block = first;
    for (int64_t row = 0; row < first.num_rows; row += COPIED_ROWS) {
        block.num_rows = std::min(COPIED_ROWS, first.num_rows - row);
        block.x = static_cast<const T*>(first.x) + row * first.x_stride;
        block.out = static_cast<T*>(first.out) + row * first.out_stride;
        parallel_for_dynamic(args.num_heads * panels, run_length, [&](int64_t item, int64_t end) {
            static thread_local std::vector<Line> memory;
            const int64_t places = (block.num_rows + row_alignment(block.weights) - 1) / row_alignment(block.weights);
            const int64_t bytes = places * row_alignment(block.weights) * row_bytes(block.weights, block.depth);
            char* rows = at_least(memory, (bytes + LINE - 1) / LINE)->bytes;
            while (item < end) {
                const int64_t head = item / panels, from = item % panels, to = std::min(panels, from + end - item);
                Linear one = block;
                const T* x = static_cast<const T*>(block.x) + head * args.x_head_stride;
                for (int64_t r = 0; r < block.num_rows; ++r) lay_out_row(block.weights, x + r * block.x_stride, block.depth, rows, r);
                one.x = rows;
                one.packed = static_cast<const T*>(block.packed) + head * weight_size;
                one.out = static_cast<T*>(block.out) + head * block.num_columns;
                multiply_laid_out(one, from, to);
                item += to - from;
            }
        });
    }
}

}  // namespace
}  // namespace disagg

extern "C" {

// Weights in bf16 or fp32, as rows and outputs.
int64_t disagg_linear_by_head(const void* p) {
    using namespace disagg;
    const auto& args = args_as<LinearByHead>(p);
    args.first.weights == Weights::FP32 ? run<float>(args) : run<bf16>(args);
    return DONE;
}

}  // extern "C"
