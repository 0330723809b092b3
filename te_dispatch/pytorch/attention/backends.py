# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which kernel would attend, asked in Transformer Engine's words and answered by dispatch.

There three modules attend: FlashAttention's packages, cuDNN ("fused") and products with a softmax between ("unfused").
Here it is one of the implementations of `attention_fwd`, which policy puts in order. Its traits say which of the three
it is: ``flash_package``, ``unfused``, and fused for every other kernel, the vendor's library among them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_dispatch.core import scopes
from te_dispatch.core.decision import Accepted
from te_dispatch.core.policy import Numerics, Policy
from te_dispatch.pytorch.attention.dot_product import DotProductAttention
from te_dispatch.pytorch.attention.masks import canonical_mask_type, canonical_window
from te_dispatch.pytorch.planning.fake_modules import TensorSpec
from te_dispatch.pytorch.planning.module_plan import plan
from te_dispatch.pytorch.tensor.dtypes import Number

_LAYOUTS = ("sbhd", "bshd", "thd")
#: How implementations of FlashAttention's packages end -> the distribution.
_PACKAGES = {"_2": "flash-attn", "_3": "flash-attn-3", "_4": "flash-attn-4"}

_DETERMINISTIC = Policy(name="deterministic", numerics=Numerics(deterministic=True))

#: use_flash_attention, flash_attention_backend, use_fused_attention, fused_attention_backend, use_unfused_attention,
#: and the three availabilities.
Selection = tuple[bool, Any, bool, "int | None", bool, list[bool]]


class FusedAttnBackend(Number):
    """Numbers of cuDNN's attention kernels, as ``NVTE_FUSED_ATTN_BACKEND`` takes them."""

    No_Backend = -1
    F16_arbitrary_seqlen = 1
    FP8 = 2


@dataclass
class AttentionParams:
    """A call of `DotProductAttention` of which `get_attention_backend` is asked.

    Attributes:
        qkv_dtype: of query, key and value. qkv_type: must be torch.Tensor.
        qkv_layout: how they lie, such as ``sbhd_sbhd_sbhd``, ``sb3hd`` (in one tensor) or ``bshd_bs2hd`` (key and value
            in one).
        batch_size, num_heads, num_gqa_groups, max_seqlen_q, max_seqlen_kv, head_dim_qk, head_dim_v: sizes.
        num_tokens_q, num_tokens_kv: of thd; 0 for batch_size * max_seqlen.
        attn_mask_type, window_size, bottom_right_diagonal, softcap, core_attention_bias_type, attention_dropout,
            softmax_type, softmax_scale, return_max_logit, pad_between_seqs, checkpoint_core_attention: as
            `DotProductAttention` takes them.
        alibi_slopes_shape, core_attention_bias_shape: of those tensors, None without.
        core_attention_bias_requires_grad: whether the bias has a gradient.
        deterministic: whether it must be deterministic. is_training: whether there is a backward.
        context_parallel, cp_size, fp8 with a recipe that says fp8_dpa, inference_params, num_splits, fp8_output,
            has_score_mod, has_score_mod_bprop: nothing serves these yet, at other values than the defaults.
        nominal_dtype, cp_comm_type, cp_size_a2a, cuda_graph: only matter with those, or not at all.
    """

    qkv_type: Any = torch.Tensor
    qkv_dtype: torch.dtype = torch.bfloat16
    nominal_dtype: torch.dtype | None = None
    qkv_layout: str = "sbh3d"
    batch_size: int = 1
    num_heads: int = 16
    num_gqa_groups: int = 16
    max_seqlen_q: int = 128
    max_seqlen_kv: int = 128
    num_tokens_q: int = 0
    num_tokens_kv: int = 0
    head_dim_qk: int = 64
    head_dim_v: int = 64
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool = True
    softcap: float = 0.0
    alibi_slopes_shape: Sequence[int] | None = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias_shape: Sequence[int] | None = None
    core_attention_bias_requires_grad: bool = True
    pad_between_seqs: bool = False
    attention_dropout: float = 0.0
    context_parallel: bool = False
    cp_comm_type: str = "p2p"
    cp_size: int = 1
    cp_size_a2a: int = 1
    deterministic: bool = False
    is_training: bool = True
    fp8: bool = False
    fp8_meta: Mapping[str, Any] | None = None
    inference_params: Any = None
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    cuda_graph: bool = False
    num_splits: int = 1
    softmax_scale: float = 1.0
    fp8_output: bool = False
    checkpoint_core_attention: bool = False
    has_score_mod: bool = False
    has_score_mod_bprop: bool = False


def get_qkv_format(qkv_layout: str = "bshd_bshd_bshd", inference_params: Any = None) -> tuple[str, str, str]:
    """The formats of all three, of the query, and of key and value that a layout says.

    Raises:
        NotImplementedError: `inference_params`.
    """
    if inference_params is not None:
        raise NotImplementedError("get_qkv_format: inference_params is not supported yet, only None")
    one = "".join(filter(str.isalpha, qkv_layout.removeprefix("paged_kv_").partition("_")[0]))
    return one, one, one


