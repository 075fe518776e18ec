// A layer of experts: the experts of each row, their MLPs, and the sum of their results, in one call.
//
//   1 the router's product in fp32, and the experts of each row                 routing.h
//   2 rows sorted by expert, each in as many places as it has experts here      counting sort, stable
//   3 gate and up: the product of each expert's rows with its own weights       linear.h
//   4 the activation                                                            gates.h
//   5 down: as 3
//   6 of each row, the sum of its experts' results times their weights, by expert, then what is shared; rounded once
//
// Threads take panels of one expert after the other: however uneven the experts are, all have work. Each output is one chain along
// K, and the sum of a row is in the order of its experts: its bits do not depend on the rows beside it. All that differs from
// step to step lies in memory, so the call can be made again. Weights of all experts stand one behind the other.
//
// A rank may have some of the experts only: the others add nothing here.

#include <algorithm>

#include "calls.h"
#include "gates.h"
#include "linear.h"
#include "routing.h"
#include "thread_pool.h"

namespace disagg {
namespace {

struct MoeFfn {
    Weights weights;
    const void* x;
    int64_t x_stride, num_rows, hidden, inner;
    const void* router;  // packed, fp32
    const float *router_bias, *choice_bias;  // may be null
    int64_t num_experts, top_k;
    Score score;
    int64_t groups, top_groups;
    GroupScore group_score;
    int64_t renormalizes;
    float scale;
    int64_t first_expert, num_local;
    const void* gate_up;
    const float* gate_up_scales;  // of int8, else null
    const void* gate_up_bias;     // may be null
    const void* down;
    const float* down_scales;
    const void* down_bias;
    Gate gate;
    float alpha, limit;
    const void* shared;       // a result of each row, may be null
    const void* shared_gate;  // its sigmoid of a product with the row is the result's weight; may be null
    int64_t* counts;          // of rows of each expert, added to; may be null
    char* scratch;
    void* out;

    int64_t num_slots() const { return num_rows * top_k; }
};

struct Sizes {
    Weights weights;
    int64_t num_rows, hidden, inner, num_experts, top_k, num_local;
};

// Pieces of the scratch memory.
class Scratch {
   public:
    Scratch(const Sizes& s, char* memory) : at_(memory) {
        const int64_t slots = s.num_rows * s.top_k, alignment = row_alignment(s.weights);
        const int64_t places = slots + (alignment - 1) * std::min(slots, s.num_local);
        const int64_t number = s.weights == Weights::FP32 ? 4 : 2;
        logits = take<float>(s.num_rows * s.num_experts);
        ids = take<int32_t>(slots);
        row_weights = take<float>(slots);
        place_of_slot = take<int32_t>(slots);
        first_place = take<int32_t>(s.num_local);
        count = take<int32_t>(s.num_local);
        used = take<int32_t>(s.num_local);
        rows = take<char>(std::max(places * row_bytes(s.weights, s.hidden), s.num_rows * s.hidden * static_cast<int64_t>(sizeof(float))));
        gate_up = take<char>(places * 2 * s.inner * number);
        gated = take<char>(places * row_bytes(s.weights, s.inner));
        end_ = at_;
    }

    float* logits;
    int32_t* ids;             // of each slot: row * top_k + i
    float* row_weights;       // of each slot
    int32_t* place_of_slot;   // or -1 where the expert is not here
    int32_t *first_place, *count;  // of each expert here
    int32_t* used;            // the experts that have rows
    char* rows;               // first in fp32, then laid out by place, then the results by place
    char* gate_up;            // by place; the first half of a row becomes its activation
    char* gated;              // activations laid out by place

    int64_t bytes(const char* memory) const { return end_ - memory; }

   private:
    template <class Number>
    Number* take(int64_t count) {
        char* taken = at_;
        at_ += (count * static_cast<int64_t>(sizeof(Number)) + LINE - 1) / LINE * LINE;
        return reinterpret_cast<Number*>(taken);
    }

    char *at_, *end_ = nullptr;
};

int64_t panel_bytes(const Linear& all) {
    if (are_codes(all.weights))
        return with_codes(all.weights, [&](auto codes) { return all.depth / GROUP * decltype(codes)::BYTES; });
    return all.panel_size() * (all.weights == Weights::FP32 ? 4 : all.weights == Weights::BF16 ? 2 : 1);
}

template <class T>
class Step {
   public:
    explicit Step(const MoeFfn& args)
        : args_(args),
          scratch_({args.weights, args.num_rows, args.hidden, args.inner, args.num_experts, args.top_k, args.num_local}, args.scratch) {}

