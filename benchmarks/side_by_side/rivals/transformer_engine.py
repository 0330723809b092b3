# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer Engine: its compiled operators, called as its own modules call them."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import torch

from side_by_side.inputs import ADAM, EPSILON, NEW_AMAX, dropped
from side_by_side.rivals import Prepared, Refused
from side_by_side.rows import Row
from side_by_side.timing import why

NAME = "transformer_engine"
scope = contextlib.nullcontext
Values = dict[str, torch.Tensor]
#: Elements that one of its blocks spans in a multi-tensor call.
CHUNK = 2048 * 32


@functools.cache
def missing() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:
        return why(error)
    return None


def _compiled() -> Any:
    import transformer_engine_torch

    return transformer_engine_torch


def _dtype(encoding: str) -> Any:
    types = _compiled().DType
    return {"e4m3fn": types.kFloat8E4M3, "e5m2": types.kFloat8E5M2, "bf16": types.kBFloat16}[encoding]


def _quantizer(row: Row, data: SimpleNamespace, scaling: str | None = None, encoding: str | None = None) -> Any:
    from transformer_engine.pytorch import Float8BlockQuantizer, Float8CurrentScalingQuantizer, Float8Quantizer

    scaling, dtype = scaling or row.options["scaling"], _dtype(encoding or row.options["encoding"])
    usage: dict[str, Any] = {"rowwise": True, "columnwise": row.options.get("usage", "both") == "both"}
    if scaling == "delayed":
        found = Float8Quantizer(data.state.scale, data.state.amax, dtype, **usage)
    elif scaling == "current":
        found = Float8CurrentScalingQuantizer(dtype, data.device, **usage)
    else:
        found = Float8BlockQuantizer(dtype, block_scaling_dim=2 if scaling == "block_2d" else 1, **usage)
    found.internal = True  # the bare record that its modules work with, not a tensor subclass
    return found


def _decoded(x: Any, row: Row) -> Values:
    kind = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[row.options["encoding"]]
    if hasattr(x, "_scale_inv"):
        found = {"row": x._data.view(kind).float() * x._scale_inv}
        if x._transpose is not None:
            found["column"] = x._transpose.view(kind).float().t() * x._scale_inv
        return found
    two_d = x._is_2D_scaled
    found = {"row": _block_values(x._rowwise_data.view(kind), x._rowwise_scale_inv, two_d)}
    if x._columnwise_data is not None:
        found["column"] = _block_values(x._columnwise_data.view(kind), x._columnwise_scale_inv, two_d).t()
    return found


