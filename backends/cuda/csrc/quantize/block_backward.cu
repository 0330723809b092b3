// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "cast/blocks.cuh"
#include "cast/sources.cuh"
#include "quantize/block_cast.h"

namespace ted {

// Kernels of sources that read codes are left out.
template <class Source>
constexpr bool kReadsFloats = true;
template <class T>
constexpr bool kReadsFloats<ActivationGradSource<T, Code>> = false;

void backward_block_cast(const Queue& queue, const SourceArguments& source, int scaling, const BlockCast& cast) {
  if (source.x_encoding >= 0)
    throw std::invalid_argument("x: got codes, expected floats where the result has a scale per block");
  with_backward_source(source, [&](const auto& x) {
    if constexpr (kReadsFloats<std::decay_t<decltype(x)>>) {
      if (scaling == kMXFP8)
        cast_blocks<kMXFP8>(queue, x, cast);
      else
        cast_blocks<kBlock1D>(queue, x, cast);
    }
  });
}

}  // namespace ted
