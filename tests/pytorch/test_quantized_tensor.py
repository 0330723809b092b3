# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`QuantizedTensor`: what PyTorch does to it is what PyTorch does to its values."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch import ops
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


def _made(name: str, usage: str = "both", dtype: torch.dtype = torch.float32, shape: Any = (4, 64, 64)) -> Any:
    torch.manual_seed(0)
    return te.QuantizedTensor.quantize(torch.randn(shape).to(dtype), QUANTIZERS[name], usage)


def _parts(x: te.QuantizedTensor) -> list[torch.Tensor]:
    return [getattr(x, name) for name in x.__tensor_flatten__()[0]]


def _identical(a: Any, b: Any) -> bool:
    return (
        type(a) is type(b) is te.QuantizedTensor
        and a.__tensor_flatten__() == b.__tensor_flatten__()
        and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
        and all(torch.equal(p, q) for p, q in zip(_parts(a), _parts(b)))
    )


@every_format
@pytest.mark.parametrize("usage", ["row", "column", "both"])
def test_it_looks_like_the_tensor_that_it_stands_for(name: str, usage: str) -> None:
    x = _made(name, usage, torch.bfloat16)
    assert isinstance(x, torch.Tensor) and isinstance(x, te.QuantizedTensor)
    assert (x.shape, x.dtype, x.device.type, x.dim()) == ((4, 64, 64), torch.bfloat16, "cpu", 3)
    assert x.is_contiguous() and x.numel() == 4 * 64 * 64
    record = x.record
    assert record.row_data is x._row_data and record.scaling == QUANTIZERS[name].scaling
    values = x.dequantize()
    assert type(values) is torch.Tensor and torch.equal(values, ops.dequantize(record))
    assert x.dequantize(torch.float32).dtype == torch.float32
    text = repr(x)
    assert all(word in text for word in ("QuantizedTensor", "4x64x64", record.encoding, record.scaling, "bfloat16"))


def test_a_record_without_data_is_refused() -> None:
    with pytest.raises(ValueError, match="row_data and col_data are both None"):
        te.QuantizedTensor(None, None, None, None, None, "e4m3fn", "tensor", "canonical", (2, 2), torch.float32)


def test_kernels_get_no_address() -> None:
    with pytest.raises(RuntimeError, match=r"no memory of its own.*\.record.*\.dequantize\(\)"):
        _made("current").data_ptr()


OPERATIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda x: x + 1.5,
    "scalar on the left": lambda x: 2 - x,
    "itself": lambda x: x * x,
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "transpose": lambda x: x.transpose(0, 1),
    "column": lambda x: x[..., 3],
    "row": lambda x: x[1],
    "mask": lambda x: x[x > 0],
    "strided rows": lambda x: x[::2],
    "another last dimension": lambda x: x.reshape(4, -1),
    "float64": lambda x: x.double(),
    "integers": lambda x: x.to(torch.int32),
    "cat": lambda x: torch.cat([x, torch.ones_like(x)]),
    "norm": lambda x: x.norm(dim=-1),
    "softmax": lambda x: torch.softmax(x, -1),
    "sum": lambda x: x.sum((0, 1)),
    "expand": lambda x: x[None].expand(2, *x.shape),
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (64,)),
    "gelu": torch.nn.functional.gelu,
    "foreach": lambda x: torch._foreach_mul([x, x], 2.0),
    "out": lambda x: torch.add(x, 1, out=torch.empty(x.shape)),
    "copied from": lambda x: torch.empty(x.shape).copy_(x),
    "item": lambda x: x[0, 0, 0].item(),
    "list": lambda x: x[0, 0].tolist(),
    "numpy": lambda x: torch.from_numpy(x.detach().dequantize().numpy()),
    "equal": lambda x: torch.equal(x, x),
}


@every_format
@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_operation_gives_what_it_gives_for_the_values(name: str, operation: str) -> None:
    x = _made(name)
    got, want = OPERATIONS[operation](x), OPERATIONS[operation](x.dequantize())
    many = isinstance(got, (tuple, list)) and isinstance(got[0], torch.Tensor)
    for a, b in zip(got, want) if many else [(got, want)]:
        if isinstance(a, torch.Tensor):
            assert type(a) is torch.Tensor and a.dtype == b.dtype and torch.equal(a, b)
        else:
            assert a == b


