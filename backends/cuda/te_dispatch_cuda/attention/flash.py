# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention on the FlashAttention packages, where they are installed. Contract: `te_dispatch.ops.attention`.

Their diagonals end in the bottom right corner, their queries and keys are (b, s, h, d) or packed (t, h, d) without
gaps, in rows that start at multiples of 16 bytes, and their dropout draws from a generator. What lies otherwise is
copied; what else differs the manifest keeps away, or `require_same_diagonal`. They allocate results and workspace
themselves, through PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from te_dispatch.backend_kit.attention import attention_backward, attention_forward, empty_gradients
from te_dispatch.backend_kit.flash import batch_first, flash_options, require_same_diagonal
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_cuda.attention.flash_packages import FOUR, THREE, TWO, Package
from te_dispatch_cuda.attention.rows import Sequences, batch_of, dense_lengths, rows
from te_dispatch_cuda.memory import address, stream_of


def _mend_forward(out: torch.Tensor, lse: torch.Tensor | None, s: AttentionSpec, t: AttentionTensors) -> None:
    """Rows behind the last sequence, and rows that see nothing."""
    of = rows(tuple(out.shape), out.stride(), "thd", out.element_size())
    lengths = dense_lengths(t)
    stream = stream_of(s.device.index)
    Sequences(s, ()).mend_forward(stream, batch_of(s, *lengths), out.data_ptr(), of, address(lse))


def _forward(package: Package) -> Callable[..., AttentionForward]:
    @attention_forward
    def attention_fwd(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        spec: AttentionSpec,
        tensors: AttentionTensors,
        inference: bool,
        with_max_logit: bool,
        s_quantizer: Quantizer | None,
        out_quantizer: Quantizer | None,
        out_dtype: torch.dtype | None,
    ) -> AttentionForward:
        """The package's forward; the log-sum-exp as the package wants it back stays in `saved`."""
        layout, thd = spec.layout, spec.layout == "thd"
        if 0 in (*q.shape, *k.shape, *v.shape):
            raise Declined(f"{package.name} takes no dimension of 0")
        if thd and not inference and q.shape[-1] % package.ragged_multiple:
            raise Declined(
                f"{package.name} gives wrong gradients of packed sequences unless the head dimension is a multiple of "
                f"{package.ragged_multiple}, got {q.shape[-1]}"
            )
        if package.equal_heads and v.shape[-1] != q.shape[-1]:
            raise Declined(f"{package.name} needs equal head dimensions, got {q.shape[-1]} and {v.shape[-1]}")
        require_same_diagonal(spec, tensors, package.name)
        o = flash_options(spec, tensors, package.name)
        out, own = package.forward(batch_first(q, layout), batch_first(k, layout), batch_first(v, layout), o)
        lse = None if inference else (own.t().contiguous() if thd else own[..., : out.shape[1]])
        if lse is not None and not thd and o.sees_nothing(out.shape[1], k.shape[0 if layout == "sbhd" else 1]):
            lse = lse.masked_fill(lse == torch.inf, -torch.inf)  # as FlashAttention 2 has them
        if thd:
            _mend_forward(out, lse, spec, tensors)
        out = out.transpose(0, 1).contiguous() if layout == "sbhd" else out
        if inference:
            return AttentionForward(out, None, None, None)
        return AttentionForward(out, lse, None, Saved(f"cuda.{package.name}", package.format, (own,)))

    return attention_fwd


def _backward(package: Package) -> Callable[..., AttentionBackward]:
    @attention_backward
    def attention_bwd(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        saved: Saved,
        spec: AttentionSpec,
        tensors: AttentionTensors,
        s_quantizer: Quantizer | None,
        dp_quantizer: Quantizer | None,
        dqkv_quantizer: Quantizer | None,
        with_dbias: bool,
    ) -> AttentionBackward:
        """The package's backward."""
        layout = spec.layout
        o = flash_options(spec, tensors, package.name)
        gradients = empty_gradients(spec, spec.dtype)
        package.backward(
            *(batch_first(x, layout) for x in (dout, q, k, v, out)), saved.tensors[0], o,
            tuple(x.transpose(0, 1) if layout == "sbhd" else x for x in gradients),
        )  # fmt: skip
        if layout == "thd":
            of = tuple(rows(tuple(x.shape), x.stride(), "thd", x.element_size()) for x in gradients)
            lengths = dense_lengths(tensors)
            dq, dk, dv = (x.data_ptr() for x in gradients)
            stream = stream_of(spec.device.index)
            Sequences(spec, ()).mend_backward(stream, batch_of(spec, *lengths), (dq, dk, dv), of)  # type: ignore[arg-type]
        return AttentionBackward(*gradients, None, None)

    return attention_bwd


two_fwd, two_bwd = _forward(TWO), _backward(TWO)
three_fwd, three_bwd = _forward(THREE), _backward(THREE)
four_fwd, four_bwd = _forward(FOUR), _backward(FOUR)
