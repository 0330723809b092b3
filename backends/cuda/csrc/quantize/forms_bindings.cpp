// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/bindings.h"
#include "quantize/forms.h"

#include <pybind11/stl.h>

namespace ted {
namespace {

void check_scaling(int scaling, int encoding) {
  if (scaling < kTensor || scaling > kNVFP4)
    throw std::invalid_argument("x: got scaling code " + std::to_string(scaling) + ", expected 0 to 4");
  if (scaling == kNVFP4 ? encoding != kE2M1 : encoding < kE4M3 || encoding > kE5M2FNUZ)
    throw std::invalid_argument("x: got encoding code " + std::to_string(encoding) + " with scaling " +
                                std::to_string(scaling));
}

int64_t scale_size(int scaling) { return scaling == kMXFP8 || scaling == kNVFP4 ? 1 : 4; }

void dequantize_(int device, uintptr_t stream, uintptr_t codes, uintptr_t scale, int64_t row_stride,
                 int64_t block_stride, int64_t tiles, uintptr_t global_scale_inv, int scaling, int encoding,
                 bool transposed, bool down, int64_t rows, int64_t columns, uintptr_t to, int dtype) {
  const Queue queue(device, stream);
  check_scaling(scaling, encoding);
  const int64_t count = require_count("x", rows, columns);
  const StoredCopy copy{pointer<uint8_t>(codes),
                        {pointer<void>(scale), row_stride, block_stride, tiles},
                        pointer<float>(global_scale_inv),
                        scaling,
                        encoding,
                        transposed,
                        down,
                        rows,
                        columns};
  require_pointer("x.data", copy.codes, count, 1);
  require_pointer("x.scale_inv", copy.scales.scale, count, scale_size(scaling));
  require_pointer("x.global_scale_inv", copy.global_scale_inv, scaling == kNVFP4 ? count : 0, 4);
  require_pointer("out", pointer<void>(to), count, size_of(dtype));
  dequantize(queue, copy, pointer<void>(to), dtype);
  queue.launched("dequantize");
}

void transpose_bytes_(int device, uintptr_t stream, uintptr_t from, uintptr_t to, int64_t rows, int64_t columns,
                      uintptr_t scale, uintptr_t transposed_scale) {
  const Queue queue(device, stream);
  const int64_t count = require_count("x.row_data", rows, columns);
  require_pointer("x.row_data", pointer<void>(from), count, 1);
  require_pointer("col_data", pointer<void>(to), count, 1);
  require_pointer("x.row_scale_inv", pointer<void>(scale), 0, 4);
  require_pointer("col_scale_inv", pointer<void>(transposed_scale), scale != 0 ? count : 0, 4);
  transpose_bytes(queue, pointer<uint8_t>(from), pointer<uint8_t>(to), rows, columns, pointer<float>(scale),
                  pointer<float>(transposed_scale));
  queue.launched("transpose_quantized");
}

// For each copy (from, to, rows, blocks, padded rows, padded blocks, from's strides and tiles, to's strides and tiles).
using Copy = std::array<uintptr_t, 12>;

Relayout relayout_of(const Copy& a, int size) {
  const auto n = [&](int i) { return static_cast<int64_t>(a[i]); };
  const Relayout r{
      {pointer<void>(a[0]), n(6), n(7), n(8)}, {pointer<void>(a[1]), n(9), n(10), n(11)}, n(2), n(3), n(4), n(5)};
  require_pointer("x.scale_inv", r.from.scale, a[1] == 0 ? 0 : require_count("x.scale_inv", r.rows, r.blocks), size);
  require_count("scale_inv", r.padded_rows, r.padded_blocks);
  require_pointer("scale_inv", r.to.scale, 0, size);
  return r;
}

void relayout_scales_(int device, uintptr_t stream, int size, const Copy& row, const Copy& column) {
  const Queue queue(device, stream);
  if (size != 1 && size != 4) throw std::invalid_argument("size: got " + std::to_string(size) + ", expected 1 or 4");
  relayout(queue, {relayout_of(row, size), relayout_of(column, size)}, size);
  queue.launched("relayout_scales");
}

void convert_encoding_(int device, uintptr_t stream, int source, uintptr_t row, uintptr_t to_row, int64_t row_count,
                       uintptr_t column, uintptr_t to_column, int64_t column_count, uintptr_t row_scale,
                       uintptr_t to_row_scale, int64_t row_scales, uintptr_t column_scale, uintptr_t to_column_scale,
                       int64_t column_scales, uintptr_t count) {
  const Queue queue(device, stream);
  check_scaling(kTensor, source);
  const Conversion job{{pointer<uint8_t>(row), pointer<uint8_t>(column)},
                       {pointer<uint8_t>(to_row), pointer<uint8_t>(to_column)},
                       {row_count, column_count},
                       {pointer<float>(row_scale), pointer<float>(column_scale)},
                       {pointer<float>(to_row_scale), pointer<float>(to_column_scale)},
                       {row_scales, column_scales},
                       source,
                       pointer<int64_t>(count)};
  for (int i = 0; i < 2; ++i) {
    require_size("x", job.count[i]);
    require_size("x.scale_inv", job.scale_count[i]);
    require_pointer("x.data", job.from[i], job.count[i], 1);
    require_pointer("data", job.to[i], job.count[i], 1);
    require_pointer("x.scale_inv", job.scale[i], job.scale_count[i], 4);
    require_pointer("scale_inv", job.converted[i], job.scale_count[i], 4);
  }
  require_pointer("count", job.beyond, 0, 8);
  convert(queue, job);
  queue.launched("convert_encoding");
}

void count_beyond_(int device, uintptr_t stream, uintptr_t codes, int64_t count, int source, uintptr_t beyond) {
  const Queue queue(device, stream);
  check_scaling(kTensor, source);
  require_size("x", count);
  require_pointer("x.data", pointer<void>(codes), count, 1);
  require_pointer("workspace", pointer<void>(beyond), 1, 8);
  count_beyond(queue, pointer<uint8_t>(codes), count, source, pointer<int64_t>(beyond));
  queue.launched("convert_encoding");
}

int64_t total(const char* name, const std::vector<int64_t>& rows) {
  int64_t sum = 0;
  for (const int64_t n : rows) {
    require_size(name, n);
    sum += n;
  }
  return sum;
}

void copy_parts_(int device, uintptr_t stream, uintptr_t from, uintptr_t to, int64_t pitch,
                 const std::vector<int64_t>& copied, const std::vector<int64_t>& read,
                 const std::vector<int64_t>& written) {
  const Queue queue(device, stream);
  if (copied.size() != read.size() || copied.size() != written.size())
    throw std::invalid_argument("splits: got lists of different lengths");
  total("splits", copied);
  require_pointer("x", pointer<void>(from), require_count("x", total("splits", read), pitch), 1);
  require_pointer("out", pointer<void>(to), require_count("out", total("splits", written), pitch), 1);
  for (size_t i = 0; i < copied.size(); ++i)
    if (copied[i] > read[i] || copied[i] > written[i])
      throw std::invalid_argument("splits: got more rows than there are");
  copy_parts(queue, pointer<uint8_t>(from), pointer<uint8_t>(to), pitch, copied, read, written);
  queue.launched("pad_rows");
}

Shard shard_of(uintptr_t x, int dtype, int64_t count, int64_t start, int64_t height, int64_t width, int block) {
  require_size("x", count);
  require_size("start", start);
  require_pointer("x", pointer<void>(x), count, size_of(dtype));
  if (block != 0 && block != 128)
    throw std::invalid_argument("block: got " + std::to_string(block) + ", expected 0 or 128");
  if (count > require_count("width", height, width) - start)
    throw std::invalid_argument("start: got " + std::to_string(start) + ", which reaches beyond the matrix");
  return {pointer<void>(x), dtype, count, start, height, width, block};
}

void partial_amax_(int device, uintptr_t stream, uintptr_t x, int dtype, int64_t count, int64_t start, int64_t height,
                   int64_t width, int block, uintptr_t amax) {
  const Queue queue(device, stream);
  require_pointer("amax", pointer<void>(amax), count, 4);
  partial_amax(queue, shard_of(x, dtype, count, start, height, width, block), pointer<float>(amax));
  queue.launched("partial_amax");
}

void partial_cast_(int device, uintptr_t stream, uintptr_t x, int dtype, int64_t count, int64_t start, int64_t height,
                   int64_t width, int block, uintptr_t scale, uintptr_t out, int encoding) {
  const Queue queue(device, stream);
  check_scaling(kTensor, encoding);
  require_pointer("scale", pointer<void>(scale), count, 4);
  require_pointer("out", pointer<void>(out), count, 1);
  partial_cast(queue, shard_of(x, dtype, count, start, height, width, block), pointer<float>(scale),
               pointer<uint8_t>(out), encoding);
  queue.launched("partial_cast");
}

Bindings forms(+[](pybind11::module_& m) {
  m.def("dequantize", &dequantize_);
  m.def("transpose_bytes", &transpose_bytes_);
  m.def("relayout_scales", &relayout_scales_);
  m.def("convert_encoding", &convert_encoding_);
  m.def("count_beyond", &count_beyond_);
  m.def("copy_parts", &copy_parts_);
  m.def("partial_amax", &partial_amax_);
  m.def("partial_cast", &partial_cast_);
});

}  // namespace
}  // namespace ted
