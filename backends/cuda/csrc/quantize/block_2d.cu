// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "cast/blocks.cuh"
#include "cast/sources.cuh"
#include "quantize/block_cast.h"

namespace ted {

void block_2d_cast(const Queue& queue, const SourceArguments& source, const BlockCast& cast) {
  with_plain_source(source, [&](const auto& x) { cast_blocks<kBlock2D>(queue, x, cast); });
}

}  // namespace ted
