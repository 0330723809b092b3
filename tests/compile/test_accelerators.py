# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What graphs for an accelerator are made of, on a machine that has none: fake tensors of a described device.

Code that a compiler generates for an accelerator contracts, divides and evaluates exp otherwise than eager does, so
nothing that rounds may be in the graph itself.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import te_dispatch.pytorch  # noqa: F401  # registers what is traced in place of trampolines
from te_dispatch import ops
from te_dispatch.core.devices import describe_device
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.scopes import MANAGER
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, MXFP8Quantizer
from te_dispatch.pytorch.compile import dispatch

pytestmark = pytest.mark.sampled(40)

LAUNCH = torch.ops.te_dispatch.launch

#: Calls that allocate, or look at a tensor's memory as another shape.
EXACT = {"empty", "empty_like", "getattr", "view", "reshape", "expand", "t", "size", "detach"}


@pytest.fixture(autouse=True)
def h100(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setitem(MANAGER.devices.known, ("cuda", 0), describe_device(MANAGER.snapshot, "nvidia:sm_90"))


def graph_of(function, *args):
    graphs = []

    def backend(module, example_inputs):
        graphs.append(module.graph)
        return module.forward

    torch.compile(function, fullgraph=True, backend=backend)(*args)
    (graph,) = graphs
    return graph


def delayed(device):
    return DelayedQuantizer(scale=torch.ones(1, device=device), amax=torch.zeros(1, device=device))


def calls(device):
    x, w, scores = (torch.ones(*shape, device=device) for shape in ((32, 64), (48, 64), (2, 2, 8, 8)))
    gamma, bias, quantizer = torch.ones(64, device=device), torch.ones(48, device=device), delayed(device)
    heads, angles = torch.ones(8, 2, 2, 16, device=device), torch.ones(8, 1, 1, 16, device=device)
    found = {
        "delayed": lambda x: ops.quantize(x, quantizer, usage="both").row_scale_inv,
        "dbias": lambda x: ops.quantize_dbias(x, CurrentQuantizer(), usage="both").dbias,
        "amax": lambda x: ops.compute_amax(x),
        "norm": lambda x: ops.rmsnorm_fwd(x, gamma).y,
        "norm with a cast": lambda x: ops.layernorm_fwd(x, gamma, gamma, quantizer=quantizer).y_quantized.row_data,
        "activation": lambda x: ops.activation_fwd(x, kind="gelu").out,
        "activation with a cast": lambda x: (
            ops.activation_fwd(x, kind="swiglu", quantizer=quantizer).out_quantized.row_data
        ),
        "activation backward": lambda x: ops.activation_bwd(x, x, kind="gelu", with_dbias=True).dbias,
        "gemm": lambda x: ops.gemm(x, w, layout="NT", bias=bias).out,
        "softmax": lambda x: ops.softmax_fwd(scores, scale=0.3),
        "rope": lambda x: ops.rope_fwd(heads, angles),
        "dropout": lambda x: ops.dropout_add_fwd(x, x).out,
    }
    for quantizer_of in (CurrentQuantizer, BlockQuantizer, MXFP8Quantizer):
        made = quantizer_of()
        found[made.kind] = lambda x, made=made: ops.quantize(x, made, usage="row").row_scale_inv
    return x, found


NAMES = sorted(calls("cpu")[1])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_rounds_is_inlined_on_an_accelerator(name):
    with FakeTensorMode():
        x, found = calls("cuda:0")
        graph = graph_of(found[name], x)
    names = {getattr(node.target, "__name__", node.target) for node in graph.nodes if node.op.startswith("call")}
    assert any(node.target in (LAUNCH, LAUNCH.default) for node in graph.nodes)
    assert names - EXACT <= {"launch", "launch.default"}, names


@pytest.mark.parametrize("name", NAMES)
def test_the_same_call_is_inlined_on_the_cpu(name):
    """After the accelerator's too: dynamo knows a function by one substitute for all devices."""
    with FakeTensorMode():
        x, found = calls("cuda:0")
        graph_of(found[name], x)
    torch._dynamo.reset()
    x, found = calls("cpu")
    graph = graph_of(found[name], x)
    assert not any(node.target in (LAUNCH, LAUNCH.default) for node in graph.nodes)


def test_copies_and_pytorchs_fused_kernels_are_inlined_everywhere():
    answers = {
        (name, traits): dispatch._inlined_on(OPERATORS[name], traits)
        for name in OPERATORS
        for traits in (("plain_torch",), ("plain_torch", "fused"), ())
    }
    assert answers["transpose_quantized", ("plain_torch",)] == dispatch.EVERY_DEVICE
    assert answers["attention_fwd", ("plain_torch", "fused")] == dispatch.EVERY_DEVICE
    assert answers["attention_fwd", ("plain_torch",)] == dispatch.CPU
    assert {answers[name, ()] for name in OPERATORS} == {dispatch.NO_DEVICE}
    makes_records = [name for name in OPERATORS if "quantize" in name and name not in dispatch._ONLY_MOVE]
    assert {answers[name, ("plain_torch",)] for name in makes_records} == {dispatch.CPU}
