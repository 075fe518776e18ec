// What other kernels do with their rows once they have computed them; see `elementwise.cpp`.

#pragma once

#include "vec.h"

namespace disagg {

// out[t] = silu(gate) * up, where row t of `gate_up` holds `size` gates, then `size` ups.
template <class T>
void silu_mul_rows(const T* gate_up, int64_t stride, T* out, int64_t num_tokens, int64_t size);

// out[t] = gelu(gate) * up, with the approximation by tanh; rows as above.
template <class T>
void gelu_tanh_mul_rows(const T* gate_up, int64_t stride, T* out, int64_t num_tokens, int64_t size);

// new_residual = x + residual; out = its RMS norm times the weight, or one more than it. `new_residual` may be `x`.
template <class T>
void add_rms_norm_rows(const T* x, int64_t x_stride, const T* residual, int64_t residual_stride, const T* weight, T* out,
                       T* new_residual, int64_t num_tokens, int64_t size, float eps, bool plus_one);

}  // namespace disagg
