// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "product.h"

#include "numbers.h"

#include <algorithm>
#include <array>
#include <vector>

namespace host {

namespace {

// A tile of kRows x kColumns sums stays in registers; kDepth elements along k of one panel of A stay in the first cache.
constexpr int kRows = 8, kColumns = 6, kDepth = 256;
constexpr int kBlock = 32;  // elements that share a scale
typedef double Four __attribute__((vector_size(32), aligned(8)));

double round_tf32(double x) {
  const float narrow = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof(bits));
  if (!std::isfinite(narrow)) return x;
  return bits_to_float((bits + 0xfff + ((bits >> 13) & 1)) & ~uint32_t{0x1fff});
}

double scale_of(uint8_t code) { return code == 0xff ? NAN : std::ldexp(1.0, code - 127); }

std::array<double, 256> decoded(hipDataType type) {
  std::array<double, 256> values;
  for (int code = 0; code < 256; ++code) values[static_cast<size_t>(code)] = decode(*eight_of(type), static_cast<uint8_t>(code));
  return values;
}

// Elements (first + i, start + l) for i < width, l < depth, as panel[l * width + i]; zeros beyond `outer`.
template <class Read>
void pack(int64_t outer, int64_t first, int width, int64_t start, int64_t depth, const Operand& x, const Read& read, double* panel) {
  for (int i = 0; i < width; ++i) {
    const int64_t row = first + i;
    for (int64_t l = 0; l < depth; ++l)
      panel[l * width + i] = row < outer ? read(row * x.outer_stride + (start + l) * x.k_stride) : 0.0;
  }
}

void pack_any(int64_t outer, int64_t first, int width, int64_t start, int64_t depth, const Operand& x,
              const std::array<double, 256>& table, double* panel) {
  const auto go = [&](const auto& read) { pack(outer, first, width, start, depth, x, read, panel); };
  switch (size_of(x.type)) {
    case 1: go([&](int64_t at) { return table[static_cast<const uint8_t*>(x.data)[at]]; }); break;
    case 4: go([&](int64_t at) { return static_cast<double>(static_cast<const float*>(x.data)[at]); }); break;
    default:
      if (x.type == HIP_R_16F) go([&](int64_t at) { return static_cast<double>(static_cast<const _Float16*>(x.data)[at]); });
      else go([&](int64_t at) { return load_element(HIP_R_16BF, x.data, at); });
  }
  if (x.tf32 && x.type == HIP_R_32F)
    for (int64_t e = 0; e < width * depth; ++e) panel[e] = round_tf32(panel[e]);
  if (!x.block_scales) return;
  for (int i = 0; i < width && first + i < outer; ++i)
    for (int64_t l = 0; l < depth; ++l)
      panel[l * width + i] *= scale_of(x.block_scales[(first + i) * x.block_outer_stride + (start + l) / kBlock * x.block_k_stride]);
}

// Adds `depth` products to each of the tile's sums. Compiled twice: for processors with AVX2, and for any.
#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 12
__attribute__((target_clones("arch=x86-64-v3", "default")))
#endif
void add_panel(int64_t depth, const double* __restrict a, const double* __restrict b, double* __restrict tile) {
  Four low[kColumns], high[kColumns];
  for (int j = 0; j < kColumns; ++j) {
    low[j] = *reinterpret_cast<const Four*>(tile + j * kRows);
    high[j] = *reinterpret_cast<const Four*>(tile + j * kRows + 4);
  }
  for (int64_t l = 0; l < depth; ++l) {
    const Four first = *reinterpret_cast<const Four*>(a + l * kRows), second = *reinterpret_cast<const Four*>(a + l * kRows + 4);
#pragma GCC unroll 6
    for (int j = 0; j < kColumns; ++j) {
      const double factor = b[l * kColumns + j];
      low[j] += first * factor;
      high[j] += second * factor;
    }
  }
  for (int j = 0; j < kColumns; ++j) {
    *reinterpret_cast<Four*>(tile + j * kRows) = low[j];
    *reinterpret_cast<Four*>(tile + j * kRows + 4) = high[j];
  }
}

std::array<double, 256> table_of(const Operand& x) { return size_of(x.type) == 1 ? decoded(x.type) : std::array<double, 256>{}; }

}  // namespace

void multiply(int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b, double* sums) {
  std::fill(sums, sums + m * n, 0.0);
  const auto a_table = table_of(a), b_table = table_of(b);
  const int64_t panels = (n + kColumns - 1) / kColumns;
  std::vector<double> a_panel(kRows * kDepth), b_panels(static_cast<size_t>(panels * kColumns * std::min<int64_t>(kDepth, k)));
  for (int64_t start = 0; start < k; start += kDepth) {
    const int64_t depth = std::min<int64_t>(kDepth, k - start);
    for (int64_t p = 0; p < panels; ++p)
      pack_any(n, p * kColumns, kColumns, start, depth, b, b_table, b_panels.data() + p * kColumns * depth);
    for (int64_t i = 0; i < m; i += kRows) {
      pack_any(m, i, kRows, start, depth, a, a_table, a_panel.data());
      const int64_t rows = std::min<int64_t>(kRows, m - i);
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t j = p * kColumns, columns = std::min<int64_t>(kColumns, n - j);
        double tile[kRows * kColumns] = {};
        for (int64_t c = 0; c < columns; ++c) std::copy_n(sums + (j + c) * m + i, rows, tile + c * kRows);
        add_panel(depth, a_panel.data(), b_panels.data() + p * kColumns * depth, tile);
        for (int64_t c = 0; c < columns; ++c) std::copy_n(tile + c * kRows, rows, sums + (j + c) * m + i);
      }
    }
  }
}

void sum_rows(int64_t m, int64_t k, const Operand& a, double* sums) {
  const auto table = table_of(a);
  std::vector<double> panel(kDepth);
  for (int64_t i = 0; i < m; ++i) {
    double sum = 0;
    for (int64_t start = 0; start < k; start += kDepth) {
      const int64_t depth = std::min<int64_t>(kDepth, k - start);
      pack_any(m, i, 1, start, depth, a, table, panel.data());
      for (int64_t l = 0; l < depth; ++l) sum += panel[static_cast<size_t>(l)];
    }
    sums[i] = sum;
  }
}

}  // namespace host
