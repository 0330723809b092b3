# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Lists that an operator knows are told from all others, and where their tensors lie is read anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch

known_lists = pytest.importorskip("te_dispatch_cuda.known_lists")

if known_lists._EXCHANGE is None:
    pytest.skip("this PyTorch has no exchange API of DLPack", allow_module_level=True)


def made(*sizes: int, **more: Any) -> list[torch.Tensor]:
    return [torch.empty(size, **more) for size in sizes]


def read(known: Any, *lists: Any) -> list[list[int]] | None:
    """The addresses that native code reads of lists that are known; None of others."""
    for one, _ in known.like(lists):
        if one.read(lists):
            return one.addresses  # type: ignore[no-any-return]
    return None


def test_lists_that_look_alike_are_known_wherever_they_lie() -> None:
    known, first = known_lists.Lists(), made(3, 0, 4)
    assert read(known, first, None) is None
    known.keep((first, None))
    swapped = made(3, 0, 4)
    swapped[0].data = torch.empty(9)[1:4]
    for tensors in (first, made(3, 0, 4), swapped):
        assert read(known, tensors, None) == [[x.data_ptr() for x in tensors], []]
    ((one, device),) = known.like((first, None))
    assert one.counts == [3, 0, 4] and one.elements == 7 and one.dtypes == [[0, 0, 0], []]
    assert device == torch.device("cpu")


def test_one_tensor_may_be_in_two_lists_and_need_a_gradient() -> None:
    known, first = known_lists.Lists(), [torch.nn.Parameter(torch.empty(3)), torch.empty(4, dtype=torch.float16)]
    known.keep((first, tuple(first)))
    assert read(known, first, tuple(first)) == [[x.data_ptr() for x in first]] * 2
    assert known.like((first, tuple(first)))[0][0].dtypes == [[0, 2], [0, 2]]


@pytest.mark.parametrize(
    "lists",
    [
        (made(3, 5), None), (made(3, 4, 1), None), (made(3), made(4)), (tuple(made(3, 4)), None), (made(3, 4), []),
        (made(3, 4, dtype=torch.bfloat16), None), (made(3, 4, device="meta"), None), (None, None),
        ([torch.empty(6)[::2], torch.empty(4)], None), ([torch.empty(3), None], None), (iter(made(3, 4)), None),
        ([torch.empty(3, 1), torch.empty(4)], None), ([torch.nn.Parameter(torch.empty(3)), torch.empty(4)], None),
        ([torch.empty(3), torch.empty(4).as_subclass(type("Other", (torch.Tensor,), {}))], None), (made(3, 4),),
        ([torch.empty(3), torch.empty(4).to_sparse()], None), ([torch.empty(3), "x"], None), ("xy", None),
    ],
)  # fmt: skip
def test_others_are_not_known(lists: Any) -> None:
    known = known_lists.Lists()
    known.keep((made(3, 4), None))
    ((one, _),) = known.like((made(3, 4), None))
    assert read(known, *lists) is None
    assert not one.read(lists)
    assert read(known, made(3, 4), None)


def test_what_grows_is_not_known_until_it_has_its_size_again() -> None:
    known, tensors = known_lists.Lists(), made(3, 4)
    known.keep((tensors,))
    tensors[0].resize_(5)
    assert read(known, tensors) is None
    tensors[0].resize_(3)
    assert read(known, tensors) is not None


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(3).as_subclass(type("Other", (torch.Tensor,), {})), torch.empty(3, device="meta"),
        torch.empty(3, dtype=torch.float64), torch.empty(3).to_sparse(),
    ],
)  # fmt: skip
def test_what_cannot_be_told_of_is_never_known(x: torch.Tensor) -> None:
    known = known_lists.Lists()
    known.keep(([torch.empty(3), x],))
    assert read(known, [torch.empty(3), x]) is None


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_lists, "_KINDS", 3)
    known = known_lists.Lists()
    for count in range(1, 9):
        for size in range(20):
            known.keep((made(*[size] * count),))
    assert len(known._kinds) <= 3 and all(len(x) <= known_lists._ALIKE for x in known._kinds.values())
