# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Checks with a cache refuse what they refuse without it, word for word, whatever they saw before."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer
from te_dispatch.ops.checks import attention, check_cache, gemm, guards, quantize, rows, signatures, training
from tests.bad_input import outcomes
from tests.bad_input.spoiling import changed, spoilt
from tests.bad_input.valid_calls import CALLS, delayed, ints, randn, record

CHECKS = {
    f"{module.__name__.rsplit('.', 1)[1]}.{name}": check
    for module in (attention, gemm, quantize, rows, training)
    for name, check in vars(module).items()
    if hasattr(check, "passed") and check.__module__ == module.__name__
}
#: Checks of an operator, where their names differ, and the arguments of theirs that the operator lacks.
NAMED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "layernorm_fwd": [("rows.norm_fwd", {})],
    "rmsnorm_fwd": [("rows.norm_fwd", {"beta": None})],
    "layernorm_bwd": [("rows.norm_bwd", {"centered": True})],
    "rmsnorm_bwd": [("rows.norm_bwd", {"centered": False, "mean": None})],
    "multi_tensor_adam": [("training.adam_tensors", {})],
    "multi_tensor_scale": [("training.scale_tensors", {})],
    "rope_fwd": [("rows.rope", {"name": "x"})],
    "rope_bwd": [("rows.rope", {"name": "dy"})],
    "attention_fwd": [("attention.attention", {}), ("attention._forward_options", {"device": torch.device("cpu")})],
    "attention_bwd": [("attention.attention", {"page_table": None}), ("attention.backward", {})],
}


def calls() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every check that remembers, with the arguments of each valid call of its operators: (check, call, more)."""
    for call, (operator, _) in CALLS.items():
        for family in ("gemm", "quantize", "rows", "training"):
            if f"{family}.{operator}" in CHECKS:
                yield f"{family}.{operator}", call, {}
        for name, more in NAMED.get(operator, []):
            yield name, call, more


CASES = [pytest.param(*case, id=f"{case[0]} {case[1]}".replace(" ", "-")) for case in calls()]


def arguments(check: Callable[..., Any], call: str, more: dict[str, Any]) -> dict[str, Any]:
    """A valid call of an operator as its check takes it."""
    operator, make = CALLS[call]
    bound = OPERATORS[operator].signature.bind_partial(**make())
    bound.apply_defaults()
    found = dict(bound.arguments) | more
    if operator == "rope_bwd":
        found["x"] = found["dy"]
    return {name: found[name] for name in inspect.signature(check).parameters}


def outcome(check: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, ...]:
    """What a check says: its error in full with what led to it, or its result."""
    try:
        return "passed", check(**given)
    except Exception as error:
        return type(error), str(error), error.__cause__, error.__context__


def agree(check: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, ...]:
    expected = outcome(check.__wrapped__, given)  # type: ignore[attr-defined]
    for _ in range(2):  # the second time it may be cached
        assert outcome(check, given) == expected
    return expected


@pytest.fixture(autouse=True, params=["native", "python"])
def _nothing_seen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty memory, with either comparison of tensors."""
    if request.param == "python":
        monkeypatch.setattr(guards, "TensorGuards", None)
    elif guards.TensorGuards is None:
        pytest.skip("this PyTorch has no native comparison of tensors")
    for check in CHECKS.values():
        check.passed.clear()


def test_every_check_that_remembers_is_called_here() -> None:
    assert {name for name, _, _ in calls()} == set(CHECKS)


@pytest.mark.parametrize(("name", "call", "more"), CASES)
def test_a_spoilt_call_is_judged_alike_after_a_valid_one(name: str, call: str, more: dict[str, Any]) -> None:
    check = CHECKS[name]
    valid = arguments(check, call, more)
    assert agree(check, valid)[0] == "passed"
    for argument, value in valid.items():
        for _, wrong in spoilt(value):
            agree(check, valid | {argument: wrong})
        agree(check, valid | {argument: None})
    assert agree(check, valid)[0] == "passed"


@pytest.mark.parametrize(("name", "call", "more"), CASES)
def test_random_sequences_of_mutated_calls_are_judged_alike(name: str, call: str, more: dict[str, Any]) -> None:
    """Several arguments wrong at once, in random order, in one memory that fills on the way."""
    check, generator = CHECKS[name], random.Random(f"{name} {call}")
    valid = arguments(check, call, more)
    mutants = {argument: [value, None, *_mutants(value)] for argument, value in valid.items()}
    for _ in range(150):
        chosen = generator.sample(list(valid), generator.randint(0, min(3, len(valid))))
        agree(check, valid | {argument: generator.choice(mutants[argument]) for argument in chosen})


