// Products that other kernels ask for: whole ones, and those of rows that were laid out before; see `linear.cpp`.

#pragma once

#include "product.h"

namespace disagg {

void linear(const Linear& args);

// Each way to multiply wants rows in a form of its own. Rows of several products stand in one piece of memory: each product's
// begin at a multiple of `row_alignment` rows, and row r of it is written by `lay_out_row` to where its rows begin.
int64_t row_bytes(Weights weights, int64_t depth);
int64_t row_alignment(Weights weights);
void lay_out_row(Weights weights, const void* x, int64_t depth, void* rows, int64_t r);

// Panels `first` to `end` of a product whose `x` are rows laid out, on this thread; their stride counts for nothing.
void multiply_laid_out(const Linear& args, int64_t first, int64_t end);

}  // namespace disagg
