# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Planned launches of calls with lists of tensors, records, quantizers and numbers, and with what a forward saved."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_dispatch.backend_kit.call_plans import launching, planned
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer
from te_dispatch.ops.checks.signatures import NUMBER_LISTS, SAVED
from te_dispatch.ops.results import Saved

X = torch.randn(4, 8)


def record(rows: int = 4, encoding: str = "e4m3fn", both: bool = False) -> Quantized:
    scale, column = torch.ones(1), torch.zeros(8, rows, dtype=torch.uint8) if both else None
    return Quantized(
        torch.zeros(rows, 8, dtype=torch.uint8), column, scale, scale if both else None, encoding, "tensor",
        "canonical", (rows, 8), torch.float32, torch.device("cpu"),
    )  # fmt: skip


class Grouped:
    """A host function with the parameters of `grouped_gemm`, which notes how often it was run."""

    def __init__(self) -> None:
        self.runs = 0

        @planned("grouped_gemm")
        def grouped(
            a: Any, b: Any, splits: Any = None, *, layout: str, out: Any = None, accumulate: bool = False,
            bias: Any = None, out_dtype: Any = None, split_accumulator: Any = None,
        ) -> Any:  # fmt: skip
            self.runs += 1
            read = [x.row_data if isinstance(x, Quantized) else x for x in (*a, *b)]
            if isinstance(splits, torch.Tensor):
                read.append(splits)
            return launching(lambda *tensors: tensors, *read, *(bias or ()))

        self.grouped: Any = grouped


#: Calls of which each has another signature.
GROUPED: list[Callable[[], dict[str, Any]]] = [
    lambda: {"a": [torch.zeros(4, 8), torch.zeros(4, 8)]}, lambda: {"a": (torch.zeros(4, 8), torch.zeros(4, 8))},
    lambda: {"a": [torch.zeros(4, 8), torch.zeros(2, 8)]}, lambda: {"a": [torch.zeros(2, 8), torch.zeros(4, 8)]},
    lambda: {"a": [torch.zeros(4, 8), torch.zeros(8, 4).t()]}, lambda: {"a": [torch.zeros(4, 8)]}, lambda: {"a": []},
    lambda: {"a": [torch.zeros(4, 8), torch.zeros(4, 8).bfloat16()]}, lambda: {"a": [record(), record()]},
    lambda: {"a": [record(), torch.zeros(4, 8)]}, lambda: {"a": [record(), record(2)]},
    lambda: {"a": [record(), record(encoding="e5m2")]}, lambda: {"a": [record(), record(both=True)]},
    lambda: {"a": [torch.zeros(4, 8)], "splits": [1, 3]}, lambda: {"a": [torch.zeros(4, 8)], "splits": (1, 3)},
    lambda: {"a": [torch.zeros(4, 8)], "splits": [3, 1]}, lambda: {"a": [torch.zeros(4, 8)], "splits": [True, 3]},
    lambda: {"a": [torch.zeros(4, 8)], "splits": torch.ones(2, dtype=torch.int64)},
    lambda: {"a": [torch.zeros(4, 8)], "splits": torch.ones(2, dtype=torch.int32)},
    lambda: {"a": [torch.zeros(4, 8)], "bias": [torch.zeros(8)]},
]  # fmt: skip


def test_lists_of_tensors_and_records_are_told_apart() -> None:
    one = Grouped()
    for number in [*range(len(GROUPED)), *reversed(range(len(GROUPED)))]:
        call = {"b": [torch.zeros(8, 8)], "layout": "NT", **GROUPED[number]()}
        found = one.grouped(**call)
        read = [x.row_data if isinstance(x, Quantized) else x for x in (*call["a"], *call["b"])]
        more = [call["splits"]] if isinstance(call.get("splits"), torch.Tensor) else call.get("bias", ())
        assert [id(x) for x in found] == [id(x) for x in (*read, *more)]
    assert one.runs == len(GROUPED) == one.grouped.plans.hits
    defaults = {"out": None, "accumulate": False, "bias": None, "out_dtype": None, "split_accumulator": None}
    given = {"splits": None, **defaults, "b": [torch.zeros(8, 8)], "layout": "NT"}
    first, second = [record(), record()], [record(), record()]
    repeated = one.grouped.plans.repeat(("a",), a=first, **given)
    for records in (first, second):
        assert [id(x) for x in repeated(records)] == [*(id(x.row_data) for x in records), id(given["b"][0])]


