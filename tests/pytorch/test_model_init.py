# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`quantized_model_init`: entered where parameters stay as they are, refused where they would be quantized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, MXFP8BlockScaling

both = pytest.mark.parametrize("init", [te.quantized_model_init, te.fp8_model_init])


@both
def test_parameters_are_those_of_modules_made_outside(init: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    outside = te.LayerNormLinear(32, 32, device="cpu", params_dtype=torch.bfloat16)
    torch.manual_seed(0)
    with init(enabled=False, recipe=MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        inside = te.LayerNormLinear(32, 32, device="cpu", params_dtype=torch.bfloat16)
    for (name, found), expected in zip(inside.named_parameters(), outside.parameters()):
        assert type(found) is torch.nn.Parameter and torch.equal(found, expected), name


@both
@pytest.mark.parametrize("arguments", [{}, {"enabled": True}, {"enabled": True, "recipe": DelayedScaling()}])
def test_quantized_parameters_are_refused_by_name(init: Callable[..., Any], arguments: dict[str, Any]) -> None:
    refused = pytest.raises(NotImplementedError, match="quantized_model_init: enabled=True is not supported yet")
    with refused, init(**arguments):
        pytest.fail("the block was entered")


@both
def test_what_a_block_raises_comes_out(init: Callable[..., Any]) -> None:
    with pytest.raises(KeyError, match="inside"), init(enabled=False):
        raise KeyError("inside")
