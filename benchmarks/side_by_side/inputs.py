# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Random operands of each operation, the same for every rival, and what must come out, by plain fp32 arithmetic."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from side_by_side.rows import Row

Values = dict[str, torch.Tensor]
BF16, FP32 = torch.bfloat16, torch.float32
EPSILON = 1e-5
#: Scale of delayed casts: what is below 448 / 16 = 28 is not clamped, products of two normal numbers included.
SCALE = 16.0


class _Maker:
    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=self.generator, device=self.device) * scale).to(dtype)

    def scale(self) -> SimpleNamespace:
        """State of a delayed cast."""
        return SimpleNamespace(
            scale=torch.full((1,), SCALE, device=self.device), amax=torch.zeros(1, device=self.device)
        )


def make(row: Row, shape: tuple[int, ...], device: torch.device, seed: int) -> SimpleNamespace:
    """Operands of `row` at `shape`, by name."""
    maker = _Maker(device, seed)
    data = _MAKERS[row.operation](maker, row, shape)
    data.state = maker.scale()
    data.device = device
    data.shape = shape
    return data


def size(data: SimpleNamespace) -> int:
    """Bytes of all operands."""
    total = 0
    for value in vars(data).values():
        for tensor in value if isinstance(value, list) else [value]:
            if isinstance(tensor, torch.Tensor):
                total += tensor.numel() * tensor.element_size()
    return total


def expected(row: Row, data: SimpleNamespace) -> Values:
    """What a rival's `values` must be, by name; a rival may have fewer."""
    return _EXPECTED[row.operation](row, data)


def _rows(maker: _Maker, row: Row, shape: tuple[int, ...]) -> SimpleNamespace:
    return SimpleNamespace(x=maker.normal(*shape))


def _norm(maker: _Maker, row: Row, shape: tuple[int, ...]) -> SimpleNamespace:
    n = shape[-1]
    data = SimpleNamespace(
        x=maker.normal(*shape),
        gamma=1 + maker.normal(n, scale=0.1),
        beta=maker.normal(n, scale=0.1) if row.options["kind"] == "layernorm" else None,
        residual=maker.normal(*shape) if row.options.get("residual") else None,
    )
    if row.operation == "norm_bwd":
        data.dy = maker.normal(*shape)
        data.add = maker.normal(*shape) if row.options.get("add") else None
        x = data.x.float()
        data.mean = x.mean(-1) if data.beta is not None else None
        centered = x if data.mean is None else x - data.mean[..., None]
        data.rstd = torch.rsqrt(centered.square().mean(-1) + EPSILON)
    return data


