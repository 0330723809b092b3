# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention on the FlashAttention packages, where they are installed. Contract: `te_dispatch.ops.attention`.

Their diagonals end in the bottom right corner, their queries and keys are (b, s, h, d) or packed (t, h, d) without
gaps, in rows that start at multiples of 16 bytes, and their dropout draws from a generator. What lies otherwise is
copied; what else differs the manifest keeps away, or `_aligned`. They allocate results and workspace themselves,
through PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import attention as checks
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_cuda.attention.flash_packages import FOUR, THREE, TWO, Options, Package
from te_dispatch_cuda.attention.rows import Sequences, batch_of, dense_lengths, rows
from te_dispatch_cuda.attention.setting import ALIGNMENT, Setting, fits, packed
from te_dispatch_cuda.memory import copied, empty, stream_of


class Batch(NamedTuple):
    """The operator's cumulative lengths, in its order."""

    queries: torch.Tensor | None
    keys: torch.Tensor | None


def _aligned(layout: str, mask: str, window: Any, rows_: int, columns: int, batch: Batch, name: str) -> None:
    """Whether the operator's diagonal is the packages' one.

    Raises:
        Declined: a diagonal that starts in the top left corner of a score matrix that may not be square.
    """
    if mask.endswith("bottom_right") or ("causal" not in mask and window in (None, (-1, -1))):
        return
    if layout != "thd" and rows_ == columns:
        return
    if layout == "thd" and batch.queries is not None and batch.queries is batch.keys:
        return
    raise Declined(
        f"{name} ends its diagonal in the bottom right corner; {mask} wants the top left one, and lengths differ"
    )


def _options(
    layout: str, mask: str, window: tuple[int, int] | None, q: torch.Tensor, k: torch.Tensor, batch: Batch,
    longest: tuple[int | None, int | None], scale: float | None, softcap: float, deterministic: bool,
) -> Options:  # fmt: skip
    """Raises:
    Declined: a scale that is not positive: the packages find the largest logit before they scale.
    """
    if scale is not None and not scale > 0:
        raise Declined(f"FlashAttention needs a positive softmax_scale, got {scale}")
    left, right = window or (-1, -1)
    if "causal" in mask:
        right = 0
    thd = layout == "thd"
    return Options(
        q.shape[-1] ** -0.5 if scale is None else float(scale), right == 0 and left < 0, left, right, float(softcap),
        batch.queries if thd else None, batch.keys if thd else None,
        q.shape[0] if longest[0] is None else longest[0], k.shape[0] if longest[1] is None else longest[1],
        deterministic,
    )  # fmt: skip


