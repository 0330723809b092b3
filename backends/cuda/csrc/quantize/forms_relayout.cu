// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Scales from a layout to another, both copies in one launch. A tile of 128x16 scales passes through shared memory,
// read in the order in which the source has it and written in the order of the target.
#include "quantize/forms.h"

namespace ted {
namespace {

constexpr int kThreads = 256, kRows = 128, kBlocks = 16;

// The i-th scale of a tile to visit.
__device__ __forceinline__ void visit(const ScaleView& view, int i, int* r, int* b) {
  if (view.tiles != 0) {  // 4 blocks of a row side by side, then every 32nd row
    *b = i % 4 + i / 512 * 4;
    *r = i / 4 % 4 * 32 + i / 16 % 32;
  } else if (view.row_stride == 1 && view.block_stride != 1) {
    *r = i % kRows;
    *b = i / kRows;
  } else {
    *b = i % kBlocks;
    *r = i / kBlocks;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    relayout_kernel(const __grid_constant__ Relayout first, const __grid_constant__ Relayout second,
                    uint32_t first_tiles) {
  __shared__ T tile[kRows][kBlocks + 1];
  const bool is_second = blockIdx.x >= first_tiles;
  const Relayout& job = is_second ? second : first;
  const uint32_t index = is_second ? blockIdx.x - first_tiles : blockIdx.x;
  const uint32_t across = static_cast<uint32_t>((job.padded_blocks + kBlocks - 1) / kBlocks);
  const int64_t row0 = static_cast<int64_t>(index / across) * kRows,
                block0 = static_cast<int64_t>(index % across) * kBlocks;
  T held[kRows * kBlocks / kThreads];
#pragma unroll
  for (int i = 0; i < kRows * kBlocks / kThreads; ++i) {
    int r, b;
    visit(job.from, threadIdx.x + i * kThreads, &r, &b);
    held[i] = row0 + r < job.rows && block0 + b < job.blocks
                  ? static_cast<const T*>(job.from.scale)[job.from.offset(row0 + r, block0 + b)]
                  : T{};
  }
#pragma unroll
  for (int i = 0; i < kRows * kBlocks / kThreads; ++i) {
    int r, b;
    visit(job.from, threadIdx.x + i * kThreads, &r, &b);
    tile[r][b] = held[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRows * kBlocks / kThreads; ++i) {
    int r, b;
    visit(job.to, threadIdx.x + i * kThreads, &r, &b);
    if (row0 + r < job.padded_rows && block0 + b < job.padded_blocks)
      static_cast<T*>(const_cast<void*>(job.to.scale))[job.to.offset(row0 + r, block0 + b)] = tile[r][b];
  }
}

int64_t tiles_of(const Relayout& job) {
  return job.to.scale == nullptr ? 0 : ceil_div(job.padded_rows, kRows) * ceil_div(job.padded_blocks, kBlocks);
}

}  // namespace

void relayout(const Queue& queue, const Relayout (&copies)[2], int size) {
  const int64_t first = tiles_of(copies[0]), tiles = first + tiles_of(copies[1]);
  if (tiles == 0) return;
  const unsigned grid = grid_x("x", tiles);
  if (size == 1)
    relayout_kernel<uint8_t><<<grid, kThreads, 0, queue.stream()>>>(copies[0], copies[1], static_cast<uint32_t>(first));
  else
    relayout_kernel<float><<<grid, kThreads, 0, queue.stream()>>>(copies[0], copies[1], static_cast<uint32_t>(first));
}

}  // namespace ted
