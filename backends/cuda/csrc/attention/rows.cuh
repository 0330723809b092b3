// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Which sequence a row belongs to, and whether it sees anything.
#pragma once

#include "attention/attention.h"

namespace ted::attention {

struct Place {
  int64_t sequence;  // -1: of none
  int64_t position;  // in its sequence
};

__device__ inline int64_t length_of(const Side& side, int64_t sequence) {
  return side.cumulative == nullptr ? side.extent : side.cumulative[sequence + 1] - side.cumulative[sequence];
}

// Of row `index` of a dense side (sequence after sequence, `extent` rows each) or of a packed one.
__device__ inline Place place_of(const Side& side, int64_t batch, bool packed, int64_t index) {
  if (!packed) {
    const int64_t sequence = index / side.extent;
    const int64_t position = index - sequence * side.extent;
    return {position < length_of(side, sequence) ? sequence : -1, position};
  }
  const int32_t* starts = side.starts == nullptr ? side.cumulative : side.starts;
  int64_t low = 0, high = batch;  // the first start behind the row lies in [low, high]
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (starts[middle] <= index)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == 0) return {-1, 0};
  const int64_t sequence = low - 1;
  const int64_t position = index - starts[sequence];
  return {position < length_of(side, sequence) ? sequence : -1, position};
}

__device__ inline bool sees_nothing(const Band& band, const Side& queries, const Side& keys, const Place& place) {
  if (place.sequence < 0) return true;
  const int64_t count = length_of(keys, place.sequence);
  const int64_t diagonal = place.position + (band.bottom_right ? count - length_of(queries, place.sequence) : 0);
  const int64_t first = band.left < 0 || diagonal < band.left ? 0 : diagonal - band.left;
  const int64_t last = band.right < 0 || diagonal + band.right >= count ? count - 1 : diagonal + band.right;
  return first > last;
}

__device__ inline char* row_of(const Rows& rows, bool packed, int64_t extent, int64_t index) {
  const int64_t sequence = packed ? 0 : index / extent;
  return rows.data + sequence * rows.batch_stride + (index - sequence * extent * !packed) * rows.row_stride;
}

}  // namespace ted::attention
