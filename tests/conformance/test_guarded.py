# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Memory next to operands that nobody may read, one tensor as several operands, and calls behind larger ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance import arranging, pages
from te_dispatch.conformance.checks import find as find_check
from te_dispatch.conformance.checks import guarded
from te_dispatch.conformance.selection import of_forms
from te_dispatch.conformance.space import find
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure
from tests.conformance.trials import Mistake, case_of, trial_of

pytestmark = pytest.mark.sampled(5)

Given = Mapping[str, Any]
BWD = ("rmsnorm_bwd", "torch.rmsnorm_bwd")

_TOUCH = """
import ctypes, sys, torch
from te_dispatch.conformance import pages
where, place = sys.argv[1:]
x = getattr(pages, where)(5, torch.zeros(1)).fill_(1.0)
print(float(x.sum()), flush=True)
print(ctypes.c_float.from_address(x.data_ptr() + 4 * int(place)).value, flush=True)
"""


def _run(check: str, one: tuple[str, str], kernel: Mistake | None = None, **values: str) -> Any:
    trial = trial_of(case_of(one[0], "plain", **values), one[1], kernel)
    find_check(check).run(trial)
    return trial


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "inside", "outside"),
    [("before_closed_page", -1, 5), ("behind_closed_page", 5, -1)],
)
def test_one_element_further_is_a_crash(where: str, inside: int, outside: int) -> None:
    def touched(place: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", _TOUCH, where, str(place)], capture_output=True, text=True)

    assert touched(4).stdout.split() == ["5.0", "1.0"]
    assert touched(inside).returncode == 0
    crashed = touched(outside)
    assert crashed.returncode == -11
    assert crashed.stdout.split() == ["5.0"]


def test_pages_are_given_back() -> None:
    def maps() -> int:
        with open("/proc/self/maps") as file:
            return sum(1 for _ in file)

    like = torch.zeros(1)
    before = maps()
    for _ in range(200):
        pages.before_closed_page(5, like)
    assert maps() < before + 200


@pytest.mark.parametrize("size", [1, 5, 16, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_an_operand_ends_at_the_page_or_within_a_vector_of_it(size: int, dtype: torch.dtype) -> None:
    x = torch.ones(size, dtype=dtype)
    for way, room in zip(guarded._CLOSED, (0, 63, None)):
        count, strides, start = way.plan(x, "any") or (0, (), 0)
        whole = way.allocate(count, x)
        view = whole.as_strided(x.shape, strides, start)
        end = view.data_ptr() + view.numel() * view.element_size()
        if room is not None:
            assert 0 <= -end % 4096 <= room
        else:
            assert view.data_ptr() % 4096 == 0


def test_plain_operands_are_served_so() -> None:
    for operator, name in (("rmsnorm_fwd", "torch.rmsnorm_fwd"), BWD, ("gemm", "torch.matmul")):
        assert _run("guarded", (operator, name)).findings


def test_a_kernel_that_weighs_what_lies_around_operands_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices whose memory cannot be closed."""
    monkeypatch.setattr(pages, "supported", lambda device: False)

    def kernel(right: Subject, given: Given) -> Any:
        made, x = right.call(given), given["x"]
        size = x.untyped_storage().nbytes() // x.element_size()
        behind = x.storage_offset() + x.numel()
        if behind < size:
            whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, (size,), (1,))
            made.y.view(-1)[-1] += 0.0 * whole[behind]
        return made

    assert _run("guarded", ("rmsnorm_fwd", "torch.rmsnorm_fwd")).findings
    with pytest.raises(Failure, match="with memory around x guarded: with x so: y"):
        _run("guarded", ("rmsnorm_fwd", "torch.rmsnorm_fwd"), kernel)


def test_gaps_hold_what_a_maximum_keeps() -> None:
    x = torch.zeros(3, 5)
    arranged = arranging.Arranged({"x": x}, {"x": "any"}, arranging.strided)
    found = arranged.arguments["x"]
    whole = torch.empty(0).set_(found.untyped_storage(), 0, (found.untyped_storage().nbytes() // 4,), (1,))
    outside = whole[~whole.isfinite()]
    assert outside.isnan().any()
    assert outside.isinf().any()


def _if_one(one: str, other: str, path: str) -> Mistake:
    def kernel(right: Subject, given: Given) -> Any:
        same = given[one].data_ptr() == given[other].data_ptr()
        made = right.call(given)
        if same:
            getattr(made, path).mul_(0.5)
        return made

    return kernel


def test_one_tensor_twice() -> None:
    assert _run("shared", BWD).findings
    with pytest.raises(Failure, match="dx"):
        _run("shared", BWD, _if_one("dy", "x", "dx"))
    with pytest.raises(Failure, match="y"):
        _run("shared", ("layernorm_fwd", "torch.layernorm_fwd"), _if_one("gamma", "beta", "y"))


def test_a_workspace_of_more_rows_is_found() -> None:
    seen: list[int] = []

    def kernel(right: Subject, given: Given) -> Any:
        made, rows = right.call(given), given["x"].shape[0]
        if seen and seen[-1] > rows:
            made.dgamma.add_(1.0)
        seen.append(rows)
        return made

    assert _run("fewer_rows", BWD).findings
    with pytest.raises(Failure, match="after a call with twice as many rows: dgamma"):
        _run("fewer_rows", BWD, kernel)


def test_a_count_of_threads_that_breaks_results_is_found() -> None:
    def kernel(right: Subject, given: Given) -> Any:
        made = right.call(given)
        if torch.get_num_threads() == 7:
            made.dgamma.add_(1.0)
        return made

    assert _run("thread_counts", BWD).findings
    with pytest.raises(Failure, match="with 7 threads of the CPU: dgamma"):
        _run("thread_counts", BWD, kernel)


def test_operands_of_every_form_lie_otherwise_too() -> None:
    space = find("gemm", "quantized")
    plain = case_of("gemm", "quantized")
    cases = [plain, *(case_of("gemm", "quantized", scaling=value) for value in ("block_1d+block_1d", "mxfp8+mxfp8"))]
    later = [case_of("gemm", "quantized", scaling="mxfp8+mxfp8", layout="TN"), *cases]
    assert of_forms(space, later, [plain]) == cases[1:]
    assert of_forms(find("gemm", "plain"), [case_of("gemm", "plain")], []) == []
