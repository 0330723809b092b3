# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""PyTorch without this project: what a model writes that imports nothing else. Eager, with PyTorch's fused calls."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from side_by_side.inputs import ADAM, EPSILON, NEW_AMAX, SCALE, activate, dropped, rotated
from side_by_side.rivals import Prepared, Refused
from side_by_side.rows import Row

NAME = "pytorch"
scope = contextlib.nullcontext
Values = dict[str, torch.Tensor]
FLOAT8 = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def missing() -> str | None:
    return None


def _cast(x: torch.Tensor, row: Row, data: SimpleNamespace) -> dict[str, Any]:
    """The codes with their inverse scale, and transposed where the row asks for it."""
    encoding = FLOAT8[row.options["encoding"]]
    largest = torch.finfo(encoding).max
    if row.options["scaling"] == "delayed":
        scale = data.state.scale
        torch.maximum(data.state.amax, x.abs().amax().float(), out=data.state.amax)
    elif row.options["scaling"] == "current":
        scale = largest / x.abs().amax().float()
    else:
        raise Refused("PyTorch has no block cast")
    codes = (x.float() * scale).clamp(-largest, largest).to(encoding)
    found = {"row": codes, "scale_inv": scale.reciprocal()}
    return {**found, "column": codes.t().contiguous()} if row.options["usage"] == "both" else found


def _decoded(cast: dict[str, Any]) -> Values:
    found = {"row": cast["row"].float() * cast["scale_inv"]}
    return {**found, "column": cast["column"].float().t() * cast["scale_inv"]} if "column" in cast else found


def _finish(row: Row, data: SimpleNamespace, x: torch.Tensor) -> Any:
    return _cast(x, row, data) if row.options.get("scaling") else x


def _values(out: Any) -> Values:
    return _decoded(out) if isinstance(out, dict) else {"out": out}


def _quantize(row: Row, data: SimpleNamespace) -> Prepared:
    return Prepared(lambda: _cast(data.x, row, data), _decoded)


def _quantize_dbias(row: Row, data: SimpleNamespace) -> Prepared:
    return Prepared(
        lambda: (_cast(data.x, row, data), data.x.sum(0)), lambda out: {**_decoded(out[0]), "dbias": out[1]}
    )


def _dequantize(row: Row, data: SimpleNamespace) -> Prepared:
    x, inverse = _cast(data.x, row, data)["row"], 1 / data.state.scale
    return Prepared(lambda: x.to(torch.bfloat16) * inverse.to(torch.bfloat16), lambda out: {"out": out})


def _normalize(row: Row, data: SimpleNamespace) -> Any:
    if row.options["kind"] == "layernorm":
        return lambda x: F.layer_norm(x, x.shape[-1:], data.gamma, data.beta, EPSILON)
    return lambda x: F.rms_norm(x, x.shape[-1:], data.gamma, EPSILON)


def _norm_fwd(row: Row, data: SimpleNamespace) -> Prepared:
    norm = _normalize(row, data)
    if data.residual is None:
        return Prepared(lambda: _finish(row, data, norm(data.x)), _values)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        x = data.x + data.residual
        return norm(x), x

    return Prepared(call, lambda out: {"out": out[0], "residual": out[1]})


def _norm_bwd(row: Row, data: SimpleNamespace) -> Prepared:
    x, gamma = (t.detach().requires_grad_() for t in (data.x, data.gamma))
    shape = x.shape[-1:]
    if row.options["kind"] == "layernorm":
        mean, rstd = data.mean[:, None], data.rstd[:, None]

        def gradients() -> Any:
            grads = torch.ops.aten.native_layer_norm_backward(
                data.dy, data.x, shape, mean, rstd, data.gamma, data.beta, [True, True, True]
            )
            return grads if data.add is None else (grads[0] + data.add, *grads[1:])

        return Prepared(gradients, lambda out: dict(zip(("dx", "dgamma", "dbeta"), out)))
    y = F.rms_norm(x, shape, gamma, EPSILON)

    def through_autograd() -> Any:
        dx, dgamma = torch.autograd.grad(y, (x, gamma), data.dy, retain_graph=True)
        return (dx if data.add is None else dx + data.add), dgamma

    return Prepared(through_autograd, lambda out: {"dx": out[0], "dgamma": out[1]}, "through autograd")


def _activation_fwd(row: Row, data: SimpleNamespace) -> Prepared:
    return Prepared(lambda: _finish(row, data, activate(data.x, row.options["kind"])), _values)


def _activation_bwd(row: Row, data: SimpleNamespace) -> Prepared:
    x, dy = data.x, data.dy

    def gradient() -> torch.Tensor:
        if row.options["kind"] == "gelu":
            return torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
        left, right = x.chunk(2, -1)
        return torch.cat((torch.ops.aten.silu_backward(dy * right, left), dy * F.silu(left)), -1)

    def call() -> Any:
        dx = gradient()
        return _finish(row, data, dx), dx.sum(0) if row.options["dbias"] else None

    return Prepared(call, lambda out: {**_values(out[0]), **({} if out[1] is None else {"dbias": out[1]})})


def _softmax_fwd(row: Row, data: SimpleNamespace) -> Prepared:
    if not row.options["causal"]:
        return Prepared(lambda: torch.softmax(data.x, -1), lambda out: {"out": out})
    mask = torch.ones(data.x.shape[-2:], dtype=torch.bool, device=data.device).triu(1)
    return Prepared(
        lambda: torch.softmax(data.x.masked_fill(mask, -torch.inf), -1), lambda out: {"out": out}, "mask, then softmax"
    )


