// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Codes to values: RN_dtype(RN32(decode(code) * scale_inv)), of every scaling and layout of scales.
#include "quantize/forms.h"

#include <cstring>

namespace ted {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;        // codes of one load: their values fill 16 bytes
constexpr int kRowsOfThread = 8;  // consecutive, so that all lie in one block down the rows
constexpr int kSquare = 64;       // side of the tiles that are transposed

// 2^(code - 127); FF is NaN.
__device__ __forceinline__ float decode_e8m0(uint32_t code) {
  return __uint_as_float(code == 255 ? 0x7fffffffu : code == 0 ? 0x00400000u : code << 23);
}

// Bits eem as the top of an fp32 number count 2^-126 of what they mean; the product is exact, subnormals included.
__device__ __forceinline__ float decode_e2m1(uint32_t code) {
  return __fmul_rn(__uint_as_float((code & 7) << 22 | (code & 8) << 28), 8.50705917e37f);
}

__device__ __forceinline__ float2 decode_two(uint32_t pair, int encoding) {
#if __CUDA_ARCH__ >= 890
  if (encoding == kE4M3 || encoding == kE5M2) {
    uint32_t halves;
    if (encoding == kE4M3)
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
    else
      asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
    return __half22float2(reinterpret_cast<const __half2&>(halves));
  }
#endif
  return make_float2(decode_integer(pair & 0xFF, encoding), decode_integer(pair >> 8 & 0xFF, encoding));
}

// 8 codes, in bytes or (kNVFP4) in nibbles.
__device__ __forceinline__ void decode_eight(uint2 codes, bool packed, int encoding, float (&v)[kVector]) {
  if (packed) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) v[i] = decode_e2m1(codes.x >> (4 * i));
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; i += 2) {
    const float2 two = decode_two((i < 4 ? codes.x : codes.y) >> (8 * (i % 4)), encoding);
    v[i] = two.x, v[i + 1] = two.y;
  }
}

// One access, or two of fp32. The compiler stores elements of 16 bits one by one here, or by two.
template <class T>
__device__ __forceinline__ void store_whole(T* target, const Vec<T, kVector>& v) {
  if constexpr (sizeof(T) == 2) {
    uint4 words;
    memcpy(&words, &v, sizeof(words));
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
  } else {
    *reinterpret_cast<Vec<T, kVector>*>(target) = v;
  }
}

// How positions in a copy become positions of scales, beside what the copy says.
struct Blocks {
  int row_shift, column_shift;  // 2-logarithms of a block's sides
  bool whole;                   // one scale

  static Blocks of(const StoredCopy& c) {
    switch (c.scaling) {
      case kTensor:
        return {0, 0, true};
      case kBlock1D:
        return {0, 7, false};
      case kBlock2D:
        return {7, 7, false};
      case kMXFP8:
        return c.down ? Blocks{5, 0, false} : Blocks{0, 5, false};
      default:
        return {0, 4, false};
    }
  }
};

__device__ __forceinline__ float scale_at(const StoredCopy& c, const Blocks& blocks, int64_t row, int64_t column,
                                          float global) {
  if (blocks.whole) return *static_cast<const float*>(c.scales.scale);
  const int64_t r = row >> blocks.row_shift, b = column >> blocks.column_shift;
  const int64_t at = c.down ? c.scales.offset(b, r) : c.scales.offset(r, b);
  if (c.scaling == kMXFP8) return decode_e8m0(static_cast<const uint8_t*>(c.scales.scale)[at]);
  if (c.scaling == kNVFP4)
    return __fmul_rn(decode_two(static_cast<const uint8_t*>(c.scales.scale)[at], kE4M3).x, global);
  return static_cast<const float*>(c.scales.scale)[at];
}

__device__ __forceinline__ int64_t pitch_of(const StoredCopy& c) {
  return c.scaling == kNVFP4 ? (c.columns + 1) / 2 : c.columns;
}

