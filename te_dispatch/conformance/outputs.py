# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Results of a call as named tensors, and their form: what two implementations must agree on before any number.

Paths: a field of the named tuple (``out``, ``y_quantized.row_data``), an index of a list (``0.row_data``), ``result``
for a plain tensor, and ``argument:quantizer.amax`` for an argument that the operator writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from te_dispatch.conformance.memory import overlapping
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import tensors
from te_dispatch.core.operator import Operator
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.results import Saved

#: Prefix of an argument's path among the results.
ARGUMENT = "argument:"


def named_results(operator: Operator, result: Any, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor that a call made or wrote, by path. What only its own backward reads (`saved`) is left out."""
    out: dict[str, torch.Tensor] = {}
    for path, tensor in tensors(_without_saved(result)):
        out[path or "result"] = tensor
    made = {tensor.data_ptr() for tensor in out.values() if tensor.numel()}
    for written in operator.mutates:
        name, _, attribute = written.partition(".")
        for path, tensor in _written(arguments.get(name), attribute):
            if tensor.numel() and tensor.data_ptr() not in made:  # `out` is among the results already
                out[f"{ARGUMENT}{name}" + (f".{path}" if path else "")] = tensor
    return out


def _written(value: Any, attribute: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an argument, or of one of its attributes: of each item's, where the argument is a sequence."""
    if not attribute:
        yield from tensors(value)
    elif isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        for index, item in enumerate(value):
            yield from ((f"{index}.{path}", tensor) for path, tensor in _written(item, attribute))
    else:
        yield from tensors(getattr(value, attribute, None), attribute)


def _without_saved(result: Any) -> Any:
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return tuple.__new__(type(result), [None if isinstance(item, Saved) else item for item in result])
    return result


def form(value: Any) -> Any:
    """The shape of a result, without its numbers: types, shapes, dtypes, devices, tags; nested like the result."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return (_kind(value), tuple(value.shape), str(value.dtype), value.device.type)
    if isinstance(value, Quantized):
        return (
            "Quantized", _tuple(value.shape), value.encoding, value.scaling, value.scale_layout, str(value.dtype),
            value.device.type,
            *(form(getattr(value, name)) for name in ("row_data", "col_data", "row_scale_inv", "col_scale_inv")),
            form(value.global_scale_inv),
        )  # fmt: skip
    if isinstance(value, Saved):
        return "Saved"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (type(value).__name__, *((name, form(item)) for name, item in zip(value._fields, value)))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(form(item) for item in value))
    return type(value).__name__


def _tuple(shape: Any) -> Any:
    """A record's shape, which is a tuple of int, as its holders compare and hash it."""
    return tuple(shape) if isinstance(shape, tuple) and all(type(size) is int for size in shape) else repr(shape)


def _kind(value: torch.Tensor) -> str:
    return "tensor" if type(value) is torch.Tensor else type(value).__name__


def differing_form(actual: Any, expected: Any, where: str = "result") -> str | None:
    """The first difference between two results' forms in words, None if there is none."""
    got, want = form(actual), form(expected)
    if got == want:
        return None
    if isinstance(actual, tuple) and type(actual) is type(expected) and hasattr(actual, "_fields"):
        for name, one, other in zip(actual._fields, actual, expected):
            found = differing_form(one, other, name)
            if found:
                return found
    if isinstance(actual, list) and isinstance(expected, list) and len(actual) == len(expected):
        for index, (one, other) in enumerate(zip(actual, expected)):
            found = differing_form(one, other, f"{where}[{index}]")
            if found:
                return found
    if isinstance(actual, Quantized) and isinstance(expected, Quantized):
        for name in Quantized.__slots__:
            one, other = getattr(actual, name), getattr(expected, name)
            if name == "device":
                one, other = one.type, other.type
            if name == "shape":
                one, other = _tuple(one), _tuple(other)
            if form(one) != form(other) or (isinstance(one, str) and one != other):
                return f"{where}.{name} is {_words(one)}, expected {_words(other)}"
    return f"{where} is {_words(actual)}, expected {_words(expected)}"


def wrong_label(result: Any, subject: Subject) -> str | None:
    """What is wrong with a `Saved` of a result: with its maker and its format, by which dispatch finds the backward, or
    with what it holds; None if nothing is."""
    for item in result if isinstance(result, tuple) else ():
        if not isinstance(item, Saved):
            continue
        if item.implementation != subject.id:
            return f"saved.implementation is {item.implementation!r}, expected {subject.id!r}"
        if item.format != subject.implementation.saved_format:
            return f"saved.format is {item.format!r}, the manifest says {subject.implementation.saved_format!r}"
        if not all(x is None or isinstance(x, torch.Tensor) for x in item.tensors):
            return "saved.tensors has something else than tensors and None, which autograd does not save"
        try:
            hash(item.options)
        except TypeError as error:
            return f"saved.options is not hashable: {error}"
    return None


#: Items of a list or tuple that a message describes, and characters of a text that it shows.
_ITEMS, _TEXT = 4, 80


def _words(value: Any) -> str:
    """Type and structure of a result, never its numbers."""
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} {_kind(value)} {tuple(value.shape)} on {value.device.type}"
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        if not value or all(type(item) is int for item in value):  # sizes, whose numbers are the structure
            return repr(value) if len(value) <= 2 * _ITEMS else f"a {type(value).__name__} of {len(value)} ints"
        items = [_words(item) for item in value[:_ITEMS]] + (["..."] if len(value) > _ITEMS else [])
        return f"a {type(value).__name__} of {len(value)} ({', '.join(items)})"
    if isinstance(value, str):
        return repr(value) if len(value) <= _TEXT else f"{value[:_TEXT]!r} ..."
    if value is None:
        return "None"
    return repr(value) if isinstance(value, Quantized) else type(value).__name__


def shared_memory(results: Mapping[str, torch.Tensor], arguments: Mapping[str, Any], expected_form: Any) -> str | None:
    """Which result lies in memory of an argument's, where the shape function does not say so: whoever writes to the one
    (the next update of a quantizer's scale, say) changes the other."""
    given = dict(tensors(dict(arguments)))
    meant = [tensor for _, tensor in tensors(expected_form)]
    for path, result in results.items():
        for name, argument in given.items():
            if not overlapping(result, argument):
                continue
            if not any(overlapping(argument, tensor) for tensor in meant):
                return f"{path} is no memory of its own but {name}, and follows every change of it"
            if name.partition(".")[0] == "out" and result is not argument:
                return f"{path} is another tensor on the memory of {name}, which is to be written and returned"
    return _same_twice(results)


def _same_twice(results: Mapping[str, torch.Tensor]) -> str | None:
    """Two results of a call that are one tensor. One scale may serve both copies of a record."""
    for (path, one), (other_path, other) in itertools.combinations(results.items(), 2):
        record, _, name = path.rpartition(".")
        scales = name == "row_scale_inv" and other_path == (f"{record}." if record else "") + "col_scale_inv"
        if one.numel() and other.numel() and one.data_ptr() == other.data_ptr() and not scales:
            return f"{path} and {other_path} are one memory"
    return None
