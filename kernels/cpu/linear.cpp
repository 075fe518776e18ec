// Linear layers: products of rows and packed weights (`panels.h`), at every level of processors.
//
//   bf16, int8    matrix tiles (AMX), any number of rows           tiles.h     sums of 32 inputs at a time
//                 pairs of bf16 (AVX512-BF16; int8 with VBMI)      pairs.h     sums of pairs, in order
//   bf16          products of matrices of bf16 (Arm's BFMMLA)      bfmmla.h    sums of four inputs at a time
//   any           fp32 multiply-adds                               fma.h       one input after the other
//
// Weights are bf16, codes in groups that stand for bf16 numbers and are multiplied as those (groups.h, codes.cpp) or as sums of codes
// (sums.cpp), int8 with a scale for each column, or fp32. Up to a tile of rows read a panel once, in order; more rows are
// several tiles on each panel. Each output is one chain of fp32 sums along K, in the order that its way has: a row's result does
// not depend on the rows beside it, and is the same on all processors that take the same way.
// Threads take panels. Rows that would share few cache sets are copied further apart first. Strides in elements, rows of x and of
// the output contiguous.
//
// Loops over sums are unrolled by name: the compiler then keeps them in registers alone, without a second copy on the stack.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "bfmmla.h"
#include "calls.h"
#include "elementwise.h"
#include "fma.h"
#include "linear.h"
#include "pairs.h"
#include "scratch.h"
#include "sums.h"
#include "thread_pool.h"
#include "tiles.h"

namespace disagg {
namespace {

// Rows that lie a multiple of CACHE_WAY bytes apart share the few places of the first-level cache that one address may have (of
// 64 sets of lines, one), and a tile of CROWD of them pushes its own rows out.
constexpr int64_t CACHE_WAY = 4096;
constexpr int64_t CROWD = 8;

// Whether weights of this kind are multiplied as pairs of bf16, by matrix tiles or not.
constexpr bool are_pairs([[maybe_unused]] Weights weights) {
#if defined(DISAGG_INT8_PAIRS)
    return weights != Weights::FP32 && !are_sums(weights);
#elif defined(__AVX512BF16__)
    return weights == Weights::BF16 || are_codes(weights);
#else
    return false;
#endif
}

#ifdef __AVX512BF16__

void panels_of_pairs(const Linear& args, int64_t first, int64_t end) {
#ifdef __AMX_BF16__
    if (tiles_are_usable()) return panels_by_tiles(args, first, end);
#endif
    if (are_codes(args.weights)) return panels_of_codes_by_pairs(args, first, end);
#ifdef DISAGG_INT8_PAIRS
    if (args.weights == Weights::INT8) return panels_by_pairs<int8_t>(args, first, end, panel_of_int8);
#endif
    panels_by_pairs<bf16>(args, first, end, panel_of_bf16);
}

void panels_in_runs(const Linear& args) {
    parallel_for_dynamic(args.num_panels(), PANELS_A_RUN, [&](int64_t first, int64_t end) { panels_of_pairs(args, first, end); });
}

bool is_crowded(const Linear& args) {
    const int64_t tiles = num_tiles(args.num_rows, MAX_ROWS), stride_bytes = args.x_stride * static_cast<int64_t>(sizeof(bf16));
    return args.num_rows >= CROWD * tiles && args.x_stride >= args.depth && stride_bytes % CACHE_WAY == 0;
}

// The same GEMM of copies of the rows, a line further apart.
void spread(const Linear& args) {
    constexpr int64_t WAY = CACHE_WAY / sizeof(bf16), SPACE = LINE / sizeof(bf16);
    static thread_local std::vector<bf16> memory;
    Linear block = args;
    block.x_stride = (args.depth + WAY - 1) / WAY * WAY + SPACE;
    for (int64_t first = 0; first < args.num_rows; first += COPIED_ROWS) {
        block.num_rows = std::min(COPIED_ROWS, args.num_rows - first);
        bf16* copies = at_least(memory, block.num_rows * block.x_stride);
        parallel_for(block.num_rows, [&](int64_t r) {
            std::copy_n(static_cast<const bf16*>(args.x) + (first + r) * args.x_stride, args.depth, copies + r * block.x_stride);
        });
        block.x = copies;
        block.out = static_cast<bf16*>(args.out) + first * args.out_stride;
        panels_in_runs(block);
    }
}

// Rows laid out are as they are, a line further apart where they would crowd a cache.
struct Pairs {
    static constexpr int64_t ALIGNMENT = 1;

