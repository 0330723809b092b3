# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`QuantizedTensor`: a `Quantized` record where PyTorch wants a tensor.

Operators take and return records, which are cheap. A tensor subclass is for the places that only know tensors: the
edges of autograd, module boundaries, parameters, state dicts. It has the logical shape and the nominal dtype of what
it stands for and no memory of its own; what PyTorch does with it is in `aten.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.numerics.quantized import FakeQuantized, Quantized
from te_dispatch.numerics.quantizers import DelayedQuantizer, Quantizer, options_of, quantizer_of
from te_dispatch.pytorch.tensor.attributes import QuantizedParts
from te_dispatch.torch_private import disabled_torch_function, make_wrapper_subclass

#: The tensors of a record, as attributes of the subclass.
_PARTS = ("_row_data", "_col_data", "_row_scale_inv", "_col_scale_inv", "_global_scale_inv")


class QuantizedTensor(QuantizedParts, torch.Tensor):
    """A quantized tensor that autograd, modules and `torch.save` take for an ordinary one.

    It behaves as the tensor of its values. ``detach``, ``clone``, ``.to(device)``, views that keep the last dimension,
    and slices and splits of dimension 0, with per-tensor scaling of any dimension (all with the row-wise copy alone),
    stay quantized; any other operation runs on `dequantize()` and returns an ordinary tensor. Writing to it (``copy_``,
    ``add_``, ...) casts the new values as its quantizer does: with delayed scaling by the scale that the quantizer
    holds, into whose amax they go. Gradients pass straight through: its gradient is that of the values, in the nominal
    dtype.

    Args:
        row_data, col_data, row_scale_inv, col_scale_inv, global_scale_inv, encoding, scaling, scale_layout, shape,
        dtype: as in `te_dispatch.numerics.quantized.Quantized`. The tensors are shared, not copied. Without dimensions
            the data is that of shape (1,).
        requires_grad: for a leaf.
        quantizer: what casts values that are written to it; None for the format's own, which scales by the new values.

    Raises:
        ValueError: neither row_data nor col_data; a quantizer of another encoding or scaling.
    """

    _row_data: torch.Tensor | None
    _col_data: torch.Tensor | None
    _row_scale_inv: torch.Tensor | None
    _col_scale_inv: torch.Tensor | None
    _global_scale_inv: torch.Tensor | None
    _encoding: str
    _scaling: str
    _scale_layout: str
    #: False for a slice, which shares scales with rows that it does not have, and so cannot be written to.
    _whole: bool
    _quantizer: Quantizer | None

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        row_data: torch.Tensor | None,
        col_data: torch.Tensor | None,
        row_scale_inv: torch.Tensor | None,
        col_scale_inv: torch.Tensor | None,
        global_scale_inv: torch.Tensor | None,
        encoding: str,
        scaling: str,
        scale_layout: str,
        shape: Any,
        dtype: torch.dtype,
        requires_grad: bool = False,
        quantizer: Quantizer | None = None,
    ) -> QuantizedTensor:
        data = row_data if row_data is not None else col_data
        if data is None:
            raise ValueError("QuantizedTensor: row_data and col_data are both None, expected at least one copy")
        if quantizer is not None and (quantizer.encoding, quantizer.scaling) != (encoding, scaling):
            raise ValueError(
                f"QuantizedTensor: quantizer: got one for {quantizer.encoding} with {quantizer.scaling} scaling, "
                f"expected {encoding} with {scaling} scaling"
            )
        return make_wrapper_subclass(  # type: ignore[no-any-return]
            cls, shape, dtype=dtype, device=data.device, requires_grad=requires_grad
        )

    def __init__(
        self,
        row_data: torch.Tensor | None,
        col_data: torch.Tensor | None,
        row_scale_inv: torch.Tensor | None,
        col_scale_inv: torch.Tensor | None,
        global_scale_inv: torch.Tensor | None,
        encoding: str,
        scaling: str,
        scale_layout: str,
        shape: Any,
        dtype: torch.dtype,
        requires_grad: bool = False,
        quantizer: Quantizer | None = None,
    ) -> None:
        self._row_data = row_data
        self._col_data = col_data
        self._row_scale_inv = row_scale_inv
        self._col_scale_inv = col_scale_inv
        self._global_scale_inv = global_scale_inv
        self._encoding = encoding
        self._scaling = scaling
        self._scale_layout = scale_layout
        self._whole = True
        self._quantizer = quantizer

    @classmethod
    def quantize(cls, x: torch.Tensor, quantizer: Quantizer, usage: str = "both") -> QuantizedTensor:
        """Cast x, (..., K) or without dimensions, in float32, bfloat16 or float16, as `te_dispatch.ops.quantize` does.

        Differentiable: the gradient of x is that of the result, unchanged. Values that are written to the result later
        are cast by the same quantizer.
        """
        made = quantized(x, quantizer, usage)
        if cls is not QuantizedTensor:
            made.__class__ = cls
        return made  # type: ignore[no-any-return]

    # -- what it holds --------------------------------------------------------------------------------------------

    @property
    def record(self) -> Quantized:
        """The `Quantized` that it stands for, sharing its tensors: that of shape (1,) if it has no dimensions.

        The data of a slice is copied where it does not lie densely.
        """
        return record_of(self)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """The values as an ordinary tensor of the same shape: `te_dispatch.ops.dequantize`.

        Differentiable: the gradient passes unchanged, in the nominal dtype.

        Args:
            dtype: float32, bfloat16 or float16; None for the nominal dtype.
        """
        return _dequantized(self, dtype)

    @property
    def data(self) -> torch.Tensor:
        """This tensor out of autograd's sight.

        Assigning a `QuantizedTensor` takes over its shape, dtype, tensors, format and quantizer; assigning an ordinary
        tensor takes over its shape and dtype, and casts it as the quantizer here does, into new memory.

        Raises:
            RuntimeError: a tensor on another device is assigned.
        """
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if value.device != self.device:
            raise RuntimeError(
                f"data of {self!r} cannot become a tensor on {value.device}; make a new QuantizedTensor instead"
            )
        if not isinstance(value, QuantizedTensor):
            from te_dispatch.pytorch.tensor.aten import requantized

            value = requantized(self, value.detach())
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            like = make_wrapper_subclass(type(self), value.shape, dtype=value.dtype, device=value.device)
            torch.Tensor.data.__set__(self, like)  # type: ignore[attr-defined]
        for name in (*_PARTS, "_encoding", "_scaling", "_scale_layout", "_whole", "_quantizer"):
            setattr(self, name, getattr(value, name))

    def data_ptr(self) -> int:
        """Refused: a kernel that is given this tensor must be given its record or its values instead.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"{self!r} has no memory of its own: pass x.record to operators, or x.dequantize() where values are wanted"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        copies = [name for name, data in (("row", self._row_data), ("column", self._col_data)) if data is not None]
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"QuantizedTensor({'x'.join(map(str, self.shape))}, {self._encoding}, {self._scaling}, "
            f"{'+'.join(copies)}, {self._scale_layout} scales, {self.dtype}, {self.device}{grad})"
        )

    # -- what PyTorch asks of a wrapper ---------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [name for name in _PARTS if getattr(self, name) is not None]
        # Per-tensor scaling has one scale for both copies: one tensor stays one tensor.
        shared = self._row_scale_inv is not None and self._col_scale_inv is self._row_scale_inv
        if shared:
            names.remove("_col_scale_inv")
        # A quantizer with tensors is not for the metadata, which compilers compare: what they make has none.
        quantizer = None if isinstance(self._quantizer, DelayedQuantizer) else self._quantizer
        tags = (self._encoding, self._scaling, self._scale_layout, self.dtype)
        return names, (*tags, shared, self._whole, quantizer)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], metadata: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        encoding, scaling, layout, dtype, shared, whole, quantizer = metadata
        row, col, row_scale, col_scale, global_scale = (inner.get(name) for name in _PARTS)
        if shared:
            col_scale = row_scale
        made = QuantizedTensor(
            row, col, row_scale, col_scale, global_scale, encoding, scaling, layout, outer_size, dtype, False, quantizer
        )
        made._whole = whole
        return made

    #: Nothing happens above the dispatcher: gradients are recorded as for an ordinary tensor.
    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from te_dispatch.pytorch.tensor.aten import dispatch

        return dispatch(func, args, kwargs or {})

    def __coerce_tangent_metadata__(self) -> torch.Tensor:
        """Refused: asked when an output of a compiled region, which is to have a gradient, is of this class.

        The compiler would take that gradient to be of this class too.
        """
        raise NotImplementedError(
            "a QuantizedTensor that is to have a gradient cannot leave a compiled region: compile what made it "
            "together with what takes it, return x.dequantize(), or compile under torch.no_grad()"
        )

    def __coerce_same_metadata_as_tangent__(
        self, expected_metadata: Any, expected_type: type | None = None
    ) -> torch.Tensor | None:
        """This gradient as a compiled backward wants it; None where it cannot be had."""
        return self.detach().dequantize() if expected_type in (None, torch.Tensor) else None

    # -- copies ---------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        if not self.is_leaf:
            raise RuntimeError("QuantizedTensor: only leaves can be copied deeply; detach() first")
        found = memo.get(id(self))
        if found is None:
            with torch.no_grad():
                found = self.detach().clone()
            if isinstance(found._quantizer, DelayedQuantizer):  # of a module's state, which copies do not share
                found._quantizer = None
            if isinstance(self, torch.nn.Parameter):
                found = torch.nn.Parameter(found, self.requires_grad)
            else:
                found.requires_grad_(self.requires_grad)
            if self.grad is not None:
                found.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = found
        return found  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        parts = tuple(getattr(self, name) for name in _PARTS)
        tags = (self._encoding, self._scaling, self._scale_layout, tuple(self.shape), self.dtype)
        shared = self._row_scale_inv is not None and self._col_scale_inv is self._row_scale_inv
        if shared:
            parts = (*parts[:3], None, parts[4])
        more = {"quantizer": None if self._quantizer is None else options_of(self._quantizer), "whole": self._whole}
        kind = (_rebuild_subclass, (type(self),)) if type(self) is not QuantizedTensor else (_rebuild, ())
        return kind[0], (
            *kind[1], *parts, *tags, shared, self.requires_grad, isinstance(self, torch.nn.Parameter), more,
        )  # fmt: skip


def _rebuild(*state: Any) -> torch.Tensor:
    """Unpickle; pickles from before quantizers were saved have no dict at the end."""
    more = state[-1] if isinstance(state[-1], dict) else {}
    parts, (*tags, shared, requires_grad, parameter) = state[:5], state[5:13]
    row, col, row_scale, col_scale, global_scale = parts
    if shared:
        col_scale = row_scale
    made = QuantizedTensor(row, col, row_scale, col_scale, global_scale, *tags)
    made._whole = more.get("whole", True)
    if more.get("quantizer"):
        made._quantizer = quantizer_of(more["quantizer"])
    return torch.nn.Parameter(made, requires_grad) if parameter else made.requires_grad_(requires_grad)


def _rebuild_subclass(kind: type[QuantizedTensor], *state: Any) -> torch.Tensor:
    """Unpickle a tensor of a subclass."""
    made = _rebuild(*state)
    made.__class__ = kind
    return made


# `torch.load(weights_only=True)` takes what it knows to be harmless: these build a tensor from tensors.
torch.serialization.add_safe_globals([_rebuild, _rebuild_subclass, QuantizedTensor])


def as_tensor(x: Quantized, quantizer: Quantizer | None = None, shape: Any = None) -> QuantizedTensor:
    """A record as a tensor that shares its data.

    Args:
        quantizer: what casts values that are written to it. It is not kept in a compiled region: a traced class cannot
            be given one.
        shape: None for the record's; () for a tensor without dimensions, whose record is of shape (1,).
    """
    return QuantizedTensor(
        x.row_data,
        x.col_data,
        x.row_scale_inv,
        x.col_scale_inv,
        x.global_scale_inv,
        x.encoding,
        x.scaling,
        x.scale_layout,
        tuple(x.shape) if shape is None else tuple(shape),
        x.dtype,
        False,
        None if torch.compiler.is_compiling() else quantizer,
    )


def record_of(x: QuantizedTensor) -> Quantized:
    """`QuantizedTensor.record`, as a function that compiled code can call."""
    data = x._row_data if x._row_data is not None else x._col_data
    assert data is not None
    made = FakeQuantized if data.is_meta else Quantized
    row = x._row_data
    if not x._whole and row is not None and not row.is_contiguous():  # columns of a larger tensor
        row = row.contiguous()
    return made(
        row,
        x._col_data,
        x._row_scale_inv,
        x._col_scale_inv,
        x._encoding,
        x._scaling,
        x._scale_layout,
        tuple(x.shape) or (1,),
        x.dtype,
        data.device,
        x._global_scale_inv,
    )


def plain(x: Any) -> Any:
    """The values of a `QuantizedTensor`, differentiable; anything else as it is."""
    return _dequantized(x) if isinstance(x, QuantizedTensor) else x


def _dequantized(x: QuantizedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    # A function, because dynamo takes a method of this name for that of every tensor and does not look into it.
    return _Dequantize.apply(x, _Cast(None, "", None, dtype))  # type: ignore[no-any-return]


def quantized(x: torch.Tensor, quantizer: Quantizer, usage: str, rng_state: Any = None, dtype: Any = None) -> Any:
    """x as `te_dispatch.ops.quantize` casts it, of the nominal dtype `dtype`, None for its own; differentiable."""
    return _Quantize.apply(plain(x), _Cast(quantizer, usage, rng_state, dtype))  # type: ignore[no-untyped-call]


class _Cast:
    """Arguments of a cast, out of autograd's sight."""

    __slots__ = ("quantizer", "usage", "rng_state", "dtype")

    def __init__(self, quantizer: Any, usage: str, rng_state: torch.Tensor | None, dtype: torch.dtype | None) -> None:
        self.quantizer, self.usage, self.rng_state, self.dtype = quantizer, usage, rng_state, dtype


class _Quantize(torch.autograd.Function):
    """x (..., K) -> `QuantizedTensor`; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cast: _Cast) -> torch.Tensor:
        ctx.dtype, source = x.dtype, x if x.dim() else x.reshape(1)
        record = ops.quantize(source, cast.quantizer, usage=cast.usage, rng_state=cast.rng_state)
        if cast.dtype is not None:
            record.dtype = cast.dtype
        return as_tensor(record, cast.quantizer, x.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy.to(ctx.dtype), None


class _Dequantize(torch.autograd.Function):
    """`QuantizedTensor` -> its values; the gradient passes unchanged, in the nominal dtype."""

    @staticmethod
    def forward(ctx: Any, x: QuantizedTensor, cast: _Cast) -> torch.Tensor:
        ctx.dtype = x.dtype
        from te_dispatch.pytorch.compile import returned
        from te_dispatch.pytorch.tensor.aten import values

        return returned(values(x, cast.dtype))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy.to(ctx.dtype), None
