// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#pragma once

#include <pybind11/pybind11.h>

namespace ted_rocm::gemm {

void bind(pybind11::module_& m);

}  // namespace ted_rocm::gemm
