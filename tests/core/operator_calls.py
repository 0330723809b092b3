# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Realistic calls of every operator, with the shapes their results have by the operators' contracts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)  # fmt: skip
from te_dispatch.ops.results import Saved
from te_dispatch.ops.shapes import empty_quantized

F32, BF16, U8 = torch.float32, torch.bfloat16, torch.uint8


@dataclass
class Call:
    """One call; `shapes`: of the tensors in its result, in order, None for a member that is not there."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: list[Any]

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(self.kwargs)})"


def quantizers(device: str) -> dict[str, Quantizer]:
    scale = torch.ones(1, device=device)
    return {
        "delayed": DelayedQuantizer("e4m3fn", scale=scale, amax=torch.zeros(1, device=device)),
        "current": CurrentQuantizer("e5m2"),
        "block_1d": BlockQuantizer("e4m3fn"),
        "block_2d": BlockQuantizer("e4m3fn", two_d=True),
        "mxfp8": MXFP8Quantizer("e4m3fn"),
        "nvfp4": NVFP4Quantizer(),
    }


def record(shape: tuple[int, ...], quantizer: Quantizer, usage: str, device: str) -> Quantized:
    """A record of zeros in real tensors, whatever `device` is."""
    like = empty_quantized(shape, quantizer, usage, BF16, torch.device(device))
    parts = [getattr(like, name) for name in Quantized.__slots__]
    return Quantized(*(part.zero_() if isinstance(part, torch.Tensor) else part for part in parts))


def flatten(result: Any) -> list[Any]:
    """Shapes of all tensors of a result; a `Quantized` gives its (row data, column data, row scales, column scales)."""
    if result is None:
        return [None]
    if isinstance(result, torch.Tensor):
        return [tuple(result.shape)]
    if isinstance(result, Quantized):
        parts = (result.row_data, result.col_data, result.row_scale_inv, result.col_scale_inv)
        return [tuple(None if part is None else tuple(part.shape) for part in parts)]
    if isinstance(result, Saved):
        return ["saved"]
    return [shape for part in result for shape in flatten(part)]


def calls(device: str) -> list[Call]:
    """Every operator at least once, with every optional argument given in some call and left out in another."""
    found: list[Call] = []

    def add(op: str, *args: Any, shapes: list[Any], **kwargs: Any) -> None:
        found.append(Call(op, args, kwargs, shapes))

    def t(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    _quantize(add, t, device)
    _gemm(add, t, device)
    _norm_and_activation(add, t, device)
    _attention(add, t, device)
    _position_and_softmax(add, t)
    _training(add, t)
    return found


def _quantize(add: Callable[..., None], t: Callable[..., torch.Tensor], device: str) -> None:
    q = quantizers(device)
    scales = {
        "delayed": ((1,), (1,)), "current": ((1,), (1,)),
        "block_1d": ((256, 2), (192, 2)), "block_2d": ((2, 2), (2, 2)),
        "mxfp8": ((256, 6), (8, 192)), "nvfp4": ((256, 12), (192, 16)),
    }  # fmt: skip
    for name, quantizer in q.items():
        rows = (2, 128, 96) if name == "nvfp4" else (2, 128, 192)
        columns = {"mxfp8": (256, 192), "nvfp4": (192, 128)}.get(name, (192, 256))
        add("quantize", t(2, 128, 192), quantizer, usage="both", shapes=[(rows, columns, *scales[name])])
        add("quantize", t(2, 128, 192), quantizer, usage="row", shapes=[(rows, None, scales[name][0], None)])
    x = t(256, 192)
    tensor = ((256, 192), (192, 256), (1,), (1,))
    row, column = (tensor[0], None, (1,), None), (None, tensor[1], None, (1,))
    add("quantize", x, q["current"], usage="column", shapes=[column])
    held = record((256, 192), q["current"], "row", device)
    more = {"out": held, "noop_flag": t(1, dtype=F32), "amax": t(1, dtype=F32), "rng_state": t(2, dtype=torch.int64)}
    add("quantize", x, q["current"], usage="row", **more, shapes=[row])
    add("quantize_dbias", x, q["delayed"], usage="both", bias_dtype=F32, shapes=[tensor, (192,)])
    add("quantize_dbias", x, q["delayed"], usage="row", shapes=[row, (192,)])
    add("dequantize", held, shapes=[(256, 192)])
    add("dequantize", record((256, 192), q["mxfp8"], "column", device), dtype=F32, shapes=[(256, 192)])
    add("transpose_quantized", held, shapes=[tensor])
    add("split_quantize", x, [0, 256], [q["delayed"], q["delayed"]], usage="row",
        shapes=[((0, 192), None, (1,), None), row])  # fmt: skip
    add("multi_tensor_quantize", [x, t(8, 16)], [q["current"]] * 2, usage="row",
        shapes=[row, ((8, 16), None, (1,), None)])  # fmt: skip
    add("compute_amax", x, shapes=[(1,)])
    add("compute_amax", x, out=t(1, dtype=F32), shapes=[(1,)])
    where = {"height": 256, "width": 192, "start": 7}
    add("partial_amax", t(1000), t(2, 2, dtype=F32), **where, block=128, shapes=[(2, 2)])
    add("partial_cast", t(1000), t(1000, dtype=U8), t(2, 2, dtype=F32), **where, block=128, encoding="e4m3fn",
        shapes=[(1000,)])  # fmt: skip
    add("update_delayed_scales", [t(16, 3, dtype=F32)], [t(3, dtype=F32)], [[448.0, 448.0, 57344.0]], shapes=[None])
    add("update_delayed_scales", [t(16, 1, dtype=F32)], [t(1, dtype=F32)], [[448.0]], algorithm="most_recent", margin=1,
        amaxes=[t(1, dtype=F32)], shapes=[None])  # fmt: skip
    add("convert_encoding", held, encoding="e5m2fnuz", shapes=[row])
    add("convert_encoding", held, encoding="e5m2fnuz", overflow="error", count=t(1, dtype=torch.int64), shapes=[row])
    add("pad_rows", x, [100, 156], [112, 160], shapes=[(272, 192)])
    add("unpad_rows", t(272, 192), [100, 156], [112, 160], shapes=[(256, 192)])


def _gemm(add: Callable[..., None], t: Callable[..., torch.Tensor], device: str) -> None:
    q = quantizers(device)
    a, b = t(2, 4, 32), t(48, 32)
    add("gemm", a, b, layout="NT", shapes=[(2, 4, 48), None, None])
    add("gemm", t(2, 4, 48), b, layout="NN", shapes=[(2, 4, 32), None, None])
    add("gemm", t(8, 48), t(8, 32), layout="TN", out=t(48, 32, dtype=F32), accumulate=True, epilogue="bgrad_a",
        shapes=[(48, 32), None, (48,)])  # fmt: skip
    add("gemm", t(8, 48), t(8, 32), layout="TN", epilogue="bgrad_b", alpha=2.0, shapes=[(48, 32), None, (32,)])
    add("gemm", a, b, layout="NT", bias=t(48), epilogue="gelu", out_dtype=F32, shapes=[(2, 4, 48), (2, 4, 48), None])
    fp8 = [record(shape, q["current"], "row", device) for shape in ((2, 4, 32), (48, 32))]
    row = ((2, 4, 48), None, (1,), None)
    add("gemm", *fp8, layout="NT", epilogue="gelu", aux_quantizer=q["current"], out_quantizer=q["delayed"],
        split_accumulator=True, shapes=[row, row, None])  # fmt: skip
    add("gemm", t(8, 48), b, layout="NN", epilogue="dgelu", aux=t(8, 32), shapes=[(8, 32), None, (32,)])
    add("gemm", t(8, 48), b, layout="NN", epilogue="dgelu", aux=record((8, 32), q["current"], "row", device),
        shapes=[(8, 32), None, (32,)])  # fmt: skip
    add("grouped_gemm", [t(8, 32), t(0, 32)], [b, b], layout="NT", shapes=[(8, 48), (0, 48)])
    add("grouped_gemm", [t(8, 32)], [b], None, layout="NT", out=[t(8, 48)], accumulate=True, bias=[t(48)],
        split_accumulator=False, shapes=[(8, 48)])  # fmt: skip
    add("grouped_gemm", [t(12, 32)], [b, b], [4, 8], layout="NT", shapes=[(4, 48), (8, 48)])
    add("grouped_gemm", [fp8[0]], [fp8[1]], layout="NT", out_dtype=F32, shapes=[(2, 4, 48)])


def _norm_and_activation(add: Callable[..., None], t: Callable[..., torch.Tensor], device: str) -> None:
    q, x, g, rows = quantizers(device), t(4, 2, 64), t(64), (4, 2)
    column = (None, (64, 8), None, (1,))
    full = {"residual": t(4, 2, 64), "quantizer": q["current"], "usage": "column", "zero_centered_gamma": True}
    add("layernorm_fwd", x, g, t(64), shapes=[(4, 2, 64), None, None, rows, rows])
    add("layernorm_fwd", x, g, None, shapes=[(4, 2, 64), None, None, rows, rows])
    add("layernorm_fwd", x, g, t(64), **full, with_y=True, out_dtype=F32, eps=1e-6,
        shapes=[(4, 2, 64), column, (4, 2, 64), rows, rows])  # fmt: skip
    add("rmsnorm_fwd", x, g, shapes=[(4, 2, 64), None, None, None, rows])
    add(
        "rmsnorm_fwd",
        x,
        g,
        **full,
        eps=1e-6,
        with_y=True,
        out_dtype=F32,
        shapes=[(4, 2, 64), column, (4, 2, 64), None, rows],
    )
    r = t(4, 2, dtype=F32)
    for more in ({}, {"add": x, "zero_centered_gamma": True}):
        add("layernorm_bwd", x, x, g, r, r, **more, shapes=[(4, 2, 64), (64,), (64,)])
        add("rmsnorm_bwd", x, x, g, r, **more, shapes=[(4, 2, 64), (64,), None])
    add("activation_fwd", x, kind="gelu", shapes=[(4, 2, 64), None])
    add("activation_fwd", x, kind="clamped_swiglu", params=(7.0, 1.702), quantizer=q["current"], usage="column",
        with_out=True, out_dtype=F32, shapes=[(4, 2, 32), (None, (32, 8), None, (1,))])  # fmt: skip
    add("activation_fwd", record((4, 2, 64), q["current"], "row", device), kind="swiglu", shapes=[(4, 2, 32), None])
    add("activation_bwd", x, x, kind="gelu", shapes=[(4, 2, 64), None, None])
    add("activation_bwd", t(4, 2, 32), x, kind="clamped_swiglu", params=(5.0, 1.5), quantizer=q["current"],
        usage="column", with_dx=True,
        with_dbias=True, shapes=[(4, 2, 64), column, (64,)])  # fmt: skip


def _attention(add: Callable[..., None], t: Callable[..., torch.Tensor], device: str) -> None:
    q = quantizers(device)
    i32 = {"dtype": torch.int32}
    x, kv = t(6, 2, 4, 8), t(6, 2, 2, 8)
    lse = (2, 4, 6)
    add("attention_fwd", x, kv, kv, shapes=[(6, 2, 4, 8), lse, None, "saved"])
    add("attention_fwd", t(2, 6, 4, 8), t(2, 6, 2, 8), t(2, 6, 2, 16), layout="bshd", mask="arbitrary",
        attn_mask=t(1, 1, 6, 6, dtype=torch.bool), bias=t(1, 4, 6, 6), bias_type="post_scale", inference=True,
        with_max_logit=True, softmax_scale=0.5, softcap=30.0, out_dtype=F32,
        shapes=[(2, 6, 4, 16), None, (4,), None])  # fmt: skip
    lengths = {
        name: t(3, **i32) for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    }
    thd = {
        "layout": "thd",
        "mask": "padding_causal",
        **lengths,
        "max_seqlen_q": 6,
        "max_seqlen_kv": 6,
        "packing": "3hd",
    }
    dropped = {"dropout_p": 0.1, "rng_state": t(2, dtype=torch.int64), "window": (128, 0), "deterministic": True}
    add(
        "attention_fwd",
        t(12, 4, 8),
        t(12, 4, 8),
        t(12, 4, 8),
        **thd,
        **dropped,
        shapes=[(12, 4, 8), (12, 4), None, "saved"],
    )
    add("attention_fwd", t(6, 4, 8), t(32, 16, 2, 8), t(32, 16, 2, 8), layout="thd", mask="padding", inference=True,
        cu_seqlens_q=t(3, **i32), page_table=t(2, 16, **i32), shapes=[(6, 4, 8), None, None, None])  # fmt: skip
    sink = {"softmax_type": "learnable", "softmax_offset": t(4, dtype=F32)}
    fp8 = [record(shape, q["current"], "row", device) for shape in ((6, 2, 4, 8), (6, 2, 4, 8), (6, 2, 4, 8))]
    row = ((6, 2, 4, 8), None, (1,), None)
    add("attention_fwd", *fp8, **sink, alibi_slopes=t(4, dtype=F32), bias_type="alibi", s_quantizer=q["delayed"],
        out_quantizer=q["current"], shapes=[row, lse, None, "saved"])  # fmt: skip
    saved = Saved("acme.flash", "acme")
    stats = t(2, 4, 6, dtype=F32)
    add("attention_bwd", x, x, kv, kv, x, stats, saved, shapes=[(6, 2, 4, 8), (6, 2, 2, 8), (6, 2, 2, 8), None, None])
    add("attention_bwd", x, x, kv, kv, x, stats, saved, **sink, mask="arbitrary", softmax_scale=0.5, softcap=30.0,
         window=(-1, -1), packing="2hd",
        attn_mask=t(1, 1, 6, 6, dtype=torch.bool), bias=t(1, 4, 6, 6), bias_type="pre_scale", with_dbias=True,
        shapes=[(6, 2, 4, 8), (6, 2, 2, 8), (6, 2, 2, 8), (1, 4, 6, 6), (4,)])  # fmt: skip
    add("attention_bwd", fp8[0], *fp8, fp8[0], stats, saved, alibi_slopes=t(4, dtype=F32), bias_type="alibi",
        s_quantizer=q["delayed"], dp_quantizer=q["delayed"],
        dqkv_quantizer=q["current"], shapes=[row, row, row, None, None])  # fmt: skip
    thd_operands = [t(12, 4, 8)] * 5
    add("attention_bwd", *thd_operands, t(12, 4, dtype=F32), saved, **thd, **dropped,
        shapes=[(12, 4, 8), (12, 4, 8), (12, 4, 8), None, None])  # fmt: skip


def _position_and_softmax(add: Callable[..., None], t: Callable[..., torch.Tensor]) -> None:
    for op in ("rope_fwd", "rope_bwd"):
        add(op, t(6, 2, 4, 8), t(6, 1, 1, 8, dtype=F32), shapes=[(6, 2, 4, 8)])
        add(op, t(12, 4, 8), t(6, 1, 1, 4, dtype=F32), layout="thd", interleaved=True,
            cu_seqlens=t(3, dtype=torch.int32), offsets=t(2, dtype=torch.int32), shapes=[(12, 4, 8)])  # fmt: skip
    add("softmax_fwd", t(2, 4, 6, 6), shapes=[(2, 4, 6, 6)])
    add("softmax_fwd", t(2, 4, 6, 6), t(1, 1, 6, 6, dtype=torch.bool), scale=0.5, causal=True, out_dtype=F32,
        shapes=[(2, 4, 6, 6)])  # fmt: skip
    add("softmax_bwd", t(2, 4, 6, 6), t(2, 4, 6, 6), shapes=[(2, 4, 6, 6)])
    add("softmax_bwd", t(2, 4, 6, 6), t(2, 4, 6, 6), scale=0.5, out_dtype=F32, shapes=[(2, 4, 6, 6)])


def _training(add: Callable[..., None], t: Callable[..., torch.Tensor]) -> None:
    x = t(4, 64)
    add("dropout_add_fwd", x, shapes=[(4, 64), None])
    add(
        "dropout_add_fwd", x, x, bias=t(64), dropout_p=0.1, rng_state=t(2, dtype=torch.int64), shapes=[(4, 64), (4, 64)]
    )
    add("dropout_add_bwd", x, shapes=[(4, 64)])
    add("dropout_add_bwd", x, t(4, 64, dtype=U8), dropout_p=0.1, shapes=[(4, 64)])
    moments = [[t(4, 64, dtype=F32)] for _ in range(2)]
    add("multi_tensor_adam", [x], [x], *moments, lr=1e-3, shapes=[None])
    add("multi_tensor_adam", [x], [x], *moments, lr=1e-3, beta1=0.8, beta2=0.9, eps=1e-7, step=3, weight_decay=0.1,
        adam_w=False, bias_correction=False, master=moments[0], noop_flag=t(1, dtype=F32), shapes=[None])  # fmt: skip
    add("multi_tensor_l2norm", [x, x], shapes=[(1,)])
    add("multi_tensor_l2norm", [x, x], per_tensor=True, shapes=[(2,)])
    add("multi_tensor_scale", [x], [x], 0.5, shapes=[None])
    add("multi_tensor_scale", [x], [x], 0.5, noop_flag=t(1, dtype=F32), shapes=[None])
    indices = t(4, 2, dtype=torch.int32)
    add("moe_permute", x, indices, shapes=[(8, 64), (4, 2), None])
    add("moe_permute", x, indices, probs=t(4, 2, dtype=F32), capacity=6, shapes=[(6, 64), (4, 2), (6,)])
    for more in ({}, {"probs": t(4, 2, dtype=F32)}):
        add("moe_unpermute", t(8, 64), indices, **more, shapes=[(4, 64)])
        add("moe_unpermute_bwd", x, t(8, 64), indices, **more, shapes=[(8, 64), (4, 2) if more else None])
