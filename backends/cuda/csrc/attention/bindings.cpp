// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/bindings.h"

#include "attention/attention.h"

namespace py = pybind11;

namespace {

using namespace ted;
using namespace ted::attention;

Side side(const char* name, uintptr_t cumulative, uintptr_t starts, int64_t extent) {
  require_pointer(name, pointer<void>(cumulative), 0, 4);
  require_pointer(name, pointer<void>(starts), 0, 4);
  require_size(name, extent);
  return {pointer<const int32_t>(cumulative), pointer<const int32_t>(starts), extent};
}

Rows rows(const char* name, uintptr_t data, int64_t batch_stride, int64_t row_stride, int64_t head_stride, int64_t heads,
          int64_t bytes) {
  require_pointer(name, pointer<void>(data), 0, 16);
  require_size(name, heads);
  if (data != 0 && (bytes % 16 || batch_stride % 16 || row_stride % 16 || head_stride % 16))
    throw std::invalid_argument(std::string(name) + ": got rows or strides that are not multiples of 16 bytes");
  return {pointer<char>(data), batch_stride, row_stride, head_stride, static_cast<int32_t>(heads),
          static_cast<int32_t>(bytes)};
}

void attention_sequences(int device, uintptr_t stream, int64_t batch, uintptr_t cumulative_q, uintptr_t cumulative_kv,
                         uintptr_t starts_q, uintptr_t starts_kv, int64_t extent_q, int64_t extent_kv,
                         uintptr_t lengths_q, uintptr_t lengths_kv, uintptr_t offsets, int count, uint32_t of_keys,
                         int64_t e0, int64_t e1, int64_t e2, int64_t e3, int64_t e4, int64_t e5, int64_t e6, int64_t e7,
                         int64_t e8, int64_t e9, uintptr_t zeros, int64_t zero_count) {
  require_size("batch", batch);
  require_pointer("softmax_offset", pointer<void>(zeros), zero_count, 4);
  if (count < 0 || count > kMaxOffsets) throw std::invalid_argument("offsets: got too many arrays");
  require_pointer("offsets", pointer<void>(offsets), count, 8);
  Sequences a{side("cu_seqlens_q", cumulative_q, starts_q, extent_q), side("cu_seqlens_kv", cumulative_kv, starts_kv, extent_kv),
              batch, pointer<int32_t>(lengths_q), pointer<int32_t>(lengths_kv), pointer<int64_t>(offsets), count, of_keys,
              {e0, e1, e2, e3, e4, e5, e6, e7, e8, e9}, pointer<float>(zeros), zero_count};
  Queue q(device, stream);
  sequences(q, a);
  q.launched("attention_sequences");
}

void attention_mend(int device, uintptr_t stream, int64_t batch, uintptr_t cumulative_q, uintptr_t cumulative_kv,
                    uintptr_t starts_q, uintptr_t starts_kv, int64_t extent_q, int64_t extent_kv, bool packed_q,
                    bool packed_kv, int64_t left, int64_t right, bool bottom_right, uintptr_t query, int64_t q_batch,
                    int64_t q_row, int64_t q_head, int64_t heads, int64_t q_bytes, uintptr_t lse, uintptr_t key,
                    int64_t k_batch, int64_t k_row, int64_t k_head, int64_t groups, int64_t k_bytes, uintptr_t value,
                    int64_t v_batch, int64_t v_row, int64_t v_head, int64_t v_bytes) {
  require_size("batch", batch);
  require_pointer("lse", pointer<void>(lse), 0, 4);
  const Mend a{side("cu_seqlens_q", cumulative_q, starts_q, extent_q), side("cu_seqlens_kv", cumulative_kv, starts_kv, extent_kv),
           batch, packed_q, packed_kv, {left, right, bottom_right},
           rows("query rows", query, q_batch, q_row, q_head, heads, q_bytes),
           rows("key rows", key, k_batch, k_row, k_head, groups, k_bytes),
           rows("value rows", value, v_batch, v_row, v_head, groups, v_bytes), pointer<float>(lse),
           static_cast<int32_t>(heads)};
  Queue q(device, stream);
  mend(q, a);
  q.launched("attention_mend");
}

// copies: tuples (of keys, source, its strides of batch, row and head, target, its strides, heads, bytes of a head).
void attention_clean(int device, uintptr_t stream, int64_t batch, uintptr_t cumulative_q, uintptr_t cumulative_kv,
                     uintptr_t starts_q, uintptr_t starts_kv, int64_t extent_q, int64_t extent_kv, bool packed,
                     int64_t left, int64_t right, bool bottom_right, const py::tuple& copies) {
  require_size("batch", batch);
  if (copies.size() > static_cast<size_t>(kMaxCopies)) throw std::invalid_argument("copies: got too many tensors");
  Clean a{side("cu_seqlens_q", cumulative_q, starts_q, extent_q), side("cu_seqlens_kv", cumulative_kv, starts_kv, extent_kv),
          batch, packed, {left, right, bottom_right}, static_cast<int>(copies.size()), {}};
  for (int t = 0; t < a.count; ++t) {
    const py::tuple of = copies[t];
    if (of.size() != 11) throw std::invalid_argument("copies: got a tuple that is not of 11 numbers");
    int64_t n[11];
    for (int i = 0; i < 11; ++i) n[i] = of[i].cast<int64_t>();
    a.copies[t] = {n[0] != 0, rows("source", n[1], n[2], n[3], n[4], n[9], n[10]),
                   rows("target", n[5], n[6], n[7], n[8], n[9], n[10])};
  }
  Queue q(device, stream);
  clean(q, a);
  q.launched("attention_clean");
}

void attention_summarize(int device, uintptr_t stream, int64_t batch, uintptr_t cumulative_q, uintptr_t cumulative_kv,
                         uintptr_t starts_q, int64_t extent_q, int64_t extent_kv, bool packed, int64_t left,
                         int64_t right, bool bottom_right, uintptr_t maxima, uintptr_t sums, int64_t heads, uintptr_t lse,
                         uintptr_t largest) {
  require_size("batch", batch);
  require_size("heads", heads);
  require_pointer("max_logit", pointer<void>(largest), heads, 4);
  require_pointer("lse", pointer<void>(lse), 0, 4);
  const RowStatistics a{pointer<const float>(maxima), pointer<const float>(sums), side("cu_seqlens_q", cumulative_q, starts_q, extent_q),
                side("cu_seqlens_kv", cumulative_kv, 0, extent_kv), batch, packed, {left, right, bottom_right},
                static_cast<int32_t>(heads), pointer<float>(lse), pointer<float>(largest)};
  Queue q(device, stream);
  summarize(q, a);
  q.launched("attention_summarize");
}

// casts: tuples (scale, three inverses, three amaxes of results, the cast's amax, the scale times factor, factor).
void attention_casts(int device, uintptr_t stream, bool after, const py::tuple& casts) {
  if (casts.size() > static_cast<size_t>(kMaxCasts)) throw std::invalid_argument("casts: got too many");
  Casts a{static_cast<int>(casts.size()), {}};
  for (int t = 0; t < a.count; ++t) {
    const py::tuple of = casts[t];
    constexpr size_t kAddresses = 3 + 2 * kMaxResults;
    if (of.size() != kAddresses + 1) throw std::invalid_argument("casts: got a tuple that is not of 9 addresses and a factor");
    float* n[kAddresses];
    for (size_t i = 0; i < kAddresses; ++i) {
      n[i] = pointer<float>(of[i].cast<uintptr_t>());
      require_pointer("scales", n[i], i == 0 ? 1 : 0, 4);
    }
    a.casts[t] = {n[0], of[kAddresses].cast<float>(), n[8], {n[1], n[2], n[3]}, {n[4], n[5], n[6]}, n[7]};
  }
  Queue q(device, stream);
  if (after)
    record(q, a);
  else
    inverses(q, a);
  q.launched("attention_casts");
}

const Bindings attention_bindings(+[](py::module_& m) {
  m.def("attention_sequences", &attention_sequences);
  m.def("attention_mend", &attention_mend);
  m.def("attention_clean", &attention_clean);
  m.def("attention_casts", &attention_casts);
  m.def("attention_summarize", &attention_summarize);
});

}  // namespace
