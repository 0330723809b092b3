# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Arguments of the quantize family. Contracts: `te_dispatch.ops.quantize`."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.encodings import FP8_ENCODINGS
from te_dispatch.numerics.encodings import encoding as find_encoding
from te_dispatch.numerics.quantized import CANONICAL_SCALES
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import values as check
from te_dispatch.ops.checks.check_cache import cached_check
from te_dispatch.ops.shapes import USAGES, ceil_div

#: Kinds whose scale of the whole tensor may come from an amax that the caller has.
_TAKE_AMAX = ("current", "nvfp4", "nvfp4_4over6")


@cached_check("quantize")
def quantize(
    x: Any,
    quantizer: Any,
    usage: Any,
    out: Any = None,
    noop_flag: Any = None,
    amax: Any = None,
    rng_state: Any = None,
) -> None:
    check.matrix("x", x)
    check.quantizer("quantizer", quantizer, x.device)
    check.one_of("usage", usage, USAGES)
    if quantizer.kind == "nvfp4_rht":
        check.rotatable("x", x.shape, quantizer, usage)
    if rng_state is not None:
        if quantizer.kind == "nvfp4_4over6":
            raise ValueError("rng_state: given with a nvfp4_4over6 quantizer, which rounds to nearest, expected None")
        check.rng(rng_state, x.device)
    if amax is not None:
        if quantizer.kind not in _TAKE_AMAX:
            raise ValueError(
                f"amax: given with a {quantizer.kind} quantizer, expected one of the kinds {check.listed(_TAKE_AMAX)}"
            )
        check.scalar("amax", amax, x.device)
    if noop_flag is not None:
        check.scalar("noop_flag", noop_flag, x.device)
        if out is None:
            raise ValueError("noop_flag: given without out, expected out, which a skipped cast leaves as it is")
    if out is not None:
        _out(out, x, quantizer, usage)


def _out(out: Any, x: torch.Tensor, quantizer: Quantizer, usage: str) -> None:
    check.record("out", out, x.device)
    check.shape("out", out, x.shape)
    if (out.encoding, out.scaling, out.scale_layout) != (quantizer.encoding, quantizer.scaling, quantizer.scale_layout):
        raise ValueError(
            f"out: got {out.encoding}, {out.scaling} with {out.scale_layout} scales, expected {quantizer.encoding}, "
            f"{quantizer.scaling} with {quantizer.scale_layout} scales"
        )
    for side in ("row", "column"):
        if usage in (side, "both"):
            check.needs_copy("out", out, side)
            for part in ("data", "scale_inv"):
                check.writable(f"out.{side[:3]}_{part}", getattr(out, f"{side[:3]}_{part}"))


@cached_check("quantize_dbias")
def quantize_dbias(x: Any, quantizer: Any, usage: Any, bias_dtype: Any) -> None:
    quantize(x, quantizer, usage)
    check.dtype("bias_dtype", bias_dtype)


@cached_check("dequantize")
def dequantize(x: Any, dtype: Any) -> None:
    check.record("x", x)
    check.own_values("x", x)
    check.dtype("dtype", dtype)


@cached_check("transpose_quantized")
def transpose_quantized(x: Any) -> None:
    check.record("x", x)
    if x.scaling not in ("tensor", "block_2d"):
        raise ValueError(f"x: got {x.scaling} scaling, whose copies differ, expected tensor or block_2d")
    check.needs_copy("x", x, "row")
    if x.scale_layout != CANONICAL_SCALES:
        raise ValueError(f"x: got {x.scale_layout} scales, expected {CANONICAL_SCALES}")


@cached_check("relayout_scales")
def relayout_scales(x: Any, scale_layout: Any) -> None:
    check.record("x", x)
    check.one_of("scale_layout", scale_layout, tuple(check.SCALE_LAYOUTS))
    served = check.SCALE_LAYOUTS[scale_layout]
    if x.scaling not in served:
        raise ValueError(
            f"scale_layout: got {scale_layout!r}, which is for {' and '.join(served)}, with {x.scaling} scales"
        )


