// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Division by a number that the host knows: a multiplication and a shift (Granlund and Montgomery, 1994).
#pragma once

#include <cstdint>

namespace ted {

// Quotients of 0 <= n < 2^31 by 1 <= divisor < 2^31.
struct Divider {
  uint32_t divisor, magic, shift;

  explicit Divider(int64_t by) : divisor(static_cast<uint32_t>(by)), magic(0), shift(0) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    magic = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }
  __device__ __forceinline__ int divide(int n, int& rest) const {
    const uint32_t u = static_cast<uint32_t>(n), quotient = (__umulhi(u, magic) + u) >> shift;
    rest = static_cast<int>(u - quotient * divisor);
    return static_cast<int>(quotient);
  }
};

}  // namespace ted
