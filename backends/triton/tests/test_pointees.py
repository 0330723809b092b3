# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which memory an emulated launch may access where it is given addresses as numbers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("gfx_emulator")

from te_dispatch_triton.crosscompile import pointees
from te_dispatch_triton.launch import Config, Launch

CPU = torch.device("cpu")


@pytest.fixture
def found() -> Iterator[pointees.Pointees]:
    made = pointees.Pointees()
    yield made
    made.close()


def launched(*args: Any) -> Launch:
    return Launch(None, (1, 1, 1), args, (), Config(), CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [tuple, torch.tensor], ids=["tuple", "table"])
def test_only_tensors_that_are_pointed_to_are_found(found: pointees.Pointees, how: Any) -> None:
    pointed, other = torch.arange(64), torch.arange(64)
    find = found.finder(launched(how([7, pointed.data_ptr() + 8])))
    assert find is not None
    array, address, name = find(pointed.data_ptr() + 500) or pytest.fail("not found")
    assert address == pointed.untyped_storage().data_ptr() and name == "512 bytes"
    assert array.view("int64").tolist() == list(range(64))
    assert find(other.data_ptr()) is None


@pytest.mark.parametrize("args", [(), (torch.ones(3), 5, 1.5), ((1, 2, 3),)], ids=["none", "plain", "sizes"])
def test_a_launch_without_addresses_may_access_its_arguments_alone(found: pointees.Pointees, args: Any) -> None:
    assert found.finder(launched(*args)) is None


def test_objects_are_looked_through_once(found: pointees.Pointees, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many objects that stay are left out of later searches, with the tensors among them remembered."""
    monkeypatch.setattr(pointees, "_MANY", 1)
    before, frozen = torch.arange(4), gc.get_freeze_count()
    # No storage of theirs can be asked for.
    elsewhere = torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch._to_functional_tensor(torch.ones(2))
    find = found.finder(launched((1 << 40,)))
    assert find is not None and find(12345) is None
    assert gc.get_freeze_count() > frozen
    behind = torch.arange(4)
    for tensor in (before, behind):
        find = found.finder(launched((tensor.data_ptr(),)))
        assert find is not None and find(tensor.data_ptr()) is not None
    assert len(elsewhere) == 3
    found.close()
    assert gc.get_freeze_count() == 0


def test_a_launch_looks_through_objects_once(found: pointees.Pointees, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(8) for _ in range(5)]
    looked: list[int] = []
    every = pointees.Pointees._tensors

    def counted(self: pointees.Pointees) -> Iterator[torch.Tensor]:
        for one in every(self):
            looked.append(id(one))
            yield one

    monkeypatch.setattr(pointees.Pointees, "_tensors", counted)
    find = found.finder(launched(tuple(one.data_ptr() for one in tensors)))
    assert find is not None
    for one in (*tensors, *reversed(tensors)):
        assert (find(one.data_ptr() + 8) or pytest.fail("not found"))[1] == one.data_ptr()
    assert find(1 << 20) is None
    times = [looked.count(id(one)) for one in tensors]
    # Those that were found are remembered as well as lying among the objects.
    assert max(times) <= 2


def test_tensors_of_every_age_are_remembered_when_old_objects_are_left_out(
    found: pointees.Pointees, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    young = torch.arange(4)
    monkeypatch.setattr(pointees, "_MANY", 1000)  # of the oldest objects alone there are more
    for _ in range(2):
        find = found.finder(launched((1 << 40, young.data_ptr())))
        assert find is not None and find(12345) is None
    assert gc.get_freeze_count() > 0
    assert (find(young.data_ptr()) or pytest.fail("not found"))[1] == young.data_ptr()


def test_a_search_that_was_not_finished_is_freed_with_its_launch(found: pointees.Pointees) -> None:
    gc.collect()
    gc.disable()
    try:
        tensor = torch.arange(4)  # as young as what looks for it
        find = found.finder(launched((tensor.data_ptr(),)))
        assert find is not None and find(tensor.data_ptr()) is not None
        freed = weakref.ref(tensor)
        del tensor, find
        assert freed() is None
    finally:
        gc.enable()


def test_a_tensor_is_made_of_an_address(found: pointees.Pointees) -> None:
    whole = torch.arange(6, dtype=torch.float32)
    part = found.tensor(whole.data_ptr() + 8, torch.bfloat16)
    assert part.data_ptr() == whole.data_ptr() + 8 and part.numel() == 8
    part[1] = 7.0
    assert whole[2] != 2.0
    assert found.tensor(0, torch.float32).shape == (0,)
    with pytest.raises(LookupError, match="0x1, where no tensor lies"):
        found.tensor(1, torch.uint8)
