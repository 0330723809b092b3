// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Casts with a scale per block: both copies of a matrix in one pass over a Source (source.cuh).
//
// A block of 256 threads takes a tile of 128x128, each thread a patch of 8x8 whose values stay in registers between the
// amaxes and the codes (blocks_patch.cuh). All blocks of all scalings are unions of patch rows (row-wise copy) or patch
// columns (column-wise copy), so that a scaling says how the amaxes of patches combine (blocks_scalings.cuh), and then
// every patch row and column has one factor. Column-wise codes that are stored transposed pass through shared memory.
//
//   BlockCast cast{};                          // what to write: blocks.h
//   cast_blocks<kBlock1D>(queue, source, cast);  // one launch; or kBlock2D, kMXFP8, kNVFP4, kTensor
//
// kNVFP4 needs the tensor's maxima first: launch_maxima (tensor.cuh). `sums` become a bias gradient by launch_sums.
#pragma once

#include "cast/blocks_codes.cuh"

namespace ted {
namespace block_cast {

// The column-wise codes of a tile, transposed, on their way to 16-byte stores. A patch column is a chunk of `Bytes`;
// chunk i of tile column c lies at i ^ (c / 8), so that neither the patches' writes nor the reads meet in a bank.
template <int Bytes>
struct TransposedTile {
  static constexpr int kPitch = kPatches * Bytes, kUnits = kPitch / 16;
  alignas(16) uint8_t bytes[kTile * kPitch];