    static int64_t stride(int64_t depth) {
        constexpr int64_t LINE_NUMBERS = LINE / sizeof(bf16), WAY = CACHE_WAY / sizeof(bf16);
        const int64_t whole = (depth + LINE_NUMBERS - 1) / LINE_NUMBERS * LINE_NUMBERS;
        return whole % WAY == 0 ? whole + LINE_NUMBERS : whole;
    }
    static int64_t row_bytes(int64_t depth) { return stride(depth) * static_cast<int64_t>(sizeof(bf16)); }
    static void lay_out(const void* x, int64_t depth, void* rows, int64_t r) {
        std::copy_n(static_cast<const bf16*>(x), depth, static_cast<bf16*>(rows) + r * stride(depth));
    }
    static void multiply(const Linear& args) { is_crowded(args) ? spread(args) : panels_in_runs(args); }
    static void panels(const Linear& args, int64_t first, int64_t end) {
        Linear laid_out = args;
        laid_out.x_stride = stride(args.depth);
        panels_of_pairs(laid_out, first, end);
    }
};

#endif

#ifdef DISAGG_BFMMLA

struct RowsOfBfmmla {
    static constexpr int64_t ALIGNMENT = 2;

    static int64_t row_bytes(int64_t depth) { return num_groups(depth) * QUAD * static_cast<int64_t>(sizeof(bf16)); }
    static void lay_out(const void* x, int64_t depth, void* rows, int64_t r) {
        put_row_of_pair(static_cast<const bf16*>(x), depth, static_cast<bf16*>(rows), r);
    }
    static void multiply(const Linear& args) { multiply_by_bfmmla(args); }
    static void panels(const Linear& args, int64_t first, int64_t end) {
        const RowPairs x{static_cast<const bf16*>(args.x), num_groups(args.depth), (args.depth + 1) / 2};
        panels_by_bfmmla(args, x, first, end);
    }
};

#endif

template <class T, class Source>
struct MultiplyAdds {
    static constexpr int64_t ALIGNMENT = 1;

    static int64_t row_bytes(int64_t depth) { return wide_stride(depth) * static_cast<int64_t>(sizeof(float)); }
    static void lay_out(const void* x, int64_t depth, void* rows, int64_t r) {
        const int64_t stride = wide_stride(depth);
        widen_row(static_cast<const T*>(x), depth, static_cast<float*>(rows) + r * stride, stride);
    }
    static void multiply(const Linear& args) { multiply_by_fma<T, Source>(args); }
    static void panels(const Linear& args, int64_t first, int64_t end) {
        panels_by_fma<T, Source>(args, {static_cast<const float*>(args.x), wide_stride(args.depth), (args.depth + 1) / 2}, first, end);
    }
};

// Weights that are codes, as sums of codes; of this kind of them.
struct SumsOfCodes {
    static constexpr int64_t ALIGNMENT = 1;
    Weights weights;

    static int64_t row_bytes(int64_t depth) { return row_bytes_of_sums(depth); }
    void lay_out(const void* x, int64_t depth, void* rows, int64_t r) const {
        lay_out_row_of_sums(weights, static_cast<const bf16*>(x), depth, rows, r);
    }
    static void multiply(const Linear& args) { multiply_by_sums(args); }
    static void panels(const Linear& args, int64_t first, int64_t end) { panels_by_sums(args, first, end); }
};

// `body` with the way in which weights of this kind are multiplied.
template <class Body>
auto with_way(Weights weights, Body body) {
    if (are_sums(weights)) return body(SumsOfCodes{weights});
#ifdef __AVX512BF16__
    if (are_pairs(weights)) return body(Pairs{});
#endif
#ifdef DISAGG_BFMMLA
    if (weights == Weights::BF16 || are_codes(weights)) return body(RowsOfBfmmla{});
#else
    if constexpr (!are_pairs(Weights::BF16)) {
        if (weights == Weights::BF16) return body(MultiplyAdds<bf16, Bf16Inputs>{});
        if (are_codes(weights)) return body(MultiplyAdds<bf16, CodeInputs>{});
    }
#endif
    if constexpr (!are_pairs(Weights::INT8))
        if (weights == Weights::INT8) return body(MultiplyAdds<bf16, Int8Inputs>{});
    return body(MultiplyAdds<float, Fp32Inputs>{});
}

// `body` with a null pointer to the type of rows and outputs.
template <class Body>
void with_type(const Linear& args, Body body) {
    args.weights == Weights::FP32 ? body(static_cast<float*>(nullptr)) : body(static_cast<bf16*>(nullptr));
}

struct LinearActivation {
    Linear product;
    void* out;
};

struct LinearAddRmsNorm {
    Linear product;
    const void* residual;
    int64_t residual_stride;
    const void* norm;
    float eps;
    int32_t plus_one;
    void* out;
};

}  // namespace

void linear(const Linear& args) {
    with_way(args.weights, [&](auto way) { way.multiply(args); });
}

int64_t row_bytes(Weights weights, int64_t depth) {
    return with_way(weights, [=](auto way) { return way.row_bytes(depth); });
}

int64_t row_alignment(Weights weights) {
    return with_way(weights, [](auto way) { return way.ALIGNMENT; });
}

void lay_out_row(Weights weights, const void* x, int64_t depth, void* rows, int64_t r) {
    with_way(weights, [=](auto way) { way.lay_out(x, depth, rows, r); });
}

void multiply_laid_out(const Linear& args, int64_t first, int64_t end) {
    with_way(args.weights, [&](auto way) { way.panels(args, first, end); });
}

}  // namespace disagg

