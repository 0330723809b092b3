# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Copies of arguments: strides, offsets and shared memory are those of the original, memory is not."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dispatch.conformance.case import Case
from te_dispatch.conformance.families.quantize import quantizer_of
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.outputs import form
from te_dispatch.conformance.transfer import mapped, moved, overwrite, tensors, widened
from te_dispatch.core import scopes
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer
from te_dispatch.ops.results import Saved

_DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64])


@st.composite
def _views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Some views, of any strides and offsets, over one memory."""
    memory = torch.arange(4096, dtype=torch.int32).view(torch.uint8)
    found = []
    for _ in range(draw(st.integers(1, 4))):
        dtype = draw(_DTYPES)
        whole = memory.view(dtype)
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        strides = [draw(st.integers(0, 40)) for _ in shape]
        found.append(whole.as_strided(shape, strides, draw(st.integers(0, 500))))
    return found


@settings(deadline=None)
@given(_views())
def test_layout_and_sharing_are_kept(views: list[torch.Tensor]) -> None:
    there = moved({"views": views}, "cpu")["views"]
    for one, copy in zip(views, there, strict=True):
        assert (copy.shape, copy.stride(), copy.storage_offset(), copy.dtype) == (
            one.shape, one.stride(), one.storage_offset(), one.dtype
        )  # fmt: skip
        assert torch.equal(copy, one)
        assert copy.untyped_storage().data_ptr() != one.untyped_storage().data_ptr()
    assert len({copy.untyped_storage().data_ptr() for copy in there}) == 1
    before = [one.clone() for one in views]
    there[0].fill_(1)
    assert all(torch.equal(one, old) for one, old in zip(views, before, strict=True))


def test_packed_operands_stay_slices_of_one_tensor() -> None:
    packed = torch.randn(8, 2, 3, 16)
    q, k, v = packed.unbind(2)
    there = moved({"q": q, "kv": (k, v)}, "cpu")
    there["q"].zero_()
    assert there["kv"][0].data_ptr() - there["q"].data_ptr() == k.data_ptr() - q.data_ptr()
    assert torch.equal(there["kv"][1], v) and bool(q.any())


def test_one_tensor_given_twice_stays_one() -> None:
    x = torch.randn(3)
    there = moved({"a": x, "b": [x]}, "cpu")
    assert there["a"] is there["b"][0] and there["a"] is not x


def test_tensors_without_memory_are_copied_too() -> None:
    empty = torch.empty_strided((0, 3), (7, 2), dtype=torch.bfloat16)
    copy = moved(empty, "cpu")
    assert (copy.shape, copy.stride(), copy.dtype) == (empty.shape, empty.stride(), empty.dtype)


def test_gradients_do_not_follow() -> None:
    x = torch.randn(3, requires_grad=True)
    copy = moved(x * 2, "cpu")
    assert copy.grad_fn is None


def _maker() -> Maker:
    return Maker(Case.of("quantize", "plain", {}), scopes.MANAGER)


def test_records_and_quantizers_are_copied_through() -> None:
    make = _maker()
    record = make.quantized(make.tensor(32, 64, dtype="bf16"), quantizer_of("mxfp8", "e4m3fn"))
    delayed = quantizer_of("delayed", "e4m3fn", scale=4.0)
    there = moved({"x": record, "quantizers": [delayed, CurrentQuantizer("e5m2")], "kind": "gelu"}, "cpu")
    assert form(there["x"]) == form(record) and there["kind"] == "gelu"
    first = there["quantizers"][0]
    assert isinstance(first, DelayedQuantizer) and first.amax is not delayed.amax and float(first.scale) == 4.0
    assert there["quantizers"][1] == CurrentQuantizer("e5m2")
    names = {path for path, _ in tensors(there)}
    assert {"x.row_data", "x.col_scale_inv", "quantizers.0.amax", "quantizers.0.scale"} <= names


def test_saved_tensors_are_copied_through() -> None:
    saved = Saved("acme.x", "format-1", (torch.ones(2), torch.zeros(1)), {"p": 0.5})
    copy = moved({"saved": saved}, "cpu")["saved"]
    assert (copy.implementation, copy.format, copy.options) == ("acme.x", "format-1", {"p": 0.5})
    assert torch.equal(copy.tensors[0], saved.tensors[0]) and copy.tensors[0] is not saved.tensors[0]


def test_widening_keeps_values_and_renames_dtypes() -> None:
    make = _maker()
    x, other = make.tensor(4, 5, dtype="bf16"), make.tensor(3)
    record = make.quantized(make.tensor(16, 32, dtype="bf16"), quantizer_of("current", "e4m3fn"))
    wide = widened({"x": x, "other": [other], "record": record, "out_dtype": torch.float16, "k": torch.int32})
    assert wide["x"].dtype == torch.float32 and torch.equal(wide["x"], x.float())
    assert torch.equal(wide["other"][0], other) and wide["other"][0] is not other
    assert wide["record"].dtype == wide["out_dtype"] == torch.float32 and wide["k"] == torch.int32
    assert record.dtype == torch.bfloat16
    assert torch.equal(wide["record"].row_data, record.row_data)


def test_overwriting_keeps_the_memory() -> None:
    there = {"x": torch.zeros(2, 3)[:, ::2], "q": quantizer_of("delayed", "e4m3fn", scale=1.0)}
    where = [tensor.data_ptr() for _, tensor in tensors(there)]
    overwrite(there, {"x": torch.ones(2, 2), "q": quantizer_of("delayed", "e4m3fn", scale=8.0)})
    assert [tensor.data_ptr() for _, tensor in tensors(there)] == where
    assert bool((there["x"] == 1).all()) and float(there["q"].scale) == 8.0


def test_a_change_is_made_once_per_tensor() -> None:
    x, seen = torch.ones(1), []
    mapped([x, {"again": x}], lambda tensor: seen.append(tensor) or tensor)
    assert len(seen) == 1
