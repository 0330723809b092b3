// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Vectors that stay the words they were loaded as until their elements are used. A `Vec` of 16-bit elements may be
// taken apart as soon as it arrives, above all where its load is conditional: that waits for the load, and takes twice
// the registers.
#pragma once

#include "common/scalar.cuh"

namespace ted {

template <class T, int V>
struct Packed {
  static constexpr int kWords = (static_cast<int>(sizeof(T)) * V + 3) / 4;
  uint32_t word[kWords];

  // Element k as fp32.
  __device__ __forceinline__ float operator[](int k) const {
    if constexpr (std::is_same_v<T, float>) {
      return __uint_as_float(word[k]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(k % 2 == 0 ? word[k / 2] << 16 : word[k / 2] & 0xffff0000u);
    } else {
      const uint32_t bits = k % 2 == 0 ? word[k / 2] & 0xffffu : word[k / 2] >> 16;
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    }
  }
};

// V elements from `source`: one access where Whole, else those below `valid` one by one, and zeros beyond.
template <bool Whole, int V, class T>
__device__ __forceinline__ Packed<T, V> load_packed(const T* source, int64_t valid) {
  using P = Packed<T, V>;
  P p;
  if constexpr (Whole && sizeof(T) * V % 4 == 0) {
    const auto words = *reinterpret_cast<const Vec<uint32_t, P::kWords>*>(source);
#pragma unroll
    for (int i = 0; i < P::kWords; ++i) p.word[i] = words[i];
  } else {
#pragma unroll
    for (int i = 0; i < P::kWords; ++i) p.word[i] = 0;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (k >= valid) break;
      if constexpr (sizeof(T) == 4)
        p.word[k] = reinterpret_cast<const uint32_t*>(source)[k];
      else
        p.word[k / 2] |= static_cast<uint32_t>(reinterpret_cast<const uint16_t*>(source)[k]) << (k % 2 * 16);
    }
  }
  return p;
}

}  // namespace ted
