// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "training/tables.cuh"
#include "training/training.h"

namespace ted {

namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;
constexpr int kUnits = 2;
constexpr int64_t kChunk = 8 * kThreads * kWidth * kUnits;

// Vectors of kWidth elements below `count`, a multiple of kWidth. Whether all were finite.
template <bool Whole, class From, class To>
__device__ bool scale_vectors(const From* input, To* output, int64_t count, float scale) {
  bool finite = true;
  for (int64_t first = threadIdx.x * kWidth; first < count; first += kThreads * kWidth * kUnits) {
    Vec<From, kWidth> value[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int64_t i = first + u * kThreads * kWidth;
      if (i < count) value[u] = load_part<Whole, kWidth>(input + i, kWidth);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int64_t i = first + u * kThreads * kWidth;
      if (i >= count) break;
      Vec<To, kWidth> out;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float x = to_float(value[u][k]);
        finite = finite && isfinite(x);
        out[k] = from_float<To>(x * scale);
      }
      store_part<Whole>(output + i, out, kWidth);
    }
  }
  return finite;
}

template <class From, class To>
__device__ void scale_piece(const From* input, To* output, int64_t count, float scale, float* noop_flag) {
  const bool aligned = reinterpret_cast<uintptr_t>(input) % 16 == 0 && reinterpret_cast<uintptr_t>(output) % 16 == 0;
  const int64_t whole = count / kWidth * kWidth, last = whole + threadIdx.x;
  bool finite = aligned ? scale_vectors<true>(input, output, whole, scale)
                        : scale_vectors<false>(input, output, whole, scale);
  if (last < count) {
    const float x = to_float(input[last]);
    finite = finite && isfinite(x);
    output[last] = from_float<To>(x * scale);
  }
  // Whoever writes writes the same.
  if (!finite && noop_flag != nullptr) *noop_flag = 1.0f;
}

template <class From>
__device__ __forceinline__ void scale_from(const void* input, void* output, int64_t begin, int64_t count, int to,
                                           float scale, float* noop_flag) {
  const From* source = static_cast<const From*>(input) + begin;
  switch (to) {
    case kFloat32: return scale_piece(source, static_cast<float*>(output) + begin, count, scale, noop_flag);
    case kBFloat16: return scale_piece(source, static_cast<__nv_bfloat16*>(output) + begin, count, scale, noop_flag);
    default: return scale_piece(source, static_cast<__half*>(output) + begin, count, scale, noop_flag);
  }
}

// The lists may mix dtypes, so a block looks up those of its tensor.
template <int Capacity>
__global__ void __launch_bounds__(kThreads)
scale_tensors(const __grid_constant__ Table<2, Capacity> table, float scale, float* noop_flag) {
  const Piece p = piece_of<kChunk>(table, blockIdx.x);
  const void* input = table.address[0][p.entry];
  void* output = table.address[1][p.entry];
  const int to = table.dtype[1][p.entry];
  switch (table.dtype[0][p.entry]) {
    case kFloat32: return scale_from<float>(input, output, p.begin, p.count, to, scale, noop_flag);
    case kBFloat16: return scale_from<__nv_bfloat16>(input, output, p.begin, p.count, to, scale, noop_flag);
    default: return scale_from<__half>(input, output, p.begin, p.count, to, scale, noop_flag);
  }
}

}  // namespace

void multi_tensor_scale(int device, uintptr_t stream, const Addresses& inputs, const Addresses& outputs,
                        const Counts& counts, const Dtypes& input_dtypes, const Dtypes& output_dtypes, double scale,
                        uintptr_t noop_flag) {
  require_list("inputs", inputs, counts, input_dtypes);
  require_list("outputs", outputs, counts, output_dtypes);
  require_pointer("noop_flag", pointer<void>(noop_flag), 0, 4);
  Queue q(device, stream);
  with_flag(counts.size() <= kFew, [&](auto few) {
    constexpr int kCapacity = decltype(few)::value ? kFew : 1024;
    for_tables<kChunk, 2, kCapacity>(
        {&inputs, &outputs}, counts, {&input_dtypes, &output_dtypes}, [&](const auto& table) {
          scale_tensors<kCapacity><<<table.blocks, kThreads, 0, q.stream()>>>(table, static_cast<float>(scale),
                                                                              pointer<float>(noop_flag));
        });
  });
  q.launched("multi_tensor_scale");
}

}  // namespace ted
