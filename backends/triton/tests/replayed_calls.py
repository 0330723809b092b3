# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every operator's calls of the cross-compile matrix, replayed and not, at addresses that neither has seen.

A process of its own (`test_replay`): the host's tensors stand for an H100's, and launchers note what they are given.
Prints what differs as JSON: a list of (call, operator, what), and how many calls of each operator were compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from te_dispatch.conformance.blank import calls
from te_dispatch.core.bind import import_target
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import DelayedQuantizer
from te_dispatch.ops import alloc
from te_dispatch.ops.checks import values
from te_dispatch.ops.results import Saved
from te_dispatch_triton import MANIFEST, descriptor, launch, replay, targets
from te_dispatch_triton.crosscompile import gather
from te_dispatch_triton.crosscompile.calls import FAMILIES
from te_dispatch_triton.crosscompile.chips import TARGETS
from te_dispatch_triton.gemm import gemm_decoded
from te_dispatch_triton.gemm_grouped import grouped_gemm
from te_dispatch_triton.kinds import reader_of
from te_dispatch_triton.tape import ACTIVE

NOTED: list[Any] = []
_LAUNCHER = """
def make_tensordesc_arg(x, meta):
    return [x.data_ptr(), x.shape, x.strides, x.block_shape, str(x.dtype), meta]
def make(launcher, tensordesc_indices, tensordesc_meta):
    def inner(*args):
        return launcher, tensordesc_indices, tensordesc_meta
    return inner
"""


def launcher_for(name: str, places: tuple[int, ...]) -> Any:
    """Notes what it is given; with descriptors at some places of a kernel's arguments, as Triton's would be."""

    def run(*args: Any) -> None:
        NOTED.append((name, args))

    if not places:
        return run
    module: dict[str, Any] = {"_BASE_ARGS_FORMAT_LEN": 5}
    exec(_LAUNCHER, module)
    return descriptor.mapped(module["make"](run, set(places), [{"place": place} for place in places]))


_launchers: dict[Any, Any] = {}


def noted_call(
    self: launch.Kernel, device: torch.device, grid: Any, args: tuple[Any, ...], constants: Any, config: Any
) -> None:
    """`Kernel.__call__` of a device, on the host's tensors."""
    tiles = {i: (x.dtype, x.block_shape) for i, x in enumerate(args) if x.__class__ is descriptor.Descriptor}
    key = (self.name, tuple(tiles.items()), constants, config)
    compiled = _launchers.get(key) or _launchers.setdefault(key, (launcher_for(self.name, tuple(tiles)), (config,)))
    if ACTIVE:
        launch._note(compiled, grid, args, constants)
    read = reader_of(tuple(map(type, args)), amd=False)
    compiled[0](*grid, 7, *compiled[1], *read(*args)[1], *constants)


