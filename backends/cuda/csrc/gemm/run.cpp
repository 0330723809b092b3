// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The steps of a planned gemm, launched.
#include "gemm/plan.h"

namespace ted::gemm {

void Plan::require_addresses(const Operands& o) const {
  const Problem& p = problem_;
  const int64_t outputs = p.m * p.n;
  if (product_ != nullptr) {
    require_pointer("a", o.a, 1, 1);
    require_pointer("b", o.b, 1, 1);
    if (is_codes(p.a.type)) {
      require_pointer("a's scale", o.a_scale, 1, 1);
      require_pointer("b's scale", o.b_scale, 1, 1);
    }
  }
  require_pointer("out", o.out, outputs, 1);
  if (p.bias_type != kNone) require_pointer("bias", o.bias, p.n, 1);
  if (p.epilogue == kGelu || p.epilogue == kDGelu) require_pointer("aux", o.aux, outputs, 1);
  if (p.epilogue >= kDGelu) require_pointer("dbias", o.dbias, p.epilogue == kBgradA ? p.m : p.n, 1);
  for (const Cast* cast : {&o.out_cast, &o.aux_cast}) {
    if (cast->cast == kNone) continue;
    require_pointer("scale", cast->scale, 1, 4);
    require_pointer("scale_inv", cast->scale_inv, 1, 4);
    require_pointer("amax", cast->amax, 0, 4);
  }
  if (workspace_ > 0) require_pointer("workspace", o.workspace, workspace_, 1);
}

void Plan::run(const Queue& queue, const Operands& o) {
  const Problem& p = problem_;
  require_addresses(o);
  auto* base = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(o.workspace) + 255) & ~uintptr_t{255});
  if (product_ != nullptr) multiply(queue, o, base);
  if (staged_) finish_product(queue, o, base);
  if ((p.epilogue == kBgradA || p.epilogue == kBgradB) && !fused_sums_) sum_operand(queue, o, base);
}

void Plan::multiply(const Queue& queue, const Operands& o, uint8_t* base) {
  ProductOperands given{};
  given.a = o.a;
  given.b = o.b;
  given.a_scale = o.a_scale;
  given.b_scale = o.b_scale;
  const auto copy = [&](const Copy& step, const void* source, const void*& used) {
    if (!step.needed) return;
    uint8_t* target = base + step.offset;
    pad_copy(queue, {static_cast<const uint8_t*>(source), target, step.rows, step.row_bytes, step.source_stride,
                     step.target_rows, step.stride});
    used = target;
  };
  copy(a_copy_, o.a, given.a);
  copy(b_copy_, o.b, given.b);
  if (a_scales_.needed || b_scales_.needed) {
    ScaleJob jobs[2] = {a_scales_.job, b_scales_.job};
    const auto prepare = [&](ScaleJob& job, const Scales& step, const void* source, const void*& used) {
      if (!step.needed) return;
      job.source = static_cast<const float*>(source);
      job.target = reinterpret_cast<float*>(base + step.offset);
      used = job.target;
    };
    prepare(jobs[0], a_scales_, o.a_scale, given.a_scale);
    prepare(jobs[1], b_scales_, o.b_scale, given.b_scale);
    lay_out_scales(queue, jobs[0], jobs[1]);
  }
  given.d = staged_ && !in_place_ ? base + z_ : o.out;
  given.alpha = o.alpha;
  given.workspace = base;
  const bool cast = !staged_ && problem_.out_cast != kNone;
  float* measured = reinterpret_cast<float*>(base + measured_);
  if (!staged_) {
    given.bias = problem_.bias_type != kNone ? o.bias : o.dbias;
    given.d_scale = o.out_cast.scale;
    given.d_amax = measured;
  }
  if (cast) check(cudaMemsetAsync(measured, 0, sizeof(float), queue.stream()), "amax");
  product_->run(queue.stream(), given);
  if (cast) record_cast(queue, o.out_cast, measured);
}

void Plan::finish_product(const Queue& queue, const Operands& o, uint8_t* base) {
  const Problem& p = problem_;
  Finish f;
  if (product_ != nullptr) f.z = in_place_ ? static_cast<const float*>(o.out) : reinterpret_cast<const float*>(base + z_);
  f.m = p.m;
  f.n = p.n;
  f.z_stride = n_;
  f.a_scale = o.a_global;
  f.b_scale = o.b_global;
  f.bias = o.bias;
  f.bias_type = p.bias_type;
  f.epilogue = p.epilogue == kGelu ? 1 : p.epilogue == kDGelu ? 2 : 0;
  f.accumulate = p.accumulate;
  f.out = o.out;
  f.out_type = p.out_type;
  f.out_cast = o.out_cast;
  if (p.epilogue == kGelu) {
    f.aux_out = o.aux;
    f.aux_out_type = p.aux_type;
    f.aux_cast = o.aux_cast;
  } else if (p.epilogue == kDGelu) {
    f.aux_in = o.aux;
    f.aux_in_type = p.aux_type;
    f.aux_in_scale = o.aux_scale;
    f.dbias = o.dbias;
    f.dbias_type = p.out_type;
    f.partials = reinterpret_cast<float*>(base + partials_);
  }
  finish(queue, f);
}

void Plan::sum_operand(const Queue& queue, const Operands& o, uint8_t* base) {
  const Problem& p = problem_;
  const bool of_a = p.epilogue == kBgradA;
  const OperandKind& operand = of_a ? p.a : p.b;
  const int64_t kept = of_a ? p.m : p.n;
  OperandSum s;
  s.source = of_a ? o.a : o.b;
  s.type = operand.type;
  s.over_rows = of_a ? p.layout == kTN : p.layout != kNT;
  s.rows = s.over_rows ? p.k : kept;
  s.columns = s.over_rows ? kept : p.k;
  s.scaling = operand.scaling;
  s.scale = static_cast<const float*>(of_a ? o.a_scale : o.b_scale);
  const ScaleJob& job = (of_a ? a_scales_ : b_scales_).job;
  s.scale_row_stride = job.source_row_stride;
  s.scale_column_stride = job.source_column_stride;
  s.out = o.dbias;
  s.out_type = p.out_type;
  s.partials = reinterpret_cast<float*>(base + partials_);
  operand_sum(queue, s);
}

}  // namespace ted::gemm
