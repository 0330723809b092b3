# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Opaque implementations in compiled graphs: same bits as eager, results in the graph's memory, refusals."""

from __future__ import annotations

import pytest
import torch

import te_dispatch.ops  # noqa: F401  # declares the operators
from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.quantizers import DelayedQuantizer
from te_dispatch.ops import alloc
from te_dispatch.ops.results import NormForward
from te_dispatch.pytorch.compile import make_opaque
from te_dispatch.pytorch.compile.flatten import Flat, encode
from tests.compile import opaque_numpy as fake

pytestmark = pytest.mark.sampled(40)

BACKENDS = ("eager", "aot_eager", "inductor")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    fake.calls.clear()


def compiled(function, backend, dynamic=None):
    return torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)


def delayed(encoding="e4m3fn"):
    return DelayedQuantizer(encoding=encoding, scale=torch.full((1,), 3.0), amax=torch.zeros(1))


def cast(x, quantizer, usage="both", out=None):
    return fake.quantize(x, quantizer, usage, out, None, None, None)


def product(a, b, layout="NT", alpha=1.0, out=None, accumulate=False):
    return fake.gemm(a, b, layout, alpha, out, accumulate, None, None, None, None, None, None, None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_casts_and_products_equal_eager(backend, dynamic):
    def step(x, w, qx, qw, out):
        a, b = cast(x, qx), cast(w, qw)
        y = product(a, b, alpha=0.5).out
        product(a, a, "TN", out=out, accumulate=True)
        return y, a, b.col_data

    def run(function):
        torch.manual_seed(1)
        qx, qw, found = delayed(), delayed("e5m2"), []
        out = torch.ones(16, 16)
        for rows in (4, 6, 10):
            y, a, col = function(torch.randn(2, rows, 16), torch.randn(8, 16), qx, qw, out)
            found += [y, a.row_data, a.col_data, a.row_scale_inv, col, qx.amax.clone(), qw.amax.clone(), out.clone()]
            assert a.shape == (2, rows, 16) and a.encoding == "e4m3fn" and a.col_scale_inv is a.row_scale_inv
        return found

    expected = run(step)
    before = dict(fake.calls)
    got = run(compiled(step, backend, dynamic))
    assert all(torch.equal(e, g) for e, g in zip(expected, got, strict=True))
    assert fake.calls == {name: 2 * count for name, count in before.items()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_lists_are_mutated_in_place(backend):
    def step(h1, h2, s1, s2, x):
        fake.update_delayed_scales([h1, h2], [s1, s2], [[448.0, 448.0], [57344.0]], "max", 0)
        return x * s1.sum()

    def run(function):
        torch.manual_seed(0)
        state = [torch.rand(4, 2), torch.rand(4, 1), torch.ones(2), torch.ones(1)]
        return [function(*state, torch.ones(3)), *state]

    assert all(torch.equal(e, g) for e, g in zip(run(step), run(compiled(step, backend)), strict=True))
    assert fake.calls["update_delayed_scales"] == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_record_is_written_and_returned(backend):
    def step(x, q, out):
        return cast(x, q, "row", out).row_data + 1

    q = delayed()
    out, x = cast(torch.zeros(4, 16), q, "row"), torch.randn(4, 16)
    expected = cast(x, q, "row").row_data
    assert torch.equal(compiled(step, backend)(x, q, out), expected + 1)
    assert torch.equal(out.row_data, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_older_signature_and_saved(backend):
    def step(x, gamma):
        norm = fake.rmsnorm_fwd(x, gamma, eps=1e-3)
        heads = norm.y.reshape(4, 2, 2, 4)
        found = fake.attention_fwd(heads, heads, heads)
        assert found.saved.implementation == "fake.attention" and found.saved.format == "fake1"
        assert found.saved.options == ("x", 3)
        return norm.y, norm.rstd, found.out, found.saved.tensors[0]

    x, gamma = torch.randn(4, 16), torch.rand(16)
    expected, got = step(x, gamma), compiled(step, backend)(x, gamma)
    assert all(torch.equal(e, g) for e, g in zip(expected, got, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_shapes_allocated_in_another_order(backend):
    def step(dy, gamma):
        dx, dgamma, dbeta = fake.swapped(dy, dy, gamma, dy[:, 0], dy[:, 0], False, None)
        return dx, dgamma, dbeta

    dx, dgamma, dbeta = compiled(step, backend)(torch.ones(2, 8), torch.ones(8))
    assert dx.eq(3).all() and dgamma.eq(1).all() and dbeta.eq(2).all()


def test_results_land_in_the_graphs_memory_and_the_allocator_is_restored():
    seen = []

    def norm(x, gamma, eps, zero_centered_gamma, residual, quantizer, usage, with_y, out_dtype):
        y = alloc.empty("y", tuple(x.shape), x.dtype, x.device)
        seen.append(y.data_ptr())
        y.copy_(x * 2)
        return NormForward(y, None, None, None, torch.ones(x.shape[0]))

    make_opaque(norm, OPERATORS["rmsnorm_fwd"], "fake.norm_in_place")

    def step(x, gamma):
        return norm(x, gamma, 1e-5, False, None, None, "row", False, None)

    x = torch.randn(3, 4)
    found = compiled(step, "eager")(x, torch.ones(4))
    assert torch.equal(found.y, x * 2) and found.rstd.eq(1).all()
    assert seen == [found.y.data_ptr()]
    assert alloc.set_allocator(None) is None


def test_a_result_that_breaks_the_shape_function_is_refused():
    def wrong(x, gamma, eps, zero_centered_gamma, residual, quantizer, usage, with_y, out_dtype):
        return NormForward(x[:1], None, None, None, torch.ones(x.shape[0]))

    make_opaque(wrong, OPERATORS["rmsnorm_fwd"], "fake.wrong")

    def step(x, gamma):
        return wrong(x, gamma, 1e-5, False, None, None, "row", False, None).rstd

    with pytest.raises(RuntimeError, match=r"rmsnorm_fwd@1:fake.wrong@1: result.y is torch.float32 \(1, 4\)"):
        compiled(step, "eager")(torch.randn(3, 4), torch.ones(4))
    assert alloc.set_allocator(None) is None


def test_the_graph_names_implementation_and_version():
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    compiled(lambda x, q: cast(x, q).row_data, backend)(torch.randn(4, 16), delayed())
    assert "quantize@1:fake.quantize@7" in str(graphs[0].graph)
    # Inductor copies arguments into comments of its GPU programs: with a line break these did not parse.
    (node,) = (node for node in graphs[0].graph.nodes if node.target is torch.ops.te_dispatch.launch)
    assert not any("\n" in argument for argument in node.args if isinstance(argument, str))


@pytest.mark.parametrize("text", ["a;b", "a\nb"])
def test_a_string_that_would_break_the_encoding_is_refused(text):
    with pytest.raises(ValueError, match="must not hold a semicolon or a line break"):
        encode(text, Flat())
