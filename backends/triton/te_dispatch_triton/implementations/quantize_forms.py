# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the quantize family that read records, or many tensors at once."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch.core.requirements import OneOf
from te_dispatch_triton.implementations.entry import CASTS_OF_LISTS, ROWS, UNROTATED_RECORD, kernel

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    kernel("dequantize", "quantize_forms:dequantize", UNROTATED_RECORD, claims=ROWS),
    kernel("transpose_quantized", "quantize_forms:transpose_quantized", claims=ROWS),
    kernel("relayout_scales", "quantize_forms:relayout_scales", UNROTATED_RECORD, claims=ROWS),
    kernel("convert_encoding", "quantize_forms:convert_encoding", (OneOf("overflow", "saturate"),), ROWS),
    # Whether any code is beyond the range is read back.
    kernel(
        "convert_encoding",
        "quantize_forms:convert_encoding_checked",
        (OneOf("overflow", "error"),),
        frozenset({"deterministic", "batch_invariant"}),
        name="convert_encoding_checked",
        plan=None,
    ),
    kernel("split_quantize", "quantize_many:split_quantize", CASTS_OF_LISTS),
    kernel("multi_tensor_quantize", "quantize_many:multi_tensor_quantize", CASTS_OF_LISTS),
    kernel("pad_rows", "quantize_forms:pad_rows", claims=ROWS),
    kernel("unpad_rows", "quantize_forms:unpad_rows", claims=ROWS),
    kernel("partial_amax", "quantize_forms:partial_amax"),
    kernel("partial_cast", "quantize_forms:partial_cast"),
)
