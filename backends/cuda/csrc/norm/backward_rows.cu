// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Gradients of norms whose row fits one block.
//
// Few blocks, 512 threads of a multiprocessor, go over rows, a group of threads each. A thread copies its part of the
// next row into shared memory asynchronously; it reads only what it copied, so nothing waits for other threads but the
// sums over a row. Its columns' sums for dgamma and dbeta stay in registers; each block leaves one partial sum per
// column. Measured at 4096 bf16: 16 values a thread; two blocks of 256 threads, of which one computes while the other
// waits for its sums (56 us against 65 with 512 threads a row); one row ahead, more of them are slower.
#include "norm/backward.cuh"
#include "common/overlap.cuh"
#include "common/shared_memory.h"
#include "norm/norm.h"

#include <algorithm>

namespace ted::norm {

namespace {

constexpr int kThreads = 512;   // of a multiprocessor, in two blocks where a row needs no more than half of them
constexpr int kMaxGroups = 15;  // barriers of a block, less its own
constexpr int kSums = 2;        // over a row: of g h, and of g

// K sums over a warp at a time: values are exchanged for lanes until a lane has one, so that K sums take little more
// than one. Lane l is left with the sum of value l / (32 / K).
template <int K>
__device__ __forceinline__ float warp_sums(float (&x)[K]) {
  int offset = 16;
#pragma unroll
  for (int half = K / 2; half > 0; half /= 2, offset /= 2) {
    const bool upper = (threadIdx.x & offset) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = upper ? x[i + half] : x[i], given = upper ? x[i] : x[i + half];
      x[i] = kept + __shfl_xor_sync(0xffffffffu, given, offset);
    }
  }
  for (; offset > 0; offset /= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], offset);
  return x[0];
}

// Floats that a group of several warps has for one sum: read four at a time, zeros behind the last warp's.
__device__ __forceinline__ int padded(int warps) { return (warps + 3) / 4 * 4; }

// K sums over the `lanes` threads of a group, in each of them. Groups of several warps meet at a barrier of their own.
// `shared` alternates between calls, and is zero where no warp writes.
template <int K>
__device__ __forceinline__ void group_sums(float (&x)[K], int lanes, int group, float* shared) {
  constexpr int kShare = 32 / K;  // lanes per value
  if (lanes < 32) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int k = 0; k < K; ++k) x[k] += __shfl_xor_sync(0xffffffffu, x[k], offset);
    }
    return;
  }
  const int lane = threadIdx.x % 32, warps = lanes / 32, room = padded(warps);
  const float total = warp_sums(x);
  if (warps == 1) {
#pragma unroll
    for (int k = 0; k < K; ++k) x[k] = __shfl_sync(0xffffffffu, total, k * kShare);
    return;
  }
  float* mine = shared + group * room * K;
  if (lane % kShare == 0) mine[lane / kShare * room + threadIdx.x / 32 - group * warps] = total;
  if (lanes == blockDim.x)
    __syncthreads();
  else
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(lanes) : "memory");
#pragma unroll
  for (int k = 0; k < K; ++k) x[k] = 0.0f;
  for (int w = 0; w < room; w += 4) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const float4 part = *reinterpret_cast<const float4*>(mine + k * room + w);
      x[k] += (part.x + part.y) + (part.z + part.w);
    }
  }
}

// The sums of a column over the groups of a block, in the order of the groups, to this block's part of `partial`.
template <int V, int E>
__device__ __forceinline__ void leave(const Backward& a, float (&sums)[V][E], int term, int terms, int t,
                                      float* combined) {
  const int lanes = a.lanes;
  for (int offset = lanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int i = 0; i < E; ++i) sums[v][i] += __shfl_xor_sync(0xffffffffu, sums[v][i], offset);
  }
  const int width = lanes < 32 ? 32 : lanes;  // threads of one group, now that warps agree
  const int group = threadIdx.x / width, last = blockDim.x / width - 1;
  const bool leads = threadIdx.x % width < lanes;
  for (int g = 0; g <= last; ++g) {
    __syncthreads();
    if (group != g || !leads) continue;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int column = (v * lanes + t) * E;
      const int64_t valid = a.columns - column;
      Vec<float, E> total;
#pragma unroll
      for (int i = 0; i < E; ++i) total[i] = sums[v][i];
      if (g > 0) {
        const Vec<float, E> before = *reinterpret_cast<const Vec<float, E>*>(combined + column);
#pragma unroll
        for (int i = 0; i < E; ++i) total[i] += before[i];
      }
      if (g < last)
        *reinterpret_cast<Vec<float, E>*>(combined + column) = total;
      else if (valid > 0)
        store_vector(a.partial + (static_cast<int64_t>(blockIdx.x) * terms + term) * a.columns + column, total, valid,
                     a.aligned_partial);
    }
  }
}

