// Products of weights that are codes in groups (`groups.h`), as sums of codes that are scaled by group: other bits than those of the bf16
// numbers that the codes stand for, and less work for a weight.
//
//   total = 0; for each group of 32 inputs, in order:
//     total = scale * sum(code * x) + (offset * sum(x) + total)
//
// The offset is the minimum, or -zero * scale, rounded to fp32; without one, total = scale * sum(code * x) + total. Both lines are two
// multiply-adds. sum(code * x) is one chain of fp32 multiply-adds along the inputs, from zero: the same bits with AVX2, AVX-512 and NEON.
// Where pairs of bf16 are multiplied (AVX512-BF16, with matrix tiles or not) it is a chain of sums of pairs; of 4 bits of codes + 128, and
// the offset is less by 128 * scale, rounded to fp32. sum(x) is a tree: the first half of a group plus the second one, then as
// `sum` of sixteen lanes. So a row's result does not depend on the rows beside it.
//
// A row is laid out as words, one input or a pair, behind which the sums of its groups stand. Codes of 4 bits are multiplied where
// they stand in their words, by inputs that are as much smaller: exact for inputs from 2^-118 on.
//
// All tiles of rows take codes from their panel, which stays in the cache: to unpack them once for several tiles was slower, with 8 to 128
// rows. Sums of a group are in registers, totals in memory.

#include "sums.h"

#include <algorithm>
#include <vector>

#include "fma.h"
#include "scratch.h"
#include "thread_pool.h"
#include "words.h"

namespace disagg {
namespace {

// Lets the compiler know nothing of what is there: else it keeps all constants and totals of a loop in registers, and sums on the stack.
template <class T>
[[gnu::always_inline]] inline void keep_in_memory(T*& at) {
    asm volatile("" : "+r"(at));
}

constexpr int64_t MAX_SUM_ROWS = MAX_FMA_ROWS;

#ifdef __AVX512BF16__

constexpr int64_t INPUTS = 2;  // of a word

inline vr splat_word(const Word* x) { return (vr)(vru{} + *x); }
inline vr madd(vr acc, vr x, vr codes) { return (vr)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)codes); }

// The steps of one group: pairs of codes as bf16.
template <class CODES>
struct CodeSteps {
    static constexpr int NIBBLES = 4;
    static constexpr int64_t BYTES = CODES::BYTES;
    static constexpr float ADDED = CODES::ARE_4_BITS ? 128.0f : 0.0f;

    static const char* begin(const char* group, int64_t column) { return group + CODES::HEADER + column * (CODES::ARE_4_BITS ? 4 : 2); }

    // Calls `use(step, code)`, in order; `code(at, v)` is a register of the group whose codes begin at `at`.
    template <class Use>
    [[gnu::always_inline]] static void each(Use use) {
        if constexpr (CODES::ARE_4_BITS) {
            for (int64_t four = 0; four < GROUP / 2 / NIBBLES; ++four) nibbles(four, use, std::make_integer_sequence<int, NIBBLES>{});
        } else {
            for (int64_t step = 0; step < GROUP / 2; ++step)
                use(step, [&](const char* at, int v) {
                    const auto part = [&](int half) {
                        const auto* bytes = reinterpret_cast<const __m128i*>(at + step * 2 * COLUMNS + v * 2 * LANES + half * LANES);
                        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
                    };
                    return (vr)_mm512_cvtne2ps_pbh(part(1), part(0));
                });
        }
    }

   private:
    template <class Use, int... N>
    [[gnu::always_inline]] static void nibbles(int64_t four, Use use, std::integer_sequence<int, N...>) {
        (use(four * NIBBLES + N,
             [&](const char* at, int v) {
                 vru words;
                 std::memcpy(&words, at + four * 4 * COLUMNS + v * 4 * LANES, sizeof words);
                 return (vr)((words >> (4 * N) & 0x000f000fu) | 0x43004300u);
             }),
         ...);
    }
};

