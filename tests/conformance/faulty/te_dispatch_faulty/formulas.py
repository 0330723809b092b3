# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Formulas of other kernels: equal in exact arithmetic to those of the torch backend, and rounded in other places."""

from __future__ import annotations

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from te_dispatch.ops.results import ActivationForward, AttentionBackward, NormBackward
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.spoiling import Behaviour, operand

_TILE = 16


def _plain_attention(call: Call) -> bool:
    """Whether nothing beyond a causal mask is asked of a call."""
    options = (
        "packing",
        "attn_mask",
        "window",
        "softmax_offset",
        "bias",
        "s_quantizer",
        "alibi_slopes",
        "cu_seqlens_q",
    )
    operands = all(operand(call, name) is not None and operand(call, name).numel() for name in ("q", "k", "v"))  # type: ignore[union-attr]
    plain = operands and all(call.get(name) is None for name in options) and call["mask"] in ("none", "causal")
    plain = plain and call["bias_type"] == "none"
    square = call["mask"] == "none" or call["q"].shape[0:2] == call["k"].shape[0:2]
    absent = call.get("page_table") is None and call.get("cu_seqlens_kv") is None and call.get("out_quantizer") is None
    return (
        plain and square and absent and call["layout"] in ("sbhd", "bshd") and not call["softcap"]
        and not call["dropout_p"] and not call.get("with_max_logit") and call["softmax_type"] == "vanilla"
    )  # fmt: skip