// Zeros where there is nothing to copy.
__device__ __forceinline__ void copy_16_bytes(void* shared, const void* global, bool present) {
  const uint32_t target = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(global), "r"(present ? 16 : 0));
}

// Waits until at most one group of this thread's copies is under way, or with Last none.
template <bool Last>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Last ? 0 : 1) : "memory");
}

// Vectors t, t + lanes, ... of a row of so many columns into this thread's slots, zeros behind its end.
template <class T, int V>
__device__ __forceinline__ void fetch(Vec<uint32_t, 4>* slots, const T* row, int columns, int t, int lanes,
                                      bool aligned) {
  constexpr int E = kVector<T>;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int column = (v * lanes + t) * E;
    Vec<uint32_t, 4>* slot = slots + v * blockDim.x;
    if (aligned)
      copy_16_bytes(slot, row + (column < columns ? column : 0), column < columns);
    else
      *reinterpret_cast<Vec<T, E>*>(slot) = load_vector<T, E>(row + column, columns - column, false);
  }
}

// Whether registers suffice to keep the factor, and for add's rows to be copied ahead too.
template <int N>
constexpr bool kFew = N <= 16;

// What a kernel is for. Whole rows (row.cuh) of one type of x, dy, dx and add, if there is one, which is copied ahead;
// elsewhere all of that is looked up.
enum Form : int { kLayerNorm, kRMSNorm, kAnyForm };