    void run() {
        if (args_.num_rows == 0) return;
        find_experts();
        sort_rows();
        each_place(args_.hidden, [&](int64_t slot, int64_t first, int64_t r) {
            const T* x = static_cast<const T*>(args_.x) + slot / args_.top_k * args_.x_stride;
            lay_out_row(args_.weights, x, args_.hidden, scratch_.rows + first * row_bytes(args_.weights, args_.hidden), r);
        });
        multiply({args_.weights, scratch_.rows, 0, 0, args_.gate_up, args_.gate_up_scales, 2 * args_.inner, args_.hidden,
                  args_.gate_up_bias, scratch_.gate_up, 2 * args_.inner});
        each_place(args_.inner, [&](int64_t, int64_t first, int64_t r) {
            T* gate = reinterpret_cast<T*>(scratch_.gate_up) + (first + r) * 2 * args_.inner;
            gate_row(args_.gate, args_.alpha, args_.limit, gate, gate + args_.inner, gate, args_.inner);
            lay_out_row(args_.weights, gate, args_.inner, scratch_.gated + first * row_bytes(args_.weights, args_.inner), r);
        });
        multiply({args_.weights, scratch_.gated, 0, 0, args_.down, args_.down_scales, args_.hidden, args_.inner, args_.down_bias,
                  scratch_.rows, args_.hidden});
        for_rows(args_.num_rows, args_.hidden * args_.top_k, [&](int64_t row) { add_up(row); });
    }

   private:
    template <class Body>
    static void for_rows(int64_t num_rows, int64_t size, Body body) {
        if (num_rows * size < MIN_PARALLEL_NUMBERS)
            for (int64_t row = 0; row < num_rows; ++row) body(row);
        else
            parallel_for(num_rows, body);
    }

    // `body(slot, place of its expert's first row, number of its row there)` for each slot whose expert is here.
    template <class Body>
    void each_place(int64_t size, Body body) {
        for_rows(args_.num_slots(), size, [&](int64_t slot) {
            if (scratch_.place_of_slot[slot] < 0) return;
            const int64_t first = scratch_.first_place[scratch_.ids[slot] - args_.first_expert];
            body(slot, first, scratch_.place_of_slot[slot] - first);
        });
    }

    void find_experts() {
        float* wide = reinterpret_cast<float*>(scratch_.rows);
        const int64_t hidden = args_.hidden, experts = args_.num_experts;
        for_rows(args_.num_rows, hidden, [&](int64_t row) {
            const T* x = static_cast<const T*>(args_.x) + row * args_.x_stride;
            for (int64_t i = 0; i < hidden; i += LANES) {
                const int n = hidden - i < LANES ? static_cast<int>(hidden - i) : LANES;
                store(wide + row * hidden + i, load(x + i, n), n);
            }
        });
        linear({Weights::FP32, wide, hidden, args_.num_rows, args_.router, nullptr, experts, hidden, args_.router_bias, scratch_.logits, experts});
        const Routing routing{experts, args_.top_k, args_.score, args_.groups, args_.top_groups, args_.group_score,
                              args_.renormalizes != 0, args_.scale, args_.choice_bias};
        for_rows(args_.num_rows, experts * args_.top_k, [&](int64_t row) {
            const int64_t slot = row * args_.top_k;
            route(routing, scratch_.logits + row * experts, scratch_.ids + slot, scratch_.row_weights + slot);
        });
    }

    void sort_rows() {
        const int64_t local = args_.num_local, alignment = row_alignment(args_.weights);
        std::fill_n(scratch_.count, local, 0);
        for (int64_t slot = 0; slot < args_.num_slots(); ++slot) {
            const int64_t expert = scratch_.ids[slot] - args_.first_expert;
            const bool is_here = expert >= 0 && expert < local;
            scratch_.place_of_slot[slot] = is_here ? scratch_.count[expert]++ : -1;
            if (args_.counts) ++args_.counts[scratch_.ids[slot]];
        }
        int64_t place = 0;
        num_used_ = 0;
        for (int64_t expert = 0; expert < local; ++expert) {
            scratch_.first_place[expert] = static_cast<int32_t>(place);
            if (scratch_.count[expert] == 0) continue;
            scratch_.used[num_used_++] = static_cast<int32_t>(expert);
            place += (scratch_.count[expert] + alignment - 1) / alignment * alignment;
        }
        for (int64_t slot = 0; slot < args_.num_slots(); ++slot)
            if (scratch_.place_of_slot[slot] >= 0)
                scratch_.place_of_slot[slot] += scratch_.first_place[scratch_.ids[slot] - args_.first_expert];
    }

