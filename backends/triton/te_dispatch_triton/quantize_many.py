# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts of many tensors at once. Contracts: `te_dispatch.ops.quantize`.

A launch writes a table of the tensors (more than one where there are many), one finds amaxes where the quantizers need
them (current scaling, nvfp4), and one casts them all.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from te_dispatch.backend_kit.caches import cached
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import quantize as checks
from te_dispatch_triton.configs import choose
from te_dispatch_triton.kernels import forms_many as kernels
from te_dispatch_triton.launch import Config, Kernel
from te_dispatch_triton.memory import address, dense
from te_dispatch_triton.quantize import cast
from te_dispatch_triton.quantize_forms import laid_out
from te_dispatch_triton.records import empty_record, empty_tensor_record
from te_dispatch_triton.replay import replayed
from te_dispatch_triton.targets import target_of
from te_dispatch_triton.training_tables import FEW, MANY, sent

_maxima = Kernel(kernels.find_maxima)
_tensors, _blocks = Kernel(kernels.cast_tensors), Kernel(kernels.cast_blocks)
_tiles_of_128 = Kernel(kernels.cast_tiles_of_128)
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
#: Fewer tensors are cast one by one: the table would cost as much.
_LEAST = 3


#: A matrix to cast: address, shape, rows of the shape's last dimension, elements between them.
_Part = tuple[int, tuple[int, ...], int, int]


@replayed()
def split_quantize(
    x: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Quantizer], *, usage: str
) -> list[Quantized]:
    """Every part of x's rows with its own quantizer."""
    checks.split_quantize(x, splits, quantizers, usage)
    if len(splits) < _LEAST:
        return [cast(part, q, usage) for part, q in zip(x.split_with_sizes(list(splits)), quantizers)]
    x = _readable(x)
    columns, stride = x.shape[1], x.stride(0)
    at, step = address(x), stride * x.element_size()
    parts: list[_Part] = []
    for rows in splits:
        parts.append((at, (rows, columns), rows, stride))
        at += rows * step
    return _cast_many(parts, x.dtype, x.device, quantizers, usage)


