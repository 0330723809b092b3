# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer Engine's variables of attention, set after the first call: what is traced then goes by them."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.core import scopes
from tests.compile.training import DEVICE

pytestmark = pytest.mark.sampled(4)

SWITCHES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
#: In the table of `NoImplementation`.
REASON = r"rejected by policy: not among the allowed: nothing \(NVTE_FLASH_ATTN=0, NVTE_FUSED_ATTN=0"


class Attention(torch.nn.Module):
    """A product, whose operators look at the policy first, then attention."""

    def __init__(self):
        super().__init__()
        self.qkv = te.Linear(32, 96, device=DEVICE)
        self.core = te.DotProductAttention(2, 16)

    def forward(self, x):
        return self.core(qkv_layer=self.qkv(x).view(*x.shape[:2], 3, 2, 16))


WAYS = {
    "torch.compile": lambda module, x: torch.compile(module, fullgraph=True, backend="eager")(x),
    "torch.compile with graph breaks": lambda module, x: torch.compile(module, backend="eager")(x),
    "torch.export": lambda module, x: torch.export.export(module, (x,), strict=False).module()(x),
    "torch.export, strict": lambda module, x: torch.export.export(module, (x,), strict=True).module()(x),
    "make_fx": lambda module, x: make_fx(module, tracing_mode="fake", _allow_non_fake_inputs=True)(x)(x),
    "eager": lambda module, x: module(x),
}


@pytest.fixture(autouse=True)
def read_before(monkeypatch):
    torch._dynamo.reset()
    te.Linear(16, 16, device=DEVICE)(torch.randn(4, 16, device=DEVICE))  # reads the environment
    yield
    monkeypatch.undo()
    te_dispatch.reload_environment()


def switch(monkeypatch, value):
    for name in SWITCHES:
        monkeypatch.setenv(name, value)


def x_of():
    return torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@pytest.mark.parametrize("way", WAYS)
def test_a_trace_goes_by_the_variables_of_its_time(way, monkeypatch):
    module, x = Attention(), x_of()
    switch(monkeypatch, "0")
    with torch.no_grad(), pytest.raises(Exception, match=REASON):
        WAYS[way](module, x)
    switch(monkeypatch, "1")
    with torch.no_grad():
        assert torch.equal(WAYS[way](module, x), module(x))


def test_a_graph_keeps_its_variables_until_they_are_read_again(monkeypatch):
    module, x = Attention(), x_of()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    expected = compiled(x)
    switch(monkeypatch, "0")
    assert torch.equal(compiled(x), expected)
    with pytest.raises(te_dispatch.NoImplementation):
        module(x)
    with pytest.raises(Exception, match=REASON):
        compiled(x)
    switch(monkeypatch, "1")
    assert torch.equal(compiled(x), expected)


def test_a_scope_keeps_what_was_in_force_when_it_was_entered(monkeypatch):
    module, x = Attention(), x_of()
    with te_dispatch.using(gemm="torch"):
        inside = scopes.capture()
        switch(monkeypatch, "0")
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        assert torch.equal(compiled(x), module(x)) and scopes.capture() is inside
    with pytest.raises(Exception, match=REASON):
        compiled(x)


@pytest.mark.parametrize("way", WAYS)
def test_a_value_that_cannot_be_read_is_an_error_while_tracing(way, monkeypatch):
    module, x = Attention(), x_of()
    monkeypatch.setenv("NVTE_FLASH_ATTN", "true")
    with torch.no_grad(), pytest.raises(Exception, match=r"NVTE_FLASH_ATTN=true: expected 0 or 1"):
        WAYS[way](module, x)
