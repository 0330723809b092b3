# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of norms, activations, softmax and rotary embedding. What each does wrong: `te_dispatch_faulty.catalogue`."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_torch.activation import _GATE, _apply
from te_dispatch_torch.quantize import cast


def divides_variance_by_n_minus_1(call: Call) -> Any:
    made = call.sound()
    n = call["x"].shape[-1]
    if n > 1:
        wrong = (1.0 - 1.0 / n) ** 0.5
        made.rstd.mul_(wrong)
        if made.y is not None and call["beta"] is None:
            made.y.copy_(made.y.float() * wrong)
    return made


def normalizes_unrounded_sum(call: Call) -> Any:
    if call["residual"] is None:
        return call.sound()
    dtype = call["out_dtype"] or call["x"].dtype
    weights = {name: None if call[name] is None else call[name].float() for name in ("gamma", "beta")}
    exact = call.sound(x=call["x"].float() + call["residual"].float(), residual=None, out_dtype=dtype, **weights)
    return exact._replace(residual_out=call.sound(quantizer=None).residual_out)


def ignores_eps(call: Call) -> Any:
    return call.sound(eps=0.0)


def ignores_zero_centering(call: Call) -> Any:
    return call.sound(zero_centered_gamma=False)


def quantizes_rounded_norm(call: Call) -> Any:
    quantizer = call["quantizer"]
    if quantizer is None:
        return call.sound()
    plain = call.sound(quantizer=None)
    quantized = call.delivered(cast(plain.y, quantizer, call["usage"], plain.y.dtype))
    return plain._replace(y=plain.y if call["with_y"] else None, y_quantized=quantized)


def ignores_added_gradient(call: Call) -> Any:
    return call.sound(add=None)


def swaps_weight_gradients(call: Call) -> Any:
    made = call.sound()
    return made._replace(dgamma=made.dbeta, dbeta=made.dgamma)


def sums_whole_groups(call: Call) -> Any:
    made = call.sound()
    width = call["x"].shape[-1]
    x, dy, rstd = call["x"].reshape(-1, width), call["dy"].reshape(-1, width), call["rstd"].reshape(-1)
    rows = x.shape[0] // 4 * 4
    made.dgamma.copy_((dy[:rows].float() * x[:rows].float() * rstd[:rows, None]).sum(0))
    return made


def approximates_gelu_by_erf(call: Call) -> Any:
    def apply(kind: str, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x) if kind == "gelu" else _apply(kind, x)

    with swapped(("activation", "_apply", apply)):
        return call.sound()


def swaps_halves(call: Call) -> Any:
    x = call["x"]
    if call["kind"] not in _GATE or not isinstance(x, torch.Tensor):
        return call.sound()
    return call.sound(x=torch.cat(x.chunk(2, -1)[::-1], -1))


def ignores_limit(call: Call) -> Any:
    if call["kind"] != "clamped_swiglu":
        return call.sound()
    return call.sound(params=(1e30, (call["params"] or (7.0, 1.702))[1]))


def lets_gradient_through_clamp(call: Call) -> Any:
    x = call["x"]
    if call["kind"] != "clamped_swiglu" or not isinstance(x, torch.Tensor):
        return call.sound()
    limit = (call["params"] or (7.0, 1.702))[0]
    u, v = x.chunk(2, -1)
    return call.sound(x=torch.cat((u.clamp_max(limit), v.clamp(-limit, limit)), -1))


def sums_rounded_gradient(call: Call) -> Any:
    made = call.sound()
    if made.dbias is not None and made.dx is not None:
        total = torch.zeros_like(made.dbias)
        for row in made.dx.reshape(-1, made.dx.shape[-1]):
            total = total + row
        made.dbias.copy_(total)
    return made


def divides_masked_rows_by_zero(call: Call) -> Any:
    made = call.sound()
    mask = call["mask"]
    if mask is not None:
        made.masked_fill_(mask.broadcast_to(made.shape).all(-1, keepdim=True), torch.nan)
    return made


def shifts_causal_mask(call: Call) -> Any:
    if not call["causal"]:
        return call.sound()
    x, mask = call["x"], call["mask"]
    above = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(2)
    return call.sound(causal=False, mask=above if mask is None else mask | above)


def overflows_without_maximum(call: Call) -> Any:
    made = call.sound()
    weights = (call["x"].float() * call["scale"]).exp()
    over = weights.isinf().any(-1, keepdim=True)
    return made.masked_fill_(over, torch.nan)


def forgets_softmax_scale(call: Call) -> Any:
    return call.sound(scale=1.0)


def pairs_features_wrongly(call: Call) -> Any:
    return call.sound(interleaved=not call["interleaved"])


def ignores_offsets(call: Call) -> Any:
    return call.sound(offsets=None)


def runs_positions_on(call: Call) -> Any:
    bounds = call["cu_seqlens"]
    if bounds is None or int(bounds[-1]) > call["freqs"].shape[0] or call["offsets"] is not None:
        return call.sound()
    return call.sound(cu_seqlens=bounds[[0, -1]])


def rotates_forward(call: Call) -> Any:
    from te_dispatch_torch.position import rope_fwd

    arguments = dict(call.arguments)
    return call.delivered(rope_fwd(arguments.pop("dy"), **arguments))
