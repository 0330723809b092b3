# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products, plain and grouped, in high precision and FP8."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from te_dispatch.core.errors import NoImplementation
from te_dispatch.core.facts import CallFacts, Derived, fact
from te_dispatch.core.operator import OPERATORS, Fact, Piece, decomposes, operator
from te_dispatch.core.resolve import resolve
from te_dispatch.ops.quantize import PLAIN_CAST
from te_dispatch.ops.results import Gemm
from te_dispatch.ops.shapes import empty_quantized, rows_of

if TYPE_CHECKING:
    import torch

    from te_dispatch.core.bindings import Bindings
    from te_dispatch.numerics.quantized import Operand, Quantized
    from te_dispatch.numerics.quantizers import Quantizer

LAYOUTS = ("NT", "NN", "TN")
EPILOGUES = ("gelu", "dgelu", "bgrad_a", "bgrad_b")


def gemm_sizes(a: Any, b: Any, layout: str) -> tuple[int, int, int]:
    """(m, n, k) of a product: leading dimensions of an untransposed `a`, and of a transposed one, flatten."""
    if layout == "NT":
        return rows_of(a.shape), rows_of(b.shape), a.shape[-1]
    if layout == "NN":
        return rows_of(a.shape), b.shape[-1], a.shape[-1]
    if layout == "TN":
        return a.shape[-1], b.shape[-1], rows_of(a.shape)
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def out_shape(a: Any, b: Any, layout: str) -> tuple[int, ...]:
    m, n, _ = gemm_sizes(a, b, layout)
    return (m, n) if layout == "TN" else (*a.shape[:-1], n)


def operand_format(layout: str, operand: str, scaling: str) -> tuple[str, str]:
    """The copy of a quantized operand that a GEMM reads by default: the one whose last dimension is contracted.

    An implementation that reads another copy, or scales in another layout, has an attribute ``operand_format`` of
    this signature; `te_dispatch.ops.gemm_operand_format` asks the one that is bound.

    Returns:
        (usage, scale_layout), e.g. ``("row", "canonical")``.
    """
    contracted_last = {"a": layout[0] == "N", "b": layout[1] == "T"}[operand]
    return ("row" if contracted_last else "column"), "canonical"


def bound_operand_formats(
    bindings: Bindings, device: Any, a: tuple[str, str], b: tuple[str, str], layout: str
) -> tuple[tuple[str, str], tuple[str, str]]:
    """`operand_format` of the GEMM that `bindings` choose for operands of (encoding, scaling) `a` and `b`."""
    manager, operator = bindings.manager, OPERATORS["gemm"]
    call = {
        **operator.default_facts(),
        "a.dtype": a[0], "a.scaling": a[1], "b.dtype": b[0], "b.scaling": b[1], "layout": layout,
    }  # fmt: skip
    # Shapes and the rounding of sums are left unknown: they do not decide which copy is read.
    for name in ("split_accumulator", "split_accumulator.default", "out_dtype", "out_dtype.default", "bias"):
        call.pop(name, None)
    decision = resolve(operator, call, manager.device_facts(device), bindings.policy, manager.snapshot)
    if decision.chosen is None:
        raise NoImplementation(decision.table())
    chosen = decision.chosen
    asked = None if chosen.pieces else manager.attribute(operator, chosen.id, "operand_format")
    answer = asked or operand_format
    return answer(layout, "a", a[1]), answer(layout, "b", b[1])


def _gemm_shape(
    a: Any,
    b: Any,
    *,
    layout: str,
    out: Any = None,
    epilogue: str | None = None,
    aux_quantizer: Quantizer | None = None,
    out_dtype: torch.dtype | None = None,
    out_quantizer: Quantizer | None = None,
    **_: Any,
) -> Gemm:
    import torch

    shape = out_shape(a, b, layout)
    dtype = out_dtype or (out.dtype if out is not None else a.dtype)
    if out is None:
        if out_quantizer is not None:
            out = empty_quantized(shape, out_quantizer, "row", dtype, a.device)
        else:
            out = torch.empty(shape, dtype=dtype, device=a.device)
    aux: Any = None
    if epilogue == "gelu":
        if aux_quantizer is not None:
            aux = empty_quantized(shape, aux_quantizer, "row", dtype, a.device)
        else:
            aux = torch.empty(shape, dtype=dtype, device=a.device)
    m, n = gemm_sizes(a, b, layout)[:2]
    dbias = None
    if epilogue in ("dgelu", "bgrad_b"):
        dbias = torch.empty((n,), dtype=dtype, device=a.device)
    elif epilogue == "bgrad_a":
        dbias = torch.empty((m,), dtype=dtype, device=a.device)
    return Gemm(out, aux, dbias)


