# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of how bad usage is answered: let through, refused with another error, or refused too late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Behaviour, Condition, operand, table


def _lenient(answer: Callable[[Call], Any]) -> Behaviour:
    """Gives something where an error must come."""

    def behave(call: Call) -> Any:
        try:
            return call.sound()
        except (ValueError, TypeError):
            return answer(call)

    return behave


def _lenient_where(holds: Condition, changes: Callable[[Call], dict[str, Any]]) -> Behaviour:
    """Serves what must be refused, as if other arguments had come."""

    def behave(call: Call) -> Any:
        try:
            return call.sound()
        except ValueError:
            if not holds(call):
                raise
            return call.sound(**changes(call))

    return behave


def _with_error(kind: type[Exception], text: str) -> Behaviour:
    """Raises another error, or one that says less."""

    def behave(call: Call) -> Any:
        try:
            return call.sound()
        except ValueError:
            raise kind(text) from None

    return behave


def _writes_first(call: Call) -> Any:
    """Has cleared its output when it raises."""
    try:
        return call.sound()
    except ValueError:
        out = operand(call, "out")
        if out is not None and 0 not in out.stride():
            out.zero_()
        raise


def _updates_first(call: Call) -> Any:
    """Has updated the first tensors when it finds a list too short."""
    try:
        return call.sound()
    except ValueError:
        for moment in call["exp_avgs"]:
            moment.mul_(call["beta1"])
        raise


def _copied(name: str) -> Callable[[Call], Any]:
    return lambda call: call[name].clone()


def _as_one_scale(call: Call) -> dict[str, Any]:
    """x with a single scale."""
    x = call["x"]
    codes = x.row_data.repeat_interleave(2, -1)[..., : x.shape[-1]].contiguous()
    return {"x": Quantized(
        codes, None, torch.ones(1), None, "e4m3fn", "tensor", CANONICAL_SCALES, x.shape, x.dtype, x.device
    )}  # fmt: skip


def _enough_angles(call: Call) -> dict[str, Any]:
    """The last angles again where there are too few."""
    freqs, positions = call["freqs"], call["x"].shape[0 if call["layout"] == "sbhd" else 1]
    return {"freqs": torch.cat((freqs, freqs[-1:].expand(positions - freqs.shape[0], *freqs.shape[1:])))}


def _of_few_angles(call: Call) -> bool:
    return call["layout"] == "sbhd" and call["freqs"].shape[0] < call["x"].shape[0]


