// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Asks libhipblaslt whether it has an algorithm for products of many kinds, and prints each answer on a line.
// test_transcript.py runs it with the host library and with AMD's, both on the host's libamdhip64, and compares.
// Usage: heuristics HIPBLASLT
#include "amd.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

void* lt = nullptr;

template <class... Arguments>
int call(const char* name, Arguments... arguments) {
  auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(lt, name));
  if (!function) {
    std::printf("%s: not there\n", name);
    std::exit(2);
  }
  return function(arguments...);
}

enum class Scales { kNone, kScalar, kVector, kMixed };
const char* const kScales[] = {"none", "scalar", "vector", "mixed"};

struct Question {
  int a, b, d;                         // types
  bool a_turned = false, b_turned = false;
  int epilogue = HIPBLASLT_EPILOGUE_DEFAULT, bias_type = -1, aux_type = -1;
  Scales scales = Scales::kNone;
  bool d_scale = false, amax = false;
  int compute = HIPBLAS_COMPUTE_32F;
  int c = -1;                          // C's type, if not D's
  int m = 64, n = 64, k = 64;
  int order = HIPBLASLT_ORDER_COL;
  int batch = 1;
};

template <class T>
void set(void* desc, int attribute, const T& value) {
  call("hipblasLtMatmulDescSetAttribute", desc, attribute, static_cast<const void*>(&value), sizeof(value));
}

void* layout(int type, int rows, int columns, const Question& q) {
  void* made = nullptr;
  const int ld = q.order == HIPBLASLT_ORDER_ROW ? columns : rows;
  call("hipblasLtMatrixLayoutCreate", &made, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), static_cast<int64_t>(ld));
  const auto put = [&](int attribute, const auto& value) {
    call("hipblasLtMatrixLayoutSetAttribute", made, attribute, static_cast<const void*>(&value), sizeof(value));
  };
  put(HIPBLASLT_MATRIX_LAYOUT_ORDER, q.order);
  put(HIPBLASLT_MATRIX_LAYOUT_BATCH_COUNT, q.batch);
  if (q.batch > 1) put(HIPBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, static_cast<int64_t>(rows) * columns);
  return made;
}

void ask(void* handle, const Question& q) {
  void *desc = nullptr, *preference = nullptr;
  void* const somewhere = reinterpret_cast<void*>(4096);  // no algorithm is run
  call("hipblasLtMatmulDescCreate", &desc, q.compute, static_cast<int>(HIP_R_32F));
  set(desc, HIPBLASLT_MATMUL_DESC_TRANSA, static_cast<int>(q.a_turned ? HIPBLAS_OP_T : HIPBLAS_OP_N));
  set(desc, HIPBLASLT_MATMUL_DESC_TRANSB, static_cast<int>(q.b_turned ? HIPBLAS_OP_T : HIPBLAS_OP_N));
  set(desc, HIPBLASLT_MATMUL_DESC_EPILOGUE, q.epilogue);
  if (q.epilogue != HIPBLASLT_EPILOGUE_DEFAULT) {
    set(desc, HIPBLASLT_MATMUL_DESC_BIAS_POINTER, somewhere);
    if (q.bias_type >= 0) set(desc, HIPBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, q.bias_type);
    set(desc, HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, somewhere);
    set(desc, HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, static_cast<int64_t>(q.m));
    if (q.aux_type >= 0) set(desc, HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, q.aux_type);
  }
  if (q.scales != Scales::kNone) {
    set(desc, HIPBLASLT_MATMUL_DESC_A_SCALE_POINTER, somewhere);
    if (q.scales != Scales::kMixed) set(desc, HIPBLASLT_MATMUL_DESC_B_SCALE_POINTER, somewhere);
    if (q.scales == Scales::kVector)
      for (const int attribute : {HIPBLASLT_MATMUL_DESC_A_SCALE_MODE, HIPBLASLT_MATMUL_DESC_B_SCALE_MODE})
        set(desc, attribute, static_cast<int>(HIPBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F));
  }
  if (q.d_scale) set(desc, HIPBLASLT_MATMUL_DESC_D_SCALE_POINTER, somewhere);
  if (q.amax) set(desc, HIPBLASLT_MATMUL_DESC_AMAX_D_POINTER, somewhere);
  void* a = layout(q.a, q.a_turned ? q.k : q.m, q.a_turned ? q.m : q.k, q);
  void* b = layout(q.b, q.b_turned ? q.n : q.k, q.b_turned ? q.k : q.n, q);
  void* c = layout(q.c < 0 ? q.d : q.c, q.m, q.n, q);
  void* d = layout(q.d, q.m, q.n, q);
  call("hipblasLtMatmulPreferenceCreate", &preference);
  const uint64_t workspace = 32 << 20;
  call("hipblasLtMatmulPreferenceSetAttribute", preference, static_cast<int>(HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES),
       static_cast<const void*>(&workspace), sizeof(workspace));
  hipblasLtMatmulHeuristicResult_t result;
  int found = -1;
  const int status = call("hipblasLtMatmulAlgoGetHeuristic", handle, desc, a, b, c, d, preference, 1, &result, &found);
  std::printf("a=%d b=%d c=%d d=%d %c%c epilogue=%d bias=%d aux=%d scales=%s d_scale=%d amax=%d compute=%d %dx%dx%d order=%d batch=%d: %d, %d found\n", q.a, q.b,
              q.c < 0 ? q.d : q.c, q.d, q.a_turned ? 'T' : 'N', q.b_turned ? 'T' : 'N', q.epilogue, q.bias_type, q.aux_type,
              kScales[static_cast<int>(q.scales)], q.d_scale, q.amax, q.compute, q.m, q.n, q.k, q.order, q.batch, status, found);
  for (void* one : {a, b, c, d}) call("hipblasLtMatrixLayoutDestroy", one);
  call("hipblasLtMatmulPreferenceDestroy", preference);
  call("hipblasLtMatmulDescDestroy", desc);
}

