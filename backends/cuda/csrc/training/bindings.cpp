// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/prepared.h"
#include "training/training.h"

#include <pybind11/stl.h>

static ted::Bindings training(+[](pybind11::module_& m) {
  ted::define<&ted::dropout_add_fwd>(m, "dropout_add_fwd");
  ted::define<&ted::dropout_add_bwd>(m, "dropout_add_bwd");
  m.def("multi_tensor_adam", &ted::multi_tensor_adam);
  m.def("multi_tensor_scale", &ted::multi_tensor_scale);
  m.def("multi_tensor_l2norm", &ted::multi_tensor_l2norm);
  m.def("moe_sort_workspace", &ted::moe_sort_workspace);
  m.def("moe_sort", &ted::moe_sort);
  m.def("moe_spread", &ted::moe_spread);
  m.def("moe_unpermute", &ted::moe_unpermute);
  m.def("moe_unpermute_bwd", &ted::moe_unpermute_bwd);
  m.attr("NORM_CHUNK") = ted::kNormChunk;
});