@operator(
    family="gemm",
    version=1,
    shape=_gemm_shape,
    device="a.device",
    operands=("a", "b", "out", "aux"),
    tensors=("bias",),
    quantizers=("aux_quantizer", "out_quantizer"),
    options=("layout", "accumulate", "epilogue", "split_accumulator"),
    dtypes=("out_dtype",),
    sizes={
        "k": "_rows(a) if layout == 'TN' else a.shape[-1]",
        "m": "a.shape[-1] if layout == 'TN' else _rows(a)",
        "n": "_rows(b) if layout == 'NT' else b.shape[-1]",
    },
    facts=(Fact("alpha.one", "(alpha == 1)", doc="whether alpha is exactly 1"),),
    mutates=("out", "aux_quantizer.amax", "out_quantizer.amax"),
)
def gemm(
    a: Operand,
    b: Operand,
    *,
    layout: str,
    alpha: float = 1.0,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    aux: torch.Tensor | Quantized | None = None,
    aux_quantizer: Quantizer | None = None,
    out_dtype: torch.dtype | None = None,
    out_quantizer: Quantizer | None = None,
    split_accumulator: bool | None = None,
) -> Gemm:
    """Matrix product with an epilogue; everything is row-major and leading dimensions flatten.

    ======  =============================================  =============
    layout  out[m, n] =                                    used by
    ======  =============================================  =============
    NT      alpha * sum_k a[m, k] * b[n, k]                fprop, x W^T
    NN      alpha * sum_k a[m, k] * b[k, n]                dgrad, dy W
    TN      alpha * sum_k a[k, m] * b[k, n]                wgrad, dy^T x
    ======  =============================================  =============

    The result has a's leading dimensions in NT and NN, and is (m, n) in TN. Products and sums are in fp32; then, in
    this order: `alpha`, `bias`, the epilogue, `accumulate`, one rounding to the output.

    Args:
        a, b: float32, bfloat16, float16 (both the same) or `Quantized` (both; encodings of one flavour, OCP or FNUZ,
            may mix e4m3 and e5m2). A `Quantized` stands for its values, scales included; which of its two copies is
            read is the implementation's choice (`operand_format`), by default the one contracted along its last
            dimension.
        layout: ``NT``, ``NN`` or ``TN``.
        out: written to and returned; with `accumulate`, added to: out += product. Its dtype is the output dtype.
        bias: (n,), added to every row, before the epilogue.
        epilogue: None, or

            ``gelu``: out = gelu(z), tanh form, and the result's `aux` is z (rounded to the output dtype, or
            quantized by `aux_quantizer`).
            ``dgelu``: out = product * gelu'(aux), with `aux` the z of the forward; dbias (n,) = column sums of out.
            ``bgrad_b``: dbias (n,) = sum over k of b (layout TN with b the output gradient).
            ``bgrad_a``: dbias (m,) = sum over k of a (layout TN with a the output gradient).
        out_dtype: None for out's dtype, else a's (nominal, if quantized).
        out_quantizer: quantize the output row-wise (before, the value is rounded to fp32 only).
        split_accumulator: FP8 only: promote partial sums to full fp32 (True), allow the unit's fast accumulation
            (False), or None for the policy's default: False where a recipe's fprop would be, as hardware has it.

    Returns:
        out, aux (``gelu`` only), dbias (``dgelu``, ``bgrad_*`` only).

    Raises:
        ValueError: shapes that do not match, `accumulate` without `out`, an unknown epilogue; names the argument.
    """
    raise NotImplementedError


