// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The two calls that need a device: which algorithms serve a product, and the product.
//
// D = cast(d_scale * activation(alpha' * op(A) op(B) + beta * C + bias)), where alpha' = alpha * a_scale * b_scale in
// fp32, which is an assumption: AMD documents no order. Sums are rounded to fp32 once, and all that follows is fp32. Algorithms differ in
// nothing but the workspace that they ask for.
#include "numbers.h"
#include "problem.h"
#include "product.h"
#include "settings.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <vector>

#ifndef HOST_LIBRARY_AMD_HEADERS
extern "C" {
hipError_t hipGetDevice(int*);
hipError_t hipStreamSynchronize(hipStream_t);
}
#endif

namespace host {

namespace {

// How an algorithm fills hipblasLtMatmulAlgo_t::data.
struct Choice {
  int32_t index;
  uint32_t features;
  uint64_t workspace;
};
static_assert(sizeof(Choice) == sizeof(hipblasLtMatmulAlgo_t::data), "a choice fills the algorithm's data");

// Algorithm i of a product wants this many bytes.
constexpr int kAlgorithms = 3;
constexpr int32_t kFirstIndex = 4711;
uint64_t workspace_of(int i, const Problem& p) { return i == 0 ? 0 : static_cast<uint64_t>(p.m * p.n * 4 * i); }

float gelu(float x) {
  const double v = x, inner = 0.7978845608028654 * (v + 0.044715 * v * v * v);
  return static_cast<float>(0.5 * v * (1 + std::tanh(inner)));
}

float gelu_slope(float x) {
  const double v = x, t = std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v));
  const double inner_slope = 0.7978845608028654 * (1 + 3 * 0.044715 * v * v);
  return static_cast<float>(0.5 * (1 + t) + 0.5 * v * (1 - t * t) * inner_slope);
}

// Batch `at` of A, or of B if `second`, as (outer, k).
Operand operand(const Problem& p, const void* data, bool second, int64_t at, bool tf32) {
  const Layout& x = second ? *p.b : *p.a;
  const bool turned = second ? p.b_turned : p.a_turned;
  // Columns first: A (outer, k) has k as its columns unless it is turned; B (k, outer) has k as its rows unless it is.
  const bool k_is_first = turned != second;
  const auto type = static_cast<hipDataType>(x.type);
  Operand made{type, static_cast<const char*>(data) + at * x.batch_stride * static_cast<int64_t>(size_of(type)), k_is_first ? x.ld : 1,
               k_is_first ? 1 : x.ld};
  made.tf32 = tf32;
  if (p.desc->a_scale_kind == ScaleKind::kBlock32) {
    // Scales lie as the elements do, with k divided by 32 and nothing between.
    made.block_scales = static_cast<const uint8_t*>(second ? p.desc->b_scale : p.desc->a_scale);
    made.block_outer_stride = k_is_first ? p.k / 32 : 1;
    made.block_k_stride = k_is_first ? 1 : second ? p.n : p.m;
  }
  return made;
}

float scalar(ScaleKind kind, const void* scale) { return kind == ScaleKind::kScalar && scale ? *static_cast<const float*>(scale) : 1.0f; }
float entry(ScaleKind kind, const void* scale, int64_t i) { return kind == ScaleKind::kVector && scale ? static_cast<const float*>(scale)[i] : 1.0f; }
float scale_or_one(const void* scale) { return scale ? *static_cast<const float*>(scale) : 1.0f; }