def _mutants(value: Any) -> list[Any]:
    """Wrong values, and right ones of other shapes, dtypes, layouts of memory and kinds."""
    found = [wrong for _, wrong in spoilt(value)]
    if isinstance(value, torch.Tensor):
        found += [value.to(torch.bfloat16), value.expand(2, *value.shape), torch.nn.Parameter(value, False)]
        if value.ndim and value.numel():
            found += [value[:1].expand(value.shape), value[..., :0]]
        found.append(record(*value.shape) if value.ndim == 2 and value.is_floating_point() else 0)
    if isinstance(value, bool):
        found += [not value, 1, 0]
    elif isinstance(value, (int, float)):
        found += [0, 0.0, False, 1, 1.0, True, -1, float("nan")]
    if isinstance(value, tuple):
        found += [tuple(map(float, value)), tuple(map(bool, value))]
    if hasattr(value, "encoding"):
        found += [delayed(), CurrentQuantizer(), CurrentQuantizer(epsilon=-1.0), BlockQuantizer(two_d=True)]
        found += [BlockQuantizer(), BlockQuantizer(scale_layout="gemm_1d")]
    return found


def _remembers(check: Callable[..., Any], given: dict[str, Any]) -> bool:
    check.passed.clear()  # type: ignore[attr-defined]  # making the arguments may have called it
    agree(check, given)
    return bool(check.passed.size)  # type: ignore[attr-defined]


LOOKING = ("thd", "padding", "paged", "moe_unpermute", "rope_fwd")


@pytest.mark.parametrize(("name", "call", "more"), CASES)
def test_a_valid_call_is_remembered_unless_contents_decide(name: str, call: str, more: dict[str, Any]) -> None:
    check = CHECKS[name]
    looks = any(word in call for word in LOOKING) and name not in ("attention._forward_options",)
    assert _remembers(check, arguments(check, call, more)) is not looks


def test_contents_on_the_host_are_looked_at_in_every_call() -> None:
    check = CHECKS["rows.rope"]
    given = {"name": "x", "x": randn(5, 3, 8), "freqs": randn(6, 1, 1, 6), "layout": "thd", "offsets": None}
    lengths = ints(0, 2, 5)
    assert agree(check, given | {"cu_seqlens": lengths})[0] == "passed"
    lengths[1] = 9
    assert agree(check, given | {"cu_seqlens": lengths})[0] is ValueError


@pytest.mark.parametrize("change", ["resize_", "transpose_", "data", "stride"])
def test_tensors_changed_in_place_are_seen(change: str) -> None:
    check = CHECKS["gemm.gemm"]
    a, b, out = randn(6, 16), randn(8, 16), randn(6, 8)
    given = {"a": a, "b": b, "layout": "NT", "out": out}
    assert agree(check, given)[0] == "passed"
    if change == "resize_":
        b.resize_(8, 17)
    elif change == "transpose_":
        b.t_()
    elif change == "data":
        b.data = b.data.double()
    else:
        out.as_strided_((6, 8), (0, 1))
    assert agree(check, given)[0] is ValueError


@pytest.mark.parametrize("part", ["row_data", "col_data", "row_scale_inv", "col_scale_inv"])
def test_records_changed_in_place_are_seen(part: str) -> None:
    check = CHECKS["gemm.gemm"]
    given = {"a": record(16, 32), "b": record(32, 32), "layout": "NT"}
    assert agree(check, given)[0] == "passed"
    getattr(given["b"], part).resize_(3)
    assert agree(check, given)[0] is ValueError
    setattr(given["b"], part, None)
    agree(check, given)


def test_a_remembered_call_does_not_run_its_check() -> None:
    seen = []

    @check_cache.cached_check(x=signatures.LEADING, y=signatures.OPTIONAL)
    def check(x: Any, y: Any = None, word: Any = "a") -> int:
        seen.append((x, y, word))
        return len(seen)

    x, y = randn(2, 3), randn(3)
    assert [check(x), check(x.clone()), check(x, word="b"), check(x, y), check(x=x, y=y.clone())] == [1, 1, 2, 3, 3]
    assert [check(x.double()), check(x.double()), check(x, y.double()), check(x.t())] == [4, 4, 5, 6]
    assert check(x) == 1


def test_one_tensor_given_twice_is_judged_like_two() -> None:
    check, x = CHECKS["gemm.gemm"], randn(16, 16)
    for b in (randn(16, 16), x):
        assert agree(check, {"a": x, "b": b, "layout": "NT"})[0] == "passed"
    assert agree(check, {"a": x, "b": x, "layout": "NT", "out": x[:1].expand(16, 16)})[0] is ValueError