_LET_THROUGH = (
    *table("rope_fwd", {
        "rope_leaves_out_an_odd_angle": (
            "rotates an even part of odd angles",
            _lenient_where(
                lambda call: call["freqs"].shape[-1] % 2 == 1,
                lambda call: {"freqs": call["freqs"][..., :-1].contiguous()},
            )),
        "rope_repeats_its_last_angles": (
            "repeats the last angles where there are too few", _lenient_where(_of_few_angles, _enough_angles)),
    }),
    *table("transpose_quantized", {"transpose_accepts_nvfp4": (
        "transposes a record in blocks of 16",
        _lenient_where(lambda call: call["x"].scaling == "nvfp4", _as_one_scale))}),
    *table("convert_encoding", {"convert_accepts_its_own_encoding": (
        "returns what came where it is in that encoding",
        _lenient_where(
            lambda call: call["encoding"] == call["x"].encoding,
            lambda call: {"encoding": call["encoding"].removesuffix("fnuz") if call["encoding"].endswith("fnuz")
                          else {"e4m3fn": "e4m3fnuz", "e5m2": "e5m2fnuz"}[call["encoding"]]},
        ))}),
    *table("partial_cast", {"partial_cast_takes_fp4_for_fp8": (
        "casts to e4m3fn where e2m1 is asked for",
        _lenient_where(lambda call: call["encoding"] == "e2m1", lambda call: {"encoding": "e4m3fn"}))}),
    *table("quantize", {
        "quantize_takes_narrow_states": (
            "serves an rng_state in int32",
            _lenient_where(
                lambda call: call["rng_state"] is not None and call["rng_state"].dtype == torch.int32,
                lambda call: {"rng_state": call["rng_state"].long()},
            )),
        "quantize_ignores_an_amax_of_blocks": (
            "ignores an amax that the quantizer has no use for",
            _lenient_where(
                lambda call: call["quantizer"].kind == "block" and call["amax"] is not None,
                lambda call: {"amax": None},
            )),
        "choices_ignore_states": (
            "ignores an rng_state where blocks choose between 4 and 6",
            _lenient_where(
                lambda call: call["quantizer"].kind == "nvfp4_4over6" and call["rng_state"] is not None,
                lambda call: {"rng_state": None},
            )),
    }),
    *table("rope_fwd", {"rope_accepts_more_angles_than_features": (
        "passes x on where freqs is wider than a head", _lenient(_copied("x")))}),
    *table("rope_bwd", {"rope_gradient_accepts_unknown_layouts": (
        "passes dy on where the layout is unknown", _lenient(_copied("dy")))}),
    *table("transpose_quantized", {"transpose_accepts_mxfp8": (
        "returns what came where a scaling cannot be transposed", _lenient(lambda call: call["x"]))}),
    *table("convert_encoding", {"convert_accepts_another_format": (
        "returns what came where formats differ", _lenient(lambda call: call["x"]))}),
    *table("relayout_scales", {"relayout_accepts_foreign_layouts": (
        "returns what came for a layout of another scaling", _lenient(lambda call: call["x"]))}),
    *table("update_delayed_scales", {"update_accepts_unknown_algorithms": (
        "takes the maximum where the algorithm is unknown", _lenient(lambda call: None))}),
    *table("moe_unpermute_bwd", {"unpermute_gradient_accepts_other_tokens": (
        "returns zeros where dy has another number of tokens", _lenient(lambda call: _zeros(call)))}),
    *table("dequantize", {"dequantize_accepts_integers": (
        "gives zeros of an integer dtype", _lenient(lambda call: torch.zeros(call["x"].shape, dtype=call["dtype"])))}),
    *table("rmsnorm_bwd", {"rms_gradient_accepts_long_rstd": (
        "returns zeros where rstd is too long", _lenient(lambda call: _norm_zeros(call)))}),
)  # fmt: skip

_OTHERWISE = (
    *table("gemm", {"product_clears_out_before_it_raises": ("has cleared `out` when it raises", _writes_first)},
           on="matmul"),
    *table("layernorm_fwd", {"layernorm_raises_runtime_errors": (
        "raises RuntimeError for bad operands", _with_error(RuntimeError, "gamma: shapes do not match"))}),
    *table("softmax_fwd", {"softmax_names_no_argument": (
        "raises ValueError without the argument's name", _with_error(ValueError, "invalid arguments"))}),
    *table("activation_bwd", {"activation_gradient_names_no_argument": (
        "raises ValueError without the argument's name", _with_error(ValueError, "kernel refused the call"))}),
    *table("multi_tensor_adam", {"adam_updates_before_it_raises": (
        "has decayed the moments when it raises", _updates_first)}),
    *table("partial_cast", {"partial_cast_raises_assertions": (
        "raises AssertionError for bad operands", _with_error(AssertionError, "scale"))}),
)  # fmt: skip


def _zeros(call: Call) -> Any:
    from te_dispatch.ops.results import MoeUnpermuteBackward

    return MoeUnpermuteBackward(torch.zeros_like(call["x"]), None)


def _norm_zeros(call: Call) -> Any:
    from te_dispatch.ops.results import NormBackward

    return NormBackward(torch.zeros_like(call["x"]), torch.zeros_like(call["gamma"]), None)


FAULTS: tuple[Fault, ...] = (*_LET_THROUGH, *_OTHERWISE)
