// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Rotary position embedding. Contract: te_dispatch/ops/position.py.
#pragma once

#include <cstdint>

namespace ted {

// The widest rotated part whose cosines and sines fit a block's shared memory.
constexpr int64_t kMostRotated = 4096;

// x and y hold (tokens, batch, heads, head_dim) elements with the given strides in elements, 1 between features.
// cu_seqlens (sequences + 1, 0 for none) restarts positions: then batch is 1, and offsets count per sequence, else per
// batch entry. freqs has `positions` rows of `rotary_dim` angles, `freq_row` elements apart.
void rope(int device, uintptr_t stream, uintptr_t x, uintptr_t y, uintptr_t freqs, uintptr_t cu_seqlens,
          uintptr_t offsets, int64_t tokens, int64_t batch, int64_t heads, int64_t head_dim, int64_t rotary_dim,
          int64_t positions, int64_t sequences, int64_t x_token, int64_t x_batch, int64_t x_head, int64_t y_token,
          int64_t y_batch, int64_t y_head, int64_t freq_row, bool interleaved, bool backward, int dtype);

}  // namespace ted
