// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Part of cast/tensor.cuh: kernels that read a matrix as a line of vectors.
#pragma once

namespace ted {
namespace tensor_cast {

constexpr int64_t kRunVectors = kThreads * kInFlight;  // of one block at a time

// The matrix as rows of `per_row` vectors, the last of each row perhaps partial.
struct Line {
  int64_t per_row, total;
  int64_t full;  // vectors from the start that are all whole
  bool wide;     // whole vectors may be stored whole

  struct Place {
    int64_t row, vector;  // of the row
  };
  __device__ __forceinline__ Place locate(int64_t vector) const {
    if (per_row == total) return {0, vector};
    if (total <= 0x7fffffff) {
      const uint32_t row = static_cast<uint32_t>(vector) / static_cast<uint32_t>(per_row);
      return {row, static_cast<uint32_t>(vector) - row * static_cast<uint32_t>(per_row)};
    }
    const int64_t row = vector / per_row;
    return {row, vector - row * per_row};
  }
  // kThreads vectors on: a division for each would cost more than some sources' arithmetic.
  __device__ __forceinline__ void advance(Place& at) const {
    at.vector += kThreads;
    if (at.vector < per_row) return;
    const uint32_t rows = per_row >= kThreads ? 1 : static_cast<uint32_t>(at.vector) / static_cast<uint32_t>(per_row);
    at.row += rows;
    at.vector -= rows * per_row;
  }
};

template <class Source>
Line line_of(const Source& source, bool wide) {
  Line line;
  const int64_t rows = source.rows(), columns = span_of(source);
  line.per_row = ceil_div(columns, kVector);
  line.total = rows * line.per_row;
  line.full = !source.aligned() ? 0 : rows == 1 ? columns / kVector : columns % kVector == 0 ? line.total : 0;
  line.wide = wide;
  return line;
}

// f(values, half, row, column, valid) for every vector of the block's run. Full: all of them are whole.
template <bool Full, class Source, class F>
__device__ __forceinline__ void for_run(const Source& source, const Line& line, int64_t start, F&& f) {
  constexpr int kHalves = HalvesOf<Source>::value;
  if constexpr (Full) {
    typename Source::template Raw<kVector> raw[kInFlight];
    int64_t row[kInFlight], column[kInFlight];
    Line::Place at = line.locate(start + threadIdx.x);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (u > 0) line.advance(at);
      row[u] = at.row, column[u] = at.vector * kVector;
      raw[u] = source.template fetch<kVector, true>(row[u], column[u], kVector);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      Values v[kHalves];
      evaluate(source, raw[u], v);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) f(v[h], h, row[u], column[u], int64_t{kVector});
    }
  } else {
#pragma unroll 1
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t vector = start + u * kThreads + threadIdx.x;
      if (vector >= line.total) return;
      const Line::Place at = line.locate(vector);
      const int64_t row = at.row, column = at.vector * kVector;
      const int64_t valid = min(span_of(source) - column, int64_t{kVector});
      Values v[kHalves];
      evaluate(source, source.template fetch<kVector, false>(row, column, valid), v);
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        clear_invalid(v[h], valid);
        f(v[h], h, row, column, valid);
      }
    }
  }
}

template <class Source>
__global__ void __launch_bounds__(kThreads) cast_rows(Source source, TensorCast cast, Line line) {
  __shared__ float shared[kThreads / 32];
  if (cast.noop != nullptr && *cast.noop != 0.0f) return;
  source.begin();
  const Encoder encoder = encoder_of(cast, shared);
  const int64_t start = visit(cast) * kRunVectors;
  const int64_t columns = source.columns(), span = span_of(source);
  float found = 0.0f;
  const auto run = [&](auto full) {
    constexpr bool kFull = decltype(full)::value;
    for_run<kFull>(source, line, start, [&](const Values& v, int half, int64_t row, int64_t column, int64_t valid) {
      const int64_t at = row * columns + half * span + column;
      found = max_magnitude(found, v);
      if (cast.out != nullptr) store_values<kFull>(cast.out, cast.out_dtype, at, v, valid);
      if (cast.row != nullptr) store_codes<kFull>(cast.row + at, encoder(v), valid);
    });
  };
  if (line.wide && start + kRunVectors <= line.full)
    run(std::true_type{});
  else
    run(std::false_type{});
  record_amax(cast.amax, found, shared);
}

template <class Source>
__global__ void __launch_bounds__(kThreads) find_maxima(Source source, Line line, float* maxima, float* amax,
                                                        const float* noop) {
  __shared__ float shared[kThreads / 32];
  let_next_start();
  if (noop != nullptr && *noop != 0.0f) return;
  source.begin();
  float found = 0.0f;
  for (int64_t start = blockIdx.x * kRunVectors; start < line.total; start += gridDim.x * kRunVectors) {
    const auto keep = [&](const Values& v, int, int64_t, int64_t, int64_t) { found = max_magnitude(found, v); };
    if (start + kRunVectors <= line.full)
      for_run<true>(source, line, start, keep);
    else
      for_run<false>(source, line, start, keep);
  }
  found = block_reduce<kThreads>(found, 0.0f, Max{}, shared);
  if (threadIdx.x != 0) return;
  if (maxima != nullptr) maxima[blockIdx.x] = found;
  if (amax != nullptr) atomic_max_nonnegative(amax, found);
}

template <class Source>
void launch_rows(const Queue& queue, const Source& source, const TensorCast& cast, bool early) {
  const int64_t across = source.rows() > 1 ? source.columns() : 0;
  const bool wide = is_aligned(cast.row, across, kVector) && is_aligned(cast.out, across * size_of(cast.out_dtype));
  const Line line = line_of(source, wide);
  const int64_t blocks = ceil_div(line.total, kRunVectors);
  launch(queue, early, cast_rows<Source>, grid_x("x", blocks > 0 ? blocks : 1), kThreads, source, cast, line);
}

// Partial maxima, one a block, whose number it returns; or their maximum, accumulated into *amax.
template <class Source>
int64_t launch_maxima(const Queue& queue, const Source& source, float* maxima, float* amax, const float* noop) {
  const Line line = line_of(source, true);
  const int64_t runs = ceil_div(line.total, kRunVectors);
  const int64_t most = min(kMaxima, int64_t{6} * queue.limits().multiprocessors);
  const int64_t blocks = runs < 1 ? 1 : min(runs, most);
  find_maxima<<<grid_x("x", blocks), kThreads, 0, queue.stream()>>>(source, line, maxima, amax, noop);
  return blocks;
}

}  // namespace tensor_cast
}  // namespace ted
