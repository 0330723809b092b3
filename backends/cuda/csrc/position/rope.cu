// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// A block turns a few tokens: it computes each angle's cosine and sine once, into shared memory, and applies them to
// all heads (and to all of the batch, where it shares positions).
#include "position/rope.h"

#include "common/errors.h"
#include "common/packed.cuh"
#include "common/queue.h"
#include "position/divider.cuh"

#include <algorithm>
#include <climits>

namespace ted {

namespace {

constexpr int kThreads = 128;
constexpr int kAhead = 2;   // pairs of vectors of each thread in flight
constexpr int kBlocks = 7;  // of a multiprocessor: while some find their angles, others move data
// Small blocks: the angles of a token with many heads are found by several, but few of a multiprocessor's places stay
// empty at the end. Measured at 8192 tokens x 32 x 128 bf16: 36 us, 40 with four times as many elements.
constexpr int64_t kBlockElements = 4096;
constexpr int64_t kBlockAngles = 1024;

struct Strides {
  int64_t token, batch, head;
};

struct Rope {
  const void* x;
  void* y;
  const float* freqs;
  const int32_t* cu_seqlens;
  const int32_t* offsets;
  Strides from, to;
  int64_t tokens, positions, sequences, freq_row;
  int64_t chunks;          // blocks that share a token's items
  int64_t apart;           // batch entries with positions of their own: batch where there are offsets, else 1
  int items, each;         // heads (times batch where positions are shared); of these, items of one block
  int together;            // tokens of one block
  int half, head_dim;
  Divider by_vectors, by_each, by_heads, by_half;
  bool backward;
};

constexpr int64_t kNowhere = INT64_MIN;  // the position of tokens behind the last sequence

// Positions of the block's tokens; of those in sequences by counting the sequences that end before the first one.
__device__ void find_positions(const Rope& a, int64_t first, int count, int64_t batch, int64_t* found) {
  if (a.cu_seqlens == nullptr) {
    const int64_t offset = a.offsets == nullptr ? 0 : a.offsets[batch];
    for (int i = threadIdx.x; i < count; i += kThreads) found[i] = first + i + offset;
    return;
  }
  int64_t ended = 0;
  for (int64_t base = 0; base < a.sequences; base += kThreads) {
    const int64_t i = base + threadIdx.x;
    ended += __syncthreads_count(i < a.sequences && a.cu_seqlens[i + 1] <= first);
  }
  for (int i = threadIdx.x; i < count; i += kThreads) {
    int64_t sequence = ended;
    while (sequence < a.sequences && a.cu_seqlens[sequence + 1] <= first + i) ++sequence;
    found[i] = kNowhere;
    if (sequence < a.sequences)
      found[i] = first + i - a.cu_seqlens[sequence] + (a.offsets == nullptr ? 0 : a.offsets[sequence]);
  }
}

// Of each pair (a, b): the factors of a' = ca a + sa b, b' = cb b + sb a.
struct Factors {
  float *ca, *sa, *cb, *sb;
};

template <bool Interleaved>
__device__ void find_factors(const Rope& a, int count, const int64_t* positions, const Factors& f) {
  for (int i = threadIdx.x; i < count * a.half; i += kThreads) {
    int k;
    const int64_t position = positions[a.by_half.divide(i, k)];
    float t[2] = {0.0f, 0.0f};
    if (position >= 0 && position < a.positions) {
      const float* row = a.freqs + position * a.freq_row;
      t[0] = row[Interleaved ? 2 * k : k];
      t[1] = row[Interleaved ? 2 * k + 1 : k + a.half];
    } else if (position != kNowhere) {
      t[0] = t[1] = NAN;  // there are no angles for it: nothing that looks like a result
    }
    float sine[2], cosine[2];
    sincosf(t[0], &sine[0], &cosine[0]);
    if (t[1] == t[0])
      sine[1] = sine[0], cosine[1] = cosine[0];
    else
      sincosf(t[1], &sine[1], &cosine[1]);
    f.ca[i] = cosine[0];
    f.cb[i] = cosine[1];
    f.sa[i] = a.backward ? sine[1] : -sine[0];
    f.sb[i] = a.backward ? -sine[0] : sine[1];
  }
}

// Where the block's row r (a token's item) begins.
struct Place {
  int token;
  int64_t from, to;
};

__device__ __forceinline__ Place place_of(const Rope& a, int row, int64_t first, int first_item, int64_t batch) {
  int item, head;
  Place p;
  p.token = a.by_each.divide(row, item);
  const int64_t entry = batch + a.by_heads.divide(first_item + item, head);
  p.from = (first + p.token) * a.from.token + entry * a.from.batch + head * a.from.head;
  p.to = (first + p.token) * a.to.token + entry * a.to.batch + head * a.to.head;
  return p;
}

template <class T, int V, bool Interleaved>
__global__ void __launch_bounds__(kThreads, kBlocks) rotate(const __grid_constant__ Rope a) {
  extern __shared__ float4 room[];
  __shared__ int64_t positions[kBlockAngles];
  const int angles = a.together * a.half;
  float* table = reinterpret_cast<float*>(room);
  const Factors f{table, table + angles, table + 2 * angles, table + 3 * angles};

  int64_t block = blockIdx.x, chunk = 0, batch = 0;
  if (a.chunks > 1) chunk = block % a.chunks, block /= a.chunks;
  if (a.apart > 1) batch = block % a.apart, block /= a.apart;
  const int64_t first = block * a.together;
  const int count = static_cast<int>(a.tokens - first < a.together ? a.tokens - first : a.together);
  const int first_item = static_cast<int>(chunk) * a.each;
  const int items = a.items - first_item < a.each ? a.items - first_item : a.each;
  // by_each counts rows in steps of `each`: only a chunk of one token may hold fewer items.
  const int rows = count == 1 ? items : count * a.each;
  const T* x = static_cast<const T*>(a.x);
  T* y = static_cast<T*>(a.y);
  constexpr int kFirst = Interleaved ? 2 * V : V;  // elements between one vector of a row and the next
  const int to_second = Interleaved ? V : a.half;
  const int total = a.half == 0 ? 0 : rows * static_cast<int>(a.by_vectors.divisor);

  Place place[kAhead];
  int column[kAhead];
  Packed<T, V> low[kAhead], high[kAhead];
  auto load = [&](int base) {
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      const int i = base + n * kThreads;
      if (i < total) {
        place[n] = place_of(a, a.by_vectors.divide(i, column[n]), first, first_item, batch);
        const T* source = x + place[n].from + column[n] * kFirst;
        low[n] = load_packed<true, V>(source, V);
        high[n] = load_packed<true, V>(source + to_second, V);
      }
    }
  };
  load(threadIdx.x);
  find_positions(a, first, count, batch, positions);
  __syncthreads();
  find_factors<Interleaved>(a, count, positions, f);
  __syncthreads();

