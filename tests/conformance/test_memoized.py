# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What implementations keep between calls: caches keyed by too little, late behaviour, results and objects kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance.checks import find
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure

from .trials import case_of, trial_of

pytestmark = pytest.mark.sampled(5)

SOFTMAX = case_of("softmax_fwd", "plain", shape="2x16x16")
RECORDS = case_of("gemm", "quantized", layout="NT", copies="read", shape="48x32x64")


class _Cache:
    """Results of earlier calls, found again by a key."""

    def __init__(self, key: Callable[[Mapping[str, Any]], Any]) -> None:
        self.key = key
        self.kept: dict[Any, Any] = {}

    def __call__(self, right: Subject, arguments: Mapping[str, Any]) -> Any:
        key = self.key(arguments)
        if key not in self.kept:
            self.kept[key] = right.call(arguments).clone()
        return self.kept[key].clone()


class _ScaleCache:
    """The product of two records' scales, computed once for each pair of codes."""

    def __init__(self) -> None:
        self.kept: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, right: Subject, arguments: Mapping[str, Any]) -> Any:
        a = arguments["a"]
        kept, scale = self.kept.setdefault(a.row_data.data_ptr(), (a.row_data.clone(), a.row_scale_inv.clone()))
        made = right.call(arguments)
        if not torch.equal(kept, a.row_data):
            self.kept[a.row_data.data_ptr()] = a.row_data.clone(), a.row_scale_inv.clone()
            return made
        return made._replace(out=made.out * (scale / a.row_scale_inv).to(made.out.dtype))


KEYS: dict[str, tuple[Callable[[Mapping[str, Any]], Any], str]] = {
    "address": (lambda a: a["x"].data_ptr(), "after other contents were written"),
    "shape": (lambda a: a["x"].shape, "after other contents were written"),
    "object": (lambda a: id(a["x"]), "after other contents were written"),
    "address and count of writes": (lambda a: (a["x"].data_ptr(), a["x"]._version), "after other contents"),
}


@pytest.mark.parametrize("name", list(KEYS))
def test_a_cache_keyed_by_too_little(name: str) -> None:
    key, message = KEYS[name]
    with pytest.raises(Failure, match=message):
        find("same_memory").run(trial_of(SOFTMAX, "torch.softmax_fwd", _Cache(key)))


def test_a_cache_keyed_by_contents() -> None:
    by_contents = _Cache(lambda a: (a["x"].shape, a["x"].numpy().tobytes()))
    find("same_memory").run(trial_of(SOFTMAX, "torch.softmax_fwd", by_contents))


def test_a_cache_without_the_scale_s_value() -> None:
    find("same_memory").run(trial_of(RECORDS, "torch.emulated_gemm"))
    with pytest.raises(Failure, match="after scales alone were changed in the same memory: out"):
        find("same_memory").run(trial_of(RECORDS, "torch.emulated_gemm", _ScaleCache()))


class _FirstLengths:
    """An operand of integers is read once for each address."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept: dict[int, torch.Tensor] = {}

    def __call__(self, right: Subject, arguments: Mapping[str, Any]) -> Any:
        lengths = arguments[self.name]
        return right.call({**arguments, self.name: self.kept.setdefault(lengths.data_ptr(), lengths.clone())})


@pytest.mark.parametrize(
    ("operator", "space", "implementation", "name", "values"),
    [
        ("grouped_gemm", "plain", "grouped_matmul_device_splits", "splits",
         {"splits": "device", "rows": "3+0+17", "layout": "NT", "out": "new"}),
        ("attention_fwd", "ragged", "unfused_attention", "cu_seqlens_q", {"gaps": "none", "keys": "same"}),
        ("rope_fwd", "thd", "rope_fwd", "cu_seqlens", {"lengths": "5+9+3", "offsets": "none"}),
    ],
)  # fmt: skip
def test_lengths_that_are_read_once_for_an_address(
    operator: str, space: str, implementation: str, name: str, values: dict[str, str]
) -> None:
    case = case_of(operator, space, **values)
    right = trial_of(case, f"torch.{implementation}")
    find("turned").run(right)
    assert not right.notes
    with pytest.raises(Failure, match="after other integers were written into the same memory: "):
        find("turned").run(trial_of(case, f"torch.{implementation}", _FirstLengths(name)))


@pytest.mark.parametrize("operator", ("quantize", "multi_tensor_adam"))
def test_operators_that_write_their_arguments(operator: str) -> None:
    case = case_of(operator, "delayed" if operator == "quantize" else "plain")
    for check in ("same_memory", "many_calls"):
        find(check).run(trial_of(case, f"torch.{operator}"))


class _Counting:
    def __init__(self, then: Callable[[int, Any], Any]) -> None:
        self.calls, self.then = 0, then

    def __call__(self, right: Subject, arguments: Mapping[str, Any]) -> Any:
        self.calls += 1
        return self.then(self.calls, right.call(arguments))


def test_behaviour_from_the_hundredth_call_on() -> None:
    find("many_calls").run(trial_of(SOFTMAX, "torch.softmax_fwd"))
    changing = _Counting(lambda calls, made: made * 1.5 if calls >= 100 else made)
    with pytest.raises(Failure, match="in call 149 of the same arguments: "):
        find("many_calls").run(trial_of(SOFTMAX, "torch.softmax_fwd", changing))


def test_results_that_are_kept_alive() -> None:
    kept: list[Any] = []
    keeping = _Counting(lambda calls, made: kept.append(made.untyped_storage()) or made)  # type: ignore[func-returns-value]
    with pytest.raises(Failure, match="24 of 24 results are kept alive"):
        find("many_calls").run(trial_of(SOFTMAX, "torch.softmax_fwd", keeping))
    last: dict[str, Any] = {}
    find("many_calls").run(
        trial_of(SOFTMAX, "torch.softmax_fwd", _Counting(lambda calls, made: last.update(made=made) or made))
    )


def test_objects_that_calls_leave_behind() -> None:
    log: list[Any] = []
    logging = _Counting(lambda calls, made: log.append({"call": calls, "shape": str(made.shape)}) or made)  # type: ignore[func-returns-value]
    with pytest.raises(Failure, match="every call leaves Python objects behind"):
        find("many_calls").run(trial_of(SOFTMAX, "torch.softmax_fwd", logging))
