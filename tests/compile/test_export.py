# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""torch.export and make_fx, before and after the first eager call: the graphs compute what eager computes."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import te_dispatch
from te_dispatch import ops
from te_dispatch.common.recipe import CustomRecipe, MXFP8BlockScaling, NVFP4BlockScaling
from te_dispatch.core.scopes import MANAGER
from te_dispatch.pytorch.fp8.quantizer_factories import current_scaling_factory
from tests.compile.training import DEVICE, MODULES, RECIPES, UNQUANTIZED, autocast, build

pytestmark = pytest.mark.sampled(40)

EVERY_RECIPE = {
    **RECIPES,
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}
CASES = [(n, r) for n in MODULES for r in EVERY_RECIPE if r == "none" or n not in UNQUANTIZED]
STRICT = [
    (n, r) for n, r in CASES if r in ("none", "delayed") and n in ("Linear", "LayerNorm", "DotProductAttention")
] + [("LayerNormMLP gelu", "mxfp8"), ("TransformerLayer", "delayed"), ("TransformerLayer", "current")]

_LAUNCH = torch.ops.te_dispatch.launch.default


@pytest.fixture(autouse=True)
def nothing_was_called():
    """No operator has been called: what calls leave in tables decides where fake tensors go."""
    torch._dynamo.reset()
    for policy in ("portable", None):
        MANAGER._kept.clear()
        te_dispatch.set_policy(policy)
    assert not MANAGER.bindings.dispatchers
    yield
    te_dispatch.set_policy(None)


class Inside(torch.nn.Module):
    """A module whose forward is under an autocast of its own."""

    def __init__(self, module, recipe):
        super().__init__()
        self.module = module
        self.recipe = recipe

    def forward(self, x):
        with autocast(self.recipe):
            return self.module(x)


def test_a_custom_recipe_inside_is_refused_by_strict_export():
    """By dynamo's own error, which PyTorch 2.13 gives the reason in its debug context."""
    inside = Inside(build("Linear"), CustomRecipe(current_scaling_factory)), (torch.randn(32, 32, device=DEVICE),)
    with pytest.raises(Exception, match=r"Observed exception|NotImplementedError"):
        torch.export.export(*inside, strict=True)
    torch.export.export(*inside, strict=False)
    module, x = inside[0].module, inside[1]
    with autocast(inside[0].recipe):
        torch.export.export(module, x, strict=True)


def unwritten(graph):
    """Nodes that allocate memory which no node writes and the graph's outputs are made of."""
    needed = set()
    for node in reversed(list(graph.nodes)):  # in the order of the graph, users come later
        if node.op == "output" or needed.intersection(node.users) or _writes(node):
            needed.add(node)
    allocations = [n for n in needed if n.op == "call_function" and str(n.target).startswith("aten.empty")]
    return [node for node in allocations if not any(map(_writes, node.users))]


