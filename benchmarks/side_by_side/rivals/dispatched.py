# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The operators of this project, on whichever backend a scope requires. Its backends' modules share this one."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

import te_dispatch
from side_by_side.inputs import ADAM, EPSILON, NEW_AMAX, dropped
from side_by_side.rivals import Prepared
from side_by_side.rows import Row
from te_dispatch import ops
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, Quantizer

FAMILIES = ("activation", "attention", "gemm", "norm", "position", "quantize", "softmax", "training")
Values = dict[str, torch.Tensor]


def absent(backend: str) -> str | None:
    """Why a backend cannot be measured here."""
    if importlib.util.find_spec(f"te_dispatch_{backend}") is None:
        return f"te_dispatch_{backend} is not installed"
    from te_dispatch.core import scopes

    if backend not in scopes.MANAGER.snapshot.backends:
        return f"te_dispatch_{backend} is not registered: see te-dispatch doctor"
    if backend == "cuda":
        from te_dispatch_cuda import probe

        return probe.unavailable()
    return None


def required(backend: str) -> AbstractContextManager[Any]:
    """Everything from this backend, or an error."""
    return te_dispatch.using(**dict.fromkeys(FAMILIES, backend))


def quantizer(row: Row, data: SimpleNamespace, scaling: str | None = None, encoding: str | None = None) -> Quantizer:
    scaling, encoding = scaling or row.options["scaling"], encoding or row.options["encoding"]
    if scaling == "delayed":
        return DelayedQuantizer(encoding, scale=data.state.scale, amax=data.state.amax)
    if scaling == "current":
        return CurrentQuantizer(encoding)
    return BlockQuantizer(encoding, two_d=scaling == "block_2d")


def decoded(x: Quantized) -> Values:
    """Each copy's values, in the logical order, whoever wrote it."""
    found = {}
    if x.row_data is not None:
        found["row"] = ops.dequantize(_one_copy(x, row=True), dtype=torch.float32)
    if x.col_data is not None:
        found["column"] = ops.dequantize(_one_copy(x, row=False), dtype=torch.float32)
    return found


def _one_copy(x: Quantized, row: bool) -> Quantized:
    kept = (x.row_data, None, x.row_scale_inv, None) if row else (None, x.col_data, None, x.col_scale_inv)
    return Quantized(*kept, x.encoding, x.scaling, x.scale_layout, x.shape, x.dtype, x.device)


def _quantize(row: Row, data: SimpleNamespace) -> Prepared:
    x, cast, usage = data.x, quantizer(row, data), row.options["usage"]
    return Prepared(lambda: ops.quantize(x, cast, usage=usage), decoded)


def _quantize_dbias(row: Row, data: SimpleNamespace) -> Prepared:
    x, cast, usage = data.x, quantizer(row, data), row.options["usage"]
    return Prepared(
        lambda: ops.quantize_dbias(x, cast, usage=usage),
        lambda out: {**decoded(out.quantized), "dbias": out.dbias},
    )


def _dequantize(row: Row, data: SimpleNamespace) -> Prepared:
    x = ops.quantize(data.x, quantizer(row, data), usage="row")
    return Prepared(lambda: ops.dequantize(x), lambda out: {"out": out})


def _norm_fwd(row: Row, data: SimpleNamespace) -> Prepared:
    cast = quantizer(row, data) if row.options.get("scaling") else None
    x, gamma, beta, residual = data.x, data.gamma, data.beta, data.residual
    usage = row.options.get("usage", "row")

    def values(out: Any) -> Values:
        found = {"out": out.y} if out.y_quantized is None else decoded(out.y_quantized)
        return found if out.residual_out is None else {**found, "residual": out.residual_out}

    if row.options["kind"] == "layernorm":
        return Prepared(
            lambda: ops.layernorm_fwd(x, gamma, beta, eps=EPSILON, residual=residual, quantizer=cast, usage=usage),
            values,
        )
    return Prepared(
        lambda: ops.rmsnorm_fwd(x, gamma, eps=EPSILON, residual=residual, quantizer=cast, usage=usage), values
    )


def _norm_bwd(row: Row, data: SimpleNamespace) -> Prepared:
    dy, x, gamma, mean, rstd, add = data.dy, data.x, data.gamma, data.mean, data.rstd, data.add

    def values(out: Any) -> Values:
        return {name: value for name, value in out._asdict().items() if value is not None}

    if row.options["kind"] == "layernorm":
        return Prepared(lambda: ops.layernorm_bwd(dy, x, gamma, mean, rstd, add=add), values)
    return Prepared(lambda: ops.rmsnorm_bwd(dy, x, gamma, rstd, add=add), values)


def _activation_fwd(row: Row, data: SimpleNamespace) -> Prepared:
    x, kind, usage = data.x, row.options["kind"], row.options.get("usage", "row")
    cast = quantizer(row, data) if row.options.get("scaling") else None
    return Prepared(
        lambda: ops.activation_fwd(x, kind=kind, quantizer=cast, usage=usage),
        lambda out: {"out": out.out} if out.out_quantized is None else decoded(out.out_quantized),
    )


def _activation_bwd(row: Row, data: SimpleNamespace) -> Prepared:
    x, dy, kind, usage = data.x, data.dy, row.options["kind"], row.options.get("usage", "row")
    cast = quantizer(row, data) if row.options.get("scaling") else None
    dbias = row.options["dbias"]

    def values(out: Any) -> Values:
        found = {"out": out.dx} if out.dx_quantized is None else decoded(out.dx_quantized)
        return {**found, "dbias": out.dbias} if dbias else found

    return Prepared(lambda: ops.activation_bwd(dy, x, kind=kind, quantizer=cast, usage=usage, with_dbias=dbias), values)


