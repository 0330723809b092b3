// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Activations and their gradients in fp32; formulas in te_dispatch/ops/activation.py. exp within 2 ulp, quotients
// within 1 (the conformance kit's bounds/elementary.py says why no coarser approximation will do).
#pragma once

#include <cstdint>
#include <type_traits>

namespace ted {

// Functions of one value. Gated kinds add kGated; clamped_swiglu has a code of its own.
enum Function : int { kGelu = 0, kQgelu = 1, kRelu = 2, kSrelu = 3, kSilu = 4, kLogistic = 5, kClamped = 6 };
constexpr int kGated = 8;

struct Activation {
  int function;
  bool gated;
  float limit, alpha;  // of clamped_swiglu
};

// 1 / x within 1 ulp; 0 above 2^126.
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// 1 / (1 + exp(-t)).
__device__ __forceinline__ float logistic(float t) { return reciprocal(1.0f + expf(-t)); }

constexpr float kTwoRoot = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0.044715f;
constexpr float kQgeluSlope = 1.702f;

// s(2 t) of t = sqrt(2 / pi) (x + 0.044715 x^3), with which 0.5 x (1 + tanh t) = x s(2 t) does not cancel. The argument
// has roundings of its own, so that exp can be 2^ of a product: one rounding more, where expf spends six instructions
// to avoid it.
__device__ __forceinline__ float gelu_logistic(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  const float power = x * fmaf(-kTwoRoot * kCubic * kLog2E, x * x, -kTwoRoot * kLog2E);
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(power));
  return reciprocal(1.0f + e);
}
__device__ __forceinline__ float gelu_derivative(float x, float s) {
  const float bell = s * (1.0f - s);
  // Where the bell is 0, the slope may be infinite.
  return bell == 0.0f ? s : fmaf(x * bell, fmaf(3.0f * kTwoRoot * kCubic, x * x, kTwoRoot), s);
}
// s(1 + alpha x (1 - s)) at s = s(alpha x). The bell is multiplied first: alpha x may overflow where it is 0.
__device__ __forceinline__ float swish_derivative(float x, float alpha, float s) {
  return fmaf(x, alpha * (s * (1.0f - s)), s);
}
// NaN stays NaN.
__device__ __forceinline__ float relu(float x) { return x <= 0.0f ? 0.0f : x; }

// act(x), and act'(x) where it is asked for, from one exponential.
struct Point {
  float value, slope;
};
template <int Function>
__device__ __forceinline__ Point at(float x, float alpha) {
  if constexpr (Function == kGelu) {
    const float s = gelu_logistic(x);
    return {x * s, gelu_derivative(x, s)};
  } else if constexpr (Function == kRelu) {
    return {relu(x), x <= 0.0f ? 0.0f : 1.0f};
  } else if constexpr (Function == kSrelu) {
    return {relu(x) * relu(x), 2.0f * relu(x)};
  } else if constexpr (Function == kLogistic) {
    const float s = logistic(x);
    return {s, s * (1.0f - s)};
  } else {
    const float slope = Function == kQgelu ? kQgeluSlope : Function == kClamped ? alpha : 1.0f;
    const float s = logistic(slope * x);
    return {x * s, swish_derivative(x, slope, s)};
  }
}

// Calls f(std::integral_constant<int, function>{}), so that loops over values stay free of branches.
template <bool Clamps = true, class F>
__device__ __forceinline__ void with_function(int function, F&& f) {
  switch (function) {
    case kGelu: return f(std::integral_constant<int, kGelu>{});
    case kQgelu: return f(std::integral_constant<int, kQgelu>{});
    case kRelu: return f(std::integral_constant<int, kRelu>{});
    case kSrelu: return f(std::integral_constant<int, kSrelu>{});
    case kSilu: return f(std::integral_constant<int, kSilu>{});
    case kClamped:
      if constexpr (Clamps) return f(std::integral_constant<int, kClamped>{});
    default: return f(std::integral_constant<int, kLogistic>{});
  }
}

// What a function makes of u and v: clamped_swiglu clamps them and adds 1 to v.
template <int Function>
__device__ __forceinline__ float clamped_u(const Activation& a, float u) {
  return Function == kClamped && u > a.limit ? a.limit : u;
}
template <int Function>
__device__ __forceinline__ float clamped_v(const Activation& a, float v) {
  if constexpr (Function != kClamped) return v;
  return (v > a.limit ? a.limit : v < -a.limit ? -a.limit : v) + 1.0f;
}

// out = act(u), or act(u) v.
template <bool Gated, int N>
__device__ __forceinline__ void activate(const Activation& a, const float (&u)[N], const float (&v)[N],
                                         float (&out)[N]) {
  with_function<Gated>(a.function, [&](auto function) {
    constexpr int kF = decltype(function)::value;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float value = at<kF>(clamped_u<kF>(a, u[i]), a.alpha).value;
      out[i] = Gated ? value * clamped_v<kF>(a, v[i]) : value;
    }
  });
}

// The gradients of u, and of v where it is gated. Relu passes dy itself, whatever it is.
template <bool Gated, int N>
__device__ __forceinline__ void activate_backward(const Activation& a, const float (&dy)[N], const float (&u)[N],
                                                  const float (&v)[N], float (&du)[N], float (&dv)[N]) {
  with_function<Gated>(a.function, [&](auto function) {
    constexpr int kF = decltype(function)::value;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Point p = at<kF>(clamped_u<kF>(a, u[i]), a.alpha);
      const float through = Gated ? dy[i] * clamped_v<kF>(a, v[i]) : dy[i];
      if constexpr (kF == kRelu)
        du[i] = u[i] <= 0.0f ? 0.0f : through;
      else
        du[i] = kF == kClamped && u[i] > a.limit ? 0.0f : through * p.slope;
      if constexpr (Gated) {
        const bool outside = kF == kClamped && (v[i] > a.limit || v[i] < -a.limit);
        dv[i] = outside ? 0.0f : dy[i] * p.value;
      }
    }
  });
}

}  // namespace ted
