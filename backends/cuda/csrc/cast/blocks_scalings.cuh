// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What the scalings of te_dispatch.numerics.quantizers do differently within a tile (blocks.cuh): which lanes a warp's
// patches lie in, how their amaxes combine to blocks, what scale a block gets and where its inverse is written, and how
// a patch row or column is encoded with it.
#pragma once

#include "cast/blocks_patch.cuh"

namespace ted {
namespace block_cast {

// Where a thread's patch lies in the tile.
struct Lanes {
  int row, column;
  int row_warp;  // of the warps that share columns, this one's number
};

// The default: a warp takes 16 rows of a tile, its lane bits 1, 2, 4, 8 choose the column and 16 the row.
template <int S>
struct Layout {
  static constexpr int kRowWarps = 8;
  using Down = Masks<16>;
  __device__ __forceinline__ static Lanes lanes() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return {warp * 16 + lane / 16 * kPatch, lane % 16 * kPatch, warp};
  }
};
// 32 rows and 64 columns a warp: whole blocks both ways.
template <>
struct Layout<kMXFP8> {
  static constexpr int kRowWarps = 4;
  using Down = Masks<16, 8>;
  __device__ __forceinline__ static Lanes lanes() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    return {warp % 4 * 32 + lane / 8 * kPatch, warp / 4 * 64 + lane % 8 * kPatch, warp % 4};
  }
};

// The chip's conversions, to either OCP encoding; or also integers, for any.
constexpr int kChip = 3, kEither = 4;
__host__ __device__ inline bool is_ocp(int cast) { return (cast & ~kCommon) == kE4M3 || (cast & ~kCommon) == kE5M2; }

struct ScalingShared {
  alignas(16) float columns[8][kTile];  // of every warp
  alignas(16) float factors[kTile];     // of tile columns
  float warps[kThreads / 32];
};

__device__ __forceinline__ float decode_e4m3(uint32_t code) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(code)));
  return __low2float(reinterpret_cast<const __half2&>(halves));
#else
  return decode_integer(code, kE4M3);
#endif
}

// E8M0 code of ceil(log2(RN32(amax / max_value))), clamped to [00, FE]; amax is no NaN.
__device__ __forceinline__ uint32_t e8m0_from_amax(float amax, float max_value) {
  const uint32_t bits = __float_as_uint(__fdiv_rn(amax, max_value));
  const uint32_t exponent = bits >> 23, mantissa = bits & 0x7fffffu;
  // A subnormal ratio is below 2^-126: it needs code 1 beyond 2^-127 (mantissa 0x400000), else code 0.
  return min(exponent + (mantissa > (exponent == 0 ? 0x400000u : 0u) ? 1u : 0u), 254u);
}

// 2^(127 - code), what values are multiplied by.
__device__ __forceinline__ float e8m0_inverse(uint32_t code) {
  return __uint_as_float(code == 254 ? 0x00400000u : (254 - code) << 23);
}

// A patch's place, and what every scaling's steps need. Steps, in this order, by all threads: reduce, row_factors if
// there is a row-wise copy, column_factors if there is a column-wise one.
struct ScalerBase {
  const BlockCast& cast;
  ScalingShared& shared;
  Lanes at;
  int64_t row, column;  // of the patch in the matrix
  int64_t rows, columns;
  int64_t tile_row, tile_column;
  float global_scale = 1.0f;

  __device__ __forceinline__ float fp32_scale(float amax) const {
    return scale_from_amax(amax, cast.format.max_value, cast.epsilon, cast.power_of_two);
  }
  // One amax of the tile, in every thread.
  template <class P>
  __device__ __forceinline__ float tile_amax(const P& patch) const {
    float amax[kPatch];
    patch.fold_rows(Masks<1>{}, amax);
#pragma unroll
    for (int i = 1; i < Masks<1>::kLeft; ++i) amax[0] = fmaxf(amax[0], amax[i]);
    return block_reduce<kThreads>(amax[0], 0.0f, Max(), shared.warps);
  }
  __device__ __forceinline__ static void fill(float (&factors)[kPatch], float factor) {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) factors[i] = factor;
  }
};

// Full: the tile lies within the matrix.
template <int S, bool Full>
struct Scaler;

// 1x128: a row of a tile is a row-wise block, a column a column-wise one.
template <bool Full>
struct Scaler<kBlock1D, Full> : ScalerBase {
  using Across = Masks<8, 4, 2, 1>;
  float row_amax;

