// Products of weights that are codes in groups, as sums of codes: see `sums.cpp`.

#pragma once

#include "product.h"

namespace disagg {

// Bytes of a row of so many inputs that is laid out: its words, then the sum of each group.
int64_t row_bytes_of_sums(int64_t depth);

// Row r of `rows` becomes x, in bf16.
void lay_out_row_of_sums(Weights weights, const bf16* x, int64_t depth, void* rows, int64_t r);

void multiply_by_sums(const Linear& args);

// The panels from `first` to `end` of rows laid out, on this thread.
void panels_by_sums(const Linear& args, int64_t first, int64_t end);

}  // namespace disagg