def test_passes_with_the_same_facts_are_bounded() -> None:
    check = CHECKS["rows.norm_fwd"]
    given = arguments(check, "rmsnorm_fwd", {"beta": None})
    for grad in (False, True):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for weight in (dtype, torch.float32):
                x, gamma = given["x"].to(dtype, copy=True).requires_grad_(grad), given["gamma"].to(weight, copy=True)
                agree(check, given | {"x": x, "gamma": gamma, "residual": None})
    assert {len(passes) for passes in check.passed.recent.values()} <= set(range(1, check_cache.PASSES + 1))


def test_shared_and_separate_scales_are_told_apart() -> None:
    check = CHECKS["quantize.dequantize"]
    whole = record(16, 32)
    assert agree(check, {"x": whole, "dtype": None})[0] == "passed"
    assert agree(check, {"x": changed(whole, col_scale_inv=torch.ones(1)), "dtype": None})[0] == "passed"
    assert agree(check, {"x": changed(whole, col_scale_inv=torch.ones(2)), "dtype": None})[0] is ValueError
    assert agree(check, {"x": changed(whole, row_scale_inv=None, col_scale_inv=None), "dtype": None})[0] is TypeError


def test_states_of_a_quantizer_changed_in_place_are_seen() -> None:
    check = CHECKS["quantize.quantize"]
    quantizer = DelayedQuantizer(scale=torch.ones(1), amax=torch.zeros(1))
    given = {"x": randn(16, 32), "quantizer": quantizer, "usage": "both"}
    assert agree(check, given)[0] == "passed"
    quantizer.amax.resize_(2)
    assert agree(check, given)[0] is ValueError


def test_equal_numbers_of_other_classes_are_told_apart() -> None:
    check = CHECKS["attention.attention"]
    given = arguments(check, "attention_fwd", {}) | {"max_seqlen_q": 6, "window": (3, 3)}
    assert agree(check, given)[0] == "passed"
    assert agree(check, given | {"max_seqlen_q": 6.0})[0] is TypeError
    assert agree(check, given | {"window": (3.0, 3.0)})[0] is TypeError
    assert agree(check, given | {"window": (True, 3)})[0] == "passed"


def test_a_class_of_tensors_that_is_not_plain_is_checked_every_time() -> None:
    class Wrapped(torch.Tensor):
        pass

    check = CHECKS["rows.softmax_fwd"]
    given = {"x": randn(2, 4, 5).as_subclass(Wrapped), "mask": None, "scale": 0.5, "out_dtype": None}
    assert not _remembers(check, given)


def test_subclasses_of_records_and_quantizers_are_checked_every_time() -> None:
    class Record(Quantized):
        __slots__ = ()

    class Cast(CurrentQuantizer):
        pass

    whole = record(16, 32)
    made = Record(**{name: getattr(whole, name) for name in Quantized.__slots__})
    assert not _remembers(CHECKS["quantize.dequantize"], {"x": made, "dtype": None})
    assert not _remembers(CHECKS["quantize.quantize"], {"x": randn(16, 32), "quantizer": Cast(), "usage": "row"})


def test_the_memory_holds_no_tensor_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    check = CHECKS["quantize.quantize"]
    check.passed.clear()
    monkeypatch.setattr(check.passed, "half", 4)
    for size in range(1, 50):
        agree(check, {"x": randn(size, 32), "quantizer": delayed(), "usage": "both", "out": None})
        assert 0 < check.passed.size <= 8
    for name, call, more in calls():
        agree(CHECKS[name], arguments(CHECKS[name], call, more))
    for held in (check.passed for check in CHECKS.values()):
        assert not outcomes.numbers(list(_flat(list(held.recent.items()))))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for member in value:
            yield from _flat(member)
    else:
        yield value


def test_nothing_is_remembered_inside_a_trace() -> None:
    check = CHECKS["rows.softmax_fwd"]

    def traced(x: torch.Tensor) -> torch.Tensor:
        check(x, None, 0.5, None)
        return x * 2

    x = randn(2, 4, 5)
    assert torch.equal(torch.compile(traced, fullgraph=True, backend="eager")(x), x * 2)
    assert not check.passed.size


def test_a_wrong_name_in_a_declaration_is_refused() -> None:
    with pytest.raises(TypeError, match="check: takes no y"):

        @check_cache.cached_check(y=signatures.TENSOR)
        def check(x: Any) -> None:
            pass