def _activation(maker: _Maker, row: Row, shape: tuple[int, ...]) -> SimpleNamespace:
    data = SimpleNamespace(x=maker.normal(*shape))
    if row.operation == "activation_bwd":
        gated = row.options["kind"] == "swiglu"
        data.dy = maker.normal(*shape[:-1], shape[-1] // 2 if gated else shape[-1])
    return data


def _softmax(maker: _Maker, row: Row, shape: tuple[int, ...]) -> SimpleNamespace:
    x = maker.normal(*shape)
    if row.operation == "softmax_fwd":
        return SimpleNamespace(x=x)
    return SimpleNamespace(y=torch.softmax(x.float(), -1).to(BF16), dy=maker.normal(*shape))


def _rope(maker: _Maker, row: Row, shape: tuple[int, ...]) -> SimpleNamespace:
    d = shape[-1]
    steps = 10000.0 ** (-torch.arange(0, d, 2, device=maker.device, dtype=FP32) / d)
    angles = torch.outer(torch.arange(shape[0], device=maker.device, dtype=FP32), steps)
    return SimpleNamespace(x=maker.normal(*shape), freqs=torch.cat((angles, angles), -1)[:, None, None, :].contiguous())


def _dropout(maker: _Maker, row: Row, shape: tuple[int, ...]) -> SimpleNamespace:
    rng_state = torch.tensor([1234, 0], dtype=torch.int64, device=maker.device)
    return SimpleNamespace(
        x=maker.normal(*shape), residual=maker.normal(*shape), bias=maker.normal(shape[-1]), rng_state=rng_state
    )


def _many(maker: _Maker, row: Row, shape: tuple[int, ...]) -> SimpleNamespace:
    count, *each = shape
    if row.operation == "l2norm":
        return SimpleNamespace(grads=[maker.normal(*each) for _ in range(count)])
    dtype = BF16 if row.options["master"] else FP32
    master = [maker.normal(*each, dtype=FP32) for _ in range(count)]
    return SimpleNamespace(
        params=[p.to(dtype) for p in master],
        grads=[maker.normal(*each, dtype=dtype) for _ in range(count)],
        exp_avgs=[maker.normal(*each, dtype=FP32, scale=0.1) for _ in range(count)],
        exp_avg_sqs=[maker.normal(*each, dtype=FP32).square() for _ in range(count)],
        master=master,
    )


def _gemm(maker: _Maker, row: Row, shape: tuple[int, ...]) -> SimpleNamespace:
    """a (m, k) and b (n, k): what the product contracts lies last; rivals store it as their layout has it."""
    m, n, k = shape
    return SimpleNamespace(a=maker.normal(m, k), b=maker.normal(n, k))


def _attention(maker: _Maker, row: Row, shape: tuple[int, ...]) -> SimpleNamespace:
    s, b, h, d = shape
    # One packed tensor, as a layer's QKV projection leaves it.
    packed = maker.normal(s, b, 3, h, d)
    return SimpleNamespace(packed=packed, dout=maker.normal(s, b, h, d))


def _histories(maker: _Maker, row: Row, shape: tuple[int, ...]) -> SimpleNamespace:
    history = maker.normal(*shape, dtype=FP32).abs()
    return SimpleNamespace(history=history, scales=torch.ones(shape[1], device=maker.device))


_MAKERS: dict[str, Any] = {
    **dict.fromkeys(("quantize", "quantize_dbias", "dequantize"), _rows),
    **dict.fromkeys(("norm_fwd", "norm_bwd"), _norm),
    **dict.fromkeys(("activation_fwd", "activation_bwd"), _activation),
    **dict.fromkeys(("softmax_fwd", "softmax_bwd"), _softmax),
    **dict.fromkeys(("rope_fwd", "rope_bwd"), _rope),
    **dict.fromkeys(("adam", "l2norm"), _many),
    "dropout_add": _dropout,
    "gemm": _gemm,
    "attention": _attention,
    "update_scales": _histories,
}


#: Every operation that a row can name.
OPERATIONS = tuple(_MAKERS)


def _cast_values(row: Row, x: torch.Tensor) -> Values:
    """Of a cast, or of high precision where the row has none."""
    x = x.float()
    if not row.options.get("scaling"):
        return {"out": x}
    return {"row": x, "column": x} if row.options["usage"] == "both" else {"row": x}


def _normalized(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None) -> torch.Tensor:
    x, shape = x.float(), x.shape[-1:]
    if beta is not None:
        return torch.nn.functional.layer_norm(x, shape, gamma.float(), beta.float(), EPSILON)
    return torch.nn.functional.rms_norm(x, shape, gamma.float(), EPSILON)


def _norm_forward(row: Row, data: SimpleNamespace) -> Values:
    x = data.x if data.residual is None else data.x + data.residual
    found = _cast_values(row, _normalized(x, data.gamma, data.beta))
    return found if data.residual is None else {**found, "residual": x.float()}


def _norm_backward(row: Row, data: SimpleNamespace) -> Values:
    x, gamma = (t.detach().float().requires_grad_() for t in (data.x, data.gamma))
    beta = None if data.beta is None else data.beta.detach().float().requires_grad_()
    _normalized(x, gamma, beta).backward(data.dy.float())
    dx = x.grad if data.add is None else x.grad + data.add.float()
    found = {"dx": dx, "dgamma": gamma.grad}
    return found if beta is None else {**found, "dbeta": beta.grad}


def activate(x: torch.Tensor, kind: str) -> torch.Tensor:
    """In plain PyTorch, in x's dtype."""
    if kind == "gelu":
        return torch.nn.functional.gelu(x, approximate="tanh")
    left, right = x.chunk(2, -1)
    return torch.nn.functional.silu(left) * right


def _activation_backward(row: Row, data: SimpleNamespace) -> Values:
    x = data.x.detach().float().requires_grad_()
    activate(x, row.options["kind"]).backward(data.dy.float())
    found = _cast_values(row, x.grad)
    return {**found, "dbias": x.grad.sum(0)} if row.options["dbias"] else found


def rotated(x: torch.Tensor, freqs: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
    """In plain PyTorch, in x's dtype; sign -1 rotates backwards."""
    cos, sin = freqs.cos().to(x.dtype), (sign * freqs.sin()).to(x.dtype)
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def _softmax_backward(row: Row, data: SimpleNamespace) -> Values:
    y, dy = data.y.float(), data.dy.float()
    return {"out": y * (dy - (dy * y).sum(-1, keepdim=True))}


def _softmax_forward(row: Row, data: SimpleNamespace) -> Values:
    x = data.x.float()
    if row.options["causal"]:
        x = x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1), -math.inf)
    return {"out": torch.softmax(x, -1)}


