// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "attention/attention.h"

namespace ted::attention {

namespace {

__global__ void inverses_kernel(const Casts a) {
  const int i = threadIdx.x;
  if (i >= a.count) return;
  const Cast& cast = a.casts[i];
  const float scale = cast.scale[0] * cast.factor;
  const float inverse = 1.0f / scale;
  if (cast.scaled != nullptr) cast.scaled[0] = scale;
  for (int r = 0; r < kMaxResults; ++r) {
    if (cast.inverses[r] != nullptr) cast.inverses[r][0] = inverse;
    if (cast.largest[r] != nullptr) cast.largest[r][0] = 0.0f;
  }
}

__global__ void record_kernel(const Casts a) {
  const int i = threadIdx.x;
  if (i >= a.count || a.casts[i].amax == nullptr) return;
  const Cast& cast = a.casts[i];
  float amax = cast.amax[0];
  for (int r = 0; r < kMaxResults; ++r)
    if (cast.largest[r] != nullptr) amax = fmaxf(amax, cast.largest[r][0] * cast.factor);  // NaN is ignored, Inf is kept
  cast.amax[0] = amax;
}

}  // namespace

void inverses(const Queue& q, const Casts& a) { inverses_kernel<<<1, 32, 0, q.stream()>>>(a); }

void record(const Queue& q, const Casts& a) { record_kernel<<<1, 32, 0, q.stream()>>>(a); }

}  // namespace ted::attention
