# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Magnitudes, the update of delayed scales, transposing FP8 codes and reading them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.compat.nvte_plugin.passing import floats, fp8_format, plain, require, torch_dtype
from te_dispatch.compat.nvte_plugin.records import record
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized


def compute_amax(input: Any, amax: Any) -> None:
    floats(input)
    plain(amax)
    ops.compute_amax(input, out=amax)


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Any,
    amax_histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """The buffer holds what the ranks agreed on as row 0 of the histories, one after the other."""
    _, largest = fp8_format(fp8_dtype)
    plain(amax_reduction_buffer, *amax_histories, *scales)
    require(float(margin).is_integer(), f"the margin {margin}")
    require(amax_compute_algo in ("max", "most_recent"), f"the algorithm {amax_compute_algo!r}")
    require(len(amax_histories) > 0, "no history")
    counts = [history.shape[1] for history in amax_histories]
    for history, reduced in zip(amax_histories, amax_reduction_buffer.split(counts)):
        history[0].copy_(reduced)
    ops.update_delayed_scales(
        list(amax_histories),
        list(scales),
        [(largest,) * count for count in counts],
        algorithm=amax_compute_algo,
        margin=int(margin),
    )


def fp8_transpose(input: Any, dtype: Any, *, out: Any) -> torch.Tensor:
    """(..., K) -> (K, ...)."""
    encoding, _ = fp8_format(dtype)
    plain(input)
    require(out is None, "a tensor to write to")
    require(input.dtype == torch.uint8 and input.dim() > 1, f"a tensor of {input.dtype}, {input.dim()} dimensions")
    shape = tuple(input.shape)
    # The scale of a record that only lends its bytes: nothing reads it.
    scale = torch.ones(1, dtype=torch.float32, device=input.device)
    record = Quantized(
        input, None, scale, None, encoding, "tensor", CANONICAL_SCALES, shape, torch.float32, input.device
    )
    transposed = ops.transpose_quantized(record).col_data
    return transposed.view(shape[-1], *shape[:-1])


def dequantize(input: Any, otype: Any) -> torch.Tensor:
    dtype = torch_dtype(otype)
    return ops.dequantize(record(input), dtype=dtype)


ADAPTERS: dict[str, Callable[..., Any]] = {
    "compute_amax": compute_amax,
    "fused_amax_and_scale_update_after_reduction": fused_amax_and_scale_update_after_reduction,
    "fp8_transpose": fp8_transpose,
    "dequantize": dequantize,
}
