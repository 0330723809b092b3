# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Arguments of attention. Contracts: `te_dispatch.ops.attention`."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.ops.attention import BIAS_TYPES, LAYOUTS, MASKS, PACKINGS, SOFTMAX_TYPES, lse_shape, out_shape
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors, Sizes
from te_dispatch.ops.checks import values as check
from te_dispatch.ops.checks.check_cache import cached_check
from te_dispatch.ops.checks.rows import bounds
from te_dispatch.ops.checks.signatures import CONTENTS, LEADING_OPERAND, NUMBER, OPERAND, OPTIONAL, exact
from te_dispatch.ops.checks.training import probability

_BATCH_AXES = {"sbhd": 1, "bshd": 0}


def operands(
    q: Any, k: Any, v: Any, layout: Any, packing: Any = None, paged: bool = False
) -> tuple[Sizes, Sizes, Sizes]:
    """Queries, keys and values that fit together; returns their shapes."""
    check.one_of("layout", layout, LAYOUTS)
    check.operand("q", q)
    device, dtype = q.device, q.dtype
    check.operand("k", k, device)
    check.operand("v", v, device)
    # Reading a shape makes an object.
    of_q, of_k, of_v = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    for name, shape in (("q", of_q), ("k", of_k), ("v", of_v)):
        dimensions = 4 if paged and name != "q" else len(layout)
        if len(shape) != dimensions:
            raise ValueError(f"{name}: got shape {shape}, expected {dimensions} dimensions ({', '.join(layout)})")
    for name, shape in (("q", of_q), ("v", of_v)):
        if shape[-1] == 0:
            raise ValueError(f"{name}: got shape {shape}, expected a head dimension of at least 1")
    if of_k[-1] != of_q[-1]:
        raise ValueError(f"k: got head dimension {of_k[-1]}, expected q's, {of_q[-1]}")
    if of_v[:-1] != of_k[:-1]:
        raise ValueError(f"v: got shape {of_v}, expected k's {of_k} but for the last dimension")
    if of_k[-2] == 0 or of_q[-2] % of_k[-2]:
        raise ValueError(f"k: got {of_k[-2]} groups for {of_q[-2]} heads, expected a divisor")
    axis = _BATCH_AXES.get(layout)
    if axis is not None and not paged and of_k[axis] != of_q[axis]:
        raise ValueError(f"k: got batch {of_k[axis]}, expected q's, {of_q[axis]}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != dtype:
            raise ValueError(f"{name}: got dtype {x.dtype}, expected q's, {dtype}")
    if packing is not None:
        check.one_of("packing", packing, PACKINGS)
        packed = [of_q, of_k, of_v] if packing in ("3hd", "h3d") else [of_k, of_v]
        if paged or packed != [packed[0]] * len(packed):
            raise ValueError(f"packing: got {packing} with shapes {packed}, expected equal ones")
    return of_q, of_k, of_v


@cached_check(
    "attention_fwd",
    q=exact(LEADING_OPERAND),
    k=exact(OPERAND),
    v=exact(OPERAND),
    attn_mask=exact(OPTIONAL),
    softmax_scale=exact(NUMBER),
    cu_seqlens_q=CONTENTS,
    cu_seqlens_kv=CONTENTS,
    cu_seqlens_q_padded=CONTENTS,
    cu_seqlens_kv_padded=CONTENTS,
    page_table=CONTENTS,
)
def attention(
    q: Any,
    k: Any,
    v: Any,
    layout: Any,
    packing: Any,
    mask: Any,
    attn_mask: Any,
    window: Any,
    cu_seqlens_q: Any,
    cu_seqlens_kv: Any,
    cu_seqlens_q_padded: Any,
    cu_seqlens_kv_padded: Any,
    max_seqlen_q: Any,
    max_seqlen_kv: Any,
    page_table: Any,
    bias: Any,
    bias_type: Any,
    alibi_slopes: Any,
    softmax_scale: Any,
    softmax_type: Any,
    softmax_offset: Any,
    softcap: Any,
    dropout_p: Any,
    rng_state: Any,
    deterministic: Any = False,
) -> AttentionSpec:
    """What forward and backward share; returns it in one object. Calls with one signature may get the same."""
    check.one_of("mask", mask, MASKS)
    check.one_of("bias_type", bias_type, BIAS_TYPES)
    check.one_of("softmax_type", softmax_type, SOFTMAX_TYPES)
    of_q, of_k, of_v = operands(q, k, v, layout, packing, page_table is not None)
    device, heads = q.device, of_q[-2]
    tensors = AttentionTensors(
        attn_mask, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, page_table, bias,
        alibi_slopes, softmax_offset, rng_state,
    )  # fmt: skip
    batch, s_q, s_kv = _sequences(of_q, of_k, device, layout, mask, tensors, (max_seqlen_q, max_seqlen_kv))
    if window is not None:
        _window(window)
    _mask(mask, attn_mask, (batch, heads, s_q, s_kv), device)
    _bias(bias_type, tensors, (batch, heads, s_q, s_kv), device)
    _softmax_offset(softmax_type, softmax_offset, heads, device)
    if softmax_scale is not None:
        check.number("softmax_scale", softmax_scale)
    check.number("softcap", softcap, 0.0)
    probability(dropout_p)
    if rng_state is not None:
        check.rng(rng_state, device)
    elif dropout_p > 0:
        raise ValueError(f"rng_state: got None with dropout_p={dropout_p}, expected int64 (2,), (seed, offset)")
    left, right = window or (-1, -1)
    return AttentionSpec(
        device, q.dtype, layout, packing, of_q, _stride(q), of_k, _stride(k), of_v, _stride(v), mask,
        (left, 0 if "causal" in mask else right), batch, max_seqlen_q, max_seqlen_kv,
        _shape(page_table), page_table is not None and cu_seqlens_kv is not None, _shape(bias),
        None if bias is None else bias.dtype, bias_type, _shape(attn_mask),
        () if attn_mask is None else attn_mask.stride(), 0 if alibi_slopes is None else alibi_slopes.ndim,
        softmax_scale, softmax_type, softcap, dropout_p, deterministic,
    )  # fmt: skip


def _shape(x: torch.Tensor | None) -> Sizes | None:
    return None if x is None else tuple(x.shape)


def _stride(x: Any) -> Sizes:
    data = x if isinstance(x, torch.Tensor) else x.row_data
    return () if data is None else data.stride()


def forward(
    inference: bool, page_table: Any, s_quantizer: Any, out_quantizer: Any, out_dtype: Any, device: torch.device
) -> None:
    """What only the forward takes, once `attention` has passed."""
    if page_table is not None or s_quantizer is not None or out_quantizer is not None or out_dtype is not None:
        _forward_options(inference, page_table, s_quantizer, out_quantizer, out_dtype, device)


@cached_check("attention_fwd")
def _forward_options(
    inference: bool, page_table: Any, s_quantizer: Any, out_quantizer: Any, out_dtype: Any, device: torch.device
) -> None:
    """`forward`, where one of its options is given."""
    if page_table is not None and not inference:
        raise ValueError("page_table: given without inference, expected inference=True: paged keys have no backward")
    for name, quantizer in (("s_quantizer", s_quantizer), ("out_quantizer", out_quantizer)):
        if quantizer is not None:
            check.quantizer(name, quantizer, device)
    check.dtype("out_dtype", out_dtype)


@cached_check("attention_bwd")
def backward(
    dout: Any,
    q: Any,
    v: Any,
    out: Any,
    lse: Any,
    layout: str,
    bias: Any,
    with_dbias: bool,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
) -> None:
    """What only the backward takes, once `attention` has passed."""
    device, result = q.device, out_shape(q, v, layout)
    for name, x in (("dout", dout), ("out", out)):
        check.operand(name, x, device)
        check.shape(name, x, result)
    check.shaped("lse", lse, lse_shape(q, layout), check.F32, device)
    if with_dbias and bias is None:
        raise ValueError("with_dbias: given without bias, expected the forward's bias")
    for name, quantizer in (
        ("s_quantizer", s_quantizer), ("dp_quantizer", dp_quantizer), ("dqkv_quantizer", dqkv_quantizer)
    ):  # fmt: skip
        if quantizer is not None:
            check.quantizer(name, quantizer, device)


def _window(window: Any) -> None:
    if not isinstance(window, tuple) or len(window) != 2 or not all(hasattr(size, "__index__") for size in window):
        raise check.kind_error("window", window, "(left, right), a tuple of two ints")
    if min(window) < -1:
        raise ValueError(f"window: got {window}, expected (left, right), each -1 or more")


#: Batch, heads, and the two lengths of the score matrix; None where only the device knows them.
_Extents = tuple[int, int, int | None, int | None]


def _mask(mask: str, attn_mask: Any, extents: _Extents, device: torch.device) -> None:
    if mask == "arbitrary" and attn_mask is None:
        raise ValueError("attn_mask: not given, expected bool, broadcastable to (b, h, s_q, s_kv), for mask arbitrary")
    if attn_mask is not None:
        check.tensor("attn_mask", attn_mask, check.BOOL, device)
        batch, heads, s_q, s_kv = extents
        if s_q is not None and s_kv is not None:
            check.broadcasts("attn_mask", attn_mask, (batch, heads, s_q, s_kv))


def _softmax_offset(softmax_type: str, softmax_offset: Any, heads: int, device: torch.device) -> None:
    if (softmax_offset is not None) != (softmax_type == "learnable"):
        state = "given" if softmax_offset is not None else "not given"
        raise ValueError(f"softmax_offset: {state} with softmax_type {softmax_type}, expected for learnable only")
    if softmax_offset is not None:
        check.shaped("softmax_offset", softmax_offset, (heads,), check.F32, device)


def _sequences(
    q: Sizes, k: Sizes, device: torch.device, layout: str, mask: str, t: AttentionTensors, longest: tuple[Any, Any]
) -> tuple[int, int | None, int | None]:
    """Batch and lengths of the score matrix; None where only the device knows them.

    Args:
        q, k: their shapes.
        longest: max_seqlen_q and max_seqlen_kv.
    """
    for name, value in zip(("max_seqlen_q", "max_seqlen_kv"), longest):
        if value is not None:
            check.integer(name, value, 0)
    if layout == "thd":
        lengths = t.cu_seqlens_q, t.cu_seqlens_q_padded, longest[0]
        batch, s_q = _packed("q", *lengths, None, q[0], device)
        if t.page_table is not None:
            return batch, s_q, _paged(k, t.page_table, batch, t.cu_seqlens_kv, device)
        lengths = t.cu_seqlens_kv, t.cu_seqlens_kv_padded, longest[1]
        return batch, s_q, _packed("kv", *lengths, batch, k[0], device)[1]
    sequence, batch = (0, q[1]) if layout == "sbhd" else (1, q[0])
    for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        if getattr(t, name) is not None:
            raise ValueError(f"{name}: given for layout {layout}, expected for thd only")
    padding = mask.startswith("padding")
    _dense("q", t.cu_seqlens_q, batch, q[sequence], padding, device)
    if t.page_table is not None:
        return batch, q[sequence], _paged(k, t.page_table, batch, t.cu_seqlens_kv, device)
    _dense("kv", t.cu_seqlens_kv, batch, k[sequence], padding, device)
    return batch, q[sequence], k[sequence]


def _dense(which: str, cu_seqlens: Any, batch: int, extent: int, needed: bool, device: torch.device) -> None:
    name = f"cu_seqlens_{which}"
    if cu_seqlens is None:
        if needed:
            raise ValueError(f"{name}: not given, expected int32 ({batch + 1},) for padding masks")
        return
    bounds(name, cu_seqlens, batch, None, device)
    if not needed:
        return
    if check.readable(cu_seqlens) and batch:
        longest = int(cu_seqlens.diff().max())
        if longest > extent:
            raise ValueError(f"{name}: got lengths up to {longest}, expected at most {extent}")


def _packed(
    which: str, cu_seqlens: Any, padded: Any, longest: Any, batch: int | None, tokens: int, device: torch.device
) -> tuple[int, int | None]:
    """One side of layout thd; returns the batch and the length that its scores have, if known."""
    name = f"cu_seqlens_{which}"
    if cu_seqlens is None:
        raise ValueError(f"{name}: not given, expected int32 (b + 1,) for layout thd")
    bounds(name, cu_seqlens, batch, None, device)
    if padded is not None:
        bounds(f"{name}_padded", padded, cu_seqlens.shape[0] - 1, None, device)
    starts = cu_seqlens if padded is None else padded
    if check.readable(cu_seqlens) and check.readable(starts) and cu_seqlens.shape[0] > 1:
        lengths = cu_seqlens.diff()
        if int((starts[:-1] + lengths).max()) > tokens:
            raise ValueError(f"{name}: got sequences that end past the {tokens} tokens, expected them within")
        if longest is not None and longest < int(lengths.max()):
            raise ValueError(
                f"max_seqlen_{which}: got {longest}, expected at least the longest sequence, {int(lengths.max())}"
            )
        longest = int(lengths.max()) if longest is None else longest
    return int(cu_seqlens.shape[0]) - 1, longest


def _paged(k: Sizes, page_table: Any, batch: int, cu_seqlens: Any, device: torch.device) -> int:
    """Paged keys and values; returns the length of a sequence that fills its pages."""
    check.tensor("page_table", page_table, check.I32, device)
    if page_table.ndim != 2 or page_table.shape[0] != batch:
        raise ValueError(f"page_table: got shape {tuple(page_table.shape)}, expected ({batch}, pages)")
    if check.readable(page_table) and page_table.numel():
        low, high = (int(n) for n in page_table.aminmax())
        if low < 0 or high >= k[0]:
            raise ValueError(f"page_table: got pages {low} to {high}, expected 0 to {k[0] - 1}")
    extent = int(page_table.shape[1] * k[1])
    if cu_seqlens is not None:
        _dense("kv", cu_seqlens, batch, extent, True, device)
    return extent


def _bias(bias_type: str, t: AttentionTensors, extents: _Extents, device: torch.device) -> None:
    bias, slopes = t.bias, t.alibi_slopes
    batch, heads, rows, columns = extents
    if (bias is not None) != (bias_type in ("pre_scale", "post_scale")):
        state = "given" if bias is not None else "not given"
        raise ValueError(f"bias: {state} with bias_type {bias_type}, expected for pre_scale and post_scale only")
    if bias is not None:
        check.tensor("bias", bias, check.FLOATS, device)
        fits = bias.ndim == 4 and bias.shape[0] in (1, batch) and bias.shape[1] in (1, heads)
        if not fits or bias.shape[2] != (rows or bias.shape[2]) or bias.shape[3] != (columns or bias.shape[3]):
            raise ValueError(
                f"bias: got shape {tuple(bias.shape)}, expected (1 or {batch}, 1 or {heads}, {rows}, {columns})"
            )
    if slopes is None:
        return
    if bias_type != "alibi":
        raise ValueError(f"alibi_slopes: given with bias_type {bias_type}, expected alibi")
    check.tensor("alibi_slopes", slopes, check.F32, device)
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(f"alibi_slopes: got shape {tuple(slopes.shape)}, expected ({heads},) or ({batch}, {heads})")
