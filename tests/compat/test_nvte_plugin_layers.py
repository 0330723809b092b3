# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The plugin's activations, norms, softmaxes and rope against formulas,
with the arguments that Transformer Engine's Python passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.compat.formulas import TWO_DTYPES, close, random, reference, served


def _half(act: Any) -> Any:
    return lambda x: act(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x) ** 2


_FORMULAS = {
    "gelu": _gelu, "qgelu": _qgelu, "relu": F.relu, "srelu": _srelu, "silu": F.silu, "glu": _half(torch.sigmoid),
    "geglu": _half(_gelu), "qgeglu": _half(_qgelu), "reglu": _half(F.relu), "sreglu": _half(_srelu),
    "swiglu": _half(F.silu),
}  # fmt: skip


def _clamped(x: torch.Tensor, limit: float = 7.0, alpha: float = 1.702) -> torch.Tensor:
    u, v = x.chunk(2, -1)
    u, v = u.clamp(max=limit), v.clamp(-limit, limit)
    return u * torch.sigmoid(alpha * u) * (v + 1)


@pytest.mark.parametrize("dtype", TWO_DTYPES)
@pytest.mark.parametrize("kind", _FORMULAS)
def test_activations(tex: Any, kind: str, dtype: torch.dtype) -> None:
    x = random(6, 4, 32, dtype=dtype)
    y = getattr(tex, kind)(x, None)
    dy = random(*y.shape, dtype=dtype)
    expected, dx = reference(_FORMULAS[kind], dy, x)
    assert y.dtype == dtype
    close(y, expected)
    close(getattr(tex, f"d{kind}")(dy, x, None), dx)
    assert served(tex) == {kind, f"d{kind}"}


@pytest.mark.parametrize("kind", ["gelu", "qgelu", "relu", "silu", "srelu"])
def test_gradients_with_that_of_a_bias(tex: Any, kind: str) -> None:
    x, dy = random(12, 32), random(12, 32)
    _, expected = reference(_FORMULAS[kind], dy, x)
    dbias, dx = getattr(tex, f"dbias_d{kind}")(dy, x, None)
    close(dx, expected)
    close(dbias, expected.sum(0))
    assert served(tex) == {f"dbias_d{kind}"}


@pytest.mark.parametrize("parameters", [{}, {"limit": 1.0, "alpha": 1.5}])
def test_clamped_swiglu(tex: Any, parameters: dict[str, float]) -> None:
    x, dy = random(12, 32) * 3, random(12, 16)
    expected, dx = reference(lambda x: _clamped(x, **parameters), dy, x)
    close(tex.clamped_swiglu(x, None, **parameters), expected)
    close(tex.clamped_dswiglu(dy, x, None, **parameters), dx)
    limit, alpha = parameters.get("limit", 7.0), parameters.get("alpha", 1.702)
    close(tex.clamped_swiglu(x, None, limit, alpha, 1.0), expected)
    close(tex.clamped_dswiglu(dy, x, None, limit, alpha, 1.0), dx)
    assert served(tex) == {"clamped_swiglu", "clamped_dswiglu"}


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_layernorm(tex: Any, zero_centered: bool, with_bias: bool) -> None:
    x, gamma, beta, dy = random(12, 32), random(32), random(32) if with_bias else None, random(12, 32)

    def formula(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (32,), gamma + zero_centered, None if beta is None else beta.double(), 1e-5)

    expected, dx, dgamma = reference(formula, dy, x, gamma)
    y, mean, rstd = tex.layernorm_fwd(x, gamma, beta, 1e-5, None, None, tex.DType.kFloat32, 0, zero_centered)
    close(y, expected)
    close(mean, x.double().mean(-1))
    close(rstd, (x.double().var(-1, correction=0) + 1e-5).rsqrt())
    ours = tex.layernorm_bwd(dy, x, mean, rstd, gamma, 0, zero_centered)
    for one, other in zip(ours, (dx, dgamma, dy.double().sum(0)), strict=True):
        close(one, other)
    assert served(tex) == {"layernorm_fwd", "layernorm_bwd"}


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rmsnorm(tex: Any, zero_centered: bool) -> None:
    x, gamma, dy, add = random(12, 32), random(32), random(12, 32), random(12, 32) + 1

    def formula(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (32,), gamma + zero_centered, 1e-5)

    expected, dx, dgamma = reference(formula, dy, x, gamma)
    y, none, rstd = tex.rmsnorm_fwd(x, gamma, 1e-5, None, None, tex.DType.kFloat32, 0, zero_centered)
    assert none is None
    close(y, expected)
    close(rstd, (x.double().square().mean(-1) + 1e-5).rsqrt())
    for one, other in zip(tex.rmsnorm_bwd(dy, x, rstd, gamma, 0, zero_centered), (dx, dgamma), strict=True):
        close(one, other)
    ours = tex.rmsnorm_bwd_add(dy, x, add, rstd, gamma, 0, zero_centered)
    for one, other in zip(ours, (dx + add, dgamma), strict=True):
        close(one, other)
    assert served(tex) == {"rmsnorm_fwd", "rmsnorm_bwd", "rmsnorm_bwd_add"}