  constexpr int kPairs = V < 4 ? V : 4;  // whose factors are in registers together
  for (int base = threadIdx.x; base < total; base += kAhead * kThreads) {
    if (base != threadIdx.x) load(base);
#pragma unroll
    for (int n = 0; n < kAhead; ++n) {
      if (base + n * kThreads >= total) break;
      Vec<T, V> out[2];
#pragma unroll
      for (int part = 0; part < V; part += kPairs) {
        const int at = place[n].token * a.half + column[n] * V + part;
        const auto ca = *reinterpret_cast<const Vec<float, kPairs>*>(f.ca + at);
        const auto sa = *reinterpret_cast<const Vec<float, kPairs>*>(f.sa + at);
        const auto cb = *reinterpret_cast<const Vec<float, kPairs>*>(f.cb + at);
        const auto sb = *reinterpret_cast<const Vec<float, kPairs>*>(f.sb + at);
#pragma unroll
        for (int k = 0; k < kPairs; ++k) {
          // Pair: (low[i], high[i]), or neighbours within the 2 V elements of both vectors.
          const int i = Interleaved ? 2 * (part + k) : part + k, j = Interleaved ? i + 1 : V + i;
          const float p = i < V ? low[n][i % V] : high[n][i % V];
          const float q = j < V ? low[n][j % V] : high[n][j % V];
          out[i / V][i % V] = from_float<T>(fmaf(ca[k], p, sa[k] * q));
          out[j / V][j % V] = from_float<T>(fmaf(cb[k], q, sb[k] * p));
        }
      }
      T* target = y + place[n].to + column[n] * kFirst;
      *reinterpret_cast<Vec<T, V>*>(target) = out[0];
      *reinterpret_cast<Vec<T, V>*>(target + to_second) = out[1];
    }
  }
  // Features that pass.
  const int passing = (a.head_dim - 2 * a.half) / V;
  if (passing == 0) return;
  for (int i = threadIdx.x; i < rows * passing; i += kThreads) {
    const Place p = place_of(a, i / passing, first, first_item, batch);
    const int k = 2 * a.half + i % passing * V;
    *reinterpret_cast<Vec<T, V>*>(y + p.to + k) = *reinterpret_cast<const Vec<T, V>*>(x + p.from + k);
  }
}

// Whether every access may be V elements wide: all offsets are multiples, and so are both addresses.
bool takes(const Rope& a, int64_t v, int64_t element, int64_t batch, int64_t heads) {
  auto multiple = [&](const Strides& s) {
    return (a.tokens == 1 || s.token % v == 0) && (batch == 1 || s.batch % v == 0) && (heads == 1 || s.head % v == 0);
  };
  return a.half % v == 0 && a.head_dim % v == 0 && multiple(a.from) && multiple(a.to) &&
         is_aligned(a.x, 0, static_cast<int>(v * element)) && is_aligned(a.y, 0, static_cast<int>(v * element));
}

template <class T, int V>
void launch(const Queue& q, Rope a, int64_t blocks, bool interleaved) {
  a.by_vectors = Divider(std::max(a.half / V, 1));
  const size_t bytes = sizeof(float) * 4 * a.together * a.half;
  with_flag(interleaved, [&](auto flag) {
    rotate<T, V, decltype(flag)::value><<<grid_x("x", blocks), kThreads, bytes, q.stream()>>>(a);
  });
}

}  // namespace

