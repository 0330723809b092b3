// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// One warp per row: most rows have nothing to be done.
#include "attention/rows.cuh"

namespace ted::attention {

namespace {

constexpr int kWarps = 4;

__device__ void zero(const Rows& rows, bool packed, int64_t extent, int64_t index, int lane) {
  if (rows.data == nullptr) return;
  char* row = row_of(rows, packed, extent, index);
  const int pieces = rows.bytes / 16;
  for (int h = 0; h < rows.heads; ++h)
    for (int c = lane; c < pieces; c += 32) reinterpret_cast<uint4*>(row + h * rows.head_stride)[c] = uint4{};
}

__global__ void __launch_bounds__(32 * kWarps) mend_kernel(const Mend a, int64_t query_rows, int64_t rows) {
  const int lane = threadIdx.x % 32;
  int64_t index = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / 32;
  if (index >= rows) return;
  if (index >= query_rows) {
    index -= query_rows;
    if (place_of(a.keys, a.batch, a.packed_keys, index).sequence >= 0) return;
    zero(a.first_key, a.packed_keys, a.keys.extent, index, lane);
    zero(a.second_key, a.packed_keys, a.keys.extent, index, lane);
    return;
  }
  const Place place = place_of(a.queries, a.batch, a.packed_queries, index);
  if (!sees_nothing(a.band, a.queries, a.keys, place)) return;
  zero(a.query, a.packed_queries, a.queries.extent, index, lane);
  if (a.lse == nullptr) return;
  for (int h = lane; h < a.heads; h += 32) {
    const int64_t extent = a.queries.extent;
    const int64_t sequence = a.packed_queries ? 0 : index / extent;
    const int64_t at = a.packed_queries ? index * a.heads + h : (sequence * a.heads + h) * extent + index - sequence * extent;
    a.lse[at] = -INFINITY;
  }
}

// One warp per row of every tensor; `first` are the tensors' first rows in the grid.
struct FirstRows {
  int64_t of[kMaxCopies + 1];
};

__global__ void __launch_bounds__(32 * kWarps) clean_kernel(const Clean a, const FirstRows first) {
  const int lane = threadIdx.x % 32;
  int64_t index = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / 32;
  int tensor = 0;
  while (tensor < a.count && index >= first.of[tensor + 1]) ++tensor;
  if (tensor == a.count) return;
  index -= first.of[tensor];
  const Copy& copy = a.copies[tensor];
  const Side& side = copy.of_keys ? a.keys : a.queries;
  const Place place = place_of(side, a.batch, a.packed, index);
  const bool used = copy.of_keys ? place.sequence >= 0 : !sees_nothing(a.band, a.queries, a.keys, place);
  const char* from = row_of(copy.source, a.packed, side.extent, index);
  char* to = row_of(copy.target, a.packed, side.extent, index);
  // The target is dense; where the source's heads lie beside each other too, a row is one piece.
  const bool whole = copy.source.head_stride == copy.source.bytes;
  const int heads = whole ? 1 : copy.source.heads;
  const int pieces = copy.source.bytes / 16 * (whole ? copy.source.heads : 1);
  for (int h = 0; h < heads; ++h) {
    const uint4* in = reinterpret_cast<const uint4*>(from + h * copy.source.head_stride);
    uint4* out = reinterpret_cast<uint4*>(to + h * copy.target.head_stride);
#pragma unroll 8
    for (int c = lane; c < pieces; c += 32) out[c] = used ? in[c] : uint4{};
  }
}

constexpr int kThreads = 1024;

__device__ float larger(float a, float b) { return b > a || b != b ? b : a; }

// One block per head: rows are few beside the products that made them.
__global__ void __launch_bounds__(kThreads) summarize_kernel(const RowStatistics a, int64_t rows) {
  __shared__ float found[kThreads / 32];
  const int h = blockIdx.x;
  const int64_t extent = a.queries.extent;
  float top = -INFINITY;
  for (int64_t index = threadIdx.x; index < rows; index += kThreads) {
    const int64_t sequence = a.packed ? 0 : index / extent;
    const int64_t at = a.packed ? index * a.heads + h : (sequence * a.heads + h) * extent + index - sequence * extent;
    const bool nothing = sees_nothing(a.band, a.queries, a.keys, place_of(a.queries, a.batch, a.packed, index));
    const float most = nothing ? -INFINITY : a.maxima[at], sum = nothing ? 0.f : a.sums[at];
    // cuDNN's maximum passes over NaN, its sum does not; exp(inf - inf) is one of its own.
    top = larger(top, sum != sum && most != INFINITY ? sum : most);
    if (a.lse != nullptr) a.lse[at] = nothing ? -INFINITY : most + logf(sum);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    top = larger(top, __shfl_xor_sync(~0u, top, offset));
  }
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = top;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kThreads / 32; ++w) top = larger(top, found[w]);
  a.largest[h] = top;
}

int64_t rows_of(const Side& side, int64_t batch, bool packed) { return packed ? side.extent : batch * side.extent; }

}  // namespace

void mend(const Queue& q, const Mend& a) {
  const int64_t query_rows =
      a.query.data == nullptr && a.lse == nullptr ? 0 : rows_of(a.queries, a.batch, a.packed_queries);
  const int64_t key_rows = a.first_key.data == nullptr && a.second_key.data == nullptr
                               ? 0 : rows_of(a.keys, a.batch, a.packed_keys);
  const int64_t rows = query_rows + key_rows;
  if (rows == 0) return;
  mend_kernel<<<grid_x("rows", ceil_div(rows, kWarps)), 32 * kWarps, 0, q.stream()>>>(a, query_rows, rows);
}

void clean(const Queue& q, const Clean& a) {
  FirstRows first{};
  for (int t = 0; t < a.count; ++t)
    first.of[t + 1] = first.of[t] + rows_of(a.copies[t].of_keys ? a.keys : a.queries, a.batch, a.packed);
  const int64_t rows = first.of[a.count];
  if (rows == 0) return;
  clean_kernel<<<grid_x("rows", ceil_div(rows, kWarps)), 32 * kWarps, 0, q.stream()>>>(a, first);
}

void summarize(const Queue& q, const RowStatistics& a) {
  if (a.heads == 0) return;
  summarize_kernel<<<grid_x("heads", a.heads), kThreads, 0, q.stream()>>>(a, rows_of(a.queries, a.batch, a.packed));
}

}  // namespace ted::attention