  // The inverse of a line's scale for one block; 0 beyond the lines that the matrix has.
  __device__ __forceinline__ static void store_scale(void* scales, const ScaleGrid& grid, int64_t line, int64_t lines,
                                                     int64_t block, float scale) {
    if (Full || line < grid.lines)
      static_cast<float*>(scales)[grid.at(line, block)] = Full || line < lines ? __fdiv_rn(1.0f, scale) : 0.0f;
  }
  template <class P>
  __device__ __forceinline__ void reduce(const P& patch) {
    if (cast.row != nullptr) {
      float amax[kPatch];
      patch.fold_rows(Across{}, amax);
      row_amax = amax[0];
    }
    if (cast.column != nullptr) {
      float amax[kPatch];
      patch.fold_columns(Masks<16>{}, amax);
      *reinterpret_cast<float4*>(&shared.columns[at.row_warp][at.column + Masks<16>::first()]) =
          make_float4(amax[0], amax[1], amax[2], amax[3]);
    }
    if (cast.column == nullptr) return;
    __syncthreads();
    // The scales are read after the row-wise codes have been made: column_factors waits for them.
    if (threadIdx.x < kTile) {
      const int c = threadIdx.x;
      float amax = shared.columns[0][c];
#pragma unroll
      for (int warp = 1; warp < 8; ++warp) amax = fmaxf(amax, shared.columns[warp][c]);
      const float scale = fp32_scale(amax);
      shared.factors[c] = scale;
      const int64_t k = tile_column * kTile + c;
      store_scale(cast.column_scale_inv, cast.column_scales, k, columns, tile_row, scale);
    }
  }
  template <class P>
  __device__ __forceinline__ void row_factors(const P& patch, float (&factors)[kPatch]) {
    const float scale = fp32_scale(row_amax);
    const int64_t m = row + Across::first();
    if (Across::writes()) store_scale(cast.row_scale_inv, cast.row_scales, m, rows, tile_column, scale);
    factors[0] = scale;
    spread(Across{}, factors);
  }
  template <class P>
  __device__ __forceinline__ void column_factors(const P& patch, float (&factors)[kPatch]) {
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kPatch; j += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&shared.factors[at.column + j]);
      factors[j] = four.x, factors[j + 1] = four.y, factors[j + 2] = four.z, factors[j + 3] = four.w;
    }
  }
};

// 128x128: one scale, two copies of the same codes.
template <bool Full>
struct Scaler<kBlock2D, Full> : ScalerBase {
  float scale;

  // After the scale of a line's last block, the line's padding.
  __device__ __forceinline__ static void store_scale(void* scales, const ScaleGrid& grid, int64_t line, int64_t block,
                                                     int64_t blocks, float inverse) {
    float* to = static_cast<float*>(scales) + grid.at(line, block);
    *to = inverse;
    if (block + 1 < blocks) return;
    for (int64_t i = block + 1; i < grid.blocks; ++i) *++to = 0.0f;
  }
  template <class P>
  __device__ __forceinline__ void reduce(const P& patch) {
    scale = fp32_scale(tile_amax(patch));
    if (threadIdx.x != 0) return;
    const float inverse = __fdiv_rn(1.0f, scale);
    if (cast.row != nullptr)
      store_scale(cast.row_scale_inv, cast.row_scales, tile_row, tile_column, cast.raster.columns, inverse);
    if (cast.column != nullptr)
      store_scale(cast.column_scale_inv, cast.column_scales, tile_column, tile_row, cast.raster.rows, inverse);
  }
  template <class P>
  __device__ __forceinline__ void row_factors(const P&, float (&factors)[kPatch]) const {
    fill(factors, scale);
  }
  template <class P>
  __device__ __forceinline__ void column_factors(const P&, float (&factors)[kPatch]) const {
    fill(factors, scale);
  }
};

// The scale of a whole tensor, 1 where the scaling has none: kTensor's, or kNVFP4's 448 * 6 / amax. Every thread of the
// block calls this; one of the first block writes what follows from it.
template <int S>
__device__ __forceinline__ float whole_scale(const BlockCast& cast, float* shared) {
  if constexpr (S != kTensor && S != kNVFP4) return 1.0f;
  float scale;
  if (S == kTensor && cast.scale != nullptr) {
    scale = *cast.scale;
  } else {
    float amax;
    if (cast.maxima_count == 1) {
      amax = *cast.maxima;  // given by the caller, NaN perhaps
    } else {
      amax = 0.0f;
      for (int64_t i = threadIdx.x; i < cast.maxima_count; i += kThreads) amax = fmaxf(amax, cast.maxima[i]);
      amax = block_reduce<kThreads>(amax, 0.0f, Max(), shared);
    }
    scale = S == kNVFP4 ? scale_from_amax(amax, 448.0f * 6.0f, 0.0f, false)
                        : scale_from_amax(amax, cast.format.max_value, cast.epsilon, cast.power_of_two);
  }
  return scale;
}

template <int S>
__device__ __forceinline__ void write_whole_scale(const BlockCast& cast, float scale) {
  const float inverse = __fdiv_rn(1.0f, scale);
  if constexpr (S == kNVFP4) {
    *cast.global_scale_inv = inverse;
  } else if constexpr (S == kTensor) {
    if (cast.row_scale_inv != nullptr) *static_cast<float*>(cast.row_scale_inv) = inverse;
    if (cast.column_scale_inv != nullptr) *static_cast<float*>(cast.column_scale_inv) = inverse;
  }
}

template <bool Full>
struct Scaler<kTensor, Full> : ScalerBase {
  float scale;