void run_batch(const Problem& p, bool tf32, int64_t at, float alpha, float beta, const void* a, const void* b, const void* c, void* d, float* amax) {
  const Desc& desc = *p.desc;
  std::vector<double> sums(static_cast<size_t>(p.m * p.n));
  const Operand left = operand(p, a, false, at, tf32), right = operand(p, b, true, at, tf32);
  if (alpha != 0) multiply(p.m, p.n, p.k, left, right, sums.data());
  const float factor = alpha * scalar(desc.a_scale_kind, desc.a_scale) * scalar(desc.b_scale_kind, desc.b_scale);
  const float c_factor = beta * scale_or_one(desc.c_scale), d_scale = scale_or_one(desc.d_scale), aux_scale = scale_or_one(desc.aux_scale);
  const bool adds_bias = has_bias(desc.epilogue) && desc.bias;
  const int64_t aux_at = at * (desc.aux_batch_stride > 0 ? desc.aux_batch_stride : p.aux_ld * p.n);
  std::vector<double> gradient(desc.epilogue == HIPBLASLT_EPILOGUE_DGELU_BGRAD ? static_cast<size_t>(p.m) : 0);
  for (int64_t j = 0; j < p.n; ++j) {
    const float column = entry(desc.b_scale_kind, desc.b_scale, j);
    for (int64_t i = 0; i < p.m; ++i) {
      float x = static_cast<float>(sums[static_cast<size_t>(i + j * p.m)]) * factor;
      x *= entry(desc.a_scale_kind, desc.a_scale, i) * column;
      if (beta != 0) x += c_factor * static_cast<float>(load_element(p.c_type, c, at * p.c->batch_stride + i + j * p.c->ld));
      if (adds_bias) x += static_cast<float>(load_element(p.bias_type, desc.bias, i));
      if (writes_aux(desc.epilogue)) store_element(p.aux_type, desc.aux, aux_at + i + j * p.aux_ld, x * aux_scale);
      if (has_gelu(desc.epilogue)) x = gelu(x);
      if (has_relu(desc.epilogue)) x = x < 0 ? 0.0f : x;
      if (is_gelu_backward(desc.epilogue)) x *= gelu_slope(static_cast<float>(load_element(p.aux_type, desc.aux, aux_at + i + j * p.aux_ld)));
      if (!gradient.empty()) gradient[static_cast<size_t>(i)] += x;
      *amax = std::fmax(*amax, std::fabs(x));  // ignores NaN
      store_element(p.d_type, d, at * p.d->batch_stride + i + j * p.d->ld, x * d_scale);
    }
  }
  if (desc.epilogue == HIPBLASLT_EPILOGUE_BGRADA || desc.epilogue == HIPBLASLT_EPILOGUE_BGRADB) {
    const bool second = desc.epilogue == HIPBLASLT_EPILOGUE_BGRADB;
    gradient.resize(static_cast<size_t>(second ? p.n : p.m));
    sum_rows(static_cast<int64_t>(gradient.size()), p.k, second ? right : left, gradient.data());
  }
  for (size_t i = 0; desc.bias && i < gradient.size(); ++i)
    store_element(p.bias_type, desc.bias, static_cast<int64_t>(i), static_cast<float>(gradient[i]));
}

void log_line(const std::string& line) {
  const std::string path = setting("HOST_HIPBLASLT_LOG", "");
  if (path.empty()) return;
  std::ofstream(path, std::ios::app) << line << "\n";
}

std::string described(const Handle& handle, const Problem& p, float alpha, float beta, const Choice& choice) {
  const Desc& d = *p.desc;
  std::ostringstream text;
  text << "device=" << handle.device << " arch=" << handle.arch << " a=" << p.a_type << " b=" << p.b_type << " d=" << p.d_type
       << " transa=" << p.a_turned << " transb=" << p.b_turned << " m=" << p.m << " n=" << p.n << " k=" << p.k << " alpha=" << alpha
       << " beta=" << beta << " compute=" << d.compute << " epilogue=" << d.epilogue << " bias=" << p.bias_type
       << " a_scale=" << static_cast<int>(d.a_scale_kind) << " b_scale=" << static_cast<int>(d.b_scale_kind) << " d_scale=" << (d.d_scale != nullptr)
       << " amax=" << (d.amax_d != nullptr) << " algorithm=" << choice.index << " workspace=" << choice.workspace;
  return text.str();
}

hipblasStatus_t refuse(hipblasStatus_t status, const std::string& why) {
  std::fprintf(stderr, "host hipBLASLt: %s\n", why.c_str());
  return status;
}

}  // namespace

}  // namespace host

using namespace host;

