# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`LayerNormMLP`: every activation and recipe against float64, and recomputation inside the module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.ops.activation import KINDS

from .bounds import Bounded, assert_bounded, assert_same_sum
from .gemm_oracle import RECIPES
from .mlp_bounds import BoundedMLP, activation

#: Where results are compared with float64: worst-case bounds grow with every sum's length, short sums keep them sharp.
NARROW = 8


def _layer(activation: str = "gelu", hidden: int = 32, **kwargs: Any) -> te.LayerNormMLP:
    torch.manual_seed(0)
    init = kwargs.pop("init_method", lambda w: torch.nn.init.normal_(w, std=0.3))
    kwargs.update(activation=activation, device="cpu", init_method=init, output_layer_init_method=init)
    layer = te.LayerNormMLP(hidden, 2 * hidden, **kwargs)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    return layer


def _exact(layer: te.LayerNormMLP, x: torch.Tensor, **params: float) -> torch.Tensor:
    """The whole block in x's dtype."""

    def at(name: str) -> torch.Tensor | None:
        parameter = dict(layer.named_parameters()).get(name)
        return None if parameter is None else parameter.to(x.dtype)

    if layer.normalization == "RMSNorm":
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], at("layer_norm_weight"), layer.eps)
    else:
        normed = torch.nn.functional.layer_norm(
            x, x.shape[-1:], at("layer_norm_weight"), at("layer_norm_bias"), layer.eps
        )
    z = torch.nn.functional.linear(normed, at("fc1_weight"), at("fc1_bias"))
    return torch.nn.functional.linear(activation(layer.activation, z, **params), at("fc2_weight"), at("fc2_bias"))


def _gradients(out: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, layer: torch.nn.Module) -> dict[str, Any]:
    names = ["x", *(n for n, _ in layer.named_parameters())]
    return dict(zip(names, torch.autograd.grad(out, [x, *layer.parameters()], dy)))


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_against_float64_autograd(kind: str, bias: bool, checkpoint: bool) -> None:
    layer = _layer(kind, NARROW, bias=bias, checkpoint=checkpoint, normalization="LayerNorm" if bias else "RMSNorm")
    x = torch.randn(3, 15, NARROW, requires_grad=True)
    exact = x.detach().double().requires_grad_()
    wide = copy.deepcopy(layer).double()
    out, expected, bounded = layer(x), _exact(wide, exact), BoundedMLP(layer, x)
    assert_bounded(out, expected, bounded.out)
    dy = torch.randn_like(out)
    got, want = _gradients(out, dy, x, layer), _gradients(expected, dy.double(), exact, wide)
    bounds = bounded.backward(Bounded(dy.reshape(-1, NARROW)))
    for name in want:
        assert_bounded(got[name], want[name], bounds[name], name)


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("name", RECIPES)
def test_quantized_is_the_composition_of_quantized_parts(name: str, kind: str) -> None:
    """Bitwise the same as LayerNormLinear, activation and Linear with the same recipe, over several steps.

    Holds where the activation's result and gradient are float32, so that casting inside or after is the same.
    """
    layer = _layer(kind)
    first = te.LayerNormLinear(32, layer.fc1_weight.shape[0], device="cpu")
    second = te.Linear(64, 32, device="cpu")
    names = {"layer_norm_weight": first, "layer_norm_bias": first, "fc1_weight": first, "fc1_bias": first}
    with torch.no_grad():
        for parameter, module in names.items():
            getattr(module, parameter.removeprefix("fc1_")).copy_(getattr(layer, parameter))
        second.weight.copy_(layer.fc2_weight)
        second.bias.copy_(layer.fc2_bias)
    for _ in range(3):
        x = torch.randn(32, 32)
        dy = torch.randn(32, 32)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        with te.autocast(recipe=RECIPES[name]):
            out = layer(a)
            z = first(b)
            z.retain_grad()
            parts = second(_Activation.apply(z, kind))
        assert torch.equal(out, parts)
        out.backward(dy)
        parts.backward(dy)
        assert torch.equal(a.grad, b.grad)
        assert torch.equal(layer.fc1_weight.grad, first.weight.grad)
        assert torch.equal(layer.fc2_weight.grad, second.weight.grad)
        assert torch.equal(layer.layer_norm_weight.grad, first.layer_norm_weight.grad)
        assert_same_sum(layer.fc1_bias.grad, first.bias.grad, z.grad, "fc1_bias")
        assert torch.equal(layer.fc2_bias.grad, second.bias.grad)
    if name == "delayed":
        scales = torch.cat([first.fp8_state.scales.forward.scale, second.fp8_state.scales.forward.scale])
        assert torch.equal(layer.fp8_state.scales.forward.scale, scales) and scales.ne(1).all()


