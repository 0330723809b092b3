// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Part of cast/tensor.cuh: a kernel of tiles, for column-wise codes and column sums.
//
// A tile has 128 rows and 64 columns. A thread takes eight columns of four rows: 16-byte loads of bf16, 8-byte stores
// of row-wise codes. Its 4 x 8 codes are transposed in registers into eight words of four rows, which meet those of
// other threads in shared memory and leave as 128 contiguous bytes of every column.
#pragma once

namespace ted {
namespace tensor_cast {

constexpr int64_t kTileColumns = 64;
constexpr int kAcross = kTileColumns / kVector;  // threads side by side
constexpr int kRowsOfThread = kTileRows * kAcross / kThreads;
static_assert(kRowsOfThread == 4, "a word holds four rows");
// Words between columns of the tile in shared memory: threads of a warp write to 32 banks, and 16-byte reads of a
// column are aligned.
constexpr int kColumnStride = kTileRows / 4 + 4;

// 4 x 4 bytes transposed: word i of the result holds byte i of every argument, a's lowest.
__device__ __forceinline__ void transpose_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&out)[4]) {
  const uint32_t ab_low = __byte_perm(a, b, 0x5140), ab_high = __byte_perm(a, b, 0x7362);
  const uint32_t cd_low = __byte_perm(c, d, 0x5140), cd_high = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(ab_low, cd_low, 0x5410);
  out[1] = __byte_perm(ab_low, cd_low, 0x7632);
  out[2] = __byte_perm(ab_high, cd_high, 0x5410);
  out[3] = __byte_perm(ab_high, cd_high, 0x7632);
}

// Column c of the tile is the (c % 8) * kAcross + c / 8 -th in shared memory: neighbouring threads, eight columns
// apart, then write to neighbouring ones.
__device__ __forceinline__ void keep_transposed(uint32_t* words, const Codes (&codes)[4], int across, int down) {
  uint32_t columns[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 0)
      transpose_bytes(codes[0].low, codes[1].low, codes[2].low, codes[3].low, columns);
    else
      transpose_bytes(codes[0].high, codes[1].high, codes[2].high, codes[3].high, columns);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[((4 * half + i) * kAcross + across) * kColumnStride + down] = columns[i];
  }
}

template <bool Full>
__device__ __forceinline__ void store_columns(const uint32_t* words, uint8_t* target, int64_t rows, int64_t columns,
                                              int64_t row0, int64_t column0) {
  constexpr int kRuns = kTileRows / 16;  // of 16 bytes
#pragma unroll
  for (int i = threadIdx.x; i < kTileColumns * kRuns; i += kThreads) {
    const int kept = i / kRuns, run = i % kRuns;
    const int64_t column = column0 + kept % kAcross * kVector + kept / kAcross;
    const uint32_t* source = words + kept * kColumnStride + 4 * run;
    const int64_t row = row0 + 16 * run;
    uint8_t* at = target + column * rows + row;
    if constexpr (Full) {
      *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(source);
    } else if (column < columns) {
      for (int j = 0; j < 16 && row + j < rows; ++j) at[j] = reinterpret_cast<const uint8_t*>(source)[j];
    }
  }
}

// Sums of the tile's columns: each thread's four rows, then the threads of a warp, then the warps, always in this
// order.
__device__ __forceinline__ void store_sums(float* target, const Values& sums, float (*shared)[kTileColumns],
                                           int64_t columns, int64_t column0) {
  const int across = threadIdx.x % kAcross, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    float sum = sums[i];
#pragma unroll
    for (int offset = kAcross; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane < kAcross) shared[warp][across * kVector + i] = sum;
  }
  __syncthreads();
  if (threadIdx.x < kTileColumns && column0 + threadIdx.x < columns) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) sum += shared[w][threadIdx.x];
    target[threadIdx.x] = sum;
  }
}

// What a thread carries from its rows to the end of the tile.
struct Found {
  Values sums{};
  float amax = 0.0f;

  template <bool Sums>
  __device__ __forceinline__ void add(const Values& v) {
    amax = max_magnitude(amax, v);
    if constexpr (Sums) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) sums[j] += v[j];
    }
  }
};

// A tile of codes in shared memory, by columns.
using Kept = uint32_t[kTileColumns * kColumnStride];

// A thread's four rows of a tile that lies inside the matrix; `column` is in the first of the halves.
template <bool Sums, class Source, int H>
__device__ __forceinline__ void cast_inside(const Source& source, const TensorCast& cast, int64_t row, int64_t column,
                                            Kept (&kept)[H], float* shared, Found (&found)[H]) {
  typename Source::template Raw<kVector> raw[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) raw[i] = source.template fetch<kVector, true>(row + i, column, kVector);
  const Encoder encoder = encoder_of(cast, shared);  // after the loads are on their way
  const int64_t columns = source.columns(), span = span_of(source);
  Codes codes[H][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Values v[H];
    evaluate(source, raw[i], v);
#pragma unroll
    for (int h = 0; h < H; ++h) {
      const int64_t at = (row + i) * columns + h * span + column;
      found[h].template add<Sums>(v[h]);
      if (cast.out != nullptr) store_values<true>(cast.out, cast.out_dtype, at, v[h], kVector);
      codes[h][i] = encoder(v[h]);
      if (cast.row != nullptr) store_codes<true>(cast.row + at, codes[h][i], kVector);
    }
  }
  if (cast.column == nullptr) return;
#pragma unroll
  for (int h = 0; h < H; ++h) keep_transposed(kept[h], codes[h], threadIdx.x % kAcross, threadIdx.x / kAcross);
}

