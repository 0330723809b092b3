// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "gemm/plan.h"

#include <algorithm>
#include <cstring>

namespace ted_rocm::gemm {

namespace {

// Algorithms among which a chosen one is looked for.
constexpr int kListed = 32;
// An address for descriptors whose real one comes with each call: the library looks at whether there is one.
const void* const kStandIn = reinterpret_cast<const void*>(uintptr_t{256});

lt::DataType data_type(const char* name, int type) {
  switch (type) {
    case kFloat32: return lt::kR32F;
    case kBFloat16: return lt::kR16BF;
    case kFloat16: return lt::kR16F;
    case kCodes + kE4M3: return lt::kR8E4M3;
    case kCodes + kE5M2: return lt::kR8E5M2;
    case kCodes + kE4M3Fnuz: return lt::kR8E4M3Fnuz;
    case kCodes + kE5M2Fnuz: return lt::kR8E5M2Fnuz;
  }
  throw std::invalid_argument(std::string(name) + ": got type code " + std::to_string(type) + ", which hipBLASLt does not have");
}

bool fnuz(int type) { return type >= kCodes + kE4M3Fnuz; }

// The library's A is our b, and what it sums over its A and its B likewise.
lt::EpilogueKind epilogue_kind(const Problem& p) {
  const bool biased = p.bias_type != kNone;
  switch (p.epilogue) {
    case kNoEpilogue: return biased ? lt::kEpilogueBias : lt::kEpilogueDefault;
    case kGelu: return biased ? lt::kEpilogueGeluAuxBias : lt::kEpilogueGeluAux;
    case kDGelu: return lt::kEpilogueDGeluBgrad;
    case kBgradA: return lt::kEpilogueBgradB;
    case kBgradB: return lt::kEpilogueBgradA;
  }
  throw std::invalid_argument("epilogue: got code " + std::to_string(p.epilogue) + ", which is none");
}

void require_codes(const Problem& p) {
  const bool codes = p.a_type >= kCodes;
  if (codes != (p.b_type >= kCodes)) throw std::invalid_argument("b: got another kind of operand than a");
  if (codes && fnuz(p.a_type) != fnuz(p.b_type))
    throw std::invalid_argument("b: got the other flavour of FP8 than a, OCP or FNUZ");
  if (p.scaling < kUnscaled || p.scaling > kMxfp8 || codes == (p.scaling == kUnscaled))
    throw std::invalid_argument("scaling: got code " + std::to_string(p.scaling) + ", which does not go with the operands");
  if (p.out_type >= kCodes) throw std::invalid_argument("out: got a type of 8 bits, which this backend does not write");
}

}  // namespace

std::string Problem::packed() const {
  const int64_t fields[] = {device, m, n, k, a_turned, b_turned, lda, ldb, a_type, b_type, scaling, out_type,
                            accumulate, bias_type, epilogue, aux_type, tf32, workspace_limit};
  return {reinterpret_cast<const char*>(fields), sizeof(fields)};
}

// An older release may lack an attribute, which is no failure of the call's.
template <class T>
void Plan::set(int32_t attribute, const T& value) const {
  const lt::Status status = lt::api().desc_set(desc_.get(), attribute, &value, sizeof(value));
  if (status != lt::kSuccess)
    throw lt::Refused("hipBLASLt does not take attribute " + std::to_string(attribute) + " of this product: " +
                      lt::status_name(status));
}

void Plan::point(int32_t attribute, const void*& known, const void* address) const {
  if (known == address) return;
  lt::check(lt::api().desc_set(desc_.get(), attribute, &address, sizeof(address)), "an address of a product");
  known = address;
}

Plan::Owned Plan::layout(int32_t type, int64_t rows, int64_t columns, int64_t stride) {
  lt::MatrixLayout made = nullptr;
  // Row-major (rows, columns) is column-major (columns, rows).
  lt::check(lt::api().layout_create(&made, type, static_cast<uint64_t>(columns), static_cast<uint64_t>(rows), stride),
            "a matrix's layout");
  return {made, lt::api().layout_destroy};
}

Plan::Plan(const Problem& problem, const lt::Algorithm* chosen)
    : problem_(problem),
      handle_(nullptr),
      desc_(nullptr, nullptr),
      a_(nullptr, nullptr),
      b_(nullptr, nullptr),
      d_(nullptr, nullptr) {
  const Problem& p = problem_;
  require_positive("m", p.m);
  require_positive("n", p.n);
  require_positive("k", p.k);
  require_codes(p);
  epilogue_kind(p);
  const int32_t a_type = data_type("a", p.a_type), b_type = data_type("b", p.b_type), out_type = data_type("out", p.out_type);
  handle_ = lt::handle_of(p.device);
  a_ = layout(b_type, p.b_turned ? p.n : p.k, p.b_turned ? p.k : p.n, p.ldb);
  b_ = layout(a_type, p.a_turned ? p.k : p.m, p.a_turned ? p.m : p.k, p.lda);
  d_ = layout(out_type, p.m, p.n, p.n);
  // Where there is no TF32, fp32 is what the caller asked for, too.
  for (bool tf32 : {true, false}) {
    if (tf32 && !p.tf32) continue;
    describe(tf32);
    if (choose(chosen)) return;
  }
  throw lt::Refused("hipBLASLt has no algorithm for this product: " + refusal_);
}

void Plan::describe(bool tf32) {
  const Problem& p = problem_;
  lt::MatmulDesc made = nullptr;
  lt::check(lt::api().desc_create(&made, tf32 ? lt::kCompute32FFastTF32 : lt::kCompute32F, lt::kR32F), "a product");
  desc_ = {made, lt::api().desc_destroy};
  a_scale_ = b_scale_ = bias_ = aux_ = nullptr;
  set(lt::kTransA, static_cast<int32_t>(p.b_turned ? lt::kOpT : lt::kOpN));
  set(lt::kTransB, static_cast<int32_t>(p.a_turned ? lt::kOpT : lt::kOpN));
  set(lt::kEpilogue, static_cast<uint32_t>(epilogue_kind(p)));
  if (p.scaling != kUnscaled) {
    if (p.scaling == kMxfp8) {
      set(lt::kAScaleMode, static_cast<int32_t>(lt::kVec32UE8M0));
      set(lt::kBScaleMode, static_cast<int32_t>(lt::kVec32UE8M0));
    }
    set(lt::kAScalePointer, kStandIn);
    set(lt::kBScalePointer, kStandIn);
  }
  if (p.bias_type != kNone) {
    set(lt::kBiasDataType, static_cast<int32_t>(data_type("bias", p.bias_type)));
    set(lt::kBiasPointer, kStandIn);
  }
  if (p.epilogue == kGelu || p.epilogue == kDGelu) {
    set(lt::kAuxPointer, kStandIn);
    set(lt::kAuxLd, p.n);
    // The default is out's type; releases before 1.0 do not know the attribute.
    if (p.aux_type != p.out_type) set(lt::kAuxDataType, static_cast<int32_t>(data_type("aux", p.aux_type)));
  }
}

std::vector<Candidate> Plan::candidates(int count) const {
  const lt::Api& api = lt::api();
  lt::Preference made = nullptr;
  lt::check(api.preference_create(&made), "a preference");
  const Owned preference(made, api.preference_destroy);
  const uint64_t limit = static_cast<uint64_t>(problem_.workspace_limit);
  lt::check(api.preference_set(preference.get(), lt::kMaxWorkspaceBytes, &limit, sizeof(limit)), "a preference");
  std::vector<lt::HeuristicResult> results(static_cast<size_t>(count));
  int found = 0;
  const lt::Status status = api.heuristic(handle_, desc_.get(), a_.get(), b_.get(), d_.get(), d_.get(), preference.get(),
                                          count, results.data(), &found);
  std::vector<Candidate> good;
  for (int i = 0; status == lt::kSuccess && i < std::min(found, count); ++i)
    if (results[i].state == lt::kSuccess && results[i].workspace <= limit)
      good.push_back({results[i].algorithm, static_cast<int64_t>(results[i].workspace)});
  if (good.empty()) refusal_ = lt::status_name(status == lt::kSuccess ? lt::kNotSupported : status);
  return good;
}

bool Plan::choose(const lt::Algorithm* wanted) {
  const std::vector<Candidate> found = candidates(wanted == nullptr ? 1 : kListed);
  if (found.empty()) return false;
  chosen_ = found[0];
  for (const Candidate& candidate : found)
    if (wanted != nullptr && same(candidate.algorithm, *wanted)) chosen_ = candidate;
  return true;
}

void Plan::require_addresses(const Operands& o) const {
  const Problem& p = problem_;
  require_pointer("a", o.a);
  require_pointer("b", o.b);
  require_pointer("out", o.out);
  if (p.scaling != kUnscaled) {
    require_pointer("a's scale", o.a_scale);
    require_pointer("b's scale", o.b_scale);
  }
  if (p.bias_type != kNone) require_pointer("bias", o.bias);
  if (p.epilogue == kGelu || p.epilogue == kDGelu) require_pointer("aux", o.aux);
  if (chosen_.workspace > 0) require_pointer("workspace", o.workspace);
}

void Plan::run(hip::Stream stream, const Operands& o) {
  const Problem& p = problem_;
  require_addresses(o);
  std::lock_guard<std::mutex> lock(mutex_);
  if (p.scaling != kUnscaled) {
    point(lt::kAScalePointer, b_scale_, o.b_scale);
    point(lt::kBScalePointer, a_scale_, o.a_scale);
  }
  if (p.bias_type != kNone) point(lt::kBiasPointer, bias_, o.bias);
  if (p.epilogue == kGelu || p.epilogue == kDGelu) point(lt::kAuxPointer, aux_, o.aux);
  const float beta = p.accumulate ? 1.0f : 0.0f;
  lt::check(lt::api().matmul(handle_, desc_.get(), &o.alpha, o.b, a_.get(), o.a, b_.get(), &beta, o.out, d_.get(), o.out,
                             d_.get(), &chosen_.algorithm, o.workspace, static_cast<size_t>(chosen_.workspace), stream),
            "hipblasLtMatmul");
}

bool same(const lt::Algorithm& first, const lt::Algorithm& second) {
  return std::memcmp(first.data, second.data, sizeof(first.data)) == 0;
}

std::string describe(const lt::Algorithm& algorithm) {
  int32_t index = 0;
  std::memcpy(&index, algorithm.data, sizeof(index));
  return "solution " + std::to_string(index);
}

}  // namespace ted_rocm::gemm
