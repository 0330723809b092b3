// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Which products have an algorithm. The real library's answer is a table of kernels for each chip; this is that table in
// a few rules, taken from AMD's documentation of supported data types and from the kernels that AMD's sources list for
// gfx942 and gfx950 (library/src/amd_detail/rocblaslt/src/Tensile/Logic). Where sources do not tell, the rule is the
// stricter one, so that a backend that leans on the table has to handle its absence.
#include "numbers.h"
#include "problem.h"
#include "settings.h"

namespace host {

namespace {

bool starts(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

bool is_eight(hipDataType type) { return eight_of(type) != nullptr; }
bool is_fnuz(hipDataType type) { return is_eight(type) && eight_of(type)->fnuz; }
bool is_sixteen(hipDataType type) { return size_of(type) == 2; }

bool reads_fnuz(const std::string& arch) { return starts(arch, "gfx94"); }
bool reads_ocp(const std::string& arch) { return starts(arch, "gfx95") || starts(arch, "gfx12"); }
bool reads_eight(const std::string& arch, hipDataType type) { return is_fnuz(type) ? reads_fnuz(arch) : reads_ocp(arch); }

std::string types_refused(const std::string& arch, const Problem& p) {
  for (const hipDataType type : {p.a_type, p.b_type, p.c_type, p.d_type})
    if (size_of(type) == 0) return "an element type that no algorithm here takes";
  for (const hipDataType type : {p.a_type, p.b_type, p.d_type})
    if (is_eight(type) && !reads_eight(arch, type)) return "FP8 in an encoding that " + arch + " does not have";
  if (p.c_type != p.d_type) return "C of another type than D";
  if (is_eight(p.a_type) != is_eight(p.b_type)) return "FP8 times another type";
  if (is_eight(p.a_type)) return is_fnuz(p.a_type) != is_fnuz(p.b_type) ? "FNUZ times OCP" : "";
  if (p.a_type != p.b_type) return "operands of two types";
  if (is_eight(p.d_type)) return "D in FP8 from operands that are not";
  if (p.d_type != p.a_type && p.d_type != HIP_R_32F) return "D of another type than the operands and than fp32";
  return "";
}

std::string scales_refused(const std::string& arch, const Problem& p) {
  const Desc& d = *p.desc;
  const auto scaled = [](ScaleKind kind, const void* scale) { return scale != nullptr && kind != ScaleKind::kNone; };
  if ((scaled(d.a_scale_kind, d.a_scale) || scaled(d.b_scale_kind, d.b_scale)) && !is_eight(p.a_type)) return "scales of operands that are not FP8";
  const bool a_block = d.a_scale_kind == ScaleKind::kBlock32, b_block = d.b_scale_kind == ScaleKind::kBlock32;
  const bool a_vector = d.a_scale_kind == ScaleKind::kVector, b_vector = d.b_scale_kind == ScaleKind::kVector;
  if (a_block != b_block || a_vector != b_vector) return "scale modes that differ";
  if (a_block) {
    if (!starts(arch, "gfx95")) return "blocks of 32 with E8M0 scales on " + arch;
    if (!d.a_scale || !d.b_scale) return "blocks of 32 without scales";
    if (p.m % 32 || p.n % 32 || p.k % 32) return "blocks of 32 with sizes that are no multiples of 32";
    if (is_eight(p.d_type)) return "blocks of 32 with D in FP8";
  }
  const bool cast = d.d_scale || d.amax_d;
  if (cast && !is_eight(p.d_type)) return "a scale or a maximum of D that is not FP8";
  return "";
}

std::string epilogue_refused(const Problem& p) {
  const int32_t e = p.desc->epilogue;
  const bool known = e == HIPBLASLT_EPILOGUE_DEFAULT || has_bias(e) || has_gelu(e) || has_relu(e) || is_gelu_backward(e) || has_bias_gradient(e);
  if (!known) return "an epilogue that no algorithm here has";
  if (is_eight(p.a_type) && (writes_aux(e) || is_gelu_backward(e) || has_bias_gradient(e))) return "FP8 with an auxiliary matrix or a bias gradient";
  if ((has_bias(e) || has_bias_gradient(e)) && p.bias_type != p.d_type && p.bias_type != HIP_R_32F &&
      !(is_eight(p.a_type) && is_sixteen(p.bias_type)))
    return "a bias of another type than D and than fp32";
  if ((writes_aux(e) || is_gelu_backward(e)) && p.aux_type != p.d_type) return "an auxiliary matrix of another type than D";
  if ((e == HIPBLASLT_EPILOGUE_BGRADA || e == HIPBLASLT_EPILOGUE_BGRADB) && p.d_type == HIP_R_32F) return "BGRADA or BGRADB with D in fp32";
  if (has_bias_gradient(e) && p.a->batch_count > 1) return "a bias gradient of a batch";
  return "";
}

// The words of HOST_HIPBLASLT_REFUSE.
struct Feature {
  const char* word;
  bool (*present)(const Problem&);
};
const Feature kFeatures[] = {
    {"bias", [](const Problem& p) { return has_bias(p.desc->epilogue); }},
    {"bgrad", [](const Problem& p) { return has_bias_gradient(p.desc->epilogue); }},
    {"gelu", [](const Problem& p) { return has_gelu(p.desc->epilogue); }},
    {"gelu_aux", [](const Problem& p) { return writes_aux(p.desc->epilogue); }},
    {"dgelu", [](const Problem& p) { return is_gelu_backward(p.desc->epilogue); }},
    {"fp8", [](const Problem& p) { return is_eight(p.a_type); }},
    {"fp8_output", [](const Problem& p) { return is_eight(p.d_type); }},
    {"amax", [](const Problem& p) { return p.desc->amax_d != nullptr; }},
    {"mx", [](const Problem& p) { return p.desc->a_scale_kind == ScaleKind::kBlock32; }},
    {"tf32", [](const Problem& p) { return p.desc->compute == HIPBLAS_COMPUTE_32F_FAST_TF32; }},
    {"all", [](const Problem&) { return true; }},
};

}  // namespace

std::string refusal(const std::string& arch, const Problem& p) {
  const Desc& d = *p.desc;
  if (d.compute != HIPBLAS_COMPUTE_32F && d.compute != HIPBLAS_COMPUTE_32F_FAST_TF32) return "a compute type that is not fp32";
  if (d.scale_type != HIP_R_32F) return "factors of another type than fp32";
  if (d.compute == HIPBLAS_COMPUTE_32F_FAST_TF32 && p.a_type != HIP_R_32F) return "TF32 of operands that are not fp32";
  if (d.compute == HIPBLAS_COMPUTE_32F_FAST_TF32 && !starts(arch, "gfx94") && !starts(arch, "gfx95")) return "TF32 on " + arch;
  for (const Layout* x : {p.a, p.b, p.c, p.d})
    if (x->order != HIPBLASLT_ORDER_COL) return "an order that is not column-major";
  if (d.pointer_mode != HIPBLASLT_POINTER_MODE_HOST) return "factors that are not on the host";
  for (const std::string& reason : {types_refused(arch, p), scales_refused(arch, p), epilogue_refused(p)})
    if (!reason.empty()) return reason;
  for (const std::string& word : words(setting("HOST_HIPBLASLT_REFUSE", "")))
    for (const Feature& feature : kFeatures)
      if (word == feature.word && feature.present(p)) return "HOST_HIPBLASLT_REFUSE has " + word;
  return "";
}

}  // namespace host
