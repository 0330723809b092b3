// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "gemm/product.h"

#include "common/queue.h"

namespace ted::gemm {

namespace {

constexpr uint64_t kMiB = 1 << 20;

// What NVIDIA's manual recommends for a handle: 32 MiB from Hopper on.
uint64_t workspace_limit(int device) { return limits_of(device).major >= 9 ? 32 * kMiB : 8 * kMiB; }

template <class T>
void prefer(lt::Preference preference, int32_t attribute, const T& value) {
  lt::check(lt::api().preference_set(preference, attribute, &value, sizeof(value)), "a preference");
}

lt::MatmulDesc make_desc(bool tf32) {
  lt::MatmulDesc desc = nullptr;
  lt::check(lt::api().desc_create(&desc, tf32 ? lt::kCompute32FFastTF32 : lt::kCompute32F, lt::kR32F), "a product");
  return desc;
}

int32_t config(const lt::Algorithm& algorithm, int32_t attribute) {
  int32_t value = -1;
  size_t written = 0;
  return lt::api().algorithm_get(&algorithm, attribute, &value, sizeof(value), &written) == lt::kSuccess ? value : -1;
}

}  // namespace

template <class T>
void Product::set(int32_t attribute, const T& value) const {
  lt::check(lt::api().desc_set(desc_.get(), attribute, &value, sizeof(value)), "an attribute of a product");
}

void Product::point(int32_t attribute, const void*& known, const void* address) const {
  if (known == address) return;  // null, where nothing but a stand-in was set, is never asked for
  set(attribute, address);
  known = address;
}

Product::Owned Product::layout(int32_t type, int64_t rows, int64_t columns, int64_t stride) {
  lt::MatrixLayout made = nullptr;
  // Row-major (rows, columns) is column-major (columns, rows).
  lt::check(lt::api().layout_create(&made, type, static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), stride),
            "a matrix's layout");
  return {made, lt::api().layout_destroy};
}

Product::Product(const ProductSpec& spec)
    : spec_(spec),
      handle_(lt::handle_of(spec.device)),
      desc_(make_desc(spec.tf32), lt::api().desc_destroy),
      a_(layout(spec.b_type, spec.b_turned ? spec.n : spec.k, spec.b_turned ? spec.k : spec.n, spec.ldb)),
      b_(layout(spec.a_type, spec.a_turned ? spec.k : spec.m, spec.a_turned ? spec.m : spec.k, spec.lda)),
      c_(layout(spec.c_type, spec.m, spec.n, spec.ldd)),
      d_(layout(spec.d_type, spec.m, spec.n, spec.ldd)) {
  set(lt::kTransA, static_cast<int32_t>(spec.b_turned ? lt::kOpT : lt::kOpN));
  set(lt::kTransB, static_cast<int32_t>(spec.a_turned ? lt::kOpT : lt::kOpN));
  set(lt::kEpilogue, spec.epilogue);
  if (spec.fast) set(lt::kFastAccum, static_cast<int8_t>(1));
  // The library reads off the pointers' values how they are aligned, so stand-ins with that alignment do for now.
  const auto stand_in = [](int alignment) { return static_cast<uintptr_t>(alignment); };
  if (spec.scaled) {
    if (spec.b_scale_mode != lt::kScalar32F) set(lt::kAScaleMode, spec.b_scale_mode);
    if (spec.a_scale_mode != lt::kScalar32F) set(lt::kBScaleMode, spec.a_scale_mode);
    set(lt::kAScalePointer, stand_in(16));
    set(lt::kBScalePointer, stand_in(16));
  }
  if (spec.bias_type >= 0) {
    set(lt::kBiasDataType, spec.bias_type);
    set(lt::kBiasPointer, stand_in(spec.bias_alignment));
  }
  if (spec.d_cast) {
    set(lt::kDScalePointer, stand_in(16));
    set(lt::kAmaxDPointer, stand_in(16));
  }
}