// The same at an edge, or where something is not aligned: one row after the other.
template <bool Sums, class Source, int H>
__device__ __forceinline__ void cast_edge(const Source& source, const TensorCast& cast, int64_t row, int64_t column,
                                          Kept (&kept)[H], float* shared, Found (&found)[H]) {
  const Encoder encoder = encoder_of(cast, shared);
  const int64_t columns = source.columns(), span = span_of(source);
  const int place = threadIdx.x % kAcross * kColumnStride + threadIdx.x / kAcross;
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int64_t valid = row + i < source.rows() ? span - column : 0;
    if (valid <= 0) return;
    Values v[H];
    evaluate(source, source.template fetch<kVector, false>(row + i, column, valid), v);
#pragma unroll
    for (int h = 0; h < H; ++h) {
      const int64_t at = (row + i) * columns + h * span + column;
      clear_invalid(v[h], valid);
      found[h].template add<Sums>(v[h]);
      if (cast.out != nullptr) store_values<false>(cast.out, cast.out_dtype, at, v[h], valid);
      const Codes codes = encoder(v[h]);
      if (cast.row != nullptr) store_codes<false>(cast.row + at, codes, valid);
      uint8_t* bytes = reinterpret_cast<uint8_t*>(kept[h] + place) + i;
#pragma unroll
      for (int j = 0; j < kVector; ++j)
        bytes[4 * j * kAcross * kColumnStride] = static_cast<uint8_t>((j < 4 ? codes.low : codes.high) >> 8 * (j % 4));
    }
  }
}

template <bool Full, bool Sums, class Source, int H>
__device__ __forceinline__ void cast_tile(const Source& source, const TensorCast& cast, int64_t row0, int64_t column0,
                                          Kept (&kept)[H], float* shared) {
  const int64_t row = row0 + 4 * (threadIdx.x / kAcross), column = column0 + threadIdx.x % kAcross * kVector;
  const int64_t rows = source.rows(), columns = source.columns(), span = span_of(source);
  Found found[H];
  if constexpr (Full)
    cast_inside<Sums>(source, cast, row, column, kept, shared, found);
  else
    cast_edge<Sums>(source, cast, row, column, kept, shared, found);
  if (cast.column != nullptr) {
    __syncthreads();
#pragma unroll
    for (int h = 0; h < H; ++h)
      store_columns<Full>(kept[h], cast.column + h * span * rows, rows, span, row0, column0);
  }
  if constexpr (Sums) {
    __shared__ float shared_sums[H][kThreads / 32][kTileColumns];
#pragma unroll
    for (int h = 0; h < H; ++h)
      store_sums(cast.sums + row0 / kTileRows * columns + h * span + column0, found[h].sums, shared_sums[h], span,
                 column0);
  }
  float amax = found[0].amax;
  if constexpr (H == 2) amax = fmaxf(amax, found[1].amax);
  record_amax(cast.amax, amax, shared);
}

// Blocks that a multiprocessor is to hold, 0 for what the compiler finds best. Sources of two halves are told that they
// can do with the registers for three.
template <class Source, bool Sums>
constexpr int min_blocks() {
  return HalvesOf<Source>::value == 2 && !Sums && sizeof(typename Source::template Raw<kVector>) <= 48 ? 3 : 0;
}

// A block a tile, of every half. wide: whole tiles may be stored in whole vectors.
template <class Source, bool Sums>
__global__ void __launch_bounds__(kThreads, min_blocks<Source, Sums>())
cast_tiles(Source source, TensorCast cast, uint32_t across, bool wide) {
  __shared__ alignas(16) Kept kept[HalvesOf<Source>::value];
  __shared__ float shared[kThreads / 32];
  if constexpr (Sums) let_next_start();
  if (cast.noop != nullptr && *cast.noop != 0.0f) return;
  source.begin();
  // Along rows: reads are then contiguous. Walking down several tiles first, for longer runs of column-wise writes, was
  // 1 to 3% slower on an H100.
  const uint32_t tile = visit(cast), down = tile / across;
  const int64_t row0 = kTileRows * down, column0 = kTileColumns * (tile - down * across);
  if (wide && row0 + kTileRows <= source.rows() && column0 + kTileColumns <= span_of(source))
    cast_tile<true, Sums>(source, cast, row0, column0, kept, shared);
  else
    cast_tile<false, Sums>(source, cast, row0, column0, kept, shared);
}

template <bool Sums, class Source>
void launch_tiles(const Queue& queue, const Source& source, const TensorCast& cast, bool early) {
  const int64_t rows = source.rows(), columns = source.columns();
  const int64_t down = ceil_div(rows, kTileRows), across = ceil_div(span_of(source), kTileColumns);
  if (down * across == 0) return launch_rows(queue, source, cast, early);
  const bool wide = source.aligned() && is_aligned(cast.row, columns, kVector) && is_aligned(cast.column, rows) &&
                    is_aligned(cast.out, columns * size_of(cast.out_dtype));
  with_flag(cast.sums != nullptr, [&](auto sums) {
    launch(queue, early, cast_tiles<Source, Sums && decltype(sums)::value>, grid_x("x", down * across), kThreads,
           source, cast, static_cast<uint32_t>(across), wide);
  });
}

}  // namespace tensor_cast
}  // namespace ted