def test_a_norm_rounds_to_the_dtype_that_is_asked_for(tex: Any) -> None:
    x, gamma = random(12, 32), random(32)
    y = tex.rmsnorm_fwd(x, gamma, 1e-5, None, None, tex.DType.kBFloat16, 0, False)[0]
    assert y.dtype == torch.bfloat16
    close(y, F.rms_norm(x, (32,), gamma, 1e-5))


def _masked(x: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    logits = x * scale if mask is None else (x * scale).masked_fill(mask, -torch.inf)
    return torch.softmax(logits, -1).nan_to_num(0.0)


def _causal(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)


@pytest.mark.parametrize(
    ("kind", "shape", "mask", "given"),
    [
        ("", (2, 3, 8, 16), None, False),
        ("masked_", (2, 3, 8, 16), random(2, 1, 8, 16) > 0.5, True),
        ("masked_", (2, 3, 8, 16), (random(1, 1, 8, 16) > 0.5).index_fill(2, torch.tensor([3]), True), True),
        ("upper_triang_masked_", (6, 16, 16), _causal(16, 16), False),
        ("aligned_causal_masked_", (2, 3, 16, 16), _causal(16, 16), False),
        ("aligned_causal_masked_", (2, 3, 8, 16), _causal(8, 16), False),
    ],
)
def test_softmax(tex: Any, kind: str, shape: tuple[int, ...], mask: torch.Tensor | None, given: bool) -> None:
    x, dy = random(*shape), random(*shape)
    expected, dx = reference(lambda x: _masked(x, mask, 0.5), dy, x)
    kept = dy.clone()
    y = getattr(tex, f"scaled_{kind}softmax_forward")(x, *((mask,) if given else ()), 0.5)
    close(y, expected)
    close(getattr(tex, f"scaled_{kind}softmax_backward")(dy, y, 0.5), dx)
    assert torch.equal(dy, kept)
    assert served(tex) == {f"scaled_{kind}softmax_{way}" for way in ("forward", "backward")}


def _rotated(x: torch.Tensor, freqs: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x (..., tokens in the order of positions, h, d): all dimensions before h index positions (tokens, b or none)."""
    angles = freqs.double()[positions, 0, 0].unsqueeze(-2)
    r = angles.shape[-1]
    first, rest = x[..., :r], x[..., r:]
    if interleaved:
        turned = torch.stack((-first[..., 1::2], first[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-first[..., r // 2 :], first[..., : r // 2]), -1)
    return torch.cat((first * angles.cos() + turned * angles.sin(), rest), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd", "offsets"])
def test_rope(tex: Any, layout: str, interleaved: bool) -> None:
    angles = torch.outer(torch.arange(12.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    doubled = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    freqs, starts, cu_seqlens = doubled.view(12, 1, 1, 8), None, None
    if layout == "thd":
        shape, kind = (10, 3, 16), tex.NVTE_QKV_Format.NVTE_THD
        cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32)
        positions = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4, 5])
    elif layout == "bshd":
        shape, kind = (2, 6, 3, 16), tex.NVTE_QKV_Format.NVTE_BSHD
        positions = torch.arange(6).expand(2, 6)
    else:
        shape, kind = (6, 2, 3, 16), tex.NVTE_QKV_Format.NVTE_SBHD
        positions = torch.arange(6).unsqueeze(1).expand(6, 2)
        if layout == "offsets":
            starts = torch.tensor([2, 5], dtype=torch.int32)
            positions = positions + starts
    x, dy = random(*shape), random(*shape)
    expected, dx = reference(lambda x: _rotated(x, freqs, positions, interleaved), dy, x)
    arguments = (freqs, starts, kind, interleaved, cu_seqlens, 1, 0)
    close(tex.fused_rope_forward(x, *arguments), expected)
    close(tex.fused_rope_backward(dy, *arguments), dx)
    assert served(tex) == {"fused_rope_forward", "fused_rope_backward"}