def check_set_window_size(attn_mask_type: str, window_size: tuple[int, int] | None = None) -> tuple[int, int]:
    """The window that a mask type makes of `window_size`: (left, right), -1 for no bound.

    Raises:
        ValueError: an unknown mask type, or a bound below -1.
    """
    return canonical_window(canonical_mask_type("attn_mask_type", attn_mask_type), window_size)


def get_attention_backend(attention_params: AttentionParams) -> Selection:
    """What would serve a call on the current accelerator, or the CPU where there is none.

    The policy in force and the variables ``NVTE_*`` hold, as they do for the call. Nothing runs.

    Returns:
        Whether FlashAttention's packages serve it, and the version of the package; whether another fused kernel does,
        and its `FusedAttnBackend` where it is the vendor's library; whether unfused products do; and for each of the
        three whether it could, were the others off. All False where nothing serves it.

    Raises:
        ValueError: values that `DotProductAttention` does not take. NotImplementedError: in a compiled region.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError("get_attention_backend cannot be called in a compiled region: call it before")
    accepted = () if _beyond(attention_params) else _accepted(attention_params)
    kinds = [_kind(candidate) for candidate in accepted]
    chosen, kind = (accepted[0], kinds[0]) if accepted else (None, "")
    flash = _package_version(chosen) if chosen is not None and kind == "flash" else None
    fused = None
    if chosen is not None and "vendor_library" in chosen.traits:
        fused = int(FusedAttnBackend.F16_arbitrary_seqlen)
    available = [one in kinds for one in ("flash", "fused", "unfused")]
    return kind == "flash", flash, kind == "fused", fused, kind == "unfused", available


def _beyond(asked: AttentionParams) -> bool:
    """Whether the call needs what is not here."""
    recipe = (asked.fp8_meta or {}).get("recipe")
    return (
        asked.qkv_type is not torch.Tensor
        or (asked.fp8 and bool(getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False)))
        or asked.context_parallel or asked.cp_size != 1 or asked.inference_params is not None
        or asked.num_splits != 1 or asked.fp8_output or asked.has_score_mod or asked.has_score_mod_bprop
        or get_qkv_format(asked.qkv_layout)[0] not in _LAYOUTS or asked.qkv_layout.startswith("paged")
    )  # fmt: skip


def _accepted(asked: AttentionParams) -> tuple[Accepted, ...]:
    """The implementations that would serve the call, in order."""
    layout = get_qkv_format(asked.qkv_layout)[0]
    if layout == "thd" and "padding" not in asked.attn_mask_type:
        return ()
    module = DotProductAttention(
        asked.num_heads,
        (asked.head_dim_qk, asked.head_dim_v),
        num_gqa_groups=asked.num_gqa_groups,
        attention_dropout=asked.attention_dropout,
        qkv_format=layout,
        attn_mask_type=asked.attn_mask_type,
        window_size=asked.window_size,
        bottom_right_diagonal=asked.bottom_right_diagonal,
        softcap=asked.softcap,
        attention_type="self" if asked.max_seqlen_q == asked.max_seqlen_kv else "cross",
        softmax_type=asked.softmax_type,
        softmax_scale=asked.softmax_scale,
        return_max_logit=asked.return_max_logit,
    ).train(asked.is_training)
    strict = scopes.policy(_DETERMINISTIC) if asked.deterministic else contextlib.nullcontext()
    try:
        with strict:
            planned = plan(module, **_operands(asked, layout), **_others(asked, layout), backward=asked.is_training)
    except NotImplementedError:  # a combination that the module names
        return ()
    (call,) = (call for call in planned.forward if call.operator == "attention_fwd")
    return call.decision.accepted


def _operands(asked: AttentionParams, layout: str) -> dict[str, Any]:
    """Query, key and value as the module is given them."""
    query, *others = asked.qkv_layout.split("_")
    count = len(others)  # 0: all in one tensor, 1: key and value in one, 2: none
    grad = asked.is_training
    q = _spec(asked, layout, asked.num_heads, asked.head_dim_qk, True, grad)
    if count == 2:
        k = _spec(asked, layout, asked.num_gqa_groups, asked.head_dim_qk, False, grad)
        v = _spec(asked, layout, asked.num_gqa_groups, asked.head_dim_v, False, grad)
        return {"query_layer": q, "key_layer": k, "value_layer": v}
    packed = others[0] if others else query
    dim = -2 if "h2d" in packed or "h3d" in packed else -3
    one = _spec(asked, layout, asked.num_gqa_groups, asked.head_dim_qk, not others, grad)
    shape = list(one.shape)
    shape.insert(len(shape) + dim + 1, 2 if others else 3)
    joined = TensorSpec(tuple(shape), asked.qkv_dtype, grad)
    if others:
        return {"query_layer": q, "kv_layer": joined, "qkv_interleave_dim": dim}
    return {"qkv_layer": joined, "qkv_interleave_dim": dim}


def _spec(asked: AttentionParams, layout: str, heads: int, width: int, query: bool, grad: bool) -> TensorSpec:
    length = asked.max_seqlen_q if query else asked.max_seqlen_kv
    tokens = (asked.num_tokens_q if query else asked.num_tokens_kv) or asked.batch_size * length
    sizes = {"s": length, "b": asked.batch_size, "t": tokens, "h": heads, "d": width}
    return TensorSpec(tuple(sizes[letter] for letter in layout), asked.qkv_dtype, grad)


def _others(asked: AttentionParams, layout: str) -> dict[str, Any]:
    """What else the module's forward is given."""
    given: dict[str, Any] = {
        "core_attention_bias_type": asked.core_attention_bias_type,
        "checkpoint_core_attention": False,  # the kernel is that of the call itself
    }
    if "padding" in asked.attn_mask_type:
        bounds = TensorSpec((asked.batch_size + 1,), torch.int32, False)
        kv = bounds if asked.max_seqlen_q == asked.max_seqlen_kv else TensorSpec(bounds.shape, torch.int32, False)
        given |= {"cu_seqlens_q": bounds, "cu_seqlens_kv": kv}
        if layout == "thd":
            given |= {"max_seqlen_q": asked.max_seqlen_q, "max_seqlen_kv": asked.max_seqlen_kv}
            if asked.pad_between_seqs:
                given |= {"cu_seqlens_q_padded": bounds, "cu_seqlens_kv_padded": kv}
    if asked.attn_mask_type == "arbitrary":
        shape = (asked.batch_size, 1, asked.max_seqlen_q, asked.max_seqlen_kv)
        given["attention_mask"] = TensorSpec(shape, torch.bool, False)
    if asked.core_attention_bias_type.endswith("scale_bias") and asked.core_attention_bias_shape is not None:
        grad = asked.is_training and asked.core_attention_bias_requires_grad
        given["core_attention_bias"] = TensorSpec(tuple(asked.core_attention_bias_shape), asked.qkv_dtype, grad)
    if asked.alibi_slopes_shape is not None:
        given["alibi_slopes"] = TensorSpec(tuple(asked.alibi_slopes_shape), torch.float32, False)
    return given