class Pool:
    """An allocator that gives the n-th allocation of every run the same memory."""

    def __init__(self) -> None:
        self.made: list[torch.Tensor] = []
        self.at = 0

    def __call__(self, role: str, shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self.at == len(self.made):
            self.made.append(torch.empty(shape, dtype=dtype))
        found = self.made[self.at]
        self.at += 1
        assert (tuple(found.shape), found.dtype) == (tuple(shape), dtype), (role, shape, dtype)
        return found


def elsewhere(x: Any) -> Any:
    """An argument with all of its tensors at other addresses, each of its own."""
    if isinstance(x, torch.Tensor):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    if x.__class__ is Quantized:
        parts = {name: elsewhere(getattr(x, name)) for name in Quantized.__slots__}
        if x.row_scale_inv is x.col_scale_inv:
            parts["col_scale_inv"] = parts["row_scale_inv"]
        return Quantized(**parts)
    if x.__class__ is DelayedQuantizer:
        return DelayedQuantizer(x.encoding, x.common, scale=elsewhere(x.scale), amax=elsewhere(x.amax))
    return type(x)(map(elsewhere, x)) if x.__class__ in (list, tuple) else x


def described(x: Any) -> Any:
    """A result as data: where its tensors lie and how."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr(), tuple(x.shape), x.stride(), str(x.dtype)
    if x.__class__ in (Quantized, Saved):
        return [(name, described(getattr(x, name))) for name in type(x).__slots__]
    return (type(x).__name__, *map(described, x)) if isinstance(x, (list, tuple)) else str(x)


def operator_calls() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(name, replayed operator, arguments) of every call of the matrix."""
    for call in (call for regions in FAMILIES.values() for call in calls(regions)):
        found: list[tuple[Any, dict[str, Any]]] = []
        with spied(found):
            gather.run(call, TARGETS["sm_90"])
        yield from ((call.name, operator, arguments) for operator, arguments in found)


def dealt_calls() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Groups whose operand is a part of one tensor: no two are launched alike, so the matrix has none of them."""
    matrix = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype)  # noqa: E731
    for splits in ([3, 0, 17], [16, 32, 80]):
        a = {"a": [matrix(sum(splits), 48)], "splits": splits}
        yield "grouped NT, parts", grouped_gemm, {**a, "b": [matrix(64, 48) for _ in splits], "layout": "NT"}
        out = [matrix(rows, 15, dtype=torch.float32) for rows in splits]
        more = {"bias": [matrix(15) for _ in splits], "out": out, "layout": "NN"}
        yield "grouped NN, parts", grouped_gemm, {**a, "b": [matrix(48, 15) for _ in splits], **more}
        yield "grouped TN, parts", grouped_gemm, {**a, "b": [matrix(rows, 64) for rows in splits], "layout": "TN"}


@contextmanager
def spied(found: list[Any]) -> Iterator[None]:
    """Note the calls of replayed operators that run host functions."""
    before = {operator: operator.plans.function for operator in OPERATORS}
    for operator in OPERATORS:
        operator.plans.function = noting(operator, found)
    try:
        yield
    finally:
        for operator, function in before.items():
            operator.plans.function = function
            operator.plans.clear()


def noting(operator: Any, found: list[Any]) -> Callable[..., Any]:
    def note(**given: Any) -> Any:
        found.append((operator, given))
        return operator.__wrapped__(**given)

    return note


def run(call: Callable[..., Any], arguments: dict[str, Any], pool: Pool) -> Any:
    """(launches, result) with the pool's memory."""
    NOTED.clear()
    pool.at = 0
    result = described(call(**arguments))
    return list(NOTED), result


def record(operator: Any, arguments: dict[str, Any]) -> None:
    """Make a call often enough for its like to be recorded."""
    given = {name: elsewhere(x) for name, x in arguments.items()}
    for _ in range(2):
        alloc.set_allocator(Pool())
        operator(**given)


def difference(operator: Any, arguments: dict[str, Any]) -> str | None:
    """What a replayed call does otherwise than the host function; None where it does the same."""
    given, pool = {name: elsewhere(x) for name, x in arguments.items()}, Pool()
    alloc.set_allocator(pool)
    expected = run(operator.__wrapped__, given, pool)
    function, operator.plans.function = operator.plans.function, None  # a replayed call needs none
    try:
        found = run(operator, given, pool)
    except TypeError as error:
        return f"{error}: not replayed"
    finally:
        operator.plans.function = function
    if found != expected:
        return next(f"{one} instead of {two}" for one, two in zip(found, expected) if one != two)
    return None


def main() -> None:
    targets.pretend(torch.device("cpu"), TARGETS["sm_90"])
    launch.Kernel.__call__ = noted_call  # type: ignore[method-assign]
    launch._raw_stream, launch._current = (lambda index: 7), (lambda: -1)
    replay._LEAST = -1
    values.readable = lambda x: False  # as of a device's tensors
    wrong, compared = [], {}
    every = [*operator_calls(), *dealt_calls()]
    every += [(name, gemm_decoded, given) for name, operator, given in every if operator.__name__ == "gemm_codes"]
    for _, operator, arguments in every:
        record(operator, arguments)
    for name, operator, arguments in every:  # with the others at hand, which signatures must tell apart
        what = difference(operator, arguments)
        compared[operator.__name__] = compared.get(operator.__name__, 0) + 1
        if what is not None:
            wrong.append((name, operator.__name__, what))
    json.dump({"wrong": wrong, "compared": compared, "operators": [f.__name__ for f in OPERATORS]}, sys.stdout)


for _implementation in MANIFEST.implementations:
    import_target(_implementation.target)
_FOUND = [x for name, module in list(sys.modules.items()) if name.startswith("te_dispatch_triton.")
          for x in vars(module).values() if isinstance(getattr(x, "plans", None), replay.Replays)]  # fmt: skip
OPERATORS: list[Any] = list({id(x): x for x in _FOUND}.values())

if __name__ == "__main__":
    main()
