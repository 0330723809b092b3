// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What a cast's integers must satisfy before anything is launched; the source's own: cast/sources.cuh.
#include "quantize/quantize.h"

namespace ted {

void check_cast(const SourceArguments& source, const CastArguments& arguments) {
  const int64_t count = require_count("x", source.rows, source.columns);
  if (source.form < kPlain || source.form > kBackward)
    throw std::invalid_argument("form: got " + std::to_string(source.form) + ", expected 0, 1 or 2");
  const TensorCast& cast = arguments.cast;
  const bool codes = cast.row != nullptr || cast.column != nullptr;
  if ((cast.cast & ~kCommon) < kE4M3 || (cast.cast & ~kCommon) > kE5M2FNUZ)
    throw std::invalid_argument("cast: got code " + std::to_string(cast.cast) + ", expected an 8-bit encoding's");
  if (codes && count > 0 && cast.scale == nullptr && cast.maxima == nullptr && !arguments.find_amax)
    throw std::invalid_argument("scale: got a null pointer, and no amax to make it from");
  if (cast.out_dtype < kFloat32 || cast.out_dtype > kFloat16)
    throw std::invalid_argument("out: got dtype code " + std::to_string(cast.out_dtype) + ", expected 0, 1 or 2");
  require_pointer("out", cast.out, 0, size_of(cast.out_dtype));
  const struct {
    const char* name;
    const float* pointer;
  } floats[] = {{"scale", cast.scale},
                {"amax", cast.maxima},
                {"row_scale_inv", cast.row_scale_inv},
                {"col_scale_inv", cast.column_scale_inv},
                {"quantizer.amax", cast.amax},
                {"noop_flag", cast.noop},
                {"workspace", arguments.workspace}};
  for (const auto& f : floats) require_pointer(f.name, f.pointer, 0, 4);
  if (source.form == kForward && arguments.dbias != nullptr)
    throw std::invalid_argument("dbias: an activation's forward has none");
  if (arguments.find_amax || arguments.dbias != nullptr) require_pointer("workspace", arguments.workspace, 1, 4);
}

}  // namespace ted
