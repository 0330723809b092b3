// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// From Python's integers to a source: each function checks the arguments of one form and calls f(source). Kernels of
// the three forms are best compiled in files of their own.
#pragma once

#include "activation/source.cuh"
#include "cast/source_arguments.h"
#include "common/queue.h"

#include <type_traits>

namespace ted {

// 3 sources: an element type each.
template <class F>
void with_plain_source(const SourceArguments& a, F&& f) {
  const int64_t count = require_count("x", a.rows, a.columns);
  with_dtype("x", a.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    require_pointer("x", pointer<void>(a.x), count, sizeof(T));
    // A lone row has no next one to be aligned.
    f(plain_source<T>(pointer<void>(a.x), a.rows, a.columns, a.rows > 1 ? a.stride : 0));
  });
}

inline Activation activation_of(const SourceArguments& a) {
  const int function = a.kind & (kGated - 1);
  if (a.kind < 0 || a.kind >= 2 * kGated || function > kClamped)
    throw std::invalid_argument("kind: got code " + std::to_string(a.kind) + ", which names no activation");
  return {function, (a.kind & kGated) != 0, a.limit, a.alpha};
}

template <class X>
Reading<X> reading_of(const SourceArguments& a) {
  if constexpr (std::is_same_v<X, Code>) {
    require_pointer("x.scale_inv", pointer<void>(a.x_scale_inv), 1, 4);
    if (a.x_encoding < kE4M3 || a.x_encoding > kE5M2FNUZ)
      throw std::invalid_argument("x: got encoding code " + std::to_string(a.x_encoding) + ", expected 0 to 3");
  }
  return {a.x_encoding, pointer<const float>(a.x_scale_inv), 1.0f};
}

// Vectors of 16 elements start at multiples of 16 bytes in every row and in both halves.
inline bool wide_rows(const SourceArguments& a, const Activation& activation, int64_t half) {
  const bool lone = a.rows == 1 && !activation.gated;
  return is_aligned(pointer<void>(a.x), 0) && is_aligned(pointer<void>(a.dy), 0) && (lone || half % 16 == 0);
}

// 4 sources: an element type each, or codes; 8 where Gates says to tell gated ones apart.
enum Gates : bool { kTogether = false, kApart = true };
template <bool Apart = kTogether, class F>
void with_forward_source(const SourceArguments& a, F&& f) {
  const Activation activation = activation_of(a);
  const int64_t count = require_count("x", a.rows, a.columns);
  const auto call = [&](auto type) {
    using X = typename decltype(type)::type;
    require_pointer("x", pointer<void>(a.x), count, sizeof(X));
    const auto make = [&](auto gate) {
      f(ActivationSource<X, decltype(gate)::value>{pointer<const X>(a.x), a.rows, a.columns, activation,
                                                   reading_of<X>(a), wide_rows(a, activation, a.columns)});
    };
    if constexpr (!Apart)
      make(std::integral_constant<int, kEither>{});
    else if (activation.gated)
      make(std::integral_constant<int, kIsGated>{});
    else
      make(std::integral_constant<int, kNotGated>{});
  };
  if (a.x_encoding >= 0)
    call(Type<Code>{});
  else
    with_dtype("x", a.dtype, call);
}

// What a file compiles of the gradients, which take long: those of bf16, the others, or both.
enum GradTypes : int { kOfBFloat16 = 1, kOfOthers = 2, kOfAll = 3 };

// 4 sources: dy and x of one element type, or dy of bf16 and x of codes; 8 with Apart, the gated ones GatedGradSource.
template <int Types = kOfAll, bool Apart = kTogether, class F>
void with_backward_source(const SourceArguments& a, F&& f) {
  const Activation activation = activation_of(a);
  const int64_t count = require_count("x", a.rows, a.columns);
  if (activation.gated && a.columns % 2 != 0)
    throw std::invalid_argument("columns: got " + std::to_string(a.columns) + ", expected an even number");
  const int64_t half = activation.gated ? a.columns / 2 : a.columns;
  const auto call = [&](auto type, auto x_type) {
    using T = typename decltype(type)::type;
    using X = typename decltype(x_type)::type;
    require_pointer("dy", pointer<void>(a.dy), count, sizeof(T));
    require_pointer("x", pointer<void>(a.x), count, sizeof(X));
    const auto make = [&](auto source) {
      f(decltype(source){pointer<const T>(a.dy), pointer<const X>(a.x), a.rows, half, activation, reading_of<X>(a),
                         wide_rows(a, activation, half)});
    };
    if constexpr (!Apart)
      make(ActivationGradSource<T, X>{});
    else if (activation.gated)
      make(GatedGradSource<T, X>{});
    else
      make(ActivationGradSource<T, X, kNotGated>{});
  };
  if (a.x_encoding >= 0 && a.dtype != kBFloat16)
    throw std::invalid_argument("dy: got dtype code " + std::to_string(a.dtype) + " with a quantized x, expected 1");
  if constexpr ((Types & kOfBFloat16) != 0) {
    if (a.x_encoding >= 0) return call(Type<__nv_bfloat16>{}, Type<Code>{});
    if (a.dtype == kBFloat16) return call(Type<__nv_bfloat16>{}, Type<__nv_bfloat16>{});
  }
  if constexpr ((Types & kOfOthers) != 0) {
    if (a.dtype == kFloat32) return call(Type<float>{}, Type<float>{});
    if (a.dtype == kFloat16) return call(Type<__half>{}, Type<__half>{});
  }
  throw std::invalid_argument("dy: got dtype code " + std::to_string(a.dtype) + ", expected 0, 1 or 2");
}

}  // namespace ted
