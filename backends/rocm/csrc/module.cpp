// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The Python module te_dispatch_rocm._native. Importing it needs neither a GPU nor ROCm.
#include "common/hip_api.h"
#include "gemm/bindings.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  m.doc() = "Library calls of te_dispatch_rocm: addresses, sizes and a stream in, nothing allocated.";
  py::register_exception<ted_rocm::HipError>(m, "HipError", PyExc_RuntimeError);
  m.def("open_hip", [](const std::string& path) { ted_rocm::hip::open(path.c_str()); });
  m.def("device_count", &ted_rocm::hip::device_count);
  ted_rocm::gemm::bind(m);
}
