# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantize family: a cast with a bias gradient, and casts of many tensors, one by one."""

from __future__ import annotations

from typing import Any

from te_dispatch.core.facts import CallFacts, Derived, fact
from te_dispatch.core.operator import Piece, decomposes
from te_dispatch.ops.results import QuantizeDbias
from te_dispatch.ops.shapes import rows_of

#: A cast without any of `quantize`'s optional arguments.
PLAIN_CAST = {"out": False, "noop_flag": False, "amax": False, "rng_state": False}


def _plain_cast(call: CallFacts) -> CallFacts:
    return Derived(call, PLAIN_CAST, inherit=True)


def _cast_of_list(call: CallFacts) -> CallFacts:
    return Derived(
        call,
        {
            **PLAIN_CAST,
            "x.dtype": fact("xs.dtype", "x.dtype"),
            "quantizer": fact("quantizers"),
            "quantizer.encoding": fact("quantizers.encoding"),
            "usage": fact("usage"),
        },
    )


@decomposes("quantize_dbias", pieces=lambda call: {"quantize": Piece("quantize", _plain_cast)})
def quantize_then_sum(quantize: Any) -> Any:
    """A cast, then a reduction in PyTorch."""

    def quantize_dbias(x, quantizer, *, usage, bias_dtype=None):  # type: ignore[no-untyped-def]
        import torch

        quantized = quantize(x, quantizer, usage, None, None, None, None)
        rows = x.reshape(rows_of(tuple(x.shape)), x.shape[-1])
        return QuantizeDbias(quantized, rows.sum(0, dtype=torch.float32).to(bias_dtype or x.dtype))

    return quantize_dbias


@decomposes(
    "split_quantize",
    pieces=lambda call: {"quantize": Piece("quantize", _cast_of_list)},
)
def split_then_quantize(quantize: Any) -> Any:
    def split_quantize(x, splits, quantizers, *, usage):  # type: ignore[no-untyped-def]
        parts = x.split(list(splits), 0)
        return [quantize(p, q, usage, None, None, None, None) for p, q in zip(parts, quantizers)]

    return split_quantize


@decomposes(
    "multi_tensor_quantize",
    pieces=lambda call: {"quantize": Piece("quantize", _cast_of_list)},
)
def quantize_each(quantize: Any) -> Any:
    def multi_tensor_quantize(xs, quantizers, *, usage):  # type: ignore[no-untyped-def]
        return [quantize(x, q, usage, None, None, None, None) for x, q in zip(xs, quantizers)]

    return multi_tensor_quantize
