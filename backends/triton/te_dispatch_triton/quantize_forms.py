# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantized data in other forms, and shards of sharded optimizers. Contracts: `te_dispatch.ops.quantize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dispatch.backend_kit.caches import cached
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.encodings import encoding as find_encoding
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import BLOCK
from te_dispatch.ops.checks import quantize as checks
from te_dispatch.ops.shapes import ceil_div, laid_out_shapes
from te_dispatch_triton.configs import choose
from te_dispatch_triton.kernels import forms, forms_bytes, forms_partial
from te_dispatch_triton.launch import Config, Kernel, blocks
from te_dispatch_triton.memory import dense, empty
from te_dispatch_triton.replay import replayed
from te_dispatch_triton.targets import INTERPRETER, Target, target_of

_U8, _F32, _I64 = torch.uint8, torch.float32, torch.int64
_SWIZZLED = "swizzled_32x4x4"
_line, _blocks, _down = Kernel(forms.dequantize_line), Kernel(forms.dequantize_blocks), Kernel(forms.dequantize_down)
_transpose_words, _transpose_bytes = Kernel(forms_bytes.transpose_words), Kernel(forms_bytes.transpose_bytes)
_relayout, _copy_parts = Kernel(forms_bytes.relayout), Kernel(forms_bytes.copy_parts)
_convert, _count_beyond = Kernel(forms_bytes.convert), Kernel(forms_bytes.count_beyond)
_amax_tiles, _cast_tiles = Kernel(forms_partial.amax_tiles), Kernel(forms_partial.cast_tiles)
_amax_line, _cast_line = Kernel(forms_partial.amax_line), Kernel(forms_partial.cast_line)
_cast_run = Kernel(forms_partial.cast_run)
_TILE = 128
_ROLES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv")
#: Parts of one launch of `copy_parts`, and bits that are set in its words.
_PARTS, _MARK = (8, 32, 128), 1 << 62 | 1
#: What rows move as: dtypes that every chip loads and stores, and for others the integer of their size.
_MOVED = frozenset((torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32))
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: What configs/quantize_forms.json says: (values of the constants in the file's order, how to compile, target).
_Choice = tuple[tuple[int, ...], Config, Target]


@cached()
def _choice(kernel: str, device: torch.device, columns: int = 0) -> _Choice:
    target = target_of(device)
    made = choose("quantize_forms", kernel, target, columns=columns)
    return tuple(made.constants.values()), made.config, target


@replayed()
def dequantize(x: Quantized, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """High-precision values of the row-wise copy, or of the other where that is all there is: one launch."""
    checks.dequantize(x, dtype)
    return values(x, dtype or x.dtype, "out")


def values(x: Quantized, dtype: torch.dtype, role: str = "workspace") -> torch.Tensor:
    """`dequantize`, unchecked."""
    row, scaling = x.row_data is not None, x.scaling
    data, scale = (x.row_data, x.row_scale_inv) if row else (x.col_data, x.col_scale_inv)
    assert data is not None and scale is not None
    device = x.device
    data = dense(data)
    out = empty(role, tuple(x.shape), dtype, device)
    size = out.numel()
    if size == 0:
        return out
    encoding = x.encoding
    if scaling == "tensor" and row:
        (block,), config, target = _choice("line", device)
        constants: tuple[Any, ...] = (encoding, target.conversion(encoding), target is INTERPRETER, block)
        _line(device, (blocks(size, block), 1, 1), (data, scale, out, size), constants, config)
        return out
    scale = dense(scale)
    rows, columns = x.rows(), x.shape[-1]
    swizzled = x.scale_layout == _SWIZZLED
    if scaling == "mxfp8" and not row:
        (bn,), config, target = _choice("down", device)
        row_step, block_step = (ceil_div(ceil_div(rows, 32), 4), 1) if swizzled else (1, columns)
        constants = (encoding, target.conversion(encoding), swizzled, target is INTERPRETER, bn)
        grid = (blocks(rows, 32) * blocks(columns, bn), 1, 1)
        _down(device, grid, (data, scale, out, rows, columns, row_step, block_step), constants, config)
        return out
    if not row:
        rows, columns = columns, rows
    side = BLOCK.get(scaling, _TILE)
    row_step, block_step = _steps(x.scale_layout, scaling, rows, ceil_div(columns, side))
    (bm, bn), config, target = _choice("blocks" if row else "turned", device)
    per_row = max(bn // side, 1)
    constants = (
        encoding, target.conversion(encoding), scaling, swizzled, not row, target is INTERPRETER, side, bm, per_row,
    )  # fmt: skip
    grid = (blocks(rows, bm) * blocks(columns, per_row * side), 1, 1)
    args = (data, scale, x.global_scale_inv, out, rows, columns, row_step, block_step)
    _blocks(device, grid, args, constants, config)
    return out


def _steps(layout: str, scaling: str, rows: int, per_row: int) -> tuple[int, int]:
    """Steps from row to row and from block to block of scales with the contracted dimension's blocks last; swizzled:
    tiles in a row of tiles."""
    if layout == "gemm_1d":
        return 1, _up(rows, 4)
    if layout == "gemm_2d":
        return _up(per_row, 4), 1
    if layout == _SWIZZLED:
        return ceil_div(per_row, 4), 1
    return (0, 0) if scaling == "tensor" else (per_row, 1)


@replayed()
def transpose_quantized(x: Quantized) -> Quantized:
    """Add the column-wise copy: bytes, and block_2d's scales, in one launch."""
    checks.transpose_quantized(x)
    assert x.row_data is not None and x.row_scale_inv is not None  # checked
    device = x.device
    data, m, k = dense(x.row_data), x.rows(), x.shape[-1]
    column = empty("col_data", (k, m), _U8, device)
    scale = turned = x.row_scale_inv
    tiled = x.scaling == "block_2d"
    if tiled:
        scale = dense(scale)
        turned = empty("col_scale_inv", (scale.shape[1], scale.shape[0]), _F32, device)
    if m and k:
        words = m % 4 == 0 and k % 4 == 0 and (data.data_ptr() | column.data_ptr()) % 4 == 0
        (bm, bn), config, _ = _choice("transpose_words" if words else "transpose_bytes", device)
        kernel = _transpose_words if words else _transpose_bytes
        args = (data, column, m, k, scale if tiled else None, turned if tiled else None)
        kernel(device, (blocks(m, bm) * blocks(k, bn), 1, 1), args, (bm, bn), config)
    return Quantized(
        x.row_data, column, x.row_scale_inv, turned, x.encoding, x.scaling, x.scale_layout, x.shape, x.dtype, device
    )


@replayed()
def relayout_scales(x: Quantized, *, scale_layout: str) -> Quantized:
    """The same values with scales in another layout: one launch for both copies."""
    checks.relayout_scales(x, scale_layout)
    return laid_out(x, scale_layout)


def laid_out(x: Quantized, scale_layout: str, seen: bool = True) -> Quantized:
    """`relayout_scales` without its checks: what casts end with, which write canonical scales.

    Args:
        seen: whether the record is a result of the call.
    """
    if scale_layout == x.scale_layout:
        return x
    device, scaling = x.device, x.scaling
    (br, bb), config, _ = _choice("relayout", device)
    shapes = laid_out_shapes(x.shape, scaling, scale_layout)
    m, k = x.rows(), x.shape[-1]
    args: list[Any] = []
    made: list[torch.Tensor | None] = []
    programs = 0
    for side, scale in enumerate((x.row_scale_inv, x.col_scale_inv)):
        if scale is None:
            args += (None, None, 0, 0)
            made.append(None)
            continue
        role = "workspace" if not seen else "col_scale_inv" if side else "row_scale_inv"
        target = empty(role, shapes[side], scale.dtype, device)
        rows, contracted = (k, m) if side else (m, k)
        if scaling == "block_2d":
            rows = ceil_div(rows, 128)
        per_row = ceil_div(contracted, BLOCK[scaling])
        args += (dense(scale), target, rows, per_row)
        made.append(target)
        row_end, block_end = _PADDED[scale_layout](rows, per_row)
        programs += blocks(row_end, br) * blocks(block_end, bb)
    if programs:
        constants = (x.scale_layout, scale_layout, scaling == "mxfp8", br, bb)
        _relayout(device, (programs, 1, 1), tuple(args), constants, config)
    return Quantized(
        x.row_data, x.col_data, made[0], made[1], x.encoding, scaling, scale_layout, x.shape, x.dtype, device,
        x.global_scale_inv,
    )  # fmt: skip


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


#: Layout -> (rows, blocks) -> both with their padding.
_PADDED: dict[str, Callable[[int, int], tuple[int, int]]] = {
    CANONICAL_SCALES: lambda rows, per_row: (rows, per_row),
    "gemm_1d": lambda rows, per_row: (_up(rows, 4), per_row),
    "gemm_2d": lambda rows, per_row: (rows, _up(per_row, 4)),
    _SWIZZLED: lambda rows, per_row: (_up(rows, 128), _up(per_row, 4)),
}


@replayed()
def convert_encoding(
    x: Quantized, *, encoding: str, overflow: str = "saturate", count: torch.Tensor | None = None
) -> Quantized:
    """Rewrite codes between the OCP and FNUZ forms, saturating: one launch for codes, scales and count."""
    checks.convert_encoding(x, encoding, overflow, count)
    return _converted(x, encoding, count)


def convert_encoding_checked(
    x: Quantized, *, encoding: str, overflow: str = "saturate", count: torch.Tensor | None = None
) -> Quantized:
    """`convert_encoding` that also serves ``error``, by reading back how many codes are beyond the target's range."""
    checks.convert_encoding(x, encoding, overflow, count)
    counted = x.row_data if x.row_data is not None else x.col_data
    assert counted is not None  # checked
    if overflow == "error" and not encoding.endswith("fnuz") and counted.numel():
        found = _beyond(dense(counted), encoding)
        if found:
            raise ValueError(f"x has {found} codes in {x.encoding} that {encoding} cannot represent (overflow='error')")
    return _converted(x, encoding, count)


def _beyond(codes: torch.Tensor, encoding: str) -> int:
    device, size = codes.device, codes.numel()
    (block,), config, _ = _choice("convert", device)
    found = empty("workspace", (1,), _I64, device)
    found.zero_()
    constants = (find_encoding(encoding).max_code, block)
    _count_beyond(device, (blocks(size, block), 1, 1), (codes, size, found), constants, config)
    return int(found.item())


def _converted(x: Quantized, encoding: str, count: torch.Tensor | None) -> Quantized:
    device, to_fnuz = x.device, encoding.endswith("fnuz")
    (block,), config, _ = _choice("convert", device)
    shared = x.col_scale_inv is x.row_scale_inv
    made: list[torch.Tensor | None] = []
    pairs: list[tuple[torch.Tensor, torch.Tensor, int] | None] = []
    together = 0  # of codes: what has to divide by 4 for words of them
    for i, source in enumerate((x.row_data, x.col_data, x.row_scale_inv, None if shared else x.col_scale_inv)):
        if source is None:
            made.append(None)
            pairs.append(None)
            continue
        target = empty(_ROLES[i], tuple(source.shape), source.dtype, device)
        source, size = dense(source), target.numel()
        made.append(target)
        pairs.append((source, target, size))
        if i < 2:
            together |= source.data_ptr() | target.data_ptr() | size
    words = together & 3 == 0
    args: list[Any] = []
    programs = 0
    for i, pair in enumerate(pairs):
        if pair is None or pair[2] == 0:
            args += (None, None, 0)
            continue
        source, target, size = pair
        if words and i < 2:
            size >>= 2
        args += (source, target, size)
        programs += -(-size // block)
    if programs:
        # FNUZ has one special code, at 80; the largest finite one of OCP is what separates.
        largest = find_encoding(x.encoding if to_fnuz else encoding).max_code
        args.append(None if to_fnuz else count)
        _convert(device, (programs, 1, 1), tuple(args), (to_fnuz, largest, words, block), config)
    row, column, row_scale, column_scale = made
    return Quantized(
        row, column, row_scale, row_scale if shared else column_scale, encoding, x.scaling, x.scale_layout, x.shape,
        x.dtype, device,
    )  # fmt: skip


@replayed()
def pad_rows(x: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]) -> torch.Tensor:
    """Append zero rows to every part: one launch for up to 128 parts."""
    checks.pad_rows(x, splits, padded_splits, False)
    return _copied_parts(x, splits, padded_splits)


@replayed()
def unpad_rows(x: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]) -> torch.Tensor:
    """Undo `pad_rows`."""
    checks.pad_rows(x, splits, padded_splits, True)
    return _copied_parts(x, padded_splits, splits)


def _copied_parts(x: torch.Tensor, read: Sequence[int], written: Sequence[int]) -> torch.Tensor:
    device, rows, columns = x.device, sum(written), x.shape[1]
    out = empty("out", (rows, columns), x.dtype, device)
    if rows == 0 or columns == 0:
        return out
    (bm, bn), config, _ = _choice("copy_parts", device)
    source, target = dense(x), out
    if x.is_complex():
        source, target, columns = torch.view_as_real(source), torch.view_as_real(target), 2 * columns
    if source.dtype not in _MOVED:
        integer = _INTEGERS[source.element_size()]
        source, target = source.view(integer), target.view(integer)
    at = first = 0
    starts = [_MARK]
    for before, after in zip(read, written):
        at += after
        first += before
        starts.append(_MARK | at << 31 | first << 1)
    if (at | first) >> 30:
        raise Declined(f"x: parts of {at} and {first} rows, below 2^30 served")
    count = len(read)
    most = next((n for n in _PARTS if n >= count), _PARTS[-1])
    for part in range(0, count, most):
        cut = starts[part : part + most + 1]
        rows = (cut[-1] >> 31) - (cut[0] >> 31)
        if rows:
            cut += cut[-1:] * (most + 1 - len(cut))
            grid = (blocks(rows, bm) * blocks(columns, bn), 1, 1)
            _copy_parts(device, grid, (source, target, columns, tuple(cut)), (most, bm, bn), config)
    return out


@replayed()
def partial_amax(
    x: torch.Tensor, amax: torch.Tensor, *, height: int, width: int, start: int, block: int
) -> torch.Tensor:
    """Max-accumulate the block amaxes of a shard: one launch."""
    checks.partial_amax(x, amax, height, width, start, block)
    source, target, size, device = dense(x), dense(amax), x.numel(), x.device
    if size == 0:
        return amax
    if block:
        _, config, _ = _choice("amax_tiles", device)
        first, grid = _tiles(start, size, width)
        _amax_tiles(device, grid, (source, target, size, width, height, start, first), (_TILE,), config)
    else:
        (line,), config, _ = _choice("amax_line", device)
        _amax_line(device, (blocks(size, line), 1, 1), (source, target, size), (line,), config)
    return amax if target is amax else amax.copy_(target)


@replayed()
def partial_cast(
    x: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    *,
    height: int,
    width: int,
    start: int,
    block: int,
    encoding: str,
) -> torch.Tensor:
    """Cast a shard with the blocks' scales: one launch."""
    checks.partial_cast(x, out, scale, height, width, start, block, encoding)
    source, scale, size, device = dense(x), dense(scale), x.numel(), x.device
    if size == 0:
        return out
    target = out if out.is_contiguous() else empty("workspace", tuple(out.shape), _U8, device)
    unaligned = block and (start | width) & 15  # rows of tiles begin at any address
    if unaligned and width >= _choice("cast_run", device)[0][0]:
        (run,), config, chip = _choice("cast_run", device)
        constants: tuple[Any, ...] = (encoding, chip.conversion(encoding), _TILE, run)
        _cast_run(device, (blocks(size, run), 1, 1), (source, target, scale, size, width, start), constants, config)
    elif block:
        _, config, chip = _choice("cast_tiles", device)
        first, grid = _tiles(start, size, width)
        constants = (encoding, chip.conversion(encoding), _TILE)
        _cast_tiles(device, grid, (source, target, scale, size, width, height, start, first), constants, config)
    else:
        (line,), config, chip = _choice("cast_line", device)
        constants = (encoding, chip.conversion(encoding), line)
        _cast_line(device, (blocks(size, line), 1, 1), (source, target, scale, size), constants, config)
    return out if target is out else out.copy_(target)


def _tiles(start: int, size: int, width: int) -> tuple[int, tuple[int, int, int]]:
    """The first tile row that a shard reaches, and a grid of the tiles in those that it does."""
    first = start // width // _TILE
    rows = (start + size - 1) // width // _TILE - first + 1
    return first, (rows * blocks(width, _TILE), 1, 1)
