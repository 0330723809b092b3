// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Which threads take a row that fits registers.
#include "norm/forward.cuh"
#include "norm/norm.h"

namespace ted::norm {

// forward_rows_*.cu
template <int Product>
void launch_rows(const Queue& q, const Forward& a, int x_dtype, int vectors, unsigned blocks, int threads);

namespace {

// Some vectors per thread, so that the work per row and thread, the sums over threads and the root, is small beside the
// work per element; not many, so that many rows are under way at a time: measured, 4 beats 8 and 16 at 4096 bf16.
int vectors_of(int64_t vectors) {
  return vectors <= 32 ? 1 : vectors <= 128 * 4 ? 4 : vectors <= 256 * 8 ? 8 : kMaxRowVectors;
}

int lanes_of(int64_t vectors, int of_thread) {
  if (vectors > 32 * of_thread) return static_cast<int>(ceil_div(vectors, 32 * of_thread)) * 32;
  int lanes = 1;
  while (lanes * of_thread < vectors) lanes *= 2;
  return lanes;
}

}  // namespace

void forward_in_registers(const Queue& q, Forward a, int x_dtype) {
  const int64_t row_vectors = ceil_div(a.columns * size_of(x_dtype), 16);
  const int vectors = vectors_of(row_vectors);
  a.lanes = lanes_of(row_vectors, vectors);
  const int threads = a.lanes > 32 ? a.lanes : 128;
  // Without rows one block still writes the inverse of the scale.
  const int64_t blocks = a.lanes > 32 ? a.rows : ceil_div(a.rows, threads / a.lanes);
  const unsigned grid = grid_x("x", blocks > 0 ? blocks : 1);
  switch (product_of(a)) {
    case kOnlyY: return launch_rows<kOnlyY>(q, a, x_dtype, vectors, grid, threads);
    case kOnlyE4M3: return launch_rows<kOnlyE4M3>(q, a, x_dtype, vectors, grid, threads);
    case kAnything: return launch_rows<kAnything>(q, a, x_dtype, vectors, grid, threads);
  }
}

}  // namespace ted::norm