// N values of a row per thread. Same: dy has x's dtype, and is copied ahead like x.
template <class T, int N, bool Same, int Form>
__global__ void __launch_bounds__(kThreads, 1) backward_rows(const __grid_constant__ Backward a) {
  constexpr bool kWhole = Form != kAnyForm;
  constexpr int E = kVector<T>, V = N / E, K = Form == kRMSNorm ? 1 : kSums;
  constexpr bool kKeep = kFew<N> && kWhole && sizeof(T) == 2;  // what a row's sums and its dx share
  extern __shared__ float4 dynamic[];
  __shared__ alignas(16) float shared[2][kSums * kMaxWarps];
  let_next_begin();
  Vec<uint32_t, 4>* const slots = reinterpret_cast<Vec<uint32_t, 4>*>(dynamic) + threadIdx.x;
  // Rows that take registers for 32 values have a block of their own.
  const int lanes = kFew<N> ? a.lanes : static_cast<int>(blockDim.x), group = kFew<N> ? threadIdx.x / lanes : 0;
  const int t = kFew<N> ? threadIdx.x % lanes : threadIdx.x;
  const int columns = static_cast<int>(a.columns), operand = V * static_cast<int>(blockDim.x);
  const bool adds_ahead = kFew<N> && a.adds_ahead;
  const int stage_size = ((Same ? 2 : 1) + adds_ahead) * operand;
  const int64_t groups = kFew<N> ? blockDim.x / lanes : 1, step = gridDim.x * groups;
  const bool centered = kWhole ? Form == kLayerNorm : a.mean != nullptr;

  // Stages are two, or one: then their offsets are 0 both.
  const int other_stage = (a.stages - 1) * stage_size;
  const auto fetch_row = [&](int64_t of, int stage) {
    const int64_t start = of < a.rows ? of * a.columns : 0;
    const int present = of < a.rows ? columns : 0;
    Vec<uint32_t, 4>* filled = slots + stage;
    fetch<T, V>(filled, static_cast<const T*>(a.x) + start, present, t, lanes, kWhole || a.aligned);
    if constexpr (Same)
      fetch<T, V>(filled + operand, static_cast<const T*>(a.dy.data) + start, present, t, lanes,
                  kWhole || a.dy.aligned);
    if (adds_ahead)
      fetch<T, V>(filled + stage_size - operand, static_cast<const T*>(a.add.data) + start, present, t, lanes,
                  kWhole || a.add.aligned);
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  int64_t row = blockIdx.x * groups + group;
  if (a.stages > 1) fetch_row(row, 0);

  for (int i = threadIdx.x; i < kSums * kMaxWarps; i += blockDim.x) shared[0][i] = shared[1][i] = 0.0f;
  float factor[V][E], dgamma[V][E] = {}, dbeta[V][E] = {};
  if constexpr (kFew<N>) {
#pragma unroll
    for (int v = 0; v < V; ++v) load_factor(factor[v], a, (v * lanes + t) * E, columns - (v * lanes + t) * E);
  }
  float next_mean, next_rstd;
  const auto load_statistics = [&](int64_t of) {
    next_mean = centered && of < a.rows ? a.mean[of] : 0.0f;
    next_rstd = of < a.rows ? a.rstd[of] : 0.0f;
  };
  load_statistics(row);
  __syncthreads();

  int turn = 0;
  for (; row - group < a.rows; row += step) {
    const Vec<uint32_t, 4>* const stage = slots + turn * other_stage;
    fetch_row(a.stages > 1 ? row + step : row, (turn ^ 1) * other_stage);
    const float mean = next_mean, rstd = next_rstd;
    load_statistics(row + step);
    if (a.stages > 1)
      wait_copies<false>();
    else
      wait_copies<true>();
    const int64_t start = row * a.columns;
    const int present = row < a.rows ? columns : 0;

    // h, and dy, then g where it is kept: all of the row's, or a vector's, read once for the sums and once for dx.
    // Behind a row's end dy is 0.
    float h[kKeep ? V : 1][E], dy[kKeep ? V : 1][E];
    const auto load = [&](int v, int column, float(&h)[E], float(&dy)[E]) {
      widen<T>(h, stage[v * blockDim.x]);
      if constexpr (Same)
        widen<T>(dy, stage[operand + v * blockDim.x]);
      else
        read(dy, a.dy, start + column, present - column);
      if constexpr (!kFew<N>) load_factor(factor[v], a, column, columns - column);
#pragma unroll
      for (int i = 0; i < E; ++i) h[i] = __fmul_rn(Form == kRMSNorm ? h[i] : __fsub_rn(h[i], mean), rstd);
    };

    float sums[K] = {};  // of g h, and of g
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int column = (v * lanes + t) * E, s = kKeep ? v : 0;
      if (!kWhole && column >= present) continue;
      load(v, column, h[s], dy[s]);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        const float g = dy[s][i] * factor[v][i];
        dgamma[v][i] = fmaf(dy[s][i], h[s][i], dgamma[v][i]);
        sums[0] = fmaf(g, h[s][i], sums[0]);
        if constexpr (K > 1) {
          dbeta[v][i] += dy[s][i];
          sums[K - 1] += g;
        }
        if constexpr (kKeep) dy[s][i] = g;
      }
    }
    group_sums(sums, lanes, group, shared[turn]);
    turn ^= 1;
    const float along_h = sums[0] * a.inverse_columns;
    const float shift = K > 1 && centered ? -(sums[K - 1] * a.inverse_columns * rstd) : 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int column = (v * lanes + t) * E, s = kKeep ? v : 0;
      if (column >= present) continue;
      if constexpr (!kKeep) load(v, column, h[s], dy[s]);
      float dx[E];
#pragma unroll
      for (int i = 0; i < E; ++i) {
        const float g = kKeep ? dy[s][i] : dy[s][i] * factor[v][i];
        dx[i] = fmaf(fmaf(-h[s][i], along_h, g), rstd, shift);
      }
      if (adds_ahead) {
        float add[E];
        widen<T>(add, stage[stage_size - operand + v * blockDim.x]);
#pragma unroll
        for (int i = 0; i < E; ++i) dx[i] += add[i];
      }
      if constexpr (kWhole)  // add's rows are ahead, if there are any
        write(static_cast<T*>(a.dx) + start + column, dx, E, true);
      else
        store_dx<T, false>(a, start + column, dx, columns - column);
    }
  }
  wait_copies<true>();

  // The slots are free once every thread is here: `leave` begins with a barrier.
  const int terms = centered ? 2 : 1;
  leave(a, dgamma, 0, terms, t, reinterpret_cast<float*>(dynamic));
  if constexpr (K > 1)
    if (centered) leave(a, dbeta, 1, terms, t, reinterpret_cast<float*>(dynamic));
}

