# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Planned launches: found again for calls with the same signature and for no others, with the later call's tensors."""

from __future__ import annotations

import functools
import gc
import linecache
import operator
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dispatch.backend_kit import caches
from te_dispatch.backend_kit.call_plans import OPTION, TENSOR, CallPlans, Planned, launching, planned
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4FourOverSixQuantizer,
    NVFP4Quantizer,
    Quantizer,
)

ONE, TWO = torch.ones(1), torch.full((1,), 2.0)


class Norm:
    """A host function with the parameters of `rmsnorm_fwd`, which notes for what it was run."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []

        @planned("rmsnorm_fwd")
        def norm(
            x: torch.Tensor,
            gamma: torch.Tensor,
            *,
            eps: float = 1e-5,
            zero_centered_gamma: bool = False,
            residual: torch.Tensor | None = None,
            quantizer: Quantizer | None = None,
            usage: str = "row",
            with_y: bool = False,
            out_dtype: torch.dtype | None = None,
        ) -> Any:
            options = (eps, zero_centered_gamma, usage, with_y, out_dtype)
            self.runs.append({"x": tuple(x.shape), "options": options})
            if not x.is_contiguous():
                return norm(x.contiguous(), gamma, eps=eps, residual=residual)
            if x.shape[-1] == 13:
                return "not to be kept"
            state = (quantizer.scale, quantizer.amax) if isinstance(quantizer, DelayedQuantizer) else (None, None)
            kinds = (tuple(x.shape), x.dtype, repr(options), repr(quantizer).partition("scale=")[0])

            def launch(x: Any, gamma: Any, residual: Any, scale: Any, amax: Any) -> Any:
                return kinds, x, gamma, residual, scale, amax

            return launching(launch, x, gamma, residual, *state)

        self.norm: Any = norm


def test_a_second_call_is_launched_with_its_own_tensors() -> None:
    one = Norm()
    for _ in range(3):
        x, gamma, residual = torch.randn(4, 8), torch.randn(8), torch.randn(4, 8)
        quantizer = DelayedQuantizer("e4m3fn", scale=torch.ones(1), amax=torch.zeros(1))
        made = one.norm(x, gamma, residual=residual, quantizer=quantizer)
        for got, wanted in zip(made[1:], (x, gamma, residual, quantizer.scale, quantizer.amax), strict=True):
            assert got is wanted
        plain = one.norm(x, gamma)
        assert plain[1] is x and plain[2] is gamma and plain[3:] == (None, None, None)
    assert len(one.runs) == 2
    assert (one.norm.plans.hits, one.norm.plans.misses) == (4, 2)
    assert caches.statistics()[f"{__name__}.Norm.__init__.<locals>.norm"].hits == 4


#: Calls of which each has another signature: what a launch may depend on is told apart.
X, GAMMA = torch.randn(4, 8), torch.randn(8)
CALLS: list[dict[str, Any]] = [
    {}, {"x": X.double()}, {"x": torch.randn(8, 4).t()}, {"x": torch.randn(2, 2, 8)}, {"x": torch.randn(4, 16)[:, :8]},
    {"gamma": GAMMA.bfloat16()}, {"residual": X + 1}, {"eps": 0.0}, {"eps": -0.0}, {"eps": 0}, {"eps": 1e-6},
    {"zero_centered_gamma": True}, {"usage": "both"}, {"with_y": True}, {"out_dtype": torch.float16},
    *({"quantizer": q} for q in (
        DelayedQuantizer("e4m3fn", scale=ONE, amax=TWO), DelayedQuantizer("e4m3fn", scale=ONE),
        DelayedQuantizer("e5m2", scale=ONE), DelayedQuantizer("e4m3fn", True, scale=ONE), CurrentQuantizer("e4m3fn"),
        CurrentQuantizer("e4m3fn", power_of_two=True), CurrentQuantizer("e4m3fn", epsilon=0.5),
        CurrentQuantizer("e4m3fn", epsilon=-0.0), CurrentQuantizer("e4m3fn", True), BlockQuantizer("e4m3fn"),
        BlockQuantizer("e4m3fn", two_d=True), BlockQuantizer("e4m3fn", power_of_two=False),
        BlockQuantizer("e4m3fn", scale_layout="gemm_1d"), MXFP8Quantizer("e4m3fn"), MXFP8Quantizer("e4m3fn", True),
        NVFP4Quantizer(), NVFP4Quantizer(two_d=True), NVFP4FourOverSixQuantizer(),
        NVFP4FourOverSixQuantizer(scale_max=448),
    )),
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, len(CALLS) - 1), min_size=2, max_size=12))
def test_a_kept_launch_is_what_the_function_would_work_out(order: list[int]) -> None:
    one = Norm()
    for number in order:
        call = {"x": X, "gamma": GAMMA, **CALLS[number]}
        made, anew = one.norm(**call), Norm().norm(**call)
        assert made[0] == anew[0]
        assert all(a is b or (a.equal(b) and not call["x"].is_contiguous()) for a, b in zip(made[1:], anew[1:]))
    plain = [number for number in order if {"x": X, **CALLS[number]}["x"].is_contiguous()]
    assert len(one.runs) >= len(set(order)) and one.norm.plans.hits >= len(plain) - len(set(plain))


def test_what_no_signature_covers_is_worked_out_every_time() -> None:
    class Own(CurrentQuantizer):
        pass

    one = Norm()
    for call in ({"quantizer": Own("e4m3fn")}, {"residual": X}, {"x": torch.randn(4, 13)}):
        runs = len(one.runs)
        results = [one.norm(**{"x": X, "gamma": GAMMA, **call}) for _ in range(3)]
        assert len(one.runs) == runs + 3 and str(results[0]) == str(results[2])
    same = torch.randn(8)
    assert one.norm(same, same)[1:3] == (same, same)
    with pytest.raises(TypeError, match="unexpected keyword"):
        one.norm(X, GAMMA, epsilon=1.0)


def test_errors_of_function_and_launch_reach_the_caller() -> None:
    launches = []

    @planned(None)
    def refused(word: Any) -> Any:
        if word == "bad":
            raise ValueError("word: got 'bad'")

        def launch() -> None:
            launches.append(word)
            if len(launches) > 1:
                raise RuntimeError("the launch failed")

        return launching(launch)

    with pytest.raises(ValueError, match="got 'bad'"):
        refused("bad")
    refused("good")
    with pytest.raises(RuntimeError, match="the launch failed"):
        refused("good")
    assert launches == ["good", "good"]


def test_nothing_is_kept_alive_and_the_number_of_launches_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Norm()
    monkeypatch.setattr(one.norm.plans._entries, "half", 4)
    gone = []
    for size in range(1, 30):
        for grad in (False, True):
            x = torch.randn(size, 8, requires_grad=grad)
            one.norm(x, torch.randn(8))
            gone.append(weakref.ref(x))
    del x
    gc.collect()
    assert [ref for ref in gone if ref() is not None] == []
    found = one.norm.plans.statistics()
    assert found.size <= 8 and found.evictions > 0
    caches.clear(__name__)
    assert one.norm.plans.statistics().size == 0


def test_repeated_launches_take_what_varies_and_keep_the_rest() -> None:
    one = Norm()
    quantizer = DelayedQuantizer("e4m3fn", scale=ONE, amax=TWO)
    defaults = {"eps": 1e-5, "zero_centered_gamma": False, "usage": "row", "with_y": False, "out_dtype": None}
    call = {"x": X, "gamma": GAMMA, "residual": X + 1, "quantizer": quantizer, **defaults}
    assert one.norm.plans.repeat(("x",), **call) is None  # no such call was made
    one.norm(**call)
    runs = len(one.runs)
    other, weight = torch.randn(4, 8), torch.randn(8)
    made = one.norm.plans.repeat(("gamma", "x"), **call)(weight, other)
    assert made[1] is other and made[2] is weight and made[3] is call["residual"] and made[4:] == (ONE, TWO)
    twin = DelayedQuantizer("e4m3fn", scale=torch.ones(1), amax=torch.ones(1))
    made = one.norm.plans.repeat(("quantizer", "residual", "x", "gamma"), **call)(twin, other, other, weight)
    assert made[1] is other and made[3] is other and made[4] is twin.scale and made[5] is twin.amax
    assert one.norm.plans.repeat(("x",), **{**call, "eps": 1e-4}) is None and len(one.runs) == runs


def test_a_repeated_launch_keeps_nothing_of_what_varies() -> None:
    one, x = Norm(), torch.randn(4, 8)
    defaults = {"eps": 1e-5, "zero_centered_gamma": False, "usage": "row", "with_y": False, "out_dtype": None}
    call = {"x": x, "gamma": GAMMA, "residual": None, "quantizer": None, **defaults}
    one.norm(**call)
    repeated, gone = one.norm.plans.repeat(("x",), **call), weakref.ref(x)
    del x, call
    gc.collect()
    assert gone() is None and repeated is not None


def test_launches_that_refuse_are_tried_in_turn_and_planned_anew() -> None:
    """A launch may find what no signature covers: here how many bytes the address is a multiple of."""
    runs: list[int] = []

    @planned(None, x=TENSOR)
    def read(x: torch.Tensor) -> Any:
        runs.append(x.data_ptr() % 64)

        def at(multiple: int) -> Planned:
            def prepare(places: Any, count: int) -> Any:
                return lambda x: NotImplemented if x.data_ptr() % multiple else (multiple, x)

            return Planned(prepare, (x,), multiple < 64, functools.partial(at, multiple // 2) if multiple > 1 else None)

        return at(64)

    whole = torch.zeros(64 + 32)
    first = -whole.data_ptr() % 64 // 4
    aligned, apart, half = whole[first:][:16], whole[first + 1 :][:16], whole[first + 8 :][:16]
    assert read(apart)[0] == 4 and read(aligned) == (64, aligned) and read(half)[0] == 32
    assert [read(x)[0] for x in (aligned, apart, half, aligned)] == [64, 4, 32, 64]
    assert runs == [4] and read.plans.hits == 6
    repeated = read.plans.repeat(("x",), x=aligned)
    assert [repeated(x)[0] for x in (aligned, apart, half)] == [64, 4, 32] and runs == [4]
    caches.clear(__name__)  # what a launch was made of has changed
    assert repeated(aligned)[0] == 64 and runs == [4, 0]
    assert repeated(aligned)[0] == 64 and runs == [4, 0]

    @planned(None, x=TENSOR)
    def never(x: torch.Tensor) -> Any:
        return Planned(lambda places, count: lambda x: NotImplemented, (x,))

    with pytest.raises(RuntimeError, match="never: a launch refused the call that it was planned for"):
        never(aligned)


def test_a_call_is_planned_ahead_without_being_made() -> None:
    launched: list[Any] = []

    @planned("update_delayed_scales")
    def update(
        histories: Any, scales: Any, max_values: Any, *, algorithm: str = "max", margin: int = 0, amaxes: Any = None
    ) -> Any:
        def launch(*tensors: torch.Tensor) -> None:
            launched.append(tensors)

        return launching(launch, *histories, *scales)

    given = {
        "histories": [torch.zeros(4, 3), torch.zeros(4, 2)], "scales": [torch.ones(3), torch.ones(2)],
        "max_values": [(448.0,) * 3, (448.0,) * 2], "algorithm": "max", "margin": 0, "amaxes": None,
    }  # fmt: skip
    call = update.plans.ahead(**given)
    assert launched == []
    call()
    update(**given)
    tensors = (*given["histories"], *given["scales"])  # type: ignore[misc]
    assert all(len(one) == 4 and all(map(operator.is_, one, tensors)) for one in launched) and len(launched) == 2
    assert update.plans.hits == 1


def test_records_are_read_by_their_copies() -> None:
    @planned("dequantize")
    def decode(x: Quantized, *, dtype: torch.dtype | None = None) -> Any:
        return launching(lambda data, scale: (data, scale), x.col_data, x.col_scale_inv)

    def record(shared: bool) -> Quantized:
        scale = torch.ones(1)
        return Quantized(
            torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(8, 4, dtype=torch.uint8), scale,
            scale if shared else torch.ones(1), "e4m3fn", "tensor", "canonical", (4, 8), torch.float32,
            torch.device("cpu"),
        )  # fmt: skip

    for shared in (True, False, True, False):
        x = record(shared)
        data, scale = decode(x)
        assert data is x.col_data and scale is x.col_scale_inv
        again = record(shared)
        data, scale = decode.plans.repeat(("x",), x=x, dtype=None)(again)
        assert data is again.col_data and scale is again.col_scale_inv
    assert (decode.plans.hits, decode.plans.misses) == (2, 2)


def test_a_derived_class_keeps_launches_in_its_own_way() -> None:
    """A backend that finds out its launches otherwise: here by what the function returned."""

    class Doubling(CallPlans):
        def work_out(self, *arguments: Any) -> Any:
            facts, tensors = self.signature(arguments)
            found = self.launches(facts, tensors)
            result = self.function(*arguments)
            self.keep(facts, tensors, lambda x: ("kept", x), instead=found[0] if found else None)
            return result

    @Doubling.planned(None, x=TENSOR)
    def read(x: torch.Tensor) -> Any:
        return "run", x

    assert [read(X)[0] for _ in range(3)] == ["run", "kept", "kept"]
    facts, tensors = read.plans.signature([X])
    read.plans.keep(facts, tensors, lambda x: NotImplemented, instead=read.plans.launches(facts, tensors)[0])
    assert [read(X)[0] for _ in range(2)] == ["run", "kept"] and len(read.plans.launches(facts, tensors)) == 1


def test_a_parameter_of_no_known_kind_is_refused_where_it_is_declared() -> None:
    with pytest.raises(TypeError, match="takes no bias"):
        planned("rmsnorm_fwd", bias=OPTION)(lambda x: None)


def test_a_plan_is_run_alone_with_what_is_there() -> None:
    x = torch.randn(2)
    assert Planned(lambda places, count: lambda *xs: (places, count, xs), (None, x)).run() == ([None, 0], 1, (x,))


def test_a_call_that_is_planned_every_time_keeps_nothing() -> None:
    """One tensor in two places is no signature's: its launch is placed anew in every call, and compiled in none."""

    @planned("softmax_bwd")
    def softmax_bwd(
        dy: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0, out_dtype: torch.dtype | None = None
    ) -> Any:
        return launching(lambda dy, absent, y: (dy, absent, y), dy, None, y)

    x = torch.ones(2, 3)
    first = softmax_bwd(x, x)
    assert first[0] is x and first[1] is None and first[2] is x
    before = len(linecache.cache)
    for _ in range(20):
        softmax_bwd(x, x)
    assert len(linecache.cache) == before
