// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/bindings.h"
#include "softmax/softmax.h"

static ted::Bindings softmax(+[](pybind11::module_& m) {
  m.def("softmax_fwd", &ted::softmax_fwd);
  m.def("softmax_bwd", &ted::softmax_bwd);
});
