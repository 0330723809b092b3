# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Arguments and results of any operator as flat lists and a string, and back.

`encode` runs while dynamo traces, so it is plain recursion over plain data. `parse` and `build` run in the compiled
program. The string is a list of tokens with semicolons between them. It has no line break:
inductor copies a call's arguments into comments of the programs that it writes.

=========  ==========================================================================================
token      stands for
=========  ==========================================================================================
N          None
T<i>, O<i> tensor i of the inputs, of the outputs (whatever is written, fresh or the caller's)
I, F       the next of the sizes (integers, possibly symbolic), of the numbers
B0, B1     False, True
S<text>    a string
D<name>    a dtype
L<n>, U<n> a list, a tuple (named ones too) of the n values that follow
Q          a `Quantized`: its tensors, tags, shape and dtype follow
Z<kind>    a quantizer: its fields follow
V          a `Saved`: its id, format, tensors and options follow
=========  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import torch

from te_dispatch.numerics.quantized import FakeQuantized, Quantized
from te_dispatch.numerics.quantizers import QUANTIZERS, DelayedQuantizer
from te_dispatch.ops.results import Saved

_BETWEEN = ";"

RECORD_TENSORS = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
RECORD_TAGS = ("encoding", "scaling", "scale_layout", "dtype")

_QUANTIZER_FIELDS = {kind: tuple(f.name for f in fields(q) if f.init) for kind, q in QUANTIZERS.items()}
_QUANTIZER_CLASSES = frozenset(QUANTIZERS.values())
_RECORD_CLASSES = frozenset((Quantized, FakeQuantized))
_DTYPES = {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Flat:
    """What crosses into the graph: the tensors, sizes, numbers and the tokens that say where each belongs."""

    def __init__(self) -> None:
        self.ins: list[torch.Tensor] = []
        self.outs: list[torch.Tensor] = []
        self.sizes: list[int] = []
        self.numbers: list[float] = []
        self.tokens: list[str] = []

    def spec(self) -> str:
        return _BETWEEN.join(self.tokens)


def _position(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> int:
    for i, other in enumerate(tensors):
        if other is tensor:
            return i
    return -1


def claim_written(value: Any, flat: Flat, written: bool) -> None:
    """Enter the tensors that an implementation writes into `flat.outs`, before anything is encoded.

    Args:
        value: an argument.
        written: the operator mutates it. A delayed quantizer's amax is written in any case.
    """
    if value is None or isinstance(value, (int, float, str)):
        return
    if isinstance(value, torch.Tensor):
        if written and _position(value, flat.outs) < 0:
            flat.outs.append(value)
    elif value.__class__ in _RECORD_CLASSES:
        for name in RECORD_TENSORS:
            claim_written(getattr(value, name), flat, written)
    elif value.__class__ is DelayedQuantizer:
        claim_written(value.amax, flat, True)
    elif isinstance(value, (list, tuple)):
        for item in value:
            claim_written(item, flat, written)


def encode(value: Any, flat: Flat, fresh: bool = False) -> None:
    """Append `value` to `flat`.

    Args:
        fresh: a tensor that is not known yet is an output (a result) rather than an input (an argument).

    Raises:
        TypeError: for a value of a type that no operator takes.
        ValueError: for a string with a semicolon or a line break.
    """
    tokens = flat.tokens
    if value is None:
        tokens.append("N")
    elif isinstance(value, torch.Tensor):
        _encode_tensor(value, flat, fresh)
    elif isinstance(value, bool):
        tokens.append("B1" if value else "B0")
    # Numbers before any look at __class__, which dynamo cannot hash for a symbolic one.
    elif isinstance(value, (int, torch.SymInt)):
        tokens.append("I")
        flat.sizes.append(value)  # type: ignore[arg-type]
    elif isinstance(value, (float, torch.SymFloat)):
        tokens.append("F")
        flat.numbers.append(value)  # type: ignore[arg-type]
    elif isinstance(value, str):
        if _BETWEEN in value or "\n" in value:
            raise ValueError(f"a string argument must not hold a semicolon or a line break, got {value!r}")
        tokens.append("S" + value)
    elif isinstance(value, torch.dtype):
        tokens.append("D" + _DTYPE_NAMES[value])
    elif value.__class__ in _RECORD_CLASSES:
        tokens.append("Q")
        for name in RECORD_TENSORS:
            encode(getattr(value, name), flat, fresh)
        for name in RECORD_TAGS:
            encode(getattr(value, name), flat)
        encode(tuple(value.shape), flat)
    elif value.__class__ in _QUANTIZER_CLASSES:
        tokens.append("Z" + value.kind)
        for name in _QUANTIZER_FIELDS[value.kind]:
            encode(getattr(value, name), flat)
    elif value.__class__ is Saved:
        tokens.append("V")
        for item in (value.implementation, value.format, tuple(value.tensors), value.options):
            encode(item, flat, fresh)
    elif isinstance(value, (list, tuple)):
        tokens.append(("L" if isinstance(value, list) else "U") + str(len(value)))
        for item in value:
            encode(item, flat, fresh)
    else:
        raise TypeError(f"an operator argument of type {type(value).__name__} cannot enter a compiled graph")


def _encode_tensor(tensor: torch.Tensor, flat: Flat, fresh: bool) -> None:
    i = _position(tensor, flat.outs)
    if i >= 0:
        flat.tokens.append("O" + str(i))
        return
    i = _position(tensor, flat.ins)
    if i < 0:
        if fresh:
            flat.tokens.append("O" + str(len(flat.outs)))
            flat.outs.append(tensor)
            return
        i = len(flat.ins)
        flat.ins.append(tensor)
    flat.tokens.append("T" + str(i))


@dataclass(frozen=True)
class Node:
    """One parsed token with the values that follow it."""

    tag: str
    payload: Any = None
    children: tuple[Node, ...] = field(default=())


@cache
def parse(spec: str) -> tuple[Node, ...]:
    """All values of a spec. Specs are few: one for each distinct call in a compiled program."""
    tokens = iter(spec.split(_BETWEEN))
    nodes = []
    for token in tokens:
        nodes.append(_parse_one(token, tokens))
    return tuple(nodes)


def _parse_one(token: str, rest: Iterator[str]) -> Node:
    tag, text = token[0], token[1:]

    def take(n: int) -> tuple[Node, ...]:
        return tuple(_parse_one(next(rest), rest) for _ in range(n))

    if tag in "TO":
        return Node(tag, int(text))
    if tag in "LU":
        return Node(tag, None, take(int(text)))
    if tag == "Q":
        return Node(tag, None, take(len(RECORD_TENSORS) + len(RECORD_TAGS) + 1))
    if tag == "Z":
        return Node(tag, QUANTIZERS[text], take(len(_QUANTIZER_FIELDS[text])))
    if tag == "V":
        return Node(tag, None, take(4))
    if tag == "B":
        return Node(tag, text == "1")
    if tag == "D":
        return Node(tag, _DTYPES[text])
    return Node(tag, text if tag == "S" else None)


class Values:
    """Where `build` takes tensors, sizes and numbers from."""

    __slots__ = ("device", "ins", "numbers", "outs", "sizes")

    def __init__(
        self, ins: list[torch.Tensor], outs: list[torch.Tensor], sizes: list[int], numbers: list[float]
    ) -> None:
        self.ins, self.outs = ins, outs
        self.sizes, self.numbers = iter(sizes), iter(numbers)
        self.device = (outs or ins)[0].device


def build(node: Node, values: Values) -> Any:
    """The value a node stands for. Sizes and numbers are consumed in order, so build nodes in order, each once."""
    tag = node.tag
    if tag == "T":
        return values.ins[node.payload]
    if tag == "O":
        return values.outs[node.payload]
    if tag == "I":
        return next(values.sizes)
    if tag == "F":
        return next(values.numbers)
    if tag == "Q":
        row, col, row_scale, col_scale, global_scale, encoding, scaling, layout, dtype, shape = (
            build(child, values) for child in node.children
        )
        return Quantized(
            row, col, row_scale, col_scale, encoding, scaling, layout, shape, dtype, values.device, global_scale
        )
    if tag == "Z":
        items = [build(child, values) for child in node.children]
        return node.payload(**dict(zip(_QUANTIZER_FIELDS[node.payload.kind], items, strict=True)))
    if tag == "V":
        return Saved(*(build(child, values) for child in node.children))
    if tag == "L":
        return [build(child, values) for child in node.children]
    if tag == "U":
        return tuple(build(child, values) for child in node.children)
    return node.payload
