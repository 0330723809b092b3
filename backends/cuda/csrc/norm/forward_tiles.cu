// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Norms of whole rows with a cast to a known scale by columns: x is read once.
//
// A block takes R rows at a time. Groups of threads normalize a row each and leave its codes in shared memory, besides
// writing them by rows where that is wanted; then all threads write the R codes of every column, whole sectors where R
// is 32. Groups do not wait for each other within a tile, and their first rows of the next one are on their way while
// columns are written.
#include "norm/forward.cuh"
#include "common/shared_memory.h"
#include "norm/norm.h"

#include <algorithm>

namespace ted::norm {

namespace {

constexpr int kThreads = 1024, kVectors = 4, kMaxGroups = 15;

// Where a word of row r lies: rows of the upper half take the other 16 banks, so that lanes that read both halves of a
// column do not meet.
__device__ __forceinline__ int word_of(int word, int r) { return word ^ (r & 16); }

// 4 x 4 bytes transposed: word i of the result holds byte i of every argument, a's lowest.
__device__ __forceinline__ void transpose_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&out)[4]) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab_low, cd_low, 0x5410);
  out[1] = __byte_perm(ab_low, cd_low, 0x7632);
  out[2] = __byte_perm(ab_high, cd_high, 0x5410);
  out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// The R codes of every column, 16 in a store. `pitch` words separate rows in shared memory. Rows from `valid` on are
// not stored: rows and `valid` are multiples of 16.
template <int R>
__device__ __forceinline__ void store_columns(const uint32_t* tile, int pitch, const Forward& a, int64_t row0,
                                              int valid) {
  constexpr int kHalves = R / 16;
  const int items = static_cast<int>(a.columns) / 4 * kHalves;
  for (int item = threadIdx.x; item < items; item += blockDim.x) {
    const int half = item % kHalves, word = item / kHalves;
    if (half * 16 >= valid) continue;
    uint32_t columns[4][4];
#pragma unroll
    for (int quad = 0; quad < 4; ++quad) {
      const int r = half * 16 + quad * 4;
      const uint32_t* source = tile + r * pitch + word_of(word, r);
      uint32_t out[4];
      transpose_bytes(source[0], source[pitch], source[2 * pitch], source[3 * pitch], out);
#pragma unroll
      for (int i = 0; i < 4; ++i) columns[i][quad] = out[i];
    }
    uint8_t* target = a.cast.transposed + static_cast<int64_t>(word) * 4 * a.rows + row0 + half * 16;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      *reinterpret_cast<uint4*>(target + i * a.rows) =
          make_uint4(columns[i][0], columns[i][1], columns[i][2], columns[i][3]);
  }
}

// The sum over a group of whole warps, whose barrier is `group` + 1: 15 are free.
__device__ __forceinline__ float group_sum(float x, int lanes, int group, float* shared) {
  x = warp_reduce(x, Sum{});
  if (lanes == 32) return x;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(lanes) : "memory");
  return sum_of_warps(shared + group * (lanes / 32), lanes / 32);
}

