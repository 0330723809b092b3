// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// A source as it crosses the Python boundary: te_dispatch_cuda/sources.py builds the tuple that every native cast takes
// after (device, stream).
#pragma once

#include "common/errors.h"

#include <cstdint>

namespace ted {

enum Form : int { kPlain = 0, kForward = 1, kBackward = 2 };

// Flat, in this order. Sizes are of the logical matrix that is cast: for a gated activation's forward, half of x's
// columns. form 0 reads x alone.
struct SourceArguments {
  int form;            // Form
  int dtype;           // of x (form 0, 1 where x is not quantized) and dy
  int64_t rows, columns;
  uintptr_t x;         // elements, or codes where x_encoding >= 0
  int64_t stride;      // between x's rows, in elements (form 0); else x and dy are dense
  uintptr_t dy;        // form 2, of the forward result's shape
  int kind;            // forms 1, 2: Activation (activation/functions.cuh)
  float limit, alpha;  // of clamped_swiglu
  int x_encoding;      // -1, or the encoding of x's codes
  uintptr_t x_scale_inv;  // fp32 (1,), with x_encoding >= 0
};

}  // namespace ted
