# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls that operators keep: each is found again for its own kind of arguments only.

Every variant of a call is made once, so that all are kept; then each is made again, and once more with nothing kept.
The native function must get the same arguments. No GPU: a native call is recorded instead.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_dispatch.backend_kit import caches
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ONE, TWO = torch.ones(1), torch.zeros(1)
QUANTIZERS = (
    DelayedQuantizer("e4m3fn", scale=ONE, amax=TWO), DelayedQuantizer("e4m3fn", scale=ONE),
    DelayedQuantizer("e5m2", scale=TWO, amax=ONE), DelayedQuantizer("e4m3fn", True, scale=ONE, amax=TWO),
    CurrentQuantizer("e4m3fn"), CurrentQuantizer("e4m3fn", power_of_two=True), CurrentQuantizer("e4m3fn", epsilon=0.5),
    CurrentQuantizer("e4m3fn", True), BlockQuantizer("e4m3fn"), BlockQuantizer("e4m3fn", two_d=True),
    BlockQuantizer("e4m3fn", power_of_two=False), BlockQuantizer("e5m2", epsilon=0.5),
    BlockQuantizer("e4m3fn", scale_layout="gemm_1d"), BlockQuantizer("e4m3fn", two_d=True, scale_layout="gemm_2d"),
    MXFP8Quantizer("e4m3fn"),
    MXFP8Quantizer("e5m2"), NVFP4Quantizer(), NVFP4Quantizer(two_d=True),
)  # fmt: skip
USAGES = ("row", "column", "both")


class Recorder:
    """Stands for the compiled module: prepared calls note (function, arguments) and make tensors of the host."""

    def __init__(self) -> None:
        self.noted: list[tuple[Any, ...]] = []

    def prepare(
        self, name: str, around: Any, constants: list[Any], given: Any, made: Any, result: Any, aligned: Any, keep: Any
    ) -> Any:
        def call(*tensors: torch.Tensor | None) -> Any:
            assert len(tensors) == len(given)
            words = list(constants)
            for i, positions in enumerate(given):
                for position in positions:
                    words[position] = ("given", i, tensors[i] is None)
            outputs = []
            for role, shape, strides, dtype, _, positions in made:
                outputs.append(torch.empty_strided(shape, strides, dtype=dtype))
                for position in positions:
                    words[position] = ("made", role, shape, dtype)
            self.noted.append((name, *map(repr, words), repr(result)))
            return _built(result, tensors, outputs)

        return call


def _built(result: Any, given: Any, made: Any) -> Any:
    kind = result[0]
    if kind in ("made", "given"):
        return (made if kind == "made" else given)[result[1]]
    if kind == "constant":
        return result[1]
    parts = [_built(part, given, made) for part in result[2]]
    return result[1](*parts) if kind == "tuple" else result[1](**dict(zip(result[3], parts)))


