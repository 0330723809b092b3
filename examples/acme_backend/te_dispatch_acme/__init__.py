# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Acme's x1 for te_dispatch. This module is the manifest: data only, nothing heavy imported.

The x1 casts to FP8, multiplies plain and FP8 matrices, normalizes rows, and applies activations, softmax and dropout.
It fuses nothing into them, so the requirements here say "no epilogue", "no quantizer", "no residual": what fused calls
need beyond these primitives is composed of them, and what the x1 has no primitive for (attention, the bookkeeping of
scales) runs on whichever portable backend is installed.
"""

from te_dispatch.core.facts import Arch
from te_dispatch.core.manifest import API_VERSION, Implementation, Manifest
from te_dispatch.core.requirements import Condition, MultipleOf, OneOf

_ON_X1 = OneOf("device.vendor", "acme")
_ENCODINGS = ("e4m3fn", "e5m2")
_FLOATS = ("fp32", "bf16", "fp16")
_KINDS = ("gelu", "relu", "silu", "geglu", "reglu", "swiglu")

# NumPy sums in an order that depends on the shape alone: equal calls give equal bits. Rows of what works row by row
# do not see each other; BLAS picks its order by the whole shape, so products promise less.
_DETERMINISTIC = frozenset({"deterministic"})
_ROW_BY_ROW = frozenset({"deterministic", "batch_invariant"})


def _primitive(
    op: str,
    target: str,
    *requires: Condition,
    claims: frozenset[str] = _DETERMINISTIC,
    name: str | None = None,
    rank: int = 100,
    plan: str | None = None,
    operand_format: str | None = None,
) -> Implementation:
    return Implementation(
        op=f"{op}@1",
        name=name or op,
        target=f"te_dispatch_acme.{target}",
        requires=(_ON_X1, *requires),
        rank=rank,
        claims=claims,
        plan=plan and f"te_dispatch_acme.{plan}",
        operand_format=operand_format and f"te_dispatch_acme.{operand_format}",
    )


def _absent(*parameters: str) -> tuple[Condition, ...]:
    """Tensors that must not be given: their facts are booleans."""
    return tuple(OneOf(parameter, False) for parameter in parameters)


def _no(*quantizers: str) -> tuple[Condition, ...]:
    """Quantizers and options that must not be given: their facts are None then."""
    return tuple(OneOf(quantizer, None) for quantizer in quantizers)


_NO_FUSION = _no("epilogue", "aux_quantizer", "out_quantizer")

MANIFEST = Manifest(
    name="acme",
    api_version=API_VERSION,
    description="Acme x1 (made up): a complete example of a vendor's plugin.",
    vendors=("acme",),
    devices={"cpu": "te_dispatch_acme.probe:probe"},
    archs={
        "acme": {
            "x1": Arch(encodings=_ENCODINGS, fp8_matmul=True, fp8_layouts=("TN", "NN", "NT"), warp_size=1),
        }
    },
    unavailable="te_dispatch_acme.probe:unavailable",
    doctor="te_dispatch_acme.probe:doctor",
    implementations=(
        _primitive(
            "quantize",
            "quantize:quantize",
            OneOf("quantizer", "delayed", "current"),
            OneOf("quantizer.encoding", *_ENCODINGS),
            *_absent("out", "noop_flag", "rng_state"),
        ),
        _primitive(
            "dequantize",
            "quantize:dequantize",
            OneOf("x.scaling", "tensor"),
            OneOf("x.dtype", *_ENCODINGS),
            claims=_ROW_BY_ROW,
        ),
        _primitive("gemm", "gemm:matmul", OneOf("a.dtype", *_FLOATS), OneOf("b.dtype", *_FLOATS), *_NO_FUSION),
        _primitive(
            "gemm",
            "gemm:fp8_matmul",
            OneOf("device.fp8_matmul", True),
            OneOf("a.dtype", *_ENCODINGS),
            OneOf("b.dtype", *_ENCODINGS),
            OneOf("a.scaling", "tensor"),
            OneOf("b.scaling", "tensor"),
            # The unit reads 16 bytes at a time. n is one dimension of b, so the manifest can ask; the contracted size
            # may be a product of several, which only the implementation sees: it declines.
            MultipleOf("n", 16),
            *_NO_FUSION,
            name="fp8_gemm",
            operand_format="gemm:operand_format",
        ),
        _primitive("layernorm_fwd", "norm:layernorm_fwd", *_no("quantizer"), *_absent("residual"), claims=_ROW_BY_ROW),
        _primitive("layernorm_bwd", "norm:layernorm_bwd"),
        _primitive("rmsnorm_fwd", "norm:rmsnorm_fwd", *_no("quantizer"), *_absent("residual"), claims=_ROW_BY_ROW),
        _primitive("rmsnorm_bwd", "norm:rmsnorm_bwd"),
        _primitive(
            "activation_fwd",
            "activation:activation_fwd",
            OneOf("kind", *_KINDS),
            OneOf("x.scaling", "none"),
            *_no("quantizer"),
            claims=_ROW_BY_ROW,
        ),
        _primitive(
            "activation_bwd",
            "activation:activation_bwd",
            OneOf("kind", *_KINDS),
            OneOf("x.scaling", "none"),
            OneOf("with_dbias", False),
            *_no("quantizer"),
            claims=_ROW_BY_ROW,
        ),
        # The compiled kernel comes first where the wheel has it. NumPy serves fp16, and wheels without kernels.
        _primitive(
            "softmax_fwd",
            "compiled_softmax:softmax_fwd",
            OneOf("device.acme_kernels", "compiled"),
            OneOf("x.dtype", "fp32", "bf16"),
            OneOf("out_dtype", None, "fp32", "bf16"),
            claims=_ROW_BY_ROW,
            name="compiled_softmax_fwd",
            rank=50,
            plan="compiled_softmax:softmax_fwd.plans.repeat",
        ),
        _primitive("softmax_fwd", "softmax:softmax_fwd", claims=_ROW_BY_ROW),
        _primitive("softmax_bwd", "softmax:softmax_bwd", claims=_ROW_BY_ROW),
        _primitive("dropout_add_fwd", "training:dropout_add_fwd"),
        _primitive("dropout_add_bwd", "training:dropout_add_bwd", claims=_ROW_BY_ROW),
    ),
)
