# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of operands' memory: strides, alignment, views, and what a given output may look like."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import (
    Behaviour,
    expanded,
    gapped,
    misaligned,
    misread,
    operand,
    table,
    transposed,
    with_members,
)
from te_dispatch_torch.scaling import amax_of

_WRONG = {
    expanded: "reads a broadcast {} (stride 0) as if it were filled",
    transposed: "reads a transposed {} as if it were not",
    gapped: "reads {} as if its rows were adjacent",
    misaligned: "reads {} in whole vectors from an aligned address",
}


def _misreading(operator: str, on: str, **names: Any) -> tuple[Fault, ...]:
    """Operand -> the ways in which it is read wrongly."""
    entries = {}
    for name, ways in names.items():
        for way in ways if isinstance(ways, tuple) else (ways,):
            title = f"{on or operator}_misreads_{way.__name__}_{name}"
            entries[title] = (_WRONG[way].format(name), misread(name, way))
    return table(operator, entries, on=on)


_STRIDES = (
    *_misreading("layernorm_fwd", "", x=(transposed, gapped), gamma=misaligned, beta=misaligned),
    *_misreading("rmsnorm_fwd", "", x=(expanded, gapped), gamma=misaligned),
    *_misreading("layernorm_bwd", "", dy=(expanded, transposed), x=gapped, rstd=gapped),
    *_misreading("rmsnorm_bwd", "", dy=expanded, x=transposed, gamma=misaligned),
    *_misreading("activation_fwd", "", x=(expanded, transposed, misaligned)),
    *_misreading("activation_bwd", "", dy=(expanded, gapped), x=transposed),
    *_misreading("softmax_fwd", "", x=expanded, mask=(gapped, transposed)),
    *_misreading("softmax_bwd", "", dy=(expanded, transposed)),
    *_misreading("rope_fwd", "", x=(transposed, gapped), freqs=misaligned),
    *_misreading("rope_bwd", "", dy=(expanded, gapped)),
    *_misreading("dropout_add_fwd", "", x=gapped, bias=misaligned, residual=(gapped, transposed)),
    *_misreading("dropout_add_bwd", "", dy=expanded, mask=gapped),
    *_misreading("gemm", "matmul", a=(expanded, gapped, misaligned), b=(transposed, gapped), bias=misaligned),
    *_misreading("attention_fwd", "unfused_attention", q=gapped, k=(gapped, misaligned), v=expanded),
    *_misreading("attention_bwd", "unfused_attention_bwd", dout=(expanded, gapped)),
    *_misreading("quantize", "", x=gapped),
    *_misreading("compute_amax", "", x=gapped),
    *_misreading("moe_permute", "", x=gapped, indices=gapped),
    *_misreading("moe_unpermute", "", x=gapped, probs=gapped),
)


def _writes_into_gaps(call: Call) -> Any:
    """Writes a given output whole, gaps between its rows included."""
    out, made = operand(call, "out"), call.sound()
    if out is not None and out.ndim > 1 and out.shape[0] > 1 and gapped(out):
        with torch.no_grad():
            flat = out.detach()
            flat.as_strided((1,), (1,), flat.storage_offset() + flat.shape[-1]).zero_()
    return made


def _takes_out_for_dense(call: Call) -> Any:
    """Writes a given output with strides as if it had none."""
    out = operand(call, "out")
    if out is None or out.is_contiguous() or call["accumulate"]:
        return call.sound()
    made = call.sound(out=None, out_dtype=out.dtype)
    if isinstance(made.out, torch.Tensor) and made.out.numel() and transposed(out) | gapped(out):
        with torch.no_grad():
            out.detach().as_strided(out.shape, torch.empty(out.shape, device="meta").stride()).copy_(made.out)
    return made._replace(out=out)


def _adam_of_vectors(call: Call) -> Any:
    """Updates whole vectors of 4 elements where a parameter does not begin at an aligned address."""
    kept = [p.detach().clone() for p in call["params"]]
    made = call.sound()
    for parameter, before in zip(call["params"], kept):
        if misaligned(parameter):
            parameter.detach().view(-1)[-1:].copy_(before.view(-1)[-1:])
    return made


def _scale_of_first(name: str) -> Behaviour:
    """Reads element 0 of the memory that a scale is a view of."""

    def behave(call: Call) -> Any:
        x = call[name]
        scale = getattr(x, "row_scale_inv", None)
        if scale is None or x.scaling != "tensor" or not scale.storage_offset():
            return call.sound()
        first = scale.as_strided(scale.shape, scale.stride(), 0)
        return call.sound(**{name: with_members(x, row_scale_inv=first)})

    return behave


def _delayed_scale_of_first(call: Call) -> Any:
    import dataclasses

    quantizer = call["quantizer"]
    scale = getattr(quantizer, "scale", None)
    if scale is None or not scale.storage_offset():
        return call.sound()
    return call.sound(quantizer=dataclasses.replace(quantizer, scale=scale.as_strided(scale.shape, scale.stride(), 0)))


def _whole_vectors(x: torch.Tensor) -> torch.Tensor:
    """x and what a kernel sees that reads vectors of 8 in aligned rows, as far as these have room for them."""
    columns = -(-x.shape[-1] // 8) * 8 if x.ndim else 0
    if x.ndim != 2 or not gapped(x) or misaligned(x) or x.stride(0) % 8 or x.stride(0) < columns:
        return x
    beyond = x.detach().as_strided((x.shape[0] - 1, columns), x.stride())
    return torch.cat((beyond.flatten(), x.detach()[-1]))


def _cast_with_amax_of_vectors(call: Call) -> Any:
    """Looks for a current scale's amax in whole vectors, what lies between two rows included."""
    if call["quantizer"].kind != "current" or call["amax"] is not None:
        return call.sound()
    return call.sound(amax=amax_of(_whole_vectors(call["x"])))


_OTHERS = (
    *table(
        "gemm",
        {
            "product_writes_into_gaps": ("writes between the rows of `out`", _writes_into_gaps),
            "product_takes_out_for_dense": ("writes `out` as if its rows were adjacent", _takes_out_for_dense),
        },
        on="matmul",
    ),
    *table("dequantize", {
        "dequantize_reads_first_scale": ("reads the first scale of the memory it is a view of", _scale_of_first("x")),
    }),
    *table("quantize", {
        "quantize_reads_first_scale": (
            "reads the first scale of the memory it is a view of", _delayed_scale_of_first),
        "cast_takes_its_amax_from_whole_vectors": (
            "takes an amax of vectors that reach behind the end of a row", _cast_with_amax_of_vectors),
    }),
    *table("compute_amax", {"amax_of_whole_vectors": (
        "reads vectors that reach behind the end of a row", lambda call: call.sound(x=_whole_vectors(call["x"])))}),
    *table("gemm", {"fp8_product_reads_first_scale": (
        "reads the first scale of the memory that b's is a view of", _scale_of_first("b"))}, on="emulated_gemm"),
    *table("multi_tensor_adam", {"adam_needs_aligned_parameters": (
        "leaves the last element where a parameter is not aligned", _adam_of_vectors)}),
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (*_STRIDES, *_OTHERS)
