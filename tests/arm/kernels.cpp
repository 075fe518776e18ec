// The compiled kernels through their C ABI, without Python: results against sums in double, and a digest of each for a
// comparison with another kind of processor. Prints `name digest` lines; a line `FAILED ...` and status 1 where one is wrong.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

extern "C" {
int64_t disagg_embed(const void*);
int64_t disagg_rms_norm(const void*);
int64_t disagg_add_rms_norm(const void*);
int64_t disagg_silu_mul(const void*);
int64_t disagg_argmax(const void*);
int64_t disagg_draw(const void*);
int64_t disagg_qkv_rope_write(const void*);
int64_t disagg_decode_attention(const void*);
int64_t disagg_prefill_attention(const void*);
int64_t disagg_linear(const void*);
int64_t disagg_linear_silu_mul(const void*);
int64_t disagg_linear_add_rms_norm(const void*);
int64_t disagg_linear_by_head(const void*);
int64_t disagg_moe_ffn(const void*);
int64_t disagg_moe_scratch(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
int64_t disagg_int8_pairs();
const char* disagg_arithmetic(int64_t);
void disagg_set_num_threads(int64_t);
}

namespace {

bool failed = false;

void fail(const std::string& what) {
    std::printf("FAILED %s\n", what.c_str());
    failed = true;
}

// A struct of arguments, each where the compiler of the kernels expects it.
class Args {
   public:
    template <class... Fields>
    explicit Args(Fields... fields) {
        (put(fields), ...);
    }
    const void* data() const { return bytes_.data(); }

   private:
    template <class Field>
    void put(Field field) {
        bytes_.resize((bytes_.size() + sizeof field - 1) / sizeof field * sizeof field + sizeof field);
        std::memcpy(bytes_.data() + bytes_.size() - sizeof field, &field, sizeof field);
    }
    std::vector<char> bytes_;
};

template <class... Fields>
void call(int64_t (*function)(const void*), Fields... fields) {
    if (function(Args(fields...).data()) != -1) fail("a call was refused");
}

using i32 = int32_t;
using i64 = int64_t;

struct bf16 {
    uint16_t bits;
    bf16() : bits(0) {}
    bf16(float x) {
        uint32_t word;
        std::memcpy(&word, &x, sizeof word);
        bits = static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
    }
    operator float() const {
        const uint32_t word = static_cast<uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &word, sizeof x);
        return x;
    }
};

// Numbers in [-1, 1), the same on every machine.
class Numbers {
   public:
    explicit Numbers(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
    uint64_t next() {
        state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
        return state_;
    }
    template <class T>
    std::vector<T> many(i64 count) {
        std::vector<T> found(count);
        for (T& each : found) each = T(static_cast<float>(static_cast<i64>(next() >> 40)) / (1 << 23) - 1.0f);
        return found;
    }

   private:
    uint64_t state_;
};

template <class T>
void digest(const std::string& name, const std::vector<T>& numbers) {
    uint64_t hash = 0xcbf29ce484222325ull;
    const auto* bytes = reinterpret_cast<const unsigned char*>(numbers.data());
    for (size_t i = 0; i < numbers.size() * sizeof(T); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    std::printf("%s %016llx\n", name.c_str(), static_cast<unsigned long long>(hash));
}

template <class T>
void expect_close(const std::string& name, const T* found, const double* expected, i64 count) {
    const double tolerance = sizeof(T) == 2 ? 1.0 / 128 : 1e-5;
    for (i64 i = 0; i < count; ++i)
        if (!(std::fabs(float(found[i]) - expected[i]) <= tolerance * std::fmax(1.0, std::fabs(expected[i])))) {
            std::printf("%g is not %g at %lld\n", float(found[i]), expected[i], static_cast<long long>(i));
            return fail(name);
        }
}

// ---------------------------------------------------------------- products

enum Kind { BF16 = 0, INT8 = 1, FP32 = 2 };

// [N / 32][K / 2][64], as `kernels/cpu/linear.py` packs it where int8 numbers are in order.
template <class Number>
std::vector<Number> packed(const std::vector<Number>& weight, i64 n, i64 k, bool by_pairs) {
    std::vector<Number> panels((n + 31) / 32 * ((k + 1) / 2) * 64);
    for (i64 c = 0; c < n; ++c)
        for (i64 i = 0; i < k; ++i) {
            const i64 pair = (c / 32 * ((k + 1) / 2) + i / 2) * 64, column = c % 32;
            panels[pair + (by_pairs ? 2 * column + i % 2 : i % 2 * 32 + column)] = weight[c * k + i];
        }
    return panels;
}

struct Shape {
    i64 n, k;
};

template <class T, class Number>
void products(Kind kind, const std::string& name) {
    for (const Shape shape : {Shape{100, 577}, Shape{33, 31}, Shape{70, 64}, Shape{1, 1}}) {
        Numbers random(shape.n + shape.k);
        std::vector<Number> weight;
        if constexpr (sizeof(Number) == 1)
            for (i64 i = 0; i < shape.n * shape.k; ++i) weight.push_back(static_cast<int8_t>(random.next() % 255 - 127));
        else
            weight = random.many<Number>(shape.n * shape.k);
        const float divide = std::sqrt(static_cast<float>(shape.k)) * (kind == INT8 ? 127.0f : 1.0f);
        std::vector<float> scales(shape.n, kind == INT8 ? 1.0f / divide : 1.0f);
        const auto bias = random.many<T>(shape.n);
        const auto panels = packed(weight, shape.n, shape.k, kind == BF16);
        const i64 most = 40, stride = shape.k + 3;
        const auto x = random.many<T>(most * stride);
        std::vector<T> alone(most * shape.n);
        const auto multiply = [&](i64 first, i64 rows, T* out) {
            call(disagg_linear, i32(kind), x.data() + first * stride, stride, rows, panels.data(),
                 kind == INT8 ? scales.data() : nullptr, shape.n, shape.k, bias.data(), out, shape.n);
        };
        for (i64 r = 0; r < most; ++r) multiply(r, 1, alone.data() + r * shape.n);
        std::vector<double> expected(most * shape.n);
        for (i64 r = 0; r < most; ++r)
            for (i64 c = 0; c < shape.n; ++c) {
                double sum = 0.0;
                for (i64 i = 0; i < shape.k; ++i) sum += double(float(x[r * stride + i])) * double(float(weight[c * shape.k + i]));
                expected[r * shape.n + c] = sum * double(scales[c]) + double(float(bias[c]));
            }
        const std::string what = name + " " + std::to_string(shape.n) + "x" + std::to_string(shape.k);
        const double largest = kind == INT8 ? 1.0 : std::sqrt(static_cast<double>(shape.k));
        for (double& each : expected) each /= largest;
        std::vector<T> smaller(alone.size());
        for (size_t i = 0; i < alone.size(); ++i) smaller[i] = T(static_cast<float>(float(alone[i]) / largest));
        expect_close(what, smaller.data(), expected.data(), most * shape.n);
        digest(what, alone);
        for (const i64 threads : {1, 3}) {
            disagg_set_num_threads(threads);
            for (const i64 rows : {2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 40}) {
                std::vector<T> together(rows * shape.n);
                multiply(0, rows, together.data());
                if (std::memcmp(together.data(), alone.data(), together.size() * sizeof(T)) != 0)
                    fail(what + ": a row depends on the rows beside it, with " + std::to_string(rows));
            }
        }
        disagg_set_num_threads(1);
    }
}

// ---------------------------------------------------------------- the other ops

template <class T>
void small_ops(const std::string& name) {
    const i32 is_bf16 = sizeof(T) == 2;
    const i64 rows = 5, size = 90;
    Numbers random(7);
    const auto x = random.many<T>(rows * size), residual = random.many<T>(rows * size), weight = random.many<T>(size);
    std::vector<T> out(rows * size), total(rows * size), half(rows * size / 2);
    call(disagg_rms_norm, is_bf16, x.data(), size, i64(0), weight.data(), out.data(), rows, i64(1), size, 1e-5f, i32(0));
    digest(name + " rms_norm", out);
    call(disagg_add_rms_norm, is_bf16, x.data(), size, residual.data(), size, weight.data(), out.data(), total.data(), rows, size,
         1e-5f, i32(0));
    digest(name + " add_rms_norm", out);
    digest(name + " sum", total);
    call(disagg_silu_mul, is_bf16, x.data(), size, half.data(), rows, size / 2);
    digest(name + " silu_mul", half);
    std::vector<double> expected;
    for (i64 r = 0; r < rows; ++r)
        for (i64 i = 0; i < size / 2; ++i) {
            const double gate = float(x[r * size + i]), up = float(x[r * size + size / 2 + i]);
            expected.push_back(gate / (1.0 + std::exp(-gate)) * up);
        }
    expect_close(name + " silu_mul", half.data(), expected.data(), rows * size / 2);
    std::vector<i64> ids(rows), drawn(rows);
    call(disagg_argmax, is_bf16, x.data(), size, rows, size, ids.data());
    digest(name + " argmax", ids);
    const std::vector<float> temperatures(rows, 0.7f);
    const std::vector<double> at = {0.0, 0.3, 0.5, 0.9, 0.999};
    call(disagg_draw, is_bf16, x.data(), size, rows, size, temperatures.data(), at.data(), drawn.data());
    digest(name + " draw", drawn);
    for (i64 r = 0; r < rows; ++r)
        for (i64 i = 0; i < size; ++i)
            if (float(x[r * size + i]) > float(x[r * size + ids[r]])) fail(name + " argmax");
    std::vector<T> looked_up(rows * size);
    call(disagg_embed, ids.data(), i64(0), x.data(), rows, i64(size * sizeof(T)), i64(size * sizeof(T)), looked_up.data());
}

template <class T>
void attention(const std::string& name, i64 dim) {
    const i32 is_bf16 = sizeof(T) == 2;
    const i64 heads = 6, kv_heads = 2, block = 16, num_blocks = 40, rows = 40, most = 639;
    Numbers random(dim);
    const i64 block_stride = kv_heads * block * dim;
    auto keys = random.many<T>(num_blocks * block_stride), values = random.many<T>(num_blocks * block_stride);
    const auto table = random.many<T>(700 * dim), qkv = random.many<T>(5 * (heads + 2 * kv_heads) * dim);
    const auto q_norm = random.many<T>(dim), k_norm = random.many<T>(dim);
    const std::vector<i64> slots = {3, 600, 17, 18, -1};
    std::vector<i64> positions = {3, 600, 17, 18, 5};
    std::vector<T> rotated(5 * heads * dim);
    const void* nothing = nullptr;
    call(disagg_qkv_rope_write, is_bf16, qkv.data(), (heads + 2 * kv_heads) * dim, i64(5), heads, kv_heads, dim, dim, q_norm.data(),
         k_norm.data(), 1e-5f, i32(0), i32(0), nothing, positions.data(), table.data(), table.data(), i64(700), nothing, keys.data(),
         values.data(), block_stride, num_blocks, block, heads * dim, kv_heads * dim, slots.data(), rotated.data());
    digest(name + " rope", rotated);
    digest(name + " keys", keys);
    std::vector<i32> blocks(num_blocks), tables;
    for (i64 i = 0; i < num_blocks; ++i) blocks[i] = static_cast<i32>(i * 7 % num_blocks);
    for (int i = 0; i < 3; ++i) tables.insert(tables.end(), blocks.begin(), blocks.end());
    const std::vector<i32> lengths = {1, static_cast<i32>(most), 17};
    const auto q = random.many<T>(rows * heads * dim);
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim)), soft_cap = 0.0f;
    const i64 window = i64(1) << 62;
    std::vector<T> out(3 * heads * dim), prompt(rows * heads * dim);
    call(disagg_decode_attention, is_bf16, q.data(), heads * dim, dim, keys.data(), values.data(), block_stride, num_blocks,
         kv_heads, block, tables.data(), num_blocks, num_blocks, lengths.data(), i64(3), heads, dim, dim, scale, soft_cap,
         window, nothing, out.data());
    digest(name + " decode", out);
    call(disagg_prefill_attention, is_bf16, static_cast<i32>(dim), static_cast<i32>(dim), q.data(), heads * dim, dim, keys.data(),
         values.data(), block_stride, num_blocks, kv_heads, block, blocks.data(), i64(300), rows, heads, scale, soft_cap, window, nothing,
         prompt.data());
    digest(name + " prefill", prompt);

    const auto expected = [&](const T* query, i64 head, i64 length) {
        std::vector<double> weights(length), sums(dim);
        double top = -1e30, total = 0.0;
        const auto at = [&](i64 t) { return blocks[t / block] * block_stride + (head / (heads / kv_heads) * block + t % block) * dim; };
        for (i64 t = 0; t < length; ++t) {
            for (i64 d = 0; d < dim; ++d) weights[t] += double(float(query[d])) * double(float(keys[at(t) + d]));
            weights[t] *= scale;
            top = std::fmax(top, weights[t]);
        }
        for (double& weight : weights) total += weight = std::exp(weight - top);
        for (i64 t = 0; t < length; ++t)
            for (i64 d = 0; d < dim; ++d) sums[d] += weights[t] / total * double(float(values[at(t) + d]));
        return sums;
    };
    for (i64 s = 0; s < 3; ++s)
        for (i64 h = 0; h < heads; ++h)
            expect_close(name + " decode", &out[(s * heads + h) * dim], expected(&q[(s * heads + h) * dim], h, lengths[s]).data(), dim);
    for (i64 r = 0; r < rows; r += 13)
        for (i64 h = 0; h < heads; ++h)
            expect_close(name + " prefill", &prompt[(r * heads + h) * dim], expected(&q[(r * heads + h) * dim], h, 300 + r + 1).data(),
                         dim);
}

template <class T>
void fused(Kind kind, const std::string& name) {
    const i32 is_bf16 = sizeof(T) == 2;
    const i64 n = 70, k = 40, rows = 13;
    Numbers random(3);
    const auto weight = random.many<T>(n * k), x = random.many<T>(rows * k), residual = random.many<T>(rows * n), norm = random.many<T>(n);
    const auto panels = packed(weight, n, k, kind == BF16);
    const T* none = nullptr;
    std::vector<T> product(rows * n), out(rows * n / 2), expected(rows * n / 2);
    call(disagg_linear_silu_mul, i32(kind), x.data(), k, rows, panels.data(), none, n, k, none, product.data(), n, out.data());
    call(disagg_silu_mul, is_bf16, product.data(), n, expected.data(), rows, n / 2);
    if (std::memcmp(out.data(), expected.data(), out.size() * sizeof(T)) != 0) fail(name + " silu_mul of a product");
    std::vector<T> total(rows * n), normed(rows * n), wanted(rows * n), wanted_total(rows * n);
    call(disagg_linear_add_rms_norm, i32(kind), x.data(), k, rows, panels.data(), none, n, k, none, total.data(), n, residual.data(), n,
         norm.data(), 1e-5f, i32(0), normed.data());
    call(disagg_add_rms_norm, is_bf16, product.data(), n, residual.data(), n, norm.data(), wanted.data(), wanted_total.data(), rows, n,
         1e-5f, i32(0));
    if (std::memcmp(normed.data(), wanted.data(), normed.size() * sizeof(T)) != 0) fail(name + " norm of a product");
    if (std::memcmp(total.data(), wanted_total.data(), total.size() * sizeof(T)) != 0) fail(name + " sum of a product");
}

// Heads with weights of their own: the bits of a product of each head's rows.
template <class T>
void by_head(Kind kind, const std::string& name) {
    const i64 heads = 3, n = 70, k = 41, rows = 13;
    Numbers random(7);
    const auto x = random.many<T>(rows * heads * k);
    std::vector<T> panels, found(rows * heads * n), alone(rows * n);
    for (i64 h = 0; h < heads; ++h) {
        const auto part = packed(random.many<T>(n * k), n, k, kind == BF16);
        panels.insert(panels.end(), part.begin(), part.end());
    }
    const T* none = nullptr;
    call(disagg_linear_by_head, i32(kind), x.data(), heads * k, rows, panels.data(), none, n, k, none, found.data(), heads * n, heads, k);
    for (i64 h = 0; h < heads; ++h) {
        const T* of_head = panels.data() + h * static_cast<i64>(panels.size()) / heads;
        call(disagg_linear, i32(kind), x.data() + h * k, heads * k, rows, of_head, none, n, k, none, alone.data(), n);
        for (i64 r = 0; r < rows; ++r)
            if (std::memcmp(found.data() + (r * heads + h) * n, alone.data() + r * n, n * sizeof(T)) != 0) fail(name + " product by head");
    }
    digest(name + " by head", found);
}

// ---------------------------------------------------------------- experts

// Two of five experts by sigmoids, the weights divided by their sum, and a result that is shared.
template <class T>
void experts(Kind kind, const std::string& name) {
    const i64 num_rows = 9, hidden = 45, inner = 21, num_experts = 5, top_k = 2;
    Numbers numbers(31);
    const auto x = numbers.many<T>(num_rows * hidden), shared = numbers.many<T>(num_rows * hidden);
    const auto router = numbers.many<float>(num_experts * hidden);
    const auto gate_up = numbers.many<T>(num_experts * 2 * inner * hidden), down = numbers.many<T>(num_experts * hidden * inner);
    std::vector<T> packed_gate_up, packed_down, out(num_rows * hidden);
    for (i64 e = 0; e < num_experts; ++e) {
        const auto part = [&](const std::vector<T>& all, i64 n, i64 k) {
            return packed(std::vector<T>(all.begin() + e * n * k, all.begin() + (e + 1) * n * k), n, k, kind == BF16);
        };
        const auto one = part(gate_up, 2 * inner, hidden), two = part(down, hidden, inner);
        packed_gate_up.insert(packed_gate_up.end(), one.begin(), one.end());
        packed_down.insert(packed_down.end(), two.begin(), two.end());
    }
    const auto packed_router = packed(router, num_experts, hidden, false);
    std::vector<i64> counts(num_experts);
    std::vector<char> scratch(disagg_moe_scratch(kind, num_rows, hidden, inner, num_experts, top_k, num_experts) + 64);
    char* memory = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64);
    const void* none = nullptr;
    call(disagg_moe_ffn, i32(kind), x.data(), hidden, num_rows, hidden, inner, packed_router.data(), none, none, num_experts, top_k,
         i64(2), i64(1), i64(1), i64(0), i64(1), 1.0f, i64(0), num_experts, packed_gate_up.data(), none, none, packed_down.data(),
         none, none, i64(0), 0.0f, 0.0f, shared.data(), none, counts.data(), memory, out.data());
    std::vector<double> expected(num_rows * hidden);
    for (i64 t = 0; t < num_rows; ++t) {
        const T* row = x.data() + t * hidden;
        std::vector<double> scores(num_experts);
        for (i64 e = 0; e < num_experts; ++e) {
            double logit = 0;
            for (i64 i = 0; i < hidden; ++i) logit += double(float(row[i])) * router[e * hidden + i];
            scores[e] = 1 / (1 + std::exp(-logit));
        }
        i64 first = 0, second = -1;
        for (i64 e = 1; e < num_experts; ++e)
            if (scores[e] > scores[first]) first = e;
        for (i64 e = 0; e < num_experts; ++e)
            if (e != first && (second < 0 || scores[e] > scores[second])) second = e;
        for (i64 i = 0; i < hidden; ++i) expected[t * hidden + i] = float(shared[t * hidden + i]);
        for (const i64 e : {first, second}) {
            std::vector<double> gated(inner);
            for (i64 f = 0; f < inner; ++f) {
                double gate = 0, up = 0;
                for (i64 i = 0; i < hidden; ++i) {
                    gate += double(float(row[i])) * float(gate_up[(e * 2 * inner + f) * hidden + i]);
                    up += double(float(row[i])) * float(gate_up[(e * 2 * inner + inner + f) * hidden + i]);
                }
                gated[f] = gate / (1 + std::exp(-gate)) * up;
            }
            for (i64 i = 0; i < hidden; ++i) {
                double result = 0;
                for (i64 f = 0; f < inner; ++f) result += gated[f] * float(down[(e * hidden + i) * inner + f]);
                expected[t * hidden + i] += scores[e] / (scores[first] + scores[second]) * result;
            }
            --counts[e];
        }
    }
    std::vector<T> smaller(out.size());  // an expert's numbers are rounded before they are added up
    for (size_t i = 0; i < out.size(); ++i) smaller[i] = T(float(out[i]) / 8), expected[i] /= 8;
    expect_close(name, smaller.data(), expected.data(), num_rows * hidden);
    for (const i64 count : counts)
        if (count != 0) fail(name + ": counters");
    digest(name, out);
}

}  // namespace

int main() {
    for (const int kind : {BF16, INT8, FP32}) std::printf("arithmetic %d %s\n", kind, disagg_arithmetic(kind));
    products<bf16, bf16>(BF16, "bf16 product");
    if (!disagg_int8_pairs()) products<bf16, int8_t>(INT8, "int8 product");
    products<float, float>(FP32, "fp32 product");
    fused<bf16>(BF16, "bf16");
    fused<float>(FP32, "fp32");
    by_head<bf16>(BF16, "bf16");
    by_head<float>(FP32, "fp32");
    small_ops<bf16>("bf16");
    small_ops<float>("fp32");
    experts<bf16>(BF16, "bf16 experts");
    experts<float>(FP32, "fp32 experts");
    for (const i64 dim : {16, 64, 80, 128, 72}) {
        attention<bf16>("bf16 attention " + std::to_string(dim), dim);
        attention<float>("fp32 attention " + std::to_string(dim), dim);
    }
    return failed;
}
