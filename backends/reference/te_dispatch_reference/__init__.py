# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The reference backend: the oracle. This module is its manifest: data only.

Claims: everything is deterministic. What works row by row, or element by element, is batch invariant; what multiplies
matrices is not claimed to be, because the BLAS below NumPy picks its order of summation by shape, and neither are
casts, since a tensor's scale may depend on all of its rows.
"""

from te_dispatch.core.manifest import API_VERSION, Implementation, Manifest
from te_dispatch.core.requirements import Condition, OneOf

_DETERMINISTIC = frozenset({"deterministic"})
_ROW_BY_ROW = frozenset({"deterministic", "batch_invariant"})

#: Dropout draws are this backend's own (`te_dispatch_reference.philox`), so only its own backward may follow.
ATTENTION_FORMAT = "reference.attention/1"


def _implementation(
    family: str,
    op: str,
    claims: frozenset[str] = _DETERMINISTIC,
    requires: tuple[Condition, ...] = (),
    saved_format: str = "canonical",
) -> Implementation:
    return Implementation(
        op=f"{op}@1",
        name=op,
        target=f"te_dispatch_reference.{family}:{op}",
        requires=requires,
        rank=900,
        claims=claims,
        # It serves the calls that name it; where a preference names others, too, it comes after them, with a warning.
        traits=frozenset({"emulated", "oracle"}),
        saved_format=saved_format,
    )


def _per_tensor(*quantizers: str) -> tuple[Condition, ...]:
    return tuple(OneOf(f"{quantizer}.scaling", None, "tensor") for quantizer in quantizers)


MANIFEST = Manifest(
    name="reference",
    api_version=API_VERSION,
    description="NumPy with float64 accumulation on the host, for any device. The oracle. Never fast.",
    devices={"cpu": "te_dispatch_reference.probe:probe"},
    unavailable="te_dispatch_reference.probe:unavailable",
    doctor="te_dispatch_reference.probe:doctor",
    implementations=(
        _implementation("quantize", "quantize"),
        _implementation("quantize", "quantize_dbias"),
        _implementation("quantize", "dequantize", _ROW_BY_ROW),
        _implementation("quantize", "transpose_quantized", _ROW_BY_ROW),
        _implementation("quantize", "relayout_scales", _ROW_BY_ROW),
        _implementation("quantize", "split_quantize"),
        _implementation("quantize", "multi_tensor_quantize"),
        _implementation("quantize", "compute_amax"),
        _implementation("quantize", "partial_amax"),
        _implementation("quantize", "partial_cast"),
        _implementation("quantize", "update_delayed_scales"),
        _implementation("quantize", "convert_encoding", _ROW_BY_ROW),
        _implementation("quantize", "pad_rows", _ROW_BY_ROW),
        _implementation("quantize", "unpad_rows", _ROW_BY_ROW),
        _implementation("gemm", "gemm"),
        _implementation("gemm", "grouped_gemm"),
        _implementation("norm", "layernorm_fwd", _ROW_BY_ROW),
        _implementation("norm", "layernorm_bwd", _ROW_BY_ROW),
        _implementation("norm", "rmsnorm_fwd", _ROW_BY_ROW),
        _implementation("norm", "rmsnorm_bwd", _ROW_BY_ROW),
        _implementation("activation", "activation_fwd", _ROW_BY_ROW),
        _implementation("activation", "activation_bwd", _ROW_BY_ROW),
        _implementation(
            "attention",
            "attention_fwd",
            requires=_per_tensor("s_quantizer"),
            saved_format=ATTENTION_FORMAT,
        ),
        _implementation(
            "attention",
            "attention_bwd",
            requires=_per_tensor("s_quantizer", "dp_quantizer", "dqkv_quantizer"),
            saved_format=ATTENTION_FORMAT,
        ),
        _implementation("softmax", "softmax_fwd", _ROW_BY_ROW),
        _implementation("softmax", "softmax_bwd", _ROW_BY_ROW),
        _implementation("position", "rope_fwd", _ROW_BY_ROW),
        _implementation("position", "rope_bwd", _ROW_BY_ROW),
        # What dropout_add_fwd draws depends on an element's place alone, so its mask may follow any backward.
        _implementation("training", "dropout_add_fwd", _ROW_BY_ROW),
        _implementation("training", "dropout_add_bwd", _ROW_BY_ROW),
        _implementation("training", "multi_tensor_adam"),
        _implementation("training", "multi_tensor_l2norm"),
        _implementation("training", "multi_tensor_scale"),
        # Which row a token gets depends on the other tokens; what it holds there does not.
        _implementation("training", "moe_permute"),
        _implementation("training", "moe_unpermute", _ROW_BY_ROW),
        _implementation("training", "moe_unpermute_bwd", _ROW_BY_ROW),
    ),
)