void rope(int device, uintptr_t stream, uintptr_t x, uintptr_t y, uintptr_t freqs, uintptr_t cu_seqlens,
          uintptr_t offsets, int64_t tokens, int64_t batch, int64_t heads, int64_t head_dim, int64_t rotary_dim,
          int64_t positions, int64_t sequences, int64_t x_token, int64_t x_batch, int64_t x_head, int64_t y_token,
          int64_t y_batch, int64_t y_head, int64_t freq_row, bool interleaved, bool backward, int dtype) {
  const int64_t items = require_count("x", batch, heads);
  const int64_t count = require_count("x", require_count("x", tokens, items), head_dim);
  require_pointer("x", pointer<void>(x), count, size_of(dtype));
  require_pointer("out", pointer<void>(y), count, size_of(dtype));
  require_pointer("freqs", pointer<void>(freqs), require_count("freqs", positions, rotary_dim), 4);
  require_pointer("cu_seqlens", pointer<void>(cu_seqlens), 0, 4);
  require_pointer("offsets", pointer<void>(offsets), 0, 4);
  require_size("sequences", sequences);
  if (rotary_dim < 0 || rotary_dim % 2 != 0 || rotary_dim > head_dim || rotary_dim > kMostRotated)
    throw std::invalid_argument("freqs: got " + std::to_string(rotary_dim) +
                                " angles a position, expected an even number up to " +
                                std::to_string(std::min(head_dim, kMostRotated)));
  if (head_dim > INT_MAX / 64 || items > INT_MAX / 2)
    throw std::invalid_argument("x: got " + std::to_string(items) + " heads of " + std::to_string(head_dim) +
                                " features a token, more than a launch takes");
  if (count == 0) return;
  Queue q(device, stream);
  const bool shared = cu_seqlens != 0 || offsets == 0;
  const int half = static_cast<int>(rotary_dim / 2);
  const int all = static_cast<int>(shared ? items : heads);
  Rope a{pointer<void>(x), pointer<void>(y), pointer<float>(freqs), pointer<int32_t>(cu_seqlens),
         pointer<int32_t>(offsets), {x_token, x_batch, x_head}, {y_token, y_batch, y_head}, tokens, positions,
         sequences, freq_row, 1, shared ? 1 : batch, all, all, 1, half, static_cast<int>(head_dim),
         Divider(1), Divider(1), Divider(heads), Divider(std::max(half, 1)), backward};
  if (all * head_dim > kBlockElements) {
    a.each = static_cast<int>(ceil_div(kBlockElements, head_dim));
    a.chunks = ceil_div(all, a.each);
  } else {
    const int64_t most = std::min(kBlockElements / (all * head_dim), kBlockAngles / std::max(half, 1));
    a.together = static_cast<int>(std::max<int64_t>(1, std::min(most, tokens)));
  }
  a.by_each = Divider(a.each);
  const int64_t blocks = ceil_div(tokens, a.together) * a.apart * a.chunks;
  with_dtype("x", dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (sizeof(T) == 2 && takes(a, 8, sizeof(T), batch, heads))
      launch<T, 16 / sizeof(T)>(q, a, blocks, interleaved);
    else if (takes(a, 4, sizeof(T), batch, heads))
      launch<T, 4>(q, a, blocks, interleaved);
    else
      launch<T, 1>(q, a, blocks, interleaved);
  });
  q.launched("rope");
}

}  // namespace ted
