// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Casts of y with a scale per block, once the statistics are known.
#include "cast/blocks.cuh"
#include "norm/norm.h"
#include "norm/source.cuh"

namespace ted::norm {

void cast_blocks(const Queue& q, const Normalized& a, int x_dtype, int scaling, const BlockCast& cast) {
  with_source(a, x_dtype, [&](const auto& source) {
    switch (scaling) {
      case kBlock1D: return ted::cast_blocks<kBlock1D>(q, source, cast);
      case kBlock2D: return ted::cast_blocks<kBlock2D>(q, source, cast);
      case kMXFP8: return ted::cast_blocks<kMXFP8>(q, source, cast);
      case kNVFP4: return ted::cast_blocks<kNVFP4>(q, source, cast);
    }
    throw std::invalid_argument("scaling: got code " + std::to_string(scaling) + ", expected 1 to 4");
  });
}

}  // namespace ted::norm
