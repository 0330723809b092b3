// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Codes of a patch row or column, and their stores (blocks.cuh).
#pragma once

#include "cast/blocks_scalings.cuh"

namespace ted {
namespace block_cast {

// 8 e2m1 codes of v * global_scale / block_scale, the first in the lowest bits.
//
// What the code depends on is on which side of a tie the quotient q lies, or that it is one; a tie t has at most 3 bits
// and the block scale b 4, so t * b is exact, and the nearest fp32 number to it makes a quotient that is more than half
// an ulp off t: the rounded quotient decides alike. It is found by a product with about 1 / b, corrected by its exact
// remainder, which leaves an error far below that distance.
__device__ __forceinline__ uint32_t encode_e2m1(const float (&v)[kPatch], float block_scale, float global_scale,
                                                const Format& format) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(block_scale));
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kPatch; ++i) {
    const float scaled = __fmul_rn(v[i], global_scale);
    const float a = fminf(fabsf(scaled), 1.2676506e30f);  // NaN becomes 6
    float q = __fmul_rn(a, inverse);
    q = fminf(__fmaf_rn(__fmaf_rn(-q, block_scale, a), inverse, q), 6.0f);
    // Codes count steps of 2^(e - 1), e the quotient's exponent but at least 0: a sum with 2^(e + 22) rounds to them,
    // and two codes are passed with every exponent.
    const uint32_t magic = (__float_as_uint(fmaxf(q, 1.0f)) & 0x7f800000u) + (22u << 23);
    const uint32_t sum = __float_as_uint(__fadd_rn(q, __uint_as_float(magic)));
    const uint32_t code = (sum & 7u) + (sum >> 22) - 2 * 149;
    const bool negative = (__float_as_int(scaled) < 0) & (scaled == scaled) & (format.negative_zero | (code != 0));
    codes |= (code | (negative ? 8u : 0u)) << (4 * i);
  }
  return block_scale == 0.0f ? 0 : codes;  // a block whose scale underflowed holds nothing that it could represent
}

// Bytes that are -0 become +0.
__device__ __forceinline__ uint32_t without_negative_zero(uint32_t codes) {
  return codes & ~(__vcmpeq4(codes, 0x80808080u) & 0x80808080u);
}

template <int Mode>
__device__ __forceinline__ uint2 encode_pairs(const float (&scaled)[kPatch], const Format& format) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = encode_pair<Mode>(scaled[2 * i], scaled[2 * i + 1], format);
  return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

template <int Mode>
__device__ __forceinline__ uint2 encode_fp8(const float (&scaled)[kPatch], const BlockCast& cast) {
  if (Mode == kEither && !is_ocp(cast.cast)) return encode_pairs<kSoft>(scaled, cast.format);
  uint2 codes = (cast.cast & ~kCommon) == kE4M3 ? encode_pairs<kHardE4M3>(scaled, cast.format)
                                                : encode_pairs<kHardE5M2>(scaled, cast.format);
  if ((cast.cast & kCommon) != 0) codes = make_uint2(without_negative_zero(codes.x), without_negative_zero(codes.y));
  return codes;
}

// The codes of 8 values with one factor, in order.
template <int S, int Mode>
__device__ __forceinline__ auto encode_run(const float (&v)[kPatch], float factor, float global_scale,
                                           const BlockCast& cast) {
  if constexpr (S == kNVFP4) {
    return encode_e2m1(v, factor, global_scale, cast.format);
  } else {
    float scaled[kPatch];
#pragma unroll
    for (int i = 0; i < kPatch; ++i) scaled[i] = __fmul_rn(v[i], factor);
    return encode_fp8<Mode>(scaled, cast);
  }
}

// The codes of 8 values with a factor each.
template <int Mode>
__device__ __forceinline__ uint2 encode_each(const float (&v)[kPatch], const float (&factors)[kPatch],
                                             const BlockCast& cast) {
  float scaled[kPatch];
#pragma unroll
  for (int i = 0; i < kPatch; ++i) scaled[i] = __fmul_rn(v[i], factors[i]);
  return encode_fp8<Mode>(scaled, cast);
}

// Codes of 8 values from `column` of a row on that has `pitch` bytes.
template <bool Full>
__device__ __forceinline__ void store_codes(uint8_t* row, uint2 codes, int64_t column, int64_t pitch, bool wide) {
  if constexpr (Full)
    *reinterpret_cast<uint2*>(row + column) = codes;
  else if (column < pitch)
    store_vector<uint8_t, 8>(row + column, reinterpret_cast<const Vec<uint8_t, 8>&>(codes), pitch - column, wide);
}
template <bool Full>
__device__ __forceinline__ void store_codes(uint8_t* row, uint32_t codes, int64_t column, int64_t pitch, bool wide) {
  if constexpr (Full)
    *reinterpret_cast<uint32_t*>(row + column / 2) = codes;
  else if (column / 2 < pitch)
    store_vector<uint8_t, 4>(row + column / 2, reinterpret_cast<const Vec<uint8_t, 4>&>(codes), pitch - column / 2,
                             wide);
}

}  // namespace block_cast
}  // namespace ted