def _softmax_fwd(row: Row, data: SimpleNamespace) -> Prepared:
    x, causal = data.x, row.options["causal"]
    return Prepared(lambda: ops.softmax_fwd(x, causal=causal), lambda out: {"out": out})


def _softmax_bwd(row: Row, data: SimpleNamespace) -> Prepared:
    dy, y = data.dy, data.y
    return Prepared(lambda: ops.softmax_bwd(dy, y), lambda out: {"out": out})


def _rope(row: Row, data: SimpleNamespace) -> Prepared:
    x, freqs = data.x, data.freqs
    operator = ops.rope_fwd if row.operation == "rope_fwd" else ops.rope_bwd
    return Prepared(lambda: operator(x, freqs), lambda out: {"out": out})


def _dropout_add(row: Row, data: SimpleNamespace) -> Prepared:
    x, residual, bias, p = data.x, data.residual, data.bias, row.options["p"]
    rng_state = data.rng_state if p else None
    return Prepared(
        lambda: ops.dropout_add_fwd(x, residual, bias=bias, dropout_p=p, rng_state=rng_state),
        lambda out: dropped(row, data, out.out),
    )


def _adam(row: Row, data: SimpleNamespace) -> Prepared:
    params, grads, m, v = ([t.clone() for t in x] for x in (data.params, data.grads, data.exp_avgs, data.exp_avg_sqs))
    master = [t.clone() for t in data.master] if row.options["master"] else None
    return Prepared(
        lambda: ops.multi_tensor_adam(params, grads, m, v, master=master, **ADAM),
        lambda _: {"param": params[0], "exp_avg": m[0], "exp_avg_sq": v[0]},
    )


def _l2norm(row: Row, data: SimpleNamespace) -> Prepared:
    grads = data.grads
    return Prepared(lambda: ops.multi_tensor_l2norm(grads), lambda out: {"out": out})


def _gemm(row: Row, data: SimpleNamespace) -> Prepared:
    kind, scaling = row.options["kind"], row.options["scaling"]
    layout = {"fprop": "NT", "dgrad": "NN", "wgrad": "TN"}[kind]
    a = data.a if layout != "TN" else data.a.t().contiguous()
    b = data.b if layout == "NT" else data.b.t().contiguous()
    if scaling != "bf16":
        # Gradients stand at the left of dgrad and wgrad; weights, in 128x128 blocks, at the right of fprop and dgrad.
        gradient = "e5m2" if kind != "fprop" and scaling == "delayed" else "e4m3fn"
        weight = "block_2d" if scaling == "block" and kind != "wgrad" else scaling
        casts = quantizer(row, data, encoding=gradient), quantizer(row, data, weight, "e4m3fn")
        (a_usage, a_layout), (b_usage, b_layout) = ops.gemm_operand_format(
            a.device, casts[0].encoding, casts[0].scaling, casts[1].encoding, casts[1].scaling, layout
        )
        a, b = ops.quantize(a, casts[0], usage=a_usage), ops.quantize(b, casts[1], usage=b_usage)
        a = a if a_layout == a.scale_layout else ops.relayout_scales(a, scale_layout=a_layout)
        b = b if b_layout == b.scale_layout else ops.relayout_scales(b, scale_layout=b_layout)
    split = None if scaling != "delayed" else kind != "fprop"
    return Prepared(
        lambda: ops.gemm(a, b, layout=layout, out_dtype=torch.bfloat16, split_accumulator=split),
        lambda out: {"out": out.out},
    )


def _attention(row: Row, data: SimpleNamespace) -> Prepared:
    q, k, v = data.packed.unbind(2)
    dout, backward = data.dout, row.options["backward"]

    def call() -> Any:
        out, lse, _, saved = ops.attention_fwd(q, k, v, layout="sbhd", packing="3hd", mask="causal")
        if not backward:
            return out, None
        return out, ops.attention_bwd(dout, q, k, v, out, lse, saved, layout="sbhd", packing="3hd", mask="causal")

    def values(result: Any) -> Values:
        out, grads = result
        found = {"out": out} if grads is None else {"out": out, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
        return {name: value[:, :1, :2] for name, value in found.items()}

    return Prepared(call, values, "the operators themselves, without autograd")


def _update_scales(row: Row, data: SimpleNamespace) -> Prepared:
    histories, scales = [data.history.clone()], [data.scales.clone()]
    latest, limits = histories[0][0], [[448.0] * data.shape[1]]

    def call() -> torch.Tensor:
        latest.fill_(NEW_AMAX)
        ops.update_delayed_scales(histories, scales, limits)
        return scales[0]

    return Prepared(call, lambda out: {"scales": out}, "with the kernel that refills row 0")


OPERATIONS = {
    "quantize": _quantize,
    "quantize_dbias": _quantize_dbias,
    "dequantize": _dequantize,
    "norm_fwd": _norm_fwd,
    "norm_bwd": _norm_bwd,
    "activation_fwd": _activation_fwd,
    "activation_bwd": _activation_bwd,
    "softmax_fwd": _softmax_fwd,
    "softmax_bwd": _softmax_bwd,
    "rope_fwd": _rope,
    "rope_bwd": _rope,
    "dropout_add": _dropout_add,
    "adam": _adam,
    "l2norm": _l2norm,
    "gemm": _gemm,
    "attention": _attention,
    "update_scales": _update_scales,
}