@every_format
@pytest.mark.parametrize("usage", ["row", "column", "both"])
def test_views_that_keep_the_last_dimension_stay_quantized_and_share(name: str, usage: str) -> None:
    x = _made(name, usage)
    values = x.dequantize()
    for view in (
        lambda t: t.view(256, 64), lambda t: t.view(-1, 64), lambda t: t.flatten(0, 1), lambda t: t.reshape(2, 128, 64),
        lambda t: t[None], lambda t: t[None].squeeze(0), lambda t: t.view_as(t), lambda t: t.detach(),
    ):  # fmt: skip
        got = view(x)
        assert isinstance(got, te.QuantizedTensor) and torch.equal(got.dequantize(), view(values))
        assert [p.data_ptr() for p in _parts(got)] == [p.data_ptr() for p in _parts(x)]
    assert not isinstance(x.view(4, 64, 64, 1), te.QuantizedTensor)
    assert _identical(x.view(-1, 64).view(4, 64, 64), x)


@every_format
def test_slices_and_splits_of_rows(name: str) -> None:
    x = _made(name, shape=(512, 64)) if name == "block_2d" else _made(name, shape=(8, 64, 64))
    size = x.shape[0]
    values = x.dequantize()
    quarter = size // 4
    for cut in (
        lambda t: [t[quarter:]], lambda t: [t[: 2 * quarter]], lambda t: t.split(quarter), lambda t: t.chunk(2),
        lambda t: t.split([quarter, size - quarter]), lambda t: [t.narrow(0, quarter, quarter)],
    ):  # fmt: skip
        for got, want in zip(cut(x), cut(values), strict=True):
            if name != "block_2d" or quarter % 128 == 0:
                assert isinstance(got, te.QuantizedTensor)
            assert torch.equal(got.dequantize(), want)
    odd = x[1:3]
    assert torch.equal(odd + 0, values[1:3])
    assert isinstance(odd, te.QuantizedTensor) == (name != "block_2d")
    column_only = _made(name, "column", shape=x.shape)
    assert type(column_only[1:3]) is torch.Tensor and torch.equal(column_only[1:3], column_only.dequantize()[1:3])


@every_format
def test_slices_cannot_be_written_to(name: str) -> None:
    x = _made(name, shape=(512, 64))
    before = x.clone()
    part = x[:128]
    for write in (lambda t: t.mul_(2), lambda t: t.copy_(torch.ones(128, 64)), lambda t: t.view(2, 64, 64).zero_()):
        with pytest.raises(RuntimeError, match=r"slice of a QuantizedTensor.*clone\(\)"):
            write(part)
    assert _identical(x, before)
    part.clone().mul_(2)
    assert _identical(x, before)


@every_format
@pytest.mark.parametrize("usage", ["row", "column", "both"])
def test_writing_quantizes_in_its_own_format_and_memory(name: str, usage: str) -> None:
    x = _made(name, usage)
    new = torch.randn(4, 64, 64) * 7
    addresses = [p.data_ptr() for p in _parts(x)]
    quantizer = QUANTIZERS[name]
    made = te.QuantizedTensor.quantize(new, quantizer, usage)
    assert x.copy_(new) is x and _identical(x, made)
    assert [p.data_ptr() for p in _parts(x)] == addresses
    x.copy_(torch.tensor(2.0))  # broadcast
    assert _identical(x, te.QuantizedTensor.quantize(torch.full((4, 64, 64), 2.0), quantizer, usage))
    want = x.dequantize() * 3 + 1
    x.mul_(3).add_(torch.ones(64))
    assert _identical(x, te.QuantizedTensor.quantize(want, quantizer, usage))
    x.view(-1, 64).zero_()
    assert x.dequantize().eq(0).all()
    torch.add(new, 0, out=x)
    assert _identical(x, made)


def test_copying_between_quantized_tensors() -> None:
    x, same = _made("block_1d"), _made("block_1d")
    same.mul_(-2)
    x.copy_(same)
    assert _identical(x, same)
    for other in (_made("current"), _made("block_1d", "row"), _made("mxfp8")):
        x.copy_(other)
        assert _identical(x, te.QuantizedTensor.quantize(other.dequantize(), BlockQuantizer()))


