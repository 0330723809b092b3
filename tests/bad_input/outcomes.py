# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a call with a spoilt argument came to, and whether it wrote anything."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import torch

from te_dispatch.core.errors import DispatchError, NoImplementation
from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.quantized import Quantized


def duplicate(value: Any) -> Any:
    """A deep copy that keeps strides and aliases."""
    return copy.deepcopy(value)


def state(value: Any) -> Any:
    """Everything a call could change, as bytes, comparable."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return ("meta", tuple(value.shape), value.dtype)
        whole = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        return (tuple(value.shape), value.stride(), value.dtype, bytes(whole.tolist()))
    if isinstance(value, Quantized):
        return [state(getattr(value, name)) for name in Quantized.__slots__]
    if isinstance(value, (list, tuple)):
        return [state(v) for v in value]
    if isinstance(value, dict):
        return {name: state(v) for name, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [state(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return value


def complaint(operator: str, error: BaseException) -> str | None:
    """What is wrong with an error, None if it is a clear refusal: argument, what came, what was expected."""
    text = str(error)
    if isinstance(error, NoImplementation):
        return None if operator in text else f"a table without {operator}: {text}"
    if not isinstance(error, (TypeError, ValueError, DispatchError)):
        return f"{type(error).__name__}: {text}"
    names = "|".join(OPERATORS[operator].signature.parameters)
    if not re.match(rf"({names})(\[\d+\]|\.\w+)*: ", text):
        return f"names no argument: {type(error).__name__}: {text}"
    if not re.search(r"got|given|has", text):
        return f"does not say what came: {text}"
    return None if "expected" in text else f"does not say what was expected: {text}"


def numbers(result: Any) -> list[torch.Tensor]:
    """All tensors of a result, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, Quantized):
        names = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
        return [t for name in names for t in numbers(getattr(result, name))]
    if isinstance(result, (list, tuple)):
        return [t for member in result for t in numbers(member)]
    return []


def description(result: Any) -> list[Any]:
    return [(tuple(t.shape), t.dtype) for t in numbers(result)]
