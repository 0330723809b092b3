# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the attention family."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch.core.requirements import All, AnyOf, Compare, Condition, MultipleOf, OneOf
from te_dispatch_cuda.implementations.native import RANK, kernel

_HALF = ("bf16", "fp16")
_ON_STREAM = frozenset({"capturable", "no_host_sync"})
#: Masks that are arithmetic on positions; ``arbitrary`` would be a bias as large as the score matrix.
_MASKS = (
    "none", "causal", "padding", "padding_causal", "causal_bottom_right", "padding_causal_bottom_right",
)  # fmt: skip


def _same_dtype(result: str) -> Condition:
    """The other 16-bit tensor has q's dtype; the operator's None means so."""
    return AnyOf(OneOf(result, None), *(All(OneOf("q.dtype", d), OneOf(result, d)) for d in _HALF))


_PLAIN: tuple[Condition, ...] = (
    OneOf("q.dtype", *_HALF),
    OneOf("q.scaling", "none"),
    OneOf("mask", *_MASKS),
    OneOf("attn_mask", False),
    OneOf("s_quantizer", None),
)
_PLAIN_FORWARD = (*_PLAIN, OneOf("out_quantizer", None), _same_dtype("out_dtype"))
_PLAIN_BACKWARD = (*_PLAIN, OneOf("dp_quantizer", None), OneOf("dqkv_quantizer", None), _same_dtype("dout.dtype"))

_LIBRARY: tuple[Condition, ...] = (
    Compare("device.version.cudnn", ">=", "9.5"),
    Compare("device.version.cudnn_frontend", ">=", "1.14"),
)
_CUDNN: tuple[Condition, ...] = (
    *_LIBRARY,
    OneOf("bias_type", "none", "post_scale", "alibi"),
    OneOf("alibi_slopes", False),  # cuDNN has its own, the paper's
    OneOf("softcap", False),
    # cuDNN's masks repeat themselves: rows two apart drop mostly the same elements (9.19 on an H200).
    OneOf("dropout", False),
    MultipleOf("head_dim", 8),
    MultipleOf("head_dim_v", 8),
    Compare("head_dim", "<=", 256),
    Compare("head_dim_v", "<=", 256),
)


def _pair(
    name: str,
    target: str,
    forward: tuple[Condition, ...],
    backward: tuple[Condition, ...],
    claims: frozenset[str],
    traits: frozenset[str],
    saved_format: str,
    rank: int,
    planned: bool = False,
) -> tuple[Implementation, Implementation]:
    """Both halves, which prepare calls that come again if they are `planned`."""

    def half(op: str, own: str, requires: tuple[Condition, ...]) -> Implementation:
        suffix = op.partition("_")[2]
        module = target.partition(":")[0]
        plan = f"attention.{module}:plan_{suffix}" if planned else None
        return kernel(op, f"attention.{target}_{suffix}", requires, claims, own, traits, saved_format, rank, plan)

    return half("attention_fwd", name, forward), half("attention_bwd", f"{name}_bwd", backward)


_CUDNN_TRAITS = frozenset({"fused", "flash", "vendor_library"})


def _cudnn(name: str, deterministic: bool) -> tuple[Implementation, Implementation]:
    """The deterministic backward is another graph, with a workspace as large as the score matrix."""
    own = (*_CUDNN, OneOf("deterministic", deterministic))
    claims = _ON_STREAM | {"deterministic"} if deterministic else _ON_STREAM
    return _pair(
        name, "cudnn:attention", (*_PLAIN_FORWARD, *own), (*_PLAIN_BACKWARD, *own), claims, _CUDNN_TRAITS,
        "cuda.cudnn/1", RANK, planned=True,
    )  # fmt: skip


_EIGHT_BIT: tuple[Condition, ...] = (
    *_LIBRARY,
    Compare("device.arch", ">=", "sm_90"),
    *(OneOf(f"{x}.scaling", "tensor") for x in ("q", "k", "v")),
    *(OneOf(f"{x}.dtype", "e4m3fn") for x in ("q", "k", "v")),
    OneOf("s_quantizer", "delayed"),
    OneOf("s_quantizer.encoding", "e4m3fn"),
    OneOf("layout", "sbhd", "bshd"),
    OneOf("packing", None),
    OneOf("mask", "none", "causal"),
    OneOf("attn_mask", False),
    OneOf("window", False),
    OneOf("bias_type", "none"),
    OneOf("softmax_type", "vanilla"),
    OneOf("softcap", False),
    OneOf("dropout", False),
    OneOf("deterministic", False),
    MultipleOf("head_dim", 16),
    MultipleOf("head_dim_v", 16),
)
_EIGHT_BIT_FORWARD = (
    *_EIGHT_BIT,
    OneOf("out_quantizer", "delayed"),
    OneOf("out_quantizer.encoding", "e4m3fn"),
    OneOf("page_table", False),
    OneOf("with_max_logit", False),
)
_EIGHT_BIT_BACKWARD = (
    *_EIGHT_BIT,
    OneOf("dp_quantizer", "delayed"),
    OneOf("dp_quantizer.encoding", "e5m2"),
    OneOf("dqkv_quantizer", "delayed"),
    OneOf("dqkv_quantizer.encoding", "e5m2", "e4m3fn"),
)

_FLASH: tuple[Condition, ...] = (
    OneOf("bias_type", "none"),
    OneOf("softmax_type", "vanilla"),
    OneOf("dropout", False),  # drawn from a generator
    OneOf("cu_seqlens_q_padded", False),
    OneOf("cu_seqlens_kv_padded", False),
    AnyOf(OneOf("layout", "thd"), OneOf("mask", "none", "causal", "causal_bottom_right")),
    MultipleOf("head_dim", 8),
    Compare("head_dim", "<=", 256),
)
_FLASH_FORWARD: tuple[Condition, ...] = (OneOf("page_table", False), OneOf("with_max_logit", False))


def _flash(number: int, word: str, rank: int, *own: Condition) -> tuple[Implementation, Implementation]:
    name, requires = f"flash_attention_{number}", (*own, *_FLASH)
    return _pair(
        name, f"flash:{word}", (*_PLAIN_FORWARD, *_FLASH_FORWARD, *requires), (*_PLAIN_BACKWARD, *requires), _ON_STREAM,
        frozenset({"fused", "flash", "flash_package"}), f"cuda.{name}/1", rank,
    )  # fmt: skip


IMPLEMENTATIONS: tuple[Implementation, ...] = (
    *_cudnn("cudnn_attention", False),
    *_cudnn("cudnn_attention_deterministic", True),
    *_pair("cudnn_fp8_attention", "eight_bit:attention", _EIGHT_BIT_FORWARD, _EIGHT_BIT_BACKWARD, _ON_STREAM,
           _CUDNN_TRAITS, "cuda.cudnn_fp8/1", RANK),
    *_flash(3, "three", RANK + 1, Compare("device.version.flash_attn_3", ">=", "3"), OneOf("device.arch", "sm_90"),
            MultipleOf("head_dim_v", 8), Compare("head_dim_v", "<=", 256)),
    *_flash(4, "four", RANK + 2, Compare("device.version.flash_attn_4", ">=", "4"),
            OneOf("device.arch", "sm_90", "sm_100", "sm_103"), OneOf("window", False), OneOf("softcap", False),
            OneOf("deterministic", False), Compare("head_dim", "<=", 128)),
    *_flash(2, "two", RANK + 3, Compare("device.version.flash_attn", ">=", "2.7")),
)  # fmt: skip