def _heads(call: Call, name: str, like: torch.Tensor | None = None) -> torch.Tensor:
    """(b, h, s, d) in fp32, each head of a group repeated for the queries that share it."""
    x = call[name].permute((1, 2, 0, 3) if call["layout"] == "sbhd" else (0, 2, 1, 3)).float()
    return x if like is None else x.repeat_interleave(like.shape[1] // x.shape[1], 1)


def _place(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Back from (b, h, s, d) to the call's layout."""
    return x.permute((2, 0, 1, 3) if call["layout"] == "sbhd" else (0, 2, 1, 3))


def softmax_scale(call: Call, q: torch.Tensor) -> float:
    """What a call's logits are multiplied by; 0.0 is a scale like any other."""
    given: float | None = call["softmax_scale"]
    return q.shape[-1] ** -0.5 if given is None else given


def _tiles(call: Call, q: torch.Tensor, k: torch.Tensor) -> Any:
    """(first column, logits) of every tile of keys; masked logits are -Inf."""
    scale = softmax_scale(call, q)
    rows = torch.arange(q.shape[2], device=q.device)[:, None]
    for start in range(0, k.shape[2], _TILE):
        z = (q @ k[:, :, start : start + _TILE].transpose(-1, -2)) * scale
        if call["mask"] == "causal":
            columns = torch.arange(start, start + z.shape[-1], device=q.device)
            z = torch.where(columns > rows, -torch.inf, z)
        yield start, z


def flash_forward(call: Call) -> Any:
    """Keys in tiles, with a running maximum; weights in the operands' dtype before they are normalized. Algorithm:
    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, section 3.1."""
    made = call.sound()
    if not _plain_attention(call):
        return made
    q = _heads(call, "q")
    k, v = _heads(call, "k", q), _heads(call, "v", q)
    top = q.new_full((*q.shape[:3], 1), -torch.inf)
    total, out = torch.zeros_like(top), q.new_zeros((*q.shape[:3], v.shape[-1]))
    for start, z in _tiles(call, q, k):
        higher = torch.maximum(top, z.amax(-1, keepdim=True))
        base = torch.where(higher == -torch.inf, 0.0, higher)
        weights, kept = (z - base).exp(), (top - base).exp()
        total = total * kept + weights.sum(-1, keepdim=True)
        seen = torch.where(weights == 0, 0.0, weights).to(call["q"].dtype).float()
        out = out * kept + seen @ v[:, :, start : start + z.shape[-1]]
        top = higher
    made.out.copy_(_place(call, out / total))
    if made.lse is not None:
        made.lse.copy_((top + total.log()).squeeze(-1))
    return made


def flash_backward(call: Call, narrow: bool = False) -> Any:
    """Weights made anew from the log-sum-exp, the row sums of their gradients as dout . out, gradients of logits in the
    operands' dtype. Algorithm: as above, section 3.2. `narrow`: weights are kept in the operands' dtype alone."""
    made = call.sound()
    given = isinstance(call["dout"], torch.Tensor) and isinstance(call["out"], torch.Tensor)
    if not given or not _plain_attention(call) or call["dqkv_quantizer"] is not None or call["with_dbias"]:
        return made
    q, dout, out = _heads(call, "q"), _heads(call, "dout"), _heads(call, "out")
    k, v = _heads(call, "k", q), _heads(call, "v", q)
    scale, dtype = softmax_scale(call, q), call["q"].dtype
    sums = (dout * out).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start, z in _tiles(call, q, k):
        columns = slice(start, start + z.shape[-1])
        p = torch.where(z == -torch.inf, 0.0, (z - call["lse"].unsqueeze(-1)).exp())
        p = p.to(dtype).float() if narrow else p
        dz = (p * (dout @ v[:, :, columns].transpose(-1, -2) - sums)).to(dtype).float()
        dv[:, :, columns] = p.to(dtype).float().transpose(-1, -2) @ dout
        dk[:, :, columns] = dz.transpose(-1, -2) @ q * scale
        dq += dz @ k[:, :, columns] * scale

    def folded(x: torch.Tensor, name: str) -> torch.Tensor:
        heads = call[name].shape[2]
        return _place(call, x.unflatten(1, (heads, -1)).sum(2))

    made.dq.copy_(_place(call, dq))
    made.dk.copy_(folded(dk, "k"))
    made.dv.copy_(folded(dv, "v"))
    assert isinstance(made, AttentionBackward)
    return made


def activation_by_sigmoids(call: Call) -> Any:
    """gelu as x sigmoid(2 u), since (1 + tanh u) / 2 is sigmoid(2 u); silu and qgelu as x / (1 + e^-x)."""
    x, kind, made = operand(call, "x"), call["kind"], call.sound()
    if x is None or call["quantizer"] is not None or kind not in ("gelu", "silu", "qgelu"):
        return made
    x = x.float()
    u = {"gelu": 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x), "silu": x, "qgelu": 1.702 * x}[kind]
    found = x / (1 + (-u).exp())
    return call.delivered(ActivationForward(found.to(made.out.dtype), None))


def softmax_gradient_distributed(call: Call) -> Any:
    """y dy - y sum(y dy), in place of y (dy - sum(y dy))."""
    made, y, dy = call.sound(), call["y"].float(), call["dy"].float()
    return made.copy_(call["scale"] * (y * dy - y * (y * dy).sum(-1, keepdim=True)))


def norm_gradient_in_fp64(call: Call) -> Any:
    """Gradients of a norm in fp64, of the statistics that the forward gave."""
    made, x, gamma = call.sound(), call["x"].double(), call["gamma"].double()
    if not x.numel():
        return made
    rstd = call["rstd"].double().unsqueeze(-1)
    centred = x if call.get("mean") is None else x - call["mean"].double().unsqueeze(-1)
    normal, dy = centred * rstd, call["dy"].double()
    own = dy * (gamma + (1.0 if call["zero_centered_gamma"] else 0.0))
    dx = own - normal * (own * normal).mean(-1, keepdim=True)
    if call.get("mean") is not None:
        dx = dx - own.mean(-1, keepdim=True)
    dx = dx * rstd
    if call["add"] is not None:
        dx = dx + call["add"].double()
    dgamma = (dy * normal).reshape(-1, x.shape[-1]).sum(0)
    return call.delivered(NormBackward(dx.to(made.dx.dtype), dgamma.to(made.dgamma.dtype), made.dbeta))


def rope_by_complex_numbers(call: Call) -> Any:
    """Pairs of features times e^(it), in fp32."""
    x, made = call["x"], call.sound()
    if call["layout"] == "thd" or call["offsets"] is not None or not call["interleaved"] or not x.numel():
        return made
    freqs, rotated = call["freqs"].float().flatten(1), call["freqs"].shape[-1]
    length = x.shape[0] if call["layout"] == "sbhd" else x.shape[1]
    if not torch.equal(freqs[:, ::2], freqs[:, 1::2]) or not x.isfinite().all():
        return made
    turn = torch.polar(torch.ones_like(freqs[:length, ::2]), freqs[:length, ::2])
    turn = turn[:, None, None] if call["layout"] == "sbhd" else turn[:, None]
    pairs = torch.view_as_complex(x[..., :rotated].float().unflatten(-1, (-1, 2)).contiguous())
    made[..., :rotated].copy_(torch.view_as_real(pairs * turn).flatten(-2))
    return made


def adam_with_folded_corrections(call: Call) -> Any:
    """Both bias corrections folded into one factor of the step and of eps: lr sqrt(c2) / c1 and eps sqrt(c2), as in
    Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2014, end of section 2."""
    if call["noop_flag"] is not None or call["master"] is not None or not call["adam_w"] or not call["params"]:
        return call.sound()
    before = [p.float().clone() for p in call["params"]]
    call.sound()
    step, lr, decay = call["step"], call["lr"], call["weight_decay"]
    first = 1.0 - call["beta1"] ** step if call["bias_correction"] else 1.0
    second = 1.0 - call["beta2"] ** step if call["bias_correction"] else 1.0
    root = math.sqrt(second)
    for p, old, m, v in zip(call["params"], before, call["exp_avgs"], call["exp_avg_sqs"]):
        update = m * (root / first) / (v.sqrt() + call["eps"] * root)
        p.copy_(old - lr * (update + decay * old) if decay else old - lr * update)
    return None


def norm_by_power(call: Call) -> Any:
    """Squares of values over the largest magnitude, one running sum for each 64th element."""
    made, squares = call.sound(), []
    for x in call["tensors"]:
        flat = x.double().flatten()
        squares.append(torch.stack([flat[start::64].square().sum() for start in range(64)]).sum())
    found = torch.stack(squares)
    return made.copy_((found if call["per_tensor"] else found.sum().view(1)).sqrt())


def unpermute_in_fp64(call: Call) -> Any:
    """A token's choices weighted and added in fp64."""
    made, x = call.sound(), call["x"]
    if not isinstance(x, torch.Tensor) or call["probs"] is None or not x.isfinite().all() or not x.numel():
        return made
    rows = call["row_map"].long()
    picked = torch.where((rows >= 0).unsqueeze(-1), x.double()[rows.clamp_min(0)], 0.0)
    weights = torch.where(rows >= 0, call["probs"].double(), 0.0)
    return made.copy_((picked * weights.unsqueeze(-1)).sum(1))


@functools.lru_cache(maxsize=8)
def _table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A constant of a kind that kernels keep on the device for good."""
    return torch.ones((), dtype=dtype, device=device)


def keeps_constants(name: str) -> Behaviour:
    """Multiplies by a constant that is made at the first call and kept."""

    def behave(call: Call) -> Any:
        x = operand(call, name)
        if x is None or not x.is_floating_point():
            return call.sound()
        with torch.no_grad():
            return call.sound(**{name: x * _table(x.dtype, x.device)})

    return behave


_workers: list[ThreadPoolExecutor] = []


def in_a_thread(call: Call) -> Any:
    """Computes in a thread that the first call starts and all later ones use."""
    if not _workers:
        _workers.append(ThreadPoolExecutor(1))
    inference = torch.is_inference_mode_enabled()

    def run() -> Any:
        with torch.inference_mode() if inference else torch.no_grad():
            return call.sound()

    return _workers[0].submit(run).result()


def contiguous_operands(call: Call) -> Any:
    """Makes every operand contiguous before it reads it."""
    dense = {
        name: value.contiguous()
        for name, value in call.arguments.items()
        if isinstance(value, torch.Tensor) and name not in ("out", "amax", "noop_flag")
    }
    return call.sound(**dense)
