# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Forwards and their backwards: how one is called behind the other, and the forward in float64, to be differentiated.

The formulas are the operators' contracts', written once more, in PyTorch's float64 operations. Nothing of a backward is
written here but what the rounding of a forward's results does to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from te_dispatch.conformance.bounds.attention_own import own
from te_dispatch.conformance.bounds.position import rotated
from te_dispatch.conformance.casting import values
from te_dispatch.conformance.families.position import positions
from te_dispatch.conformance.space import Arguments
from te_dispatch.conformance.spread import spread
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.activation import CLAMPED_SWIGLU, GATED

#: Argument -> its value in float64, which derivatives are taken by.
Leaves = Mapping[str, torch.Tensor]
#: Results of a forward by path.
Results = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Pair:
    """A forward and its backward.

    Attributes:
        forward, backward: operators.
        output: path of the forward's result whose gradient the backward is given.
        gradients: path of the backward's result -> the forward's argument that it is the gradient of.
        arguments: (the forward's arguments, its result, the output's gradient) -> the backward's.
        formula: (leaves, the forward's arguments, the backward's) -> the output, float64.
        options: of the forward that have no gradient, or none that is wanted here: left out.
        carried: (the backward's arguments, limits of the forward's results by path) -> how far the rounding of what the
            forward gave moves the gradients, by the backward's paths; None where it gives them nothing rounded.
    """

    forward: str
    backward: str
    output: str
    gradients: Mapping[str, str]
    arguments: Callable[[Arguments, Any, torch.Tensor], Arguments]
    formula: Callable[[Leaves, Arguments, Arguments], torch.Tensor]
    options: tuple[str, ...] = ("quantizer", "usage", "with_y", "with_out")
    carried: Callable[[Arguments, Results], Mapping[str, torch.Tensor]] | None = None


# -- normalization ----------------------------------------------------------------------------------------------------


def _norm_arguments(given: Arguments, result: Any, dout: torch.Tensor) -> Arguments:
    x = given["x"] if result.residual_out is None else result.residual_out
    made: Arguments = {"dy": dout, "x": x, "gamma": given["gamma"], "rstd": result.rstd}
    made["zero_centered_gamma"] = given.get("zero_centered_gamma", False)
    return made if result.mean is None else {**made, "mean": result.mean}


