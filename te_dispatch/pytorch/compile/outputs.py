# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Getting an implementation's results into the memory that the graph allocated.

An implementation that allocates through `te_dispatch.ops.alloc` is handed that very memory, so that nothing is copied.
Whatever it returns elsewhere is copied.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

from te_dispatch.ops import alloc
from te_dispatch.ops.results import Saved
from te_dispatch.pytorch.compile.flatten import RECORD_TAGS, RECORD_TENSORS, Node, Values, build

_WORKSPACE = "workspace"


class _Pool(threading.local):
    """Outputs that this thread's launch can still hand out."""

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []


_pool = _Pool()
_lock = threading.Lock()
_launches = 0
_outer: alloc.Allocator | None = None


def _allocate(role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if role != _WORKSPACE:
        free = _pool.free
        for i, tensor in enumerate(free):
            if tensor.dtype == dtype and tuple(tensor.shape) == tuple(shape) and tensor.device == device:
                return free.pop(i)
    if _outer is not None:
        return _outer(role, shape, dtype, device)
    return torch.empty(shape, dtype=dtype, device=device)


@contextlib.contextmanager
def handing_out(outs: list[torch.Tensor], expected: Node) -> Iterator[None]:
    """While open, `alloc.empty` in this thread returns outputs of the graph where shape and dtype fit.

    The allocator is one for the process while launches may overlap in several threads (the forward's and autograd's),
    so it is installed by the first and removed by the last, and finds its outputs through the thread. Two outputs
    of one shape may be handed out in the other order than the results name them; `collect` sees to that.
    """
    global _launches, _outer
    fresh = [outs[i] for i in sorted(_fresh(expected)) if outs[i].is_contiguous()]
    with _lock:
        if _launches == 0:
            _outer = alloc.set_allocator(_allocate)
        _launches += 1
    before, _pool.free = _pool.free, fresh
    try:
        yield
    finally:
        _pool.free = before
        with _lock:
            _launches -= 1
            if _launches == 0:
                alloc.set_allocator(_outer)
                _outer = None


def _fresh(node: Node) -> set[int]:
    if node.tag == "O":
        return {node.payload}
    return set().union(*(_fresh(child) for child in node.children)) if node.children else set()


def collect(result: Any, expected: Node, values: Values, where: str) -> None:
    """Copy what an implementation returned elsewhere into the graph's outputs.

    Raises:
        RuntimeError: a result that was promised is missing, or has another shape, dtype or tag than promised; names
            the implementation and the result.
    """
    moves: list[tuple[torch.Tensor, torch.Tensor]] = []
    _match(result, expected, values, where, "result", moves)
    # An output that holds another one's value must be read before it is overwritten.
    storages = {target.untyped_storage().data_ptr() for target, _ in moves}
    pending = [
        (target, source.clone() if source.untyped_storage().data_ptr() in storages else source)
        for target, source in moves
    ]
    for target, source in pending:
        target.copy_(source)


def _match(
    value: Any, node: Node, values: Values, where: str, path: str, moves: list[tuple[torch.Tensor, torch.Tensor]]
) -> None:
    def refuse(came: Any) -> RuntimeError:
        return RuntimeError(f"{where}: {path} is {came}, but its shape function promised {_describe(node, values)}")

    if node.tag == "N":
        return  # more than was promised is not read
    if node.tag in "TO":
        target = build(node, values)
        if value is target:
            return
        if not isinstance(value, torch.Tensor):
            raise refuse(type(value).__name__)
        if value.shape != target.shape or value.dtype != target.dtype:
            raise refuse(f"{value.dtype} {tuple(value.shape)}")
        if value.data_ptr() != target.data_ptr() or value.stride() != target.stride():
            if node.tag == "T":
                raise refuse("a copy of an argument that it was to share")
            moves.append((target, value))
        return
    if node.tag == "Q":
        children = dict(zip((*RECORD_TENSORS, *RECORD_TAGS, "shape"), node.children, strict=True))
        for name, child in children.items():
            _match(getattr(value, name, None), child, values, where, f"{path}.{name}", moves)
        return
    if node.tag == "V":
        if not isinstance(value, Saved):
            raise refuse(type(value).__name__)
        members = (value.implementation, value.format, value.tensors, value.options)
        for name, member, child in zip(("implementation", "format", "tensors", "options"), members, node.children):
            if name == "options" and child.tag == "N" and member is not None:
                raise refuse("one with options, which the implementation's output_shape must give")
            _match(member, child, values, where, f"{path}.{name}", moves)
        return
    if node.tag in "LU":
        if not isinstance(value, (list, tuple)) or len(value) != len(node.children):
            raise refuse(
                f"{type(value).__name__} of {len(value) if isinstance(value, (list, tuple)) else 'no'} members"
            )
        names = getattr(value, "_fields", range(len(value)))
        for name, member, child in zip(names, value, node.children):
            _match(member, child, values, where, f"{path}.{name}", moves)
        return
    promised = build(node, values)
    if value != promised:
        raise refuse(repr(value))


def _describe(node: Node, values: Values) -> str:
    if node.tag in "TO":
        tensor = build(node, values)
        return f"{tensor.dtype} {tuple(tensor.shape)}"
    names = {"Q": "a Quantized", "V": "a Saved", "L": "a list", "U": "a tuple"}
    return names.get(node.tag) or repr(node.payload)
