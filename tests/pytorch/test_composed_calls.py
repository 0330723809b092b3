# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A transformer layer's calls as one Function. That they give what its parts give whatever changes in between is in
`test_capture_differential`."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.pytorch import capture_stats
from te_dispatch.pytorch.autograd import apply
from te_dispatch.pytorch.capture.composed import ComposedCalls

from .capturing import RECIPES

LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped queries": {"num_gqa_groups": 2},
    "grouped queries, one part after the other": {"num_gqa_groups": 2, "qkv_weight_interleaved": False},
    "whole weights": {"fuse_qkv_params": True},
    "RMSNorm, SwiGLU, no bias": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
    "attention beside the MLP": {"parallel_attention_mlp": True},
    "batch first": {"attn_input_format": "bshd"},
}


def made(**others: Any) -> te.TransformerLayer:
    torch.manual_seed(0)
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": "cpu", **others}
    layer = te.TransformerLayer(64, 96, 4, **given)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def steps(layer: te.TransformerLayer, recipe: Any = None, count: int = 4, **others: Any) -> list[torch.Tensor]:
    """Results and gradients of the last of so many steps."""
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(32, 2, 64, generator=generator).requires_grad_()
        dy = torch.randn(32, 2, 64, generator=generator)
        layer.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x, **others)
        y.backward(dy)
    return [y, x.grad, *(p.grad for p in layer.parameters())]


def composed(y: torch.Tensor) -> bool:
    return type(y.grad_fn).__name__ == "_ComposedBackward"


def apart(patch: pytest.MonkeyPatch) -> None:
    """From here on parts are replayed one by one."""
    patch.setattr(apply, "TAPES", False)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("recipe", ["none", "delayed", "current", "block"])
@pytest.mark.parametrize("options", LAYERS)
def test_bits_are_those_of_the_parts(options: str, recipe: str, rotary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"rotary_pos_emb": te.RotaryPositionEmbedding(16)(32)} if rotary else {}
    found = steps(made(**LAYERS[options]), RECIPES[recipe], **others)
    assert composed(found[0])
    apart(monkeypatch)
    expected = steps(made(**LAYERS[options]), RECIPES[recipe], **others)
    assert not composed(expected[0])
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_the_third_call_is_one_hit() -> None:
    layer = made()
    steps(layer, count=2)
    capture_stats(reset=True)
    steps(layer, count=1)
    assert capture_stats().hits == 1
    assert not capture_stats().misses


@pytest.mark.parametrize(
    ("options", "others", "reason"),
    [
        ({"hidden_dropout": 0.1}, {}, "draw_rng_state"),
        ({"attention_dropout": 0.1}, {}, "draw_rng_state"),
        ({"apply_residual_connection_post_layernorm": True}, {}, "not replayed by itself"),
        ({}, {"is_first_microbatch": True}, "of PyTorch"),
    ],
)
def test_what_cannot_be_repeated_stays_with_the_parts(
    options: dict[str, Any], others: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said in the statistics; and the attempt draws no random number, and leaves nothing else."""
    capture_stats(reset=True)
    torch.manual_seed(5)
    layer = made(**options)
    torch.manual_seed(6)
    found = [*steps(layer, RECIPES["delayed"], **others), torch.get_rng_state()]
    assert not composed(found[0])
    assert [why for why in capture_stats().refusals if "TransformerLayer" in why and reason in why]
    apart(monkeypatch)
    layer = made(**options)
    torch.manual_seed(6)
    expected = [*steps(layer, RECIPES["delayed"], **others), torch.get_rng_state()]
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def _doubles(layer: te.TransformerLayer) -> None:
    layer.layernorm_mlp.register_forward_hook(lambda part, args, out: out * 2)


def _doubles_everywhere(layer: te.TransformerLayer) -> Any:
    return torch.nn.modules.module.register_module_forward_hook(
        lambda part, args, out: out * 2 if isinstance(part, te.LayerNormMLP) and isinstance(out, torch.Tensor) else None
    )


@pytest.mark.parametrize("change", [_doubles, _doubles_everywhere])
def test_hooks_on_parts_are_called(
    change: Callable[[te.TransformerLayer], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, twin = made(), made()
    steps(layer)
    registered = change(layer)
    try:
        if change is _doubles:
            change(twin)
        found = steps(layer, count=1)
        apart(monkeypatch)
        for a, b in zip(found, steps(twin, count=1), strict=True):
            assert torch.equal(a, b)
    finally:
        if registered is not None:
            registered.remove()


def test_a_graph_keeps_no_layer_and_a_layer_no_graph() -> None:
    layer = made()
    y = steps(layer)[0]
    x = torch.randn(32, 2, 64, requires_grad=True)
    with te.autocast(enabled=False):
        kept = layer(x)
    alive, given = weakref.ref(layer), weakref.ref(x)
    assert composed(kept)
    del layer, y
    gc.collect()
    assert alive() is None
    kept.sum().backward()
    del kept, x
    gc.collect()
    assert given() is None


def test_what_was_saved_goes_with_the_backward() -> None:
    layer = made()
    steps(layer)
    x = torch.randn(32, 2, 64, requires_grad=True)
    with te.autocast(enabled=False):
        y = layer(x)
    assert y.grad_fn.saved_tensors
    y.backward(torch.ones_like(y))
    with pytest.raises(RuntimeError, match="freed"):
        y.grad_fn.saved_tensors  # noqa: B018


@pytest.mark.parametrize("inputs", ["first", "last", "x", "several"])
def test_gradients_of_some(inputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts whose gradients nobody asks for note no amax, as they would not by themselves."""

    def run(layer: te.TransformerLayer) -> list[torch.Tensor]:
        steps(layer, RECIPES["delayed"])
        x = torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(9)).requires_grad_()
        parameters = list(layer.parameters())
        wanted = {"first": parameters[:1], "last": parameters[-1:], "x": [x], "several": [x, parameters[-2]]}[inputs]
        with te.autocast(recipe=RECIPES["delayed"]):
            y = layer(x)
        found = [*torch.autograd.grad(y.square().sum(), wanted)]
        return [*found, *(t for s in layer.state_dict().values() for t in [s] if s.dtype == torch.uint8)]

    found = run(made())
    apart(monkeypatch)
    for a, b in zip(found, run(made()), strict=True):
        assert torch.equal(a, b)


def test_copies_record_for_themselves() -> None:
    layer = made()
    steps(layer)
    twin = copy.deepcopy(layer)
    assert len(layer.composed_calls.signatures) == 1
    assert isinstance(twin.composed_calls, ComposedCalls)
    assert len(twin.composed_calls.signatures) == 0
    for a, b in zip(steps(layer), steps(twin), strict=True):
        assert torch.equal(a, b)


class _Watched(te.TransformerLayer):
    added = 0

    def _add(self, *args: Any) -> torch.Tensor:
        self.__dict__["added"] = self.added + 1
        return super()._add(*args)


def test_a_layer_of_a_derived_class_stays_with_its_parts() -> None:
    """What it does beside its calls would be left out."""
    layer = _Watched(64, 96, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
    steps(layer)
    assert layer.added == 8