def split_quantize(x: Any, splits: Any, quantizers: Any, usage: Any) -> None:
    check.tensor("x", x)
    if x.ndim != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (M, K)")
    _splits("splits", splits, x.shape[0])
    check.one_of("usage", usage, USAGES)
    _quantizers(quantizers, len(splits), "split", x.device)
    for i, (rows, quantizer) in enumerate(zip(splits, quantizers)):
        check.rotatable(f"splits[{i}]", (rows, x.shape[1]), quantizer, usage)


def _splits(name: str, splits: Any, total: int) -> None:
    check.integers(name, splits)
    if sum(splits) != total:
        raise ValueError(f"{name}: got {list(splits)}, expected numbers that add up to {total} rows")


def _quantizers(quantizers: Any, count: int, per: str, device: torch.device) -> None:
    check.sequence("quantizers", quantizers, count, per)
    for i, quantizer in enumerate(quantizers):
        check.quantizer(f"quantizers[{i}]", quantizer, device)
    kinds = {(q.kind, q.scaling, q.encoding) for q in quantizers}
    if len(kinds) > 1:
        raise ValueError(f"quantizers: got {sorted(kinds)}, expected one kind and encoding")


def multi_tensor_quantize(xs: Any, quantizers: Any, usage: Any) -> None:
    check.sequence("xs", xs)
    for i, x in enumerate(xs):
        check.matrix(f"xs[{i}]", x)
        if (x.dtype, x.device) != (xs[0].dtype, xs[0].device):
            raise ValueError(
                f"xs[{i}]: got {x.dtype} on device {x.device}, expected xs[0]'s, {xs[0].dtype} on {xs[0].device}"
            )
    check.one_of("usage", usage, USAGES)
    _quantizers(quantizers, len(xs), "tensor", xs[0].device)
    for i, (x, quantizer) in enumerate(zip(xs, quantizers)):
        check.rotatable(f"xs[{i}]", x.shape, quantizer, usage)


@cached_check("compute_amax")
def compute_amax(x: Any, out: Any) -> None:
    check.tensor("x", x)
    if out is None:
        return
    if not isinstance(out, torch.Tensor):
        raise check.kind_error("out", out, "a torch.Tensor")
    if out.dtype != torch.float32 or tuple(out.shape) != (1,):
        raise ValueError(f"out: got {out.dtype} {tuple(out.shape)}, expected float32 (1,)")
    check.scalar("out", out, x.device)


def _shard(x: Any, name: str, per_block: Any, height: Any, width: Any, start: Any, block: Any) -> None:
    check.tensor("x", x)
    if x.ndim != 1:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (N,)")
    for size, value in (("height", height), ("width", width), ("start", start), ("block", block)):
        check.integer(size, value, 0)
    if block not in (0, 128):
        raise ValueError(f"block: got {block}, expected 128, or 0 for the whole matrix")
    if start + x.numel() > height * width:
        raise ValueError(f"start: got {start} with {x.numel()} elements, expected to stay within {height}x{width}")
    blocks = (ceil_div(height, block), ceil_div(width, block)) if block else (1, 1)
    check.shaped(name, per_block, blocks, check.F32, x.device)


@cached_check("partial_amax")
def partial_amax(x: Any, amax: Any, height: Any, width: Any, start: Any, block: Any) -> None:
    _shard(x, "amax", amax, height, width, start, block)
    check.writable("amax", amax)


@cached_check("partial_cast")
def partial_cast(x: Any, out: Any, scale: Any, height: Any, width: Any, start: Any, block: Any, encoding: Any) -> None:
    if not isinstance(encoding, str):
        raise check.kind_error("encoding", encoding, f"one of {', '.join(FP8_ENCODINGS)}")
    if find_encoding(encoding).bits != 8:
        raise ValueError(f"encoding: got {encoding!r}, expected an 8-bit one")
    _shard(x, "scale", scale, height, width, start, block)
    if isinstance(out, torch.Tensor) and (out.dtype != torch.uint8 or out.shape != x.shape):
        raise ValueError(f"out: got {out.dtype} {tuple(out.shape)}, expected uint8 {tuple(x.shape)}")
    check.tensor("out", out, check.U8, x.device)
    check.writable("out", out)


