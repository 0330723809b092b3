# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Compiled graphs and the policy in force: which implementations they call, when they are traced again."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading

import pytest
import torch
from torch._dynamo.utils import counters

import te_dispatch
import te_dispatch.pytorch  # registers what is traced in place of trampolines
from te_dispatch import ops
from te_dispatch.core.errors import Declined
from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.quantizers import CurrentQuantizer
from te_dispatch.pytorch.compile import launch
from tests.compile.training import DEVICE, RECIPES, assert_same, build, compiler, train

pytestmark = pytest.mark.sampled(40)

ROWS = (16,) * 4


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    te_dispatch.set_policy(None)


class Graphs:
    """A backend that keeps the graphs it is given and runs them as they are."""

    def __init__(self):
        self.texts = []

    def __call__(self, module, example_inputs):
        parts = [part for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
        self.texts.append("\n".join(str(part.graph) for part in parts))
        return module.forward

    def compiler(self):
        return lambda function: torch.compile(function, fullgraph=True, backend=self)


def switching(step):
    te_dispatch.set_policy("verify" if step % 2 else None)
    return contextlib.nullcontext()


def scoped(step):
    return te_dispatch.using(gemm="reference") if step % 2 else contextlib.nullcontext()


@pytest.mark.parametrize("wrap", [switching, scoped])
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_a_policy_that_changes_between_steps(wrap, recipe):
    how = {"rows": ROWS, "wrap": wrap}
    expected = train(build("Linear"), RECIPES[recipe], **how)
    te_dispatch.set_policy(None)
    assert_same(expected, train(build("Linear"), RECIPES[recipe], compiler(), **how))


@pytest.mark.parametrize("wrap", [switching, scoped])
def test_each_policy_is_traced_once(wrap):
    graphs = Graphs()
    train(build("Linear"), None, graphs.compiler(), rows=ROWS, wrap=wrap)
    first, second = graphs.texts
    assert "reference." not in first
    assert second.count("gemm@1:reference.gemm@1") == 3  # forward, dgrad, wgrad: a backward keeps its forward's choice


def test_a_backward_outside_the_scope_keeps_its_forwards_choice():
    """In the order forward, forward, backward, backward every backward runs under the other policy."""
    how = {"rows": ROWS, "order": "ffbb"}
    expected = train(build("Linear"), RECIPES["current"], wrap=scoped, **how)
    assert_same(expected, train(build("Linear"), RECIPES["current"], compiler(), wrap=scoped, **how))
    other = train(build("Linear"), RECIPES["current"], **how)
    assert not all(torch.equal(a, b) for a, b in zip(expected["dx"], other["dx"], strict=True))


def test_scopes_inside_the_region():
    graphs = Graphs()
    x, w = torch.randn(16, 32, device=DEVICE), torch.randn(8, 32, device=DEVICE)

    def step(x, w):
        y = ops.gemm(x, w, layout="NT").out
        with te_dispatch.using(gemm="reference"):
            y = y + ops.gemm(x, w, layout="NT").out
            with te_dispatch.policy("verify"):
                y = y * ops.activation_fwd(y, kind="gelu").out
            y = y + ops.gemm(x, w, layout="NT").out
        return y + ops.gemm(x, w, layout="NT").out

    expected, got = step(x, w), graphs.compiler()(step)(x, w)
    assert torch.equal(expected, got)
    (text,) = graphs.texts
    assert text.count("gemm@1:reference.gemm") == 2 and text.count("activation_fwd@1:reference") == 1


def test_an_unknown_word_in_a_traced_scope_is_refused():
    def step(x):
        with te_dispatch.using(gemm="refrence"):
            return ops.gemm(x, x, layout="NT").out

    with pytest.raises(Exception, match="reference"):
        compiler()(step)(torch.ones(16, 16, device=DEVICE))


POLICIES_NEVER_READ = """
import contextlib, sys, torch, te_dispatch, te_dispatch.pytorch as te

how = sys.argv[1]
attention = te.DotProductAttention(2, 16, attention_dropout=0.0)
q, k, v = (torch.randn(8, 2, 2, 16) for _ in range(3))
if how == "set_policy":
    attention(q, k, v)
    te_dispatch.set_policy("deterministic")
scope = te_dispatch.using(softmax="reference") if how == "using" else contextlib.nullcontext()
with scope:
    found = torch.compile(attention, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(found, attention(q, k, v))
"""


@pytest.mark.parametrize("how", ["fresh", "set_policy", "using"])
def test_attention_compiles_under_a_policy_that_nothing_has_read(how):
    run = subprocess.run([sys.executable, "-c", POLICIES_NEVER_READ, how], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_policies_do_not_share_a_cache_entry(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def misses(policy):
        te_dispatch.set_policy(policy)
        torch._dynamo.reset()
        counters.clear()
        train(build("Linear"), None, compiler("inductor"), rows=(16,))
        return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]

    assert misses(None) == (2, 0)  # forward and backward
    assert misses("verify") == (2, 0)
    assert misses(None) == (0, 2)
    assert misses("verify") == (0, 2)


def test_asyncio_scopes_are_refused():
    """A thread has one mirror and many tasks: a graph could run under another task's policy."""
    x, messages = torch.ones(16, 16, device=DEVICE), []

    async def main():
        with te_dispatch.using(gemm="reference"):
            try:
                compiler()(lambda x: ops.gemm(x, x, layout="NT").out)(x)
            except Exception as error:
                messages.append(str(error))

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join()
    assert len(messages) == 1 and "asyncio" in messages[0] and "set_policy" in messages[0]
    # Other threads go on.
    assert compiler()(lambda x: ops.gemm(x, x, layout="NT").out)(x).shape == (16, 16)


def test_a_decline_at_run_time_falls_back(monkeypatch):
    te_dispatch.set_policy(None)
    x = torch.randn(16, 32)
    made = CurrentQuantizer("e4m3fn")

    def step(x):
        # On a CPU, products of FP8 are emulated by both backends: a preference of the reference decides.
        with te_dispatch.using(prefer={"gemm": "reference"}):
            operand = ops.quantize(x, made, usage="both")
            return ops.gemm(operand, operand, layout="NT", out_dtype=torch.float32).out

    compiled = compiler()(step)
    compiled(x)
    (key,) = [key for key in launch._OPAQUE if key.startswith("gemm@1:reference.gemm@")]
    opaque = launch._OPAQUE[key]
    declined = []

    def declines(*args, **keywords):
        declined.append(args)
        raise Declined("not today")

    monkeypatch.setattr(opaque, "function", declines)
    operand = ops.quantize(x, made, usage="both")
    assert torch.equal(compiled(x), ops.gemm(operand, operand, layout="NT", out_dtype=torch.float32).out)
    assert len(declined) == 1
    assert opaque.operator is OPERATORS["gemm"]
