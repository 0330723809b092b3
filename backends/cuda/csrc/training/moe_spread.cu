// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Rows as bytes: read once per token, written once per choice.
#include "common/errors.h"
#include "common/overlap.cuh"
#include "training/training.h"

#include <algorithm>

namespace ted {

namespace {

constexpr int kThreads = 256;
constexpr int kUnits = 4;  // words in flight per thread

struct Spread {
  const void* source;
  const int32_t* row_map;
  const int64_t* filled;
  void* target;
  int64_t tokens, top_k, rows, words;
  int64_t token_blocks;
  int log_group;  // threads of one token
};

template <class Word>
__global__ void __launch_bounds__(kThreads) spread(const __grid_constant__ Spread a) {
  const int group = 1 << a.log_group, lane = threadIdx.x & (group - 1);
  Word* target = static_cast<Word*>(a.target);
  if (blockIdx.x >= a.token_blocks) {
    const int64_t step = (gridDim.x - a.token_blocks) * (kThreads >> a.log_group);
    int64_t row = (blockIdx.x - a.token_blocks) * (kThreads >> a.log_group) + (threadIdx.x >> a.log_group);
    wait_for_previous();
    for (row += *a.filled; row < a.rows; row += step)
      for (int64_t w = lane; w < a.words; w += group) target[row * a.words + w] = Word{};
    return;
  }
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads >> a.log_group) + (threadIdx.x >> a.log_group);
  if (token >= a.tokens) return;
  const Word* source = static_cast<const Word*>(a.source) + token * a.words;
  const int32_t* places = a.row_map + token * a.top_k;
  bool waited = false;
  for (int64_t first = lane; first < a.words; first += group * kUnits) {
    Word word[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
      if (first + u * group < a.words) word[u] = source[first + u * group];
    // The sort need not have ended before the first words are read.
    if (!waited) wait_for_previous();
    waited = true;
    for (int64_t c = 0; c < a.top_k; ++c) {
      const int64_t row = places[c];
      if (row < 0) continue;
      Word* to = target + row * a.words;
#pragma unroll
      for (int u = 0; u < kUnits; ++u)
        if (first + u * group < a.words) to[first + u * group] = word[u];
    }
  }
}

template <class Word>
void launch(const Queue& q, Spread a, int64_t bytes) {
  a.words = bytes / static_cast<int64_t>(sizeof(Word));
  for (a.log_group = 5; a.log_group < 8 && (kUnits << a.log_group) < a.words;) ++a.log_group;
  const int64_t together = kThreads >> a.log_group;
  a.token_blocks = ceil_div(a.tokens, together);
  // Mostly there is nothing to be zeroed, so few blocks see to it.
  const int64_t others = std::min<int64_t>(ceil_div(a.rows, together), 2 * q.limits().multiprocessors);
  launch_overlapping(q, spread<Word>, grid_x("x", a.token_blocks + others), kThreads, a);
}

}  // namespace

void moe_spread(int device, uintptr_t stream, uintptr_t source, uintptr_t row_map, uintptr_t filled, uintptr_t target,
                int64_t tokens, int64_t top_k, int64_t rows, int64_t bytes) {
  require_pointer("x", pointer<void>(source), require_count("x", tokens, bytes), 1);
  require_pointer("row_map", pointer<void>(row_map), require_count("row_map", tokens, top_k), 4);
  require_pointer("permuted", pointer<void>(target), require_count("permuted", rows, bytes), 1);
  require_pointer("filled", pointer<void>(filled), 1, 8);
  if (rows == 0 || bytes == 0) return;
  Queue q(device, stream);
  const Spread a{pointer<void>(source), pointer<int32_t>(row_map), pointer<int64_t>(filled), pointer<void>(target),
                 tokens, top_k, rows, 0, 0, 0};
  const uintptr_t all = source | target | static_cast<uintptr_t>(bytes);
  if (all % 16 == 0)
    launch<uint4>(q, a, bytes);
  else if (all % 4 == 0)
    launch<uint32_t>(q, a, bytes);
  else if (all % 2 == 0)
    launch<uint16_t>(q, a, bytes);
  else
    launch<uint8_t>(q, a, bytes);
  q.launched("moe_permute");
}

}  // namespace ted
