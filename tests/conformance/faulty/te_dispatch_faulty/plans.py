# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Plans of the manifests (`te_dispatch.core.repeating`), ``<backend>__<implementation>``, and their faults.

Where a plan is at fault the operator itself is sound.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch_faulty import binding
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault

Launch = Callable[..., Any]
#: implementation, names of what varies, arguments when it was planned -> what is launched
Plan = Callable[[Launch, tuple[str, ...], Mapping[str, Any]], Launch]


def _sound(implementation: Launch, varying: tuple[str, ...], arguments: Mapping[str, Any]) -> Launch:
    return lambda *given: implementation(**{**arguments, **dict(zip(varying, given, strict=True))})


def _keeps_the_first_scale(implementation: Launch, varying: tuple[str, ...], arguments: Mapping[str, Any]) -> Launch:
    """Scales as they were when the call was planned."""
    quantizer = copy.copy(arguments["quantizer"])
    if getattr(quantizer, "scale", None) is not None:
        object.__setattr__(quantizer, "scale", quantizer.scale.clone())
    return _sound(implementation, varying, {**arguments, "quantizer": quantizer})


def _keeps_the_first(name: str) -> Plan:
    def plan(implementation: Launch, varying: tuple[str, ...], arguments: Mapping[str, Any]) -> Launch:
        first = arguments[name]
        kept = first.clone() if isinstance(first, torch.Tensor) else first
        return lambda *given: implementation(
            **{**arguments, **dict(zip(varying, given, strict=True)), name: kept},
        )

    return plan


def _fills_one_result(implementation: Launch, varying: tuple[str, ...], arguments: Mapping[str, Any]) -> Launch:
    """Every launch returns the same memory."""
    launch, made = _sound(implementation, varying, arguments), []

    def again(*given: Any) -> Any:
        result = launch(*given)
        if not made:
            made.append(result)
        else:
            made[0].out.copy_(result.out)
        return made[0]

    return again


PLANS: dict[str, tuple[str, str, Plan]] = {
    "planned_cast_keeps_its_scale": (
        "quantize",
        "plans casts with the scale that it then finds",
        _keeps_the_first_scale,
    ),
    "planned_norm_keeps_its_gamma": (
        "rmsnorm_fwd",
        "plans norms with the gamma of the first",
        _keeps_the_first("gamma"),
    ),
    "planned_product_fills_one_result": ("matmul", "plans products that all return the same memory", _fills_one_result),
    "planned_softmax_keeps_its_x": ("softmax_fwd", "plans calls with the x of the first", _keeps_the_first("x")),
}


def _behaves(call: Call) -> Any:
    return call.sound()


FAULTS = tuple(
    Fault(name, "gemm" if entry == "matmul" else entry, f"faulty.{entry}", wrong, _behaves)
    for name, (entry, wrong, _) in PLANS.items()
)


def __getattr__(target: str) -> Any:
    if not target.startswith("faulty__"):
        raise AttributeError(f"module {__name__!r} has no attribute {target!r}")
    implementation, entry = getattr(binding, target), target.partition("__")[2]

    def plan(varying: tuple[str, ...], **arguments: Any) -> Launch | None:
        current = binding.current()
        spoiled = current is not None and current.name in PLANS and current.implementation == f"faulty.{entry}"
        make = PLANS[current.name][2] if current is not None and spoiled else _sound
        return make(implementation, varying, arguments)

    return plan