def _softmax_bwd(row: Row, data: SimpleNamespace) -> Prepared:
    return Prepared(
        lambda: torch.ops.aten._softmax_backward_data(data.dy, data.y, -1, torch.bfloat16), lambda out: {"out": out}
    )


def _rope(row: Row, data: SimpleNamespace) -> Prepared:
    sign = 1.0 if row.operation == "rope_fwd" else -1.0
    return Prepared(lambda: rotated(data.x, data.freqs, sign), lambda out: {"out": out})


def _dropout_add(row: Row, data: SimpleNamespace) -> Prepared:
    p = row.options["p"]
    return Prepared(lambda: F.dropout(data.x + data.bias, p) + data.residual, lambda out: dropped(row, data, out))


def _adam(row: Row, data: SimpleNamespace) -> Prepared:
    if row.options["master"]:
        raise Refused("PyTorch's Adam keeps no fp32 master weights")
    params, grads, m, v = ([t.clone() for t in x] for x in (data.params, data.grads, data.exp_avgs, data.exp_avg_sqs))
    steps = [torch.zeros((), device=data.device) for _ in params]
    options = {**ADAM, "amsgrad": False, "maximize": False}
    ones = [torch.ones((), device=data.device) for _ in params]

    def call() -> None:
        torch._foreach_copy_(steps, ones)
        torch._fused_adamw_(params, grads, m, v, [], steps, **options)

    return Prepared(call, lambda _: {"param": params[0], "exp_avg": m[0], "exp_avg_sq": v[0]}, "fused AdamW")


def _l2norm(row: Row, data: SimpleNamespace) -> Prepared:
    return Prepared(
        lambda: torch.stack(torch._foreach_norm(data.grads, dtype=torch.float32)).norm().reshape(1),
        lambda out: {"out": out},
    )


def _gemm(row: Row, data: SimpleNamespace) -> Prepared:
    kind, scaling = row.options["kind"], row.options["scaling"]
    a, b = data.a, data.b
    if scaling == "bf16":
        if kind == "fprop":
            return Prepared(lambda: a @ b.t(), lambda out: {"out": out})
        right = b.t().contiguous()
        if kind == "dgrad":
            return Prepared(lambda: a @ right, lambda out: {"out": out})
        left = a.t().contiguous()
        return Prepared(lambda: left.t() @ right, lambda out: {"out": out})
    if scaling == "block":
        return _block_gemm(a, b, kind)
    inverse = torch.full((), 1 / SCALE, device=data.device)
    gradient = FLOAT8["e5m2" if kind != "fprop" else "e4m3fn"]
    left, right = (a.float() * SCALE).to(gradient), (b.float() * SCALE).to(torch.float8_e4m3fn).t()
    fast = kind == "fprop"
    return Prepared(
        lambda: torch._scaled_mm(left, right, inverse, inverse, out_dtype=torch.bfloat16, use_fast_accum=fast),
        lambda out: {"out": out},
        "torch._scaled_mm",
    )


def _block_gemm(a: torch.Tensor, b: torch.Tensor, kind: str) -> Prepared:
    two_d = kind != "wgrad"
    left, left_scale = _blocks(a, 1)
    right, right_scale = _blocks(b, 128 if two_d else 1)
    # torch._scaled_mm wants scales of single rows with the rows innermost.
    left_scale = left_scale.t().contiguous().t()
    right_scale = right_scale.t() if two_d else right_scale.t().contiguous()
    return Prepared(
        lambda: torch._scaled_mm(left, right.t(), left_scale, right_scale, out_dtype=torch.bfloat16),
        lambda out: {"out": out},
        "torch._scaled_mm",
    )


def _blocks(x: torch.Tensor, height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and inverse scales of blocks of `height` x 128."""
    rows, k = x.shape
    tiles = x.float().view(rows // height, height, k // 128, 128)
    scale = 448.0 / tiles.abs().amax((1, 3), keepdim=True)
    codes = (tiles * scale).to(torch.float8_e4m3fn).view(rows, k)
    return codes, scale.reciprocal().view(rows // height, k // 128)


def _attention(row: Row, data: SimpleNamespace) -> Prepared:
    packed = data.packed.detach().requires_grad_(row.options["backward"])
    dout = data.dout.permute(1, 2, 0, 3)
    on_gpu = data.device.type == "cuda"

    def call() -> Any:
        q, k, v = (t.permute(1, 2, 0, 3) for t in packed.unbind(2))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if on_gpu else contextlib.nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if not row.options["backward"]:
            return out, None
        return out, torch.autograd.grad(out, (q, k, v), dout)

    def values(result: Any) -> Values:
        out, grads = result
        found = {"out": out, **dict(zip(("dq", "dk", "dv"), grads or ()))}
        return {name: value.detach().permute(2, 0, 1, 3)[:, :1, :2] for name, value in found.items()}

    return Prepared(call, values, "SDPA on cuDNN" if on_gpu else "SDPA")


def _update_scales(row: Row, data: SimpleNamespace) -> Prepared:
    history, scales = data.history.clone(), data.scales.clone()

    def call() -> torch.Tensor:
        history[0].fill_(NEW_AMAX)
        amax = history.amax(0)
        history.copy_(history.roll(-1, 0))
        history[0].zero_()
        scales.copy_(torch.where(amax > 0, 448.0 / amax, scales))
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