@replayed()
def multi_tensor_quantize(
    xs: Sequence[torch.Tensor], quantizers: Sequence[Quantizer], *, usage: str
) -> list[Quantized]:
    """Every tensor with its own quantizer."""
    checks.multi_tensor_quantize(xs, quantizers, usage)
    if len(xs) < _LEAST:
        return [cast(x, q, usage) for x, q in zip(xs, quantizers)]
    held = [_readable(x) for x in xs]
    parts: list[_Part] = []
    for x in held:
        shape = tuple(x.shape)
        columns, rows = shape[-1], 1
        for size in shape[:-1]:
            rows *= size
        parts.append((address(x), shape, rows, columns if x.is_contiguous() else x.stride(0)))
    return _cast_many(parts, held[0].dtype, held[0].device, quantizers, usage)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x, or a dense copy of it where it is not a matrix of dense rows."""
    return x if x.is_contiguous() or (x.ndim == 2 and x.stride(1) == 1) else dense(x)


def _variant(quantizer: Any) -> tuple[bool, bool, bool]:
    """What of a quantizer is compiled in, beside its kind and encoding: common, power_of_two, two_d."""
    return (
        quantizer.common,
        quantizer.kind in ("current", "block") and quantizer.power_of_two,
        quantizer.kind == "nvfp4" and quantizer.two_d,
    )


def _cast_many(
    parts: list[_Part], dtype: torch.dtype, device: torch.device, quantizers: Sequence[Quantizer], usage: str
) -> list[Quantized]:
    # Checked: one kind, scaling and encoding.
    variants = [_variant(q) for q in quantizers]
    records: list[Any] = [None] * len(parts)
    for variant in dict.fromkeys(variants):
        mine = [i for i, v in enumerate(variants) if v == variant]
        for first in range(0, len(mine), MANY):
            places = mine[first : first + MANY]
            made = _cast_alike(
                [parts[i] for i in places], dtype, device, [quantizers[i] for i in places], usage, variant
            )
            for i, record in zip(places, made):
                records[i] = laid_out(record, quantizers[i].scale_layout)
    return records


def _cast_alike(
    parts: list[_Part],
    dtype: torch.dtype,
    device: torch.device,
    quantizers: list[Any],
    usage: str,
    variant: tuple[bool, bool, bool],
) -> list[Quantized]:
    """Cast matrices whose quantizers differ in their state alone."""
    kind, scaling = quantizers[0].kind, quantizers[0].scaling
    plan = _plan(device, kind, scaling, quantizers[0].encoding, usage, dtype, variant)
    bm, bn, least, lists, found = plan.bm, plan.bn, plan.least, plan.lists, plan.found
    columns, stride = parts[0][1][-1], parts[0][3]
    uniform = all(part[3] == stride and part[1][-1] == columns for part in parts)
    computed, delayed = kind in ("current", "block"), kind == "delayed"
    records: list[Quantized] = []
    words: list[int] = []
    entries = programs = together = 0
    for part, q in zip(parts, quantizers):
        at, shape, rows, apart = part
        across = -(-shape[-1] // bn)
        record, targets = _empty(shape, rows, shape[-1], dtype, device, q, usage)
        records.append(record)
        tiles = -(-rows // bm) * across or least
        if tiles == 0:
            continue
        words.append(at)
        if not uniform:
            words += (apart, shape[-1])
            together |= apart | shape[-1]
        for tensor in targets:
            place = address(tensor)
            together |= place
            words.append(place)
        if delayed:
            words += (address(q.scale), 0 if q.amax is None else address(q.amax))
        elif found:
            words.append(0)
        words += (rows, programs, _bits(q.epsilon) if computed and q.epsilon else 0)
        together |= at | rows
        entries += 1
        programs += tiles
    if entries:
        table = sent(words, device)
        args, grid = (table, entries, columns, stride), (programs, 1, 1)
        if not uniform:
            lists += 2
        constants = (plan.dtype, lists, uniform, together & 15 == 0, FEW if entries <= FEW else MANY)
        if found:
            _maxima(device, grid, args, (*constants, bm, bn), plan.config)
        plan.kernel(device, grid, args, (*constants, *plan.constants), plan.config)
    return records


class _Plan(NamedTuple):
    """How one kind of cast is launched.

    Attributes:
        bm, bn, config: a program's tile, and how the kernel is compiled.
        least: programs of an empty matrix: 1 where there is one scale for all of it, which is written all the same.
        lists: words of an entry before the rows, where stride and columns are not among them.
        found: whether amaxes are found first.
        kernel, constants: of the cast; constants after those that say how to read the table.
    """

    bm: int
    bn: int
    config: Config
    least: int
    lists: int
    found: bool
    dtype: Any
    kernel: Kernel
    constants: tuple[Any, ...]


@cached()
def _plan(
    device: torch.device, kind: str, scaling: str, encoding: str, usage: str, dtype: torch.dtype,
    variant: tuple[bool, bool, bool],
) -> _Plan:  # fmt: skip
    target = target_of(device)
    # Scales that need all of a tile of 128x128.
    whole_tile = scaling == "block_2d" or (scaling == "block_1d" and usage != "row")
    choice = choose("quantize_forms", "many_tiles_of_128" if whole_tile else f"many_{scaling}", target)
    common, power_of_two, two_d = variant
    copies = (usage != "column", usage != "row")
    whole, found = scaling in ("tensor", "nvfp4"), kind in ("current", "nvfp4")
    lists = 1 + sum(copies) * (1 if scaling == "tensor" else 2) + whole + (2 if kind == "delayed" else found)
    cast_as = (encoding, common, target.conversion_of_cast(encoding), power_of_two)
    if whole_tile:
        bm = bn = 128
        kernel = _tiles_of_128
        how: tuple[Any, ...] = (scaling == "block_2d", *cast_as, choice.constants["BM"])
    else:
        bm, bn = choice.constants["BM"], choice.constants["BN"]
        kernel = _tensors if scaling == "tensor" else _blocks
        how = (kind == "delayed",) if scaling == "tensor" else (scaling, two_d)
        how = (*how, *cast_as, bm, bn)
    return _Plan(bm, bn, choice.config, int(whole), lists, found, _TYPES[dtype], kernel, (*copies, *how))


def _empty(
    shape: tuple[int, ...],
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    quantizer: Any,
    usage: str,
) -> tuple[Quantized, tuple[torch.Tensor, ...]]:
    """A record, and the tensors of an entry's words from `row_data` to `whole`."""
    if quantizer.scaling != "tensor":
        record = empty_record(shape, rows, columns, dtype, device, quantizer, usage)
        made = (
            record.row_data, record.row_scale_inv, record.col_data, record.col_scale_inv, record.global_scale_inv,
        )  # fmt: skip
        return record, tuple(tensor for tensor in made if tensor is not None)
    record, inverse = empty_tensor_record(shape, dtype, device, quantizer, usage)
    targets = (record.row_data, record.col_data, inverse)
    return record, tuple(tensor for tensor in targets if tensor is not None)


def _bits(epsilon: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", epsilon))[0]
    return bits