def dropped(row: Row, data: SimpleNamespace, out: torch.Tensor) -> Values:
    """What identifies a result of random dropping: the share kept, and the values there."""
    p, branch = row.options["p"], data.x.float() + data.bias.float()
    added = out.float() - data.residual.float()
    if not p:
        return {"out": added}
    kept = (added.abs() > branch.abs() * 0.5) | (branch.abs() < 0.1)
    share = kept.float().mean().reshape(1)
    return {"kept": share, "out": torch.where(kept & (branch.abs() >= 0.1), added * (1 - p), branch)}


def _dropout_forward(row: Row, data: SimpleNamespace) -> Values:
    branch = data.x.float() + data.bias.float()
    p, small = row.options["p"], (branch.abs() < 0.1).float().mean().reshape(1)
    return {"kept": (1 - p) * (1 - small) + small, "out": branch}


def _product(row: Row, data: SimpleNamespace) -> Values:
    return {"out": data.a.float() @ data.b.float().t()}


def _attended(row: Row, data: SimpleNamespace) -> Values:
    """Of the first sequence and the first two heads: the whole takes float32 scores that do not fit."""
    packed = data.packed[:, :1, :, :2].detach().float().requires_grad_()
    q, k, v = (t.permute(1, 2, 0, 3) for t in packed.unbind(2))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    masked = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    out = torch.softmax(scores.masked_fill(masked, -math.inf), -1) @ v
    found = {"out": out.permute(2, 0, 1, 3)}
    if row.options["backward"]:
        found["out"].backward(data.dout[:, :1, :2].float())
        dq, dk, dv = packed.grad.unbind(2)
        found.update(dq=dq, dk=dk, dv=dv)
    return {name: value.detach() for name, value in found.items()}


def _adam_step(row: Row, data: SimpleNamespace) -> Values:
    """After one step of AdamW with `ADAM`'s constants."""
    p, g, m, v = (data.master if row.options["master"] else data.params)[0], *_first(data)
    m = ADAM["beta1"] * m + (1 - ADAM["beta1"]) * g
    v = ADAM["beta2"] * v + (1 - ADAM["beta2"]) * g.square()
    step = (m / (1 - ADAM["beta1"])) / ((v / (1 - ADAM["beta2"])).sqrt() + ADAM["eps"])
    return {"param": p - ADAM["lr"] * (step + ADAM["weight_decay"] * p), "exp_avg": m, "exp_avg_sq": v}


def _first(data: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    return data.grads[0].float(), data.exp_avgs[0], data.exp_avg_sqs[0]


#: Constants of the optimizer's rows.
ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01}
#: What the update of scales puts into row 0 of the history before each update.
NEW_AMAX = 8.0


def _updated_scales(row: Row, data: SimpleNamespace) -> Values:
    rest = data.history[1:].amax(0)
    return {"scales": 448.0 / torch.clamp(rest, min=NEW_AMAX)}


_EXPECTED: dict[str, Any] = {
    "quantize": lambda row, data: _cast_values(row, data.x),
    "quantize_dbias": lambda row, data: {**_cast_values(row, data.x), "dbias": data.x.float().sum(0)},
    "dequantize": lambda row, data: {"out": data.x.float()},
    "norm_fwd": _norm_forward,
    "norm_bwd": _norm_backward,
    "activation_fwd": lambda row, data: _cast_values(row, activate(data.x.float(), row.options["kind"])),
    "activation_bwd": _activation_backward,
    "softmax_fwd": _softmax_forward,
    "softmax_bwd": _softmax_backward,
    "rope_fwd": lambda row, data: {"out": rotated(data.x.float(), data.freqs)},
    "rope_bwd": lambda row, data: {"out": rotated(data.x.float(), data.freqs, -1.0)},
    "dropout_add": _dropout_forward,
    "adam": _adam_step,
    "l2norm": lambda row, data: {"out": torch.stack([g.float().norm() for g in data.grads]).norm().reshape(1)},
    "gemm": _product,
    "attention": _attended,
    "update_scales": _updated_scales,
}


def errors(found: Values, wanted: Values) -> dict[str, float]:
    """||found - wanted|| / ||wanted|| by name, NaN where anything is not finite."""
    result = {}
    for name, value in found.items():
        if name not in wanted:
            raise KeyError(f"a rival returned {name!r}; expected {', '.join(wanted)}")
        target = wanted[name]
        if value.shape != target.shape:
            raise ValueError(f"{name}: shape {tuple(value.shape)}, expected {tuple(target.shape)}")
        norm = target.norm(dtype=torch.float64).clamp(min=1e-30)
        result[name] = float((value.float() - target).norm(dtype=torch.float64) / norm)
    return result
