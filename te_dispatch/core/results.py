# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Whether an implementation returned what its operator promises.

The first call of each kind is checked for the class of its result alone, which costs nothing later. With
``TE_DISPATCH_CHECK_RESULTS=1`` every result is compared with what the operator's shape function computes from the same
arguments: shapes, dtypes, devices, formats of quantized tensors, and what is there at all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from te_dispatch.core.errors import DispatchError, PolicyError
from te_dispatch.core.operator import Operator

CHECK_RESULTS = "TE_DISPATCH_CHECK_RESULTS"


def checking_results(environ: Mapping[str, str]) -> bool:
    """Whether the environment asks for every result to be checked.

    Raises:
        PolicyError: the variable is neither 0 nor 1.
    """
    value = environ.get(CHECK_RESULTS, "").strip() or "0"
    if value not in ("0", "1"):
        raise PolicyError(f"{CHECK_RESULTS}={value}: expected 0 or 1, got {value!r}")
    return value == "1"


def check_class(operator: Operator, candidate: str, result: Any) -> None:
    """Check the class of a result.

    Raises:
        DispatchError: it is not what the operator's signature says; names the implementation and the operator.
    """
    expected = str(operator.signature.return_annotation)
    if expected == "Any" or operator.signature.return_annotation is operator.signature.empty or _is(result, expected):
        return
    raise DispatchError(
        f"{candidate} returned {_shown(result)} from {operator.name}, which returns {expected}; "
        "te_dispatch.ops.results has the classes of results"
    )


def _is(result: Any, expected: str) -> bool:
    if expected == "None":
        return result is None
    if expected.startswith("list["):
        inner = expected.removeprefix("list[").removesuffix("]")
        return isinstance(result, (list, tuple)) and all(_is(one, inner) for one in result)
    if expected == "torch.Tensor":
        return isinstance(result, sys.modules["torch"].Tensor)
    return type(result).__name__.removeprefix("Fake") == expected


def _shown(result: Any) -> str:
    if result is None or isinstance(result, (bool, int, float, str)):
        return repr(result)
    name = type(result).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def checked(operator: Operator, candidate: str, bound: Callable[..., Any]) -> Callable[..., Any]:
    """An implementation, called by position, whose every result is compared with the shape function's.

    Its function raises `DispatchError` for a result that differs, and names the implementation, the operator and what
    differs.
    """

    def call(*args: Any) -> Any:
        result = bound(*args)
        check_class(operator, candidate, result)
        expected = operator.shape(**dict(zip(operator.signature.parameters, args)))
        problem = next(_differences(operator.name, result, expected), None)
        if problem is not None:
            raise DispatchError(f"{candidate}: {problem} ({CHECK_RESULTS}=1)")
        return result

    return call


def _differences(where: str, got: Any, expected: Any) -> Iterator[str]:
    if expected is None or got is None:
        if got is not expected:
            yield f"{where} is {_described(got)}, expected {_described(expected)}"
    elif isinstance(expected, (list, tuple)):
        names = getattr(expected, "_fields", range(len(expected)))
        if len(got) != len(expected):
            yield f"{where} has {len(got)} members, expected {len(expected)}"
        for name, one, other in zip(names, got, expected):
            yield from _differences(f"{where}.{name}" if isinstance(name, str) else f"{where}[{name}]", one, other)
    elif _described(got) != _described(expected):
        yield f"{where} is {_described(got)}, expected {_described(expected)}"


def _described(value: Any) -> str:
    """What the contract says of a value."""
    if hasattr(value, "row_data"):
        copies = " and ".join(name for name in ("row", "col") if getattr(value, f"{name}_data") is not None)
        what = f"{value.encoding} {tuple(value.shape)}, scaling {value.scaling}, of {value.dtype}, on {value.device}"
        return f"{what}, with {copies or 'no'} data"
    if hasattr(value, "stride"):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    if hasattr(value, "implementation"):
        return "what a backward needs"  # each implementation's own
    return _shown(value)