@pytest.mark.parametrize(
    "other",
    [
        {"splits": iter([4, 0])}, {"splits": [torch.tensor(4)]}, {"a": iter([torch.zeros(4, 8)])},
        {"a": [torch.zeros(4, 8).as_subclass(type("Own", (torch.Tensor,), {}))]},
    ],
)  # fmt: skip
def test_lists_of_other_things_are_worked_out_every_time(other: dict[str, Any]) -> None:
    one = Grouped()
    call = {"a": [torch.zeros(4, 8)], "b": [torch.zeros(8, 8)], "layout": "NT", **other}
    one.grouped(**call)  # what it iterates over is still there for it
    assert one.runs == 1 and one.grouped.plans.statistics().size == 0


def test_lists_of_quantizers_are_told_apart() -> None:
    runs = []

    @planned("split_quantize")
    def split(x: torch.Tensor, splits: Any, quantizers: Any, *, usage: str) -> Any:
        runs.append(splits)
        return launching(lambda *tensors: tensors, x, *(q.scale for q in quantizers if hasattr(q, "scale")))

    def delayed(encoding: str = "e4m3fn", amax: bool = True, common: bool = False) -> DelayedQuantizer:
        return DelayedQuantizer(encoding, common, scale=torch.ones(1), amax=torch.zeros(1) if amax else None)

    calls: list[Callable[[], Any]] = [
        lambda: [delayed(), delayed()], lambda: [delayed(), delayed("e5m2")], lambda: [delayed(), delayed(amax=False)],
        lambda: [delayed(), delayed(common=True)], lambda: (delayed(), delayed()),
        lambda: [delayed(), CurrentQuantizer("e4m3fn")], lambda: [delayed(), CurrentQuantizer("e4m3fn", epsilon=1.0)],
    ]  # fmt: skip
    for _ in range(2):
        for number, make in enumerate(calls):
            quantizers = make()
            scales = [q.scale for q in quantizers if hasattr(q, "scale")]
            assert [id(x) for x in split(X, [1, 3], quantizers, usage="row")[1:]] == [id(x) for x in scales], number
    assert len(runs) == len(calls)
    again = [delayed(), delayed()]
    repeated = split.plans.repeat(("quantizers",), x=X, splits=[1, 3], quantizers=again, usage="row")
    again = [delayed(), delayed()]
    assert [id(x) for x in repeated(again)] == [id(X), *(id(q.scale) for q in again)]


def test_lists_of_numbers_are_told_apart() -> None:
    runs = []

    @planned(None, lists=NUMBER_LISTS)
    def update(lists: Any) -> Any:
        runs.append(lists)
        return launching(lambda: str(lists))

    calls: list[Any] = [
        [[1.0], [2.0]], [[1.0, 2.0], []], [[], [1.0, 2.0]], [[1.0, 2.0]], [(1.0,), (2.0,)], [[1.0], (2.0,)],
        [(1.0,), [2.0]], ([1.0], [2.0]), [[1], [2.0]], [[1.0], [2]], [[True], [2.0]], [[1], [2]], [[2.0], [1.0]], [],
        [[]], [[2.0, 1.0, 1.0]], [[1.0, 1.0], [1.0]],
    ]  # fmt: skip
    for _ in range(2):
        assert [update(lists) for lists in calls] == [*map(str, calls)]
    assert runs == calls


def test_what_a_forward_saved_is_told_apart() -> None:
    runs = []

    @planned(None, saved=SAVED)
    def backward(saved: Saved) -> Any:
        runs.append(saved.format)
        return launching(lambda *tensors: tensors, *saved.tensors)

    calls = [
        lambda: Saved("one", "f"), lambda: Saved("two", "f"), lambda: Saved("one", "g"),
        lambda: Saved("one", "f", (torch.zeros(2),)), lambda: Saved("one", "f", (torch.zeros(3),)),
        lambda: Saved("one", "f", (None, torch.zeros(2))), lambda: Saved("one", "f", (), 7),
    ]  # fmt: skip
    for _ in range(2):
        for make in calls:
            saved = make()
            assert all(map(operator.is_, backward(saved), saved.tensors))
    assert len(runs) == len(calls)
    first, other = (Saved("one", "f", (torch.zeros(2),)) for _ in range(2))
    assert backward.plans.repeat(("saved",), saved=first)(other)[0] is other.tensors[0]