class _Activation(torch.autograd.Function):
    """The activation operator by itself."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, kind: str) -> torch.Tensor:
        from te_dispatch import ops

        ctx.save_for_backward(z)
        ctx.kind = kind
        return ops.activation_fwd(z, kind=kind).out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        from te_dispatch import ops

        return ops.activation_bwd(dy, ctx.saved_tensors[0], kind=ctx.kind).dx, None


@pytest.mark.parametrize("name", [None, *RECIPES])
def test_recomputing_changes_no_bit(name: str | None) -> None:
    """Also when the scales moved on between forward and backward."""

    def run(checkpoint: bool) -> list[torch.Tensor]:
        layer = _layer("swiglu", checkpoint=checkpoint)
        found = []
        for _ in range(2):
            xs = [(torch.randn(32, 32) * 3).requires_grad_() for _ in range(2)]
            outs = []
            for x in xs:
                with te.autocast(enabled=name is not None, recipe=RECIPES.get(name)):
                    outs.append(layer(x))
            for out in outs:
                out.square().sum().backward()
            found += [x.grad for x in xs] + [p.grad.clone() for p in layer.parameters()]
        return [*found, layer.get_extra_state()]

    for a, b in zip(run(True), run(False)):
        assert torch.equal(a, b)


def test_recomputing_saves_memory() -> None:
    def saved(checkpoint: bool) -> int:
        layer = _layer("swiglu", checkpoint=checkpoint)
        own = {p.data_ptr() for p in layer.parameters()}
        sizes: list[int] = []

        def pack(t: torch.Tensor) -> torch.Tensor:
            sizes.append(0 if t.data_ptr() in own else t.numel() * t.element_size())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layer(torch.randn(128, 32, requires_grad=True))
        return sum(sizes)

    rows = 128 * 4
    # Kept: the input and two numbers a row. Not kept: the norm's output, 128 columns of z, 64 of the activation.
    assert saved(True) == rows * (32 + 2)
    assert saved(False) == rows * (32 + 2 + 32 + 128 + 64)


def test_quantized_copies_are_saved_not_wide_ones() -> None:
    layer = _layer("swiglu")
    kinds: list[torch.dtype] = []
    x = torch.randn(128, 32, requires_grad=True)

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.numel() >= 128 * 32:
            kinds.append(t.dtype)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), te.autocast(recipe=DelayedScaling()):
        layer(x)
    # Wide ones: the input (for the norm) and z (for the activation). Bytes: both GEMMs' inputs and the first weight.
    assert kinds.count(torch.float32) == 2
    assert kinds.count(torch.uint8) >= 2


def test_activation_parameters() -> None:
    layer = _layer("clamped_swiglu", NARROW, activation_params={"limit": 0.5, "alpha": 1.0})
    x = torch.randn(16, NARROW)
    wide, out = copy.deepcopy(layer).double(), layer(x)
    bounded = BoundedMLP(layer, x, limit=0.5, alpha=1.0)
    assert_bounded(out, _exact(wide, x.double(), limit=0.5, alpha=1.0), bounded.out)
    assert ((out - _exact(wide, x.double())).abs() > 100 * bounded.out.error).any(), "they make a difference"


@pytest.mark.parametrize("checkpoint", [False, True])
def test_results_come_as_asked(checkpoint: bool) -> None:
    layer = _layer("gelu", NARROW, return_bias=True, return_layernorm_output=True, checkpoint=checkpoint)
    x = torch.randn(16, NARROW, requires_grad=True)
    out, bias, normed = layer(x)
    assert torch.equal(bias, layer.fc2_bias)
    wide, exact = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    expected, bounded = _exact(wide, exact), BoundedMLP(layer, x)
    assert_bounded(out + bias, expected, bounded.out)
    weights = torch.randn(16, NARROW)
    (out.sum() + (normed * weights).sum() + bias.sum()).backward()
    exact_normed = torch.nn.functional.layer_norm(exact, (NARROW,), wide.layer_norm_weight, wide.layer_norm_bias)
    assert_bounded(normed, exact_normed, bounded.norm.y)
    (expected.sum() + (exact_normed * weights).sum()).backward()
    bounds = bounded.backward(Bounded(torch.ones(16, NARROW)), Bounded(weights))
    assert_bounded(x.grad, exact.grad, bounds["x"])


@pytest.mark.parametrize("wanted", ["layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias", "x"])
@pytest.mark.parametrize("name", [None, "delayed"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients_only_where_wanted(wanted: str, name: str | None, checkpoint: bool) -> None:
    def run(names: list[str] | None) -> dict[str, Any]:
        layer = _layer(checkpoint=checkpoint)
        x = torch.randn(16, 32, requires_grad=names is None or "x" in names)
        for n, p in layer.named_parameters():
            p.requires_grad_(names is None or n in names)
        with te.autocast(enabled=name is not None, recipe=RECIPES.get(name)):
            layer(x).square().sum().backward()
        return {"x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}

    everything, got = run(None), run([wanted])
    assert [n for n, g in got.items() if g is not None] == [wanted]
    assert torch.equal(got[wanted], everything[wanted])


@pytest.mark.parametrize("shape", [(0, 32), (32,)])
def test_no_rows_and_one_row(shape: tuple[int, ...]) -> None:
    layer = _layer()
    x = torch.randn(shape, requires_grad=True)
    y = layer(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"activation": "tanh"}, ValueError, "activation must be one of 'gelu'.*got 'tanh'"),
        ({"activation_params": {"limit": 1.0}}, ValueError, "activation_params"),
        ({"activation": "clamped_swiglu", "activation_params": {"slope": 1.0}}, ValueError, "activation_params"),
        ({"tp_size": 4}, ValueError, "tp_size=4 needs set_parallel_mode=True"),
    ],
)
def test_bad_arguments_are_refused_by_name(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        te.LayerNormMLP(32, 64, device="cpu", **kwargs)


def test_alignment_names_the_dimension() -> None:
    layer = te.LayerNormMLP(32, 40, device="cpu")
    with te.autocast(recipe=DelayedScaling()), pytest.raises(ValueError, match=r"ffn_hidden_size.*16, got 40"):
        layer(torch.randn(16, 32))
