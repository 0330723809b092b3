# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Prepared calls: addresses arrive where they belong, results are what was described, errors name what is wrong.

Without a GPU: memory is the host's, and native calls end before a launch, at an argument or because there is nothing
to do.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.results import DropoutAddForward, NormForward
from te_dispatch_cuda import probe

DEVICE = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    probe.driver_version() is not None, reason="addresses of the host would be launched with"
)


@pytest.fixture
def made() -> list[tuple[str, torch.Tensor]]:
    """(role, tensor) of everything that calls allocate."""
    return []


@pytest.fixture
def prepared(native: Any, made: list[tuple[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> Any:
    """`te_dispatch_cuda.prepared` over the host's memory."""
    from te_dispatch_cuda import memory, prepared

    def empty(role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == DEVICE
        tensor = torch.empty(shape, dtype=dtype)
        made.append((role, tensor))
        return tensor

    monkeypatch.setattr(memory, "stream_of", lambda index: 4096 + index)
    monkeypatch.setattr(memory, "direct", [None, None])
    monkeypatch.setattr(memory, "empty", empty)
    return prepared


#: An address for what is not looked at.
SOMEWHERE = 4096


def nothing_to_do(prepared: Any, result: Callable[[Any, Any], Any]) -> Any:
    """dropout_add_fwd of no elements, with x and a residual."""
    given, made = prepared.Given, prepared.Made
    out, mask = made("out", (0, 8), torch.float32), made("mask", (0, 8), torch.uint8)
    arguments = (given(0), given(1), 0, SOMEWHERE, out, mask, 0, 8, 0.5, 0, 0)
    return prepared.prepare("dropout_add_fwd", DEVICE, arguments, result(out, mask), tensors=2)


def test_outputs_become_the_result(prepared: Any, made: list[tuple[str, torch.Tensor]]) -> None:
    call = nothing_to_do(prepared, DropoutAddForward)
    x = torch.empty(0, 8)
    first, second = call(x, None), call(x, x)
    assert type(first) is DropoutAddForward
    assert [role for role, _ in made] == ["out", "mask", "out", "mask"]
    assert first.out is made[0][1] and first.mask is made[1][1] and second.out is made[2][1]
    assert (first.out.shape, first.mask.dtype) == ((0, 8), torch.uint8)


def test_results_nest_records_given_tensors_and_constants(prepared: Any, made: list[tuple[str, torch.Tensor]]) -> None:
    def result(out: Any, mask: Any) -> Any:
        record = prepared.Record(
            mask, None, out, None, "e4m3fn", "tensor", (0, 8), torch.bfloat16, DEVICE, prepared.Given(1)
        )
        return NormForward(None, record, prepared.Given(0), out, "said")  # type: ignore[arg-type]

    call = nothing_to_do(prepared, result)
    x, y = torch.empty(0, 8), torch.empty(0, 8)
    found = call(x, y)
    assert type(found) is NormForward and type(found[1]) is Quantized
    out, mask = (tensor for _, tensor in made)
    expected = Quantized(mask, None, out, None, "e4m3fn", "tensor", "canonical", (0, 8), torch.bfloat16, DEVICE, y)
    assert all(getattr(found[1], name) is getattr(expected, name) for name in ("row_data", "row_scale_inv"))
    assert found[1].global_scale_inv is y and repr(found[1]) == repr(expected)
    assert (found[0], found[2] is x, found[3] is out, found[4]) == (None, True, True, "said")


def test_nothing_is_kept_of_a_call(prepared: Any, made: list[tuple[str, torch.Tensor]]) -> None:
    call = nothing_to_do(prepared, DropoutAddForward)
    x = torch.empty(0, 8)
    seen = weakref.ref(x)
    result = call(x, x)
    written = weakref.ref(result.out)
    made.clear()
    del x, result
    gc.collect()
    assert (seen(), written()) == (None, None)


@pytest.mark.parametrize(("current", "served"), [(None, True), (lambda: 0, True), (lambda: 1, False)])
def test_memory_comes_from_pytorchs_entry_on_the_current_device(
    prepared: Any, made: list[tuple[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch, current: Any, served: bool
) -> None:
    from te_dispatch_cuda import memory

    asked = []

    def entry(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        asked.append((shape, strides, dtype))
        return torch.empty_strided(shape, strides, dtype=dtype)

    direct = [entry, current]
    monkeypatch.setattr(memory, "direct", direct)
    call = nothing_to_do(prepared, DropoutAddForward)
    found = call(torch.empty(0, 8), None)
    expected = [((0, 8), (8, 1), torch.float32), ((0, 8), (8, 1), torch.uint8)]
    assert (asked, len(made)) == ((expected, 0) if served else ([], 2))
    assert found.out.shape == (0, 8)
    direct[0] = None  # another allocator is in force from now on
    call(torch.empty(0, 8), None)
    assert [role for role, _ in made[-2:]] == ["out", "mask"]


def test_errors_of_what_is_called_pass_through(prepared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from te_dispatch_cuda import memory

    def fail(*args: Any) -> Any:
        raise MemoryError("no room")

    for name, broken in (("stream_of", fail), ("direct", [fail, None]), ("direct", [fail, fail]), ("empty", fail)):
        with monkeypatch.context() as patch:
            patch.setattr(memory, name, broken)
            with pytest.raises(MemoryError, match="no room"):
                nothing_to_do(prepared, DropoutAddForward)(torch.empty(0, 8), None)


def addressed(prepared: Any, x: torch.Tensor, gamma: torch.Tensor, aligned: Any = ()) -> Any:
    """A norm's forward with addresses of x, gamma, rstd and y."""
    given, new = prepared.Given, prepared.Made
    rstd, y = new("rstd", (4,), torch.float32), new("y", (4, 8), torch.float32)
    at_x, at_gamma = given(0), given(1)
    arguments = (at_x, 0, 4, 8, 0, 0, at_gamma, 0, 0, 0, False, 1e-5, 0, rstd, y, 0)
    places = [(at_x if name == "x" else y, multiple) for name, multiple in aligned]
    return prepared.prepare("norm_forward", DEVICE, arguments, y, tensors=2, aligned=places)(x, gamma)


def shifted(count: int) -> torch.Tensor:
    """fp32 elements whose address is no multiple of 4."""
    odd = torch.empty(count * 4 + 1, dtype=torch.uint8)[1:]
    assert odd.data_ptr() % 4
    return odd


def test_addresses_arrive_where_they_belong(prepared: Any, native: Any) -> None:
    x, gamma = torch.ones(4, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"^x: got a pointer that is not a multiple of 4"):
        addressed(prepared, shifted(32), gamma)
    with pytest.raises(ValueError, match=r"^gamma: got a pointer that is not a multiple of 4"):
        addressed(prepared, x, shifted(8))
    with pytest.raises(ValueError, match=r"^gamma: got a null pointer"):
        addressed(prepared, x, None)  # type: ignore[arg-type]
    with pytest.raises(native.CudaError):  # all is well but the driver
        addressed(prepared, x, gamma)


def test_a_call_for_aligned_addresses_does_nothing_with_others(prepared: Any, native: Any) -> None:
    at, gamma = torch.empty(48), torch.ones(8)
    start = -(at.data_ptr() // 4) % 8  # where a multiple of 32 bytes is
    assert addressed(prepared, at[start + 1 : start + 33], gamma, [("x", 32)]) is NotImplemented
    with pytest.raises(native.CudaError):
        addressed(prepared, at[start : start + 32], gamma, [("x", 32)])


def test_wrong_calls_are_named(prepared: Any) -> None:
    call = nothing_to_do(prepared, DropoutAddForward)
    with pytest.raises(TypeError, match="dropout_add_fwd: got 1 tensors, expected 2"):
        call(torch.empty(0, 8))
    with pytest.raises(TypeError, match="by position only"):
        call(torch.empty(0, 8), residual=None)
    with pytest.raises(AttributeError, match="data_ptr"):
        call(1, None)
    with pytest.raises(TypeError):
        type(call)()


@pytest.mark.parametrize(
    ("name", "position", "value", "message"),
    [
        ("no_such_function", 0, 0, "no_such_function, which no function is offered as"),
        ("dropout_add_fwd", 6, 0.5, "argument 8: got 0.5, expected an integer"),
        ("dropout_add_fwd", 9, 2**40, f"argument 11: got {2**40}, expected an integer of 32 bits"),
        ("dropout_add_fwd", 8, "0.5", "argument 10: got '0.5', expected a number"),
    ],
)
def test_wrong_preparations_are_named(prepared: Any, name: str, position: int, value: Any, message: str) -> None:
    arguments: list[Any] = [0, 0, 0, 0, 0, 0, 0, 8, 0.5, 0, 0]
    arguments[position] = value
    with pytest.raises(ValueError, match=message):
        prepared.prepare(name, DEVICE, arguments, None, tensors=0)


def test_addresses_belong_to_arguments_that_take_them(prepared: Any) -> None:
    given = prepared.Given
    with pytest.raises(ValueError, match="argument 10 takes no address"):
        prepared.prepare("dropout_add_fwd", DEVICE, [0, 0, 0, 0, 0, 0, 0, 8, given(0), 0, 0], None, tensors=1)