def _norm(leaves: Leaves, given: Arguments, behind: Arguments) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) gamma + beta; RMSNorm without the mean."""
    x, gamma = leaves["x"], leaves["gamma"]
    if "mean" in behind:
        x = x - x.mean(-1, keepdim=True)
    y: torch.Tensor = x * (x.square().mean(-1, keepdim=True) + given.get("eps", 1e-5)).rsqrt()
    y = y * (1 + gamma if given.get("zero_centered_gamma") else gamma)
    if given.get("beta") is not None:
        y = y + leaves["beta"]
    return y


def _norm_carried(behind: Arguments, limits: Results) -> Mapping[str, torch.Tensor]:
    """dx = r (g - h mean(g h) - mean(g)), h = (x - mean) r: errors of r and of the mean reach h as
    e = (r + dr) dmean + |x - mean| dr, and dx as dr |inner| + (r + dr) (e |mean(g h)| + (|h| + e) mean(|g| e))."""
    x, dy = (behind[name].double().reshape(-1, behind["x"].shape[-1]) for name in ("x", "dy"))
    r, dr = behind["rstd"].double().reshape(-1, 1), limits["rstd"].reshape(-1, 1)
    centre, moved = x, torch.zeros_like(r)
    if "mean" in behind:
        centre, moved = x - behind["mean"].double().reshape(-1, 1), limits["mean"].reshape(-1, 1)
    gamma = behind["gamma"].double()
    g = dy * (1 + gamma if behind["zero_centered_gamma"] else gamma)
    h, e = centre * r, (r + dr) * moved + centre.abs() * dr
    along = (g * h).mean(-1, keepdim=True)
    inner = (g - h * along).abs() + g.abs().mean(-1, keepdim=True)
    dx = dr * inner + (r + dr) * (e * along.abs() + (h.abs() + e) * (g.abs() * e).mean(-1, keepdim=True))
    return {"dx": dx.reshape(behind["x"].shape), "dgamma": (dy.abs() * e).sum(0)}


# -- elementwise ------------------------------------------------------------------------------------------------------


def _act(kind: str, x: torch.Tensor) -> torch.Tensor:
    if kind == "gelu":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if kind == "relu":
        return torch.relu(x)
    if kind == "srelu":
        return torch.relu(x).square()
    return x * torch.sigmoid((1.702 if kind == "qgelu" else 1.0) * x)


#: Gated kind -> the plain one of its first half.
_FIRST = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def _activation(leaves: Leaves, given: Arguments, behind: Arguments) -> torch.Tensor:
    x, kind = leaves["x"], given["kind"]
    if kind not in GATED:
        return _act(kind, x)
    u, v = x.chunk(2, -1)
    if kind == "glu":
        return torch.sigmoid(u) * v
    if kind == "clamped_swiglu":
        limit, alpha = given.get("params") or CLAMPED_SWIGLU
        u, v = u.clamp_max(limit), v.clamp(-limit, limit)
        return u * torch.sigmoid(alpha * u) * (v + 1)
    return _act(_FIRST[kind], u) * v


def _activation_arguments(given: Arguments, result: Any, dout: torch.Tensor) -> Arguments:
    return {"dy": dout, "x": given["x"], "kind": given["kind"], "params": given.get("params")}


def _softmax(leaves: Leaves, given: Arguments, behind: Arguments) -> torch.Tensor:
    z = given.get("scale", 1.0) * leaves["x"]
    hidden = torch.zeros(z.shape, dtype=torch.bool)
    if given.get("mask") is not None:
        hidden = hidden | given["mask"]
    if given.get("causal"):
        hidden = hidden | torch.ones(z.shape[-2:], dtype=torch.bool).triu(1)
    empty = hidden.all(-1, keepdim=True)
    return torch.softmax(z.masked_fill(hidden & ~empty, -torch.inf), -1).masked_fill(hidden, 0.0)


def _softmax_carried(behind: Arguments, limits: Results) -> Mapping[str, torch.Tensor]:
    """dx = scale y (dy - sum dy y): an error e of y moves it by e (|dy| + sum |dy| (y + e)) + y sum |dy| e."""
    y, dy, e = behind["y"].double().abs(), behind["dy"].double().abs(), limits["result"]
    moved = e * (dy + (dy * (y + e)).sum(-1, keepdim=True)) + y * (dy * e).sum(-1, keepdim=True)
    return {"result": abs(behind["scale"]) * moved}


def _rope(leaves: Leaves, given: Arguments, behind: Arguments) -> torch.Tensor:
    freqs, found = given["freqs"], positions(leaves["x"], given)
    angles = freqs.reshape(freqs.shape[0], freqs.shape[-1])[found.clamp_min(0)].unsqueeze(-2)
    turned = rotated(leaves["x"], angles, given.get("interleaved", False), False).value
    return torch.where((found >= 0)[..., None, None], turned, 0.0)


def _rope_arguments(given: Arguments, result: Any, dout: torch.Tensor) -> Arguments:
    return {"dy": dout, **{name: value for name, value in given.items() if name != "x"}}


def _dropout_add(leaves: Leaves, given: Arguments, behind: Arguments) -> torch.Tensor:
    """With the mask that the forward drew."""
    keep = 1.0 if behind["mask"] is None else behind["mask"].double() / (1 - given["dropout_p"])
    return leaves["x"] * keep


# -- mixture of experts -----------------------------------------------------------------------------------------------


def _moe_permute(leaves: Leaves, given: Arguments, behind: Arguments) -> torch.Tensor:
    row_map = behind["row_map"]
    kept = row_map >= 0
    token = torch.arange(row_map.shape[0])[:, None].expand(row_map.shape)
    out = torch.zeros(behind["x"].shape, dtype=torch.float64)
    return out.index_copy(0, row_map[kept].long(), leaves["x"][token[kept]])


def _moe_unpermute(leaves: Leaves, given: Arguments, behind: Arguments) -> torch.Tensor:
    row_map = given["row_map"]
    kept = row_map >= 0
    token = torch.arange(row_map.shape[0])[:, None].expand(row_map.shape)[kept]
    rows = leaves["x"][row_map[kept].long()]
    if given.get("probs") is not None:
        rows = rows * leaves["probs"][kept][:, None]
    out = torch.zeros((row_map.shape[0], leaves["x"].shape[1]), dtype=torch.float64)
    return out.index_add(0, token, rows)


# -- attention --------------------------------------------------------------------------------------------------------


def _attention_arguments(given: Arguments, result: Any, dout: torch.Tensor) -> Arguments:
    forward_only = ("inference", "with_max_logit", "out_dtype", "out_quantizer", "page_table")
    made = {name: value for name, value in given.items() if name not in forward_only}
    made |= {"dout": dout, "out": result.out, "lse": result.lse, "saved": result.saved}
    return {**made, "with_dbias": given.get("bias") is not None}


def _attention(leaves: Leaves, given: Arguments, behind: Arguments) -> torch.Tensor:
    """The kit's plain attention, in float64."""
    tensors = {**given, **{name: _as(leaves[name], given[name]) for name in ("q", "k", "v")}}
    call = spread({**tensors, **{name: leaves[name] for name in ("bias", "softmax_offset") if name in leaves}})
    out = own(call, torch.float64).out
    return call.queries.write(out).reshape(*given["q"].shape[:-1], given["v"].shape[-1])


