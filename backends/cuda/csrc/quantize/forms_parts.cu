// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// pad_rows and unpad_rows: runs of bytes copied, runs of zeros behind them. All parts in one launch for up to kParts.
#include "quantize/forms.h"

namespace ted {
namespace {

constexpr int kThreads = 256, kVector = 16, kRun = 4, kParts = 100;
constexpr int64_t kPerBlock = int64_t{kThreads} * kVector * kRun;

struct Part {
  int64_t from, to;         // bytes from the start
  int64_t copied, written;  // bytes; zeros from the one to the other
};

struct Parts {
  Part part[kParts];
  uint32_t first_block[kParts];
  int count;
};
static_assert(sizeof(Parts) + 64 <= 4096, "kernel parameters");

__global__ void __launch_bounds__(kThreads, 4)
    copy_kernel(const uint8_t* from, uint8_t* to, const __grid_constant__ Parts parts, bool wide) {
  int low = 0, high = parts.count - 1;  // the last part that starts at or before this block
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (parts.first_block[middle] <= blockIdx.x)
      low = middle;
    else
      high = middle - 1;
  }
  const Part part = parts.part[low];
  const int64_t start = static_cast<int64_t>(blockIdx.x - parts.first_block[low]) * kPerBlock;
  if (wide) {  // every run is one of whole vectors
    uint4 bytes[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int64_t at = start + (i * kThreads + threadIdx.x) * int64_t{kVector};
      bytes[i] = at < part.copied ? *reinterpret_cast<const uint4*>(from + part.from + at) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      const int64_t at = start + (i * kThreads + threadIdx.x) * int64_t{kVector};
      if (at < part.written) *reinterpret_cast<uint4*>(to + part.to + at) = bytes[i];
    }
    return;
  }
  for (int64_t at = start + threadIdx.x; at < min(start + kPerBlock, part.written); at += kThreads)
    to[part.to + at] = at < part.copied ? from[part.from + at] : uint8_t{0};
}

}  // namespace

void copy_parts(const Queue& queue, const uint8_t* from, uint8_t* to, int64_t pitch, const std::vector<int64_t>& copied,
                const std::vector<int64_t>& read, const std::vector<int64_t>& written) {
  const bool wide = is_aligned(from, pitch) && is_aligned(to, pitch);
  int64_t from_row = 0, to_row = 0;
  for (size_t i = 0; i < copied.size();) {
    Parts parts;
    parts.count = 0;
    int64_t blocks = 0;
    for (; i < copied.size() && parts.count < kParts; ++i) {
      const int64_t bytes = written[i] * pitch;
      if (bytes > 0) {
        parts.part[parts.count] = {from_row * pitch, to_row * pitch, copied[i] * pitch, bytes};
        parts.first_block[parts.count++] = grid_x("x", blocks);
        blocks += ceil_div(bytes, kPerBlock);
      }
      from_row += read[i];
      to_row += written[i];
    }
    if (parts.count > 0) copy_kernel<<<grid_x("x", blocks), kThreads, 0, queue.stream()>>>(from, to, parts, wide);
  }
}

}  // namespace ted
