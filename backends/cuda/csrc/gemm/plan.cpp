// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// How a gemm is cut into steps. Running them: run.cpp.
#include "gemm/plan.h"

#include "common/dtypes.h"

namespace ted::gemm {

namespace {

// Bytes of an operand up to which the library sums it: a launch less, but at half of the memory's speed.
constexpr int64_t kLibrarySums = int64_t{4} << 20;

int64_t round_up(int64_t x, int64_t multiple) { return ceil_div(x, multiple) * multiple; }

lt::DataType data_type(int type) {
  switch (type) {
    case kFloat32: return lt::kR32F;
    case kBFloat16: return lt::kR16BF;
    case kFloat16: return lt::kR16F;
    case kCodes + kE4M3: return lt::kR8E4M3;
    case kCodes + kE5M2: return lt::kR8E5M2;
    case kCodes + kE2M1: return lt::kR4E2M1;
  }
  throw std::invalid_argument("type: got code " + std::to_string(type) + ", which cuBLASLt does not multiply");
}

bool blocks(int scaling) { return scaling == kBlock1d || scaling == kBlock2d; }

// A cast that the library does as te_dispatch does: saturating, OCP, not clamped at the common maximum.
bool plain_cast(int cast) { return cast == kE4M3 || cast == kE5M2; }

}  // namespace

Plan::Plan(const Problem& problem, const lt::Algorithm* chosen) : problem_(problem) {
  require_size("m", problem.m);
  require_size("n", problem.n);
  require_size("k", problem.k);
  require_count("a", problem.m, problem.k);
  require_count("b", problem.n, problem.k);
  require_count("out", problem.m, problem.n);
  const bool product = problem.m > 0 && problem.n > 0 && problem.k > 0;
  bool planned = !product;
  if (!product) specify(true, false);
  for (bool staged : {false, true})
    for (bool copied : {false, true}) planned = planned || attempt(staged, copied, chosen);
  if (!planned) throw lt::Refused("cuBLASLt has no algorithm for this product: " + refusal_);
  if (!product) staged_ = true;  // sums of nothing, finished
  const bool sums = problem.epilogue == kBgradA || problem.epilogue == kBgradB;
  if (sums && !fused_sums_ && problem.a.scaling > kBlock2d)
    throw lt::Refused("sums of mxfp8 and nvfp4 operands are not written");
  reserve_workspace();
}

// What the library does as the contract has it. Its GELU is an approximation (2^-11), so that is ours. Its Hopper
// kernels round a product to a 16-bit output's dtype before they add the old output, the contract after. And scales of
// whole fp4 operands lie on the device, where its alpha does not.
bool Plan::fusible() const {
  const Problem& p = problem_;
  if (p.epilogue == kGelu || p.epilogue == kDGelu || p.a.scaling == kNvfp4) return false;
  if (p.accumulate && p.out_type != kFloat32) return false;
  return p.out_cast == kNone || (plain_cast(p.out_cast) && p.a.scaling == kTensor && !p.accumulate);
}

void Plan::fuse(ProductSpec& spec) const {
  const Problem& p = problem_;
  if (p.bias_type != kNone) {
    spec.epilogue = lt::kEpilogueBias;
    spec.bias_type = data_type(p.bias_type);
    spec.bias_alignment = p.bias_alignment;
  }
  if (p.out_cast == kNone) return;
  spec.d_type = data_type(kCodes + p.out_cast);
  spec.c_type = (p.bias_type == kNone ? p.out_type : p.bias_type) == kFloat16 ? lt::kR16F : lt::kR16BF;
  spec.d_cast = true;
}

// A copy where codes do not lie in multiples of 16, or, of other types, where the library has nothing for them as
// they are. Rows of a copy are multiples of 16 bytes.
Plan::Copy Plan::copy_of(const OperandKind& operand, int64_t rows, int64_t columns, int64_t target_rows,
                         int64_t target_columns) const {
  Copy copy;
  const int64_t element = bytes_of(operand.type), per_byte = operand.type == kCodes + kE2M1 ? 2 : 1;
  copy.rows = rows;
  copy.row_bytes = ceil_div(columns * element, per_byte);
  copy.source_stride = ceil_div(operand.stride * element, per_byte);
  copy.target_rows = target_rows;
  copy.stride = round_up(ceil_div(target_columns * element, per_byte), 16);
  copy.needed = operand.alignment < 16 || target_rows != rows || copy.stride != copy.row_bytes || copy.source_stride % 16 != 0;
  return copy;
}

// tiles: scales of 128x128 tiles stay such; else every row gets its tile's.
Plan::Scales Plan::scales_of(const OperandKind& operand, int64_t rows, int64_t target_rows, bool tiles) const {
  Scales scales;
  const int64_t columns = ceil_div(problem_.k, 128);
  const bool laid_out = (operand.scales & kLaidOut) != 0;
  if (operand.scaling == kMxfp8 || operand.scaling == kNvfp4) {
    if (!laid_out) throw lt::Refused("scales must lie in swizzled_32x4x4, which operand_format asks for");
    scales.mode = operand.scaling == kMxfp8 ? lt::kVec32UE8M0 : lt::kVec16UE4M3;
    return scales;
  }
  if (!blocks(operand.scaling)) return scales;
  ScaleJob& job = scales.job;
  const bool two_d = operand.scaling == kBlock2d;
  job.columns = job.target_columns = columns;
  job.spread = two_d && !tiles ? 128 : 1;
  job.rows = two_d && tiles ? ceil_div(rows, 128) : rows;
  if (two_d) {
    job.source_row_stride = laid_out ? round_up(columns, 4) : columns;
    job.source_column_stride = 1;
  } else {
    job.source_row_stride = laid_out ? 1 : columns;
    job.source_column_stride = laid_out ? round_up(rows, 4) : 1;
  }
  if (two_d && tiles) {
    scales.mode = lt::kBlock128x128;
    job.target_rows = job.rows;
    job.target_columns = job.row_stride = round_up(columns, 4);
    job.column_stride = 1;
    scales.needed = job.source_row_stride != job.row_stride;
  } else {
    scales.mode = lt::kVec128;
    job.target_rows = job.column_stride = round_up(target_rows, 4);
    job.row_stride = 1;
    scales.needed = two_d || job.source_row_stride != 1 || job.source_column_stride != job.column_stride;
  }
  scales.needed = scales.needed || (operand.scales & kUnaligned) != 0;
  return scales;
}

ProductSpec Plan::specify(bool staged, bool copied) {
  const Problem& p = problem_;
  const bool codes = is_codes(p.a.type), by_blocks = blocks(p.a.scaling) || blocks(p.b.scaling);
  m_ = copied && by_blocks ? round_up(p.m, 16) : p.m;
  n_ = copied && codes && staged ? round_up(p.n, 16) : p.n;
  k_ = copied && codes ? round_up(p.k, 16) : p.k;
  const bool a_turned = p.layout == kTN, b_turned = p.layout == kNT;
  a_copy_ = b_copy_ = Copy();
  if (copied) {
    a_copy_ = a_turned ? copy_of(p.a, p.k, p.m, k_, m_) : copy_of(p.a, p.m, p.k, m_, k_);
    b_copy_ = b_turned ? copy_of(p.b, p.n, p.k, n_, k_) : copy_of(p.b, p.k, p.n, k_, n_);
  }
  // The library takes tiles for one operand only.
  a_scales_ = scales_of(p.a, p.m, m_, p.b.scaling != kBlock2d);
  b_scales_ = scales_of(p.b, p.n, n_, true);
  const auto stride = [](const Copy& copy, const OperandKind& operand) {
    return copy.needed ? copy.stride / bytes_of(operand.type) * (operand.type == kCodes + kE2M1 ? 2 : 1) : operand.stride;
  };
  ProductSpec spec{};
  spec.device = p.device;
  spec.m = m_;
  spec.n = n_;
  spec.k = k_;
  spec.a_turned = a_turned;
  spec.b_turned = b_turned;
  spec.lda = stride(a_copy_, p.a);
  spec.ldb = stride(b_copy_, p.b);
  spec.ldd = n_;
  spec.a_type = data_type(p.a.type);
  spec.b_type = data_type(p.b.type);
  spec.d_type = spec.c_type = staged ? lt::kR32F : data_type(p.out_type);
  spec.a_alignment = a_copy_.needed ? 256 : p.a.alignment;
  spec.b_alignment = b_copy_.needed ? 256 : p.b.alignment;
  in_place_ = staged && p.out_type == kFloat32 && p.out_cast == kNone && !p.accumulate && m_ == p.m && n_ == p.n &&
              p.out_alignment >= 16;
  spec.d_alignment = staged && !in_place_ ? 256 : p.out_alignment;
  spec.scaled = codes;
  spec.a_scale_mode = a_scales_.mode;
  spec.b_scale_mode = b_scales_.mode;
  spec.accumulate = !staged && p.accumulate;
  spec.tf32 = p.tf32;
  spec.fast = p.fast && !by_blocks;
  if (!staged) fuse(spec);
  return spec;
}

bool Plan::attempt(bool staged, bool copied, const lt::Algorithm* chosen) {
  const Problem& p = problem_;
  if (!staged && !fusible()) return false;
  const bool by_blocks = blocks(p.a.scaling) || blocks(p.b.scaling);
  if (is_codes(p.a.type)) {
    // The units read codes in multiples of 16 bytes, and write rows in such multiples.
    const bool whole = p.k % 16 == 0 && p.a.alignment >= 16 && p.b.alignment >= 16 && p.a.stride % 16 == 0 && p.b.stride % 16 == 0;
    const bool rows_whole = p.n % 16 == 0 && !(by_blocks && p.m % 16 != 0);
    if (!copied && !(whole && rows_whole)) return false;
    if (!staged && (!rows_whole || p.out_alignment < 16)) return false;
  }
  const ProductSpec spec = specify(staged, copied);
  if (copied && !a_copy_.needed && !b_copy_.needed) return false;
  const int64_t summed = (p.epilogue == kBgradA ? p.m : p.n) * p.k * bytes_of(p.a.type);
  const bool sums = !staged && (p.epilogue == kBgradA || p.epilogue == kBgradB) && p.bias_type == kNone &&
                    !is_codes(p.a.type) && summed <= kLibrarySums;
  for (bool with_sums : {true, false}) {
    if (with_sums && !sums) continue;
    ProductSpec tried = spec;
    if (with_sums) {
      // The library's A is our b.
      tried.epilogue = p.epilogue == kBgradB ? lt::kEpilogueBgradA : lt::kEpilogueBgradB;
      tried.bias_type = data_type(p.out_type);
    }
    auto product = std::make_unique<Product>(tried);
    if (chosen == nullptr || !product->accept(*chosen)) {
      const std::vector<Candidate> found = product->candidates(1);
      if (found.empty()) {
        refusal_ = product->refusal();
        continue;
      }
      product->take(found[0]);
    }
    product_ = std::move(product);
    staged_ = staged;
    fused_sums_ = with_sums;
    return true;
  }
  return false;
}

void Plan::take(const Candidate& candidate) {
  if (product_ == nullptr) throw std::invalid_argument("algorithm: this plan multiplies nothing");
  product_->take(candidate);
  reserve_workspace();
}

void Plan::reserve_workspace() {
  const Problem& p = problem_;
  int64_t used = 0;
  const auto reserve = [&](int64_t bytes) {
    const int64_t offset = used;
    used += round_up(bytes, 256);
    return offset;
  };
  if (product_ != nullptr) reserve(product_->workspace());
  for (Copy* copy : {&a_copy_, &b_copy_})
    if (product_ != nullptr && copy->needed) copy->offset = reserve(copy->target_rows * copy->stride);
  for (Scales* scales : {&a_scales_, &b_scales_})
    if (product_ != nullptr && scales->needed) scales->offset = reserve(scales->job.target_rows * scales->job.target_columns * 4);
  if (product_ != nullptr && staged_ && !in_place_) z_ = reserve(require_count("z", m_, n_) * 4);
  const DeviceLimits& limits = limits_of(p.device);
  if (staged_ && p.epilogue == kDGelu) partials_ = reserve(row_chunks(limits, p.m, p.n) * p.n * 4);
  if (p.epilogue == kBgradA && p.layout == kTN && !fused_sums_) partials_ = reserve(sum_chunks(limits, p.a.type, p.k, p.m) * p.m * 4);
  if (p.epilogue == kBgradB && p.layout != kNT && !fused_sums_) partials_ = reserve(sum_chunks(limits, p.b.type, p.k, p.n) * p.n * 4);
  if (!staged_ && p.out_cast != kNone) measured_ = reserve(4);
  // The base is rounded up to a multiple of 256 bytes.
  workspace_ = used == 0 ? 0 : used + 256;
}

}  // namespace ted::gemm
