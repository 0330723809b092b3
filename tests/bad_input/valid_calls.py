# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""One valid call or more of every operator, with real data, to be spoilt one argument at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import te_dispatch
from te_dispatch import ops
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)

F32, BF16, U8, I32, I64 = torch.float32, torch.bfloat16, torch.uint8, torch.int32, torch.int64
Arguments = dict[str, Any]


def randn(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def ints(*values: int, dtype: torch.dtype = I32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def delayed() -> DelayedQuantizer:
    return DelayedQuantizer(scale=torch.full((1,), 2.0), amax=torch.zeros(1))


def record(*shape: int, quantizer: Quantizer | None = None, usage: str = "both") -> Quantized:
    with te_dispatch.using(quantize="torch"):
        return ops.quantize(randn(*shape), quantizer or CurrentQuantizer(), usage=usage)


def _cast(quantizer: Callable[[], Quantizer], **more: Any) -> Callable[[], Arguments]:
    return lambda: {"x": randn(16, 32), "quantizer": quantizer(), "usage": "both"} | more


def _gemm(layout: str, **more: Callable[[], Any]) -> Callable[[], Arguments]:
    shapes = {"NT": ((6, 16), (8, 16)), "NN": ((6, 16), (16, 8)), "TN": ((16, 6), (16, 8))}[layout]
    base: dict[str, Callable[[], Any]] = {"a": lambda: randn(*shapes[0]), "b": lambda: randn(*shapes[1])}
    return lambda: {"layout": layout} | {name: make() for name, make in (base | more).items()}


def _fp8_gemm(quantizer: Callable[[], Quantizer]) -> Callable[[], Arguments]:
    return lambda: {
        "a": record(16, 32, quantizer=quantizer()), "b": record(32, 32, quantizer=quantizer()), "layout": "NT",
        "out": randn(16, 32), "accumulate": True, "bias": randn(32),
    }  # fmt: skip


def _attention(layout: str = "sbhd", **more: Callable[[], Any]) -> Callable[[], Arguments]:
    shape = {"sbhd": (6, 2, 4, 8), "bshd": (2, 6, 4, 8), "thd": (12, 4, 8)}[layout]
    kv = (*shape[:-2], 2, 8)

    def make() -> Arguments:
        qkv = {"q": randn(*shape), "k": randn(*kv), "v": randn(*kv), "layout": layout}
        return qkv | {name: value() for name, value in more.items()}

    return make


def _attention_backward(**more: Callable[[], Any]) -> Callable[[], Arguments]:
    """With what the reference's forward gave; the test replaces `saved` by its backend's own."""

    def make() -> Arguments:
        call = _attention(**more)()
        return {"dout": randn(6, 2, 4, 8), **call, "out": randn(6, 2, 4, 8), "lse": randn(2, 4, 6), "saved": None}

    return make


def _thd() -> dict[str, Callable[[], Any]]:
    given = {f"cu_seqlens_{side}": lambda: ints(0, 5, 12) for side in ("q", "kv", "q_padded", "kv_padded")}
    return {**given, "mask": lambda: "padding_causal", "max_seqlen_q": lambda: 7, "max_seqlen_kv": lambda: 7}


def _moments() -> Arguments:
    lists: Arguments = {name: [randn(4, 8), randn(3)] for name in ("params", "grads", "exp_avgs")}
    return lists | {"exp_avg_sqs": [randn(4, 8).abs(), randn(3).abs()], "lr": 0.1}


def _shard() -> Arguments:
    return {"x": randn(100), "height": 130, "width": 20, "start": 50, "block": 128}


CALLS: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "quantize delayed": ("quantize", _cast(delayed)),
    "quantize current": ("quantize", _cast(CurrentQuantizer)),
    "quantize current with amax": ("quantize", lambda: _cast(CurrentQuantizer)() | {"amax": torch.full((1,), 3.0)}),
    "quantize into": (
        "quantize",
        lambda: _cast(delayed)() | {"out": record(16, 32), "noop_flag": torch.zeros(1)},
    ),
    "quantize block_1d": ("quantize", _cast(BlockQuantizer)),
    "quantize block_2d": ("quantize", _cast(lambda: BlockQuantizer(two_d=True))),
    "quantize mxfp8": ("quantize", _cast(MXFP8Quantizer)),
    "quantize nvfp4": ("quantize", _cast(NVFP4Quantizer)),
    "quantize_dbias": ("quantize_dbias", lambda: _cast(delayed)() | {"bias_dtype": F32}),
    "dequantize": ("dequantize", lambda: {"x": record(16, 32), "dtype": BF16}),
    "dequantize mxfp8": ("dequantize", lambda: {"x": record(16, 32, quantizer=MXFP8Quantizer())}),
    "dequantize nvfp4": ("dequantize", lambda: {"x": record(16, 32, quantizer=NVFP4Quantizer())}),
    "transpose_quantized": ("transpose_quantized", lambda: {"x": record(16, 32, usage="row")}),
    "relayout_scales": (
        "relayout_scales",
        lambda: {"x": record(16, 32, quantizer=BlockQuantizer()), "scale_layout": "gemm_1d"},
    ),
    "split_quantize": (
        "split_quantize",
        lambda: {"x": randn(16, 32), "splits": [6, 0, 10], "quantizers": [delayed() for _ in range(3)], "usage": "row"},
    ),
    "multi_tensor_quantize": (
        "multi_tensor_quantize",
        lambda: {"xs": [randn(16, 32), randn(8)], "quantizers": [delayed(), delayed()], "usage": "both"},
    ),
    "compute_amax": ("compute_amax", lambda: {"x": randn(16, 32), "out": torch.zeros(1)}),
    "partial_amax": ("partial_amax", lambda: _shard() | {"amax": torch.zeros(2, 1)}),
    "partial_cast": (
        "partial_cast",
        lambda: _shard() | {"out": torch.zeros(100, dtype=U8), "scale": torch.ones(2, 1), "encoding": "e4m3fn"},
    ),
    "update_delayed_scales": (
        "update_delayed_scales",
        lambda: {
            "histories": [randn(4, 2).abs(), randn(4, 1).abs()], "scales": [torch.ones(2), torch.ones(1)],
            "max_values": [[448.0, 57344.0], [448.0]], "algorithm": "max", "margin": 0,
            "amaxes": [torch.zeros(2), torch.zeros(1)],
        },
    ),
    "convert_encoding": (
        "convert_encoding",
        lambda: {"x": record(16, 32), "encoding": "e4m3fnuz", "overflow": "saturate", "count": ints(0, dtype=I64)},
    ),
    "pad_rows": ("pad_rows", lambda: {"x": randn(9, 4), "splits": [4, 0, 5], "padded_splits": [16, 0, 16]}),
    "unpad_rows": ("unpad_rows", lambda: {"x": randn(32, 4), "splits": [4, 0, 5], "padded_splits": [16, 0, 16]}),
    "gemm NT": ("gemm", _gemm("NT", bias=lambda: randn(8), alpha=lambda: 2.0, out_dtype=lambda: BF16)),
    "gemm NN": ("gemm", _gemm("NN", out=lambda: randn(6, 8), accumulate=lambda: True)),
    "gemm TN": ("gemm", _gemm("TN", epilogue=lambda: "bgrad_a", out=lambda: randn(6, 8))),
    "gemm gelu": ("gemm", _gemm("NT", epilogue=lambda: "gelu", aux_quantizer=delayed, out_quantizer=delayed)),
    "gemm dgelu": ("gemm", _gemm("NN", epilogue=lambda: "dgelu", aux=lambda: randn(6, 8))),
    "gemm fp8": ("gemm", _fp8_gemm(CurrentQuantizer)),
    "gemm mxfp8": ("gemm", _fp8_gemm(MXFP8Quantizer)),
    "grouped_gemm": (
        "grouped_gemm",
        lambda: {"a": [randn(4, 8), randn(3, 8)], "b": [randn(6, 8), randn(6, 8)], "layout": "NT",
                 "bias": [randn(6), randn(6)], "out": [randn(4, 6), randn(3, 6)], "accumulate": True},
    ),
    "grouped_gemm split": (
        "grouped_gemm",
        lambda: {"a": [randn(7, 8)], "b": [randn(6, 8), randn(6, 8)], "splits": [4, 3], "layout": "NT"},
    ),
    "grouped_gemm split by tensor": (
        "grouped_gemm",
        lambda: {"a": [randn(7, 8)], "b": [randn(6, 8)] * 2, "splits": ints(4, 3, dtype=I64), "layout": "NT"},
    ),
    "layernorm_fwd": (
        "layernorm_fwd",
        lambda: {"x": randn(2, 3, 8), "gamma": randn(8), "beta": randn(8), "eps": 1e-5, "residual": randn(2, 3, 8),
                 "quantizer": delayed(), "usage": "both", "with_y": True, "out_dtype": BF16},
    ),
    "rmsnorm_fwd": ("rmsnorm_fwd", lambda: {"x": randn(2, 3, 8), "gamma": randn(8), "residual": randn(2, 3, 8)}),
    "layernorm_bwd": (
        "layernorm_bwd",
        lambda: {"dy": randn(2, 3, 8), "x": randn(2, 3, 8), "gamma": randn(8), "mean": randn(2, 3),
                 "rstd": randn(2, 3).abs(), "add": randn(2, 3, 8)},
    ),
    "rmsnorm_bwd": (
        "rmsnorm_bwd",
        lambda: {"dy": randn(2, 3, 8), "x": randn(2, 3, 8), "gamma": randn(8), "rstd": randn(2, 3).abs()},
    ),
    "activation_fwd": ("activation_fwd", lambda: {"x": randn(4, 8), "kind": "gelu", "out_dtype": BF16}),
    "activation_fwd gated": (
        "activation_fwd",
        lambda: {"x": randn(4, 8), "kind": "clamped_swiglu", "params": (5.0, 1.5), "quantizer": delayed()},
    ),
    "activation_fwd fp8": ("activation_fwd", lambda: {"x": record(4, 8), "kind": "swiglu"}),
    "activation_bwd": (
        "activation_bwd",
        lambda: {"dy": randn(4, 4), "x": randn(4, 8), "kind": "swiglu", "quantizer": delayed(), "with_dbias": True},
    ),
    "softmax_fwd": (
        "softmax_fwd",
        lambda: {"x": randn(2, 4, 5), "mask": randn(1, 4, 5) > 0, "scale": 0.5, "causal": True, "out_dtype": BF16},
    ),
    "softmax_bwd": ("softmax_bwd", lambda: {"dy": randn(2, 4, 5), "y": randn(2, 4, 5).softmax(-1), "scale": 0.5}),
    "rope_fwd": ("rope_fwd", lambda: {"x": randn(5, 2, 3, 8), "freqs": randn(6, 1, 1, 6), "offsets": ints(0, 1)}),
    "rope_fwd thd": (
        "rope_fwd",
        lambda: {"x": randn(5, 3, 8), "freqs": randn(6, 1, 1, 6), "layout": "thd", "cu_seqlens": ints(0, 2, 5)},
    ),
    "rope_bwd": ("rope_bwd", lambda: {"dy": randn(5, 2, 3, 8), "freqs": randn(6, 1, 1, 6), "interleaved": True}),
    "attention_fwd": ("attention_fwd", _attention(softmax_scale=lambda: 0.5)),
    "attention_fwd options": (
        "attention_fwd",
        _attention(
            "bshd", mask=lambda: "arbitrary", attn_mask=lambda: randn(2, 1, 6, 6) > 1, bias=lambda: randn(1, 4, 6, 6),
            bias_type=lambda: "post_scale", softcap=lambda: 30.0, softmax_type=lambda: "learnable",
            softmax_offset=lambda: randn(4), window=lambda: (3, 3), with_max_logit=lambda: True,
            s_quantizer=delayed, out_quantizer=delayed,
        ),
    ),
    "attention_fwd thd": ("attention_fwd", _attention("thd", **_thd())),
    "attention_fwd padding": (
        "attention_fwd",
        _attention(mask=lambda: "padding", cu_seqlens_q=lambda: ints(0, 4, 10), cu_seqlens_kv=lambda: ints(0, 4, 10),
                   bias_type=lambda: "alibi", alibi_slopes=lambda: randn(4).abs()),
    ),
    "attention_fwd paged": (
        "attention_fwd",
        lambda: {"q": randn(2, 6, 4, 8), "k": randn(5, 4, 2, 8), "v": randn(5, 4, 2, 8), "layout": "bshd",
                 "mask": "padding", "page_table": torch.tensor([[0, 3], [2, 4]], dtype=I32), "inference": True,
                 "cu_seqlens_q": ints(0, 6, 12), "cu_seqlens_kv": ints(0, 8, 13)},
    ),
    "attention_bwd": ("attention_bwd", _attention_backward()),
    "attention_bwd options": (
        "attention_bwd",
        _attention_backward(bias=lambda: randn(1, 4, 6, 6), bias_type=lambda: "pre_scale", with_dbias=lambda: True,
                            dqkv_quantizer=delayed, dp_quantizer=delayed),
    ),
    "dropout_add_fwd": (
        "dropout_add_fwd",
        lambda: {"x": randn(4, 8), "residual": randn(4, 8), "bias": randn(8), "dropout_p": 0.5,
                 "rng_state": ints(1, 2, dtype=I64)},
    ),
    "dropout_add_bwd": (
        "dropout_add_bwd",
        lambda: {"dy": randn(4, 8), "mask": (randn(4, 8) > 0).to(U8), "dropout_p": 0.5},
    ),
    "multi_tensor_adam": (
        "multi_tensor_adam",
        lambda: _moments() | {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "step": 2, "weight_decay": 0.1,
                              "master": [randn(4, 8), randn(3)], "noop_flag": torch.zeros(1)},
    ),
    "multi_tensor_l2norm": ("multi_tensor_l2norm", lambda: {"tensors": [randn(4, 8), randn(3)], "per_tensor": True}),
    "multi_tensor_scale": (
        "multi_tensor_scale",
        lambda: {"inputs": [randn(4, 8), randn(3)], "outputs": [randn(4, 8), randn(3)], "scale": 2.0,
                 "noop_flag": torch.zeros(1)},
    ),
    "moe_permute": (
        "moe_permute",
        lambda: {"x": randn(4, 8), "indices": torch.tensor([[0, 1], [2, -1], [1, 0], [2, 1]]), "probs": randn(4, 2),
                 "capacity": 7},
    ),
    "moe_permute fp8": (
        "moe_permute",
        lambda: {"x": record(4, 8, usage="row"), "indices": torch.tensor([[0, 1], [2, -1], [1, 0], [2, 1]])},
    ),
    "moe_unpermute": (
        "moe_unpermute",
        lambda: {"x": randn(6, 8), "row_map": torch.tensor([[0, 3], [1, -1], [2, 5]], dtype=I32),
                 "probs": randn(3, 2)},
    ),
    "moe_unpermute_bwd": (
        "moe_unpermute_bwd",
        lambda: {"dy": randn(3, 8), "x": randn(6, 8), "row_map": torch.tensor([[0, 3], [1, -1], [2, 5]], dtype=I32),
                 "probs": randn(3, 2)},
    ),
}  # fmt: skip
