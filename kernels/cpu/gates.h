// What stands between the two products of an MLP, for one row: out = activation(gate) * up, rounded where the torch references
// round between two ops. `out` may be `gate`.

#pragma once

#include "vec.h"

namespace disagg {

// As the values of `kernels/routing.py: Activation`; `alpha` and `limit` are of CLAMPED_SWIGLU.
enum class Gate : int64_t { SILU = 0, GELU_TANH = 1, CLAMPED_SWIGLU = 2 };

// NaN stays NaN.
inline vf not_above(vf x, float limit) { return -max(splat(-limit), -x); }
inline vf not_below(vf x, float limit) { return max(splat(limit), x); }

template <class T>
vf silu(vf x) {
    return rounded<T>(x / (1.0f + exp(-x)));
}

// x / 2 * (1 + tanh(y)) = x / (1 + e^-2y), y = sqrt(2 / pi) * (x + 0.044715 x^3).
template <class T>
vf gelu_tanh(vf x) {
    const vf inner = fma(x * x * x, splat(0.044715f), x) * splat(-2.0f * 0.79788456080286536f);
    return rounded<T>(x / (1.0f + exp(inner)));
}

template <class T>
vf clamped_swiglu(vf gate, vf up, float alpha, float limit) {
    gate = not_above(gate, limit);
    up = not_above(not_below(up, -limit), limit);
    const vf sigmoid = rounded<T>(splat(1.0f) / (1.0f + exp(-rounded<T>(gate * alpha))));
    return rounded<T>(up + splat(1.0f)) * rounded<T>(gate * sigmoid);
}

// `body(load_gate, load_up)` of sixteen numbers at a time gives the outputs.
template <class T, class Body>
void gate_row_by(const T* gate, const T* up, T* out, int64_t size, Body body) {
    for (int64_t i = 0; i < size; i += LANES) {
        const int n = size - i < LANES ? static_cast<int>(size - i) : LANES;
        store(out + i, body(load(gate + i, n), load(up + i, n)), n);
    }
}

template <class T>
void gate_row(Gate kind, float alpha, float limit, const T* gate, const T* up, T* out, int64_t size) {
    if (kind == Gate::SILU) return gate_row_by(gate, up, out, size, [](vf g, vf u) { return silu<T>(g) * u; });
    if (kind == Gate::GELU_TANH) return gate_row_by(gate, up, out, size, [](vf g, vf u) { return gelu_tanh<T>(g) * u; });
    gate_row_by(gate, up, out, size, [=](vf g, vf u) { return clamped_swiglu<T>(g, u, alpha, limit); });
}

}  // namespace disagg
