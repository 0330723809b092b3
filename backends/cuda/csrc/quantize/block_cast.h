// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Casts with a scale per block: one file of kernels per scaling (plain matrices) or form (activations). Operators:
// quantize, quantize_dbias, activation_fwd, activation_bwd.
#pragma once

#include "cast/blocks.h"
#include "cast/source_arguments.h"

namespace ted {

void block_1d_cast(const Queue& queue, const SourceArguments& source, const BlockCast& cast);
void block_2d_cast(const Queue& queue, const SourceArguments& source, const BlockCast& cast);
void mxfp8_cast(const Queue& queue, const SourceArguments& source, const BlockCast& cast);

// With `maxima`, memory of kMaxima floats, the tensor's amax is found first; else cast.maxima is given.
void nvfp4_cast(const Queue& queue, const SourceArguments& source, BlockCast cast, float* maxima);

// kBlock1D and kMXFP8 of an activation or its gradient, of operands that are no codes.
void forward_block_cast(const Queue& queue, const SourceArguments& source, int scaling, const BlockCast& cast);
void backward_block_cast(const Queue& queue, const SourceArguments& source, int scaling, const BlockCast& cast);

}  // namespace ted
