// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "cast/blocks.cuh"
#include "cast/sources.cuh"
#include "cast/tensor.cuh"
#include "quantize/block_cast.h"

namespace ted {

void nvfp4_cast(const Queue& queue, const SourceArguments& source, BlockCast cast, float* maxima) {
  with_plain_source(source, [&](const auto& x) {
    if (maxima != nullptr) {
      cast.maxima = maxima;
      cast.maxima_count = launch_maxima(queue, x, maxima, cast.noop);
    }
    cast_blocks<kNVFP4>(queue, x, cast);
  });
}

}  // namespace ted