inline void lay_out_words(const bf16* x, int64_t depth, bool, Word* words) { std::memcpy(words, x, depth * sizeof(bf16)); }

#else

constexpr int64_t INPUTS = 1;

inline vr splat_word(const Word* x) {
    float number;
    std::memcpy(&number, x, sizeof number);
    return splat_register(number);
}
inline vr madd(vr acc, vr x, vr codes) { return fma(x, codes, acc); }

constexpr int BLOCKS = 4, NIBBLES = GROUP / BLOCKS;
constexpr uint32_t NIBBLE_MASKS[NIBBLES] = {15u, 15u << 4, 15u << 8, 15u << 12, 15u << 16, 15u << 20, 15u << 24, 15u << 28};

// The steps of one group: codes as fp32, of 4 bits times a power of two.
template <class CODES>
struct CodeSteps {
    static constexpr int64_t BYTES = CODES::BYTES;
    static constexpr float ADDED = 0.0f;

    static const char* begin(const char* group, int64_t column) { return group + CODES::HEADER + column * (CODES::ARE_4_BITS ? 4 : 1); }

    // Calls `use(step, code)`, in order; `code(at, v)` is a register of the group whose codes begin at `at`.
    template <class Use>
    [[gnu::always_inline]] static void each(Use use) {
        if constexpr (CODES::ARE_4_BITS)
            nibbles(use, std::make_integer_sequence<int, NIBBLES>{});
        else
            for (int64_t step = 0; step < GROUP; ++step)
                use(step, [&](const char* at, int v) {
                    return load_register(reinterpret_cast<const int8_t*>(at) + step * COLUMNS + v * REGISTER_LANES);
                });
    }

   private:
    template <class Use, int... N>
    [[gnu::always_inline]] static void nibbles(Use use, std::integer_sequence<int, N...>) {
        (nibble<N>(use), ...);
    }

    template <int N, class Use>
    [[gnu::always_inline]] static void nibble(Use use) {
        constexpr bool IS_LAST = N == NIBBLES - 1;  // its bits would be a sign
        const uint32_t* place = &NIBBLE_MASKS[N];
        keep_in_memory(place);
        const vru mask = vru{} + *place;
        for (int64_t block = 0; block < BLOCKS; ++block)
            use(N * BLOCKS + block, [&](const char* at, int v) {
                vru words;
                std::memcpy(&words, at + block * 4 * COLUMNS + v * 4 * REGISTER_LANES, sizeof words);
                return __builtin_convertvector((vri)(IS_LAST ? words >> (4 * N) : words & mask), vr);
            });
    }
};

// The reciprocals of the powers of two.
constexpr float FACTORS[NIBBLES] = {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f};

inline void lay_out_words(const bf16* x, int64_t depth, bool are_4_bits, Word* words) {
    auto* numbers = reinterpret_cast<float*>(words);
    alignas(64) float factors[GROUP];
    for (int64_t i = 0; i < GROUP; ++i) factors[i] = are_4_bits ? FACTORS[i / BLOCKS] : 1.0f;
    for (int64_t k = 0; k < depth; k += LANES) store(numbers + k, load(x + k) * load(factors + k % GROUP));
}

#endif

constexpr int64_t STEPS = GROUP / INPUTS;

// Rows laid out.
struct SumRows {
    const Word* at;
    int64_t stride, num_groups;

    const Word* row(int64_t r) const { return at + r * stride; }
};

int64_t words_of(int64_t depth) { return round_up(depth / INPUTS, LANES); }

// In words, an odd number of lines.
int64_t sums_stride(int64_t depth) { return wide_stride(words_of(depth) + depth / GROUP); }