extern "C" {

// How int8 weights have to be ordered: 1 as pairs of sign and magnitude, 0 as they are; see `panels.h`.
int64_t disagg_int8_pairs() { return disagg::are_pairs(disagg::Weights::INT8); }

// How codes have to be ordered: 1 for pairs, 0 one input after the other; see `groups.h`.
int64_t disagg_code_pairs() { return disagg::are_pairs(disagg::Weights::CODES8); }

// How a model with weights of a kind is computed: results of the same arithmetic have the same bits.
const char* disagg_arithmetic(int64_t kind) {
    using namespace disagg;
    [[maybe_unused]] const auto weights = static_cast<Weights>(kind);
#ifdef DISAGG_BFMMLA
    if (weights == Weights::BF16) return "bfmmla";
#endif
#ifdef __AVX512BF16__
    if (weights != Weights::FP32) {  // attention is of pairs, whatever the weights are
        if (!are_pairs(weights)) return "avx512-bf16, int8 by fma";
#ifdef __AMX_BF16__
        if (tiles_are_usable()) return "amx";
#endif
        return "avx512-bf16";
    }
#endif
#ifdef DISAGG_FMA
    return "fma";
#else
    return "multiply-add";
#endif
}

// out = x @ weight.T (times the scale of the column) + bias, rounded once.
int64_t disagg_linear(const void* args) {
    disagg::linear(disagg::args_as<disagg::Linear>(args));
    return disagg::DONE;
}

// out = silu(gate) * up of the GEMM's output, which is left in product.out.
int64_t disagg_linear_silu_mul(const void* p) {
    const auto& args = disagg::args_as<disagg::LinearActivation>(p);
    const disagg::Linear& product = args.product;
    disagg::linear(product);
    disagg::with_type(product, [&](auto* type) {
        using T = decltype(type);
        disagg::silu_mul_rows(static_cast<T>(product.out), product.num_columns, static_cast<T>(args.out), product.num_rows,
                              product.num_columns / 2);
    });
    return disagg::DONE;
}

// out = gelu(gate) * up of the GEMM's output, which is left in product.out.
int64_t disagg_linear_gelu_tanh_mul(const void* p) {
    const auto& args = disagg::args_as<disagg::LinearActivation>(p);
    const disagg::Linear& product = args.product;
    disagg::linear(product);
    disagg::with_type(product, [&](auto* type) {
        using T = decltype(type);
        disagg::gelu_tanh_mul_rows(static_cast<T>(product.out), product.num_columns, static_cast<T>(args.out), product.num_rows,
                                   product.num_columns / 2);
    });
    return disagg::DONE;
}

// The GEMM's output y becomes y + residual, vector by vector; out = its RMS norm.
int64_t disagg_linear_add_rms_norm(const void* p) {
    const auto& args = disagg::args_as<disagg::LinearAddRmsNorm>(p);
    const disagg::Linear& product = args.product;
    disagg::linear(product);
    disagg::with_type(product, [&](auto* type) {
        using T = decltype(type);
        disagg::add_rms_norm_rows(static_cast<T>(product.out), product.num_columns, static_cast<const std::remove_pointer_t<T>*>(args.residual),
                                  args.residual_stride, static_cast<const std::remove_pointer_t<T>*>(args.norm), static_cast<T>(args.out),
                                  static_cast<T>(product.out), product.num_rows, product.num_columns, args.eps, args.plus_one);
    });
    return disagg::DONE;
}

}  // extern "C"
