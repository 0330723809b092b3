# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where results lie and what becomes of inputs: the check `values` finds what it is for, and lets pools pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from te_dispatch.conformance.checks import find
from te_dispatch.conformance.memory import overlapping
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure
from te_dispatch.conformance.uninitialized import Uninitialized
from te_dispatch.ops import alloc

from .trials import Mistake, case_of, trial_of

SOFTMAX = case_of("softmax_fwd", "plain", shape="2x16x16")


def _judge(mistake: Mistake) -> None:
    find("values").run(trial_of(SOFTMAX, "torch.softmax_fwd", mistake))


class _Pool:
    """Results are pieces of one tensor, one behind the other."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._memory: torch.Tensor | None = None
        self._used = 0

    def __call__(self, right: Subject, arguments: Mapping[str, Any]) -> torch.Tensor:
        made: torch.Tensor = right.call(arguments)
        if self._memory is None:
            self._memory = self._allocate(1 << 20)
        size = made.numel() * made.element_size()
        piece = self._memory[self._used : self._used + size].view(made.dtype).view(made.shape)
        self._used += (size + 63) // 64 * 64
        piece.numpy()[...] = made.numpy()  # as a kernel would, through a pointer
        return piece


def test_pieces_of_a_pool_pass() -> None:
    cpu = torch.device("cpu")
    _judge(_Pool(lambda size: torch.empty(size, dtype=torch.uint8)))
    _judge(_Pool(lambda size: alloc.empty("workspace", (size,), torch.uint8, cpu)))


def test_a_pool_that_gives_a_piece_twice() -> None:
    pool = _Pool(lambda size: torch.empty(size, dtype=torch.uint8))

    def twice(right: Subject, arguments: Mapping[str, Any]) -> torch.Tensor:
        pool._used = 0
        return pool(right, arguments)

    with pytest.raises(Failure, match="lies in memory that an earlier call gave out as result"):
        _judge(twice)


def test_a_piece_that_begins_inside_another() -> None:
    whole = torch.zeros(32)
    assert overlapping(whole[:17], whole[16:]) and not overlapping(whole[:16], whole[16:])
    rows = torch.zeros(4, 8)
    assert overlapping(rows[:, :2], rows[1:2, :2]) and not overlapping(rows[:2, :2], rows[2:, :2])
    assert not overlapping(whole[:0], whole)


def test_a_kernel_that_writes_into_memory_of_pytorch_s() -> None:
    def pointer(right: Subject, arguments: Mapping[str, Any]) -> torch.Tensor:
        made: torch.Tensor = right.call(arguments)
        out = torch.empty_like(made)
        out.numpy()[...] = made.numpy()
        return out

    with pytest.raises(Failure, match=r"result was written into memory that did not come from te_dispatch\.ops\.alloc"):
        _judge(pointer)


_FOREIGN = {
    "NumPy": torch.from_numpy,
    "DLPack": torch.from_dlpack,
    "a buffer": lambda memory: torch.frombuffer(memory, dtype=torch.float32),
}


@pytest.mark.parametrize("source", _FOREIGN)
def test_a_kernel_that_writes_into_memory_of_another_library(source: str) -> None:
    def foreign(right: Subject, arguments: Mapping[str, Any]) -> torch.Tensor:
        made: torch.Tensor = right.call(arguments)
        memory = np.empty(tuple(made.shape), np.float32)
        memory[...] = made.numpy()
        return _FOREIGN[source](memory).view(made.dtype).view(made.shape)

    with pytest.raises(Failure, match=r"result was written into memory that did not come from te_dispatch\.ops\.alloc"):
        _judge(foreign)


def test_memory_of_another_library_where_an_operator_s_result_was() -> None:
    buffer = np.ones(16, np.float32)
    with Uninitialized() as watched:
        first = torch.from_numpy(buffer).mul_(2)
        assert watched.unfilled({"result": first}) is None
        del first
        second = torch.from_numpy(buffer)
    assert watched.unfilled({"result": second}) == "result"


def test_results_of_pytorch_s_operators_that_were_seen_from_numpy_pass() -> None:
    def seen(right: Subject, arguments: Mapping[str, Any]) -> torch.Tensor:
        made: torch.Tensor = right.call(arguments).mul(1)
        made.numpy()
        return made

    def filled(right: Subject, arguments: Mapping[str, Any]) -> torch.Tensor:
        made: torch.Tensor = right.call(arguments)
        return torch.from_numpy(np.empty(tuple(made.shape), np.float32)).copy_(made)

    _judge(seen)
    _judge(filled)


@pytest.mark.parametrize("filled", ["copied into", "out="])
def test_memory_of_pytorch_s_that_its_operators_fill_passes(filled: str) -> None:
    def operators(right: Subject, arguments: Mapping[str, Any]) -> torch.Tensor:
        made: torch.Tensor = right.call(arguments)
        out = torch.empty_like(made)
        return out.copy_(made) if filled == "copied into" else torch.mul(made, 1, out=out)

    _judge(operators)


def test_memory_of_the_allocator_passes() -> None:
    def allocated(right: Subject, arguments: Mapping[str, Any]) -> torch.Tensor:
        made: torch.Tensor = right.call(arguments)
        out = alloc.empty("out", tuple(made.shape), made.dtype, made.device)
        out.numpy()[...] = made.numpy()
        return out

    _judge(allocated)


def test_a_result_that_requires_a_gradient() -> None:
    weight = torch.ones((), requires_grad=True)
    with pytest.raises(Failure, match="result requires a gradient"):
        _judge(lambda right, arguments: right.call(arguments) * weight)


def test_an_input_that_is_written_and_put_back() -> None:
    def borrowed(right: Subject, arguments: Mapping[str, Any]) -> torch.Tensor:
        x, before = arguments["x"], arguments["x"].clone()
        x.mul_(2)
        made: torch.Tensor = right.call({**arguments, "x": x / 2})
        x.copy_(before)
        return made

    with pytest.raises(Failure, match="inputs were written to, and then put back: x"):
        _judge(borrowed)


def test_a_result_in_the_memory_of_an_input() -> None:
    with pytest.raises(Failure, match="result is no memory of its own but x"):
        _judge(lambda right, arguments: arguments["x"].as_strided((2, 16, 16), (256, 16, 1)))
