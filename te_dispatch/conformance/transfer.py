# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Copying arguments: to a device, to the host, wider. Strides, offsets and who shares memory with whom are kept.

Views matter: packed q, k, v are slices of one tensor, and an implementation may read the others through one pointer.
So it is storages that are copied, once each, and tensors that are laid over the copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.results import Saved
from te_dispatch.torch_private import hooks

_RECORD_TENSORS = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
_NARROW = (torch.bfloat16, torch.float16)
#: Before the path of what is described: names of the attributes that it was given, and how many hooks.
ATTACHED = "what is attached to "


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A structure like `value` with every tensor changed; a tensor or record that is there twice stays one."""
    seen: dict[int, Any] = {}

    def once(item: Any, make: Callable[[Any], Any]) -> Any:
        if id(item) not in seen:
            seen[id(item)] = make(item)
        return seen[id(item)]

    def tensor(item: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = once(item, change)
        return found

    def record(item: Quantized) -> Quantized:
        found: Quantized = once(item, lambda _: _record(item, tensor))
        return found

    return _mapped(value, tensor, record)


def _record(value: Quantized, change: Callable[[torch.Tensor], torch.Tensor]) -> Quantized:
    parts = {name: getattr(value, name) for name in _RECORD_TENSORS}
    tensors = {name: None if part is None else change(part) for name, part in parts.items()}
    device = next((t.device for t in tensors.values() if t is not None), value.device)
    return Quantized(
        tensors["row_data"], tensors["col_data"], tensors["row_scale_inv"], tensors["col_scale_inv"],
        value.encoding, value.scaling, value.scale_layout, value.shape, value.dtype, device,
        tensors["global_scale_inv"],
    )  # fmt: skip


def _mapped(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], record: Callable[[Quantized], Quantized]
) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Quantized):
        return record(value)
    if isinstance(value, Saved):
        return Saved(value.implementation, value.format, _mapped(value.tensors, change, record), value.options)
    if isinstance(value, Mapping):
        return {name: _mapped(item, change, record) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change, record) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change, record) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # a quantizer
        tensors = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        tensors = {name: item for name, item in tensors.items() if isinstance(item, torch.Tensor)}
        return dataclasses.replace(value, **{n: change(t) for n, t in tensors.items()}) if tensors else value
    return value


def moved(value: Any, device: torch.device | str, contents: bool = True) -> Any:
    """A copy of a structure on a device, with the strides, offsets and shared memory of the original.

    Without `contents` the copy's elements are not initialized: enough where only facts such as shapes are read.
    """
    target = torch.device(device)
    storages: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if size == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=target)
        key = storage.data_ptr()
        if key not in storages:
            if contents:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (size,), (1,))
                storages[key] = whole.detach().to(target, copy=True)
            else:
                storages[key] = torch.empty(size, dtype=torch.uint8, device=target)
        laid = torch.empty(0, dtype=tensor.dtype, device=target)
        return laid.set_(storages[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    return mapped(value, copy)


def widened(value: Any) -> Any:
    """A copy in which fp32 stands for bf16 and fp16, by value, also as the nominal dtype of records."""

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in _NARROW else tensor.clone()

    return _renamed(mapped(value, widen))


def _renamed(value: Any) -> Any:
    """Dtype-valued options widen as well, and the nominal dtype of records."""
    if isinstance(value, dict):
        return {name: _renamed(item) for name, item in value.items()}
    if isinstance(value, Quantized):
        value.dtype = torch.float32 if value.dtype in _NARROW else value.dtype
        return value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_renamed(item) for item in value)
    return torch.float32 if value in _NARROW else value


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a structure, with where it is: ``q``, ``a.row_data``, ``quantizer.amax``, ``histories.0``."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Quantized):
        for name in _RECORD_TENSORS:
            yield from tensors(getattr(value, name), _under(path, name))
    elif isinstance(value, Saved):
        yield from tensors(value.tensors, path)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from tensors(item, _under(path, name))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, item in zip(value._fields, value):
            yield from tensors(item, _under(path, name))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors(item, _under(path, str(index)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name), _under(path, field.name))


def options(value: Any) -> Any:
    """A structure without its data: what is left of two calls that differ in their tensors' contents alone is equal."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, Quantized):
        return tuple(options(getattr(value, name)) for name in Quantized.__slots__)
    if isinstance(value, Mapping):
        return {name: options(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [options(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(options(getattr(value, field.name)) for field in dataclasses.fields(value)))
    return value


def described(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What a structure is made of, by path, without what its tensors hold: where each tensor lies and whether it
    requires a gradient, lengths of lists, and everything else by value."""
    if isinstance(value, torch.Tensor):
        place = (value.data_ptr(), value.storage_offset())
        yield path, (place, tuple(value.shape), value.stride(), value.dtype, value.requires_grad)
        yield f"{ATTACHED}{path}", (tuple(vars(value)), hooks(value))
    elif isinstance(value, (Quantized, Saved)):
        for name in type(value).__slots__:
            yield from described(getattr(value, name), _under(path, name))
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from described(item, _under(path, str(name)))
    elif isinstance(value, (list, tuple)):
        yield path, len(value)
        for index, item in enumerate(value):
            yield from described(item, _under(path, str(index)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from described(getattr(value, field.name), _under(path, field.name))
        yield f"{ATTACHED}{path}", tuple(getattr(value, "__dict__", ()))
    else:
        yield path, repr(value) if isinstance(value, float) else value  # NaN is not equal to itself


def overwrite(there: Any, fresh: Any) -> None:
    """Copy the contents of a structure's tensors into those of another of the same form."""
    new = dict(tensors(fresh))
    with torch.no_grad():
        for path, tensor in tensors(there):
            tensor.copy_(new[path])


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
