# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Guards notice every byte that is written outside, poison every element that is not written."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dispatch.conformance.memory import GUARD, GuardedMemory, same_bits, same_results, unwritten
from te_dispatch.ops import alloc

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, poison: int = 0xFF) -> tuple[GuardedMemory, torch.Tensor]:
    with GuardedMemory(poison) as memory:
        return memory, alloc.empty("out", shape, dtype, CPU)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((), (0,), (3, 0), (7,), (5, 3)))
def test_what_is_given_out_is_as_asked_for_and_may_be_filled(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory, given_out = _allocate(shape, dtype)
    assert (given_out.shape, given_out.dtype, given_out.is_contiguous()) == (torch.Size(shape), dtype, True)
    assert given_out.data_ptr() % 16 == 0 or not given_out.numel()
    given_out.fill_(1)
    assert memory.overruns() == []


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, GUARD), st.booleans(), st.integers(0, 255))
def test_one_byte_outside_is_noticed(size: int, distance: int, before: bool, byte: int) -> None:
    memory, given_out = _allocate((size,), torch.uint8)
    whole = memory.allocations[0].whole
    place = GUARD - distance if before else GUARD + size + distance - 1
    changed = int(whole[place]) != byte
    whole[place] = byte
    found = memory.overruns()
    assert bool(found) == changed
    if changed:
        where = "before the start" if before else "past the end"
        assert found == [f"wrote 1 bytes {where} of out ({size},), the nearest {distance} bytes outside"]
    assert given_out.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_writes_past_the_end_through_a_view_are_noticed() -> None:
    memory, given_out = _allocate((4, 4), torch.float32)
    given_out.as_strided((4, 5), (4, 1)).zero_()  # the last row is one element too long
    assert memory.overruns() == ["wrote 4 bytes past the end of out (4, 4), the nearest 1 bytes outside"]


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_elements_that_nobody_wrote_are_found(dtype: torch.dtype) -> None:
    results = []
    for poison in (0xFF, 0x5A):
        _, out = _allocate((3, 5), dtype, poison)
        out.fill_(1)
        out[1, 2:4] = _allocate((2,), dtype, poison)[1]  # as if left alone
        results.append(out)
    missed = unwritten(*results, (0xFF, 0x5A))
    assert missed.nonzero().tolist() == [[1, 2], [1, 3]]


def test_a_result_that_looks_like_poison_is_no_poison() -> None:
    """NaN that was computed looks like the first poison; it looks so in both runs."""
    one = torch.full((4,), 0xFF, dtype=torch.uint8).view(torch.float32)
    assert not unwritten(one, one.clone(), (0xFF, 0x5A)).any()


def test_the_allocator_is_the_former_one_afterwards() -> None:
    with GuardedMemory(0xFF) as outer:
        with GuardedMemory(0x5A) as inner:
            alloc.empty("a", (2,), torch.uint8, CPU)
        alloc.empty("b", (2,), torch.uint8, CPU)
        with pytest.raises(RuntimeError), GuardedMemory(0x5A):
            raise RuntimeError
        alloc.empty("c", (2,), torch.uint8, CPU)
    alloc.empty("d", (2,), torch.uint8, CPU)
    assert [one.role for one in inner.allocations] == ["a"] and [one.role for one in outer.allocations] == ["b", "c"]


def test_allocations_of_all_threads_are_guarded() -> None:
    with GuardedMemory(0xFF) as memory:
        threads = [
            threading.Thread(target=lambda: [alloc.empty("x", (3,), torch.float32, CPU) for _ in range(50)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(memory.allocations) == 200 and not memory.overruns()


def test_what_the_caller_hands_in_is_guarded_unless_it_is_a_view() -> None:
    with GuardedMemory(0xFF) as memory:
        x, view = torch.randn(4, 6), torch.randn(4, 6)[:, :3]
        copy = memory.around("out", x)
        assert torch.equal(copy, x) and copy.data_ptr() != x.data_ptr()
        assert memory.around("out", view) is view
    copy.as_strided((25,), (1,))[-1] = 0
    assert memory.overruns() == ["wrote 4 bytes past the end of out (4, 6), the nearest 1 bytes outside"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_with_another_nan_are_the_same_and_with_another_zero_are_not(dtype: torch.dtype) -> None:
    one, other = (torch.tensor([1.0, torch.nan, -0.0], dtype=dtype) for _ in range(2))
    other.view(torch.uint8)[2 * dtype.itemsize - 1] ^= 0x80  # the sign of the NaN
    assert not same_bits(one, other)
    assert same_results(one, other)
    assert not same_results(one, torch.tensor([1.0, torch.nan, 0.0], dtype=dtype))
    assert not same_results(one, torch.tensor([torch.nan, torch.nan, -0.0], dtype=dtype))
    assert not same_results(one.view(torch.uint8), other.view(torch.uint8))
