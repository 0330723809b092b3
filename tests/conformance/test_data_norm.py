# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Values and sizes of the norms' cases find mistakes that ordinary data hide, and refuse nothing that is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance.checks import find
from te_dispatch.conformance.space import find as space_of
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure

from .trials import Mistake, case_of, trial_of


def _statistics(x: torch.Tensor, by_difference: bool) -> tuple[torch.Tensor, torch.Tensor]:
    mean = x.mean(-1, keepdim=True)
    if by_difference:
        return mean, (x.square().mean(-1, keepdim=True) - mean.square()).clamp_min(0)
    return mean, (x - mean).square().mean(-1, keepdim=True)


def _layernorm(by_difference: bool) -> Mistake:
    def layernorm(right: Subject, arguments: Mapping[str, Any]) -> Any:
        result = right.call(arguments)
        x = arguments["x"].float()
        mean, variance = _statistics(x, by_difference)
        rstd = (variance + arguments["eps"]).rsqrt()
        y = (x - mean) * rstd * arguments["gamma"].float() + arguments["beta"].float()
        return result._replace(y=y.to(x.dtype), mean=mean.squeeze(-1), rstd=rstd.squeeze(-1))

    return layernorm


def _rmsnorm_by(rms: Any) -> Mistake:
    """RMSNorm with another root of the mean square of fp32 values."""

    def rmsnorm(right: Subject, arguments: Mapping[str, Any]) -> Any:
        result = right.call(arguments)
        x = arguments["x"].float()
        rstd = 1 / rms(x, arguments["eps"])
        y = x * rstd * arguments["gamma"].float()
        return result._replace(y=y.to(result.y.dtype), rstd=rstd.squeeze(-1))

    return rmsnorm


def _plain_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


def _scaled_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Without overflow: relative to the largest."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1.0)
    return largest * ((x / largest).square().mean(-1, keepdim=True) + eps / largest.square()).sqrt()


def _clamped_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.square().clamp_max(1e30).mean(-1, keepdim=True) + eps).sqrt()


def _rms_in_half(x: torch.Tensor, eps: float) -> torch.Tensor:
    return (x.half().float().square().mean(-1, keepdim=True) + eps).sqrt()


def _flushed(x: Any) -> Any:
    if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
        return x
    return torch.where(x.abs() < torch.finfo(torch.float32).tiny, 0.0, x).to(x.dtype)


