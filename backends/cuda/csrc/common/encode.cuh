// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Values to codes and back, bit for bit as te_dispatch.numerics.encodings defines them: round to nearest even, no flush
// to zero, saturate (Inf too), NaN to the encoding's code.
//
// The chip's conversion (cvt.rn.satfinite, from sm_89 on; PTX ISA, "cvt") does exactly that for the two OCP encodings.
// Everything else goes through integers: FNUZ, the `common` clamp and zero, FP4, and chips without the instruction.
#pragma once

#include "common/dtypes.h"

#include <cstdint>

namespace ted {

// One encoding with what its cast does at the edges.
struct Format {
  int mantissa_bits;
  int bias;
  float max_value;        // where the cast saturates
  uint8_t sign;           // the sign's bit
  uint8_t nan;            // what a NaN becomes
  bool negative_zero;     // whether -0 keeps its sign
};

// The format of a cast's code (dtypes.h), kCommon included.
__host__ __device__ constexpr Format format_of(int code) {
  const bool common = (code & kCommon) != 0;
  switch (code & ~kCommon) {
    case kE4M3: return {3, 7, 448.0f, 0x80, 0x7F, !common};
    case kE5M2: return {2, 15, 57344.0f, 0x80, 0x7F, !common};
    case kE4M3FNUZ: return {3, 8, common ? 224.0f : 240.0f, 0x80, 0x80, false};
    case kE5M2FNUZ: return {2, 16, common ? 28672.0f : 57344.0f, 0x80, 0x80, false};
    default: return {1, 1, 6.0f, 0x8, 0x7, !common};
  }
}

// How a kernel encodes: two instantiations for what training uses, one for everything else.
enum EncodeMode : int { kHardE4M3 = 0, kHardE5M2 = 1, kSoft = 2 };

inline EncodeMode encode_mode(int cast) { return cast == kE4M3 ? kHardE4M3 : cast == kE5M2 ? kHardE5M2 : kSoft; }

#ifdef __CUDACC__  // host code that only names formats needs none of the following

// Without a branch: a kernel has many of these in a row.
__device__ __forceinline__ uint8_t encode_integer(float x, const Format& f) {
  const uint32_t bits = __float_as_uint(x);
  const float a = fminf(fabsf(x), f.max_value);
  // Below 2^(1 - bias), the smallest normal, codes count multiples of the smallest subnormal.
  const uint32_t subnormal =
      __float2uint_rn(a * __uint_as_float(static_cast<uint32_t>(126 + f.bias + f.mantissa_bits) << 23));
  const int shift = 23 - f.mantissa_bits;
  const uint32_t b = __float_as_uint(a);
  const uint32_t rounded = b + (1u << (shift - 1)) - 1 + ((b >> shift) & 1);
  const uint32_t normal = (rounded >> shift) - (static_cast<uint32_t>(127 - f.bias) << f.mantissa_bits);
  uint32_t code = a < __uint_as_float(static_cast<uint32_t>(128 - f.bias) << 23) ? subnormal : normal;
  code |= (bits >> 31) != 0 && (code != 0 || f.negative_zero) ? f.sign : 0u;
  return static_cast<uint8_t>((bits & 0x7fffffffu) > 0x7f800000u ? f.nan : code);
}

__device__ __forceinline__ float decode_integer(uint32_t code, int encoding) {
  const Format f = format_of(encoding);
  const uint32_t magnitude = code & (f.sign - 1u);
  const bool negative = (code & f.sign) != 0;
  const bool fnuz = encoding == kE4M3FNUZ || encoding == kE5M2FNUZ;
  // As bits of fp32 the exponent counts from 2^-127 instead of 2^-bias; subnormals come out right too.
  float value = __uint_as_float(magnitude << (23 - f.mantissa_bits)) *
                __uint_as_float(static_cast<uint32_t>(254 - f.bias) << 23);
  if (encoding == kE5M2 && magnitude == 0x7C) value = __uint_as_float(0x7f800000u);
  if (negative) value = -value;
  // E5M2's NaNs are above its infinity, E4M3's is its largest magnitude, FNUZ has one in the place of -0.
  const bool nan = fnuz ? code == 0x80u : encoding == kE2M1 ? false : magnitude > (encoding == kE4M3 ? 0x7Eu : 0x7Cu);
  return nan ? __int_as_float(0x7fffffff) : value;
}

template <int Mode>
__device__ __forceinline__ uint8_t encode(float x, const Format& f) {
  if constexpr (Mode == kSoft) {
    return encode_integer(x, f);
  } else {
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    if constexpr (Mode == kHardE4M3)
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    else
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return static_cast<uint8_t>(pair);
#else
    return encode_integer(x, format_of(Mode == kHardE4M3 ? kE4M3 : kE5M2));
#endif
  }
}

// Two codes, `low` in the lower byte.
template <int Mode>
__device__ __forceinline__ uint16_t encode_pair(float low, float high, const Format& f) {
#if __CUDA_ARCH__ >= 890
  if constexpr (Mode != kSoft) {
    uint16_t pair;
    if constexpr (Mode == kHardE4M3)
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    else
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
  }
#endif
  return static_cast<uint16_t>(encode<Mode>(low, f)) | static_cast<uint16_t>(encode<Mode>(high, f)) << 8;
}

// Calls f(std::integral_constant<int, mode>{}) for a cast's code.
template <class F>
void with_encode_mode(int cast, F&& f) {
  switch (encode_mode(cast)) {
    case kHardE4M3: return f(std::integral_constant<int, kHardE4M3>{});
    case kHardE5M2: return f(std::integral_constant<int, kHardE5M2>{});
    case kSoft: return f(std::integral_constant<int, kSoft>{});
  }
}

// scale = RN32(max_value / max(amax, epsilon)): 1 where the amax is 0, Inf or NaN; the largest float where that is
// infinite; rounded down to a power of two on request (te_dispatch.numerics.quantizers.CurrentQuantizer).
__device__ __forceinline__ float scale_from_amax(float amax, float max_value, float epsilon, bool power_of_two) {
  const float floored = amax < epsilon ? epsilon : amax;  // keeps NaN
  if (!(floored > 0.0f) || isinf(floored)) return 1.0f;
  float scale = __fdiv_rn(max_value, floored);
  if (isinf(scale)) scale = 3.402823466e+38f;
  return power_of_two ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}

#endif  // __CUDACC__

}  // namespace ted
