// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/prepared.h"

#include "gemm/plan.h"

#include <pybind11/stl.h>

#include <cstring>

namespace py = pybind11;

namespace ted::gemm {

namespace {

constexpr size_t kAlgorithmBytes = sizeof(lt::Algorithm);

lt::Algorithm algorithm_of(const std::string& bytes) {
  if (bytes.size() != kAlgorithmBytes)
    throw std::invalid_argument("algorithm: got " + std::to_string(bytes.size()) + " bytes, expected " +
                                std::to_string(kAlgorithmBytes));
  lt::Algorithm algorithm;
  std::memcpy(&algorithm, bytes.data(), kAlgorithmBytes);
  return algorithm;
}

py::bytes bytes_of_algorithm(const lt::Algorithm& algorithm) {
  return py::bytes(reinterpret_cast<const char*>(&algorithm), kAlgorithmBytes);
}

std::shared_ptr<Plan> make_plan(int device, int layout, int64_t m, int64_t n, int64_t k, int a_type, int a_scaling,
                                int a_scales, int a_alignment, int64_t a_stride, int b_type, int b_scaling, int b_scales,
                                int b_alignment, int64_t b_stride, int out_type, int out_cast, int out_alignment,
                                bool accumulate, int bias_type, int bias_alignment, int epilogue, int aux_type, int aux_cast,
                                bool tf32, bool fast, const py::object& algorithm) {
  const Problem problem{device, layout, m, n, k, {a_type, a_scaling, a_scales, a_alignment, a_stride},
                        {b_type, b_scaling, b_scales, b_alignment, b_stride}, out_type, out_cast, out_alignment,
                        accumulate, bias_type, bias_alignment, epilogue, aux_type, aux_cast, tf32, fast};
  const Queue queue(device, 0);
  if (algorithm.is_none()) return std::make_shared<Plan>(problem, nullptr);
  const lt::Algorithm chosen = algorithm_of(algorithm.cast<std::string>());
  return std::make_shared<Plan>(problem, &chosen);
}

void run(Plan& plan, uintptr_t stream, uintptr_t a, uintptr_t b, uintptr_t a_scale, uintptr_t b_scale, uintptr_t out,
         uintptr_t bias, uintptr_t workspace, float alpha) {
  const Queue queue(plan.problem().device, stream);
  Operands o{};
  o.a = pointer<void>(a);
  o.b = pointer<void>(b);
  o.a_scale = pointer<void>(a_scale);
  o.b_scale = pointer<void>(b_scale);
  o.out = pointer<void>(out);
  o.bias = pointer<void>(bias);
  o.workspace = pointer<void>(workspace);
  o.alpha = alpha;
  plan.run(queue, o);
  queue.launched("gemm");
}

void run_fused(Plan& plan, uintptr_t stream, uintptr_t a, uintptr_t b, uintptr_t a_scale, uintptr_t b_scale,
               uintptr_t out, uintptr_t bias, uintptr_t workspace, float alpha, uintptr_t aux, uintptr_t aux_scale,
               uintptr_t dbias, uintptr_t out_cast_scale, uintptr_t out_scale_inv, uintptr_t out_amax,
               uintptr_t aux_cast_scale, uintptr_t aux_scale_inv, uintptr_t aux_amax, uintptr_t a_global, uintptr_t b_global) {
  const Queue queue(plan.problem().device, stream);
  Operands o{};
  o.a = pointer<void>(a);
  o.b = pointer<void>(b);
  o.a_scale = pointer<void>(a_scale);
  o.b_scale = pointer<void>(b_scale);
  o.out = pointer<void>(out);
  o.bias = pointer<void>(bias);
  o.workspace = pointer<void>(workspace);
  o.alpha = alpha;
  o.a_global = pointer<float>(a_global);
  o.b_global = pointer<float>(b_global);
  o.aux = pointer<void>(aux);
  o.aux_scale = pointer<float>(aux_scale);
  o.dbias = pointer<void>(dbias);
  o.out_cast = {plan.problem().out_cast, pointer<float>(out_cast_scale), pointer<float>(out_scale_inv), pointer<float>(out_amax)};
  o.aux_cast = {plan.problem().aux_cast, pointer<float>(aux_cast_scale), pointer<float>(aux_scale_inv), pointer<float>(aux_amax)};
  plan.run(queue, o);
  queue.launched("gemm");
}

// In a prepared call, which keeps the plan, its address is among the arguments: (device, stream, plan, ...).
template <class... A>
struct Planned {
  template <void (*F)(Plan&, uintptr_t, A...)>
  static void call(int device, uintptr_t stream, uintptr_t plan, A... arguments) {
    if (plan == 0) throw std::invalid_argument("plan: got a null pointer");
    Plan& known = *pointer<Plan>(plan);
    if (known.problem().device != device) throw std::invalid_argument("plan: got one of another device");
    F(known, stream, arguments...);
  }
};

template <auto F, class... A>
void offer_planned(const char* name, void (*)(Plan&, uintptr_t, A...)) {
  using Whole = Spread<&Planned<A...>::template call<F>>;
  offer(name, {Whole::kinds(), &Whole::call});
}

// One call for all groups; they share the workspace, because they run one after the other.
void run_grouped(const std::vector<std::shared_ptr<Plan>>& plans, int device, uintptr_t stream,
                 const std::vector<uintptr_t>& a, const std::vector<uintptr_t>& b, const std::vector<uintptr_t>& a_scales,
                 const std::vector<uintptr_t>& b_scales, const std::vector<uintptr_t>& outs,
                 const std::vector<uintptr_t>& biases, uintptr_t workspace) {
  const size_t count = plans.size();
  for (const auto* list : {&a, &b, &a_scales, &b_scales, &outs, &biases})
    if (list->size() != count)
      throw std::invalid_argument("plans: got " + std::to_string(count) + ", and a list of " + std::to_string(list->size()));
  const Queue queue(device, stream);
  for (size_t i = 0; i < count; ++i) {
    if (plans[i]->problem().device != device) throw std::invalid_argument("plans: got one of another device");
    Operands o{};
    o.a = pointer<void>(a[i]);
    o.b = pointer<void>(b[i]);
    o.a_scale = pointer<void>(a_scales[i]);
    o.b_scale = pointer<void>(b_scales[i]);
    o.out = pointer<void>(outs[i]);
    o.bias = pointer<void>(biases[i]);
    o.workspace = pointer<void>(workspace);
    o.alpha = 1.0f;
    plans[i]->run(queue, o);
  }
  queue.launched("grouped_gemm");
}

py::list candidates(const Plan& plan, int count) {
  const Queue queue(plan.problem().device, 0);
  py::list found;
  if (plan.product() == nullptr) return found;
  for (const Candidate& candidate : plan.product()->candidates(count))
    found.append(py::make_tuple(bytes_of_algorithm(candidate.algorithm), candidate.workspace, describe(candidate.algorithm)));
  return found;
}

void take(Plan& plan, const std::string& algorithm, int64_t workspace) {
  plan.take({algorithm_of(algorithm), workspace});
}

std::string description(const Plan& plan) {
  if (plan.product() == nullptr) return "nothing to multiply";
  return std::string(plan.direct() ? "" : "staged, ") + describe(plan.product()->taken().algorithm);
}

void bind(py::module_& m) {
  py::register_exception<lt::Refused>(m, "GemmRefused", PyExc_RuntimeError);
  py::class_<Plan, std::shared_ptr<Plan>>(m, "GemmPlan")
      .def_property_readonly("workspace", &Plan::workspace)
      .def_property_readonly("direct", &Plan::direct)
      .def_property_readonly("address", [](const Plan& plan) { return reinterpret_cast<uintptr_t>(&plan); })
      .def_property_readonly("description", &description);
  m.def("open_cublaslt", [](const std::string& path) { lt::open(path.c_str()); });
  m.def("gemm_plan", &make_plan);
  m.def("gemm_run", &run);
  offer_planned<&run>("gemm_run", &run);
  m.def("gemm_run_fused", &run_fused);
  offer_planned<&run_fused>("gemm_run_fused", &run_fused);
  m.def("gemm_run_grouped", &run_grouped);
  m.def("gemm_candidates", &candidates);
  m.def("gemm_take", &take);
}

Bindings registered(&bind);

}  // namespace

}  // namespace ted::gemm
