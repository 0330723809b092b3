// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Tiles and patches of the block-scaled casts, and how patches of a warp combine.
#pragma once

#include "cast/blocks.h"
#include "cast/source.cuh"
#include "common/reduce.cuh"

namespace ted {
namespace block_cast {

constexpr int kTile = kBlockTile, kPatch = 8, kPatches = kTile / kPatch;
constexpr int kThreads = kPatches * kPatches;

// Lanes that share rows or columns, as bits of the lane number; folding goes through them in this order.
template <int... Bits>
struct Masks {
  static constexpr int kLanes = 1 << sizeof...(Bits);
  // Entries of 8 that a lane is left with.
  static constexpr int kLeft = kLanes >= kPatch ? 1 : kPatch / kLanes;
  // The first of them.
  __device__ __forceinline__ static int first() {
    int entry = 0, left = kPatch;
    ((left /= 2, entry += (threadIdx.x & Bits) ? left : 0), ...);
    return entry;
  }
  // Of the lanes that are left with the same entries, whether this is the one to write them.
  __device__ __forceinline__ static bool writes() {
    int left = kPatch;
    bool writer = true;
    ((left /= 2, writer = writer && (left > 0 || (threadIdx.x & Bits) == 0)), ...);
    return writer;
  }
};

// Reduces 8 entries over lanes, entry by entry: at every step a lane hands half of what it holds to its partner, so
// that 16 lanes take 8 shuffles and not 32. Leaves Masks::kLeft entries at the front of v.
template <int Bit, int... Rest, class Op, int Count = kPatch>
__device__ __forceinline__ void fold(Masks<Bit, Rest...>, float (&v)[kPatch], Op op,
                                     std::integral_constant<int, Count> = {}) {
  constexpr int half = Count / 2;
  if constexpr (Count > 1) {
    const bool upper = (threadIdx.x & Bit) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float send = upper ? v[i] : v[half + i], keep = upper ? v[half + i] : v[i];
      v[i] = op(keep, __shfl_xor_sync(0xffffffffu, send, Bit));
    }
  } else {
    v[0] = op(v[0], __shfl_xor_sync(0xffffffffu, v[0], Bit));
  }
  if constexpr (sizeof...(Rest) > 0)
    fold(Masks<Rest...>{}, v, op, std::integral_constant<int, (half > 0 ? half : 1)>{});
}

// The way back: every lane gets all 8 entries.
template <int Bit, int... Rest, int Count = kPatch>
__device__ __forceinline__ void spread(Masks<Bit, Rest...>, float (&v)[kPatch],
                                       std::integral_constant<int, Count> = {}) {
  constexpr int half = Count / 2;
  if constexpr (sizeof...(Rest) > 0) spread(Masks<Rest...>{}, v, std::integral_constant<int, (half > 0 ? half : 1)>{});
  if constexpr (Count > 1) {
    const bool upper = (threadIdx.x & Bit) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float own = v[i], other = __shfl_xor_sync(0xffffffffu, own, Bit);
      v[i] = upper ? other : own;
      v[half + i] = upper ? own : other;
    }
  }
}

// Of any patch.
template <class P, class M>
__device__ __forceinline__ void fold_row_amaxes(const P& patch, M masks, float (&amax)[kPatch]) {
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    float v[kPatch];
    patch.row(i, v);
    amax[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < kPatch; ++j) amax[i] = fmaxf(amax[i], fabsf(v[j]));
  }
  fold(masks, amax, Max());
}
template <class P, class M>
__device__ __forceinline__ void fold_column_amaxes(const P& patch, M masks, float (&amax)[kPatch]) {
#pragma unroll
  for (int j = 0; j < kPatch; ++j) amax[j] = 0.0f;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    float v[kPatch];
    patch.row(i, v);
#pragma unroll
    for (int j = 0; j < kPatch; ++j) amax[j] = fmaxf(amax[j], fabsf(v[j]));
  }
  fold(masks, amax, Max());
}

// Whether a source can call what it will read from memory to L2.
template <class Source, class = void>
struct Prefetches : std::false_type {};
template <class Source>
struct Prefetches<Source, std::void_t<decltype(std::declval<const Source&>().prefetch(int64_t{}, int64_t{}))>>
    : std::true_type {};

// A thread's 8x8 values. Those beyond the matrix are zero.
template <class Source>
class Patch {
 public:
  static constexpr bool kPlain = false;
  static constexpr int kBlocks = 2;  // per multiprocessor that registers shall suffice for

