// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// How the elements of matrices are read and written: fp32, bf16, fp16 and the four encodings of FP8.
//
// Reading is exact. Writing rounds to nearest, ties to even. FP8 saturates finite values; NaN stays NaN; an infinity
// becomes NaN in e4m3 and in both FNUZ encodings, which have none, and stays one in e5m2. Sources: the OCP 8-bit floating
// point specification, and for FNUZ AMD's CDNA3 instruction set manual, section on FP8 and BF8.
#pragma once

#include "amd.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#ifndef __FLT16_MANT_DIG__
#error "the host library needs a compiler with _Float16: GCC 12 or newer, Clang 15 or newer"
#endif

namespace host {

// One encoding of FP8: 1 sign bit, `exponent` bits, `mantissa` bits.
struct Eight {
  int exponent, mantissa, bias;
  bool fnuz;      // no infinities, no -0; 0x80 is NaN
  bool infinity;  // the last exponent is for infinities and NaN
  uint8_t largest;
};

constexpr Eight kE4M3{4, 3, 7, false, false, 0x7e};
constexpr Eight kE5M2{5, 2, 15, false, true, 0x7b};
constexpr Eight kE4M3Fnuz{4, 3, 8, true, false, 0x7f};
constexpr Eight kE5M2Fnuz{5, 2, 16, true, false, 0x7f};

inline double decode(const Eight& e, uint8_t code) {
  const int sign = code >> 7, low = code & 0x7f;
  const int power = low >> e.mantissa, fraction = low & ((1 << e.mantissa) - 1);
  if (e.fnuz && code == 0x80) return NAN;
  if (!e.fnuz && !e.infinity && low == 0x7f) return NAN;
  if (e.infinity && power == (1 << e.exponent) - 1) return fraction ? NAN : (sign ? -INFINITY : INFINITY);
  const double value = power == 0 ? std::ldexp(fraction, 1 - e.bias - e.mantissa)
                                  : std::ldexp((1 << e.mantissa) + fraction, power - e.bias - e.mantissa);
  return sign ? -value : value;
}

inline uint8_t encode(const Eight& e, float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const uint8_t nan = e.fnuz ? 0x80 : static_cast<uint8_t>(sign | 0x7f);
  if (std::isnan(x)) return nan;
  if (std::isinf(x)) return e.infinity ? static_cast<uint8_t>(sign | 0x7c) : nan;
  const double magnitude = std::fabs(static_cast<double>(x));
  if (magnitude >= decode(e, e.largest)) return sign | e.largest;
  if (magnitude == 0) return e.fnuz ? 0 : sign;
  // The distance of codes at this magnitude is 2^step; below the normal range it no longer shrinks.
  int step = std::ilogb(magnitude) - e.mantissa;
  if (step < 1 - e.bias - e.mantissa) step = 1 - e.bias - e.mantissa;
  const double rounded = std::nearbyint(std::ldexp(magnitude, -step));  // ties to even, the default rounding mode
  const double value = std::ldexp(rounded, step);
  if (value == 0) return e.fnuz ? 0 : sign;
  const int power = std::ilogb(value) + e.bias;
  if (power <= 0) return sign | static_cast<uint8_t>(std::ldexp(value, e.bias - 1 + e.mantissa));
  const int fraction = static_cast<int>(std::ldexp(value, e.bias - power + e.mantissa)) - (1 << e.mantissa);
  return sign | static_cast<uint8_t>((power << e.mantissa) | fraction);
}

inline const Eight* eight_of(hipDataType type) {
  switch (static_cast<int>(type)) {
    case HIP_R_8F_E4M3: return &kE4M3;
    case HIP_R_8F_E5M2: return &kE5M2;
    case HIP_R_8F_E4M3_FNUZ: return &kE4M3Fnuz;
    case HIP_R_8F_E5M2_FNUZ: return &kE5M2Fnuz;
    default: return nullptr;
  }
}

// Bytes of an element; 0 for types that this library does not know.
inline size_t size_of(hipDataType type) {
  switch (static_cast<int>(type)) {
    case HIP_R_32F: return 4;
    case HIP_R_16F:
    case HIP_R_16BF: return 2;
    default: return eight_of(type) ? 1 : 0;
  }
}

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline double load_element(hipDataType type, const void* base, int64_t index) {
  switch (static_cast<int>(type)) {
    case HIP_R_32F: return static_cast<const float*>(base)[index];
    case HIP_R_16F: return static_cast<double>(static_cast<const _Float16*>(base)[index]);
    case HIP_R_16BF: return bits_to_float(static_cast<uint32_t>(static_cast<const uint16_t*>(base)[index]) << 16);
    default: return decode(*eight_of(type), static_cast<const uint8_t*>(base)[index]);
  }
}

inline void store_element(hipDataType type, void* base, int64_t index, float x) {
  switch (static_cast<int>(type)) {
    case HIP_R_32F: static_cast<float*>(base)[index] = x; return;
    case HIP_R_16F: static_cast<_Float16*>(base)[index] = static_cast<_Float16>(x); return;
    case HIP_R_16BF: {
      uint32_t bits;
      std::memcpy(&bits, &x, sizeof(bits));
      // Adding half of the last place, or just less where the kept part is even, carries into the kept part.
      const uint32_t kept = std::isnan(x) ? (bits | 0x400000) >> 16 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      static_cast<uint16_t*>(base)[index] = static_cast<uint16_t>(kept);
      return;
    }
    default: static_cast<uint8_t*>(base)[index] = encode(*eight_of(type), x);
  }
}

}  // namespace host
