// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Adam: Kingma and Ba, 2014; with decoupled weight decay Loshchilov and Hutter, 2017.
#include "training/tables.cuh"
#include "training/training.h"

namespace ted {

namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 4;   // elements of a vector: 16 bytes of fp32
constexpr int kUnits = 2;   // vectors of every operand in flight per thread
constexpr int64_t kChunk = 8 * kThreads * kWidth * kUnits;

struct Step {
  const float* noop_flag;
  float lr, beta2, eps, share1, share2, correction1, correction2, weight_decay;  // share = 1 - beta
  bool adam_w;
};

struct Element {
  float weight, average, square;
};

__device__ __forceinline__ Element stepped(const Step& s, Element e, float grad) {
  // Without decay a weight that is not finite must not reach the moments.
  if (!s.adam_w && s.weight_decay != 0.0f) grad = fmaf(e.weight, s.weight_decay, grad);
  // Interpolated from the nearer end, as the moment is exact where either share is 0.
  const float distance = grad - e.average;
  e.average = s.share1 < 0.5f ? fmaf(s.share1, distance, e.average) : fmaf(s.share1 - 1.0f, distance, grad);
  e.square = fmaf(s.share2 * grad, grad, e.square * s.beta2);
  float update = e.average / s.correction1 / (sqrtf(e.square / s.correction2) + s.eps);
  if (s.adam_w && s.weight_decay != 0.0f) update = fmaf(e.weight, s.weight_decay, update);
  e.weight = fmaf(-s.lr, update, e.weight);
  return e;
}

enum List { kParam, kGrad, kAverage, kSquare, kMaster, kLists };

template <class P, class G, int Capacity>
__global__ void __launch_bounds__(kThreads)
adam(const __grid_constant__ Table<kLists, Capacity> table, const __grid_constant__ Step step) {
  if (step.noop_flag != nullptr && *step.noop_flag != 0.0f) return;
  const Piece piece = piece_of<kChunk>(table, blockIdx.x);
  P* params = static_cast<P*>(table.address[kParam][piece.entry]) + piece.begin;
  const G* grads = static_cast<const G*>(table.address[kGrad][piece.entry]) + piece.begin;
  float* averages = static_cast<float*>(table.address[kAverage][piece.entry]) + piece.begin;
  float* squares = static_cast<float*>(table.address[kSquare][piece.entry]) + piece.begin;
  float* master = static_cast<float*>(table.address[kMaster][piece.entry]);
  if (master != nullptr) master += piece.begin;
  auto at = [](const void* p, int bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
  const bool aligned = at(params, sizeof(P) * kWidth) && at(grads, sizeof(G) * kWidth) && at(averages, 16) &&
                       at(squares, 16) && at(master, 16);

  for (int64_t first = threadIdx.x * kWidth; first < piece.count; first += kThreads * kWidth * kUnits) {
    Vec<P, kWidth> param[kUnits];
    Vec<G, kWidth> grad[kUnits];
    Vec<float, kWidth> average[kUnits], square[kUnits], weight[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int64_t i = first + u * kThreads * kWidth, left = piece.count - i;
      if (left <= 0) break;
      grad[u] = load_vector<G, kWidth>(grads + i, left, aligned);
      average[u] = load_vector<float, kWidth>(averages + i, left, aligned);
      square[u] = load_vector<float, kWidth>(squares + i, left, aligned);
      if (master != nullptr)
        weight[u] = load_vector<float, kWidth>(master + i, left, aligned);
      else
        param[u] = load_vector<P, kWidth>(params + i, left, aligned);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int64_t i = first + u * kThreads * kWidth, left = piece.count - i;
      if (left <= 0) break;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        const float before = master != nullptr ? weight[u][k] : to_float(param[u][k]);
        const Element e = stepped(step, {before, average[u][k], square[u][k]}, to_float(grad[u][k]));
        weight[u][k] = e.weight, average[u][k] = e.average, square[u][k] = e.square;
        param[u][k] = from_float<P>(e.weight);
      }
      store_vector<float, kWidth>(averages + i, average[u], left, aligned);
      store_vector<float, kWidth>(squares + i, square[u], left, aligned);
      if (master != nullptr) store_vector<float, kWidth>(master + i, weight[u], left, aligned);
      store_vector<P, kWidth>(params + i, param[u], left, aligned);
    }
  }
}

}  // namespace

void multi_tensor_adam(int device, uintptr_t stream, const Addresses& params, const Addresses& grads,
                       const Addresses& exp_avgs, const Addresses& exp_avg_sqs, const Addresses& master,
                       const Counts& counts, uintptr_t noop_flag, double lr, double beta1, double beta2, double eps,
                       double correction1, double correction2, double weight_decay, bool adam_w, int param_dtype,
                       int grad_dtype) {
  require_list("params", params, counts, param_dtype);
  require_list("grads", grads, counts, grad_dtype);
  require_list("exp_avgs", exp_avgs, counts, kFloat32);
  require_list("exp_avg_sqs", exp_avg_sqs, counts, kFloat32);
  if (!master.empty()) require_list("master", master, counts, kFloat32);
  require_pointer("noop_flag", pointer<void>(noop_flag), 0, 4);
  const Step step{pointer<float>(noop_flag),      static_cast<float>(lr),          static_cast<float>(beta2),
                  static_cast<float>(eps),         static_cast<float>(1.0 - beta1), static_cast<float>(1.0 - beta2),
                  static_cast<float>(correction1), static_cast<float>(correction2), static_cast<float>(weight_decay),
                  adam_w};
  Queue q(device, stream);
  with_dtype("params", param_dtype, [&](auto param) {
    with_dtype("grads", grad_dtype, [&](auto grad) {
      with_flag(counts.size() <= kFew, [&](auto few) {
        constexpr int kCapacity = decltype(few)::value ? kFew : 576;
        for_tables<kChunk, kLists, kCapacity>(
            {&params, &grads, &exp_avgs, &exp_avg_sqs, &master}, counts, {}, [&](const auto& table) {
              adam<typename decltype(param)::type, typename decltype(grad)::type, kCapacity>
                  <<<table.blocks, kThreads, 0, q.stream()>>>(table, step);
            });
      });
    });
  });
  q.launched("multi_tensor_adam");
}

}  // namespace ted
