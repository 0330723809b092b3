# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Small modules trained for a few steps, eagerly or compiled; everything that training produces, for comparison."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_dispatch.pytorch.modules.gemm_module import GemmModule

DEVICE = torch.device(os.environ.get("TE_DISPATCH_TEST_DEVICE", "cpu"))

#: PyTorch 2.9 and 2.10 refuse a backward when another one has written the amaxes of the same state since its forward
#: if these were written by operations that PyTorch sees, as those of `aot_eager` are (docs/torch_compile.md, Limits).
interleaved_with_aot_eager = pytest.mark.xfail(
    torch.__version__ < (2, 11), raises=RuntimeError, strict=True, reason="PyTorch before 2.11 checks versions here"
)

#: In which order forwards and backwards of the steps come, for `train` with `aot_eager`.
ORDERS = ["fbfb", *(pytest.param(order, marks=interleaved_with_aot_eager) for order in ("ffbb", "1f1b"))]


def refused(message):
    """A refusal while tracing. PyTorch 2.9 shows that there was one and not what it said."""
    return pytest.raises(Exception, match=message if torch.__version__ >= (2, 10) else "Observed exception")


RECIPES = {
    "none": None,
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}

MODULES = {
    "Linear": lambda: te.Linear(32, 64, device=DEVICE),
    "LayerNorm": lambda: te.LayerNorm(32, device=DEVICE),
    "RMSNorm": lambda: te.RMSNorm(32, device=DEVICE),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 64, device=DEVICE),
    "LayerNormMLP gelu": lambda: te.LayerNormMLP(32, 64, device=DEVICE),
    "LayerNormMLP swiglu": lambda: te.LayerNormMLP(
        32, 64, activation="swiglu", normalization="RMSNorm", bias=False, device=DEVICE
    ),
    "DotProductAttention": lambda: Attention(),
    "MultiheadAttention": lambda: te.MultiheadAttention(
        32, 2, attention_dropout=0.0, input_layernorm=True, device=DEVICE
    ),
    "TransformerLayer": lambda: te.TransformerLayer(
        32, 64, 2, hidden_dropout=0.0, attention_dropout=0.0, device=DEVICE
    ),
}

#: Without a GEMM of their own: recipes do nothing to them.
UNQUANTIZED = ("LayerNorm", "RMSNorm", "DotProductAttention")


class Attention(torch.nn.Module):
    """DotProductAttention on three parts of one input."""

    def __init__(self):
        super().__init__()
        self.core = te.DotProductAttention(2, 16, attention_dropout=0.0)

    def forward(self, x):
        q, k, v = (part.reshape(*x.shape[:-1], 2, 16) for part in (x, x * 0.5, x + 1.0))
        return self.core(q, k, v)


def build(name):
    torch.manual_seed(0)
    return MODULES[name]()


def autocast(recipe):
    return contextlib.nullcontext() if recipe is None else te.autocast(recipe=recipe)


def inputs(rows, width=32):
    return [
        torch.randn(n, 2, width, generator=torch.Generator().manual_seed(i)).to(DEVICE).requires_grad_()
        for i, n in enumerate(rows)
    ]


def states(module):
    """History and scales of every delayed-scaling state."""
    found = []
    for part in module.modules():
        if isinstance(part, GemmModule):
            for scales in part.fp8_state.scales.live().values():
                found += [scales.history.clone(), scales.scale.clone(), scales.scale_amax.clone()]
    return found


def train(module, recipe, compiler=None, inside=False, rows=(16, 16, 16), order="fbfb", wrap=None):
    """Outputs, all gradients and all state after one step per entry of `rows`.

    Args:
        compiler: what makes a function of a function, None for eager.
        inside: whether the autocast is part of the compiled function.
        order: ``fbfb``, ``ffbb`` or ``1f1b``.
        wrap: called with the step's number, gives a context for its forward.
    """

    def run(x):
        with autocast(recipe if inside else None):
            return module(x)

    run = run if compiler is None else compiler(run)
    xs, outputs = inputs(rows), []

    def forward(i):
        with autocast(None if inside else recipe), contextlib.nullcontext() if wrap is None else wrap(i):
            outputs.append(run(xs[i]))

    def backward(i):
        (outputs[i].square().sum() * (i + 1)).backward()

    steps = list(range(len(rows)))
    if order == "fbfb":
        for i in steps:
            forward(i)
            backward(i)
    elif order == "ffbb":
        for i in steps[::2]:
            pair = steps[i : i + 2]
            for j in pair:
                forward(j)
            for j in pair:
                backward(j)
    else:
        forward(0)
        for i in steps[1:]:
            forward(i)
            backward(i - 1)
        backward(steps[-1])
    return {
        "out": [y.detach() for y in outputs],
        "dx": [x.grad for x in xs],
        "grads": [p.grad for p in module.parameters()],
        "state": states(module),
    }


def compiler(backend="aot_eager", dynamic=False):
    return lambda function: torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def assert_same(expected, got):
    """Bit for bit."""
    for what, values in expected.items():
        assert len(values) == len(got[what]), what
        for i, (a, b) in enumerate(zip(values, got[what], strict=True)):
            assert torch.equal(a, b), f"{what}[{i}] differs by up to {(a - b).abs().max().item():.3g}"