  template <class P>
  __device__ __forceinline__ void reduce(const P& patch) {
    scale = whole_scale<kTensor>(cast, shared.warps);
    if (tile_row == 0 && tile_column == 0 && threadIdx.x == 0) write_whole_scale<kTensor>(cast, scale);
    if (cast.amax == nullptr) return;
    const float amax = tile_amax(patch);
    if (threadIdx.x == 0) atomic_max_nonnegative(cast.amax, amax);
  }
  template <class P>
  __device__ __forceinline__ void row_factors(const P&, float (&factors)[kPatch]) const {
    fill(factors, scale);
  }
  template <class P>
  __device__ __forceinline__ void column_factors(const P&, float (&factors)[kPatch]) const {
    fill(factors, scale);
  }
};

// 32 elements, in the row for the row-wise copy and down the rows for the column-wise one.
template <bool Full>
struct Scaler<kMXFP8, Full> : ScalerBase {
  using Across = Masks<2, 1>;
  using Down = Layout<kMXFP8>::Down;

  template <class P>
  __device__ __forceinline__ void reduce(const P&) {}
  template <class P>
  __device__ __forceinline__ void row_factors(const P& patch, float (&factors)[kPatch]) {
    float amax[kPatch];
    patch.fold_rows(Across{}, amax);
    const int64_t m = row + Across::first(), blocks = (columns + 31) / 32, block = column / 32;
#pragma unroll
    for (int i = 0; i < Across::kLeft; ++i) {
      const uint32_t code = e8m0_from_amax(amax[i], cast.format.max_value);
      if (Full || (m + i < rows && block < blocks))
        static_cast<uint8_t*>(cast.row_scale_inv)[(m + i) * blocks + block] = code;
      factors[i] = e8m0_inverse(code);
    }
    spread(Across{}, factors);
  }
  template <class P>
  __device__ __forceinline__ void column_factors(const P& patch, float (&factors)[kPatch]) {
    float amax[kPatch];
    patch.fold_columns(Down{}, amax);
    const int64_t k = column + Down::first(), block = row / 32;
#pragma unroll
    for (int j = 0; j < Down::kLeft; ++j) {
      const uint32_t code = e8m0_from_amax(amax[j], cast.format.max_value);
      if (Full || (k + j < columns && block * 32 < rows))
        static_cast<uint8_t*>(cast.column_scale_inv)[block * columns + k + j] = code;
      factors[j] = e8m0_inverse(code);
    }
    spread(Down{}, factors);
  }
};

// 16 elements with an e4m3fn scale, which are the factors: what divides x * S.
template <bool Full>
struct Scaler<kNVFP4, Full> : ScalerBase {
  using Across = Masks<1>;
  using Down = Masks<16>;
  float square_amax = 0.0f;  // of 16x16 values, where those share a scale

  template <class P>
  __device__ __forceinline__ void reduce(const P& patch) {
    global_scale = whole_scale<kNVFP4>(cast, shared.warps);
    if (tile_row == 0 && tile_column == 0 && threadIdx.x == 0) write_whole_scale<kNVFP4>(cast, global_scale);
    if (!cast.two_d) return;
    float amax[kPatch];
    patch.fold_rows(Across{}, amax);
#pragma unroll
    for (int i = 0; i < Across::kLeft; ++i) square_amax = fmaxf(square_amax, amax[i]);
    square_amax = fmaxf(square_amax, __shfl_xor_sync(0xffffffffu, square_amax, 1));
    square_amax = fmaxf(square_amax, __shfl_xor_sync(0xffffffffu, square_amax, 16));
  }
  __device__ __forceinline__ uint32_t scale_code(float amax) const {
    return encode<kHardE4M3>(__fdiv_rn(__fmul_rn(amax, global_scale), 6.0f), format_of(kE4M3));
  }
  template <class P>
  __device__ __forceinline__ void row_factors(const P& patch, float (&factors)[kPatch]) {
    float amax[kPatch];
    if (cast.two_d)
      fill(amax, square_amax);
    else
      patch.fold_rows(Across{}, amax);
    const int64_t m = row + Across::first(), blocks = (columns + 15) / 16, block = column / 16;
#pragma unroll
    for (int i = 0; i < Across::kLeft; ++i) {
      const uint32_t code = scale_code(amax[i]);
      if (Full || (m + i < rows && block < blocks))
        static_cast<uint8_t*>(cast.row_scale_inv)[(m + i) * blocks + block] = code;
      factors[i] = decode_e4m3(code);
    }
    spread(Across{}, factors);
  }
  template <class P>
  __device__ __forceinline__ void column_factors(const P& patch, float (&factors)[kPatch]) {
    float amax[kPatch];
    if (cast.two_d)
      fill(amax, square_amax);
    else
      patch.fold_columns(Down{}, amax);
    const int64_t k = column + Down::first(), blocks = (rows + 15) / 16, block = row / 16;
#pragma unroll
    for (int j = 0; j < Down::kLeft; ++j) {
      const uint32_t code = scale_code(amax[j]);
      if (Full || (k + j < columns && block < blocks))
        static_cast<uint8_t*>(cast.column_scale_inv)[(k + j) * blocks + block] = code;
      factors[j] = decode_e4m3(code);
    }
    spread(Down{}, factors);
  }
};

}  // namespace block_cast
}  // namespace ted