def _flushing(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """Subnormal fp32 and bf16 numbers count as 0, in operands and in results."""
    result = right.call({name: _flushed(value) for name, value in arguments.items()})
    return result._replace(**{name: _flushed(value) for name, value in result._asdict().items()})


def _last_rows_wrong(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """A row number in 16 bits."""
    result = right.call(arguments)
    result.y[1 << 16 :] = result.y[: max(result.y.shape[0] - (1 << 16), 0)]
    return result


def _last_columns_wrong(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """What a block of 1,024 threads keeps in registers: 8 columns each."""
    result = right.call(arguments)
    result.y[..., 8192:] = 0
    return result


def _last_rows_left_out(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """dgamma of the first 65,536 rows."""
    result = right.call(arguments)
    few = {name: arguments[name][: 1 << 16] for name in ("dy", "x", "rstd")}
    return result._replace(dgamma=right.call({**arguments, **few, "add": None}).dgamma)


def _special_rows_made_zero(right: Subject, arguments: Mapping[str, Any]) -> Any:
    result = right.call(arguments)
    return result._replace(y=result.y.nan_to_num(0.0))


_FP32 = {"dtype": "fp32", "out": "same", "cast": "none", "weights": "same", "centred": "no"}
_BACK = {"dtype": "fp32", "dy": "fp32", "add": "none", "dy_values": "normal", "values": "normal", "weights": "same"}
_WIDE = {**_FP32, "beta": "yes", "eps": "1e-5"}

MISTAKES: dict[str, tuple[str, dict[str, str], Mistake]] = {
    "variance by difference": ("layernorm_fwd", {**_WIDE, "values": "far_mean"}, _layernorm(True)),
    "negative variance cut off": ("layernorm_fwd", {**_WIDE, "values": "constant", "eps": "1e-12"}, _layernorm(True)),
    "squares in half precision": ("rmsnorm_fwd", {**_FP32, "values": "large_squares"}, _rmsnorm_by(_rms_in_half)),
    "squares clamped": ("rmsnorm_fwd", {**_FP32, "values": "square_overflow"}, _rmsnorm_by(_clamped_rms)),
    "special rows made zero": ("rmsnorm_fwd", {**_FP32, "values": "special_rows"}, _special_rows_made_zero),
    "rows past 65,535": ("rmsnorm_fwd", {**_FP32, "values": "normal", "shape": "65549x3"}, _last_rows_wrong),
    "columns past 8,192": ("layernorm_fwd", {**_WIDE, "values": "normal", "shape": "4x8200"}, _last_columns_wrong),
    "dgamma of 65,536 rows": ("rmsnorm_bwd", {**_BACK, "shape": "65549x3", "dy_values": "late"}, _last_rows_left_out),
}  # fmt: skip

#: What a right implementation may do otherwise.
LEGAL: dict[str, tuple[str, dict[str, str], Mistake]] = {
    "two passes": ("layernorm_fwd", {**_WIDE, "values": "far_mean"}, _layernorm(False)),
    "two passes of constant rows": ("layernorm_fwd", {**_WIDE, "values": "constant"}, _layernorm(False)),
    "squares overflow": ("rmsnorm_fwd", {**_FP32, "values": "square_overflow"}, _rmsnorm_by(_plain_rms)),
    "squares do not overflow": ("rmsnorm_fwd", {**_FP32, "values": "square_overflow"}, _rmsnorm_by(_scaled_rms)),
    "subnormals flushed": ("rmsnorm_fwd", {**_FP32, "values": "denormal"}, _flushing),
    "subnormals flushed, bf16": ("layernorm_fwd", {**_WIDE, "dtype": "bf16", "values": "denormal"}, _flushing),
    "subnormals flushed, eps": ("rmsnorm_fwd", {**_FP32, "values": "denormal", "eps": "1e-12"}, _flushing),
    "gradients of flushed subnormals": ("rmsnorm_bwd", {**_BACK, "values": "denormal"}, _flushing),
    "gradients of flushed subnormals, layernorm": ("layernorm_bwd", {**_BACK, "values": "denormal"}, _flushing),
}


def _flush_half(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """fp16's subnormals are normal numbers of fp32."""
    x = arguments["x"]
    return right.call({**arguments, "x": torch.where(x.abs() < torch.finfo(x.dtype).tiny, 0.0, x).to(x.dtype)})


MISTAKES["fp16's subnormals flushed"] = ("rmsnorm_fwd", {**_FP32, "dtype": "fp16", "values": "denormal"}, _flush_half)


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_are_found(name: str) -> None:
    operator, values, mistake = MISTAKES[name]
    case = case_of(operator, "plain", **values)
    find("values").run(trial_of(case, f"torch.{operator}"))
    with pytest.raises(Failure):
        find("values").run(trial_of(case, f"torch.{operator}", mistake))


@pytest.mark.parametrize("name", list(LEGAL))
def test_legal_variations_pass(name: str) -> None:
    operator, values, variation = LEGAL[name]
    find("values").run(trial_of(case_of(operator, "plain", **values), f"torch.{operator}", variation))


def test_equal_columns_without_eps_are_asked_of_rmsnorm_alone() -> None:
    """A row of 4,099 equal numbers: the sum over the number of columns, both in fp32, need not be that number, and
    nothing but its error is left of the deviations."""
    row = torch.full((4099,), 0.7)
    assert torch.stack([piece.sum() for piece in row.split(64)]).sum() / 4099 != row[0]
    for operator, asked in (("layernorm_fwd", False), ("rmsnorm_fwd", True)):
        space = space_of(operator, "plain")
        plainest = dict(case_of(operator, "plain", **_FP32, shape="2x4099", eps="1e-12", values="constant").axes)
        assert space.valid({**plainest, "eps": "1e-12"})
        assert space.valid({**plainest, "eps": "0"}) == asked
