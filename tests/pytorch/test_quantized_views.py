# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`QuantizedTensor`: parts of any dimension, tensors without dimensions, subclasses."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.common.recipe import Float8CurrentScaling
from te_dispatch.core import scopes
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

QUANTIZERS: dict[str, Any] = {
    "current": CurrentQuantizer(),
    "delayed": DelayedQuantizer("e5m2", scale=torch.full((1,), 3.0)),
    "block_1d": BlockQuantizer(),
    "block_2d": BlockQuantizer(two_d=True),
    "mxfp8": MXFP8Quantizer(),
    "nvfp4": NVFP4Quantizer(),
}
every_format = pytest.mark.parametrize("name", QUANTIZERS)
per_tensor = pytest.mark.parametrize("name", ["current", "delayed"])


class Named(te.QuantizedTensor):
    """A subclass of a user."""


def _made(name: str, usage: str = "row", shape: Any = (4, 64, 64)) -> Any:
    torch.manual_seed(0)
    return te.QuantizedTensor.quantize(torch.randn(shape), QUANTIZERS[name], usage)


def _operators(function: Any) -> list[str]:
    calls: list[str] = []
    with scopes.observe(lambda operator, *_: calls.append(operator.name)):
        function()
    return calls


# -- parts --------------------------------------------------------------------------------------------------------

CUTS: dict[str, Any] = {
    "chunk of rows": lambda t: t.chunk(2, dim=1),
    "chunk of columns": lambda t: t.chunk(4, dim=2),
    "uneven split": lambda t: t.split([10, 30, 24], dim=-1),
    "slice": lambda t: [t[:, 3:20]],
    "slice of columns": lambda t: [t[..., 5:]],
    "narrow": lambda t: [t.narrow(1, 8, 16)],
    "slice of a slice": lambda t: [t[1:3, :, 16:48][:, 2:9]],
}


@per_tensor
@pytest.mark.parametrize("usage", ["row", "both"])
@pytest.mark.parametrize("cut", CUTS)
def test_parts_of_any_dimension_stay_quantized(name: str, usage: str, cut: str) -> None:
    x = _made(name, usage)
    wanted, found = CUTS[cut](x.dequantize()), []
    assert not _operators(lambda: found.extend(CUTS[cut](x)))
    for part, want in zip(found, wanted, strict=True):
        assert isinstance(part, te.QuantizedTensor) and part.shape == want.shape
        assert part._row_data.untyped_storage().data_ptr() == x._row_data.untyped_storage().data_ptr()
        assert torch.equal(part.dequantize(), want) and torch.equal(part + 1, want + 1)
        assert torch.equal(part.detach().dequantize(), want) and torch.equal(part.clone().dequantize(), want)
        assert torch.equal(part.reshape(-1, part.shape[-1]) + 0, want.reshape(-1, want.shape[-1]))
        assert torch.equal(part.view(1, *part.shape) + 0, want[None])
        record = part.record
        assert record.row_data.is_contiguous() and torch.equal(ops.dequantize(record), want)


@per_tensor
def test_parts_of_one_dimension(name: str) -> None:
    x = _made(name, shape=(24,))
    for part, want in zip(x.chunk(3), x.dequantize().chunk(3), strict=True):
        assert isinstance(part, te.QuantizedTensor) and torch.equal(part.dequantize(), want)


@pytest.mark.parametrize("name", ["block_1d", "block_2d", "mxfp8", "nvfp4"])
def test_columns_of_scaled_blocks_are_values(name: str) -> None:
    x = _made(name)
    for part, want in zip(x.split(16, -1), x.dequantize().split(16, -1), strict=True):
        assert type(part) is torch.Tensor and torch.equal(part, want)


@per_tensor
def test_parts_see_what_is_written_to_the_whole_and_cannot_be_written(name: str) -> None:
    x = _made(name)
    part = x.chunk(2, dim=2)[1]
    with pytest.raises(RuntimeError, match=r"slice of a QuantizedTensor.*clone\(\)"):
        part.zero_()
    own = part.clone()
    own.mul_(2)
    x.mul_(-1)
    assert torch.equal(part.dequantize(), x.dequantize()[..., 32:])


