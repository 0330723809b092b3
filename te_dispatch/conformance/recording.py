# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A call of a running job, kept: its arguments on the host, as a case like any other, and as a file.

The file is plain data that ``torch.load(..., weights_only=True)`` reads: tensors, numbers, words, lists and dicts.
Records, quantizers and what a forward saved are dicts whose key ``kind`` says what they are.
"""

from __future__ import annotations

import dataclasses
import io
import os
import platform
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch

from te_dispatch.conformance import transfer
from te_dispatch.conformance.case import Case
from te_dispatch.conformance.settings import UsageError
from te_dispatch.conformance.space import Arguments, Axis, Space, Values, rules_for
from te_dispatch.core.arguments import check_kinds
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.shadow import NotComparable
from te_dispatch.numerics import quantizers
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.results import Saved

#: Of the file's layout.
FORMAT = 1
#: The name of the space that a recording makes of itself.
RECORDED = "recorded"
#: Bytes. Copies begin where a multiple of it begins, so that what kernels ask of alignment holds of them too.
_ALIGNMENT = 256

_QUANTIZERS: dict[str, type] = {one.__name__: one for one in quantizers.QUANTIZERS.values()}

_FIELDS: dict[str, type] = {
    "operator": str, "version": int, "implementation": str, "against": str, "arguments": dict, "device": str,
    "policy": str, "finding": str, "versions": dict,
}  # fmt: skip


@dataclass
class Recording:
    """One call.

    Attributes:
        operator, version: what was called, and the version of its interface.
        implementation: on what.
        against: the backend that it is compared with.
        arguments: on the host, all of them, as they were before the call.
        device: type of the device that the call was made on.
        policy: digest of the policy in force.
        finding: what differed, in words; empty if nothing is known to.
        versions: of te_dispatch, Python, PyTorch, and the distributions of both backends.
    """

    operator: str
    version: int
    implementation: str
    against: str
    arguments: Arguments
    device: str
    policy: str = ""
    finding: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    def space(self) -> Space:
        """The space whose only case this call is, under whatever values.

        Raises:
            NotComparable: nothing says how such a call is judged.
        """
        draws = OPERATORS[self.operator].signature.parameters.keys() >= {"rng_state", "dropout_p"}
        if draws and self.arguments.get("dropout_p"):
            raise NotComparable("dropout is on, and which elements are dropped is each implementation's own")
        judging = rules_for(self.operator, self.arguments)
        if judging is None:
            raise NotComparable("the conformance kit has no rules for this operator")

        def make(values: Values, maker: Any) -> Arguments:
            return copied(self.arguments)  # type: ignore[no-any-return]

        return dataclasses.replace(
            judging, name=RECORDED, axes=(Axis("file", ("",)),), make=make, valid=lambda values: True, batch=None,
            together=(), within=(), fixed=(), forms=(),
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, at once: a reader sees all of it or nothing.

        Raises:
            NotComparable: an argument is of a kind that the file cannot hold.
            OSError: it cannot be written.
        """
        content = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        content["arguments"] = {name: _flat(value, name) for name, value in self.arguments.items()}
        temporary = f"{os.fspath(path)}.partial"
        try:
            torch.save({"format": FORMAT, **content}, temporary)
            os.replace(temporary, path)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Read a file.

        Raises:
            UsageError: there is none, it is no recording, or one of another version.
        """
        try:
            raw = io.BytesIO(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"replay: {path} cannot be read: {why}") from error
        if not zipfile.is_zipfile(raw):
            raise UsageError(f"replay: {path} is no recorded call: PyTorch did not write it, or it was cut")
        raw.seek(0)
        try:
            content = torch.load(raw, map_location="cpu", weights_only=True)
        except Exception as error:  # PyTorch raises half a dozen kinds for what is no file of its own
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise UsageError(f"replay: {path} is no recorded call: {why}") from error
        try:
            if content.pop("format") != FORMAT:
                raise UsageError(f"replay: {path} is of another format, this te_dispatch reads format {FORMAT}")
            content["arguments"] = {name: _round(value) for name, value in content["arguments"].items()}
            found = cls(**content)
            found._check_fields()
        except UsageError:
            raise
        except Exception as error:  # of what a record or a quantizer is made of, too
            raise UsageError(f"replay: {path} is no recorded call: {type(error).__name__}: {error}") from error
        found.check(path)
        return found

    @classmethod
    def of_case(cls, case: Case) -> Recording:
        """The file that a case named, and whose call it is.

        Raises:
            UsageError: it cannot be read, is a call of another operator, or nothing says how to judge it.
        """
        file = unquote(case.values.get("file", ""))
        found = cls.load(file)
        if found.operator != case.operator:
            raise UsageError(f"case: {file} is a call of {found.operator}, not of {case.operator}")
        try:
            found._check_call()
            found.space()
        except NotComparable as error:
            raise UsageError(f"replay: {file}: {error}") from error
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise UsageError(f"replay: {file} holds no call of {found.operator}: {error}") from error
        return found

    def case(self, path: str | os.PathLike[str]) -> Case:
        """The case that this call is in a file. Ids have marks of their own, which a path may hold, so it is quoted."""
        return Case(self.operator, RECORDED, (("file", quote(os.path.abspath(path))),))

    def _check_fields(self) -> None:
        """TypeError for a value of a wrong type."""
        for name, kind in _FIELDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(f"{name}: got {type(value).__name__}, expected {kind.__name__}")

    def _check_call(self) -> None:
        """TypeError where the operator would not take the arguments."""
        operator = OPERATORS[self.operator]
        missing, unknown = operator.signature.parameters.keys() ^ self.arguments.keys(), set(self.arguments)
        for name in sorted(missing, key=str):
            raise TypeError(f"argument {name!r} is {'unknown' if name in unknown else 'missing'}")
        check_kinds(operator, tuple(self.arguments[name] for name in operator.signature.parameters))

    def check(self, path: str | os.PathLike[str]) -> None:
        """Whether this te_dispatch has the operator as it was.

        Raises:
            UsageError: it has not.
        """
        operator = OPERATORS.get(self.operator)
        if operator is None:
            raise UsageError(f"replay: {path} is a call of {self.operator!r}, which is no operator here")
        if operator.version != self.version:
            mine = f"{operator.name}@{operator.version}"
            raise UsageError(f"replay: {path} is a call of {self.operator}@{self.version}, here is {mine}")


def versions(distributions: Mapping[str, str]) -> dict[str, str]:
    """What a recording notes beside the distributions of the backends."""
    from te_dispatch import __version__

    return {
        "te-dispatch": __version__, "torch": str(torch.__version__), "python": platform.python_version(),
        "platform": sys.platform, **distributions,
    }  # fmt: skip


# -- copying --------------------------------------------------------------------------------------------------------


def copied(value: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of a structure, with the strides, alignment and shared memory of the original.

    Unlike `transfer.moved` it copies only what the tensors cover: a job's may be views of gigabytes.
    """
    spans = _spans(tensor for _, tensor in transfer.tensors(value))
    copies: dict[tuple[int, int], torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        start, _ = _covered(tensor)
        key = tensor.untyped_storage()._cdata
        low, high = next((span for span in spans.get(key, ()) if span[0] <= start < span[1]), (0, 0))
        if low == high:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if (key, low) not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            whole.set_(tensor.untyped_storage(), low, (high - low,), (1,))
            copies[key, low] = whole.to(device, copy=True)
        laid = torch.empty(0, dtype=tensor.dtype, device=device)
        offset = (start - low) // tensor.element_size()
        return laid.set_(copies[key, low].untyped_storage(), offset, tensor.shape, tensor.stride())

    with torch.no_grad():
        return transfer.mapped(value, copy)


def _covered(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last byte (exclusive) of a tensor in its storage."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    if not tensor.numel():
        return start, start
    last = sum((int(count) - 1) * int(stride) for count, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * size


def _spans(tensors: Any) -> dict[int, list[tuple[int, int]]]:
    """Per storage, the stretches that tensors cover; overlapping and adjacent ones are one."""
    covered: dict[int, list[tuple[int, int]]] = {}
    for tensor in tensors:
        start, end = _covered(tensor)
        if end > start:
            covered.setdefault(tensor.untyped_storage()._cdata, []).append((start // _ALIGNMENT * _ALIGNMENT, end))
    merged: dict[int, list[tuple[int, int]]] = {}
    for key, stretches in covered.items():
        found: list[tuple[int, int]] = []
        for start, end in sorted(stretches):
            if found and start <= found[-1][1]:
                found[-1] = (found[-1][0], max(end, found[-1][1]))
            else:
                found.append((start, end))
        merged[key] = found
    return merged


# -- plain data -----------------------------------------------------------------------------------------------------


def _flat(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, torch.Tensor)):
        return value
    if isinstance(value, (torch.dtype, torch.device)):
        return {"kind": type(value).__name__, "name": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"kind": "dict", "items": [[_flat(k, where), _flat(v, where)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {"kind": "tuple", "items": [_flat(item, where) for item in value]}
    if isinstance(value, Sequence):
        return [_flat(item, where) for item in value]
    if isinstance(value, (Quantized, Saved)):
        names: Sequence[str] = value.__slots__ if isinstance(value, Saved) else Quantized.__slots__
        return {"kind": type(value).__name__, **{name: _flat(getattr(value, name), where) for name in names}}
    if type(value).__name__ in _QUANTIZERS:
        given = {f.name: _flat(getattr(value, f.name), where) for f in dataclasses.fields(value) if f.init}
        return {"kind": type(value).__name__, **given}
    raise NotComparable(f"{where} holds a {type(value).__name__}, which a file of plain data cannot hold")


def _round(value: Any) -> Any:
    """The value that `_flat` flattened."""
    if isinstance(value, list):
        return [_round(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value["kind"]
    if kind == "dtype":
        found = getattr(torch, value["name"])
        if not isinstance(found, torch.dtype):
            raise TypeError(f"{value['name']!r} is no dtype")
        return found
    if kind == "device":
        return torch.device(value["name"]) if torch.device(value["name"]).type == "cpu" else torch.device("cpu")
    if kind == "tuple":
        return tuple(_round(item) for item in value["items"])
    if kind == "dict":
        return {_round(key): _round(item) for key, item in value["items"]}
    fields = {name: _round(item) for name, item in value.items() if name != "kind"}
    if kind == "Quantized":
        return Quantized(**fields)
    return Saved(**fields) if kind == "Saved" else _QUANTIZERS[kind](**fields)
