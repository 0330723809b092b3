# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The operators: call ``te_dispatch.ops.gemm(...)`` and the policy in force decides which implementation runs.

Each family's module declares its operators: signature, contract, shape function, decompositions. What this package
exports under their names are trampolines of the process's OpManager with exactly those signatures.

Start with `gemm`, one family. `operands` describes quantized operands to the runtime, `declared` lists the families,
`composites` has the decompositions, `checks` what implementations check first, `results` and `shapes` what they return,
`alloc` where they allocate. May import: `te_dispatch.core` and `te_dispatch.numerics`; torch and
`te_dispatch.torch_private` in functions, and in `checks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_dispatch.core.startup import no_collection

if TYPE_CHECKING:
    from te_dispatch.core.policy import Numerics
    from te_dispatch.ops.activation import activation_bwd, activation_fwd
    from te_dispatch.ops.attention import attention_bwd, attention_fwd
    from te_dispatch.ops.gemm import gemm, grouped_gemm
    from te_dispatch.ops.norm import layernorm_bwd, layernorm_fwd, rmsnorm_bwd, rmsnorm_fwd
    from te_dispatch.ops.position import rope_bwd, rope_fwd
    from te_dispatch.ops.quantize import (
        compute_amax,
        convert_encoding,
        dequantize,
        multi_tensor_quantize,
        pad_rows,
        partial_amax,
        partial_cast,
        quantize,
        quantize_dbias,
        relayout_scales,
        split_quantize,
        transpose_quantized,
        unpad_rows,
        update_delayed_scales,
    )
    from te_dispatch.ops.softmax import softmax_bwd, softmax_fwd
    from te_dispatch.ops.training import (
        dropout_add_bwd,
        dropout_add_fwd,
        moe_permute,
        moe_unpermute,
        moe_unpermute_bwd,
        multi_tensor_adam,
        multi_tensor_l2norm,
        multi_tensor_scale,
    )

__all__ = [
    "activation_bwd",
    "activation_fwd",
    "attention_bwd",
    "attention_fwd",
    "compute_amax",
    "convert_encoding",
    "dequantize",
    "dropout_add_bwd",
    "dropout_add_fwd",
    "gemm",
    "gemm_operand_format",
    "grouped_gemm",
    "layernorm_bwd",
    "layernorm_fwd",
    "moe_permute",
    "moe_unpermute",
    "moe_unpermute_bwd",
    "multi_tensor_adam",
    "multi_tensor_l2norm",
    "multi_tensor_quantize",
    "multi_tensor_scale",
    "pad_rows",
    "partial_amax",
    "partial_cast",
    "policy_numerics",
    "quantize",
    "quantize_dbias",
    "relayout_scales",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "rope_bwd",
    "rope_fwd",
    "softmax_bwd",
    "softmax_fwd",
    "split_quantize",
    "transpose_quantized",
    "unpad_rows",
    "update_delayed_scales",
]


def policy_numerics() -> Numerics:
    """The numerical promises of the policy in force: ``fp8_portability`` and ``deterministic``."""
    from te_dispatch.core import scopes

    return scopes.capture().policy.numerics


def gemm_operand_format(
    device: Any, a_encoding: str, a_scaling: str, b_encoding: str, b_scaling: str, layout: str
) -> tuple[tuple[str, str], tuple[str, str]]:
    """Which copies the GEMM bound for these operands reads: ((usage, scale_layout) of a, the same of b).

    Ask before quantizing, so that no copy is made that nothing reads.

    Args:
        device: a ``torch.device``.
        a_encoding, b_encoding: e.g. ``e4m3fn``; a_scaling, b_scaling: of `te_dispatch.numerics.quantized.SCALINGS`.
        layout: ``NT``, ``NN`` or ``TN``.

    Raises:
        NoImplementation: no GEMM takes such operands; the message is the decision's table.
    """
    from te_dispatch.core import scopes
    from te_dispatch.ops.gemm import bound_operand_formats

    return bound_operand_formats(scopes.capture(), device, (a_encoding, a_scaling), (b_encoding, b_scaling), layout)


def _export() -> None:
    """Declare the operators and put their trampolines where users look.

    Last, because declaring them imports submodules of the same names.
    """
    with no_collection():
        from te_dispatch.ops import operands  # noqa: F401  # first: declarations read what it describes
        from te_dispatch.ops import declared  # noqa: F401  # isort: skip
        from te_dispatch.core import scopes

    scopes.MANAGER.add_operators()
    globals().update(vars(scopes.MANAGER.ops))


_export()
