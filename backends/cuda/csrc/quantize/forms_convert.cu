// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// FP8 codes between the OCP and FNUZ forms of a format (te_dispatch.ops.convert_encoding): bytes change only at NaN, -0
// and beyond the other form's range; scales double or halve.
#include "common/reduce.cuh"
#include "quantize/forms.h"

namespace ted {
namespace {

constexpr int kThreads = 256, kVector = 16, kRun = 4;
constexpr int64_t kPerBlock = int64_t{kThreads} * kVector * kRun;

struct Rule {
  bool to_fnuz;
  uint32_t largest;  // OCP's largest finite magnitude; beyond it the OCP form has NaN (and Inf)

  static Rule from(int source) {
    return {source == kE4M3 || source == kE5M2, source == kE4M3 || source == kE4M3FNUZ ? 0x7Eu : 0x7Bu};
  }
  __device__ __forceinline__ bool beyond(uint32_t code) const {
    return !to_fnuz && (code & 0x7F) > largest && code != 0x80;
  }
  __device__ __forceinline__ uint32_t operator()(uint32_t code) const {
    const bool past = (code & 0x7F) > largest;
    if (to_fnuz) return past ? 0x80u : code == 0x80 ? 0u : code;
    return code == 0x80 ? 0x7Fu : past ? (code & 0x80) | largest : code;
  }
};

__device__ __forceinline__ void add_count(int64_t* total, int found) {
  if (total == nullptr) return;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) found += __shfl_xor_sync(0xffffffffu, found, offset);
  if (threadIdx.x % 32 == 0 && found != 0) atomicAdd(reinterpret_cast<unsigned long long*>(total), found);
}

// One block's share of codes; `to` null only counts.
__device__ __forceinline__ void convert_codes(const uint8_t* from, uint8_t* to, int64_t count, int64_t start,
                                              const Rule& rule, int64_t* beyond, bool wide) {
  Vec<uint8_t, kVector> codes[kRun];
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const int64_t at = start + (i * kThreads + threadIdx.x) * int64_t{kVector};
    codes[i] = load_vector<uint8_t, kVector>(from + at, count - at, wide);
  }
  int found = 0;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const int64_t at = start + (i * kThreads + threadIdx.x) * int64_t{kVector};
    uint4 words = reinterpret_cast<const uint4&>(codes[i]);
    uint32_t* word = &words.x;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t converted = 0;
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const uint32_t code = word[w] >> (8 * b) & 0xFF;
        found += rule.beyond(code);
        converted |= rule(code) << (8 * b);
      }
      word[w] = converted;
    }
    if (to != nullptr)
      store_vector<uint8_t, kVector>(to + at, reinterpret_cast<const Vec<uint8_t, kVector>&>(words), count - at, wide);
  }
  add_count(beyond, found);  // codes past the end are 0, which is within range
}

__global__ void __launch_bounds__(kThreads) convert_kernel(const __grid_constant__ Conversion job, Rule rule,
                                                           uint32_t first_blocks, uint32_t code_blocks, bool wide) {
  if (blockIdx.x < code_blocks) {
    const int copy = blockIdx.x >= first_blocks;
    const int64_t start = static_cast<int64_t>(blockIdx.x - (copy ? first_blocks : 0)) * kPerBlock;
    const bool counted = copy == 0 || job.from[0] == nullptr;
    convert_codes(copy ? job.from[1] : job.from[0], copy ? job.to[1] : job.to[0], copy ? job.count[1] : job.count[0],
                  start, rule, counted ? job.beyond : nullptr, wide);
    return;
  }
  // The last blocks go over the scales.
  const float factor = rule.to_fnuz ? 2.0f : 0.5f;
  const int64_t step = int64_t{gridDim.x - code_blocks} * kThreads;
#pragma unroll
  for (int copy = 0; copy < 2; ++copy) {
    for (int64_t i = int64_t{blockIdx.x - code_blocks} * kThreads + threadIdx.x; i < job.scale_count[copy]; i += step)
      job.converted[copy][i] = __fmul_rn(job.scale[copy][i], factor);
  }
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const uint8_t* codes, int64_t count, Rule rule, int64_t* beyond, bool wide) {
  convert_codes(codes, nullptr, count, blockIdx.x * kPerBlock, rule, beyond, wide);
}

}  // namespace

void convert(const Queue& queue, const Conversion& job) {
  const int64_t first = ceil_div(job.count[0], kPerBlock), codes = first + ceil_div(job.count[1], kPerBlock);
  const int64_t scales = ceil_div(std::max(job.scale_count[0], job.scale_count[1]), kThreads);
  if (codes + scales == 0) return;
  const bool wide =
      is_aligned(job.from[0], 0) && is_aligned(job.to[0], 0) && is_aligned(job.from[1], 0) && is_aligned(job.to[1], 0);
  convert_kernel<<<grid_x("x", codes + std::min<int64_t>(scales, 512)), kThreads, 0, queue.stream()>>>(
      job, Rule::from(job.source), static_cast<uint32_t>(first), static_cast<uint32_t>(codes), wide);
}

void count_beyond(const Queue& queue, const uint8_t* codes, int64_t count, int source, int64_t* beyond) {
  check(cudaMemsetAsync(beyond, 0, sizeof(int64_t), queue.stream()), "convert_encoding");
  if (count == 0) return;
  count_kernel<<<grid_x("x", ceil_div(count, kPerBlock)), kThreads, 0, queue.stream()>>>(
      codes, count, Rule::from(source), beyond, is_aligned(codes, 0));
}

}  // namespace ted