  template <bool Full>
  __device__ __forceinline__ void load(const Source& source, int64_t row, int64_t column, int valid_rows,
                                       int valid_columns) {
    // Rounds of one piece of code, each one's rows shifting the earlier ones' up: values() may be long, and registers
    // do not suffice for more in flight.
    using Raw = typename Source::template Raw<kPatch>;
    constexpr int kRound = !Full || sizeof(Raw) > 80 ? 1 : sizeof(Raw) > 40 ? 2 : 4;
    if constexpr (Full && Prefetches<Source>::value) {
#pragma unroll
      for (int i = kRound; i < kPatch; ++i) source.prefetch(row + i, column);
    }
#pragma unroll 1
    for (int first = 0; first < kPatch; first += kRound) {
      Raw raw[kRound];
#pragma unroll
      for (int i = 0; i < kRound; ++i)
        raw[i] = source.template fetch<kPatch, Full>(row + first + i, column,
                                                     Full                     ? kPatch
                                                     : first + i < valid_rows ? valid_columns
                                                                              : 0);
#pragma unroll
      for (int i = 0; i < kPatch - kRound; ++i) {
#pragma unroll
        for (int j = 0; j < kPatch; ++j) v_[i][j] = v_[i + kRound][j];
      }
#pragma unroll
      for (int i = 0; i < kRound; ++i) {
        float (&v)[kPatch] = v_[kPatch - kRound + i];
        source.template values<kPatch>(raw[i], v);
#pragma unroll
        for (int j = 0; j < kPatch; ++j)
          if (!Full && (first + i >= valid_rows || j >= valid_columns)) v[j] = 0.0f;
      }
    }
  }
  __device__ __forceinline__ void row(int i, float (&out)[kPatch]) const {
#pragma unroll
    for (int j = 0; j < kPatch; ++j) out[j] = v_[i][j];
  }
  __device__ __forceinline__ void column(int j, float (&out)[kPatch]) const {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) out[i] = v_[i][j];
  }
  __device__ __forceinline__ void pin() {}
  // Amaxes of the patch's rows and columns, reduced over lanes (fold).
  template <class M>
  __device__ __forceinline__ void fold_rows(M masks, float (&amax)[kPatch]) const {
    fold_row_amaxes(*this, masks, amax);
  }
  template <class M>
  __device__ __forceinline__ void fold_columns(M masks, float (&amax)[kPatch]) const {
    fold_column_amaxes(*this, masks, amax);
  }

 private:
  float v_[kPatch][kPatch];
};

// Two 16-bit elements in a word. Magnitudes compare as they are, without widening: maxima ignore NaN as fmaxf does.
__device__ __forceinline__ float2 unpack(uint32_t two, __nv_bfloat16) {
  return make_float2(__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(uint32_t two, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(two));
}
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, __nv_bfloat16) {
  const __nv_bfloat162 found =
      __hmax2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const uint32_t&>(found);
}
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b, __half) {
  const __half2 found = __hmax2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const uint32_t&>(found);
}
__device__ __forceinline__ uint32_t magnitudes(uint32_t two) { return two & 0x7fff7fffu; }

// `fold` of maxima of 8 entries in 4 words.
template <class T, int Bit, int... Rest, int Count = kPatch>
__device__ __forceinline__ void fold_pairs(Masks<Bit, Rest...>, uint32_t (&w)[kPatch / 2], float (&v)[kPatch],
                                           std::integral_constant<int, Count> = {}) {
  const bool upper = (threadIdx.x & Bit) != 0;
  constexpr int left = Count / 2;
  if constexpr (Count > 2) {
#pragma unroll
    for (int i = 0; i < Count / 4; ++i) {
      const uint32_t send = upper ? w[i] : w[Count / 4 + i], keep = upper ? w[Count / 4 + i] : w[i];
      w[i] = larger(keep, __shfl_xor_sync(0xffffffffu, send, Bit), T{});
    }
    if constexpr (sizeof...(Rest) > 0) {
      fold_pairs<T>(Masks<Rest...>{}, w, v, std::integral_constant<int, left>{});
    } else {
#pragma unroll
      for (int i = 0; i < left / 2; ++i) {
        const float2 two = unpack(w[i], T{});
        v[2 * i] = fmaxf(two.x, 0.0f), v[2 * i + 1] = fmaxf(two.y, 0.0f);  // not NaN, which is left if nothing else is
      }
    }
  } else {
    const float2 two = unpack(larger(w[0], __shfl_xor_sync(0xffffffffu, w[0], Bit), T{}), T{});
    v[0] = fmaxf(upper ? two.y : two.x, 0.0f);
    if constexpr (sizeof...(Rest) > 0) fold(Masks<Rest...>{}, v, Max(), std::integral_constant<int, 1>{});
  }
}

