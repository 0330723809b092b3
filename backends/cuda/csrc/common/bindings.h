// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// How a family of kernels reaches Python: a file csrc/<family>/bindings.cpp with
//
//   static ted::Bindings norm(+[](pybind11::module_& m) { m.def("layernorm_fwd", &layernorm_fwd, ...); });
//
// Arguments are integers and floats, positional: device, stream, then addresses (uintptr_t, 0 for an absent tensor),
// sizes and strides in elements (int64_t), codes of dtypes and encodings (dtypes.h).
#pragma once

#include <pybind11/pybind11.h>

namespace ted {

class Bindings {
 public:
  explicit Bindings(void (*bind)(pybind11::module_&));
};

}  // namespace ted
