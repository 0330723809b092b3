# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scaled dot-product attention, forward and backward, in every layout and mask of the drop-in modules.

For query row i and key j of one head, with scale c (`softmax_scale`, default 1/sqrt(d)):

    z_ij = c (q_i . k_j + bias_ij)          bias_type ``pre_scale``
    z_ij = c q_i . k_j + bias_ij            ``post_scale``; ``alibi`` with bias_ij = slope_h (j - i - offset)
    z_ij = softcap tanh(z_ij / softcap)     where softcap > 0, before the bias of ``post_scale`` and ``alibi``
    p_ij = exp(z_ij) / (sum_j exp(z_ij) + s)   over unmasked j; s = 0 (``vanilla``), 1 (``off-by-one``),
                                               exp(softmax_offset_h) (``learnable``)
    o_i  = sum_j drop(p_ij) v_j

A fully masked row gives output 0, log-sum-exp -Inf and gradient 0, and adds nothing to any other gradient, whatever
`dout` holds there. Masked means: beyond a sequence's length (``padding`` masks), j > i + offset (causal ones), outside
the window, or True in `attn_mask`. Rows of a thd tensor that belong to no sequence are fully masked. A row that is not,
but whose logits are all -Inf, gives the same; with a softmax offset its log-sum-exp may be the offset instead, which is
all that its denominator holds. offset is 0, or len_kv - len_q for the bottom-right forms. Sources: Vaswani et al. 2017;
Press et al. 2022 (ALiBi); Dao 2023 (lse).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_dispatch.core.facts import CallFacts, Derived, FactValue, fact
from te_dispatch.core.memory import ROWS, SAVED
from te_dispatch.core.operator import Fact, operator
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch.ops.shapes import empty_quantized

if TYPE_CHECKING:
    import torch

    from te_dispatch.numerics.quantized import Operand
    from te_dispatch.numerics.quantizers import Quantizer