// Of a matrix in memory the elements are kept as they are: half the registers for 16-bit ones, in whole words, because
// the compiler would give every 16-bit element a register of its own.
template <class T>
class Patch<PlainSource<T>> {
 public:
  static constexpr bool kPlain = true;
  static constexpr int kBlocks = sizeof(T) == 2 ? 3 : 2;

  template <bool Full>
  __device__ __forceinline__ void load(const PlainSource<T>& source, int64_t row, int64_t column, int valid_rows,
                                       int valid_columns) {
    if constexpr (Full) {
      const T* at = source.x + row * source.stride + column;
#pragma unroll
      for (int i = 0; i < kPatch; ++i, at += source.stride) words_[i] = *reinterpret_cast<const Words*>(at);
    } else {
      using Element = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
      constexpr int kInWord = 4 / sizeof(T);
#pragma unroll
      for (int i = 0; i < kPatch; ++i) {
        const Element* at = reinterpret_cast<const Element*>(source.x) + (row + i) * source.stride + column;
        if (source.aligned() && i < valid_rows && valid_columns == kPatch) {
          words_[i] = *reinterpret_cast<const Words*>(at);
          continue;
        }
#pragma unroll
        for (int j = 0; j < kPatch; ++j) {
          const uint32_t element = i < valid_rows && j < valid_columns ? at[j] : 0;
          uint32_t& word = words_[i][j / kInWord];
          word = j % kInWord == 0 ? element : word | element << 16;
        }
      }
    }
  }
  __device__ __forceinline__ void row(int i, float (&out)[kPatch]) const {
#pragma unroll
    for (int j = 0; j < kPatch; ++j) out[j] = value(i, j);
  }
  __device__ __forceinline__ void column(int j, float (&out)[kPatch]) const {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) out[i] = value(i, j);
  }
  // What was widened before is widened anew after: the compiler would rather keep 64 floats than convert twice, and has
  // no registers for them.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
#pragma unroll
      for (int j = 0; j < kWords; ++j) asm volatile("" : "+r"(words_[i][j]));
    }
  }
  template <class M>
  __device__ __forceinline__ void fold_rows(M masks, float (&amax)[kPatch]) const {
    if constexpr (sizeof(T) == 4) {
      fold_row_amaxes(*this, masks, amax);
    } else {
      uint32_t pairs[kPatch / 2];  // of rows
#pragma unroll
      for (int i = 0; i < kPatch; i += 2) {
        const uint32_t a = row_pair(i), b = row_pair(i + 1);
        pairs[i / 2] = larger(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), T{});
      }
      fold_pairs<T>(masks, pairs, amax);
    }
  }
  template <class M>
  __device__ __forceinline__ void fold_columns(M masks, float (&amax)[kPatch]) const {
    if constexpr (sizeof(T) == 4) {
      fold_column_amaxes(*this, masks, amax);
    } else {
      uint32_t pairs[kPatch / 2];
#pragma unroll
      for (int j = 0; j < kPatch / 2; ++j) {
        pairs[j] = magnitudes(words_[0][j]);
#pragma unroll
        for (int i = 1; i < kPatch; ++i) pairs[j] = larger(pairs[j], magnitudes(words_[i][j]), T{});
      }
      fold_pairs<T>(masks, pairs, amax);
    }
  }

 private:
  static constexpr int kWords = kPatch * sizeof(T) / 4;
  using Words = Vec<uint32_t, kWords>;
  Words words_[kPatch];

  __device__ __forceinline__ float value(int i, int j) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words_[i][j]);
    } else {
      const float2 two = unpack(words_[i][j / 2], T{});
      return j % 2 == 0 ? two.x : two.y;
    }
  }
  // Amaxes of a row's even and odd columns.
  __device__ __forceinline__ uint32_t row_pair(int i) const {
    const Words& w = words_[i];
    return larger(larger(magnitudes(w[0]), magnitudes(w[1]), T{}), larger(magnitudes(w[2]), magnitudes(w[3]), T{}),
                  T{});
  }
};

}  // namespace block_cast
}  // namespace ted
