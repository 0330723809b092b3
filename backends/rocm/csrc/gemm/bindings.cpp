// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "gemm/bindings.h"

#include "gemm/plan_cache.h"

#include <pybind11/stl.h>

#include <cstring>

namespace py = pybind11;

namespace ted_rocm::gemm {

namespace {

constexpr size_t kAlgorithmBytes = sizeof(lt::Algorithm);
// A model makes some tens of kinds of calls; ragged batches make a new kind for every number of rows.
constexpr size_t kPlans = 4096;

// Never destroyed: the libraries may be gone before the interpreter is.
PlanCache& cache() {
  static auto* const plans = new PlanCache(kPlans);
  return *plans;
}

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

Problem problem_of(int device, int64_t m, int64_t n, int64_t k, bool a_turned, bool b_turned, int64_t lda, int64_t ldb,
                   int a_type, int b_type, int scaling, int out_type, bool accumulate, int bias_type, int epilogue,
                   int aux_type, bool tf32, int64_t workspace_limit) {
  return {device, m, n, k, a_turned, b_turned, lda, ldb, a_type, b_type, scaling, out_type,
          accumulate, bias_type, epilogue, aux_type, tf32, workspace_limit};
}

template <size_t... I>
Problem unpacked(const py::tuple& fields, std::index_sequence<I...>) {
  if (fields.size() != sizeof...(I))
    throw std::invalid_argument("problem: got " + std::to_string(fields.size()) + " fields, expected " +
                                std::to_string(sizeof...(I)));
  return problem_of(fields[I].cast<int64_t>()...);
}

Problem unpacked(const py::tuple& fields) { return unpacked(fields, std::make_index_sequence<18>()); }

std::shared_ptr<Plan> make_plan(const Problem& problem, const py::object& algorithm) {
  const hip::Device current(problem.device);
  if (algorithm.is_none()) return std::make_shared<Plan>(problem, nullptr);
  const lt::Algorithm chosen = algorithm_of(algorithm.cast<std::string>());
  return std::make_shared<Plan>(problem, &chosen);
}

// choose() -> the algorithm to take where the plan is made anew, or None.
std::shared_ptr<Plan> known_plan(const py::tuple& fields, const py::function& choose) {
  const Problem problem = unpacked(fields);
  return cache().get(problem, [&] { return make_plan(problem, choose()); });
}

Operands operands(uintptr_t a, uintptr_t b, uintptr_t a_scale, uintptr_t b_scale, uintptr_t out, uintptr_t bias,
                  uintptr_t aux, uintptr_t workspace, float alpha) {
  return {pointer<void>(a),    pointer<void>(b),   pointer<void>(a_scale),   pointer<void>(b_scale), pointer<void>(out),
          pointer<void>(bias), pointer<void>(aux), pointer<void>(workspace), alpha};
}

void run(Plan& plan, uintptr_t stream, uintptr_t a, uintptr_t b, uintptr_t a_scale, uintptr_t b_scale, uintptr_t out,
         uintptr_t bias, uintptr_t aux, uintptr_t workspace, float alpha) {
  const hip::Device current(plan.problem().device);
  plan.run(pointer<void>(stream), operands(a, b, a_scale, b_scale, out, bias, aux, workspace, alpha));
  hip::launched(pointer<void>(stream), "gemm");
}

// One call for all groups; they share the workspace, because they run one after the other.
void run_grouped(const std::vector<std::shared_ptr<Plan>>& plans, uintptr_t stream,
                 const std::vector<std::vector<uintptr_t>>& addresses, uintptr_t workspace) {
  if (plans.size() != addresses.size())
    throw std::invalid_argument("plans: got " + std::to_string(plans.size()) + " for the addresses of " +
                                std::to_string(addresses.size()));
  if (plans.empty()) return;
  const int device = plans[0]->problem().device;
  for (size_t i = 0; i < plans.size(); ++i) {
    if (plans[i]->problem().device != device) throw std::invalid_argument("plans: got one of another device");
    if (addresses[i].size() != 6)
      throw std::invalid_argument("addresses: got " + std::to_string(addresses[i].size()) + " of a group, expected 6");
  }
  const hip::Device current(device);
  for (size_t i = 0; i < plans.size(); ++i) {
    const std::vector<uintptr_t>& at = addresses[i];
    plans[i]->run(pointer<void>(stream), operands(at[0], at[1], at[2], at[3], at[4], at[5], 0, workspace, 1.0f));
  }
  hip::launched(pointer<void>(stream), "grouped_gemm");
}

py::list candidates(const Plan& plan, int count) {
  const hip::Device current(plan.problem().device);
  py::list found;
  for (const Candidate& candidate : plan.candidates(count))
    found.append(py::make_tuple(bytes_of_algorithm(candidate.algorithm), candidate.workspace, describe(candidate.algorithm)));
  return found;
}

py::tuple statistics() {
  const PlanCache::Statistics s = cache().statistics();
  return py::make_tuple(s.hits, s.misses, s.size, s.capacity, s.evictions);
}

}  // namespace

void bind(py::module_& m) {
  py::register_exception<lt::Refused>(m, "GemmRefused", PyExc_RuntimeError);
  py::class_<Plan, std::shared_ptr<Plan>>(m, "GemmPlan")
      .def_property_readonly("workspace", &Plan::workspace)
      .def_property_readonly("algorithm", [](const Plan& plan) { return bytes_of_algorithm(plan.taken().algorithm); })
      .def_property_readonly("description", [](const Plan& plan) { return describe(plan.taken().algorithm); });
  m.def("open_hipblaslt", [](const std::string& path) { lt::open(path.c_str()); });
  m.def("gemm_plan", &known_plan, "The plan of a problem, kept for the next call.");
  m.def("new_gemm_plan", [](const py::tuple& fields, const py::object& algorithm) {
    return make_plan(unpacked(fields), algorithm);
  });
  m.def("gemm_run", &run);
  m.def("gemm_run_grouped", &run_grouped);
  m.def("gemm_candidates", &candidates);
  m.def("gemm_take", [](Plan& plan, const std::string& algorithm, int64_t workspace) {
    plan.take({algorithm_of(algorithm), workspace});
  });
  m.def("gemm_statistics", &statistics, "Of the cache of plans: hits, misses, size, capacity, evictions.");
  m.def("forget_gemm_plans", [] { cache().clear(); });
}

}  // namespace ted_rocm::gemm
