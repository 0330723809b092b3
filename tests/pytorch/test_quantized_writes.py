# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is written to a `QuantizedTensor` is cast as its own quantizer does."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8BlockScaling
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, MXFP8Quantizer

WRITES: dict[str, Any] = {
    "copy_": lambda t, new: t.copy_(new),
    "out": lambda t, new: torch.mul(new, 1.0, out=t),
    "data": lambda t, new: setattr(t, "data", new),
    "a view": lambda t, new: t.view(-1, 64).copy_(new.view(-1, 64)),
    "a clone": lambda t, new: t.clone().copy_(new),
}


def _delayed(scale: float = 3.0) -> DelayedQuantizer:
    return DelayedQuantizer(scale=torch.full((1,), scale), amax=torch.zeros(1))


@pytest.mark.parametrize("write", WRITES)
def test_delayed_scaling_takes_the_scale_of_the_state(write: str) -> None:
    quantizer, new = _delayed(), torch.randn(4, 8, 64) * 7
    x = te.QuantizedTensor.quantize(torch.randn(4, 8, 64), quantizer)
    quantizer.scale.fill_(5.0)  # an update of the state in between
    quantizer.amax.zero_()
    written = WRITES[write](x, new)
    result = written if write in ("a view", "a clone") else x
    expected = te.QuantizedTensor.quantize(new, DelayedQuantizer(scale=torch.full((1,), 5.0)))
    assert torch.equal(result._row_data.flatten(), expected._row_data.flatten())
    assert result._row_scale_inv.item() == torch.tensor(1 / 5.0).item()
    assert quantizer.amax.item() == new.abs().max().item()


@pytest.mark.parametrize(
    "quantizer",
    [
        CurrentQuantizer(power_of_two=True),
        CurrentQuantizer(epsilon=100.0),
        CurrentQuantizer("e5m2", common=True),
        BlockQuantizer(power_of_two=False),
        BlockQuantizer(two_d=True, epsilon=100.0),
    ],
)
def test_options_of_the_quantizer_hold_for_what_is_written(quantizer: Any) -> None:
    x, new = te.QuantizedTensor.quantize(torch.randn(64, 64), quantizer), torch.randn(64, 64) * 7
    expected = te.QuantizedTensor.quantize(new, quantizer)
    assert not torch.equal(expected._row_scale_inv, te.QuantizedTensor.quantize(
        new, type(quantizer)() if isinstance(quantizer, CurrentQuantizer) else BlockQuantizer(two_d=quantizer.two_d)
    )._row_scale_inv)  # fmt: skip
    stream = io.BytesIO()
    torch.save(x, stream)
    stream.seek(0)
    moved = x.to("cpu", copy=True)
    for target in (x, copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.load(stream, weights_only=True), moved):
        target.copy_(new)
        assert torch.equal(target._row_data, expected._row_data)
        assert torch.equal(target._row_scale_inv, expected._row_scale_inv)


def test_copies_have_no_part_in_a_state() -> None:
    quantizer = _delayed()
    x = te.QuantizedTensor.quantize(torch.randn(8, 32), quantizer)
    quantizer.amax.zero_()
    new = torch.randn(8, 32)
    expected = te.QuantizedTensor.quantize(new, CurrentQuantizer())
    for own in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        own.copy_(new)
        assert torch.equal(own._row_data, expected._row_data) and quantizer.amax.item() == 0


def test_a_copy_on_another_device_has_no_part_in_a_state() -> None:
    assert te.QuantizedTensor.quantize(torch.randn(8, 32), _delayed()).to("meta")._quantizer is None


def test_a_quantized_source_of_the_same_format_is_copied_as_it_is() -> None:
    x = te.QuantizedTensor.quantize(torch.randn(8, 32), _delayed(3.0))
    other = te.QuantizedTensor.quantize(torch.randn(8, 32), _delayed(5.0))
    x.copy_(other)
    assert torch.equal(x._row_data, other._row_data) and torch.equal(x._row_scale_inv, other._row_scale_inv)


def test_data_takes_over_the_quantizer_too() -> None:
    x = te.QuantizedTensor.quantize(torch.randn(8, 32), _delayed())
    x.data = te.QuantizedTensor.quantize(torch.randn(8, 32), MXFP8Quantizer())
    new = torch.randn(8, 32)
    x.copy_(new)
    assert torch.equal(x.dequantize(), te.QuantizedTensor.quantize(new, MXFP8Quantizer()).dequantize())


def test_what_leaves_a_module_has_the_scale_of_the_module() -> None:
    torch.manual_seed(0)
    layer = te.Linear(32, 32, device="cpu")
    recipe = DelayedScaling(amax_history_len=2)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            hidden = layer(torch.randn(16, 32), fp8_output=True)
    scale = layer.fp8_state.scales.output.scale.clone()
    new = torch.randn(16, 32) * 100
    with torch.no_grad():
        hidden.copy_(new)
    expected = te.QuantizedTensor.quantize(new, DelayedQuantizer(scale=scale), "row")
    assert scale.item() != 1 and torch.equal(hidden.dequantize(), expected.dequantize())
    assert layer.fp8_state.scales.output.history[0].item() == new.abs().max().item()


def test_what_leaves_a_module_is_written_with_the_options_of_the_recipe() -> None:
    torch.manual_seed(0)
    layer = te.Linear(128, 128, device="cpu")
    with te.autocast(recipe=Float8BlockScaling(use_f32_scales=True)), torch.no_grad():
        hidden = layer(torch.randn(16, 128), fp8_output=True)
        new = torch.randn(16, 128) * 3
        hidden.copy_(new)
    expected = te.QuantizedTensor.quantize(new, BlockQuantizer(power_of_two=False), "row")
    assert torch.equal(hidden._row_scale_inv, expected._row_scale_inv)


def test_a_parameter_that_is_trained_feeds_its_state() -> None:
    quantizer = _delayed(4.0)
    weight = torch.nn.Parameter(te.QuantizedTensor.quantize(torch.randn(32, 32), quantizer))
    before = weight.detach().dequantize()
    (torch.randn(8, 32) @ weight.t()).sum().backward()
    torch.optim.SGD([weight], lr=0.5).step()
    new = before - 0.5 * weight.grad
    expected = te.QuantizedTensor.quantize(new, DelayedQuantizer(scale=quantizer.scale))
    assert torch.equal(weight.detach().dequantize(), expected.dequantize())
    assert quantizer.amax.item() >= new.abs().max().item()


def test_a_quantizer_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="quantizer: got one for e5m2 with tensor scaling, expected e4m3fn"):
        te.QuantizedTensor(
            torch.zeros(2, 2, dtype=torch.uint8), None, torch.ones(1), None, None, "e4m3fn", "tensor", "canonical",
            (2, 2), torch.float32, quantizer=CurrentQuantizer("e5m2"),
        )  # fmt: skip