HOST_EXPORT hipblasStatus_t hipblasLtMatmulAlgoGetHeuristic(hipblasLtHandle_t handle, hipblasLtMatmulDesc_t desc, hipblasLtMatrixLayout_t a,
                                                            hipblasLtMatrixLayout_t b, hipblasLtMatrixLayout_t c, hipblasLtMatrixLayout_t d,
                                                            hipblasLtMatmulPreference_t preference, int requested,
                                                            hipblasLtMatmulHeuristicResult_t results[], int* found) {
  if (!handle || !desc || !a || !b || !c || !d || !preference) return HIPBLAS_STATUS_NOT_INITIALIZED;
  if (requested < 1 || !results || !found) return HIPBLAS_STATUS_INVALID_VALUE;
  *found = 0;
  Problem p;
  const hipblasStatus_t status = read_problem(of(desc), of(a), of(b), of(c), of(d), &p);
  if (status != HIPBLAS_STATUS_SUCCESS) return status;
  const std::string why = refusal(handle_of(handle)->arch, p);
  if (!why.empty()) {
    log_line("no algorithm: " + why);
    return HIPBLAS_STATUS_SUCCESS;
  }
  const uint64_t limit = of(preference)->max_workspace;
  for (int i = 0; i < kAlgorithms && *found < requested; ++i) {
    const uint64_t bytes = workspace_of(i, p);
    if (bytes > limit) continue;
    const Choice choice{kFirstIndex + i, features(p), bytes};
    hipblasLtMatmulHeuristicResult_t& result = results[(*found)++];
    result = {};
    std::memcpy(result.algo.data, &choice, sizeof(choice));
    result.algo.max_workspace_bytes = limit;
    result.workspaceSize = bytes;
    result.state = HIPBLAS_STATUS_SUCCESS;
    result.wavesCount = 1.0f;
  }
  return HIPBLAS_STATUS_SUCCESS;
}

HOST_EXPORT hipblasStatus_t hipblasLtMatmul(hipblasLtHandle_t handle, hipblasLtMatmulDesc_t desc, const void* alpha, const void* a_data,
                                            hipblasLtMatrixLayout_t a, const void* b_data, hipblasLtMatrixLayout_t b, const void* beta,
                                            const void* c_data, hipblasLtMatrixLayout_t c, void* d_data, hipblasLtMatrixLayout_t d,
                                            const hipblasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes, hipStream_t stream) {
  if (!handle || !desc || !a || !b || !c || !d) return HIPBLAS_STATUS_NOT_INITIALIZED;
  Problem p;
  const hipblasStatus_t status = read_problem(of(desc), of(a), of(b), of(c), of(d), &p);
  if (status != HIPBLAS_STATUS_SUCCESS) return status;
  if (p.m == 0 || p.n == 0) return HIPBLAS_STATUS_SUCCESS;
  const std::string why = refusal(handle_of(handle)->arch, p);
  if (!why.empty()) return refuse(HIPBLAS_STATUS_INTERNAL_ERROR, "no algorithm: " + why);
  if (!alpha || !beta || !c_data || !d_data || (p.k && (!a_data || !b_data))) return refuse(HIPBLAS_STATUS_INVALID_VALUE, "a null pointer");
  Choice choice{kFirstIndex, features(p), 0};
  if (algorithm) {
    std::memcpy(&choice, algorithm->data, sizeof(choice));
    // AMD's library runs the kernel that the algorithm names, whatever the product now asks for.
    if (choice.index < kFirstIndex || choice.index >= kFirstIndex + kAlgorithms || choice.features != features(p))
      return refuse(HIPBLAS_STATUS_INVALID_VALUE, "an algorithm that was chosen for another kind of product");
  }
  if (choice.workspace > workspace_bytes || (choice.workspace && !workspace))
    return refuse(HIPBLAS_STATUS_INVALID_VALUE, "less workspace than the algorithm wants");
  int device = -1;
  if (hipGetDevice(&device) != hipSuccess || device != handle_of(handle)->device)
    return refuse(HIPBLAS_STATUS_EXECUTION_FAILED, "the handle belongs to another device than the current one");
  if (hipStreamSynchronize(stream) != hipSuccess || setting("HOST_HIPBLASLT_FAIL", "") == "1") return HIPBLAS_STATUS_EXECUTION_FAILED;
  const float factor = *static_cast<const float*>(alpha), added = *static_cast<const float*>(beta);
  if (added != 0 && eight_of(p.d_type)) return refuse(HIPBLAS_STATUS_NOT_SUPPORTED, "adding to a matrix in FP8");
  log_line(described(*handle_of(handle), p, factor, added, choice));
  if (choice.workspace) std::memset(workspace, 0xa5, choice.workspace);  // kernels write it; what else lies there shows
  float amax = 0;
  // Matrix units for TF32 are in gfx94 alone; on other chips AMD's library computes in fp32, or as exactly.
  const bool tf32 = p.desc->compute == HIPBLAS_COMPUTE_32F_FAST_TF32 && handle_of(handle)->arch.rfind("gfx94", 0) == 0;
  for (int64_t at = 0; at < p.a->batch_count; ++at) run_batch(p, tf32, at, factor, added, a_data, b_data, c_data, d_data, &amax);
  if (p.desc->amax_d) *static_cast<float*>(p.desc->amax_d) = amax;
  return HIPBLAS_STATUS_SUCCESS;
}