// AT_ONCE groups of ROWS rows, from group `g` on, of the columns from `column` on. Codes of the first one begin at `codes`, scales at
// `header`.
template <class CODES, int ROWS, int VECS, int AT_ONCE>
[[gnu::always_inline]] inline void add_groups(SumRows x, int64_t g, const char* header, const char* codes, int64_t column,
                                              float (*totals)[COLUMNS]) {
    using Steps = CodeSteps<CODES>;
    vr acc[AT_ONCE][ROWS][VECS];
#pragma GCC unroll 4
    for (int a = 0; a < AT_ONCE; ++a)
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < VECS; ++v) acc[a][r][v] = vr{};
    const Word* rows[ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) rows[r] = x.row(r) + g * STEPS;
    Steps::each([&](int64_t step, auto code) __attribute__((always_inline)) {
        keep_in_memory(codes);
#pragma GCC unroll 4
        for (int a = 0; a < AT_ONCE; ++a) {
            if constexpr (ROWS < VECS) {
                vr inputs[ROWS];
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) inputs[r] = splat_word(rows[r] + a * STEPS + step);
#pragma GCC unroll 8
                for (int v = 0; v < VECS; ++v) {
                    const vr weights = code(codes + a * Steps::BYTES, v);
#pragma GCC unroll 12
                    for (int r = 0; r < ROWS; ++r) acc[a][r][v] = madd(acc[a][r][v], inputs[r], weights);
                }
            } else {
                vr weights[VECS];
#pragma GCC unroll 8
                for (int v = 0; v < VECS; ++v) weights[v] = code(codes + a * Steps::BYTES, v);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    const vr input = splat_word(rows[r] + a * STEPS + step);
#pragma GCC unroll 8
                    for (int v = 0; v < VECS; ++v) acc[a][r][v] = madd(acc[a][r][v], input, weights[v]);
                }
            }
        }
    });
    constexpr bool HAS_OFFSET = CODES::OF != Offset::NONE || Steps::ADDED != 0.0f;
    keep_in_memory(totals);
    const auto* sums = reinterpret_cast<const float*>(x.at + x.num_groups * STEPS) + g;
#pragma GCC unroll 4
    for (int a = 0; a < AT_ONCE; ++a) {
        Scales scales[VECS];
#pragma GCC unroll 8
        for (int v = 0; v < VECS; ++v) {
            scales[v] = load_scales<CODES>(header + a * CODES::BYTES, column + v * REGISTER_LANES);
            if constexpr (Steps::ADDED != 0.0f) scales[v].offset = scales[v].offset - scales[v].scale * splat_register(Steps::ADDED);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const vr of_inputs = splat_register(sums[r * x.stride + a]);
#pragma GCC unroll 8
            for (int v = 0; v < VECS; ++v) {
                float* at = totals[r] + v * REGISTER_LANES;
                vr total = load_register(at);
                if constexpr (HAS_OFFSET) total = fma(scales[v].offset, of_inputs, total);
                store_register(at, fma(scales[v].scale, acc[a][r][v], total));
            }
        }
    }
}

template <class CODES, int ROWS>
[[gnu::noinline]] void tile(SumRows x, const char* panel, int64_t column, float (*totals)[COLUMNS]) {
    constexpr int VECS = fma_columns(ROWS) / REGISTER_LANES;
    constexpr int AT_ONCE = std::max(8 / (ROWS * VECS), 1);  // chains enough that none is waited for
    using Steps = CodeSteps<CODES>;
    for (int r = 0; r < ROWS; ++r) std::fill_n(totals[r], fma_columns(ROWS), 0.0f);
    int64_t g = 0;
    for (; g + AT_ONCE <= x.num_groups; g += AT_ONCE, panel += AT_ONCE * CODES::BYTES)
        add_groups<CODES, ROWS, VECS, AT_ONCE>(x, g, panel, Steps::begin(panel, column), column, totals);
    for (; g < x.num_groups; ++g, panel += CODES::BYTES)
        add_groups<CODES, ROWS, VECS, 1>(x, g, panel, Steps::begin(panel, column), column, totals);
}

