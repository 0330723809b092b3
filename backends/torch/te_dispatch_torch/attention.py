# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""PyTorch's fused scaled dot-product attention, forward and its real backward. Contract: `te_dispatch.ops.attention`.

`scaled_dot_product_attention` hides its log-sum-exp and its backward, so the kernels below it are called in pairs. They
serve dense layouts with no mask or a causal one. None draws dropout from an `rng_state`, so none is used with dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.attention import attention_backward, attention_forward
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_torch.sequences import from_per_head, pack, per_head

_ATEN = torch.ops.aten


class Kernel(NamedTuple):
    """A pair of PyTorch operators, on (b, h, s, d).

    Attributes:
        name: of the implementation. native_groups: reads fewer key heads than query heads.
        causal_any: its causal mask starts at the first column for any s_q and s_kv.
        lone_query: has a backward for a single query and key. batches: serves so many at most.
        forward: (q, k, v, causal, scale) -> out, lse, tensors for the backward, options for it.
        backward: (dout, q, k, v, out, tensors, options, causal, scale) -> dq, dk, dv.
    """

    name: str
    native_groups: bool
    causal_any: bool
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, tuple[Any, ...], Any]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    lone_query: bool = True
    batches: float = math.inf

    @property
    def format(self) -> str:
        return f"torch.{self.name}/1"


def _cpu_forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse, (lse,), None


def _cpu_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, saved: Any, _: Any, causal: bool, scale: float) -> Any:
    # In fp32: with 16-bit operands the kernel adds the parts of its gradients in 16 bits, one for each block of queries
    # or keys. With fp16 it is ten times slower than this on processors without such units, with bf16 as fast.
    dout, q, k, v, out = (x.float() for x in (dout, q, k, v, out))
    return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, saved[0], 0.0, causal, scale=scale
    )


def _flash_forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    out, lse, cum_q, cum_k, max_q, max_k, rng, unused, _ = _ATEN._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse, (lse, cum_q, cum_k, rng, unused), (max_q, max_k)


def _flash_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, saved: Any, o: Any, causal: bool, scale: float) -> Any:
    lse, cum_q, cum_k, rng, unused = saved
    return _ATEN._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, cum_q, cum_k, o[0], o[1], 0.0, causal, rng, unused, scale=scale
    )


def _cudnn_forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = _ATEN._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    visible = lse.squeeze(-1) if lse.dim() == 4 else lse
    return out, visible, (lse, cum_q, cum_k, seed, offset), (max_q, max_k)


def _cudnn_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, saved: Any, o: Any, causal: bool, scale: float) -> Any:
    lse, cum_q, cum_k, seed, offset = saved
    # PyTorch finds the graph that it made for an earlier call by the strides of q, k and v alone (measured: PyTorch
    # 2.11, cuDNN 9.19, H200: wrong gradients where those of dout are others than they were then).
    dout, out = _ordered_like(q, dout), _ordered_like(q, out)
    return _ATEN._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse, seed, offset, None, cum_q, cum_k, o[0], o[1], 0.0, causal, scale=scale
    )


def _ordered_like(q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x without gaps, its dimensions in memory in the order of q's, features last: itself, or a copy."""
    last = q.dim() - 1
    order = [*sorted(range(last), key=q.stride, reverse=True), last]
    back = [order.index(dim) for dim in range(q.dim())]
    return x.permute(order).contiguous().permute(back)


def _efficient_forward(q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
    out, lse, seed, offset = _ATEN._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    # The kernel pads its rows; its backward wants them padded.
    return out, lse[..., : q.shape[2]], (lse, seed, offset), None


def _efficient_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, saved: Any, _: Any, causal: bool, scale: float
) -> Any:
    lse, seed, offset = saved
    # For 16-bit operands the kernel reads `out` as the forward laid it out, (b, s, h, d), whatever its strides say.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv, _bias = _ATEN._scaled_dot_product_efficient_attention_backward(
        dout, q, k, v, None, out, lse, seed, offset, 0.0, [True, True, True, False], causal, scale=scale
    )
    return dq, dk, dv


def _check(kernel: Kernel, spec: AttentionSpec) -> None:
    """Raises:
    Declined: what the manifest's conditions cannot say.
    """
    layout, mask = spec.layout, spec.mask
    if layout not in ("sbhd", "bshd") or mask not in ("none", "causal"):
        raise Declined(
            f"{kernel.name} serves layouts sbhd and bshd with masks none and causal, got {layout} and {mask}"
        )
    if not spec.scale > 0:
        # It looks for the largest logit before it scales: -Inf of a masked key times 0 is NaN.
        raise Declined(f"{kernel.name} needs a positive softmax_scale, got {spec.softmax_scale}")
    if spec.v_shape[-1] != spec.q_shape[-1]:
        raise Declined(f"{kernel.name} needs equal head dimensions, got {spec.q_shape[-1]} and {spec.v_shape[-1]}")
    sequence = 0 if layout == "sbhd" else 1
    sq, skv = spec.q_shape[sequence], spec.k_shape[sequence]
    if sq == skv == 1 and not kernel.lone_query:
        raise Declined(f"{kernel.name} has no backward for a single query and key")
    if spec.batch > kernel.batches:
        raise Declined(f"{kernel.name} serves batches up to {kernel.batches}, got {spec.batch}")
    if mask == "causal" and sq != skv and not kernel.causal_any:
        raise Declined(f"{kernel.name} aligns a causal mask of {sq} x {skv} otherwise")


