# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products through hipBLASLt. Contracts: `te_dispatch.ops.gemm`.

`gemm` multiplies plain dtypes, `gemm_codes` quantized operands. What the library does not fuse is not fused here
either: the requirements leave such calls to others, such as the product in fp32 followed by the epilogue.

fp32 operands are multiplied in fp32, or in TF32 where PyTorch's setting for its own products allows that
(``torch.set_float32_matmul_precision``, ``torch.backends.cuda.matmul``) and the chip has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.call_plans import OFTEN, Planned, launching, planned
from te_dispatch.backend_kit.memory import contiguous_out
from te_dispatch.backend_kit.products import allows_tf32
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import gemm as checks
from te_dispatch.ops.results import Gemm
from te_dispatch_rocm.gemm_operands import empty_product, quantized_operands
from te_dispatch_rocm.gemm_plans import Operand, Problem, plain_operands, plan_of, problem_of
from te_dispatch_rocm.memory import ALIGNED, address, empty, place_of, usable, usable_or_none
from te_dispatch_rocm.native import load

_native = load()


@planned(bias=OFTEN)
def gemm(
    a: torch.Tensor | Quantized,
    b: torch.Tensor | Quantized,
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
) -> Gemm | Planned:
    """fp32, bf16 and fp16 operands."""
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and not isinstance(aux, Quantized)
    dtype = out_dtype or (a.dtype if out is None else out.dtype)
    left, right, sizes = plain_operands(usable(a), usable(b), layout)
    if not all(sizes):
        return _of_nothing(shape, dtype, a.device, out, accumulate, bias, epilogue)
    return _product(
        left, right, sizes, "none", shape, dtype, alpha, out, accumulate, bias, epilogue, usable_or_none(aux)
    )


@planned("gemm", bias=OFTEN)
def gemm_codes(
    a: torch.Tensor | Quantized,
    b: torch.Tensor | Quantized,
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
) -> Gemm | Planned:
    """Quantized operands. AMD's units add in fp32, so `split_accumulator` changes nothing."""
    shape = checks.gemm(
        a, b, layout, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer, alpha
    )  # fmt: skip
    assert isinstance(a, Quantized) and isinstance(b, Quantized)
    dtype = out_dtype or (a.dtype if out is None else out.dtype)
    left, right, sizes = quantized_operands(a, b, layout)
    if not all(sizes):
        return _of_nothing(shape, dtype, a.device, out, accumulate, bias, epilogue)
    return _product(left, right, sizes, a.scaling, shape, dtype, alpha, out, accumulate, bias, None, None)


def _of_nothing(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
    epilogue: str | None,
) -> Gemm:
    if epilogue is not None:
        raise Declined(f"hipBLASLt applies {epilogue} to products that have elements and sum something alone")
    return Gemm(empty_product(shape, dtype, device, out, accumulate, bias), None, None)


def _product(
    a: Operand,
    b: Operand,
    sizes: tuple[int, int, int],
    scaling: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    alpha: float,
    out: torch.Tensor | None,
    accumulate: bool,
    bias: torch.Tensor | None,
    epilogue: str | None,
    aux: torch.Tensor | None,
) -> Gemm | Planned:
    """The product of contiguous, aligned operands."""
    target = None if out is None else contiguous_out(out, accumulate, ALIGNED)
    device, stream_of = place_of(a.data)
    fp32 = a.kind is torch.float32
    tf32 = fp32 and allows_tf32()

    def problem(bias_dtype: torch.dtype | None) -> Any:
        aux_dtype = dtype if epilogue == "gelu" else None if aux is None else aux.dtype
        return problem_of(
            a, b, sizes, scaling, device, dtype, accumulate, bias_dtype, epilogue, aux_dtype, tf32
        )  # fmt: skip

    bias = usable_or_none(bias)
    biased = plan_with_bias(problem, dtype, bias, epilogue)
    plan = biased.plan
    memory = a.data.device
    rows = {"dgelu": sizes[1], "bgrad_b": sizes[1], "bgrad_a": sizes[0]}.get(epilogue or "")
    workspace, run = plan.workspace, _native.gemm_run

    def launch(
        a: torch.Tensor,
        b: torch.Tensor,
        a_scale: torch.Tensor | None,
        b_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
        aux: torch.Tensor | None,
    ) -> Any:
        # Written out: calls of a function for each operand would take as long as the rest.
        at_a, at_b = a.data_ptr(), b.data_ptr()
        at_out = 0 if out is None else out.data_ptr()
        at_bias = 0 if bias is None else bias.data_ptr()
        at_aux = 0 if aux is None else aux.data_ptr()
        if (at_a | at_b | at_out | at_bias | at_aux) % ALIGNED or (fp32 and allows_tf32() != tf32):
            return NotImplemented  # no signature tells these apart
        result = empty("out", shape, dtype, memory) if out is None else out
        dbias = made = scratch = None
        summand = biased.given(bias)
        if summand is not bias:
            at_bias = address(summand)
        elif rows is not None:
            dbias = empty("dbias", (rows,), dtype, memory)
            at_bias = dbias.data_ptr()
        if epilogue == "gelu":
            made = empty("aux", shape, dtype, memory)
            at_aux = made.data_ptr()
        if workspace:
            scratch = empty("workspace", (workspace,), torch.uint8, memory)
        run(
            plan, stream_of(device), at_a, at_b, address(a_scale), address(b_scale), at_out or result.data_ptr(),
            at_bias, at_aux, address(scratch), alpha,
        )  # fmt: skip
        if biased.added and bias is not None:
            result.add_(bias.detach())
        return Gemm(result, made, dbias)

    call = launching(launch, a.data, b.data, a.scale, b.scale, bias, target, aux)
    if target is out or out is None or target is None:
        return call
    result: Gemm = call.run()
    return result._replace(out=out.copy_(target))


class Biased(NamedTuple):
    """A plan, and what is done with the bias.

    Attributes:
        widened: whether the plan takes it in fp32, which holds it exactly, and not in its own dtype.
        added: whether the plan leaves it out, and who runs it adds it to the result.
    """

    plan: Any
    widened: bool = False
    added: bool = False

    def given(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The bias as the plan takes it."""
        if bias is None or self.added:
            return None
        if not self.widened:
            return bias
        return empty("workspace", tuple(bias.shape), torch.float32, bias.device).copy_(bias.detach())


def plan_with_bias(
    problem: Callable[[torch.dtype | None], Problem],
    dtype: torch.dtype,
    bias: torch.Tensor | None,
    epilogue: str | None,
) -> Biased:
    """The plan of a product with its bias. Where the library takes none, a result in fp32 is one that it can be added
    to.

    Args:
        problem: of a dtype of the bias, or of its gradient.
        dtype: of the result.

    Raises:
        Declined: the library has no algorithm.
    """
    if bias is None:
        return Biased(plan_of(problem(None if epilogue in (None, "gelu") else dtype)))
    for kind in dict.fromkeys((bias.dtype, torch.float32)):
        try:
            return Biased(plan_of(problem(kind)), widened=kind is not bias.dtype)
        except Declined:
            continue
    if dtype is not torch.float32 or epilogue is not None:
        raise Declined("hipBLASLt has no algorithm for this product with a bias")
    return Biased(plan_of(problem(None)), added=True)
