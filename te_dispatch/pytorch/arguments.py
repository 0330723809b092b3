# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Checks of module arguments, shared so that every module refuses in the same words.

The modules take Transformer Engine's arguments in full, so that a model file needs one changed import. An argument
whose effect does not exist here yet is accepted at its default and refused otherwise: never ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

#: Arguments of communication that overlaps with products, with the values that ask for nothing. Those of parallelism
#: itself are in `distributed.arguments`.
PARALLEL_DEFAULTS: dict[str, Any] = {
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
}


def reject_unsupported(module_name: str, given: Mapping[str, Any], supported_defaults: Mapping[str, Any]) -> None:
    """Raise for the first argument that asks for something not built yet.

    Args:
        module_name: the class, for the message.
        given: arguments by name, with what the caller passed. Names that `supported_defaults` lacks are not looked at.
        supported_defaults: the only supported value by name, or a tuple of alternatives wrapped in `OneOf`.

    Raises:
        NotImplementedError: names the argument, what came and what is supported.
    """
    for name, supported in supported_defaults.items():
        if name not in given:
            continue
        value = given[name]
        values = supported.values if isinstance(supported, OneOf) else (supported,)
        # `is` first: a tensor compared with == has no truth value.
        if any(value is v or (type(value) is type(v) and value == v) for v in values):
            continue
        expected = " or ".join(repr(v) for v in values)
        raise NotImplementedError(f"{module_name}: {name}={value!r} is not supported yet, only {name}={expected}")


class OneOf:
    """Several supported values of one argument."""

    __slots__ = ("values",)

    def __init__(self, *values: Any) -> None:
        self.values = values


def reject_in_call(
    module_name: str, inference_params: Any, thd_attention_policies: Any, thd_attention_policy_dispatch: str
) -> None:
    """`reject_unsupported` for the arguments of attention's calls that nothing here does yet.

    Tested one by one, because a dictionary for every call costs more than the tests.
    """
    if inference_params is None and thd_attention_policies is None and thd_attention_policy_dispatch == "auto":
        return
    given = {
        "inference_params": inference_params,
        "thd_attention_policies": thd_attention_policies,
        "thd_attention_policy_dispatch": thd_attention_policy_dispatch,
    }
    supported = {**dict.fromkeys(given), "thd_attention_policy_dispatch": "auto"}
    reject_unsupported(f"{module_name}.forward", given, supported)


def given(**arguments: Any) -> dict[str, Any]:
    """Those that are not None, which is what the others default to: every one passed on costs as much as ten left."""
    return {name: value for name, value in arguments.items() if value is not None}


def require_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raise a ValueError that names the argument and lists `choices` unless `value` is one of them."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def require_tensor(name: str, value: Any, *, floating: bool = True) -> None:
    """Raise unless `value` is a tensor, of a dtype that the operators compute in if `floating`."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if floating and value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} must be float32, bfloat16 or float16, got {value.dtype}")


def require_probability(name: str, value: float) -> None:
    """Raise unless `value` is a probability below 1."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be at least 0 and less than 1, got {value!r}")


def part_name(name: str | None, part: str) -> str | None:
    """The name of a module's part: `name` is what the user gave the module."""
    return None if name is None else f"{name}.{part}"


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Where a module puts its parameters: None for the current accelerator, or the CPU on a machine without one."""
    if device is not None:
        return torch.device(device)
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
