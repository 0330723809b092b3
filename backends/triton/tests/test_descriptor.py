# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tensor maps are made once for operands that come back, and never mixed up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch_triton.descriptor import CAPACITY, Descriptor, mapped

_BASE_ARGS_FORMAT_LEN = 2
MADE: list[Any] = []


def make_tensordesc_arg(x: Descriptor, meta: Any) -> list[Any]:
    """As Triton's of that name: a tensor map, sizes, strides."""
    MADE.append(x)
    return [f"{meta} of {x.base.data_ptr()}", *x.shape, *x.strides]


def like_triton_s(launcher: Callable[..., None], tensordesc_indices: set[int], tensordesc_meta: list[Any]) -> Any:
    """A launcher that closes over what Triton's closes over."""

    def inner(*args: Any) -> None:
        final, count = list(args[:_BASE_ARGS_FORMAT_LEN]), 0
        for i, x in enumerate(args[_BASE_ARGS_FORMAT_LEN:]):
            if i in tensordesc_indices:
                final.extend(make_tensordesc_arg(x, tensordesc_meta[count]))
                count += 1
            else:
                final.append(x)
        launcher(*final)

    return inner


def described(base: torch.Tensor, rows: int) -> Descriptor:
    return Descriptor(base, base.dtype, (rows, 16), (16, 1), (8, 16))


def test_maps_are_made_once_and_arguments_are_those_of_triton():
    got: list[Any] = []
    launch = like_triton_s(lambda *args: got.append(args), {0, 2}, ["left", "right"])
    short = mapped(launch)
    x, y = torch.empty(64, 16), torch.empty(64, 16)
    calls = [(1, 2, described(x, 64), 5, described(y, 32), 7), (1, 2, described(y, 64), 5, described(x, 32), 7)]
    calls += [(3, 4, described(x, 32), 6, described(y, 32), 8), calls[0]]
    for call in calls:
        launch(*call)
    expected, MADE[:] = list(got), []
    got.clear()
    for call in calls:
        short(*call)
    assert got == expected
    assert len(MADE) == 5  # the left x of 64 rows and of 32, y; the right y and x


def test_few_maps_are_kept():
    short = mapped(like_triton_s(lambda *args: None, {0}, ["only"]))
    x, MADE[:] = torch.empty(8, 16), []
    for rows in (*range(1, CAPACITY + 2), 1):
        short(1, 2, described(x, rows))
    assert len(MADE) == CAPACITY + 2


def test_other_launchers_are_left_alone():
    def plain(*args: Any) -> None: ...

    without = like_triton_s(plain, set(), [])
    emulated = like_triton_s(plain, {0}, [None])
    assert mapped(plain) is plain and mapped(without) is without and mapped(emulated) is emulated
    assert mapped(print) is print
