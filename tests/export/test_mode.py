# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`onnx_export` as a context, and what graphs made inside cannot hold."""

from __future__ import annotations

import threading

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling, NVFP4BlockScaling
from te_dispatch.core import scopes
from te_dispatch.core.errors import NoImplementation
from te_dispatch.pytorch.export import is_in_onnx_export_mode, onnx_export

pytestmark = pytest.mark.slow


def x_of(seed=0, rows=16):
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed))


def exported(module, x, strict=False):
    with torch.no_grad(), onnx_export(enabled=True):
        return torch.export.export(module, (x,), strict=strict)


def targets(program):
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def test_it_nests_and_restores_what_was():
    outside = scopes.capture()
    assert not is_in_onnx_export_mode()
    with onnx_export():
        assert not is_in_onnx_export_mode() and scopes.capture() is outside
    with onnx_export(enabled=True):
        inside = scopes.capture()
        assert is_in_onnx_export_mode() and inside is not outside
        with onnx_export(enabled=True):
            assert is_in_onnx_export_mode() and scopes.capture() is inside
        with onnx_export(enabled=False):
            assert not is_in_onnx_export_mode() and scopes.capture() is outside
            with pytest.raises(KeyError), onnx_export(enabled=True):
                raise KeyError
            assert not is_in_onnx_export_mode() and scopes.capture() is outside
        assert is_in_onnx_export_mode() and scopes.capture() is inside
    assert not is_in_onnx_export_mode() and scopes.capture() is outside


def test_it_belongs_to_the_thread():
    seen = []
    with onnx_export(enabled=True):
        thread = threading.Thread(target=lambda: seen.append(is_in_onnx_export_mode()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_casts_become_pairs_whatever_ran_before_and_whatever_the_policy_prefers():
    module, recipe = te.LayerNormLinear(32, 16), Float8CurrentScaling()
    with torch.no_grad(), te.autocast(recipe=recipe):
        expected = module(x_of(1))
        for policy in ("portable", "verify"):
            with te_dispatch.policy(policy):
                module(x_of())
                program = exported(module, x_of())
            found = targets(program)
            assert found.count("te_dispatch.quantize_linear.default") == 2
            assert found.count("te_dispatch.dequantize_linear.default") == 2
            assert not [name for name in found if name.startswith(("te_dispatch.launch", "aten.view.dtype"))]
            # Operands are equal; the bound of a product in another order of float32 sums.
            assert torch.allclose(program.module()(x_of(1)), expected, rtol=0, atol=2e-6)
        # Without the mode: the graph of `torch.export`, in which nothing of ONNX remains.
        assert "te_dispatch.quantize_linear.default" not in targets(torch.export.export(module, (x_of(),)))


def test_exporting_leaves_a_module_that_trains():
    def step(module, between):
        with te.autocast(recipe=recipe):
            module(x_of()).sum().backward()
            between(module)
            module(x_of(1)).sum().backward()
        scales = module.fp8_state.scales.forward
        return module.weight.grad, scales.scale.clone(), scales.history.clone()

    recipe, results = DelayedScaling(amax_history_len=4), []
    for between in (lambda module: None, lambda module: exported(module, x_of(2))):
        torch.manual_seed(0)
        results.append(step(te.Linear(32, 16), between))
    assert all(torch.equal(a, b) for a, b in zip(*results))


class WithOutput(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = te.Linear(32, 16)

    def forward(self, x):
        return self.linear(x, fp8_output=True)


def test_what_cannot_be_expressed_is_refused_by_name():
    nvfp4 = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
    with te.autocast(recipe=nvfp4), pytest.raises(NotImplementedError, match="nvfp4 quantization"):
        exported(te.Linear(32, 32), x_of(rows=32))
    current = te.autocast(recipe=Float8CurrentScaling())
    with current, pytest.raises(NotImplementedError, match="fp8_output=True is not supported"):
        exported(WithOutput(), x_of())
    with current:  # of this context alone
        assert type(WithOutput()(x_of())) is te.QuantizedTensor
    sequence = torch.randn(4, 2, 32)
    for arguments in ({"attention_dropout": 0.1, "hidden_dropout": 0.0}, {"attention_dropout": 0.0}):
        layer = te.TransformerLayer(32, 64, 2, **arguments)
        with pytest.raises(NotImplementedError, match=r"call model\.eval\(\)"):
            exported(layer, sequence)
        exported(layer.eval(), sequence)
    with pytest.raises(Exception, match="strict=False"):
        exported(te.Linear(32, 32), x_of(), strict=True)
    inside = onnx_export(enabled=True), te_dispatch.using(gemm="reference")
    with inside[0], inside[1], pytest.raises(NoImplementation, match="reference"):
        torch.export.export(te.Linear(32, 32), (x_of(),), strict=False)