@every_format
def test_copies_own_their_memory(name: str) -> None:
    x = _made(name)
    for copied in (x.clone(), copy.deepcopy(x), x.to("cpu", copy=True), x.contiguous().clone()):
        assert _identical(copied, x)
        assert not {p.data_ptr() for p in _parts(copied)} & {p.data_ptr() for p in _parts(x)}
    assert x.to(torch.float32) is x and x.cpu() is x
    moved = x.to("meta")
    assert isinstance(moved, te.QuantizedTensor) and moved.is_meta and moved.shape == x.shape
    for dtype in (torch.bfloat16, torch.float16):
        wide = x.to(dtype)
        assert type(wide) is torch.Tensor and torch.equal(wide, ops.dequantize(x.record, dtype=dtype))


@every_format
def test_new_tensors_like_it_are_ordinary_and_cost_no_dequantization(name: str) -> None:
    x = _made(name, dtype=torch.bfloat16)
    calls: list[Any] = []
    with scopes.observe(lambda operator, *_: calls.append(operator)):
        for made in (torch.empty_like(x), torch.zeros_like(x), torch.ones_like(x), torch.randn_like(x), x.new_zeros(3)):
            assert type(made) is torch.Tensor and made.dtype == torch.bfloat16 and made.is_contiguous()
        assert torch.zeros_like(x, dtype=torch.float32).shape == x.shape
    assert not calls


@every_format
@pytest.mark.parametrize("usage", ["row", "both"])
def test_it_is_saved_and_loaded(name: str, usage: str) -> None:
    x = _made(name, usage, torch.bfloat16)
    for value in (x, x.detach().requires_grad_(), torch.nn.Parameter(x, requires_grad=False)):
        stream = io.BytesIO()
        torch.save({"x": value}, stream)
        stream.seek(0)
        for loaded in (torch.load(stream, weights_only=True)["x"], pickle.loads(pickle.dumps(value))):
            assert _identical(loaded.detach(), x) and loaded.requires_grad == value.requires_grad
            assert isinstance(loaded, torch.nn.Parameter) == isinstance(value, torch.nn.Parameter)
            shared = x._col_scale_inv is x._row_scale_inv
            assert (loaded._col_scale_inv is loaded._row_scale_inv) == shared
            stream.seek(0)


