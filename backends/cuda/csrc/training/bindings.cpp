// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/prepared.h"
#include "training/tensor_lists.h"
#include "training/training.h"

#include <pybind11/stl.h>

namespace py = pybind11;

namespace {

using ted::TensorLists;

// Steps of lists that look like known ones; false, before anything is launched, where they do not.
bool adam_of(TensorLists& known, const py::tuple& lists, int device, uintptr_t stream, uintptr_t noop_flag, double lr,
             double beta1, double beta2, double eps, double correction1, double correction2, double weight_decay,
             bool adam_w) {
  if (!known.read(lists)) return false;
  const auto& at = known.addresses();
  ted::multi_tensor_adam(device, stream, at.at(0), at.at(1), at.at(2), at.at(3), at.at(4), known.counts(), noop_flag,
                         lr, beta1, beta2, eps, correction1, correction2, weight_decay, adam_w,
                         known.dtypes()[0].at(0), known.dtypes()[1].at(0));
  return true;
}

bool scale_of(TensorLists& known, const py::tuple& lists, int device, uintptr_t stream, double scale,
              uintptr_t noop_flag) {
  if (!known.read(lists)) return false;
  const auto& at = known.addresses();
  ted::multi_tensor_scale(device, stream, at.at(0), at.at(1), known.counts(), known.dtypes()[0], known.dtypes()[1],
                          scale, noop_flag);
  return true;
}

bool l2norm_of(TensorLists& known, const py::tuple& lists, int device, uintptr_t stream, uintptr_t partials,
               int64_t partial_count, uintptr_t out, bool per_tensor) {
  if (!known.read(lists)) return false;
  ted::multi_tensor_l2norm(device, stream, known.addresses().at(0), known.counts(), known.dtypes()[0], partials,
                           partial_count, out, per_tensor);
  return true;
}

}  // namespace

static ted::Bindings training(+[](py::module_& m) {
  ted::define<&ted::dropout_add_fwd>(m, "dropout_add_fwd");
  ted::define<&ted::dropout_add_bwd>(m, "dropout_add_bwd");
  py::class_<TensorLists>(m, "TensorLists")
      .def(py::init<const py::tuple&, const py::object&>())
      .def("read", &TensorLists::read)
      .def_property_readonly("addresses", &TensorLists::addresses)
      .def_property_readonly("counts", &TensorLists::counts)
      .def_property_readonly("elements", &TensorLists::elements)
      .def_property_readonly("dtypes", &TensorLists::dtypes);
  m.def("multi_tensor_adam", &ted::multi_tensor_adam);
  m.def("multi_tensor_adam_of", &adam_of);
  m.def("multi_tensor_scale", &ted::multi_tensor_scale);
  m.def("multi_tensor_scale_of", &scale_of);
  m.def("multi_tensor_l2norm", &ted::multi_tensor_l2norm);
  m.def("multi_tensor_l2norm_of", &l2norm_of);
  m.def("moe_sort_workspace", &ted::moe_sort_workspace);
  m.def("moe_sort", &ted::moe_sort);
  m.def("moe_spread", &ted::moe_spread);
  m.def("moe_unpermute", &ted::moe_unpermute);
  m.def("moe_unpermute_bwd", &ted::moe_unpermute_bwd);
  m.attr("NORM_CHUNK") = ted::kNormChunk;
});
