# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products, plain and grouped, in high precision and FP8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from te_dispatch.core.errors import NoImplementation
from te_dispatch.core.operator import OPERATORS, Fact, operator
from te_dispatch.core.resolve import resolve
from te_dispatch.numerics.quantized import SCALINGS
from te_dispatch.ops.results import Gemm
from te_dispatch.ops.shapes import empty_quantized, rows_of

if TYPE_CHECKING:
    import torch

    from te_dispatch.core.bindings import Bindings
    from te_dispatch.numerics.quantized import Operand
    from te_dispatch.numerics.quantizers import Quantizer

LAYOUTS = ("NT", "NN", "TN")
EPILOGUES = ("gelu", "dgelu", "bgrad_a", "bgrad_b")


class Epilogue(NamedTuple):
    """What `gemm` does with the sums of a product: times `alpha`, plus `bias`, the operator's `epilogue` (`kind`), plus
    `out` where it accumulates, one rounding or cast.

    Attributes:
        shape, dtype: of the result; the nominal dtype where it is quantized.
        alpha, out, accumulate, bias, aux, aux_quantizer, out_quantizer: the operator's arguments.
        kind: its `epilogue`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    alpha: float
    out: torch.Tensor | None
    accumulate: bool
    bias: torch.Tensor | None
    kind: str | None
    aux: Operand | None
    aux_quantizer: Quantizer | None
    out_quantizer: Quantizer | None


def gemm_sizes(a: Any, b: Any, layout: str) -> tuple[int, int, int]:
    """(m, n, k) of a product: leading dimensions of an untransposed `a`, and of a transposed one, flatten."""
    return sizes_of(a.shape, b.shape, layout)


def sizes_of(a: tuple[int, ...], b: tuple[int, ...], layout: str) -> tuple[int, int, int]:
    """`gemm_sizes` of operands with these shapes."""
    if layout == "NT":
        return rows_of(a), rows_of(b), a[-1]
    if layout == "NN":
        return rows_of(a), b[-1], a[-1]
    if layout == "TN":
        return a[-1], b[-1], rows_of(a)
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def out_shape(a: Any, b: Any, layout: str) -> tuple[int, ...]:
    """The shape of a product."""
    return shape_of(a.shape, b.shape, layout)


def shape_of(a: tuple[int, ...], b: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """`out_shape` of operands with these shapes."""
    m, n, _ = sizes_of(a, b, layout)
    return shape_from(a, m, n, layout)


def shape_from(a: tuple[int, ...], m: int, n: int, layout: str) -> tuple[int, ...]:
    """`out_shape` of a product whose sizes are known, given the shape of its first operand."""
    return (m, n) if layout == "TN" else (*a[:-1], n)


def operand_format(layout: str, operand: str, scaling: str) -> tuple[str, str]:
    """The copy of a quantized operand that a GEMM reads by default: the one whose last dimension is contracted.

    The manifest of an implementation that reads another copy, or scales in another layout, names a function of this
    signature (`te_dispatch.core.manifest.Implementation.operand_format`); `te_dispatch.ops.gemm_operand_format` asks
    that of the implementation that is bound.

    Returns:
        (usage, scale_layout), e.g. ``("row", "canonical")``.
    """
    contracted_last = {"a": layout[0] == "N", "b": layout[1] == "T"}[operand]
    return ("row" if contracted_last else "column"), "canonical"


def checked_format(answer: Any, implementation: str, asked: tuple[str, str, str]) -> tuple[str, str]:
    """What an implementation's ``operand_format`` answered, if it can be one.

    Args:
        answer: of the function.
        implementation: whose it is.
        asked: the arguments: layout, operand, scaling.

    Raises:
        ValueError: it is no pair of a usage and the name of a scale layout.
    """
    if (
        isinstance(answer, tuple)
        and len(answer) == 2
        and answer[0] in ("row", "column")
        and isinstance(answer[1], str)
        and answer[1]
    ):
        return answer
    raise ValueError(
        f"{implementation}: its operand_format answered {answer!r} for {', '.join(asked)}, expected a tuple "
        "(usage, scale_layout) with usage 'row' or 'column', such as ('row', 'canonical')"
    )


def bound_operand_formats(
    bindings: Bindings, device: Any, a: tuple[str, str], b: tuple[str, str], layout: str
) -> tuple[tuple[str, str], tuple[str, str]]:
    """`operand_format` of the GEMM that `bindings` choose for operands of (encoding, scaling) `a` and `b`."""
    key = (device, a, b, layout)
    snapshot, facts = bindings.snapshot, bindings.device_facts(device)
    known = bindings.operand_formats.get(key)
    if known is None or known[0] is not snapshot or known[1] is not facts:
        found = _resolved_formats(bindings, snapshot, facts, a, b, layout)
        known = bindings.operand_formats[key] = snapshot, facts, found
    return known[2]


def _resolved_formats(
    bindings: Bindings, snapshot: Any, facts: Any, a: tuple[str, str], b: tuple[str, str], layout: str
) -> tuple[tuple[str, str], tuple[str, str]]:
    operator = OPERATORS["gemm"]
    call = {
        **operator.default_facts(),
        "a.dtype": a[0], "a.scaling": a[1], "b.dtype": b[0], "b.scaling": b[1], "layout": layout,
    }  # fmt: skip
    # Shapes and the rounding of sums are left unknown: they do not decide which copy is read.
    for name in ("split_accumulator", "split_accumulator.default", "out_dtype", "out_dtype.default", "bias"):
        call.pop(name, None)
    decision = resolve(operator, call, facts, bindings.policy, snapshot)
    chosen = decision.chosen
    if chosen is None and bindings.makes_calls:
        raise NoImplementation(decision.table())
    asked = None
    if chosen is not None and not chosen.pieces:
        asked = bindings.declared(chosen.id, "operand_format")
    if chosen is None or asked is None:
        return operand_format(layout, "a", a[1]), operand_format(layout, "b", b[1])
    questions = (layout, "a", a[1]), (layout, "b", b[1])
    first, second = (checked_format(asked(*question), chosen.id, question) for question in questions)
    return first, second


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
    words={"layout": LAYOUTS, "epilogue": EPILOGUES},
    facts=(
        Fact("k", "(_rows(a) if layout == 'TN' else a.shape[-1])", "size", "the contracted dimension"),
        Fact("m", "(a.shape[-1] if layout == 'TN' else _rows(a))", "size", "rows of the product, all together"),
        Fact("n", "(_rows(b) if layout == 'NT' else b.shape[-1])", "size", "columns of the product"),
        Fact("alpha.one", "(alpha == 1)", doc="whether alpha is exactly 1", boolean=True),
    ),
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
    aux: Operand | None = None,
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
        alpha: the product's factor. With 0 the product is 0, or NaN where it is not finite without the factor: an
            implementation may skip the operands. `bias`, the epilogue and `accumulate` apply all the same.
        out: written to and returned; with `accumulate`, added to: out += product. Its dtype is the output dtype.
        bias: (n,), float32, bfloat16 or float16, added to every row, before the epilogue.
        epilogue: None, or

            ``gelu``: out = gelu(z), tanh form, and the result's `aux` is z (rounded to the output dtype, or
            quantized by `aux_quantizer`).
            ``dgelu``: out = product * gelu'(aux), with `aux` the z of the forward; dbias (n,) = column sums of that,
            in fp32, before it is rounded, accumulated or quantized.
            ``bgrad_b``: dbias (n,) = sum over k of b (layout TN with b the output gradient).
            ``bgrad_a``: dbias (m,) = sum over k of a (layout TN with a the output gradient).
        out_dtype: None for out's dtype, else a's (nominal, if quantized).
        out_quantizer: quantize the output row-wise (before, the value is rounded to fp32 only).
        split_accumulator: FP8 only: promote partial sums to full fp32 (True), allow the unit's fast accumulation
            (False), or None for the policy's default: False where a recipe's fprop would be, as hardware has it.

    Returns:
        out, aux (``gelu`` only), dbias (``dgelu``, ``bgrad_*`` only).

    Raises:
        ValueError: shapes that do not match, `accumulate` without `out`, an unknown epilogue, an epilogue without
            its `aux` or the other way round, `out` with another `out_dtype`, with `out_quantizer` or with a stride of 0
            along more than one element; names the argument.
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
    if splits is None:
        shapes = [x.shape for x in a]
    else:
        rows = splits.tolist() if isinstance(splits, torch.Tensor) else splits
        shapes = [(count, a[0].shape[-1]) for count in rows]
    dtype, device = out_dtype or (a[0].dtype if a else None), a[0].device if a else None
    return [torch.empty(shape_of(shape, y.shape, layout), dtype=dtype, device=device) for shape, y in zip(shapes, b)]


@operator(
    family="gemm",
    version=1,
    shape=_grouped_shape,
    device="b[0].device",
    words={"layout": LAYOUTS},
    facts=(
        Fact("a.dtype", "(a[0].encoding if a[0].__class__ in _RECORDS else a[0].dtype)", "dtype"),
        Fact("b.dtype", "(b[0].encoding if b[0].__class__ in _RECORDS else b[0].dtype)", "dtype"),
        Fact("a.scaling", "(a[0].scaling if a[0].__class__ in _RECORDS else 'none')", words=("none", *SCALINGS)),
        Fact("b.scaling", "(b[0].scaling if b[0].__class__ in _RECORDS else 'none')", words=("none", *SCALINGS)),
        Fact("a", "len(a)", "size", "number of groups"),
        Fact("b", "len(b)", "size", "number of groups"),
        Fact(
            "splits",
            "('none' if splits is None else 'host' if splits.__class__ in _SEQUENCES else 'device')",
            doc="where the splits are",
            words=("none", "host", "device"),
        ),
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