// Operands and D that some chip serves: asked about in every way.
const int kServed[][3] = {
    {HIP_R_32F, HIP_R_32F, HIP_R_32F},         {HIP_R_16BF, HIP_R_16BF, HIP_R_16BF},       {HIP_R_16BF, HIP_R_16BF, HIP_R_32F},
    {HIP_R_16F, HIP_R_16F, HIP_R_16F},         {HIP_R_16F, HIP_R_16F, HIP_R_32F},          {HIP_R_8F_E4M3, HIP_R_8F_E4M3, HIP_R_32F},
    {HIP_R_8F_E4M3, HIP_R_8F_E4M3, HIP_R_16BF}, {HIP_R_8F_E5M2, HIP_R_8F_E4M3, HIP_R_16F}, {HIP_R_8F_E4M3, HIP_R_8F_E4M3, HIP_R_8F_E4M3},
};

// Others, asked about once.
const int kOthers[][3] = {
    {HIP_R_16BF, HIP_R_16F, HIP_R_32F},           {HIP_R_16BF, HIP_R_16BF, HIP_R_16F},         {HIP_R_32F, HIP_R_32F, HIP_R_16BF},
    {HIP_R_16BF, HIP_R_16BF, HIP_R_8F_E4M3},      {HIP_R_8F_E4M3, HIP_R_8F_E5M2, HIP_R_32F},   {HIP_R_8F_E5M2, HIP_R_8F_E5M2, HIP_R_16BF},
    {HIP_R_8F_E4M3, HIP_R_8F_E4M3, HIP_R_8F_E5M2}, {HIP_R_8F_E5M2, HIP_R_8F_E4M3, HIP_R_8F_E5M2}, {HIP_R_8F_E4M3, HIP_R_16BF, HIP_R_16BF},
    {HIP_R_8F_E4M3_FNUZ, HIP_R_8F_E4M3_FNUZ, HIP_R_16BF}, {HIP_R_8F_E4M3_FNUZ, HIP_R_8F_E4M3, HIP_R_16BF},
};

bool is_eight(int type) { return type >= HIP_R_8F_E4M3; }

void ask_about_epilogues(void* handle, Question q) {
  q.a_turned = true;
  for (const int epilogue : {1, 2, 4, 6, 32, 36, 160, 164, 192, 208, 256, 512, 9999}) {
    q.epilogue = epilogue;
    ask(handle, q);
  }
  q.bias_type = HIP_R_32F;
  for (const int epilogue : {4, 36, 164, 208, 512}) {
    q.epilogue = epilogue;
    ask(handle, q);
  }
  q.bias_type = -1, q.epilogue = HIPBLASLT_EPILOGUE_GELU_AUX;
  for (const int aux : {static_cast<int>(HIP_R_32F), static_cast<int>(HIP_R_16F), static_cast<int>(HIP_R_16BF)}) {
    q.aux_type = aux;
    ask(handle, q);
  }
  q.aux_type = -1;
  for (int turns = 0; turns < 4; ++turns) {
    q.a_turned = turns & 1, q.b_turned = turns & 2;
    for (const int epilogue : {HIPBLASLT_EPILOGUE_DEFAULT, HIPBLASLT_EPILOGUE_BIAS}) {
      q.epilogue = epilogue;
      ask(handle, q);
    }
  }
}

void ask_about_the_rest(void* handle, const Question& plain) {
  const auto with = [&](auto change) {
    Question q = plain;
    q.a_turned = true;
    change(q);
    ask(handle, q);
  };
  with([](Question& q) { q.scales = q.scales == Scales::kNone ? Scales::kScalar : Scales::kNone; });
  with([](Question& q) { q.scales = Scales::kMixed; });
  with([](Question& q) { q.d_scale = true; });
  with([](Question& q) { q.amax = true; });
  with([](Question& q) { q.d_scale = q.amax = true; });
  with([](Question& q) { q.compute = HIPBLAS_COMPUTE_32F_FAST_TF32; });
  with([](Question& q) { q.c = q.d == HIP_R_16F ? HIP_R_16BF : HIP_R_16F; });
  with([](Question& q) { q.batch = 3; });
  for (const int size : {1, 7, 16, 100, 1000}) with([&](Question& q) { q.m = q.n = q.k = size; });
  with([](Question& q) { q.m = 0; });
  with([](Question& q) { q.k = 0; });
}

void ask_all(void* handle) {
  for (const auto& types : kServed) {
    Question plain{types[0], types[1], types[2]};
    if (is_eight(plain.a)) plain.scales = Scales::kScalar;
    ask_about_epilogues(handle, plain);
    ask_about_the_rest(handle, plain);
  }
  for (const auto& types : kOthers) {
    Question plain{types[0], types[1], types[2]};
    if (is_eight(plain.a) && is_eight(plain.b)) plain.scales = Scales::kScalar;
    ask(handle, plain);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  lt = dlopen(argv[1], RTLD_LAZY | RTLD_GLOBAL);
  if (!lt) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  void* handle = nullptr;
  std::printf("hipblasLtCreate = %d\n", call("hipblasLtCreate", &handle));
  ask_all(handle);
  std::printf("hipblasLtDestroy = %d\n", call("hipblasLtDestroy", handle));
  return 0;
}
