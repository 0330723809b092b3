// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The sums of a matrix product, in double precision.
#pragma once

#include "amd.h"

#include <cstdint>

namespace host {

// An operand as (outer, k): the element (i, l) stands at data[i * outer_stride + l * k_stride]. `block_scales`, if given,
// holds one byte E8M0 for 32 elements along k: that of (i, l) at [i * block_outer_stride + l / 32 * block_k_stride]. `tf32`
// rounds elements of fp32 to 10 bits of mantissa.
struct Operand {
  hipDataType type;
  const void* data;
  int64_t outer_stride, k_stride;
  const uint8_t* block_scales = nullptr;
  int64_t block_outer_stride = 0, block_k_stride = 0;
  bool tf32 = false;
};

// sums[i + j * m] = the sum over l of a(i, l) * b(j, l). Every product is exact; the sum goes through l = 0, 1, ... for
// each element by itself, so it depends neither on m, n nor on the element's place.
void multiply(int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b, double* sums);

// sums[i] = the sum over l of a(i, l), in the same order.
void sum_rows(int64_t m, int64_t k, const Operand& a, double* sums);

}  // namespace host
