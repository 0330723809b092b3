// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The Python module te_dispatch_cuda._native. Importing it needs neither a GPU nor a driver.
#include "common/bindings.h"
#include "common/queue.h"

#include <vector>

namespace py = pybind11;

namespace ted {

static std::vector<void (*)(py::module_&)>& registered() {
  static std::vector<void (*)(py::module_&)> all;
  return all;
}

Bindings::Bindings(void (*bind)(py::module_&)) { registered().push_back(bind); }

}  // namespace ted

PYBIND11_MODULE(_native, m) {
  m.doc() = "Kernels and library calls of te_dispatch_cuda: addresses, sizes and a stream in, nothing allocated.";
  py::register_exception<ted::CudaError>(m, "CudaError", PyExc_RuntimeError);
  m.attr("BUILT_ARCHS") = TE_DISPATCH_CUDA_BUILT;
  m.attr("RUNTIME_VERSION") = CUDART_VERSION;
  for (auto bind : ted::registered()) bind(m);
}
