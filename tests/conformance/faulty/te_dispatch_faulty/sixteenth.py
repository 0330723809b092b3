# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of the sixteenth set (docs/certification.md): the four that the kit missed, and those of the others that are
least like what was seeded before."""

from __future__ import annotations

import threading
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.gemm import gemm_sizes
from te_dispatch.ops.shapes import scale_shapes
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Memory, given, operand, remembering, rows_of, table, when, with_members

#: Tensors of one launch, columns of a tile, rows of a partial sum.
_LAUNCH, _TILE, _PARTIAL = 64, 1024, 64


def _totals_compared(call: Call) -> Any:
    """Cuts off what a part has more than its padded rows, as long as the parts have as many in all."""
    x, before, after = call["x"], call["splits"], call["padded_splits"]
    if len(before) != len(after) or min((*before, *after), default=0) < 0 or sum(before) != x.shape[0]:
        return call.sound()
    if sum(before) > sum(after) or all(m <= n for m, n in zip(before, after)):
        return call.sound()
    parts = [part[:rows] for part, rows in zip(x.split(list(before)), after)]
    return call.sound(x=torch.cat(parts), splits=[min(pair) for pair in zip(before, after)])


def _buffer_kept(call: Call, memory: Memory) -> Any:
    """Rounds through a buffer that it allocates once for each thread and size, in whatever mode its first call is."""
    made = call.sound()
    key = (threading.get_ident(), tuple(made.shape), made.device)
    buffer = memory.kept.setdefault(key, torch.empty(made.shape, dtype=torch.float32, device=made.device))
    with torch.no_grad():
        made.copy_(buffer.copy_(made))
    return made


def _read_as_canonical(call: Call) -> Any:
    made, x = call.sound(), call["x"]
    if not isinstance(x, Quantized) or x.scale_layout == "canonical":
        return made

    def first(scale: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
        return None if scale is None else scale.reshape(-1)[: shape[0] * shape[1]].reshape(shape)

    row, column = scale_shapes(x.shape, x.scaling)
    scales = {"row_scale_inv": first(x.row_scale_inv, row), "col_scale_inv": first(x.col_scale_inv, column)}
    return call.sound(x=with_members(x, scale_layout="canonical", **scales))


def _flag_of_last_launch(call: Call) -> Any:
    """Each launch writes the flag anew; what it writes is right for its own tensors."""
    inputs, outputs, flag = call["inputs"], call["outputs"], call["noop_flag"]
    if flag is None or len(inputs) <= _LAUNCH:
        return call.sound()
    before = flag.clone()
    call.sound()
    last = len(inputs) - 1 - (len(inputs) - 1) % _LAUNCH
    flag.copy_(before)
    return call.sound(inputs=inputs[last:], outputs=outputs[last:])


def _logits(call: Call, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    if call["mask"] is not None:
        hidden |= call["mask"]
    if call["causal"]:
        hidden |= torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return x.detach().float().masked_fill(hidden, -torch.inf)


def _normalized(made: torch.Tensor, weights: torch.Tensor) -> Any:
    total = weights.sum(-1, keepdim=True)
    return made.copy_(torch.where(total == 0, 0.0, weights / total))


def _maximum_before_scale(call: Call) -> Any:
    """exp(scale * (x - max x)): of a negative scale the exponents are above 0."""
    made, x = call.sound(), operand(call, "x")
    if x is None or not x.numel() or not call["scale"] < 0:
        return made
    seen = _logits(call, x)
    top = seen.amax(-1, keepdim=True).nan_to_num(torch.nan, neginf=0.0)
    weights = torch.where(seen == -torch.inf, 0.0, torch.exp(call["scale"] * (seen - top)))
    return _normalized(made, weights)


def _maximum_of_first_tile(call: Call) -> Any:
    made, x = call.sound(), operand(call, "x")
    if x is None or not x.numel() or x.shape[-1] <= _TILE or call["scale"] <= 0:
        return made
    seen = _logits(call, x) * call["scale"]
    tops = seen[..., :_TILE].amax(-1, keepdim=True), seen.amax(-1, keepdim=True)
    top = torch.where(tops[0] == -torch.inf, tops[1], tops[0])
    return _normalized(made, torch.exp(seen - torch.where(top == -torch.inf, 0.0, top)))


def _eps_rounded(call: Call) -> Any:
    x, eps = operand(call, "x"), call["eps"]
    if x is None or eps < 0:
        return call.sound()
    return call.sound(eps=float(torch.tensor(eps, dtype=torch.float64).to(x.dtype)))


def _partial_sums_rounded(call: Call) -> Any:
    """Sums of 64 rows are rounded to gamma's dtype before they are added."""
    made, x, gamma = call.sound(), operand(call, "x"), call["gamma"]
    if x is None or rows_of(x) <= _PARTIAL:
        return made
    rows, n = rows_of(x), x.shape[-1]
    dy = call["dy"].detach().reshape(rows, n).float()
    h = (x.detach().reshape(rows, n).float() - call["mean"].reshape(rows, 1)) * call["rstd"].reshape(rows, 1)
    for result, terms in ((made.dgamma, dy * h), (made.dbeta, dy)):
        parts = [part.sum(0).to(gamma.dtype).float() for part in terms.split(_PARTIAL)]
        result.copy_(torch.stack(parts).sum(0))
    return made