    // `all` is a product of all experts: weights, scales and biases begin with those of expert 0, rows and outputs with place 0.
    void multiply(const Linear& all) {
        const int64_t panels = all.num_panels(), weight_bytes = panels * panel_bytes(all);
        const auto of_expert = [&](int64_t expert) {
            const int64_t place = scratch_.first_place[expert], columns = expert * all.num_columns;
            Linear one = all;
            one.num_rows = scratch_.count[expert];
            one.x = static_cast<const char*>(all.x) + place * row_bytes(all.weights, all.depth);
            one.packed = static_cast<const char*>(all.packed) + expert * weight_bytes;
            one.scales = all.scales ? all.scales + columns : nullptr;
            one.bias = all.bias ? static_cast<const T*>(all.bias) + columns : nullptr;
            one.out = static_cast<T*>(all.out) + place * all.num_columns;
            return one;
        };
        parallel_for_dynamic(num_used_ * panels, PANELS_A_RUN, [&](int64_t item, int64_t end) {
            while (item < end) {
                const int64_t first = item % panels, last = std::min(panels, first + end - item);
                multiply_laid_out(of_expert(scratch_.used[item / panels]), first, last);
                item += last - first;
            }
        });
    }

    float weight_of_shared(int64_t row) {
        if (!args_.shared_gate) return 1.0f;
        const T* x = static_cast<const T*>(args_.x) + row * args_.x_stride;
        const T* gate = static_cast<const T*>(args_.shared_gate);
        vf products = splat(0.0f);
        for (int64_t i = 0; i < args_.hidden; i += LANES) {
            const int n = args_.hidden - i < LANES ? static_cast<int>(args_.hidden - i) : LANES;
            products = fma(load(x + i, n), load(gate + i, n), products);
        }
        const vf weight = splat(1.0f) / (1.0f + exp(splat(-sum(products))));
        return weight[0];
    }

    void add_up(int64_t row) {
        const T *results = reinterpret_cast<const T*>(scratch_.rows), *shared = static_cast<const T*>(args_.shared);
        const int64_t hidden = args_.hidden, slot = row * args_.top_k;
        const float shared_weight = shared ? weight_of_shared(row) : 0.0f;
        for (int64_t i = 0; i < hidden; i += LANES) {
            const int n = hidden - i < LANES ? static_cast<int>(hidden - i) : LANES;
            vf total = splat(0.0f);
            for (int64_t k = slot; k < slot + args_.top_k; ++k)
                if (const int64_t place = scratch_.place_of_slot[k]; place >= 0)
                    total = fma(load(results + place * hidden + i, n), splat(scratch_.row_weights[k]), total);
            if (shared) total = fma(load(shared + row * hidden + i, n), splat(shared_weight), total);
            store(static_cast<T*>(args_.out) + row * hidden + i, total, n);
        }
    }

    const MoeFfn& args_;
    Scratch scratch_;
    int64_t num_used_ = 0;
};

}  // namespace
}  // namespace disagg

extern "C" {

// Bytes of scratch memory that `disagg_moe_ffn` needs, on a line's boundary.
int64_t disagg_moe_scratch(int64_t weights, int64_t num_rows, int64_t hidden, int64_t inner, int64_t num_experts, int64_t top_k,
                           int64_t num_local) {
    const auto kind = static_cast<disagg::Weights>(weights);
    return disagg::Scratch({kind, num_rows, hidden, inner, num_experts, top_k, num_local}, nullptr).bytes(nullptr);
}

// out = the sum of what each row's experts give.
int64_t disagg_moe_ffn(const void* p) {
    using namespace disagg;
    const auto& args = args_as<MoeFfn>(p);
    args.weights == Weights::FP32 ? Step<float>(args).run() : Step<bf16>(args).run();
    return DONE;
}

}  // extern "C"