template <class T, int R, int Product>
__global__ void __launch_bounds__(kThreads, 1) forward_tiles_kernel(const __grid_constant__ Forward a) {
  constexpr int E = kVector<T>, V = kVectors;
  extern __shared__ uint4 dynamic[];
  __shared__ float shared[2][2][kMaxWarps];
  uint32_t* const tile = reinterpret_cast<uint32_t*>(dynamic);
  const int columns = static_cast<int>(a.columns), pitch = (columns + 127) / 128 * 32;
  const int lanes = a.lanes, groups = blockDim.x / lanes;
  const int group = threadIdx.x / lanes, t = threadIdx.x % lanes;
  const float scale = scale_of(a.cast);
  const float known = a.cast.amax == nullptr ? 0.0f : *static_cast<volatile const float*>(a.cast.amax);
  const int tiles = static_cast<int>((a.rows + R - 1) / R);  // each of 4096 elements at least
  float amax = 0.0f;
  int turn = 0;

  PackedRow<T, V> x;
  const auto load = [&](int64_t row) {
    if (row < a.rows) load_row(x.words, static_cast<const T*>(a.x) + row * a.columns, columns, t, lanes);
  };
  load(static_cast<int64_t>(blockIdx.x) * R + group);
  for (int at = blockIdx.x; at < tiles; at += gridDim.x) {
    const int64_t row0 = static_cast<int64_t>(at) * R;
    const int valid = static_cast<int>(min(a.rows - row0, static_cast<int64_t>(R)));
    for (int r = group; r < valid; r += groups, turn ^= 1) {
      const int64_t row = row0 + r, start = row * a.columns;
      if (a.residual != nullptr) add_residual<4>(x, a, start, columns, t);

      float mean = 0.0f, rstd = 0.0f;
      if (a.mean != nullptr) {
        mean = group_sum(x.sum(), lanes, group, shared[turn][0]) * a.inverse_columns;
        if (t == 0) a.mean[row] = mean;
        x.forget();
      }
      const float squares = x.sum_of_squares(mean, columns, t, lanes);
      rstd = rstd_of(group_sum(squares, lanes, group, shared[turn][1]), a);
      if (t == 0) a.rstd[row] = rstd;
      x.forget();

      with_weight_type<T>(a, [&](auto weight) {
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const int column = (v * lanes + t) * E;
          if (column >= columns) continue;
          float y[E];
          make_y<Product, T, typename decltype(weight)::type, void>(y, a, start, column, x.words[v], mean, rstd, amax);
          const Codes<E> codes = encode_row<Product>(y, scale, a.cast);
          if (a.cast.codes != nullptr) *reinterpret_cast<Codes<E>*>(a.cast.codes + start + column) = codes;
          *reinterpret_cast<Codes<E>*>(tile + r * pitch + word_of(column / 4, r)) = codes;
        }
      });
      load(r + groups < valid ? row + groups : row0 + static_cast<int64_t>(gridDim.x) * R + group);
    }
    __syncthreads();
    store_columns<R>(tile, pitch, a, row0, valid);
    __syncthreads();
  }
  finish_cast(a.cast, scale, amax, known);
}

// Whole warps: groups of a warp must not differ in how many rows they take.
constexpr int64_t kMinColumns = 256;
int lanes_of(int64_t columns, int x_dtype) {
  return static_cast<int>(ceil_div(columns * size_of(x_dtype), 16 * 32 * kVectors)) * 32;
}

int64_t tile_bytes(int64_t columns, int rows) { return ceil_div(columns, 128) * 128 * rows; }

// Rows of a tile: 32 where that many fit shared memory and tiles suffice for the chip, 16 where only those do, else 0.
int rows_of(int64_t rows, int64_t columns, int x_dtype, const DeviceLimits& limits) {
  const int64_t room = limits.shared_memory_per_block - 2048;
  if (columns < kMinColumns || lanes_of(columns, x_dtype) > kThreads || tile_bytes(columns, 16) > room) return 0;
  return tile_bytes(columns, 32) <= room && ceil_div(rows, 32) >= limits.multiprocessors ? 32 : 16;
}

template <class T, int R, int Product>
void launch(const Queue& q, const Forward& a) {
  const int threads = a.lanes * std::min({kThreads / a.lanes, R, a.lanes > 32 ? kMaxGroups : kThreads});
  const int64_t bytes = tile_bytes(a.columns, R), tiles = ceil_div(a.rows, R);
  allow_shared_memory(q, reinterpret_cast<const void*>(&forward_tiles_kernel<T, R, Product>), bytes, "norm_forward");
  const int64_t room = q.limits().shared_memory_per_block;
  const int64_t fit = std::max<int64_t>(std::min<int64_t>(room / (bytes + 2048), kThreads / threads), 1);
  const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(tiles, q.limits().multiprocessors * fit));
  forward_tiles_kernel<T, R, Product><<<blocks, threads, static_cast<size_t>(bytes), q.stream()>>>(a);
}

}  // namespace

bool tiles_fit(const Forward& a, int x_dtype, const DeviceLimits& limits) {
  return a.rows > 0 && a.rows % 16 == 0 && is_aligned(a.cast.transposed, 0) && a.whole() &&
         rows_of(a.rows, a.columns, x_dtype, limits) > 0;
}

void forward_tiles(const Queue& q, Forward a, int x_dtype) {
  a.lanes = lanes_of(a.columns, x_dtype);
  with_dtype("x", x_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_flag(product_of(a) == kOnlyE4M3, [&](auto hard) {
      constexpr int kProduct = decltype(hard)::value ? kOnlyE4M3 : kAnything;
      if (rows_of(a.rows, a.columns, x_dtype, q.limits()) == 32)
        launch<T, 32, kProduct>(q, a);
      else
        launch<T, 16, kProduct>(q, a);
    });
  });
}

}  // namespace ted::norm
