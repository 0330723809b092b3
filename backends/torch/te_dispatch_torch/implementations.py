# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What this backend offers, as data.

Claims. `deterministic`: no operation used here sums in an order that changes between runs with as many CPU threads
(reductions, index_copy into distinct rows, scatter of a maximum); the fused attention backwards on accelerators do,
and say nothing.
`batch_invariant`: element by element, or row by row in an order that no other row can change. Products and sums of
rows (Tensor.sum) are not: PyTorch picks the order of their additions by the shape of the whole.
`capturable` and `no_host_sync`: nothing is read back, no host tensor copied.
"""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch.core.requirements import All, AnyOf, Compare, Condition, MultipleOf, NoneOf, OneOf

_RANK = 500
_PLAIN = frozenset({"plain_torch"})
_ON_DEVICE = frozenset({"deterministic", "capturable", "no_host_sync"})
_ROWS = _ON_DEVICE | {"batch_invariant"}
_FLOATS = ("fp32", "bf16", "fp16")
_OCP, _FNUZ = ("e4m3fn", "e5m2"), ("e4m3fnuz", "e5m2fnuz")


def _plain(
    op: str,
    target: str,
    claims: frozenset[str] = _ON_DEVICE,
    requires: tuple[Condition, ...] = (),
    name: str | None = None,
) -> Implementation:
    return Implementation(f"{op}@1", name or op, f"te_dispatch_torch.{target}", requires, _RANK, claims, _PLAIN)


_QUANTIZE = (
    _plain("quantize", "quantize:quantize"),
    _plain("quantize_dbias", "quantize:quantize_dbias"),
    _plain("dequantize", "quantize:dequantize", _ROWS),
    _plain("transpose_quantized", "quantize:transpose_quantized", _ROWS),
    _plain("relayout_scales", "scales_layout:relayout_scales", _ROWS),
    _plain("split_quantize", "quantize:split_quantize"),
    _plain("multi_tensor_quantize", "quantize:multi_tensor_quantize"),
    _plain("compute_amax", "state:compute_amax"),
    _plain("partial_amax", "state:partial_amax"),
    _plain("partial_cast", "state:partial_cast"),
    _plain("update_delayed_scales", "state:update_delayed_scales"),
    _plain("convert_encoding", "state:convert_encoding", _ROWS, (OneOf("overflow", "saturate"),)),
    Implementation(
        "convert_encoding@1",
        "convert_encoding_checked",
        "te_dispatch_torch.state:convert_encoding_checked",
        (OneOf("overflow", "error"),),
        _RANK,
        {"deterministic", "batch_invariant"},
    ),
    _plain("pad_rows", "quantize:pad_rows", _ROWS),
    _plain("unpad_rows", "quantize:unpad_rows", _ROWS),
)

_ENCODINGS_OF_DEVICE = AnyOf(
    All(OneOf("device.encodings", "e4m3fn"), OneOf("a.dtype", *_OCP), OneOf("b.dtype", *_OCP)),
    All(OneOf("device.encodings", "e4m3fnuz"), OneOf("a.dtype", *_FNUZ), OneOf("b.dtype", *_FNUZ)),
)
# The libraries below multiply no e5m2 by e5m2.
_NOT_BOTH_E5M2 = AnyOf(OneOf("a.dtype", "e4m3fn", "e4m3fnuz"), OneOf("b.dtype", "e4m3fn", "e4m3fnuz"))

_GEMM = (
    _plain("gemm", "gemm:matmul", requires=(OneOf("a.dtype", *_FLOATS), OneOf("b.dtype", *_FLOATS)), name="matmul"),
    Implementation(
        "gemm@1",
        "scaled_mm",
        "te_dispatch_torch.gemm:scaled_mm",
        (
            OneOf("device.type", "cuda"),
            OneOf("device.fp8_matmul", True),
            _ENCODINGS_OF_DEVICE,
            _NOT_BOTH_E5M2,
            OneOf("a.scaling", "tensor"),
            OneOf("b.scaling", "tensor"),
            MultipleOf("n", 16),
        ),
        _RANK,
        _ON_DEVICE,
        _PLAIN,
    ),
    # Opaque to torch.compile: PyTorch's shape functions refuse such scales in some of these releases.
    Implementation(
        "gemm@1",
        "scaled_mm_blocks",
        "te_dispatch_torch.gemm:scaled_mm_blocks",
        (
            OneOf("device.type", "cuda"),
            OneOf("device.vendor", "nvidia"),
            OneOf("device.arch", "sm_90"),
            OneOf("a.dtype", *_OCP),
            OneOf("b.dtype", *_OCP),
            _NOT_BOTH_E5M2,
            OneOf("a.scaling", "block_1d", "block_2d"),
            OneOf("b.scaling", "block_1d", "block_2d"),
            MultipleOf("n", 16),
            Compare("device.version.torch", ">=", "2.9"),
            Compare("device.version.cuda", ">=", "12.9"),
        ),
        _RANK,
        _ON_DEVICE,
    ),
    Implementation(
        "gemm@1",
        "emulated_gemm",
        "te_dispatch_torch.gemm:emulated",
        (NoneOf("a.scaling", "none"), NoneOf("b.scaling", "none")),
        _RANK + 100,
        _ON_DEVICE,
        {"plain_torch", "emulated"},
    ),
    _plain(
        "grouped_gemm",
        "gemm:grouped",
        requires=(OneOf("splits", "none", "host"), OneOf("a.scaling", "none"), OneOf("b.scaling", "none")),
        name="grouped_matmul",
    ),
    Implementation(
        "grouped_gemm@1",
        "grouped_matmul_device_splits",
        "te_dispatch_torch.gemm:grouped_device_splits",
        (OneOf("splits", "device"), OneOf("a.scaling", "none"), OneOf("b.scaling", "none")),
        _RANK,
        {"deterministic"},
    ),
    Implementation(
        "grouped_gemm@1",
        "emulated_grouped_gemm",
        "te_dispatch_torch.gemm:grouped_device_splits",
        (NoneOf("a.scaling", "none"),),
        _RANK + 100,
        {"deterministic"},
        {"emulated"},
    ),
)

_ELEMENTWISE = (
    _plain("layernorm_fwd", "norm:layernorm_fwd"),
    _plain("layernorm_bwd", "norm:layernorm_bwd"),
    _plain("rmsnorm_fwd", "norm:rmsnorm_fwd"),
    _plain("rmsnorm_bwd", "norm:rmsnorm_bwd"),
    _plain("activation_fwd", "activation:activation_fwd"),
    _plain("activation_bwd", "activation:activation_bwd"),
    _plain("softmax_fwd", "softmax:softmax_fwd", _ROWS),
    _plain("softmax_bwd", "softmax:softmax_bwd"),
    _plain("rope_fwd", "position:rope_fwd", _ROWS),
    _plain("rope_bwd", "position:rope_bwd", _ROWS),
    _plain("dropout_add_fwd", "training:dropout_add_fwd"),
    _plain("dropout_add_bwd", "training:dropout_add_bwd", _ROWS),
    _plain("multi_tensor_adam", "training:multi_tensor_adam"),
    _plain("multi_tensor_l2norm", "training:multi_tensor_l2norm"),
    _plain("multi_tensor_scale", "training:multi_tensor_scale"),
    _plain("moe_permute", "training:moe_permute"),
    _plain("moe_unpermute", "training:moe_unpermute", _ROWS),
    _plain("moe_unpermute_bwd", "training:moe_unpermute_bwd"),
)

_HALF = ("bf16", "fp16")
_DENSE_BOTH: tuple[Condition, ...] = (
    OneOf("layout", "sbhd", "bshd"),
    OneOf("mask", "none", "causal"),
    OneOf("q.scaling", "none"),
    OneOf("bias_type", "none"),
    OneOf("softmax_type", "vanilla"),
    OneOf("window", False),
    OneOf("softcap", False),
    OneOf("dropout", False),
    OneOf("attn_mask", False),
    OneOf("s_quantizer", None),
    OneOf("same_head_dim", True),
)
_DENSE_FORWARD = (
    *_DENSE_BOTH,
    OneOf("page_table", False),
    OneOf("with_max_logit", False),
    OneOf("out_quantizer", None),
)
_DENSE_BACKWARD = (
    *_DENSE_BOTH,
    OneOf("dp_quantizer", None),
    OneOf("dqkv_quantizer", None),
    OneOf("out.scaling", "none"),
)


def _sdpa(
    kernel: str, rank: int, claims: frozenset[str], traits: set[str], *device: Condition
) -> tuple[Implementation, Implementation]:
    """A fused pair; the backward runs where the forward ran, so only the call can still exclude it."""
    name, shared = f"sdpa_{kernel}", frozenset({"plain_torch", "fused", *traits})

    def half(op: str, suffix: str, own_name: str, requires: tuple[Condition, ...]) -> Implementation:
        target = f"te_dispatch_torch.attention:{kernel}_{suffix}"
        return Implementation(
            f"{op}@1", own_name, target, (*requires, *device), rank, claims, shared, saved_format=f"torch.{name}/1"
        )

    return half("attention_fwd", "fwd", name, _DENSE_FORWARD), half(
        "attention_bwd", "bwd", f"{name}_bwd", _DENSE_BACKWARD
    )


_CAPTURABLE = frozenset({"capturable", "no_host_sync"})
_CUDA = OneOf("device.type", "cuda")
_NOT_DETERMINISTIC = OneOf("deterministic", False)
_NVIDIA, _AMD = OneOf("device.vendor", "nvidia"), OneOf("device.vendor", "amd")
# Their causal masks start at the last column, the operator's at the first.
_SQUARE = AnyOf(OneOf("mask", "none"), OneOf("same_seqlen", True))
# cuDNN has no backward for one query and one key.
_NOT_LONE = AnyOf(Compare("seqlen_q", ">", 1), Compare("seqlen_kv", ">", 1))
_HEADS_256 = (MultipleOf("head_dim", 8), Compare("head_dim", "<=", 256))
_HEADS_128 = (MultipleOf("head_dim", 8), Compare("head_dim", "<=", 128))

_LENGTHS_GIVEN = AnyOf(OneOf("layout", "sbhd", "bshd"), All(OneOf("max_seqlen_q", True), OneOf("max_seqlen_kv", True)))


def _unfused(
    name: str, rank: int, claims: frozenset[str], traits: frozenset[str], *requires: Condition
) -> tuple[Implementation, Implementation]:
    """Both halves; either backward follows either forward."""

    def half(op: str, own_name: str, quantizers: tuple[str, ...]) -> Implementation:
        casts = tuple(OneOf(f"{q}.scaling", None, "tensor") for q in quantizers)
        target = f"te_dispatch_torch.attention_unfused:{op}"
        return Implementation(
            f"{op}@1", own_name, target, (*casts, *requires), rank, claims, traits, saved_format="torch.unfused/1"
        )

    forward = half("attention_fwd", name, ("s_quantizer",))
    return forward, half("attention_bwd", f"{name}_bwd", ("s_quantizer", "dp_quantizer"))


_ATTENTION = (
    *_sdpa("cpu", _RANK, _ON_DEVICE, {"flash"}, OneOf("device.type", "cpu"), OneOf("q.dtype", *_FLOATS)),
    *_sdpa(
        "cudnn", _RANK, _CAPTURABLE, {"flash", "vendor_library"}, _CUDA, _NVIDIA,
        Compare("device.arch", ">=", "sm_90"), OneOf("q.dtype", *_HALF), _NOT_DETERMINISTIC, *_HEADS_128, _SQUARE,
        _NOT_LONE,
    ),
    *_sdpa("flash", _RANK + 1, _CAPTURABLE, {"flash"}, _CUDA, _NVIDIA, Compare("device.arch", ">=", "sm_80"),
           OneOf("q.dtype", *_HALF), _NOT_DETERMINISTIC, *_HEADS_256, _SQUARE),
    *_sdpa("efficient", _RANK + 2, _CAPTURABLE, set(), _CUDA, _NVIDIA, OneOf("q.dtype", *_FLOATS), _NOT_DETERMINISTIC,
           MultipleOf("head_dim", 8)),
    *_sdpa("aotriton_flash", _RANK + 1, _CAPTURABLE, {"flash", "vendor_library", "aotriton"}, _CUDA, _AMD,
           OneOf("q.dtype", *_HALF), _NOT_DETERMINISTIC, *_HEADS_256, _SQUARE),
    *_sdpa("aotriton_efficient", _RANK + 2, _CAPTURABLE, {"vendor_library", "aotriton"}, _CUDA, _AMD,
           OneOf("q.dtype", *_FLOATS), _NOT_DETERMINISTIC, MultipleOf("head_dim", 8)),
    *_unfused("unfused_attention", _RANK + 300, _ON_DEVICE, frozenset({"plain_torch", "unfused"}), _LENGTHS_GIVEN),
    # Without max_seqlen the longest sequence is read back.
    *_unfused(
        "varlen_attention", _RANK + 301, frozenset({"deterministic"}), frozenset({"unfused"}), OneOf("layout", "thd"),
        AnyOf(OneOf("max_seqlen_q", False), OneOf("max_seqlen_kv", False)),
    ),
)  # fmt: skip

IMPLEMENTATIONS: tuple[Implementation, ...] = (*_QUANTIZE, *_GEMM, *_ELEMENTWISE, *_ATTENTION)