// 8 codes of a stored row that starts at `row`, from `column` on.
template <bool Full>
__device__ __forceinline__ uint2 fetch(const StoredCopy& c, const uint8_t* row, int64_t column, int64_t valid,
                                       bool wide) {
  if (c.scaling == kNVFP4) {
    if constexpr (Full) return make_uint2(*reinterpret_cast<const uint32_t*>(row + column / 2), 0);
    const Vec<uint8_t, 4> v = load_vector<uint8_t, 4>(row + column / 2, (valid + 1) / 2, wide);
    return make_uint2(reinterpret_cast<const uint32_t&>(v), 0);
  }
  if constexpr (Full) return *reinterpret_cast<const uint2*>(row + column);
  const Vec<uint8_t, 8> v = load_vector<uint8_t, 8>(row + column, valid, wide);
  return reinterpret_cast<const uint2&>(v);
}

// 8 columns of kRowsOfThread rows. Full: all lie within the copy, and whole accesses are aligned.
template <bool Full, class T>
__device__ __forceinline__ void dequantize_rows(const StoredCopy& c, const Blocks& blocks, T* to, int64_t row,
                                                int64_t column, bool wide, bool wide_to) {
  const int64_t valid = c.columns - column, pitch = pitch_of(c);
  uint2 codes[kRowsOfThread];
  const uint8_t* from = c.codes + row * pitch;
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i, from += pitch)
    codes[i] = Full || row + i < c.rows ? fetch<Full>(c, from, column, valid, wide) : uint2{};
  const float global = c.global_scale_inv == nullptr ? 1.0f : *c.global_scale_inv;
  float scales[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) scales[j] = 0.0f;
  if (c.down) {
#pragma unroll
    for (int j = 0; j < kVector; ++j)
      if (Full || j < valid) scales[j] = scale_at(c, blocks, row, column + j, global);
  }
  to += row * c.columns + column;
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i, to += c.columns) {
    if (!Full && row + i >= c.rows) return;
    float v[kVector];
    decode_eight(codes[i], c.scaling == kNVFP4, c.encoding, v);
    if (!c.down && (i == 0 || !blocks.whole)) {
      const float scale = scale_at(c, blocks, row + i, column, global);
#pragma unroll
      for (int j = 0; j < kVector; ++j) scales[j] = scale;
    }
    Vec<T, kVector> out;
#pragma unroll
    for (int j = 0; j < kVector; ++j) out[j] = from_float<T>(__fmul_rn(v[j], scales[j]));
    if constexpr (Full)
      store_whole(to, out);
    else
      store_vector<T, kVector>(to, out, valid, wide_to);
  }
}

// The copy that lies as the result does. A block takes 1 << lanes threads' vectors of each of its rows.
template <class T>
__global__ void __launch_bounds__(kThreads, 3)
    dequantize_kernel(const __grid_constant__ StoredCopy c, Blocks blocks, T* to, int lanes, uint32_t across, bool wide,
                      bool wide_to) {
  const int64_t tile_row = blockIdx.x / across, tile_column = blockIdx.x - tile_row * across;
  const int64_t column = ((tile_column << lanes) + (threadIdx.x & ((1 << lanes) - 1))) * kVector;
  const int64_t row = (tile_row * (kThreads >> lanes) + (threadIdx.x >> lanes)) * kRowsOfThread;
  if (column >= c.columns || row >= c.rows) return;
  if (wide && wide_to && column + kVector <= c.columns && row + kRowsOfThread <= c.rows)
    dequantize_rows<true>(c, blocks, to, row, column, true, true);
  else
    dequantize_rows<false>(c, blocks, to, row, column, wide, wide_to);
}

// Codes of one scale, wherever their rows end: a vector a thread.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_line_kernel(const uint8_t* codes, const float* scale_inv, int encoding, int64_t count, T* to) {
  const int64_t vectors = count / kVector, vector = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const float scale = *scale_inv;
  if (vector < vectors) {
    float v[kVector];
    decode_eight(reinterpret_cast<const uint2*>(codes)[vector], false, encoding, v);
    Vec<T, kVector> out;
#pragma unroll
    for (int j = 0; j < kVector; ++j) out[j] = from_float<T>(__fmul_rn(v[j], scale));
    store_whole(to + vector * kVector, out);
  }
  const int64_t last = vectors * kVector + threadIdx.x;  // what fills no vector
  if (blockIdx.x == 0 && last < count) to[last] = from_float<T>(__fmul_rn(decode_two(codes[last], encoding).x, scale));
}

