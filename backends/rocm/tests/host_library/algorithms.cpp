// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Which products have an algorithm. The real library's answer is a table of kernels for each chip; this is that table in
// a few rules. For gfx90a, gfx11 and gfx12 they are what AMD's library itself answers, to which test_transcript.py
// compares them. For gfx942 and gfx950, whose kernels Debian's package leaves out, they are taken from AMD's documentation
// of supported data types and from the names of the kernels in AMD's sources
// (library/src/amd_detail/rocblaslt/src/Tensile/Logic). Where neither tells (GELU's backward there), products are served,
// so that tests reach them; HOST_HIPBLASLT_REFUSE takes them away.
//
// The rules are stricter than AMD's library in two things, since what its kernels do there is not documented: a bias has
// D's type, fp32, or 16 bits with FP8 operands; FP8 operands and batches have no bias gradients.
#include "numbers.h"
#include "problem.h"
#include "settings.h"

namespace host {

namespace {

// What the kernels for a chip can do; the first entry whose prefix the chip's name has.
struct Chip {
  const char* prefix;
  bool fnuz, ocp;            // FP8 in that encoding
  bool aux_bf16, aux_fp16;   // GELU with an auxiliary matrix, D of the operands' type
  bool aux_fp32;             // ... and D in fp32, from operands of 16 bits
  bool aux_bias_is_fp32;     // ... with a bias in no other type
  bool grad_bf16, grad_fp16; // GELU's backward and bias gradients, D of the operands' type
  bool wide_epilogues;       // epilogues with D in fp32 and operands in bf16
  bool amax;                 // a maximum of D in FP8
  bool blocks;               // E8M0 scales for blocks of 32
};
const Chip kChips[] = {
    // prefix  fnuz   ocp    aux: bf16 fp16   fp32   bias   grad: bf16 fp16 wide   amax   blocks
    {"gfx90a", false, false, false, true, false, false, false, true, false, false, false},
    {"gfx94", true, false, true, true, true, false, true, true, true, true, false},
    {"gfx95", false, true, true, true, false, false, true, true, true, false, true},
    {"gfx11", false, false, true, true, false, false, false, false, true, false, false},
    {"gfx12", false, true, false, true, false, true, false, false, true, false, false},
    {"", false, false, false, false, false, false, false, false, true, false, false},
};

const Chip& chip_of(const std::string& arch) {
  const Chip* chip = kChips;
  while (arch.rfind(chip->prefix, 0) != 0) ++chip;  // the last one fits all
  return *chip;
}

bool is_eight(hipDataType type) { return eight_of(type) != nullptr; }
bool is_fnuz(hipDataType type) { return is_eight(type) && eight_of(type)->fnuz; }
bool is_sixteen(hipDataType type) { return size_of(type) == 2; }

std::string types_refused(const Chip& chip, const Problem& p) {
  for (const hipDataType type : {p.a_type, p.b_type, p.c_type, p.d_type}) {
    if (size_of(type) == 0) return "an element type that no algorithm here takes";
    if (is_eight(type) && !(is_fnuz(type) ? chip.fnuz : chip.ocp)) return "FP8 in an encoding that the chip does not have";
  }
  if (p.c_type != p.d_type) return "C of another type than D";
  if (is_eight(p.a_type) != is_eight(p.b_type)) return "FP8 times another type";
  if (is_eight(p.a_type)) return "";
  if (p.a_type != p.b_type) return "operands of two types";
  if (is_eight(p.d_type)) return "D in FP8 from operands that are not";
  if (p.d_type != p.a_type && p.d_type != HIP_R_32F) return "D of another type than the operands and than fp32";
  return "";
}

std::string scales_refused(const Chip& chip, const Problem& p) {
  const Desc& d = *p.desc;
  if ((d.a_scale || d.b_scale || d.d_scale) && !is_eight(p.a_type)) return "scales with operands that are not FP8";
  if (d.amax_d && !(chip.amax && is_eight(p.d_type))) return "a maximum of D";
  const bool a_block = d.a_scale_kind == ScaleKind::kBlock32, b_block = d.b_scale_kind == ScaleKind::kBlock32;
  const bool a_vector = d.a_scale_kind == ScaleKind::kVector, b_vector = d.b_scale_kind == ScaleKind::kVector;
  if (a_block != b_block || a_vector != b_vector) return "scale modes that differ";
  if (!a_block) return "";
  if (!chip.blocks) return "blocks of 32 with E8M0 scales";
  if (!d.a_scale || !d.b_scale) return "blocks of 32 without scales";
  if (p.m % 32 || p.n % 32 || p.k % 32) return "blocks of 32 with sizes that are no multiples of 32";
  return is_eight(p.d_type) ? "blocks of 32 with D in FP8" : "";
}

bool is_bias_type(const Problem& p) {
  return p.bias_type == p.d_type || p.bias_type == HIP_R_32F || (is_eight(p.a_type) && is_sixteen(p.bias_type));
}

std::string epilogue_refused(const Chip& chip, const Problem& p) {
  const int32_t e = p.desc->epilogue;
  const bool plain = !has_bias(e) && !has_gelu(e) && !has_relu(e) && !is_gelu_backward(e) && !has_bias_gradient(e);
  if (plain) return "";  // the default, and numbers that are no epilogue's, which AMD's library takes for it
  const bool bf16 = p.a_type == HIP_R_16BF, fp16 = p.a_type == HIP_R_16F, same = p.d_type == p.a_type;
  if (bf16 && !same && !chip.wide_epilogues) return "an epilogue with D in fp32";
  if ((has_bias(e) || has_bias_gradient(e)) && !is_bias_type(p)) return "a bias of another type than D and than fp32";
  if (writes_aux(e)) {
    if (!((bf16 && chip.aux_bf16) || (fp16 && chip.aux_fp16)) || !(same || chip.aux_fp32)) return "GELU with an auxiliary matrix";
    if (chip.aux_bias_is_fp32 && has_bias(e) && p.bias_type != HIP_R_32F) return "GELU with an auxiliary matrix and a bias that is not fp32";
  }
  if (is_gelu_backward(e) || has_bias_gradient(e)) {
    if (!same || !((bf16 && chip.grad_bf16) || (fp16 && chip.grad_fp16))) return "GELU's backward or a bias gradient";
    if (p.a->batch_count > 1) return "a bias gradient of a batch";
  }
  if ((writes_aux(e) || is_gelu_backward(e)) && p.aux_type != p.d_type) return "an auxiliary matrix of another type than D";
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
  const Chip& chip = chip_of(arch);
  if (p.m == 0 || p.n == 0) return "an empty D";
  if (d.compute != HIPBLAS_COMPUTE_32F && d.compute != HIPBLAS_COMPUTE_32F_FAST_TF32) return "a compute type that is not fp32";
  if (d.scale_type != HIP_R_32F) return "factors of another type than fp32";
  if (d.compute == HIPBLAS_COMPUTE_32F_FAST_TF32 && p.a_type != HIP_R_32F) return "TF32 of operands that are not fp32";
  for (const Layout* x : {p.a, p.b, p.c, p.d})
    if (x->order != HIPBLASLT_ORDER_COL) return "an order that is not column-major";
  if (d.pointer_mode != HIPBLASLT_POINTER_MODE_HOST) return "factors that are not on the host";
  for (const std::string& reason : {types_refused(chip, p), scales_refused(chip, p), epilogue_refused(chip, p)})
    if (!reason.empty()) return reason;
  for (const std::string& word : words(setting("HOST_HIPBLASLT_REFUSE", "")))
    for (const Feature& feature : kFeatures)
      if (word == feature.word && feature.present(p)) return "HOST_HIPBLASLT_REFUSE has " + word;
  return "";
}

}  // namespace host
