// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What the forward kernels share: their arguments, and what becomes of a vector of a row once its statistics are known.
#pragma once

#include "common/encode.cuh"
#include "norm/row.cuh"

namespace ted::norm {

// What is multiplied onto and added to the normalized row.
struct Affine {
  Operand gamma, beta;  // beta.data null for no shift
  bool zero_centered;   // the factor is 1 + gamma
};

template <int E>
__device__ __forceinline__ void finish_affine(float (&factor)[E], float (&shift)[E], const Affine& a) {
  if (a.zero_centered) {
#pragma unroll
    for (int i = 0; i < E; ++i) factor[i] = __fadd_rn(1.0f, factor[i]);
  }
  if (a.beta.data == nullptr) {
#pragma unroll
    for (int i = 0; i < E; ++i) shift[i] = kNoShift;
  }
}

template <int E>
__device__ __forceinline__ void load_affine(float (&factor)[E], float (&shift)[E], const Affine& a, int64_t column,
                                            int64_t valid) {
  read(factor, a.gamma, column, valid);
  if (a.beta.data != nullptr) read(shift, a.beta, column, valid);
  finish_affine(factor, shift, a);
}

// A cast to one scale per tensor that happens beside the norm. Every member may be null.
struct RowCast {
  uint8_t* codes;       // (rows, columns)
  uint8_t* transposed;  // (columns, rows); only by forward_tiles
  const float* scale;    // with codes: the one in force,
  const float* maximum;  // or that of this amax
  float* scale_inv;
  float* amax;          // max-accumulated with |y|
  Format format;
  float epsilon;        // with maximum
  bool power_of_two;
  int mode;             // EncodeMode
  bool aligned;         // codes, to E bytes at every multiple of E
};

__device__ __forceinline__ float scale_of(const RowCast& cast) {
  if (cast.scale != nullptr) return *cast.scale;
  if (cast.maximum == nullptr) return 0.0f;
  return scale_from_amax(*cast.maximum, cast.format.max_value, cast.epsilon, cast.power_of_two);
}

inline bool casts(const RowCast& cast) {
  return cast.codes != nullptr || cast.amax != nullptr || cast.scale_inv != nullptr;
}

// gamma and beta as a NormSource reads them.
struct Prepared {
  float *factor, *shift;
};

struct Forward {
  const void* x;
  const void* residual;  // null: x is normalized as it is
  void* residual_out;
  float *mean, *rstd;    // mean null for RMSNorm
  Affine affine;
  Result y;              // data null: not wanted
  RowCast cast;
  Prepared prepared;     // null: nobody recomputes y
  int64_t rows, columns;
  float inverse_columns, eps;
  int lanes;             // threads that share a row
  bool aligned;          // x, residual and residual_out, to 16 bytes
  bool known;            // mean and rstd are there already
  bool backwards;        // the last rows first: what was read last is in the cache
  // Whether rows are whole (row.cuh), and their weights of one dtype.
  bool whole() const {
    const Operand &gamma = affine.gamma, &beta = affine.beta;
    return aligned && gamma.aligned && (beta.data == nullptr || (beta.aligned && beta.dtype == gamma.dtype)) &&
           (y.data == nullptr || y.aligned) && (cast.codes == nullptr || cast.aligned);
  }
};

// Whether the kernel makes y at all, or leaves its statistics to another.
__device__ __forceinline__ bool wants_y(const Forward& a) {
  return a.y.data != nullptr || a.cast.codes != nullptr || a.cast.amax != nullptr;
}

template <int E>
struct alignas(E) Codes {
  uint16_t pair[E / 2];
};

template <int Mode, int E>
__device__ __forceinline__ Codes<E> encode_vector(const float (&y)[E], float scale, const Format& format) {
  Codes<E> codes;
#pragma unroll
  for (int i = 0; i < E; i += 2)
    codes.pair[i / 2] = encode_pair<Mode>(__fmul_rn(y[i], scale), __fmul_rn(y[i + 1], scale), format);
  return codes;
}

template <int E>
__device__ __forceinline__ Codes<E> encode_vector(const float (&y)[E], float scale, const RowCast& cast) {
  return cast.mode == kHardE4M3   ? encode_vector<kHardE4M3>(y, scale, cast.format)
         : cast.mode == kHardE5M2 ? encode_vector<kHardE5M2>(y, scale, cast.format)
                                  : encode_vector<kSoft>(y, scale, cast.format);
}

// Vectors of a row that a thread holds at most.
constexpr int kMaxRowVectors = 16;

// What a kernel for whole rows makes. Few paths per kernel: code that is run once has to be fetched once.
enum Product : int {
  kOnlyY,      // y or nothing but statistics
  kOnlyE4M3,   // codes by the chip's conversion, and the amax
  kAnything,
};

inline Product product_of(const Forward& a) {
  if (!casts(a.cast)) return kOnlyY;
  if (a.y.data != nullptr || (a.cast.codes == nullptr && a.cast.transposed == nullptr)) return kAnything;
  return a.cast.mode == kHardE4M3 ? kOnlyE4M3 : kAnything;
}

template <int Product, class F>
__device__ __forceinline__ void with_y_type(const Forward& a, F&& f) {
  if constexpr (Product != kOnlyY)
    f(Type<void>{});
  else if (a.y.dtype == kFloat32)
    f(Type<float>{});
  else if (a.y.dtype == kBFloat16)
    f(Type<__nv_bfloat16>{});
  else
    f(Type<__half>{});
}

template <class T, class F>
__device__ __forceinline__ void with_weight_type(const Forward& a, F&& f) {
  if (std::is_same_v<T, float> || a.affine.gamma.dtype == kFloat32)
    f(Type<float>{});
  else
    f(Type<T>{});
}

__device__ __forceinline__ float max_magnitude(float so_far, float x) { return fmaxf(so_far, fabsf(x)); }

// y of one vector of a whole row, x in words, and all that is made of it but codes. `start`: where the row begins.
// W: gamma's and beta's type. Y: y's, void where that is to be looked up.
template <int Product, class T, class W, class Y, int E>
__device__ __forceinline__ void make_y(float (&y)[E], const Forward& a, int64_t start, int column,
                                       const Vec<uint32_t, 4>& x, float mean, float rstd, float& amax) {
  float factor[E], shift[E];
  read(factor, static_cast<const W*>(a.affine.gamma.data) + column, E, true);
  if (a.affine.beta.data != nullptr) read(shift, static_cast<const W*>(a.affine.beta.data) + column, E, true);
  finish_affine(factor, shift, a.affine);
  widen<T>(y, x);
#pragma unroll
  for (int i = 0; i < E; ++i) y[i] = normalized(__fsub_rn(y[i], mean), rstd, factor[i], shift[i]);
  if constexpr (Product == kOnlyY)
    write(static_cast<Y*>(a.y.data) + start + column, y, E, true);
  else if constexpr (Product == kAnything)
    if (a.y.data != nullptr) write(a.y, start + column, y, E, true);
  if constexpr (Product != kOnlyY) {
#pragma unroll
    for (int i = 0; i < E; ++i) amax = max_magnitude(amax, y[i]);
  }
}

template <int Product, int E>
__device__ __forceinline__ Codes<E> encode_row(const float (&y)[E], float scale, const RowCast& cast) {
  if constexpr (Product == kOnlyE4M3)
    return encode_vector<kHardE4M3>(y, scale, cast.format);
  else
    return encode_vector(y, scale, cast);
}

// By all blocks.
template <int E>
__device__ __forceinline__ void prepare(const Forward& a) {
  if (a.prepared.factor == nullptr) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t column = first * E; column < a.columns; column += static_cast<int64_t>(gridDim.x) * blockDim.x * E) {
    float factor[E], shift[E];
    load_affine(factor, shift, a.affine, column, a.columns - column);
#pragma unroll
    for (int i = 0; i < E; ++i) {
      if (column + i >= a.columns) continue;
      a.prepared.factor[column + i] = factor[i];
      a.prepared.shift[column + i] = shift[i];
    }
  }
}

