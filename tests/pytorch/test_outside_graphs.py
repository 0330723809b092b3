# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What programs that capture CUDA graphs by themselves ask for."""

from __future__ import annotations

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, MXFP8BlockScaling
from te_dispatch.pytorch.fp8.autocast import thread
from te_dispatch.pytorch.graphs import outside


def trained(model: torch.nn.Module) -> None:
    with te.autocast(recipe=DelayedScaling()):
        model(torch.randn(32, 32)).square().mean().backward()


def states(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.clone() for key, value in model.state_dict().items() if key.endswith("_extra_state")]


def test_states_are_saved_and_written_back() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.Linear(32, 32, device="cpu"), torch.nn.ReLU(), te.LayerNormMLP(32, 64, device="cpu"))
    trained(model)
    before = states(model)
    saved = outside.save_fp8_tensors([model, model[0]], DelayedScaling())
    assert saved is not None and [x is None for x in saved] == [True, False, True, False, False]
    trained(model)
    assert any(not torch.equal(a, b) for a, b in zip(before, states(model)))
    outside.restore_fp8_tensors([model, model[0]], saved)
    assert all(torch.equal(a, b) for a, b in zip(before, states(model)))
    with pytest.raises(RuntimeError, match="fp8_tensors must be of these 4 modules"):
        outside.restore_fp8_tensors([model], saved)
    assert all(torch.equal(a, b) for a, b in zip(before, states(model)))


def test_states_that_did_not_exist_begin_anew() -> None:
    model = te.Linear(32, 32, device="cpu")
    saved = outside.save_fp8_tensors([model], DelayedScaling())
    assert saved == [None]
    trained(model)
    outside.restore_fp8_tensors([model], saved)
    tensors = model.get_fp8_meta_tensors()
    assert tensors is not None and torch.equal(tensors["scaling_fwd"][0], torch.ones(2))


def test_other_recipes_have_no_states() -> None:
    model = te.Linear(32, 32, device="cpu")
    assert outside.save_fp8_tensors([model], MXFP8BlockScaling()) is None
    assert outside.save_fp8_tensors([model], None) is None
    outside.restore_fp8_tensors([model], None)


def test_a_capture_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not outside.is_graph_capturing()
    outside.set_capture_start()
    assert outside.is_graph_capturing()
    outside.set_capture_end()
    assert not outside.is_graph_capturing()
    monkeypatch.setattr(thread, "recording", object())  # as inside of make_graphed_callables
    assert outside.is_graph_capturing()
