// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "attention/attention.h"

namespace ted::attention {

namespace {

__global__ void sequences_kernel(const Sequences a) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < a.zero_count) a.zeros[i] = 0.f;
  if (i > a.batch) return;
  const Side* sides[2] = {&a.queries, &a.keys};
  int32_t* lengths[2] = {a.query_lengths, a.key_lengths};
  int64_t starts[2] = {0, 0};
  for (int s = 0; s < 2; ++s) {
    const Side& side = *sides[s];
    if (lengths[s] != nullptr && i < a.batch)
      lengths[s][i] = side.cumulative == nullptr ? static_cast<int32_t>(side.extent)
                                                 : side.cumulative[i + 1] - side.cumulative[i];
    const int32_t* first = side.starts == nullptr ? side.cumulative : side.starts;
    if (first != nullptr) starts[s] = first[i];
  }
  for (int r = 0; r < a.rows; ++r)
    a.offsets[r * (a.batch + 1) + i] = starts[a.of_keys >> r & 1] * a.elements[r];
}

}  // namespace

void sequences(const Queue& q, const Sequences& a) {
  constexpr int kThreads = 128;
  const int64_t threads = a.batch + 1 > a.zero_count ? a.batch + 1 : a.zero_count;
  sequences_kernel<<<grid_x("batch", ceil_div(threads, kThreads)), kThreads, 0, q.stream()>>>(a);
}

}  // namespace ted::attention