  template <class Chunk>
  __device__ __forceinline__ void put(const Lanes& at, int j, Chunk chunk) {
    const int patch_column = at.column / kPatch, patch_row = at.row / kPatch;
    *reinterpret_cast<Chunk*>(bytes + (at.column + j) * kPitch + (patch_row ^ patch_column) * Bytes) = chunk;
  }
  // 16 bytes from byte 16 * unit of a tile column on.
  __device__ __forceinline__ uint4 get(int column, int unit) const {
    const int key = column / kPatch, chunks = 16 / Bytes;
    uint4 v = *reinterpret_cast<const uint4*>(bytes + column * kPitch + (unit ^ (key / chunks)) * 16);
    if (key & (chunks / 2)) v = {v.z, v.w, v.x, v.y};
    if constexpr (Bytes == 4) {
      if (key & 1) v = {v.y, v.x, v.w, v.z};
    }
    return v;
  }
};

struct Nothing {};

template <int S>
struct TileShared {
  ScalingShared scaling;
  std::conditional_t<S == kMXFP8, Nothing, TransposedTile<S == kNVFP4 ? 4 : 8>> codes;
};

// Writes `codes` where column-wise copies are transposed. All threads have put their chunks.
template <bool Full, int Bytes>
__device__ __forceinline__ void store_transposed(const TransposedTile<Bytes>& codes, const BlockCast& cast,
                                                 int64_t tile_row, int64_t tile_column, int64_t columns) {
  constexpr int kUnits = TransposedTile<Bytes>::kUnits, kColumns = kThreads / kUnits;
  const int unit = threadIdx.x % kUnits;
  int column = threadIdx.x / kUnits;
  const int64_t offset = tile_row * TransposedTile<Bytes>::kPitch + unit * 16;
  uint8_t* to = cast.column + (tile_column * kTile + column) * cast.column_pitch + offset;
#pragma unroll
  for (int i = 0; i < kTile / kColumns; ++i, column += kColumns, to += kColumns * cast.column_pitch) {
    const uint4 v = codes.get(column, unit);
    if constexpr (Full)
      *reinterpret_cast<uint4*>(to) = v;
    else if (tile_column * kTile + column < columns && offset < cast.column_pitch)
      store_vector<uint8_t, 16>(to, reinterpret_cast<const Vec<uint8_t, 16>&>(v), cast.column_pitch - offset,
                                cast.column_wide);
  }
}

// Sums of the tile's columns in a fixed order, to sums[tile_row, column].
template <int S, class P>
__device__ __forceinline__ void write_sums(P& patch, const Lanes& at, float (*partial)[kTile], const BlockCast& cast,
                                           int64_t tile_row, int64_t tile_column, int64_t columns) {
  float sums[kPatch] = {};
  patch.pin();
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    float v[kPatch];
    patch.row(i, v);
#pragma unroll
    for (int j = 0; j < kPatch; ++j) sums[j] += v[j];
  }
  using Down = typename Layout<S>::Down;
  fold(Down{}, sums, Sum());
#pragma unroll
  for (int j = 0; j < Down::kLeft; ++j) partial[at.row_warp][at.column + Down::first() + j] = sums[j];
  __syncthreads();
  const int64_t column = tile_column * kTile + threadIdx.x;
  if (threadIdx.x < kTile && column < columns) {
    float sum = partial[0][threadIdx.x];
    for (int i = 1; i < Layout<S>::kRowWarps; ++i) sum += partial[i][threadIdx.x];
    cast.sums[tile_row * columns + column] = sum;
  }
  __syncthreads();
}

// The patch as it is, rounded to out_dtype.
template <bool Full, class T, class P>
__device__ __forceinline__ void write_out(P& patch, const BlockCast& cast, int64_t row, int64_t column, int valid_rows,
                                          int valid_columns, int64_t columns) {
  T* to = static_cast<T*>(cast.out) + row * columns + column;
  patch.pin();
#pragma unroll
  for (int i = 0; i < kPatch; ++i, to += columns) {
    float v[kPatch];
    patch.row(i, v);
    Vec<T, kPatch> rounded;
#pragma unroll
    for (int j = 0; j < kPatch; ++j) rounded[j] = from_float<T>(v[j]);
    if constexpr (Full)
      *reinterpret_cast<Vec<T, kPatch>*>(to) = rounded;
    else if (i < valid_rows)
      store_vector<T, kPatch>(to, rounded, valid_columns, cast.out_wide);
  }
}

// The cast of one tile by one block of threads. Full: it lies within the matrix, and whole accesses are aligned.
template <int S, int Mode, bool Full, class Source>
__device__ __forceinline__ void cast_tile(const Source& source, const BlockCast& cast, int64_t tile_row,
                                          int64_t tile_column, TileShared<S>& shared) {
  const Lanes at = Layout<S>::lanes();
  const int64_t rows = source.rows(), columns = source.columns();
  const int64_t row = tile_row * kTile + at.row, column = tile_column * kTile + at.column;
  const int valid_rows = Full ? kPatch : static_cast<int>(min(max(rows - row, int64_t{0}), int64_t{kPatch}));
  const int valid_columns = Full ? kPatch : static_cast<int>(min(max(columns - column, int64_t{0}), int64_t{kPatch}));

  Patch<Source> patch;
  patch.template load<Full>(source, row, column, valid_rows, valid_columns);
  if (cast.out != nullptr) {
    if (cast.out_dtype == kBFloat16)
      write_out<Full, __nv_bfloat16>(patch, cast, row, column, valid_rows, valid_columns, columns);
    else if (cast.out_dtype == kFloat16)
      write_out<Full, __half>(patch, cast, row, column, valid_rows, valid_columns, columns);
    else
      write_out<Full, float>(patch, cast, row, column, valid_rows, valid_columns, columns);
  }
  if (cast.sums != nullptr) write_sums<S>(patch, at, shared.scaling.columns, cast, tile_row, tile_column, columns);

  patch.pin();
  Scaler<S, Full> scaler{{cast, shared.scaling, at, row, column, rows, columns, tile_row, tile_column}};
  scaler.reduce(patch);
  float factors[kPatch];
  if (cast.row != nullptr) {
    patch.pin();
    scaler.row_factors(patch, factors);
    uint8_t* to = cast.row + row * cast.row_pitch;
#pragma unroll
    for (int i = 0; i < kPatch; ++i, to += cast.row_pitch) {
      float v[kPatch];
      patch.row(i, v);
      const auto codes = encode_run<S, Mode>(v, factors[i], scaler.global_scale, cast);
      if (Full || i < valid_rows) store_codes<Full>(to, codes, column, cast.row_pitch, cast.row_wide);
    }
  }
  if (cast.column == nullptr) return;
  patch.pin();
  scaler.column_factors(patch, factors);
  if constexpr (S == kMXFP8) {
    uint8_t* to = cast.column + row * cast.column_pitch;
#pragma unroll
    for (int i = 0; i < kPatch; ++i, to += cast.column_pitch) {
      float v[kPatch];
      patch.row(i, v);
      const auto codes = encode_each<Mode>(v, factors, cast);
      if (Full || i < valid_rows) store_codes<Full>(to, codes, column, cast.column_pitch, cast.column_wide);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kPatch; ++j) {
      float v[kPatch];
      patch.column(j, v);
      shared.codes.put(at, j, encode_run<S, Mode>(v, factors[j], scaler.global_scale, cast));
    }
    __syncthreads();
    store_transposed<Full>(shared.codes, cast, tile_row, tile_column, columns);
  }
}

// Whether tiles that lie within the matrix can be taken as Full.
template <int S, class Source>
__host__ __device__ bool takes_full(const Source& source, const BlockCast& cast) {
  return source.aligned() && cast.row_wide && cast.column_wide && cast.out_wide && (S == kNVFP4 || is_ocp(cast.cast));
}

template <int S, class Source>
__device__ __forceinline__ void cast_tile_of(const Source& source, const BlockCast& cast, uint32_t tile, bool full,
                                             TileShared<S>& shared) {
  int64_t tile_row, tile_column;
  cast.raster.tile(tile, &tile_row, &tile_column);
  tile_column = source.interleaved(tile_column, cast.raster.columns);
  if (full && (tile_row + 1) * kTile <= source.rows() && (tile_column + 1) * kTile <= source.columns())
    cast_tile<S, kChip, true>(source, cast, tile_row, tile_column, shared);
  else
    cast_tile<S, kEither, false>(source, cast, tile_row, tile_column, shared);
}

// Blocks per multiprocessor that registers shall suffice for. FP4 codes are made of many steps, which the chip below
// sm_100 is busy with anyway.
template <int S, class Source>
constexpr int kBlocksOf = S != kNVFP4                  ? Patch<Source>::kBlocks
                          : Patch<Source>::kBlocks > 2 ? 2
                                                       : 1;

template <int S, class Source>
__global__ void __launch_bounds__(kThreads, kBlocksOf<S, Source>)
    cast_blocks_kernel(const __grid_constant__ Source given, const __grid_constant__ BlockCast cast, bool full) {
  __shared__ TileShared<S> shared;
  if (cast.noop != nullptr && *cast.noop != 0.0f) return;
  Source source = given;
  source.begin();
  cast_tile_of<S>(source, cast, blockIdx.x, full, shared);
}

// A matrix without elements has a scale all the same where that is one for the whole tensor.
template <int S>
__global__ void __launch_bounds__(kThreads) scale_of_nothing_kernel(const __grid_constant__ BlockCast cast) {
  __shared__ float shared[kThreads / 32];
  if (cast.noop != nullptr && *cast.noop != 0.0f) return;
  const float scale = whole_scale<S>(cast, shared);
  if (threadIdx.x == 0) write_whole_scale<S>(cast, scale);
}

}  // namespace block_cast

// Casts a source: one launch. `cast` has pointers and options set; the rest is derived here.
template <int S, class Source>
void cast_blocks(const Queue& queue, const Source& source, BlockCast cast) {
  const int64_t count = require_count("x", source.rows(), source.columns());
  const unsigned grid = grid_x("x", Raster::tiles_of(source.rows(), source.columns()));
  cast.derive(S, source.rows(), source.columns());
  if (count == 0) {
    if constexpr (S == kNVFP4 || S == kTensor)
      block_cast::scale_of_nothing_kernel<S><<<1, block_cast::kThreads, 0, queue.stream()>>>(cast);
    return;
  }
  block_cast::cast_blocks_kernel<S, Source>
      <<<grid, block_cast::kThreads, 0, queue.stream()>>>(source, cast, block_cast::takes_full<S>(source, cast));
}

}  // namespace ted
