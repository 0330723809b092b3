// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "problem.h"

#include "numbers.h"

#include <cstdio>

namespace host {

bool has_bias(int32_t e) {
  return e == HIPBLASLT_EPILOGUE_BIAS || e == HIPBLASLT_EPILOGUE_RELU_BIAS || e == HIPBLASLT_EPILOGUE_GELU_BIAS ||
         e == HIPBLASLT_EPILOGUE_GELU_AUX_BIAS;
}
bool has_gelu(int32_t e) {
  return e == HIPBLASLT_EPILOGUE_GELU || e == HIPBLASLT_EPILOGUE_GELU_BIAS || writes_aux(e);
}
bool has_relu(int32_t e) { return e == HIPBLASLT_EPILOGUE_RELU || e == HIPBLASLT_EPILOGUE_RELU_BIAS; }
bool writes_aux(int32_t e) { return e == HIPBLASLT_EPILOGUE_GELU_AUX || e == HIPBLASLT_EPILOGUE_GELU_AUX_BIAS; }
bool is_gelu_backward(int32_t e) { return e == HIPBLASLT_EPILOGUE_DGELU || e == HIPBLASLT_EPILOGUE_DGELU_BGRAD; }
bool has_bias_gradient(int32_t e) {
  return e == HIPBLASLT_EPILOGUE_DGELU_BGRAD || e == HIPBLASLT_EPILOGUE_BGRADA || e == HIPBLASLT_EPILOGUE_BGRADB;
}

namespace {

hipblasStatus_t invalid(const char* what) {
  std::fprintf(stderr, "host hipBLASLt: %s\n", what);
  return HIPBLAS_STATUS_INVALID_VALUE;
}

bool fits(const Layout& x) {
  const uint64_t lead = x.order == HIPBLASLT_ORDER_ROW ? x.columns : x.rows;
  return x.ld >= 0 && static_cast<uint64_t>(x.ld) >= lead;
}

}  // namespace

hipblasStatus_t read_problem(const Desc* desc, const Layout* a, const Layout* b, const Layout* c, const Layout* d, Problem* p) {
  *p = {};
  p->desc = desc;
  p->a = a, p->b = b, p->c = c, p->d = d;
  p->a_turned = desc->op_a != HIPBLAS_OP_N, p->b_turned = desc->op_b != HIPBLAS_OP_N;
  p->m = static_cast<int64_t>(d->rows), p->n = static_cast<int64_t>(d->columns);
  p->k = static_cast<int64_t>(p->a_turned ? a->rows : a->columns);
  const auto a_outer = static_cast<int64_t>(p->a_turned ? a->columns : a->rows);
  const auto b_outer = static_cast<int64_t>(p->b_turned ? b->rows : b->columns);
  const auto b_inner = static_cast<int64_t>(p->b_turned ? b->columns : b->rows);
  if (a_outer != p->m || b_outer != p->n || b_inner != p->k) return invalid("A, B and D do not fit together");
  if (c->rows != d->rows || c->columns != d->columns) return invalid("C and D differ in size");
  for (const Layout* x : {a, b, c, d})
    if (!fits(*x)) return invalid("a leading dimension is smaller than the matrix");
  for (const Layout* x : {b, c, d})
    if (x->batch_count != a->batch_count || a->batch_count < 1) return invalid("batch counts differ, or are below 1");
  p->a_type = static_cast<hipDataType>(a->type), p->b_type = static_cast<hipDataType>(b->type);
  p->c_type = static_cast<hipDataType>(c->type), p->d_type = static_cast<hipDataType>(d->type);
  p->bias_type = desc->bias_type == kTypeOfD ? p->d_type : static_cast<hipDataType>(desc->bias_type);
  p->aux_type = desc->aux_type == kTypeOfD ? p->d_type : static_cast<hipDataType>(desc->aux_type);
  p->aux_ld = desc->aux_ld > 0 ? desc->aux_ld : p->m;
  if (writes_aux(desc->epilogue) || is_gelu_backward(desc->epilogue)) {
    if (!desc->aux) return invalid("the epilogue needs an auxiliary matrix");
    if (p->aux_ld < p->m) return invalid("the auxiliary matrix's leading dimension is smaller than D's rows");
  }
  return HIPBLAS_STATUS_SUCCESS;
}

uint32_t features(const Problem& p) {
  const Desc& d = *p.desc;
  uint32_t found = static_cast<uint32_t>(d.epilogue) << 8;
  const bool flags[] = {p.a_turned, p.b_turned, d.d_scale != nullptr, d.amax_d != nullptr, d.a_scale != nullptr, d.b_scale != nullptr,
                        d.a_scale_kind == ScaleKind::kBlock32};
  for (int i = 0; i < 7; ++i) found |= static_cast<uint32_t>(flags[i]) << i;
  return found;
}

}  // namespace host