std::vector<Candidate> Product::candidates(int count) const {
  const lt::Api& api = lt::api();
  lt::Preference preference = nullptr;
  lt::check(api.preference_create(&preference), "a preference");
  prefer(preference, lt::kMaxWorkspaceBytes, workspace_limit(spec_.device));
  // Nothing is rounded on the way to the output, so partial sums of a split sum stay in fp32; and where a bias is added
  // to a 16-bit output, sums are not split, because the step that joins them rounds before it adds.
  const bool added = spec_.accumulate || spec_.epilogue == lt::kEpilogueBias;
  const uint32_t reductions = spec_.d_type == lt::kR32F ? lt::kReduceComputeType | lt::kReduceInPlace
                              : added                   ? lt::kReduceNone
                                                        : lt::kReduceComputeType;
  prefer(preference, lt::kReductionSchemeMask, reductions);
  prefer(preference, lt::kMinAlignmentA, static_cast<uint32_t>(spec_.b_alignment));
  prefer(preference, lt::kMinAlignmentB, static_cast<uint32_t>(spec_.a_alignment));
  prefer(preference, lt::kMinAlignmentC, static_cast<uint32_t>(spec_.d_alignment));
  prefer(preference, lt::kMinAlignmentD, static_cast<uint32_t>(spec_.d_alignment));
  std::vector<lt::HeuristicResult> results(static_cast<size_t>(count));
  int found = 0;
  const lt::Status status = api.heuristic(handle_, desc_.get(), a_.get(), b_.get(), c_.get(), d_.get(), preference, count,
                                          results.data(), &found);
  api.preference_destroy(preference);
  std::vector<Candidate> good;
  for (int i = 0; status == lt::kSuccess && i < found; ++i)
    if (results[i].state == lt::kSuccess) good.push_back({results[i].algorithm, static_cast<int64_t>(results[i].workspace)});
  if (good.empty()) refusal_ = api.status_text(status == lt::kSuccess ? lt::kNotSupported : status);
  return good;
}

bool Product::accept(const lt::Algorithm& algorithm) {
  lt::HeuristicResult result{};
  const lt::Status status = lt::api().algorithm_check(handle_, desc_.get(), a_.get(), b_.get(), c_.get(), d_.get(), &algorithm, &result);
  if (status != lt::kSuccess || result.state != lt::kSuccess || result.workspace > workspace_limit(spec_.device)) return false;
  chosen_ = {algorithm, static_cast<int64_t>(result.workspace)};
  return true;
}

void Product::run(cudaStream_t stream, const ProductOperands& o) {
  const lt::Api& api = lt::api();
  std::lock_guard<std::mutex> lock(mutex_);
  if (spec_.scaled) {
    point(lt::kAScalePointer, b_scale_, o.b_scale);
    point(lt::kBScalePointer, a_scale_, o.a_scale);
  }
  if (spec_.bias_type >= 0) point(lt::kBiasPointer, bias_, o.bias);
  if (spec_.d_cast) {
    point(lt::kDScalePointer, d_scale_, o.d_scale);
    point(lt::kAmaxDPointer, d_amax_, o.d_amax);
  }
  const float beta = spec_.accumulate ? 1.0f : 0.0f;
  const void* c = spec_.d_cast ? nullptr : o.d;  // of another type than d: refused at one address, though it is not read
  lt::check(api.matmul(handle_, desc_.get(), &o.alpha, o.b, a_.get(), o.a, b_.get(), &beta, c, c_.get(), o.d, d_.get(),
                       &chosen_.algorithm, o.workspace, static_cast<size_t>(chosen_.workspace), stream),
            "cublasLtMatmul");
}

std::string describe(const lt::Algorithm& algorithm) {
  return "algorithm " + std::to_string(config(algorithm, lt::kConfigId)) + ", tile " +
         std::to_string(config(algorithm, lt::kConfigTile)) + ", stages " +
         std::to_string(config(algorithm, lt::kConfigStages)) + ", split " +
         std::to_string(config(algorithm, lt::kConfigSplitK)) + ", reduction " +
         std::to_string(config(algorithm, lt::kConfigReduction));
}

}  // namespace ted::gemm