LAYOUTS = ("sbhd", "bshd", "thd")
MASKS = (
    "none",
    "causal",
    "padding",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
BIAS_TYPES = ("none", "pre_scale", "post_scale", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
PACKINGS = ("3hd", "h3d", "2hd", "h2d")
_WORDS = {
    "layout": LAYOUTS,
    "packing": PACKINGS,
    "mask": MASKS,
    "bias_type": BIAS_TYPES,
    "softmax_type": SOFTMAX_TYPES,
}

_SIZES = {
    "seqlen_q": "q.shape[0] if layout == 'sbhd' else q.shape[1] if layout == 'bshd' else (max_seqlen_q or 0)",
    "seqlen_kv": "k.shape[0] if layout == 'sbhd' else k.shape[1] if layout == 'bshd' else (max_seqlen_kv or 0)",
    "heads": "q.shape[-2]",
    "groups": "k.shape[-2]",
    "head_dim": "q.shape[-1]",
    "head_dim_v": "v.shape[-1]",
}
_FACTS = (
    Fact("dropout", "(dropout_p > 0.0)", doc="whether dropout is on", boolean=True),
    Fact("softcap", "(softcap > 0.0)", doc="whether logits are capped", boolean=True),
    Fact(
        "window",
        # (-1, 0) is what a causal mask means anyway.
        "(window is not None and window != (-1, -1) and not (window == (-1, 0) and 'causal' in mask))",
        doc="whether a sliding window is set",
        boolean=True,
    ),
    Fact("softmax_scale", "(softmax_scale is not None)", doc="whether a scale other than the default is given"),
    Fact(
        "same_head_dim",
        "(q.shape[-1:] == v.shape[-1:])",
        doc="whether values have the queries' head dimension",
        boolean=True,
    ),
    Fact(
        "same_seqlen",
        "(layout != 'thd' and q.shape[layout == 'bshd' :][:1] == k.shape[layout == 'bshd' :][:1])",
        doc="whether a dense layout has as many queries as keys",
        boolean=True,
    ),
)


def out_shape(q: Any, v: Any, layout: str) -> tuple[int, ...]:
    """The output: q's shape with v's head dimension; heads are not merged."""
    return (*q.shape[:-1], v.shape[-1])


def lse_shape(q: Any, layout: str) -> tuple[int, ...]:
    """(b, h, s_q), or (t, h) for thd."""
    shape = tuple(q.shape)
    if layout == "thd":
        return shape[:-1]
    batch, length = shape[1::-1] if layout == "sbhd" else shape[:2]
    return (batch, shape[2], length)


def _forward_shape(
    q: Any,
    k: Any,
    v: Any,
    *,
    layout: str = "sbhd",
    inference: bool = False,
    with_max_logit: bool = False,
    out_quantizer: Quantizer | None = None,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> AttentionForward:
    import torch

    dtype = out_dtype or q.dtype
    shape = out_shape(q, v, layout)
    out: Any = torch.empty(shape, dtype=dtype, device=q.device)
    if out_quantizer is not None:
        out = empty_quantized(shape, out_quantizer, "row", dtype, q.device)
    lse = torch.empty(lse_shape(q, layout), dtype=torch.float32, device=q.device)
    max_logit = torch.empty((q.shape[-2],), dtype=torch.float32, device=q.device) if with_max_logit else None
    return AttentionForward(out, None if inference else lse, max_logit, None if inference else Saved("shape", "shape"))


def _backward_facts(call: CallFacts) -> CallFacts:
    same = (
        "q.dtype", "k.dtype", "v.dtype", "q.scaling", "k.scaling", "v.scaling", "layout", "packing", "mask",
        "bias_type", "bias", "attn_mask", "window", "softmax_type", "softcap", "dropout", "deterministic", "seqlen_q",
        "seqlen_kv", "heads", "groups", "head_dim", "head_dim_v", "cu_seqlens_q", "cu_seqlens_kv",
        "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "alibi_slopes", "softmax_offset", "rng_state",
        "max_seqlen_q", "max_seqlen_kv", "softmax_scale", "same_head_dim", "same_seqlen",
    )  # fmt: skip

    def out_scaling(forward: CallFacts) -> FactValue:
        scaling = forward["out_quantizer.scaling"]
        return "none" if scaling is None else scaling

    own = {"dout.dtype": fact("out_dtype", "q.dtype"), "out.scaling": out_scaling}
    return Derived(call, {**{name: fact(name) for name in same}, **own})


@operator(
    family="attention",
    version=1,
    shape=_forward_shape,
    device="q.device",
    words=_WORDS,
    sizes=_SIZES,
    facts=_FACTS,
    companion="attention_bwd",
    companion_facts=_backward_facts,
    mutates=("s_quantizer.amax", "out_quantizer.amax"),
    memory={"q": ROWS, "k": ROWS, "v": ROWS},
)  # fmt: skip
def attention_fwd(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    layout: str = "sbhd",
    packing: str | None = None,
    mask: str = "causal",
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    page_table: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_type: str = "none",
    alibi_slopes: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softmax_type: str = "vanilla",
    softmax_offset: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    inference: bool = False,
    with_max_logit: bool = False,
    s_quantizer: Quantizer | None = None,
    out_quantizer: Quantizer | None = None,
    out_dtype: torch.dtype | None = None,
) -> AttentionForward:
    """Attention of the module's formulas.

    Args:
        q: (s_q, b, h, d), (b, s_q, h, d) or (t_q, h, d), as `layout` says; k: same with s_kv and g heads (h a
            multiple of g: query head i reads group i // (h / g)); v: same as k with its own head dimension. float32,
            bfloat16, float16 or `Quantized`. Any strides with the last dimension contiguous.
        layout: ``sbhd``, ``bshd`` or ``thd`` (sequences of a batch one after the other, bounds in cu_seqlens).
        packing: q, k, v are views of one tensor: ``3hd`` (.., 3, h, d), ``h3d`` (.., h, 3, d), or k, v are: ``2hd``,
            ``h2d``. None: no promise. The backward then writes its gradients packed the same way.
        mask: ``none``, ``causal``, ``padding``, ``padding_causal``, their ``..._bottom_right`` forms, ``arbitrary``.
        attn_mask: bool, broadcastable to (b, h, s_q, s_kv), True = masked out; for ``arbitrary``.
        window: (left, right): j in [i + offset - left, i + offset + right]; -1 unbounded. Causal masks imply
            right = 0.
        cu_seqlens_q, cu_seqlens_kv: int32 (b + 1,), cumulative valid lengths, for ``padding`` masks and thd.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 (b + 1,), where each thd sequence starts in memory, if that
            differs (padding between sequences).
        max_seqlen_q, max_seqlen_kv: upper bounds for thd; None reads them back from the device.
        page_table: int32 (b, pages): k, v are (pages_total, page_size, g, d) blocks; inference only.
        bias: (1 or b, 1 or h, s_q, s_kv); bias_type: ``none``, ``pre_scale``, ``post_scale``, ``alibi``.
        alibi_slopes: float32 (h,) or (b, h); None for the paper's.
        softmax_scale: c; None for 1/sqrt(d).
        softmax_type: ``vanilla``, ``off-by-one``, ``learnable``; softmax_offset: float32 (h,), for ``learnable``.
        softcap: 0 for none.
        dropout_p: probability; rng_state: int64 (2,), (seed, offset), required when dropout_p > 0. The same
            implementation drops the same elements for the same rng_state. The backward is given it again; `saved` does
            not hold it.
        deterministic: the backward must be bitwise reproducible.
        inference: no backward will follow: `lse` and `saved` may be None.
        with_max_logit: also return the largest unmasked z per head, NaN where one of them is NaN.
        s_quantizer, out_quantizer: FP8 attention: cast of p, and of the output. A tiled kernel may cast e^(z - m), with
            m the largest logit so far, and divide by the sum afterwards.
        out_dtype: None for q's (nominal) dtype.

    Returns:
        out: q's shape with v's head dimension. lse: fp32 (b, h, s_q), or (t_q, h) for thd: ln of the softmax's
        denominator. max_logit: fp32 (h,). saved: for the backward.
    """
    raise NotImplementedError


def _backward_shape(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *_: Any,
    bias: Any = None,
    softmax_type: str = "vanilla",
    dqkv_quantizer: Quantizer | None = None,
    with_dbias: bool = False,
    **__: Any,
) -> AttentionBackward:
    import torch

    def like(x: Any) -> Any:
        if dqkv_quantizer is not None:
            return empty_quantized(tuple(x.shape), dqkv_quantizer, "row", x.dtype, x.device)
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    offset = torch.empty((q.shape[-2],), dtype=torch.float32, device=q.device) if softmax_type == "learnable" else None
    dbias = torch.empty_like(bias) if with_dbias else None
    return AttentionBackward(like(q), like(k), like(v), dbias, offset)


@operator(
    family="attention",
    version=1,
    shape=_backward_shape,
    device="q.device",
    words=_WORDS,
    sizes=_SIZES,
    facts=_FACTS,
    companion="attention_fwd",
    backward=True,
    saved="saved.implementation",
    mutates=("s_quantizer.amax", "dp_quantizer.amax", "dqkv_quantizer.amax"),
    memory={"dout": ROWS, "q": ROWS, "k": ROWS, "v": ROWS, "out": SAVED, "lse": SAVED},
)  # fmt: skip
def attention_bwd(
    dout: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: torch.Tensor,
    saved: Saved,
    *,
    layout: str = "sbhd",
    packing: str | None = None,
    mask: str = "causal",
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    bias: torch.Tensor | None = None,
    bias_type: str = "none",
    alibi_slopes: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softmax_type: str = "vanilla",
    softmax_offset: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    s_quantizer: Quantizer | None = None,
    dp_quantizer: Quantizer | None = None,
    dqkv_quantizer: Quantizer | None = None,
    with_dbias: bool = False,
) -> AttentionBackward:
    """Gradients of `attention_fwd`.

    Args:
        dout: gradient of the output, of its shape. q, k, v, out, lse, saved and the options: as the forward had them.
        s_quantizer, dp_quantizer, dqkv_quantizer: FP8 attention: casts of p, of its gradient, of dq, dk and dv (each
            its own cast; a delayed one's amax is that of all three).
        with_dbias: also the gradient of `bias` (summed over the dimensions it broadcasts along).

    Returns:
        dq, dk, dv of their operands' shapes and dtypes, packed as `packing` says, 0 in rows that take no part; dbias of
        bias's shape and dtype; dsoftmax_offset fp32 (h,) for ``learnable``.
    """
    raise NotImplementedError