def _grouped_shape(
    a: Any,
    b: Any,
    splits: Any = None,
    *,
    layout: str,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> list[torch.Tensor]:
    import torch

    if out is not None:
        return list(out)
    parts = a if splits is None else a[0].split(list(splits), 0)
    return [torch.empty(out_shape(x, y, layout), dtype=out_dtype or x.dtype, device=x.device) for x, y in zip(parts, b)]


@operator(
    family="gemm",
    version=1,
    shape=_grouped_shape,
    device="b[0].device",
    options=("layout", "accumulate", "split_accumulator"),
    dtypes=("out_dtype",),
    facts=(
        Fact("a.dtype", "(a[0].encoding if a[0].__class__ in _RECORDS else a[0].dtype)", "dtype"),
        Fact("b.dtype", "(b[0].encoding if b[0].__class__ in _RECORDS else b[0].dtype)", "dtype"),
        Fact("a.scaling", "(a[0].scaling if a[0].__class__ in _RECORDS else 'none')"),
        Fact("b.scaling", "(b[0].scaling if b[0].__class__ in _RECORDS else 'none')"),
        Fact("a", "len(a)", "size", "number of groups"),
        Fact("b", "len(b)", "size", "number of groups"),
        Fact("splits", "('none' if splits is None else 'host' if splits.__class__ in _SEQUENCES else 'device')"),
        Fact("bias", "(bias is not None)"),
        Fact("out", "(out is not None)"),
    ),
    mutates=("out",),
)
def grouped_gemm(
    a: Sequence[Operand],
    b: Sequence[Operand],
    splits: Sequence[int] | torch.Tensor | None = None,
    *,
    layout: str,
    out: Sequence[torch.Tensor] | None = None,
    accumulate: bool = False,
    bias: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
    split_accumulator: bool | None = None,
) -> list[torch.Tensor]:
    """One `gemm` per group, as for the experts of a mixture: results[i] = gemm(a[i], b[i], layout=layout, ...).out.

    Args:
        a, b: one operand per group, as in `gemm`. Groups may be empty (0 rows).
        splits: None when `a` holds one tensor per group. Otherwise `a` holds one tensor (M, K) whose rows are dealt
            to the groups: host integers, or an int64 device tensor, which implementations that claim
            ``no_host_sync`` read on the device.
        out, accumulate, bias, out_dtype, split_accumulator: as in `gemm`, one entry per group.
    """
    raise NotImplementedError


def _plain_gemm(call: CallFacts) -> CallFacts:
    return Derived(
        call,
        {
            "epilogue": None, "aux": False, "aux.dtype": None, "aux_quantizer": None, "aux_quantizer.encoding": None,
            "aux_quantizer.scaling": None, "out_quantizer": None, "out_quantizer.encoding": None,
            "out_quantizer.scaling": None, "accumulate": False, "out": False, "out_dtype": "fp32",
        },
        inherit=True,
    )  # fmt: skip


def _activation_facts(call: CallFacts) -> CallFacts:
    return {
        "x.dtype": "fp32", "x.scaling": "none", "kind": "gelu", "params": None, "quantizer": None,
        "quantizer.encoding": None, "quantizer.scaling": None, "usage": "row", "with_out": True, "out_dtype": None,
    }  # fmt: skip


def _activation_grad_facts(call: CallFacts) -> CallFacts:
    return Derived(call, {
        "dy.dtype": "fp32", "x.dtype": fact("aux.dtype"), "x.scaling": fact("aux.scaling"), "kind": "gelu",
        "params": None, "quantizer": None, "quantizer.encoding": None, "quantizer.scaling": None, "usage": "row",
        "with_dx": True, "with_dbias": True,
    })  # fmt: skip


def _quantize_facts(call: CallFacts) -> CallFacts:
    return Derived(call, {
        **PLAIN_CAST, "x.dtype": "fp32", "usage": "row", "quantizer": fact("out_quantizer", "aux_quantizer"),
        "quantizer.encoding": fact("out_quantizer.encoding", "aux_quantizer.encoding"),
        "quantizer.scaling": fact("out_quantizer.scaling", "aux_quantizer.scaling"), "k": fact("n"),
    })  # fmt: skip


def _epilogue_pieces(call: CallFacts) -> Mapping[str, Piece] | None:
    if call.get("epilogue") is None and call.get("out_quantizer") is None:
        return None  # nothing to take apart: the plain product is the primitive
    pieces = {"gemm": Piece("gemm", _plain_gemm)}
    if call.get("epilogue") == "gelu":
        pieces["activation_fwd"] = Piece("activation_fwd", _activation_facts)
    elif call.get("epilogue") == "dgelu":
        pieces["activation_bwd"] = Piece("activation_bwd", _activation_grad_facts)
    if call.get("out_quantizer") is not None or call.get("aux_quantizer") is not None:
        pieces["quantize"] = Piece("quantize", _quantize_facts)
    return pieces


@decomposes("gemm", pieces=_epilogue_pieces, simplifies=True)
def gemm_then_epilogue(gemm: Any, activation_fwd: Any = None, activation_bwd: Any = None, quantize: Any = None) -> Any:
    """The product in fp32, then the epilogue, then one rounding or cast, so that nothing is rounded twice."""

    def composed(  # type: ignore[no-untyped-def]
        a, b, *, layout, alpha=1.0, out=None, accumulate=False, bias=None, epilogue=None, aux=None,
        aux_quantizer=None, out_dtype=None, out_quantizer=None, split_accumulator=None,
    ):  # fmt: skip
        import torch

        dtype = out_dtype or (out.dtype if out is not None else a.dtype)
        z = gemm(a, b, layout, alpha, None, False, bias, None, None, None, torch.float32, None, split_accumulator).out
        dbias, aux_out = None, None
        if epilogue == "gelu":
            aux_out = z.to(dtype)
            if aux_quantizer is not None:
                aux_out = quantize(z, aux_quantizer, "row", None, None, None, None)
            z = activation_fwd(z, "gelu", None, None, "row", True, None).out
        elif epilogue == "dgelu":
            step = activation_bwd(z, aux, "gelu", None, None, "row", True, True)
            z, dbias = step.dx, step.dbias.to(dtype)
        elif epilogue in ("bgrad_a", "bgrad_b"):
            operand = a if epilogue == "bgrad_a" else b
            values = operand if isinstance(operand, torch.Tensor) else _dequantized(operand)
            dbias = values.reshape(-1, values.shape[-1]).sum(0, dtype=torch.float32).to(dtype)
        if out_quantizer is not None:
            quantized = quantize(z, out_quantizer, "row", None, None, None, None)
            quantized.dtype = dtype
            return Gemm(quantized, aux_out, dbias)
        if out is None:
            return Gemm(z.to(dtype), aux_out, dbias)
        out.copy_(out + z if accumulate else z)
        return Gemm(out, aux_out, dbias)

    return composed


def _dequantized(x: Quantized) -> torch.Tensor:
    import te_dispatch.ops as ops

    values: torch.Tensor = ops.dequantize(x)
    return values


def _each_gemm_facts(call: CallFacts) -> CallFacts:
    return Derived(call, {
        **{n: fact(n) for n in ("a.dtype", "b.dtype", "a.scaling", "b.scaling", "layout", "accumulate")},
        **{n: fact(n) for n in ("split_accumulator", "out_dtype", "bias", "out")},
        "epilogue": None, "aux": False, "aux_quantizer": None, "out_quantizer": None, "alpha.one": True,
    })  # fmt: skip


@decomposes("grouped_gemm", pieces=lambda call: {"gemm": Piece("gemm", _each_gemm_facts)})
def gemm_per_group(gemm: Any) -> Any:
    """A loop over the groups; splits on the device are read back."""

    def grouped_gemm(  # type: ignore[no-untyped-def]
        a, b, splits=None, *, layout, out=None, accumulate=False, bias=None, out_dtype=None, split_accumulator=None,
    ):  # fmt: skip
        parts = a
        if splits is not None:
            rows = splits if isinstance(splits, (list, tuple)) else splits.tolist()
            parts = a[0].split(list(rows), 0)
        return [
            gemm(
                x, y, layout, 1.0, None if out is None else out[i], accumulate, None if bias is None else bias[i],
                None, None, None, out_dtype, None, split_accumulator,
            ).out
            for i, (x, y) in enumerate(zip(parts, b))
        ]  # fmt: skip

    return grouped_gemm
