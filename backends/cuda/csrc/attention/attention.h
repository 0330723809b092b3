// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What attention libraries leave to be done around them: where the sequences of a batch lie, rows that belong to none,
// rows that see nothing. Contract: te_dispatch.ops.attention.
#pragma once

#include "common/queue.h"

namespace ted::attention {

constexpr int kMaxOffsets = 10;

// One side, queries or keys, of a batch of sequences.
struct Side {
  const int32_t* cumulative;  // (batch + 1) lengths, null where every sequence has `extent` rows
  const int32_t* starts;      // (batch + 1) first rows in memory of a packed tensor, null: `cumulative`
  int64_t extent;             // rows of a dense sequence, or all rows of a packed tensor
};

// Lengths of every sequence, and `rows` arrays of batch + 1 offsets: where each begins, times a number of elements. Also
// as many zeros as a kernel that knows only given softmax offsets wants.
struct Sequences {
  Side queries, keys;
  int64_t batch;
  int32_t* query_lengths;  // null: none wanted
  int32_t* key_lengths;
  int64_t* offsets;
  int rows;
  uint32_t of_keys;  // bit r: array r is of keys
  int64_t elements[kMaxOffsets];
  float* zeros;  // null: none
  int64_t zero_count;
};
void sequences(const Queue& q, const Sequences& a);

// Rows of one tensor, of `heads` pieces of `bytes` bytes each; strides in bytes. A packed tensor has batch stride 0.
struct Rows {
  char* data;  // null: none
  int64_t batch_stride, row_stride, head_stride;
  int32_t heads, bytes;
};

// Which keys row i of a sequence sees: j in [i + offset - left, i + offset + right], -1 unbounded.
struct Band {
  int64_t left, right;
  bool bottom_right;
};

// Zeros in rows of `queries` that belong to no sequence or see nothing, -Inf in their log-sum-exps; zeros in rows of
// `first_key` and `second_key` that belong to no sequence.
struct Mend {
  Side queries, keys;
  int64_t batch;
  bool packed_queries, packed_keys;
  Band band;
  Rows query, first_key, second_key;
  float* lse;  // (batch, heads, extent), or (tokens, heads) where packed
  int32_t heads;
};
void mend(const Queue& q, const Mend& a);

// Copies of tensors, rows that belong to no sequence, and queries that see nothing, as zeros.
constexpr int kMaxCopies = 4;
struct Copy {
  bool of_keys;
  Rows source, target;  // of equal heads and bytes
};
struct Clean {
  Side queries, keys;
  int64_t batch;
  bool packed;
  Band band;
  int count;
  Copy copies[kMaxCopies];
};
void clean(const Queue& q, const Clean& a);

// Every row's largest logit and sum of exponentials, (batch, heads, rows) or (tokens, heads) where packed.
struct RowStatistics {
  const float* maxima;
  const float* sums;
  Side queries, keys;
  int64_t batch;
  bool packed;
  Band band;
  int32_t heads;
  float* lse;      // maximum + ln(sum) of each row; null: not wanted
  float* largest;  // (heads): of the rows that see something; -Inf where there is none
};
void summarize(const Queue& q, const RowStatistics& a);

// Delayed casts that a library makes: it wants the scale's inverse beside the scale, and tells each result's amax.
constexpr int kMaxCasts = 4;
constexpr int kMaxResults = 3;
struct Cast {
  const float* scale;
  float factor;   // what the library casts is the operator's value divided by it
  float* scaled;  // scale times factor; null: not wanted
  float* inverses[kMaxResults];  // null: none
  float* largest[kMaxResults];   // of each result; null: none
  float* amax;                   // max-accumulated; null: not recorded
};
struct Casts {
  int count;
  Cast casts[kMaxCasts];
};
// Before the library: inverses of the scales, zeros where it tells amaxes. After it: amaxes into the casts' own.
void inverses(const Queue& q, const Casts& a);
void record(const Queue& q, const Casts& a);

}  // namespace ted::attention