def _block_values(codes: torch.Tensor, scales: torch.Tensor, two_d: bool) -> torch.Tensor:
    """Scales are padded to fours; those of single rows lie with the rows innermost."""
    rows, k = codes.shape
    if two_d:
        scales = scales[: rows // 128, : k // 128].repeat_interleave(128, 0)
    else:
        scales = scales[: k // 128, :rows].t()
    return codes.float() * scales.repeat_interleave(128, 1)


def _values(out: Any, row: Row) -> Values:
    return {"out": out} if isinstance(out, torch.Tensor) else _decoded(out, row)


def _cast(row: Row, data: SimpleNamespace) -> Any:
    return _quantizer(row, data) if row.options.get("scaling") else None


def _quantize(row: Row, data: SimpleNamespace) -> Prepared:
    quantize, x, cast = _compiled().quantize, data.x, _quantizer(row, data)
    return Prepared(lambda: quantize(x, cast), lambda out: _decoded(out, row))


def _quantize_dbias(row: Row, data: SimpleNamespace) -> Prepared:
    fused, x, cast = _compiled().bgrad_quantize, data.x, _quantizer(row, data)
    return Prepared(lambda: fused(x, cast), lambda out: {"dbias": out[0], **_decoded(out[1], row)})


def _dequantize(row: Row, data: SimpleNamespace) -> Prepared:
    tex, dtype = _compiled(), _dtype("bf16")
    x = tex.quantize(data.x, _quantizer(row, data))
    return Prepared(lambda: tex.dequantize(x, dtype), lambda out: {"out": out})


def _norm_fwd(row: Row, data: SimpleNamespace) -> Prepared:
    tex, cast, dtype, x = _compiled(), _cast(row, data), _dtype("bf16"), data.x
    forward = tex.layernorm_fwd if row.options["kind"] == "layernorm" else tex.rmsnorm_fwd
    weights = (data.gamma,) if data.beta is None else (data.gamma, data.beta)
    rest = (EPSILON, None, cast, dtype, 0, False)
    if data.residual is None:
        return Prepared(lambda: forward(x, *weights, *rest)[0], lambda out: _values(out, row))

    def call() -> tuple[Any, torch.Tensor]:
        added = x + data.residual
        return forward(added, *weights, *rest)[0], added

    return Prepared(call, lambda out: {**_values(out[0], row), "residual": out[1]}, "an add, then the norm")


def _norm_bwd(row: Row, data: SimpleNamespace) -> Prepared:
    tex, add = _compiled(), data.add
    if row.options["kind"] == "layernorm":
        arguments = (data.dy, data.x, data.mean, data.rstd, data.gamma, 0, False)
        backward, names = tex.layernorm_bwd, ("dx", "dgamma", "dbeta")
    else:
        arguments, names = (data.dy, data.x, data.rstd, data.gamma, 0, False), ("dx", "dgamma")
        backward = tex.rmsnorm_bwd
    if add is None:
        return Prepared(lambda: backward(*arguments), lambda out: dict(zip(names, out)))

    def call() -> Any:
        dx, *others = backward(*arguments)
        return (dx + add, *others)

    return Prepared(call, lambda out: dict(zip(names, out)), "the norm, then autograd's add")


def _activation_fwd(row: Row, data: SimpleNamespace) -> Prepared:
    tex, x, cast = _compiled(), data.x, _cast(row, data)
    forward = getattr(tex, row.options["kind"])
    if row.options.get("scaling") == "block":
        return Prepared(lambda: tex.quantize(forward(x, None), cast), lambda out: _values(out, row), "two kernels")
    return Prepared(lambda: forward(x, cast), lambda out: _values(out, row))


def _activation_bwd(row: Row, data: SimpleNamespace) -> Prepared:
    tex, x, dy, cast = _compiled(), data.x, data.dy, _cast(row, data)
    backward, scaling = getattr(tex, "d" + row.options["kind"]), row.options.get("scaling")
    if not row.options["dbias"]:
        if scaling == "block":
            return Prepared(lambda: tex.quantize(backward(dy, x, None), cast), lambda out: _values(out, row))
        return Prepared(lambda: backward(dy, x, cast), lambda out: _values(out, row))
    if scaling == "delayed":
        fused = getattr(tex, "dbias_d" + row.options["kind"])
        call, note = (lambda: fused(dy, x, cast)), ""
    elif scaling:
        call, note = (lambda: tex.bgrad_quantize(backward(dy, x, None), cast)), "two kernels"
    else:
        call, note = functools.partial(_unfused_bias_gradient, backward, dy, x), "two kernels"
    return Prepared(call, lambda out: {"dbias": out[0], **_values(out[1], row)}, note)


def _unfused_bias_gradient(backward: Any, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dx = backward(dy, x, None)
    return dx.sum(0), dx


def _softmax_fwd(row: Row, data: SimpleNamespace) -> Prepared:
    tex, x = _compiled(), data.x
    if not row.options["causal"]:
        return Prepared(lambda: tex.scaled_softmax_forward(x, 1.0), lambda out: {"out": out})
    flat = x.flatten(0, 1)
    return Prepared(
        lambda: tex.scaled_upper_triang_masked_softmax_forward(flat, 1.0), lambda out: {"out": out.view(x.shape)}
    )


def _softmax_bwd(row: Row, data: SimpleNamespace) -> Prepared:
    # It writes over the gradient: a fresh copy for the comparison, its own buffer for the clock.
    tex, y, dy = _compiled(), data.y, data.dy.clone()
    return Prepared(
        lambda: tex.scaled_softmax_backward(dy, y, 1.0), lambda out: {"out": out}, "in place, over the gradient"
    )


def _rope(row: Row, data: SimpleNamespace) -> Prepared:
    from transformer_engine.pytorch.cpp_extensions.fused_attn import QKVFormat

    tex = _compiled()
    turn = tex.fused_rope_forward if row.operation == "rope_fwd" else tex.fused_rope_backward
    arguments = (data.x, data.freqs, None, QKVFormat["sbhd"], False, None, 1, 0)
    return Prepared(lambda: turn(*arguments), lambda out: {"out": out})


def _dropout_add(row: Row, data: SimpleNamespace) -> Prepared:
    from transformer_engine.pytorch.jit import bias_dropout_add_fused_train

    x, bias, residual = (t.detach().requires_grad_() for t in (data.x, data.bias, data.residual))
    p = row.options["p"]
    return Prepared(
        lambda: bias_dropout_add_fused_train(x, bias, residual, p),
        lambda out: dropped(row, data, out.detach()),
        "torch.compile's kernel",
    )


def _adam(row: Row, data: SimpleNamespace) -> Prepared:
    params, grads, m, v = ([t.clone() for t in x] for x in (data.params, data.grads, data.exp_avgs, data.exp_avg_sqs))
    lists = [grads, params, m, v]
    if row.options["master"]:
        lists.append([t.clone() for t in data.master])
    step, noop = _compiled().multi_tensor_adam, torch.zeros(1, dtype=torch.int32, device=data.device)
    constants = (ADAM["lr"], ADAM["beta1"], ADAM["beta2"], ADAM["eps"], 1, 1, 1, ADAM["weight_decay"])
    return Prepared(
        lambda: step(CHUNK, noop, lists, *constants),
        lambda _: {"param": params[0], "exp_avg": m[0], "exp_avg_sq": v[0]},
    )


def _l2norm(row: Row, data: SimpleNamespace) -> Prepared:
    norm, noop = _compiled().multi_tensor_l2norm, torch.zeros(1, dtype=torch.int32, device=data.device)
    return Prepared(lambda: norm(CHUNK, noop, [data.grads], False)[0], lambda out: {"out": out.reshape(1)})


def _gemm(row: Row, data: SimpleNamespace) -> Prepared:
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    kind, scaling = row.options["kind"], row.options["scaling"]
    # Its layouts are named in column-major order, the weight first.
    layout = {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}[kind]
    a = data.a if kind != "wgrad" else data.a.t().contiguous()
    b = data.b if kind == "fprop" else data.b.t().contiguous()
    if scaling != "bf16":
        gradient = "e5m2" if kind != "fprop" and scaling == "delayed" else "e4m3fn"
        weight = "block_2d" if scaling == "block" and kind != "wgrad" else scaling
        quantize = _compiled().quantize
        a = quantize(a, _quantizer(row, data, encoding=gradient))
        b = quantize(b, _quantizer(row, data, weight, "e4m3fn"))
    options = {
        "out_dtype": torch.bfloat16,
        "layout": layout,
        "grad": kind != "fprop",
        "use_split_accumulator": kind != "fprop",
    }
    return Prepared(lambda: general_gemm(b, a, **options)[0], lambda out: {"out": out})


def _attention(row: Row, data: SimpleNamespace) -> Prepared:
    from transformer_engine.pytorch import DotProductAttention

    s, b, h, d = data.shape
    module = DotProductAttention(h, d, attention_dropout=0.0, qkv_format="sbhd", attn_mask_type="causal")
    packed, dout = data.packed.detach().requires_grad_(), data.dout.reshape(s, b, h * d)

    def call() -> Any:
        q, k, v = packed.unbind(2)
        out = module(q, k, v)
        if not row.options["backward"]:
            return out, None
        return out, torch.autograd.grad(out, (q, k, v), dout)

    def values(result: Any) -> Values:
        out, grads = result
        found = {"out": out.view(s, b, h, d), **dict(zip(("dq", "dk", "dv"), grads or ()))}
        return {name: value.detach()[:, :1, :2] for name, value in found.items()}

    return Prepared(call, values, "its module")


def _update_scales(row: Row, data: SimpleNamespace) -> Prepared:
    update = _compiled().fused_amax_and_scale_update_after_reduction
    history, scales = data.history.clone(), data.scales.clone()
    latest, dtype = torch.full((data.shape[1],), NEW_AMAX, device=data.device), _dtype("e4m3fn")
    if data.device.type != "cuda":
        raise Refused("no CUDA device")

    def call() -> torch.Tensor:
        latest.fill_(NEW_AMAX)
        update(latest, [history], [scales], "max", dtype, 0)
        return scales

    return Prepared(call, lambda out: {"scales": out})


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