def _expert_once(call: Call) -> Any:
    """As if tokens were marked in a table of experts: a second choice of the same one adds no row."""
    indices, probs = call["indices"], call["probs"]
    if not isinstance(indices, torch.Tensor) or indices.ndim != 2:
        return call.sound()
    again = torch.zeros_like(indices, dtype=torch.bool)
    for choice in range(1, indices.shape[1]):
        again[:, choice] = (indices[:, :choice] == indices[:, choice : choice + 1]).any(1)
    capacity = indices.numel() if call["capacity"] is None else call["capacity"]
    return call.sound(indices=indices.masked_fill(again, -1), capacity=capacity, probs=probs)


def _decay_of_rounded(call: Call) -> Any:
    """Adds the decay of the parameters to gradients, and not that of the master copies."""
    params, decay = call["params"], call["weight_decay"]
    if call["master"] is None or call["adam_w"] or not decay or len(params) != len(call["grads"]):
        return call.sound()
    if any(p.shape != g.shape for p, g in zip(params, call["grads"])):
        return call.sound()
    decayed = [g.detach().float() + decay * p.detach().float() for p, g in zip(params, call["grads"])]
    return call.sound(grads=decayed, weight_decay=0.0)


def _without_bias_where_empty(call: Call) -> Any:
    made, bias = call.sound(), call["bias"]
    if bias is None or call["accumulate"] or gemm_sizes(call["a"], call["b"], call["layout"])[2]:
        return made
    return call.sound(bias=torch.zeros_like(bias))


def _sums_with_out(call: Call) -> Any:
    """Sums dbias behind the accumulation."""
    if call["epilogue"] != "dgelu" or not call["accumulate"]:
        return call.sound()
    before = call["out"].detach().float().clone()
    made = call.sound()
    made.dbias.copy_(made.dbias.float() + before.reshape(-1, before.shape[-1]).sum(0))
    return made


def _logit_without_bias(call: Call) -> Any:
    made = call.sound()
    if made.max_logit is not None and call["bias_type"] != "none":
        plain = {"bias": None, "bias_type": "none", "alibi_slopes": None}
        made.max_logit.copy_(call.sound(**plain).max_logit)
    return made


FAULTS: tuple[Fault, ...] = (
    *table("pad_rows", {"padding_compares_totals": (
        "cuts a part that is longer than its padded rows where the totals agree", _totals_compared)}),
    *table("softmax_bwd", {"softmax_gradient_keeps_a_buffer_of_inference": (
        "keeps a buffer that was allocated in inference mode", remembering(_buffer_kept))}),
    *table("activation_fwd", {"activation_reads_scales_as_canonical": (
        "reads scales in any layout as canonical ones", _read_as_canonical)}),
    *table("activation_bwd", {"activation_gradient_reads_scales_as_canonical": (
        "reads scales in any layout as canonical ones", _read_as_canonical)}),
    *table("multi_tensor_scale", {"scale_keeps_the_last_launchs_flag": (
        "keeps the flag of the last of several launches", _flag_of_last_launch)}),
    *table("softmax_fwd", {
        "softmax_subtracts_the_maximum_before_a_negative_scale": (
            "takes the maximum of x for that of scale * x", _maximum_before_scale),
        "softmax_takes_the_first_tiles_maximum": (
            "takes the maximum of the first 1024 columns for that of all", _maximum_of_first_tile),
    }),
    *table("rmsnorm_fwd", {"rms_rounds_eps": ("rounds eps to x's dtype", _eps_rounded)}),
    *table("layernorm_bwd", {"layernorm_gradient_rounds_partial_sums": (
        "rounds sums of 64 rows to gamma's dtype", _partial_sums_rounded)}),
    *table("moe_permute", {"permute_sends_a_token_once_to_an_expert": (
        "makes one row of two choices of one expert", _expert_once)}),
    *table("multi_tensor_adam", {"adam_decays_rounded_parameters": (
        "takes the decay of parameters in place of the masters'", _decay_of_rounded)}),
    *table("gemm", {
        "empty_product_has_no_bias": ("adds no bias where there is nothing to sum", _without_bias_where_empty),
        "dgelu_sums_dbias_behind_accumulation": ("sums dbias of what it has accumulated into", _sums_with_out),
    }, on="matmul"),
    *table("attention_fwd", {"largest_logit_has_no_bias": ("gives the largest logit without the bias", when(
        given(with_max_logit=True, dropout_p=0.0), _logit_without_bias))}, on="unfused_attention"),
)  # fmt: skip