def _kind(candidate: Accepted) -> str:
    if "flash_package" in candidate.traits:
        return "flash"
    # A composite makes attention of products and a softmax.
    return "unfused" if "unfused" in candidate.traits or candidate.pieces else "fused"


def _version(distribution: str) -> Any:
    """The version of an installed distribution, None without it."""
    from packaging.version import Version  # a package of programs that compare it, not of this one

    try:
        return Version(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_version(chosen: Accepted) -> Any:
    """Of a FlashAttention package, by the end of its implementation's name."""
    return next((_version(package) for end, package in _PACKAGES.items() if chosen.id.endswith(end)), None)


def _is_at_least(version: Any, release: str) -> bool:
    from packaging.version import Version

    return version is not None and version >= Version(release)


#: Attributes of `FlashAttentionUtils`, and the distribution or the release that each asks for.
_VERSIONS = {"version": _PACKAGES["_2"], "fa3_version": _PACKAGES["_3"], "fa4_version": _PACKAGES["_4"]}
_INSTALLED = {
    "is_installed": _PACKAGES["_2"], "v3_is_installed": _PACKAGES["_3"], "v4_is_installed": _PACKAGES["_4"],
}  # fmt: skip
_RELEASES = {
    "v2_plus": "2", "v2_1_plus": "2.1", "v2_3_plus": "2.3", "v2_4_plus": "2.4", "v2_4_1_plus": "2.4.1",
    "v2_5_plus": "2.5", "v2_5_7_plus": "2.5.7", "v2_6_0_plus": "2.6", "v2_7_0_plus": "2.7",
}  # fmt: skip


class _Installed(type):
    """Looks packages up when it is asked."""

    def __getattr__(cls, name: str) -> Any:
        if name in _VERSIONS:
            from packaging.version import Version

            return _version(_VERSIONS[name]) or Version("0")
        if name in _INSTALLED:
            return _version(_INSTALLED[name]) is not None
        if name in _RELEASES:
            return _is_at_least(_version(_PACKAGES["_2"]), _RELEASES[name])
        raise AttributeError(f"FlashAttentionUtils has no {name!r}")


class FlashAttentionUtils(metaclass=_Installed):
    """Which FlashAttention packages are installed; whether one serves a call is `get_attention_backend`'s to say.

    Attributes:
        is_installed, v3_is_installed, v4_is_installed: whether flash-attn, flash-attn-3 and flash-attn-4 are.
        version, fa3_version, fa4_version: their versions, 0 without.
        v2_plus, v2_1_plus, v2_3_plus, v2_4_plus, v2_4_1_plus, v2_5_plus, v2_5_7_plus, v2_6_0_plus, v2_7_0_plus: whether
            flash-attn is of that release or later.
    """
