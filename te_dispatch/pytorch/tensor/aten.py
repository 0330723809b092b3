# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What PyTorch's operations do to a `QuantizedTensor`: below autograd, one aten operation at a time.

A handler keeps the result quantized where that is exact. Any other operation runs on the values, and one that writes
to a `QuantizedTensor` quantizes the values that it left. So the answer is always that of the same operation on
`dequantize()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

from te_dispatch import ops
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4HadamardQuantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dispatch.pytorch import compile as _registers_what_graphs_call  # noqa: F401
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor, as_tensor, record_of

_aten = torch.ops.aten
_handlers: dict[Any, Callable[[Any, Any, Any], Any]] = {}

#: Operations that read shape, dtype and device of their tensor and none of its values.
_SHAPE_ONLY = frozenset((
    _aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default,
    _aten.rand_like.default, _aten.randn_like.default, _aten.new_empty.default, _aten.new_zeros.default,
    _aten.new_ones.default, _aten.new_full.default, _aten.new_empty_strided.default,
))  # fmt: skip


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an aten operation of which some argument is a `QuantizedTensor`."""
    handler = _handlers.get(func)
    if handler is not None:
        result = handler(func, args, kwargs)
        if result is not NotImplemented:
            return result
    if func in _SHAPE_ONLY:
        return func(*tree_map(_stand_in, args), **tree_map(_stand_in, kwargs))
    if func._schema.is_mutable:
        return _written(func, args, kwargs)
    return func(*tree_map(values, args), **tree_map(values, kwargs))


def values(x: Any, dtype: torch.dtype | None = None) -> Any:
    """The values of a `QuantizedTensor`, anything else as it is."""
    if not isinstance(x, QuantizedTensor):
        return x
    record = record_of(x)
    data = record.row_data if record.row_data is not None else record.col_data
    if type(data) is torch.Tensor:
        return _without_dimensions(x, ops.dequantize(record, dtype=dtype))
    # Traced: the tensors only stand for others, and the operator must become part of the graph.
    parts = (record.row_data, record.row_scale_inv, record.col_data, record.col_scale_inv, record.global_scale_inv)
    tags = (record.encoding, record.scaling, record.scale_layout)
    wide = torch.ops.te_dispatch.dequantize(parts, list(tags), list(record.shape), x.dtype, dtype or x.dtype)
    return _without_dimensions(x, wide)


def _without_dimensions(x: QuantizedTensor, wide: torch.Tensor) -> torch.Tensor:
    """The values of x's record in x's shape: records have at least one dimension."""
    return wide if x.dim() else wide.reshape(())


def _dequantize(
    parts: list[torch.Tensor | None], tags: list[str], shape: list[int], nominal: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    row, row_scale, col, col_scale, global_scale = parts
    device = (row if row is not None else col).device  # type: ignore[union-attr]
    record = Quantized(row, col, row_scale, col_scale, *tags, tuple(shape), nominal, device, global_scale)  # type: ignore[arg-type]
    return ops.dequantize(record, dtype=dtype)


def _dequantize_fake(
    parts: list[torch.Tensor | None], tags: list[str], shape: list[int], nominal: torch.dtype, dtype: torch.dtype
) -> torch.Tensor:
    data = next(part for part in parts if part is not None)
    return data.new_empty(shape, dtype=dtype)


_library = torch.library.Library("te_dispatch", "FRAGMENT")
_library.define(
    "dequantize(Tensor?[] parts, str[] tags, SymInt[] shape, ScalarType nominal, ScalarType dtype) -> Tensor"
)
_library.impl("dequantize", _dequantize, "CompositeExplicitAutograd")
torch.library.register_fake("te_dispatch::dequantize", _dequantize_fake, lib=_library)


def _stand_in(x: Any) -> Any:
    """A tensor of the shape, dtype and device of a `QuantizedTensor`, of one element of memory."""
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape) if isinstance(x, QuantizedTensor) else x


# -- what stays quantized -----------------------------------------------------------------------------------------


def _handles(*funcs: Any) -> Callable[[Callable[[Any, Any, Any], Any]], Callable[[Any, Any, Any], Any]]:
    def register(handler: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
        for func in funcs:
            _handlers[func] = handler
        return handler

    return register


def _mapped(x: QuantizedTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> QuantizedTensor:
    """x with `function` done to each of its tensors."""
    names, metadata = x.__tensor_flatten__()
    inner = {name: function(getattr(x, name)) for name in names}
    made = QuantizedTensor.__tensor_unflatten__(inner, metadata, x.shape, None)
    made._whole = True  # it has memory and scales of its own
    return _like(x, made)


def _like(x: QuantizedTensor, made: QuantizedTensor) -> QuantizedTensor:
    """What was made of x: of x's class, as PyTorch demands of ``detach`` and views, and with its quantizer."""
    made.__class__ = x.__class__
    made._quantizer = x._quantizer
    return made


def _reshaped(x: QuantizedTensor, shape: Any) -> Any:
    """x in another shape with the same last dimension: rows stay rows, so nothing but the row-wise data is reshaped.

    NotImplemented for columns of a larger tensor, whose rows do not lie densely, unless the shape stays.
    """
    row = x._row_data
    if row is not None:
        if tuple(shape) == tuple(x.shape):
            row = row.view(row.shape)
        elif row.is_contiguous():
            row = row.view(*shape[:-1], row.shape[-1])
        else:
            return NotImplemented
    made = QuantizedTensor(
        row, x._col_data, x._row_scale_inv, x._col_scale_inv, x._global_scale_inv, x._encoding, x._scaling,
        x._scale_layout, shape, x.dtype,
    )  # fmt: skip
    made._whole = x._whole
    return _like(x, made)


@_handles(_aten.detach.default, _aten.alias.default, _aten.view_as.default)
def _same(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if not isinstance(x, QuantizedTensor) or any(isinstance(other, QuantizedTensor) for other in args[1:]):
        return NotImplemented
    return _viewed(func, args, kwargs, _reshaped(x, x.shape))


def _viewed(func: Any, args: Any, kwargs: Any, made: Any) -> Any:
    """A view, as PyTorch wants it: in the storage of what it is a view of."""
    return NotImplemented if made is NotImplemented else return_and_correct_aliasing(func, args, kwargs, made)


@_handles(torch.ops.te_dispatch.snapshot.default, torch.ops.te_dispatch.call.default)
def _ordered(func: Any, args: Any, kwargs: Any) -> Any:
    """Operations that only wait for a tensor, of which any part will do."""
    return func(*[getattr(x, x.__tensor_flatten__()[0][0]) if isinstance(x, QuantizedTensor) else x for x in args])


@_handles(_aten.clone.default)
def _clone(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return _mapped(args[0], torch.clone)


@_handles(_aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    x, dtype = args[0], kwargs.get("dtype")
    if kwargs.get("layout") not in (None, torch.strided):
        return NotImplemented
    if dtype is not None and dtype != x.dtype:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return NotImplemented
        rest = {name: value for name, value in kwargs.items() if name != "dtype"}
        wide = values(x, dtype)
        return func(wide, **rest) if rest.get("device") not in (None, x.device) else wide
    device = kwargs.get("device") or x.device
    moved = _mapped(x, lambda part: part.to(device, non_blocking=kwargs.get("non_blocking", False), copy=True))
    if moved.device != x.device and isinstance(moved._quantizer, DelayedQuantizer):
        moved._quantizer = None  # its scale stays behind
    return moved


@_handles(_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)
def _view(func: Any, args: Any, kwargs: Any) -> Any:
    x, shape = args
    shape = list(shape)
    if -1 in shape:
        known = 1
        for size in shape:
            known *= size if size != -1 else 1
        if known == 0:
            return NotImplemented
        shape[shape.index(-1)] = x.numel() // known
    if (shape or [1])[-1] != (x.shape or [1])[-1]:  # without dimensions the data is that of shape (1,)
        return NotImplemented
    return _viewed(func, args, kwargs, _reshaped(x, shape))


@_handles(_aten.unsqueeze.default)
def _unsqueeze(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim = args
    dim = dim if dim >= 0 else dim + x.dim() + 1
    if dim >= max(x.dim(), 1):
        return NotImplemented
    shape = [*x.shape[:dim], 1, *x.shape[dim:]]
    return _viewed(func, args, kwargs, _reshaped(x, shape))


@_handles(_aten.squeeze.dim)
def _squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim = args
    dim = dim % max(x.dim(), 1)
    if dim >= x.dim() - 1 or x.shape[dim] != 1:
        return NotImplemented
    return _viewed(func, args, kwargs, _reshaped(x, [*x.shape[:dim], *x.shape[dim + 1 :]]))


def _cut(x: QuantizedTensor, dim: int, start: int, stop: int) -> QuantizedTensor | None:
    """``x.narrow(dim, start, stop - start)`` by its row-wise copy; None where the scales cannot be cut there."""
    row, scale = x._row_data, x._row_scale_inv
    if row is None or scale is None or x._scale_layout != CANONICAL_SCALES or stop <= start:
        return None
    if x._scaling != "tensor":
        if dim or x.dim() < 2:
            return None
        step = x.numel() // x.shape[0] // x.shape[-1] if x.shape[-1] else 0
        first, last = start * step, stop * step
        if x._scaling == "block_2d":
            if first % 128 or (last % 128 and stop != x.shape[0]):
                return None
            first, last = first // 128, -(-last // 128)
        scale = scale[first:last]
    made = QuantizedTensor(
        row.narrow(dim, start, stop - start), None, scale, None, x._global_scale_inv, x._encoding, x._scaling,
        x._scale_layout, (*x.shape[:dim], stop - start, *x.shape[dim + 1 :]), x.dtype,
    )  # fmt: skip
    made._whole = False
    return _like(x, made)


@_handles(_aten.slice.Tensor)
def _slice(func: Any, args: Any, kwargs: Any) -> Any:
    x, dim, start, stop, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
    if kwargs or not x.dim() or step != 1:
        return NotImplemented
    dim %= x.dim()
    start, stop, _ = slice(start, stop).indices(x.shape[dim])
    cut = _cut(x, dim, start, stop)
    return NotImplemented if cut is None else return_and_correct_aliasing(func, args, kwargs, cut)


@_handles(_aten.split.Tensor, _aten.split_with_sizes.default)
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    x, sizes, dim = (*args, *(0,)[len(args) - 2 :])
    if kwargs or not x.dim():
        return NotImplemented
    dim %= x.dim()
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[dim] - at) for at in range(0, x.shape[dim], sizes)] if sizes > 0 else []
    cuts, at = [], 0
    for size in sizes:
        cut = _cut(x, dim, at, at + size)
        if cut is None:
            return NotImplemented
        cuts.append(cut)
        at += size
    return return_and_correct_aliasing(func, args, kwargs, cuts) if cuts else NotImplemented


# -- writing ------------------------------------------------------------------------------------------------------


def format_quantizer(x: Quantized) -> Quantizer:
    """A quantizer without state that casts to the format of a record: scales are the new values' own."""
    if x.scaling == "tensor":
        return CurrentQuantizer(x.encoding)
    if x.scaling in ("block_1d", "block_2d"):
        return BlockQuantizer(x.encoding, two_d=x.scaling == "block_2d")
    if x.scaling == "mxfp8":
        return MXFP8Quantizer(x.encoding)
    return NVFP4HadamardQuantizer(x.encoding) if x.scaling == "nvfp4_rht" else NVFP4Quantizer(x.encoding)


def own_quantizer(x: QuantizedTensor) -> Quantizer:
    """What casts values that are written to x, which has canonical scales."""
    quantizer = x._quantizer
    if quantizer is None:
        return format_quantizer(record_of(x))
    if quantizer.scale_layout != CANONICAL_SCALES:
        return replace(quantizer, scale_layout=CANONICAL_SCALES)  # type: ignore[call-arg]
    return quantizer


def _require_writable(target: QuantizedTensor) -> None:
    if not target._whole:
        raise RuntimeError(
            f"cannot write to a slice of a QuantizedTensor, {target!r}: its scales are those of other rows too; "
            "clone() it, or write to the whole"
        )
    data = target._row_data if target._row_data is not None else target._col_data
    if type(data) is not torch.Tensor:
        raise NotImplementedError("writing to a QuantizedTensor inside a compiled region: write to it outside")
    if target._scale_layout != CANONICAL_SCALES:
        raise NotImplementedError(
            f"writing to a QuantizedTensor with {target._scale_layout} scales: only canonical scales can be written"
        )


def requantized(target: QuantizedTensor, source: torch.Tensor) -> QuantizedTensor:
    """`source`, on the target's device, as the target's quantizer casts it.

    Raises:
        RuntimeError, NotImplementedError: the target is one that cannot be written.
    """
    _require_writable(target)
    record = record_of(target)
    usage = "both" if record.row_data is not None and record.col_data is not None else "row"
    usage = "column" if record.row_data is None else usage
    fresh = ops.quantize(source.contiguous().view(tuple(source.shape) or (1,)), own_quantizer(target), usage=usage)
    return as_tensor(fresh, target._quantizer, source.shape)


def _overwrite(target: QuantizedTensor, source: torch.Tensor) -> None:
    """Quantize `source`, broadcast to the target's shape, into the target's memory."""
    _require_writable(target)
    if target.is_meta or not target.numel():
        return
    fresh = requantized(target, source.to(device=target.device, dtype=target.dtype).expand(target.shape))
    for name in target.__tensor_flatten__()[0]:
        getattr(target, name).copy_(getattr(fresh, name))


def _same_format(a: Any, b: Any) -> bool:
    return (
        isinstance(b, QuantizedTensor)
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.__tensor_flatten__() == b.__tensor_flatten__()
    )


@_handles(_aten.copy_.default)
def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[:2]
    if not isinstance(target, QuantizedTensor):
        return target.copy_(values(source), *args[2:], **kwargs)
    if target._whole and _same_format(target, source):
        for name in target.__tensor_flatten__()[0]:
            getattr(target, name).copy_(getattr(source, name))
    else:
        _overwrite(target, values(source))
    return target


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation that writes to arguments: on values, which are then quantized back."""
    written: list[tuple[QuantizedTensor, torch.Tensor]] = []

    def value(x: Any) -> Any:
        if not isinstance(x, QuantizedTensor):
            return x
        for other, found in written:
            if other is x:
                return found
        found = values(x)
        written.append((x, found))
        return found

    before = [info.alias_info is not None and info.alias_info.is_write for info in func._schema.arguments]
    named = {info.name: write for info, write in zip(func._schema.arguments, before)}
    result = func(*tree_map(value, args), **tree_map(value, kwargs))
    targets: list[Any] = []
    tree_map(targets.append, [arg for arg, write in zip(args, before) if write])
    tree_map(targets.append, [arg for name, arg in kwargs.items() if named.get(name)])
    for x, found in written:
        if any(target is x for target in targets):
            _overwrite(x, found)
    return tree_map(lambda y: next((x for x, found in written if found is y), y), result)