def test_state_dicts_hold_it() -> None:
    class Holder(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.weight = torch.nn.Parameter(te.QuantizedTensor.quantize(torch.randn(32, 32), CurrentQuantizer()))
            self.register_buffer("table", te.QuantizedTensor.quantize(torch.randn(32, 32), MXFP8Quantizer()))

    a, b = Holder(0), Holder(1)
    addresses = [p.data_ptr() for p in _parts(b.weight)]
    b.load_state_dict(a.state_dict())
    assert _identical(b.weight.detach(), a.weight.detach()) and _identical(b.table, a.table)
    assert [p.data_ptr() for p in _parts(b.weight)] == addresses
    plain = {"weight": torch.randn(32, 32), "table": torch.randn(32, 32)}
    b.load_state_dict(plain)
    assert _identical(b.weight.detach(), te.QuantizedTensor.quantize(plain["weight"], CurrentQuantizer()))
    c = copy.deepcopy(a)
    assert isinstance(c.weight, torch.nn.Parameter) and _identical(c.weight.detach(), a.weight.detach())


def test_a_parameter_trains() -> None:
    weight = torch.nn.Parameter(_made("current", shape=(32, 32)))
    x = torch.randn(8, 32)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    before = weight.detach().dequantize()
    (x @ weight.t()).sum().backward()
    grad = x.sum(0).expand(32, 32)
    assert type(weight.grad) is torch.Tensor
    assert torch.equal(weight.grad, torch.ones(32, 8) @ x)
    optimizer.step()
    expected = te.QuantizedTensor.quantize(before - 0.5 * weight.grad, CurrentQuantizer())
    assert _identical(weight.detach(), expected) and grad.shape == weight.shape


@every_format
def test_gradients_pass_straight_through(name: str) -> None:
    x = torch.randn(32, 64, requires_grad=True)
    y = te.QuantizedTensor.quantize(x, QUANTIZERS[name])
    assert y.requires_grad and y.grad_fn is not None
    values = y.detach().dequantize()
    weight = torch.randn(32, 64)
    for result, grad in (
        ((y.dequantize() * weight).sum(), weight),
        ((y * weight).sum(), weight),
        ((y * y).sum(), 2 * values),
        (y.view(8, 4, 64).transpose(0, 1).sum(), torch.ones(32, 64)),
        (
            y[:16].square().sum() if name != "block_2d" else y.square()[:16].sum(),
            2 * torch.cat([values[:16], torch.zeros(16, 64)]),
        ),
        (y.double().sum(), torch.ones(32, 64)),
        ((y.dequantize(torch.bfloat16).float() * 2).sum(), torch.full((32, 64), 2.0)),
        ((y.clone() * weight).sum(), weight),
        (torch.cat(y.split(16)).mul(weight).sum(), weight),
    ):
        (got,) = torch.autograd.grad(result, x, retain_graph=True)
        assert type(got) is torch.Tensor and got.dtype == torch.float32 and torch.equal(got, grad)


def test_a_quantized_gradient_is_accumulated_by_value() -> None:
    grad = te.QuantizedTensor.quantize(torch.randn(16, 16), CurrentQuantizer("e5m2"))
    leaf = torch.zeros(16, 16, requires_grad=True)

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return grad

    for result, expected in (
        (Back.apply(leaf) + Back.apply(leaf), 2 * grad.dequantize()),
        (Back.apply(leaf) + leaf, grad.dequantize() + 1),
    ):
        leaf.grad = None
        result.sum().backward()
        assert torch.equal(leaf.grad + 0, expected)
    leaf.grad = None
    Back.apply(leaf).sum().backward()
    first = leaf.grad + 0
    Back.apply(leaf).sum().backward()
    kept = leaf.grad + 0
    assert torch.equal(first, grad.dequantize()) and torch.equal(kept, 2 * first)


def test_compiler_protocol() -> None:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    x = _made("current")
    assert is_traceable_wrapper_subclass(x)
    names, metadata = x.__tensor_flatten__()
    again = te.QuantizedTensor.__tensor_unflatten__({n: getattr(x, n) for n in names}, metadata, x.shape, x.stride())
    assert _identical(again, x) and again._col_scale_inv is again._row_scale_inv
    hash(metadata)


@every_format
def test_data_takes_over_another_tensors_values(name: str) -> None:
    x, other = _made(name), _made("block_1d" if name != "block_1d" else "mxfp8")
    before = [part.clone() for part in _parts(x)]
    shared = x.detach()
    x.data = other
    assert x._encoding == other._encoding and x._scaling == other._scaling
    assert torch.equal(x.dequantize(), other.dequantize())
    assert all(torch.equal(a, b) for a, b in zip(_parts(shared), before))


@every_format
def test_data_quantizes_an_ordinary_tensor_in_its_format(name: str) -> None:
    x, new = _made(name), 3 * torch.randn(4, 64, 64)
    shared = x.detach()
    before, expected = shared.dequantize(), x.clone()
    expected.copy_(new)
    x.data = new
    assert torch.equal(x.dequantize(), expected.dequantize()) and not torch.equal(x.dequantize(), before)
    assert torch.equal(shared.dequantize(), before)
    assert torch.equal(x.data.dequantize(), x.dequantize()) and not x.data.requires_grad


@every_format
def test_data_may_have_another_shape_and_dtype(name: str) -> None:
    x, new = _made(name).requires_grad_(), torch.randn(32, 64, dtype=torch.bfloat16)
    other = te.QuantizedTensor.quantize(new, QUANTIZERS[name])
    for value in (new, other):
        x.data = value
        assert (x.shape, x.dtype, x.stride()) == ((32, 64), torch.bfloat16, (64, 1)) and x.requires_grad and x.is_leaf
        assert torch.equal(x.dequantize(), other.dequantize())
        x.sum().backward()
        assert torch.equal(x.grad, torch.ones_like(new))
        x.grad = None
        x.data = torch.zeros(4, 64, 64)


def test_data_on_another_device_is_refused() -> None:
    x = _made("current")
    before = x.dequantize()
    with pytest.raises(RuntimeError, match="cannot become a tensor on meta"):
        x.data = torch.zeros(4, 64, 64, device="meta")
    assert x.shape == (4, 64, 64) and torch.equal(x.dequantize(), before)
