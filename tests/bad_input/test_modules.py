# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Modules refuse bad inputs by name, and serve empty ones; their FP8 state is untouched by a refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from tests.bad_input import outcomes

H = 32
MODULES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "LayerNorm": (lambda: te.LayerNorm(H), (4, 16, H)),
    "RMSNorm": (lambda: te.RMSNorm(H), (4, 16, H)),
    "Linear": (lambda: te.Linear(H, 64), (4, 16, H)),
    "LayerNormLinear": (lambda: te.LayerNormLinear(H, 64), (4, 16, H)),
    "LayerNormMLP": (lambda: te.LayerNormMLP(H, 64), (4, 16, H)),
    "MultiheadAttention": (lambda: te.MultiheadAttention(H, 4, attention_dropout=0.0), (4, 16, H)),
    "TransformerLayer": (
        lambda: te.TransformerLayer(H, 64, 4, hidden_dropout=0.0, attention_dropout=0.0),
        (4, 16, H),
    ),
}
WRONG: dict[str, Callable[[torch.Tensor], Any]] = {
    "int64": lambda x: x.long(),
    "bool": lambda x: x > 0,
    "complex64": lambda x: x.to(torch.complex64),
    "float64": lambda x: x.double(),
    "another float than the weights": lambda x: x.bfloat16(),
    "longer last dimension": lambda x: torch.cat((x, x[..., :1]), -1),
    "empty last dimension": lambda x: x[..., :0],
    "scalar": lambda x: x.sum(),
    "meta": lambda x: x.to("meta"),
    "list": lambda x: x.tolist(),
    "number": lambda x: 1.0,
    "word": lambda x: "x",
    "None": lambda x: None,
}


def clear(error: BaseException) -> bool:
    """Names a module's input, and says what came and what was expected, in the modules' or the operators' words."""
    text = str(error)
    return (
        isinstance(error, (TypeError, ValueError))
        and re.search(r"inp|input|hidden_states|inputmats|query_layer|tensor", text) is not None
        and re.search(r"got|is on|has", text) is not None
        and re.search(r"must|expected|needs", text) is not None
    )


@pytest.mark.parametrize("fp8", [False, True], ids=["high precision", "fp8"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", MODULES)
def test_wrong_inputs_are_named(name: str, wrong: str, fp8: bool) -> None:
    make, shape = MODULES[name]
    module, x = make(), torch.randn(shape)
    if name.endswith("Norm") and wrong == "another float than the weights":
        assert module(x.bfloat16()).dtype == torch.float32  # computed in the dtype of the parameters
        return
    with te.autocast(enabled=fp8, recipe=DelayedScaling()):
        module(x)
    before = outcomes.state([*module.state_dict().values()])
    with te.autocast(enabled=fp8, recipe=DelayedScaling()):
        try:
            module(WRONG[wrong](x))
        except Exception as error:
            assert clear(error), f"{type(error).__name__}: {error}"
        else:
            pytest.fail("took it")
    assert outcomes.state([*module.state_dict().values()])[: len(before)] == before


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("fp8", [False, True], ids=["high precision", "fp8"])
def test_no_tokens(name: str, fp8: bool) -> None:
    make, shape = MODULES[name]
    module = make()
    x = torch.randn(0, *shape[1:], requires_grad=True)
    with te.autocast(enabled=fp8, recipe=DelayedScaling()):
        y = module(x)
    y.sum().backward()
    assert y.shape[0] == 0 and x.grad is not None and x.grad.shape == x.shape
    assert all(p.grad is None or not p.grad.any() for p in module.parameters())


@pytest.mark.parametrize(
    "name", ["Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"]
)
def test_fp8_needs_multiples_of_16_and_says_which_and_how(name: str) -> None:
    module = MODULES[name][0]()
    with te.autocast(recipe=DelayedScaling()), pytest.raises(ValueError, match=r"(?s)16.*got.*Fp8Padding"):
        module(torch.randn(3, 5, H))


@pytest.mark.parametrize("name", MODULES)
def test_strided_inputs_give_the_same(name: str) -> None:
    make, shape = MODULES[name]
    module, x = make(), torch.randn(shape)
    wide = torch.zeros(*shape[:-1], 2 * H)
    wide[..., ::2] = x
    expected, strided = module(x), module(wide[..., ::2])
    # Products of strided operands may sum in another order: a few roundings of the largest element.
    bound = 64 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert (strided - expected).abs().max() <= bound


@pytest.mark.parametrize("wrong", ["int64", "complex64", "scalar", "list", "None", "number"])
@pytest.mark.parametrize("argument", ["query_layer", "key_layer", "value_layer"])
def test_attention_operands(argument: str, wrong: str) -> None:
    module = te.DotProductAttention(4, 8)
    given = {n: torch.randn(6, 2, 4, 8) for n in ("query_layer", "key_layer", "value_layer")}
    with pytest.raises((TypeError, ValueError), match=r"(query|key|value)_layer|^[qkv]: got"):
        module(**{**given, argument: WRONG[wrong](given[argument])})


@pytest.mark.parametrize("wrong", ["int64", "complex64", "scalar", "list", "None", "meta"])
def test_rotary_operands(wrong: str) -> None:
    freqs, x = te.RotaryPositionEmbedding(8)(6), torch.randn(6, 2, 4, 8)
    with pytest.raises((TypeError, ValueError), match=r"\bt\b|^x: got|freqs"):
        te.apply_rotary_pos_emb(WRONG[wrong](x), freqs)
    with pytest.raises((TypeError, ValueError), match="freqs"):
        te.apply_rotary_pos_emb(x, WRONG[wrong](freqs))


@pytest.mark.parametrize("wrong", ["scalar", "list", "None", "word"])
@pytest.mark.parametrize("kind", [te.Fp8Padding, te.Fp8Unpadding])
def test_padding_operands(kind: Any, wrong: str) -> None:
    rows = 5 if kind is te.Fp8Padding else 32
    with pytest.raises((TypeError, ValueError), match="inp"):
        kind(2)(WRONG[wrong](torch.randn(rows, 8)), [2, 3])
    for splits in ([2], [2, 3, 4], [-1, 6], [2.5, 2.5], "ab", None, 5):
        with pytest.raises((TypeError, ValueError), match="m_splits"):
            kind(2)(torch.randn(rows, 8), splits)
