/* Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
 * RMSNorm of the n1: raw pointers to the device's memory, sizes, no allocation. A kernel of a real chip would also take
 * the stream to queue it on. */
#include <math.h>
#include <stdint.h>

/* y = x rstd (gamma + offset), rstd = 1 / sqrt(mean(x^2) + eps), for rows of `columns` elements. */
void tide_rmsnorm_fwd(const float* x, const float* gamma, float* y, float* rstd, int64_t rows, int64_t columns,
                      float eps, float offset) {
  for (int64_t r = 0; r < rows; ++r) {
    const float* in = x + r * columns;
    double squares = 0.0;
    for (int64_t c = 0; c < columns; ++c) squares += (double)in[c] * in[c];
    const double scale = 1.0 / sqrt(squares / (double)columns + eps);
    rstd[r] = (float)scale;
    for (int64_t c = 0; c < columns; ++c) y[r * columns + c] = (float)(in[c] * scale * ((double)gamma[c] + offset));
  }
}

/* With n = x rstd and g = dy (gamma + offset): dx = rstd (g - n mean(g n)), dgamma = sum over rows of dy n, in `sums`. */
void tide_rmsnorm_bwd(const float* dy, const float* x, const float* gamma, const float* rstd, float* dx, float* dgamma,
                      double* sums, int64_t rows, int64_t columns, float offset) {
  for (int64_t c = 0; c < columns; ++c) sums[c] = 0.0;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t at = r * columns;
    const double scale = rstd[r];
    double mean = 0.0;
    for (int64_t c = 0; c < columns; ++c) {
      const double n = x[at + c] * scale;
      mean += dy[at + c] * ((double)gamma[c] + offset) * n;
      sums[c] += dy[at + c] * n;
    }
    mean /= (double)columns;
    for (int64_t c = 0; c < columns; ++c) {
      const double g = dy[at + c] * ((double)gamma[c] + offset);
      dx[at + c] = (float)(scale * (g - x[at + c] * scale * mean));
    }
  }
  for (int64_t c = 0; c < columns; ++c) dgamma[c] = (float)sums[c];
}