def _as(leaf: torch.Tensor, like: Any) -> torch.Tensor:
    return leaf.reshape(like.shape)


def leaf(x: Any) -> torch.Tensor:
    """An argument's value in float64, with a derivative."""
    found = values(x).reshape(x.shape) if isinstance(x, Quantized) else x.double()
    return found.clone().requires_grad_()


_NORM = {"dx": "x", "dgamma": "gamma", "dbeta": "beta"}

#: The forward's operator -> the pair.
PAIRS = {
    pair.forward: pair
    for pair in (
        Pair("layernorm_fwd", "layernorm_bwd", "y", _NORM, _norm_arguments, _norm, carried=_norm_carried),
        Pair("rmsnorm_fwd", "rmsnorm_bwd", "y", _NORM, _norm_arguments, _norm, carried=_norm_carried),
        Pair("activation_fwd", "activation_bwd", "out", {"dx": "x"}, _activation_arguments, _activation),
        Pair(
            "softmax_fwd", "softmax_bwd", "result", {"result": "x"},
            lambda given, result, dout: {"dy": dout, "y": result, "scale": given.get("scale", 1.0)}, _softmax,
            carried=_softmax_carried,
        ),
        Pair("rope_fwd", "rope_bwd", "result", {"result": "x"}, _rope_arguments, _rope),
        Pair(
            "dropout_add_fwd", "dropout_add_bwd", "out", {"result": "x"},
            lambda given, result, dout: {"dy": dout, "mask": result.mask, "dropout_p": given.get("dropout_p", 0.0)},
            _dropout_add,
        ),
        Pair(
            "moe_permute", "moe_unpermute", "permuted", {"result": "x"},
            lambda given, result, dout: {"x": dout, "row_map": result.row_map}, _moe_permute,
        ),
        Pair(
            "moe_unpermute", "moe_unpermute_bwd", "result", {"dinput": "x", "dprobs": "probs"},
            lambda given, result, dout: {"dy": dout, **given}, _moe_unpermute,
        ),
        Pair(
            "attention_fwd", "attention_bwd", "out",
            {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsoftmax_offset": "softmax_offset"},
            _attention_arguments, _attention,
            options=("inference", "with_max_logit", "s_quantizer", "out_quantizer", "out_dtype"),
        ),
    )
}  # fmt: skip