// x becomes the sum with the residual, rounded to T, and is written as that. Some vectors at a time: registers.
template <int AtATime, class T, int V>
__device__ __forceinline__ void add_residual(PackedRow<T, V>& x, const Forward& a, int64_t start, int columns, int t) {
  constexpr int E = kVector<T>, kAtATime = V < AtATime ? V : AtATime;
  const T* source = static_cast<const T*>(a.residual) + start;
  T* target = static_cast<T*>(a.residual_out) + start;
#pragma unroll
  for (int first = 0; first < V; first += kAtATime) {
    Vec<uint32_t, 4> residual[kAtATime];
#pragma unroll
    for (int v = 0; v < kAtATime; ++v) {
      const int column = ((first + v) * a.lanes + t) * E;
      residual[v] = {};
      if (column < columns) residual[v] = *reinterpret_cast<const Vec<uint32_t, 4>*>(source + column);
    }
#pragma unroll
    for (int v = 0; v < kAtATime; ++v) {
      const int column = ((first + v) * a.lanes + t) * E;
      float sum[E], other[E];
      widen<T>(sum, x.words[first + v]);
      widen<T>(other, residual[v]);
#pragma unroll
      for (int i = 0; i < E; ++i) sum[i] = __fadd_rn(sum[i], other[i]);
      x.words[first + v] = narrow<T>(sum);
      if (column < columns) *reinterpret_cast<Vec<uint32_t, 4>*>(target + column) = x.words[first + v];
    }
  }
}

__device__ __forceinline__ float rstd_of(float sum_of_squares, const Forward& a) {
  return __frcp_rn(__fsqrt_rn(__fadd_rn(__fmul_rn(sum_of_squares, a.inverse_columns), a.eps)));
}

// Per launch: the inverse of the scale. Per warp: the amax of what it saw, where that is news; `known` is the value
// that the kernel found at its start.
__device__ __forceinline__ void finish_cast(const RowCast& cast, float scale, float amax, float known) {
  if (cast.amax != nullptr) {
    amax = warp_reduce(amax, Max{});
    if (threadIdx.x % 32 == 0 && amax > known) atomic_max_nonnegative(cast.amax, amax);
  }
  if (cast.scale_inv != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *cast.scale_inv = __frcp_rn(scale);
}

}  // namespace ted::norm