@pytest.fixture
def recorder(native: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    from te_dispatch_cuda import casts, norm, quantize, training

    recorder = Recorder()
    # Where each one's `launch` looks: another test may have had modules imported anew.
    for module in (casts, norm, quantize, training):
        monkeypatch.setitem(module.launch.__globals__, "_native", recorder)
    _forget()
    yield recorder
    _forget()  # what was kept calls the recorder


def _forget() -> None:
    caches.clear("te_dispatch_cuda.")


def _tensors(*dtypes: torch.dtype) -> list[torch.Tensor]:
    """Matrices of several shapes, one of them with gaps between its rows, one turned."""
    made = [torch.zeros(64, 128, dtype=dtype) for dtype in dtypes]
    return [
        *made,
        torch.zeros(4, 16, 128),
        torch.zeros(128, 64),
        torch.zeros(64, 160)[:, :128],
        torch.zeros(128, 64).t(),
    ]


Variants = list[Callable[[], Any]]


def _quantizes() -> Variants:
    from te_dispatch_cuda import quantize as q

    made: Variants = []
    for x, quantizer, usage in itertools.product(_tensors(FP32, BF16), QUANTIZERS, USAGES):
        made.append(lambda x=x, z=quantizer, u=usage: q.quantize(x, z, usage=u))
        if quantizer.kind in ("current", "nvfp4"):
            made.append(lambda x=x, z=quantizer, u=usage: q.quantize(x, z, usage=u, amax=ONE))
        for dtype in (None, FP16):
            made.append(lambda x=x, z=quantizer, u=usage, d=dtype: q.quantize_dbias(x, z, usage=u, bias_dtype=d))

        def into(x: Any = x, z: Any = quantizer, u: Any = usage) -> Any:
            return q.quantize(x, z, usage=u, out=q.quantize(x, z, usage=u))

        made.append(into)
    return made


def _norms() -> Variants:
    from te_dispatch_cuda import norm

    made: Variants = []
    x, gamma = torch.zeros(64, 128, dtype=BF16), torch.zeros(128)
    flags = (False, True)
    betas, residuals, quantizers = (None, torch.zeros(128), gamma.bfloat16()), (None, x.clone()), (None, *QUANTIZERS)
    for beta, residual, quantizer, y, usage in itertools.product(betas, residuals, quantizers, flags, USAGES):
        options: dict[str, Any] = {"residual": residual, "quantizer": quantizer, "with_y": y, "usage": usage}
        made.append(lambda b=beta, o=options: norm.layernorm_fwd(x, gamma, b, **o))
        if beta is None:
            for changed in ({}, {"eps": 1e-3}, {"zero_centered_gamma": True}, {"out_dtype": FP16}):
                made.append(lambda o=options | changed: norm.rmsnorm_fwd(x, gamma, **o))
                made.append(lambda o=options | changed: norm.rmsnorm_fwd(x, gamma.bfloat16(), **o | {"residual": None}))
    return made


def _activations() -> Variants:
    from te_dispatch_cuda import activation

    made: Variants = []
    x = torch.zeros(64, 128, dtype=BF16)
    for kind, quantizer, usage, flag in itertools.product(
        ("gelu", "relu", "swiglu", "clamped_swiglu"), (None, *QUANTIZERS), USAGES, (False, True)
    ):
        limits = ((7.0, 1.0), (0.0, 1.0), (-0.0, 1.0)) if kind == "clamped_swiglu" else (None,)
        dy = torch.zeros(64, 128 if kind in ("gelu", "relu") else 64, dtype=BF16)
        codes = Quantized(x.byte(), None, ONE, None, "e4m3fn", "tensor", "canonical", (64, 128), BF16, x.device)
        for params, source in itertools.product(limits, (x, codes)):
            options: dict[str, Any] = {"kind": kind, "quantizer": quantizer, "usage": usage, "params": params}
            made.append(lambda s=source, o=options, f=flag: activation.activation_fwd(s, with_out=f, **o))
            made.append(lambda s=source, o=options: activation.activation_fwd(s, out_dtype=FP32, **o))
            made.append(lambda s=source, dy=dy, o=options, f=flag: activation.activation_bwd(dy, s, with_dx=f, **o))
            made.append(lambda s=source, dy=dy, o=options, f=flag: activation.activation_bwd(dy, s, with_dbias=f, **o))
    return made


def _others() -> Variants:
    from te_dispatch_cuda import norm, quantize, training

    made: Variants = []
    x, gamma, rows = torch.zeros(64, 128, dtype=BF16), torch.zeros(128), torch.zeros(64)
    state = torch.zeros(2, dtype=torch.int64)
    for bias, residual, p in itertools.product((None, gamma, gamma.bfloat16()), (None, x.clone()), (0.0, 0.1, 0.5)):
        made.append(
            lambda b=bias, r=residual, p=p: training.dropout_add_fwd(
                x, r, bias=b, dropout_p=p, rng_state=state if p else None
            )
        )
        made.append(lambda p=p: training.dropout_add_bwd(x, x.byte() if p else None, dropout_p=p))
    other, mean = x.clone(), rows.clone()
    for dy, centered, add in itertools.product((x.clone(), x.float()), (False, True), (None, other, x.float())):
        made.append(
            lambda a=add, dy=dy, z=centered: norm.layernorm_bwd(dy, x, gamma, mean, rows, add=a, zero_centered_gamma=z)
        )
        made.append(lambda a=add, dy=dy, z=centered: norm.rmsnorm_bwd(dy, x, gamma, rows, add=a, zero_centered_gamma=z))
    histories = (
        [torch.zeros(4, 3)],
        [torch.zeros(5, 3)],
        [torch.zeros(4, 6)[:, :3]],
        [torch.zeros(4, 3), torch.zeros(4, 3)],
    )
    for history, algorithm, margin, amax, maxima in itertools.product(
        histories, ("max", "most_recent"), (0, 1), (False, True), ((448.0,) * 3, (448.0, 448.0, 57344.0))
    ):
        scales = [torch.ones(3) for _ in history]
        made.append(
            lambda h=history, s=scales, g=algorithm, m=margin, a=amax, v=maxima: quantize.update_delayed_scales(
                h, s, [v] * len(h), algorithm=g, margin=m, amaxes=[x.clone() for x in s] if a else None
            )
        )
    return made


@pytest.mark.parametrize("variants", [_quantizes, _norms, _activations, _others], ids=lambda f: f.__name__[1:])
def test_a_call_is_found_for_its_own_kind_only(
    recorder: Recorder, variants: Callable[[], Variants], monkeypatch: pytest.MonkeyPatch
) -> None:
    from te_dispatch_cuda import norm

    parts = type("Parts", (), {"norm_backward_parts": staticmethod(lambda *sizes: sum(sizes))})
    monkeypatch.setattr(norm, "_native", parts)

    def noted(variant: Callable[[], Any]) -> list[tuple[Any, ...]]:
        recorder.noted = []
        variant()
        return recorder.noted

    every = variants()
    for variant in every:
        variant()
    kept = [noted(variant) for variant in every]
    assert sum(one.hits for name, one in caches.statistics().items() if name.startswith("te_dispatch_cuda.")) > 30
    anew = []
    for variant in every:
        _forget()
        anew.append(noted(variant))
    assert len(set(map(tuple, anew))) > 50 and all(anew)
    assert [i for i in range(len(every)) if kept[i] != anew[i]] == []


def test_a_planned_cast_is_the_cast(recorder: Recorder, plan_of: Any) -> None:
    """What `te_dispatch.core.repeating` gets for calls like one that was made: it calls the same with other tensors."""
    from te_dispatch_cuda import quantize as q
    from te_dispatch_cuda.sources import readable

    served = 0
    for x, quantizer, usage, dtype in itertools.product(_tensors(FP32, BF16), QUANTIZERS, USAGES, (None, FP16)):
        other = torch.ones_like(x)
        options: dict[str, Any] = {"quantizer": quantizer, "usage": usage}
        nothing = {"out": None, "noop_flag": None, "amax": None, "rng_state": None}
        for operator, rest, more in ((q.quantize, nothing, {}), (q.quantize_dbias, {}, {"bias_dtype": dtype})):
            prepare = plan_of(operator)
            operator(x, **options, **more)
            expected, recorder.noted = recorder.noted[-1:], []
            call = prepare(("x",), x=x, **options, **rest, **more)
            assert (call is None) == (readable(x) is not x)
            if call is not None:
                served += 1
                result = call(other)
                assert recorder.noted == expected and result.__class__ is operator(x, **options, **more).__class__
        for given in ({"amax": ONE}, {"noop_flag": ONE}, {"out": q.quantize(x, **options)}):
            assert plan_of(q.quantize)(("x",), x=x, **options, **(nothing | given)) is None
    assert served > 100


def _repeatable() -> Iterator[tuple[Any, tuple[str, ...], dict[str, Any]]]:
    """Norms and activations: the operator, what varies, and the arguments that are no defaults."""
    from te_dispatch_cuda import activation, norm

    x, gamma, rows = torch.zeros(64, 128, dtype=BF16), torch.zeros(128), torch.zeros(64)
    dy = torch.zeros(64, 128, dtype=BF16)
    for quantizer, usage, flag in itertools.product((None, *QUANTIZERS), USAGES, (False, True)):
        cast: dict[str, Any] = {"quantizer": quantizer, "usage": usage}
        of_norm = {"x": x, "gamma": gamma, "zero_centered_gamma": flag, "with_y": not flag, **cast}
        yield norm.rmsnorm_fwd, ("x", "gamma"), of_norm
        yield norm.layernorm_fwd, ("x", "gamma", "beta"), {**of_norm, "beta": gamma.bfloat16()}
        yield activation.activation_fwd, ("x",), {"x": x, "kind": "swiglu", "with_out": flag, **cast}
        yield activation.activation_bwd, ("dy", "x"), {"dy": dy, "x": x, "kind": "gelu", "with_dbias": flag, **cast}
    for add, flag in itertools.product((None, x.clone()), (False, True)):
        given = {"dy": dy, "x": x, "gamma": gamma, "rstd": rows, "zero_centered_gamma": flag, "add": add}
        extra = () if add is None else ("add",)
        yield norm.rmsnorm_bwd, ("dy", "x", "gamma", "rstd", *extra), given
        yield norm.layernorm_bwd, ("dy", "x", "gamma", "mean", "rstd", *extra), {**given, "mean": rows.clone()}


def test_a_planned_norm_or_activation_is_the_call(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, plan_of: Any
) -> None:
    from te_dispatch_cuda import norm

    monkeypatch.setattr(norm, "_native", SimpleNamespace(norm_backward_parts=lambda *sizes: sum(sizes)))
    for operator, varying, given in _repeatable():
        everything = {p.name: p.default for p in inspect.signature(operator).parameters.values()} | given
        recorder.noted = []
        result = operator(**given)
        expected, recorder.noted = recorder.noted, []
        call = plan_of(operator)(varying, **everything)
        again = call(*[torch.ones_like(given[name]) for name in varying])
        assert recorder.noted == expected and again.__class__ is result.__class__
        recorder.noted = list(expected)
        few = plan_of(operator)(varying[1:], **everything)
        few(*[torch.ones_like(given[name]) for name in varying[1:]])
        assert recorder.noted == expected * 2
        apart = torch.zeros(64, 256, dtype=BF16)[:, ::2]
        assert plan_of(operator)(varying, **(everything | {"x": apart})) is None


def test_a_planned_update_is_of_the_same_tensors(recorder: Recorder) -> None:
    from te_dispatch_cuda import quantize as q

    histories, scales = [torch.zeros(4, 3), torch.zeros(5, 2)], [torch.ones(3), torch.ones(2)]
    given = {
        "histories": histories, "scales": scales, "max_values": [(448.0,) * 3, (448.0, 57344.0)], "algorithm": "max",
        "margin": 1, "amaxes": [torch.ones(3), torch.ones(2)],
    }  # fmt: skip
    q.update_delayed_scales(**given)
    expected, recorder.noted = recorder.noted[-1:], []
    call = q.plan_update_delayed_scales((), **given)
    assert recorder.noted == []
    call(), call()
    assert recorder.noted == expected * 2
    assert q.plan_update_delayed_scales((), **{**given, "amaxes": None}) is not None
    apart = [torch.zeros(4, 6)[:, :3], histories[1]]
    assert q.plan_update_delayed_scales((), **{**given, "histories": apart}) is None
    with pytest.raises(ValueError, match="max_values"):
        q.plan_update_delayed_scales((), **{**given, "max_values": [(448.0,) * 3]})