// A copy that is stored transposed: tiles of 64x64 values turn in shared memory.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_transposed_kernel(const __grid_constant__ StoredCopy c, Blocks blocks, T* to, uint32_t across, bool wide,
                                 bool wide_to) {
  __shared__ float tile[kSquare][kSquare + 1];  // [stored column][stored row]
  const int64_t row0 = static_cast<int64_t>(blockIdx.x / across) * kSquare,
                column0 = static_cast<int64_t>(blockIdx.x % across) * kSquare;
  constexpr int kLanes = kSquare / kVector;
  const int lane = threadIdx.x % kLanes;
  const float global = c.global_scale_inv == nullptr ? 1.0f : *c.global_scale_inv;
#pragma unroll
  for (int i = 0; i < kSquare * kLanes / kThreads; ++i) {
    const int down = threadIdx.x / kLanes + i * (kThreads / kLanes);
    const int64_t row = row0 + down, column = column0 + lane * kVector, valid = c.columns - column;
    if (row >= c.rows || valid <= 0) continue;
    float v[kVector];
    decode_eight(fetch<false>(c, c.codes + row * pitch_of(c), column, valid, wide), c.scaling == kNVFP4, c.encoding, v);
    const float scale = scale_at(c, blocks, row, column, global);
#pragma unroll
    for (int j = 0; j < kVector; ++j) tile[lane * kVector + j][down] = __fmul_rn(v[j], scale);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSquare * kLanes / kThreads; ++i) {
    const int down = threadIdx.x / kLanes + i * (kThreads / kLanes);
    const int64_t row = column0 + down, column = row0 + lane * kVector;
    if (row >= c.columns || column >= c.rows) continue;
    Vec<T, kVector> out;
#pragma unroll
    for (int j = 0; j < kVector; ++j) out[j] = from_float<T>(tile[down][lane * kVector + j]);
    store_vector<T, kVector>(to + row * c.rows + column, out, c.rows - column, wide_to);
  }
}

}  // namespace

void dequantize(const Queue& queue, const StoredCopy& from, void* to, int dtype) {
  StoredCopy c = from;
  const int64_t count = require_count("x", c.rows, c.columns);
  if (count == 0) return;
  if (c.scaling == kTensor && !c.transposed && is_aligned(c.codes, 0, kVector) && is_aligned(to, 0)) {
    const unsigned grid = grid_x("x", ceil_div(count, int64_t{kThreads} * kVector));
    with_dtype("dtype", dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      dequantize_line_kernel<<<grid, kThreads, 0, queue.stream()>>>(
          c.codes, static_cast<const float*>(c.scales.scale), c.encoding, count, static_cast<T*>(to));
    });
    return;
  }
  if (c.scaling == kTensor && !c.transposed) {  // one long row, cut where nobody cares
    const int64_t side = int64_t{kThreads} * kVector;
    c.rows = count % side == 0 ? count / side : 1;
    c.columns = count / c.rows;
  }
  const int64_t pitch = c.scaling == kNVFP4 ? ceil_div(c.columns, 2) : c.columns;
  const bool wide = is_aligned(c.codes, pitch, c.scaling == kNVFP4 ? 4 : 8);
  const Blocks blocks = Blocks::of(c);
  with_dtype("dtype", dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    T* target = static_cast<T*>(to);
    if (c.transposed) {
      const int64_t across = ceil_div(c.columns, kSquare);
      const unsigned grid = grid_x("x", require_count("x", across, ceil_div(c.rows, kSquare)));
      dequantize_transposed_kernel<<<grid, kThreads, 0, queue.stream()>>>(
          c, blocks, target, static_cast<uint32_t>(across), wide, is_aligned(to, c.rows * int64_t{sizeof(T)}));
      return;
    }
    int lanes = 0;
    while (lanes < 8 && (int64_t{kVector} << lanes) < c.columns) ++lanes;
    const int64_t across = ceil_div(c.columns, int64_t{kVector} << lanes);
    const int64_t down = ceil_div(c.rows, int64_t{kThreads >> lanes} * kRowsOfThread);
    const unsigned grid = grid_x("x", require_count("x", across, down));
    dequantize_kernel<<<grid, kThreads, 0, queue.stream()>>>(c, blocks, target, lanes, static_cast<uint32_t>(across),
                                                             wide, is_aligned(to, c.columns * int64_t{sizeof(T)}));
  });
}

}  // namespace ted
