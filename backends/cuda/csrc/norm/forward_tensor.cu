// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Casts of y with one scale per tensor, once the statistics are known.
#include "cast/tensor.cuh"
#include "norm/norm.h"
#include "norm/source.cuh"

namespace ted::norm {

void cast_tensor(const Queue& q, const Normalized& a, int x_dtype, const TensorCast& cast) {
  with_source(a, x_dtype, [&](const auto& source) { launch_cast<false>(q, source, cast, true); });
}

}  // namespace ted::norm
