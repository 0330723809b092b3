# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tuning: keyed by chip, release and encoding, into memory of its own, and found again when plans are made."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.backend_kit import tuning as tuner

CALL = {"m": 16, "n": 32, "k": 64, "layout": "NT", "a.dtype": "bf16", "b.dtype": "bf16"}
FP8 = {**CALL, "a.dtype": "e4m3fn", "b.dtype": "e4m3fn", "a.scaling": "tensor", "b.scaling": "tensor"}


@pytest.fixture
def tuning(modules, monkeypatch, tmp_path) -> Any:
    """The module, with a cache of its own, and times that say that the library's second algorithm is the fastest."""
    monkeypatch.setenv("TE_DISPATCH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuner, "ROTATED_BYTES", 1 << 16)
    times = iter([10.0, 5.0, 8.0] * 1000)

    def repeated(run: Any, least: int) -> Any:
        run()  # it works
        us = next(times)
        return lambda: us

    monkeypatch.setattr(modules.operands, "repeated", repeated)
    modules.tuning.forget()
    yield modules.tuning
    modules.tuning.forget()


def keep(tuning: Any, call: dict[str, Any]) -> str:
    """What `tune` does with a call on a machine whose PyTorch sees the device; the key."""
    call = tuning.own_encodings(call, 0)
    key, candidates = tuning._prepare(call, 0)
    medians = [candidate.run() for candidate in candidates]
    tuning._keep({key: candidates[tuner.choose(medians, 0.0)].entry})
    return key


def test_the_winner_is_taken_when_a_plan_is_made(modules, tuning):
    a, b = torch.randn(16, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    left, right, sizes = modules.plans.plain_operands(a, b, "NT")
    problem = modules.plans.problem_of(left, right, sizes, "none", 0, torch.bfloat16)
    first = modules.plans.plan_of(problem)
    key = keep(tuning, CALL)
    assert key == tuning.key_of(problem)
    second = modules.plans.plan_of(problem)
    assert first.description != second.description
    expected = a.float() @ b.float().t()
    torch.testing.assert_close(modules.gemm.gemm(a, b, layout="NT").out.float(), expected, rtol=2**-7, atol=2**-6)


def test_keys_tell_chips_releases_and_encodings_apart(modules, tuning):
    keys = [keep(tuning, call) for call in (CALL, FP8)]
    assert len(set(keys)) == 2 and all(key.startswith("gfx942 ") and " hipblaslt 1.2.2 " in key for key in keys)
    a, b = torch.randn(16, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    left, right, sizes = modules.plans.plain_operands(a, b, "NT")
    problems = [modules.plans.problem_of(left, right, sizes, "none", index, torch.bfloat16) for index in (0, 1)]
    mine, other = (tuning.key_of(problem) for problem in problems)
    assert mine == keys[0] and other.startswith("gfx950 ")
    assert tuning.algorithm_for(problems[0]) is not None and tuning.algorithm_for(problems[1]) is None


def test_calls_are_tuned_in_the_chip_s_own_encoding(tuning):
    assert tuning.own_encodings(FP8, 0)["a.dtype"] == "e4m3fnuz"
    assert tuning.own_encodings(FP8, 1) == FP8  # gfx950
    assert tuning.own_encodings(CALL, 0) == CALL


def test_an_algorithm_that_the_library_does_not_list_is_not_taken(modules, tuning):
    a, b = torch.randn(16, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    left, right, sizes = modules.plans.plain_operands(a, b, "NT")
    problem = modules.plans.problem_of(left, right, sizes, "none", 0, torch.bfloat16)
    first = modules.plans.plan_of(problem)
    tuning._keep({tuning.key_of(problem): {"algorithm": "ee" * 24, "words": "of another release"}})
    assert modules.plans.plan_of(problem).description == first.description


def test_what_the_library_does_not_multiply_is_a_problem_of_its_row(tuning):
    rows = tuner.tune([], 0, tuning._prepare, tuning._keep)
    assert rows == []
    from te_dispatch.core.errors import Declined

    with pytest.raises(Declined, match="no algorithm"):
        tuning._prepare({**CALL, "a.dtype": "fp32", "b.dtype": "fp32", "out_dtype": "bf16"}, 0)
    (row,) = tuning.tune([CALL])
    assert row["problem"] == "PyTorch sees no device 0"