@cached_check("update_delayed_scales")
def update_delayed_scales(
    histories: Any, scales: Any, max_values: Any, algorithm: Any, margin: Any, amaxes: Any
) -> None:
    check.one_of("algorithm", algorithm, ("max", "most_recent"))
    check.integer("margin", margin, -1000)
    if isinstance(histories, (list, tuple)) and not histories:
        raise ValueError("histories: got none, expected at least one")
    check.sequence("histories", histories)
    for i, history in enumerate(histories):
        if not isinstance(history, torch.Tensor):
            raise check.kind_error(f"histories[{i}]", history, "a torch.Tensor")
    given = {"scales": scales, "max_values": max_values} | ({} if amaxes is None else {"amaxes": amaxes})
    for name, items in given.items():
        check.sequence(name, items, len(histories), "history")
    for i, history in enumerate(histories):
        if history.dtype != torch.float32 or history.ndim != 2 or history.shape[0] == 0:
            raise ValueError(
                f"histories[{i}]: got {history.dtype} {tuple(history.shape)}, expected float32 (length, n)"
            )
        check.tensor(f"histories[{i}]", history, check.F32, histories[0].device)
        check.writable(f"histories[{i}]", history)
        _history(i, history, scales[i], max_values[i], None if amaxes is None else amaxes[i])


def _history(i: int, history: torch.Tensor, scale: Any, max_values: Any, amaxes: Any) -> None:
    count = history.shape[1]
    for name, per_column in (("scales", scale), ("amaxes", amaxes)):
        if per_column is None and name == "amaxes":
            continue
        if isinstance(per_column, torch.Tensor) and (
            per_column.dtype != torch.float32 or tuple(per_column.shape) != (count,)
        ):
            raise ValueError(
                f"{name}[{i}]: got {per_column.dtype} {tuple(per_column.shape)}, expected float32 ({count},)"
            )
        check.tensor(f"{name}[{i}]", per_column, check.F32, history.device)
        check.writable(f"{name}[{i}]", per_column)
    if not isinstance(max_values, (list, tuple)):
        raise check.kind_error(f"max_values[{i}]", max_values, "a list or tuple of numbers")
    if len(max_values) != count:
        raise ValueError(f"max_values[{i}]: got {len(max_values)} numbers, expected {count}")
    for j, value in enumerate(max_values):
        check.number(f"max_values[{i}][{j}]", value)


@cached_check("convert_encoding")
def convert_encoding(x: Any, encoding: Any, overflow: Any, count: Any) -> None:
    check.record("x", x)
    check.one_of("overflow", overflow, ("saturate", "error"))
    if not isinstance(encoding, str):
        raise check.kind_error("encoding", encoding, f"one of {', '.join(FP8_ENCODINGS)}")
    source, target = find_encoding(x.encoding), find_encoding(encoding)
    if x.scaling not in ("tensor", "block_1d", "block_2d"):
        raise ValueError(f"x: got {x.scaling} scaling, expected fp32 scales: tensor, block_1d or block_2d")
    if source.family != target.family or source.fnuz == target.fnuz:
        raise ValueError(f"encoding: got {encoding}, expected the other form of {x.encoding}")
    if count is not None:
        check.scalar("count", count, x.device, check.I64)


def pad_rows(x: Any, splits: Any, padded_splits: Any, padded: bool) -> None:
    """Of `pad_rows`, and with `padded` of `unpad_rows`, whose x has the padded rows."""
    if not isinstance(x, torch.Tensor):
        raise check.kind_error("x", x, "a torch.Tensor")
    check.integers("splits", splits)
    check.integers("padded_splits", padded_splits)
    rows = sum(padded_splits if padded else splits)
    if x.ndim != 2 or x.shape[0] != rows:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected ({rows}, K)")
    if len(splits) != len(padded_splits):
        raise ValueError(f"padded_splits: got {len(padded_splits)} parts, expected {len(splits)}")
    if any(after < before for before, after in zip(splits, padded_splits)):
        raise ValueError(f"padded_splits: got {list(padded_splits)}, expected at least {list(splits)}")
