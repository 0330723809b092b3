# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products taken apart: the plain product, then the epilogue; a grouped product, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from te_dispatch.core.facts import CallFacts, Derived, fact
from te_dispatch.core.operator import Piece, decomposes
from te_dispatch.ops.composites.quantize import PLAIN_CAST
from te_dispatch.ops.results import Gemm

if TYPE_CHECKING:
    import torch

    from te_dispatch.numerics.quantized import Quantized


def _plain_gemm(call: CallFacts) -> CallFacts:
    return Derived(
        call,
        {
            "epilogue": None, "aux": False, "aux.dtype": None, "aux_quantizer": None, "aux_quantizer.encoding": None,
            "aux_quantizer.scaling": None, "out_quantizer": None, "out_quantizer.encoding": None,
            "out_quantizer.scaling": None, "accumulate": False, "out": False, "out_dtype": "fp32",
        },
        inherit=True,
    )  # fmt: skip


def _activation_facts(call: CallFacts) -> CallFacts:
    return {
        "x.dtype": "fp32", "x.scaling": "none", "kind": "gelu", "params": None, "quantizer": None,
        "quantizer.encoding": None, "quantizer.scaling": None, "usage": "row", "with_out": True, "out_dtype": None,
    }  # fmt: skip


def _activation_grad_facts(call: CallFacts) -> CallFacts:
    return Derived(call, {
        "dy.dtype": "fp32", "x.dtype": fact("aux.dtype"), "x.scaling": fact("aux.scaling"), "kind": "gelu",
        "params": None, "quantizer": None, "quantizer.encoding": None, "quantizer.scaling": None, "usage": "row",
        "with_dx": True, "with_dbias": True,
    })  # fmt: skip


def _quantize_facts(call: CallFacts) -> CallFacts:
    return Derived(call, {
        **PLAIN_CAST, "x.dtype": "fp32", "usage": "row", "quantizer": fact("out_quantizer", "aux_quantizer"),
        "quantizer.encoding": fact("out_quantizer.encoding", "aux_quantizer.encoding"),
        "quantizer.scaling": fact("out_quantizer.scaling", "aux_quantizer.scaling"), "k": fact("n"),
    })  # fmt: skip


def _epilogue_pieces(call: CallFacts) -> Mapping[str, Piece] | None:
    if call.get("epilogue") is None and call.get("out_quantizer") is None:
        return None  # nothing to take apart: the plain product is the primitive
    pieces = {"gemm": Piece("gemm", _plain_gemm)}
    if call.get("epilogue") == "gelu":
        pieces["activation_fwd"] = Piece("activation_fwd", _activation_facts)
    elif call.get("epilogue") == "dgelu":
        pieces["activation_bwd"] = Piece("activation_bwd", _activation_grad_facts)
    if call.get("out_quantizer") is not None or call.get("aux_quantizer") is not None:
        pieces["quantize"] = Piece("quantize", _quantize_facts)
    return pieces


@decomposes("gemm", pieces=_epilogue_pieces, simplifies=True)
def gemm_then_epilogue(gemm: Any, activation_fwd: Any = None, activation_bwd: Any = None, quantize: Any = None) -> Any:
    """The product in fp32, then the epilogue, then one rounding or cast, so that nothing is rounded twice."""

    def composed(  # type: ignore[no-untyped-def]
        a, b, *, layout, alpha=1.0, out=None, accumulate=False, bias=None, epilogue=None, aux=None,
        aux_quantizer=None, out_dtype=None, out_quantizer=None, split_accumulator=None,
    ):  # fmt: skip
        import torch

        dtype = out_dtype or (out.dtype if out is not None else a.dtype)
        z = gemm(a, b, layout, alpha, None, False, bias, None, None, None, torch.float32, None, split_accumulator).out
        dbias, aux_out = None, None
        if epilogue == "gelu":
            aux_out = z.to(dtype)
            if aux_quantizer is not None:
                aux_out = quantize(z, aux_quantizer, "row", None, None, None, None)
            z = activation_fwd(z, "gelu", None, None, "row", True, None).out
        elif epilogue == "dgelu":
            step = activation_bwd(z, aux, "gelu", None, None, "row", True, True)
            z, dbias = step.dx, step.dbias.to(dtype)
        elif epilogue in ("bgrad_a", "bgrad_b"):
            operand = a if epilogue == "bgrad_a" else b
            values = operand if isinstance(operand, torch.Tensor) else _dequantized(operand)
            dbias = values.reshape(-1, values.shape[-1]).sum(0, dtype=torch.float32).to(dtype)
        if out_quantizer is not None:
            quantized = quantize(z, out_quantizer, "row", None, None, None, None)
            quantized.dtype = dtype
            return Gemm(quantized, aux_out, dbias)
        if out is None:
            return Gemm(z.to(dtype), aux_out, dbias)
        out.copy_(out + z if accumulate else z)
        return Gemm(out, aux_out, dbias)

    return composed


def _dequantized(x: Quantized) -> torch.Tensor:
    from te_dispatch.core import scopes

    values: torch.Tensor = scopes.MANAGER.ops.dequantize(x)
    return values


def _each_gemm_facts(call: CallFacts) -> CallFacts:
    return Derived(call, {
        **{n: fact(n) for n in ("a.dtype", "b.dtype", "a.scaling", "b.scaling", "layout", "accumulate")},
        **{n: fact(n) for n in ("split_accumulator", "out_dtype", "bias", "out")},
        "epilogue": None, "aux": False, "aux_quantizer": None, "out_quantizer": None, "alpha.one": True,
    })  # fmt: skip


@decomposes("grouped_gemm", pieces=lambda call: {"gemm": Piece("gemm", _each_gemm_facts)})
def gemm_per_group(gemm: Any) -> Any:
    """A loop over the groups; splits on the device are read back."""

    def grouped_gemm(  # type: ignore[no-untyped-def]
        a, b, splits=None, *, layout, out=None, accumulate=False, bias=None, out_dtype=None, split_accumulator=None,
    ):  # fmt: skip
        parts = a
        if splits is not None:
            rows = splits if isinstance(splits, (list, tuple)) else splits.tolist()
            parts = a[0].split(list(rows), 0)
        return [
            gemm(
                x, y, layout, 1.0, None if out is None else out[i], accumulate, None if bias is None else bias[i],
                None, None, None, out_dtype, None, split_accumulator,
            ).out
            for i, (x, y) in enumerate(zip(parts, b))
        ]  # fmt: skip

    return grouped_gemm