struct Geometry {
  int values, lanes, groups, blocks;  // `blocks` of a multiprocessor
  int threads() const { return lanes * groups; }
};

// Threads that share a row follow from its length alone; rows at a time also from how many there are, so that few rows
// still spread over the chip.
Geometry geometry_of(int64_t rows, int64_t columns, int multiprocessors) {
  const int values = columns <= kThreads * 16 ? 16 : 32, blocks = columns <= kThreads / 2 * 16 ? 2 : 1;
  int lanes = 1;
  if (columns > 32 * values)
    lanes = static_cast<int>(ceil_div(columns, 32 * values)) * 32;
  else
    while (lanes * values < columns) lanes *= 2;
  const int threads = kThreads / blocks, at_least = lanes < 32 ? 32 / lanes : 1;
  const int at_most = lanes > 32 ? std::min(threads / lanes, kMaxGroups) : threads / lanes;
  const int64_t wanted = ceil_div(rows, int64_t{multiprocessors} * blocks);
  const int64_t groups = std::max<int64_t>(std::min<int64_t>(wanted, at_most) / at_least, 1) * at_least;
  return {values, lanes, static_cast<int>(groups), blocks};
}

// Bytes of shared memory for turns.
int64_t room_of(const Queue& q) { return q.limits().shared_memory_per_block - 2048; }

template <class T, int N, bool Same, int Form>
void launch(const Queue& q, const Backward& given, const Geometry& geometry, unsigned blocks) {
  const auto kernel = backward_rows<T, N, Same, Form>;
  Backward a = given;
  a.adds_ahead = kFew<N> && a.adds_ahead;
  const int threads = geometry.threads();
  const int64_t room = room_of(q);
  const int64_t stage = static_cast<int64_t>(threads) * N * sizeof(T) * ((Same ? 2 : 1) + a.adds_ahead);
  a.stages = static_cast<int>(std::min<int64_t>(room / stage, 2));
  const int64_t bytes = std::max<int64_t>(stage * a.stages, threads * N * static_cast<int64_t>(sizeof(float)));
  allow_shared_memory(q, reinterpret_cast<const void*>(kernel), bytes, "norm_backward");
  kernel<<<blocks, threads, static_cast<size_t>(bytes), q.stream()>>>(a);
}

}  // namespace

bool backward_fits(int64_t columns, int x_dtype, const DeviceLimits& limits) {
  const int64_t turn = columns <= kThreads * 16 ? kThreads * 16 : ceil_div(columns, 1024) * 1024;
  return columns <= kBackwardColumns && 2 * turn * size_of(x_dtype) + 2048 <= limits.shared_memory_per_block;
}

int64_t parts_in_registers(int64_t rows, int64_t columns, const DeviceLimits& limits) {
  const Geometry geometry = geometry_of(rows, columns, limits.multiprocessors);
  return std::min<int64_t>(limits.multiprocessors * geometry.blocks, ceil_div(rows, geometry.groups));
}

void backward_in_registers(const Queue& q, Backward a, int x_dtype, int64_t parts) {
  if (parts == 0) return;
  const Geometry geometry = geometry_of(a.rows, a.columns, q.limits().multiprocessors);
  a.lanes = geometry.lanes;
  const int64_t three = int64_t{geometry.threads()} * geometry.values * size_of(x_dtype) * 3;
  a.adds_ahead = a.add.data != nullptr && a.add.dtype == x_dtype && 2 * three <= room_of(q);
  const bool whole = a.aligned && a.dy.aligned && (a.add.data == nullptr || (a.adds_ahead && a.add.aligned));
  with_dtype("x", x_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_flag(a.dy.dtype == x_dtype, [&](auto same) {
      constexpr bool kSame = decltype(same)::value;
      const unsigned blocks = static_cast<unsigned>(parts);
      constexpr int kLayer = kSame ? kLayerNorm : kAnyForm, kRMS = kSame ? kRMSNorm : kAnyForm;
      if (geometry.values == 32)
        launch<T, 32, kSame, kAnyForm>(q, a, geometry, blocks);
      else if (!kSame || !whole)
        launch<T, 16, kSame, kAnyForm>(q, a, geometry, blocks);
      else if (a.mean != nullptr)
        launch<T, 16, kSame, kLayer>(q, a, geometry, blocks);
      else
        launch<T, 16, kSame, kRMS>(q, a, geometry, blocks);
    });
  });
}

}  // namespace ted::norm
