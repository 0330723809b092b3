# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer Engine's tensors with one FP8 scale, as records.

Its class Float8TensorStorage holds codes ``_data`` (..., K), their transpose ``_transpose`` (K, ...), which may be out
of date, and one ``_scale_inv`` for both: the fields of a `Quantized` of scaling ``tensor``. Its tensors of other
scalings keep their scales laid out for its own products.
"""

from __future__ import annotations

from typing import Any

from te_dispatch.compat.nvte_plugin.passing import PassOn, fp8_format, plain, require
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized

_STORAGE = ("transformer_engine.pytorch.tensor.storage.float8_tensor_storage", "Float8TensorStorage")


def is_float8(x: Any) -> bool:
    """Whether x is such a tensor: of that class or one below it. Transformer Engine is not imported to know."""
    return any((cls.__module__, cls.__name__) == _STORAGE for cls in type(x).__mro__)


def record(x: Any) -> Quantized:
    """The record that shares the memory of such a tensor; anything else is passed on."""
    if not is_float8(x):
        raise PassOn(f"a {type(x).__name__}")
    encoding, _ = fp8_format(x._fp8_dtype)
    data, transpose = x._data, None if x._transpose_invalid else x._transpose
    require(data is not None or transpose is not None, "a tensor without codes")
    plain(x._scale_inv, *(codes for codes in (data, transpose) if codes is not None))
    shape = tuple(data.shape) if data is not None else (*transpose.shape[1:], transpose.shape[0])
    require(len(shape) > 1 and x._scale_inv.numel() == 1, "codes of one dimension, or several scales")
    if transpose is not None:
        transpose = transpose.reshape(shape[-1], -1)
    scale = x._scale_inv.view(1)
    return Quantized(
        data,
        transpose,
        None if data is None else scale,
        None if transpose is None else scale,
        encoding,
        "tensor",
        CANONICAL_SCALES,
        shape,
        x._dtype,
        scale.device,
    )