def test_a_module_takes_columns_of_a_quantized_tensor() -> None:
    torch.manual_seed(0)
    layer = te.Linear(32, 32, device="cpu")
    x = te.QuantizedTensor.quantize(torch.randn(16, 64), CurrentQuantizer(), "row").requires_grad_()
    with te.autocast(recipe=Float8CurrentScaling()):
        y = layer(x[:, 32:])
        whole = layer(te.QuantizedTensor(
            x._row_data[:, 32:].contiguous(), None, x._row_scale_inv, None, None, x._encoding, "tensor", "canonical",
            (16, 32), x.dtype,
        ))  # fmt: skip
    assert torch.equal(y, whole)
    y.sum().backward()
    assert x.grad is not None and x.grad[:, :32].eq(0).all() and x.grad[:, 32:].ne(0).any()


@per_tensor
def test_a_slice_that_is_saved_is_still_a_slice(name: str) -> None:
    """Saved with the whole, it shares memory and scales with it after loading too."""
    x = _made(name)
    stream = io.BytesIO()
    torch.save({"whole": x, "part": x[:, :, 16:48]}, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=True)
    assert torch.equal(loaded["part"].dequantize(), x.dequantize()[:, :, 16:48])
    assert loaded["part"].record.row_data.is_contiguous()
    with pytest.raises(RuntimeError, match="slice of a QuantizedTensor"):
        loaded["part"].zero_()
    loaded["whole"].zero_()


def test_a_slice_that_a_graph_returns_is_still_a_slice() -> None:
    x = _made("current", shape=(32, 32))
    names, metadata = x[:16].__tensor_flatten__()
    part = x[:16]
    again = te.QuantizedTensor.__tensor_unflatten__({n: getattr(part, n) for n in names}, metadata, part.shape, None)
    with pytest.raises(RuntimeError, match="slice of a QuantizedTensor"):
        again.zero_()


# -- no dimensions ------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("usage", ["row", "column", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_without_dimensions(name: str, usage: str, dtype: torch.dtype) -> None:
    x = torch.tensor(3.3, dtype=dtype)
    made = te.QuantizedTensor.quantize(x, QUANTIZERS[name], usage)
    one = te.QuantizedTensor.quantize(x.reshape(1), QUANTIZERS[name], usage)
    assert made.shape == () and made.dtype == dtype and made.record.shape == (1,)
    assert made.dequantize().shape == () and torch.equal(made.dequantize(), one.dequantize()[0])
    assert made.dequantize(torch.float32).shape == () and made.item() == one.item()
    for same in (made.detach(), made.clone(), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made.view_as(x)):
        assert isinstance(same, te.QuantizedTensor) and same.shape == () and torch.equal(same + 0, made.dequantize())
    for view in (made[None], made.view(1), made.reshape(-1), made.view(1, 1)[0]):
        assert torch.equal(view + 0, one.dequantize())
        assert isinstance(view, te.QuantizedTensor) or view.dim() == 1
    assert isinstance(one.view(()), te.QuantizedTensor) and one.view(()).item() == made.item()
    made.copy_(torch.tensor(-5.0))
    assert torch.equal(made.dequantize(), one.copy_(torch.tensor([-5.0])).dequantize()[0])
    made.data = torch.tensor(2.0, dtype=dtype)
    assert made.shape == () and made.item() == one.copy_(torch.tensor([2.0])).item()


def test_a_tensor_without_dimensions_has_a_gradient() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    (te.QuantizedTensor.quantize(x, CurrentQuantizer()) * 4).backward()
    assert x.grad.shape == () and x.grad == 4


# -- subclasses ---------------------------------------------------------------------------------------------------


@every_format
def test_what_is_made_of_a_subclass_is_of_the_subclass(name: str) -> None:
    x = _made(name)
    x.__class__ = Named
    made = [x.detach(), x.clone(), x.view(256, 64), torch.nn.Parameter(x, requires_grad=False), copy.deepcopy(x)]
    stream = io.BytesIO()
    torch.save(x, stream)
    stream.seek(0)
    for found in (*made, pickle.loads(pickle.dumps(x)), torch.load(stream, weights_only=False)):
        assert type(found) is Named
        assert torch.equal(found.dequantize().view(256, 64), _made(name).dequantize().view(256, 64))


def test_a_subclass_makes_its_own() -> None:
    x = torch.randn(16, 32, requires_grad=True)
    made = Named.quantize(x, CurrentQuantizer())
    assert type(made) is Named and type(made.detach()) is Named
    made.sum().backward()
    assert x.grad.eq(1).all()