def _batch_first(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(b, s, h, d), or (t, h, d): a view, unless it does not lie as the packages load it."""
    if x.data_ptr() % ALIGNMENT or not fits(x.shape, x.stride(), x.element_size()):
        x = copied(x)
    return x.transpose(0, 1) if layout == "sbhd" else x


def _sees_nothing(o: Options, rows_: int, columns: int) -> bool:
    """Whether the first rows of a score matrix, whose diagonal ends in the bottom right corner, may see no key."""
    return 0 <= o.right < rows_ - columns


def _setting(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: str, window: Any, batch: Batch) -> Setting:
    count = 0 if batch.queries is None else batch.queries.shape[0] - 1
    return Setting(
        q.get_device(), q.dtype, "thd", None, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), mask,
        window, count, None, None, None, None, None, False, None, "vanilla", 0.0, 0.0, False,
    )  # fmt: skip


def _mend_forward(out: torch.Tensor, lse: torch.Tensor | None, setting: Setting, batch: Batch) -> None:
    """Rows behind the last sequence, and rows that see nothing."""
    of = rows(tuple(out.shape), out.stride(), "thd", out.element_size())
    lengths = dense_lengths(batch.queries, batch.keys)
    given = batch_of(setting, *lengths, None, None)
    address = 0 if lse is None else lse.data_ptr()
    Sequences(setting, ()).mend_forward(stream_of(setting.device), given, out.data_ptr(), of, address)


def _forward(package: Package) -> Callable[..., AttentionForward]:
    def attention_fwd(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
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
        """The package's forward; the log-sum-exp as the package wants it back stays in `saved`."""
        checks.attention(
            q, k, v, layout, packing, mask, attn_mask, window, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
            cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, page_table, bias, bias_type, alibi_slopes, softmax_scale,
            softmax_type, softmax_offset, softcap, dropout_p, rng_state,
        )  # fmt: skip
        checks.forward(inference, page_table, s_quantizer, out_quantizer, out_dtype, q.device)
        sequence = 0 if layout == "sbhd" else 1
        batch = Batch(cu_seqlens_q, cu_seqlens_kv)
        if 0 in (*q.shape, *k.shape, *v.shape):
            raise Declined(f"{package.name} takes no dimension of 0")
        thd = layout == "thd"
        if thd and not inference and q.shape[-1] % package.ragged_multiple:
            raise Declined(
                f"{package.name} gives wrong gradients of packed sequences unless the head dimension is a multiple of "
                f"{package.ragged_multiple}, got {q.shape[-1]}"
            )
        if package.equal_heads and v.shape[-1] != q.shape[-1]:
            raise Declined(f"{package.name} needs equal head dimensions, got {q.shape[-1]} and {v.shape[-1]}")
        _aligned(layout, mask, window, q.shape[sequence], k.shape[sequence], batch, package.name)
        o = _options(
            layout, mask, window, q, k, batch, (max_seqlen_q, max_seqlen_kv), softmax_scale, softcap, deterministic
        )
        out, own = package.forward(_batch_first(q, layout), _batch_first(k, layout), _batch_first(v, layout), o)
        lse = None if inference else (own.t().contiguous() if thd else own[..., : out.shape[1]])
        if lse is not None and not thd and _sees_nothing(o, out.shape[1], k.shape[sequence]):
            lse = lse.masked_fill(lse == torch.inf, -torch.inf)  # as FlashAttention 2 has them
        if thd:
            _mend_forward(out, lse, _setting(q, k, v, mask, window, batch), batch)
        out = out.transpose(0, 1).contiguous() if layout == "sbhd" else out
        if inference:
            return AttentionForward(out, None, None, None)
        return AttentionForward(out, lse, None, Saved(f"cuda.{package.name}", package.format, (own,)))

    return attention_fwd


def _gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for dq, dk and dv in the operator's layout."""
    if packing is None:
        dq, dk, dv = (empty(name, tuple(x.shape), x.dtype, x.device) for name, x in (("dq", q), ("dk", k), ("dv", v)))
        return dq, dk, dv
    first = 0 if "3" in packing else 1
    whole, _, _ = packed(tuple(k.shape), packing, first)
    axis = len(whole) - 3 if packing.endswith("hd") else len(whole) - 2
    views = empty("dq" if first == 0 else "dk", whole, k.dtype, k.device).unbind(axis)
    if first == 0:
        return views[0], views[1], views[2]
    return empty("dq", tuple(q.shape), q.dtype, q.device), views[0], views[1]


def _backward(package: Package) -> Callable[..., AttentionBackward]:
    def attention_bwd(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
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
        """The package's backward."""
        checks.attention(
            q, k, v, layout, packing, mask, attn_mask, window, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
            cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, None, bias, bias_type, alibi_slopes, softmax_scale,
            softmax_type, softmax_offset, softcap, dropout_p, rng_state,
        )  # fmt: skip
        checks.backward(dout, q, v, out, lse, layout, bias, with_dbias, s_quantizer, dp_quantizer, dqkv_quantizer)
        batch = Batch(cu_seqlens_q, cu_seqlens_kv)
        o = _options(
            layout, mask, window, q, k, batch, (max_seqlen_q, max_seqlen_kv), softmax_scale, softcap, deterministic
        )
        gradients = _gradients(q, k, v, packing)
        package.backward(
            *(_batch_first(x, layout) for x in (dout, q, k, v, out)), saved.tensors[0], o,
            tuple(x.transpose(0, 1) if layout == "sbhd" else x for x in gradients),
        )  # fmt: skip
        if layout == "thd":
            s = _setting(q, k, v, mask, window, batch)
            of = tuple(rows(tuple(x.shape), x.stride(), "thd", x.element_size()) for x in gradients)
            addresses = tuple(x.data_ptr() for x in gradients)
            lengths = dense_lengths(cu_seqlens_q, cu_seqlens_kv)
            given = batch_of(s, *lengths, None, None)
            Sequences(s, ()).mend_backward(stream_of(s.device), given, addresses, of)  # type: ignore[arg-type]
        return AttentionBackward(*gradients, None, None)

    return attention_bwd


two_fwd, two_bwd = _forward(TWO), _backward(TWO)
three_fwd, three_bwd = _forward(THREE), _backward(THREE)
four_fwd, four_bwd = _forward(FOUR), _backward(FOUR)