// The outputs of one panel, whose codes stay in the cache.
template <class CODES>
void panel_of_sums(const Linear& args, const SumRows& x, int64_t column, const char* panel) {
    alignas(64) float totals[MAX_SUM_ROWS][COLUMNS];
    const int64_t tiles = num_tiles(args.num_rows, MAX_SUM_ROWS), columns = fma_columns((args.num_rows + tiles - 1) / tiles);
    for (int64_t at = 0; at < COLUMNS; at += columns)
        for (int64_t t = 0; t < tiles; ++t) {
            const TileRows rows = rows_of(t, tiles, args.num_rows);
            const SumRows of_tile{x.row(rows.first), x.stride, x.num_groups};
            prefetch_outputs<bf16>(args, rows, column + at);
            with_constant<MAX_SUM_ROWS>(rows.count, [&](auto count) { tile<CODES, decltype(count)::value>(of_tile, panel, at, totals); });
            finish<bf16>(args, rows.first, static_cast<int>(rows.count), column + at, static_cast<int>(columns / LANES),
                         [&](int r, int v) { return load(totals[r] + v * LANES); });
        }
}

// `body` with the codes of weights of this kind.
template <class Body>
auto with_codes_of_sums(Weights weights, Body body) {
    if (weights == Weights::SUMS8) return body(Codes<8, Offset::NONE>{});
    if (weights == Weights::SUMS4_ZERO) return body(Codes<4, Offset::ZERO>{});
    return body(Codes<4, Offset::MINIMUM>{});
}

}  // namespace

int64_t row_bytes_of_sums(int64_t depth) { return sums_stride(depth) * static_cast<int64_t>(sizeof(Word)); }

void lay_out_row_of_sums(Weights weights, const bf16* x, int64_t depth, void* rows, int64_t r) {
    Word* words = static_cast<Word*>(rows) + r * sums_stride(depth);
    lay_out_words(x, depth, weights != Weights::SUMS8, words);
    for (int64_t k = 0; k < depth; k += GROUP) {
        const float of_group = sum(load(x + k) + load(x + k + LANES));
        std::memcpy(words + depth / INPUTS + k / GROUP, &of_group, sizeof of_group);
    }
}

void panels_by_sums(const Linear& args, int64_t first, int64_t end) {
    if (args.num_rows == 0) return;
    const SumRows x{static_cast<const Word*>(args.x), sums_stride(args.depth), args.depth / GROUP};
    with_codes_of_sums(args.weights, [&](auto codes) {
        using CODES = decltype(codes);
        const int64_t bytes = x.num_groups * CODES::BYTES;
        for (int64_t p = first; p < end; ++p) {
            const char* panel = static_cast<const char*>(args.packed) + p * bytes;
            panel_of_sums<CODES>(args, x, p * COLUMNS, panel);
        }
    });
}

void multiply_by_sums(const Linear& args) {
    static thread_local std::vector<vf> memory;
    const int64_t stride = sums_stride(args.depth);
    Linear block = args;
    for (int64_t first = 0; first < args.num_rows; first += COPIED_ROWS) {
        block.num_rows = std::min(COPIED_ROWS, args.num_rows - first);
        block.out = static_cast<bf16*>(args.out) + first * args.out_stride;
        void* rows = at_least(memory, block.num_rows * stride / LANES);
        block.x = rows;
        const auto lay_out = [&](int64_t r) {
            lay_out_row_of_sums(args.weights, static_cast<const bf16*>(args.x) + (first + r) * args.x_stride, args.depth, rows, r);
        };
        if (block.num_rows * args.depth < MIN_PARALLEL_NUMBERS)
            for (int64_t r = 0; r < block.num_rows; ++r) lay_out(r);
        else
            parallel_for(block.num_rows, lay_out);
        parallel_for_dynamic(args.num_panels(), PANELS_A_RUN, [&](int64_t p, int64_t end) { panels_by_sums(block, p, end); });
    }
}

}  // namespace disagg
