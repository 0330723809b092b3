/* Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
 * The x1's softmax: raw pointers, sizes and strides. It allocates nothing and has no state, so threads may call it at
 * once. A kernel of a real chip would also take the stream to queue it on. */
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { FP32 = 0, BF16 = 1 };

static float load(const void* data, int64_t at, int dtype) {
  float value;
  if (dtype == FP32) return ((const float*)data)[at];
  const uint32_t bits = (uint32_t)((const uint16_t*)data)[at] << 16;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* bf16: to nearest, ties to even. A NaN stays one: rounding could carry its payload into the exponent. */
static void store(void* data, int64_t at, int dtype, float value) {
  uint32_t bits;
  if (dtype == FP32) {
    ((float*)data)[at] = value;
    return;
  }
  memcpy(&bits, &value, sizeof bits);
  bits = isnan(value) ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1);
  ((uint16_t*)data)[at] = (uint16_t)(bits >> 16);
}

typedef struct {
  const void* x;
  const uint8_t* mask; /* NULL: no mask */
  int64_t x_at, mask_at, x_stride, mask_stride, visible;
  int dtype;
  float scale;
} Row;

/* scale * x[j], -Inf where it is masked out. */
static float logit(const Row* row, int64_t j) {
  if (j >= row->visible) return -INFINITY;
  if (row->mask && row->mask[row->mask_at + j * row->mask_stride]) return -INFINITY;
  return row->scale * load(row->x, row->x_at + j * row->x_stride, row->dtype);
}

/* y = softmax(scale * x) over the last of `dims` >= 2 dimensions; masked entries and fully masked rows are 0.
 *
 * x and mask have any strides, in elements and 0 where they are expanded; mask has x's shape. y is contiguous. The
 * exponentials are computed twice, which spares a workspace. */
void acme_softmax_fwd(const void* x, int x_dtype, const uint8_t* mask, void* y, int y_dtype, int64_t dims,
                      const int64_t* shape, const int64_t* x_strides, const int64_t* mask_strides, float scale,
                      int causal) {
  const int64_t last = dims - 1, columns = shape[last];
  int64_t rows = 1;
  for (int64_t d = 0; d < last; ++d) rows *= shape[d];
  for (int64_t r = 0; r < rows; ++r) {
    Row row = {x, mask, 0, 0, x_strides[last], mask ? mask_strides[last] : 0, columns, x_dtype, scale};
    int64_t rest = r;
    for (int64_t d = last - 1; d >= 0; --d) {
      const int64_t i = rest % shape[d];
      rest /= shape[d];
      row.x_at += i * x_strides[d];
      if (mask) row.mask_at += i * mask_strides[d];
      if (causal && d == last - 1 && i + 1 < columns) row.visible = i + 1;
    }
    float top = -INFINITY;
    for (int64_t j = 0; j < columns; ++j) {
      const float z = logit(&row, j);
      if (z > top || isnan(z)) top = z; /* nothing is larger than a NaN, so it stays */
    }
    if (top == -INFINITY) top = 0.0f; /* -Inf - -Inf would be NaN */
    double total = 0.0;
    for (int64_t j = 0; j < columns; ++j) total += expf(logit(&row, j) - top);
    for (int64_t j = 0; j < columns; ++j) {
      const float weight = expf(logit(&row, j) - top);
      store(y, r * columns + j, y_dtype, total == 0.0 ? 0.0f : (float)(weight / total));
    }
  }
}