def _writes(node):
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def x_of(seed=0):
    return torch.randn(16, 8, 32, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def check(name, recipe, strict, inside):
    module, how = build(name), EVERY_RECIPE[recipe]

    def export():
        with autocast(None if inside else how):
            return torch.export.export(Inside(module, how) if inside else module, (x_of(),), strict=strict)

    before = export()
    with torch.no_grad(), autocast(how):
        expected = module(x_of(1))
    for program in (before, export()):
        assert unwritten(program.graph) == []
        assert torch.equal(program.module()(x_of(1)), expected)


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_without_dynamo(name, recipe):
    check(name, recipe, strict=False, inside=False)


@pytest.mark.parametrize("recipe", [r for r in EVERY_RECIPE if r != "none"])
def test_without_dynamo_and_with_an_autocast_inside(recipe):
    check("LayerNormMLP gelu", recipe, strict=False, inside=True)


@pytest.mark.parametrize(("name", "recipe"), STRICT)
def test_with_dynamo(name, recipe):
    check(name, recipe, strict=True, inside=recipe != "none")


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_computes_with_the_scales_in_force_when_it_was_made(strict):
    module, recipe = build("Linear"), RECIPES["delayed"]

    def step(factor):
        with autocast(recipe):
            module(x_of() * factor).sum().backward()

    step(3.0)
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    with torch.no_grad(), autocast(recipe):
        expected = module(x_of(1))
    with autocast(recipe):  # with gradients enabled, as most programs have them
        program = torch.export.export(module, (x_of(),), strict=strict)
    scales = module.fp8_state.scales.forward
    history, scale = scales.history.clone(), scales.scale.clone()
    assert torch.equal(program.module()(x_of(1)), expected)
    assert torch.equal(scales.history, history) and torch.equal(scales.scale, scale)
    step(9.0)
    assert not torch.equal(scales.scale, scale)
    assert all(torch.equal(dict(module.named_parameters())[name], weight) for name, weight in weights.items())
    assert torch.equal(program.module()(x_of(1)), expected)


def test_export_leaves_a_module_that_trains():
    """State that the trace had to make is real."""
    module, recipe = build("LayerNormLinear"), RECIPES["delayed"]
    with autocast(recipe):
        torch.export.export(module, (x_of(),), strict=False)
        module(x_of()).sum().backward()
    assert type(module.fp8_state.scales.forward.scale) is torch.Tensor
    assert bool((module.fp8_state.scales.forward.scale != 1).any())


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP gelu", "TransformerLayer"])
def test_make_fx_with_fake_tensors(name, called):
    module = build(name)
    parameters = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def run(parameters, x):
        return torch.func.functional_call(module, parameters, (x,))

    if called:
        module(x_of())
    graph = make_fx(run, tracing_mode="fake")(parameters, x_of())
    assert unwritten(graph.graph) == []
    assert torch.equal(graph(parameters, x_of(1)), module(x_of(1)))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("name", MODULES)
def test_make_fx_with_the_module_s_own_parameters(name, mode, called):
    module = build(name).eval()
    with torch.no_grad():
        if called:
            module(x_of())
        graph = make_fx(module, tracing_mode=mode, _allow_non_fake_inputs=True)(x_of())
        assert torch.equal(graph(x_of(1)), module(x_of(1)))
    module.train()(x_of(1).requires_grad_()).sum().backward()  # what the graph has left in the module is real
    assert all(type(p.grad) is torch.Tensor for p in module.parameters())


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("mode", ["fake", "symbolic", "real"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_make_fx_under_a_recipe_changes_no_state(recipe, mode, trains, called):
    """Neither while the graph is made nor when it runs: it computes with the scales in force when it was made."""
    module, how = build("LayerNormMLP gelu"), EVERY_RECIPE[recipe]
    parameters = dict(module.named_parameters())

    def run(parameters, x):
        with autocast(how):
            return torch.func.functional_call(module, parameters, (x,))

    def states():
        scales = [s for s in (module.fp8_state.scales.forward, module.fp8_state.scales.backward) if s is not None]
        return [t.clone() for s in scales for t in (s.history, s.scale)]

    for factor in (3.0, 5.0) if called else ():
        with autocast(how):
            module(x_of() * factor).sum().backward()
    before = states()
    with torch.set_grad_enabled(trains):
        graph = make_fx(run, tracing_mode=mode, _allow_non_fake_inputs=True)(parameters, x_of())
        after = states()
        got = graph(parameters, x_of(1)).detach()
    assert not before or all(map(torch.equal, before, after))
    assert all(map(torch.equal, after, states()))
    assert all(type(t) is torch.Tensor for t in after)
    with torch.no_grad(), autocast(how):
        assert torch.equal(got, module(x_of(1)))


@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP gelu", "MultiheadAttention"])
def test_dynamic_rows(name):
    module, rows = build(name), torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(module, (x_of(),), dynamic_shapes=({0: rows},), strict=False)
    for n in (3, 16):
        x = torch.randn(n, 8, 32, device=DEVICE)
        assert torch.equal(program.module()(x), module(x))


def test_what_is_exported_is_saved_and_loaded(tmp_path):
    module = build("TransformerLayer")
    torch.export.save(torch.export.export(module, (x_of(),)), tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    assert torch.equal(loaded(x_of(1)), module(x_of(1)))


@pytest.mark.parametrize(("name", "recipe"), [("Linear", "delayed"), ("LayerNormMLP gelu", "mxfp8"),
                                              ("TransformerLayer", "current")])  # fmt: skip
def test_other_implementations_are_calls(name, recipe):
    """Also after an eager call, which leaves them in tables that fake tensors and records of them must not reach."""
    te_dispatch.set_policy("verify")
    module, how = build(name), EVERY_RECIPE[recipe]

    def export():
        with autocast(how):
            return torch.export.export(module, (x_of(),), strict=False)

    before = export()
    with torch.no_grad(), autocast(how):
        expected = module(x_of(1))
    for program in (before, export()):
        targets = [node.target for node in program.graph.nodes]
        assert targets.count(_LAUNCH) >= 3
        assert unwritten(program.graph) == []
        assert torch.equal(program.module()(x_of(1)), expected)
        assert torch.equal(program.run_decompositions().module()(x_of(1)), expected)


def test_fake_tensors_alone_have_shapes_alone():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        out = ops.gemm(torch.empty(16, 32), torch.empty(8, 32), layout="NT").out
    assert out.shape == (16, 8) and type(out).__name__ == "FakeTensor"


def test_fake_tensors_alone_in_a_module_that_was_never_called():
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = build("MultiheadAttention")
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert module(mode.from_tensor(x_of())).shape == x_of().shape
    assert type(module(x_of())) is torch.Tensor
