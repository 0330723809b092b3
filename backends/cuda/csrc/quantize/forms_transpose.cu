// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Bytes transposed: a block of 256 threads takes a tile of 128x128, each thread 16 columns of 4 rows, which it turns
// into 16 words of 4 rows. Those meet in shared memory and leave as 128 contiguous bytes of every column.
#include "quantize/forms.h"

namespace ted {
namespace {

constexpr int kThreads = 256, kTile = kBlockTile;
constexpr int kAcross = kTile / 16, kColumnWords = kTile / 4;

// Word `down` of a tile column, in units of 4 words that are swapped by column: the threads of a warp, 8 across and 4
// down, then write to 32 banks.
__device__ __forceinline__ int place(int column, int down) {
  return column * kColumnWords + ((down / 4) ^ (column / 16)) * 4 + down % 4;
}

// 4x4 bytes: word i of the result holds byte i of every argument, a's lowest.
__device__ __forceinline__ void turn(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t* words, int column,
                                     int down) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  words[place(column, down)] = __byte_perm(ab_low, cd_low, 0x5410);
  words[place(column + 1, down)] = __byte_perm(ab_low, cd_low, 0x7632);
  words[place(column + 2, down)] = __byte_perm(ab_high, cd_high, 0x5410);
  words[place(column + 3, down)] = __byte_perm(ab_high, cd_high, 0x7632);
}

template <bool Whole>
__device__ __forceinline__ void transpose_tile(const uint8_t* from, uint8_t* to, int64_t rows, int64_t columns,
                                               int64_t row0, int64_t column0, uint32_t* words) {
  const int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  const int64_t row = row0 + 4 * down, column = column0 + 16 * across;
  Vec<uint8_t, 16> loaded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint8_t* at = from + (row + i) * columns + column;
    loaded[i] = Whole ? *reinterpret_cast<const Vec<uint8_t, 16>*>(at)
                      : load_vector<uint8_t, 16>(at, row + i < rows ? columns - column : 0, false);
  }
  uint4 lines[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) lines[i] = reinterpret_cast<const uint4&>(loaded[i]);
  turn(lines[0].x, lines[1].x, lines[2].x, lines[3].x, words, 16 * across, down);
  turn(lines[0].y, lines[1].y, lines[2].y, lines[3].y, words, 16 * across + 4, down);
  turn(lines[0].z, lines[1].z, lines[2].z, lines[3].z, words, 16 * across + 8, down);
  turn(lines[0].w, lines[1].w, lines[2].w, lines[3].w, words, 16 * across + 12, down);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int unit = threadIdx.x % 8, c = threadIdx.x / 8 + i * 32;
    const auto& v = *reinterpret_cast<const Vec<uint8_t, 16>*>(words + place(c, 4 * unit));
    const int64_t m = row0 + 16 * unit;
    uint8_t* at = to + (column0 + c) * rows + m;
    if constexpr (Whole)
      *reinterpret_cast<Vec<uint8_t, 16>*>(at) = v;
    else if (column0 + c < columns)
      store_vector<uint8_t, 16>(at, v, rows - m, false);
  }
}

__global__ void __launch_bounds__(kThreads, 5)
    transpose_kernel(const uint8_t* from, uint8_t* to, int64_t rows, int64_t columns, const float* scale,
                     float* transposed_scale, const Raster raster, bool wide) {
  __shared__ alignas(16) uint32_t words[kTile * kColumnWords];
  int64_t tile_row, tile_column;
  raster.tile(blockIdx.x, &tile_row, &tile_column);
  if (threadIdx.x == 0 && scale != nullptr)
    transposed_scale[tile_column * raster.rows + tile_row] = scale[tile_row * raster.columns + tile_column];
  const int64_t row0 = tile_row * kTile, column0 = tile_column * kTile;
  if (wide && row0 + kTile <= rows && column0 + kTile <= columns)
    transpose_tile<true>(from, to, rows, columns, row0, column0, words);
  else
    transpose_tile<false>(from, to, rows, columns, row0, column0, words);
}

}  // namespace

void transpose_bytes(const Queue& queue, const uint8_t* from, uint8_t* to, int64_t rows, int64_t columns,
                     const float* scale, float* transposed_scale) {
  if (require_count("x.row_data", rows, columns) == 0) return;
  const Raster raster = Raster::over(rows, columns);
  const bool wide = is_aligned(from, columns) && is_aligned(to, rows);
  transpose_kernel<<<grid_x("x.row_data", Raster::tiles_of(rows, columns)), kThreads, 0, queue.stream()>>>(
      from, to, rows, columns, scale, transposed_scale, raster, wide);
}

}  // namespace ted