def _empty(spec: AttentionSpec) -> bool:
    """Whether a dimension is 0: the CPU kernel divides by such a size, and the others launch no blocks for it."""
    return 0 in spec.q_shape or 0 in spec.k_shape


#: Bytes that the GPU kernels load at once. Where rows do not start at a multiple of it they fault, find no kernel, or
#: give NaN; `scaled_dot_product_attention` keeps such operands from them.
_ALIGNMENT = 16


def _heads(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(b, h, s, d) as the kernels take it for granted: features beside each other, rows aligned; else a copy."""
    x = per_head(x, layout)
    if x.stride(-1) == 1 and (x.device.type == "cpu" or _aligned(x)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _aligned(x: torch.Tensor) -> bool:
    # Not the address, which fake tensors lack: memory itself is aligned, only views into it may not be.
    elements = _ALIGNMENT // x.element_size()
    return not any(start % elements for start in (x.storage_offset(), *x.stride()[:-1]))


def _expanded(x: torch.Tensor, spec: AttentionSpec, kernel: Kernel) -> torch.Tensor:
    """One key head per query head, for kernels that need it."""
    heads, groups = spec.q_shape[-2], spec.k_shape[-2]
    return x if kernel.native_groups or groups == heads else x.repeat_interleave(heads // groups, 1)


def _shared(grad: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum over the heads that share a group, in fp32."""
    if grad.shape[1] == groups:
        return grad
    return grad.unflatten(1, (groups, -1)).sum(2, dtype=torch.float32).to(grad.dtype)


def _forward(kernel: Kernel) -> Callable[..., AttentionForward]:
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
        """Dense, none or causal; the manifest keeps every other option away."""
        _check(kernel, spec)
        layout = spec.layout
        if _empty(spec):  # no row sees a key
            out = q.new_zeros(spec.out_shape, dtype=out_dtype or q.dtype)
            lse = q.new_full(spec.lse_shape, -math.inf, dtype=torch.float32)
            saved = Saved(f"torch.{kernel.name}", kernel.format)
            return AttentionForward(out, None if inference else lse, None, None if inference else saved)
        qh, kh, vh = _heads(q, layout), _heads(k, layout), _heads(v, layout)
        kh, vh = _expanded(kh, spec, kernel), _expanded(vh, spec, kernel)
        out, lse, kept, options = kernel.forward(qh, kh, vh, spec.mask == "causal", spec.scale)
        out = from_per_head(out, layout).to(out_dtype or q.dtype)
        if inference:
            return AttentionForward(out, None, None, None)
        saved = Saved(f"torch.{kernel.name}", kernel.format, kept, options)
        return AttentionForward(out, lse.contiguous(), None, saved)

    return attention_fwd


def _backward(kernel: Kernel) -> Callable[..., AttentionBackward]:
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
        """The forward kernel's own backward."""
        layout, packing = spec.layout, spec.packing
        if _empty(spec):
            none = pack([x.new_zeros(x.shape) for x in (q, k, v)], packing)
            return AttentionBackward(none[0], none[1], none[2], None, None)
        qh, kh, vh = _heads(q, layout), _heads(k, layout), _heads(v, layout)
        kh, vh = _expanded(kh, spec, kernel), _expanded(vh, spec, kernel)
        dtype, groups = spec.dtype, spec.k_shape[-2]
        doh, outh = _heads(dout.to(dtype), layout), _heads(out.to(dtype), layout)
        dq, dk, dv = kernel.backward(
            doh, qh, kh, vh, outh, saved.tensors, saved.options, spec.mask == "causal", spec.scale
        )
        grads = [from_per_head(x.to(dtype), layout) for x in (dq, _shared(dk, groups), _shared(dv, groups))]
        grads = pack(grads, packing)
        return AttentionBackward(grads[0], grads[1], grads[2], None, None)

    return attention_bwd


# PyTorch expands groups itself before the CPU and the memory-efficient kernels.
CPU = Kernel("sdpa_cpu", False, True, _cpu_forward, _cpu_backward)
# The most blocks of a CUDA grid in its second and third dimension: PyTorch's flash kernel has the batch in the second,
# and cuDNN 9.19 launches no more either (H100).
_BATCHES = 65535
FLASH = Kernel("sdpa_flash", True, False, _flash_forward, _flash_backward, batches=_BATCHES)
CUDNN = Kernel("sdpa_cudnn", False, False, _cudnn_forward, _cudnn_backward, lone_query=False, batches=_BATCHES)
EFFICIENT = Kernel("sdpa_efficient", False, True, _efficient_forward, _efficient_backward)
# On ROCm PyTorch gives both to AOTriton. Names of their own, because there they are the vendor's library.
AOTRITON_FLASH = FLASH._replace(name="sdpa_aotriton_flash")
AOTRITON_EFFICIENT = EFFICIENT._replace(name="sdpa_aotriton_efficient")

cpu_fwd, cpu_bwd = _forward(CPU), _backward(CPU)
flash_fwd, flash_bwd = _forward(FLASH), _backward(FLASH)
cudnn_fwd, cudnn_bwd = _forward(CUDNN), _backward(CUDNN)
efficient_fwd, efficient_bwd = _forward(EFFICIENT), _backward(EFFICIENT)
aotriton_flash_fwd, aotriton_flash_bwd = _forward(AOTRITON_FLASH), _backward(AOTRITON_FLASH)
aotriton_efficient_fwd, aotriton_efficient_bwd = _forward(AOTRITON_EFFICIENT), _backward(AOTRITON_EFFICIENT)
