# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of the gemm family. What each does wrong: `te_dispatch_faulty.catalogue`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.results import Gemm
from te_dispatch_faulty.arithmetic import finished
from te_dispatch_faulty.binding import Call
from te_dispatch_torch.gemm import _matrices, _values
from te_dispatch_torch.quantize import cast

#: Products between two roundings of a narrow accumulator: a matrix instruction's depth.
_DEPTH = 32


def drops_k_tail(call: Call) -> Any:
    a, b, layout = call["a"], call["b"], call["layout"]
    if call["epilogue"] in ("bgrad_a", "bgrad_b"):
        return call.sound()
    if layout == "TN":
        a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
        k = a.shape[0] // 16 * 16
        return call.sound(a=a[:k], b=b[:k])
    k = a.shape[-1] // 16 * 16
    return call.sound(a=a[..., :k], b=b[..., :k] if layout == "NT" else b[:k])


def repeats_last_row(call: Call) -> Any:
    made = call.sound()
    if isinstance(made.out, torch.Tensor) and made.out.numel():
        rows = made.out.view(-1, made.out.shape[-1])
        if rows.shape[0] > 128 and rows.shape[0] % 128 == 1:
            rows[-1] = rows[-2]
    return made


def accumulates_twice(call: Call) -> Any:
    if call["accumulate"]:
        call.sound()
    return call.sound()


def ignores_alpha(call: Call) -> Any:
    return call.sound(alpha=1.0)


def ignores_bias(call: Call) -> Any:
    return call.sound(bias=None)


def ignores_accumulate(call: Call) -> Any:
    return call.sound(accumulate=False)


def scales_bias_too(call: Call) -> Any:
    return call.sound(bias=None if call["bias"] is None else call["bias"] * call["alpha"])


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """10 bits of mantissa, rounded to nearest."""
    if x.dtype != torch.float32:
        return x
    rounded = ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(rounded.isfinite(), rounded, x)


def uses_tf32(call: Call) -> Any:
    return call.sound(a=_tf32(call["a"].contiguous()), b=_tf32(call["b"].contiguous()))


def _summed(call: Call, step: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """The product, where `step` (sum so far, a's next `_DEPTH` columns, b's rows) gives the next sum."""
    a, b, layout = call["a"], call["b"], call["layout"]
    left, right = _matrices(_values(a, layout, "a"), _values(b, layout, "b"), layout)
    total = torch.zeros((left.shape[0], right.shape[1]), device=left.device)
    for start in range(0, left.shape[1], _DEPTH):
        total = step(total, left[:, start : start + _DEPTH], right[start : start + _DEPTH])
    return finished(call, total)


def accumulates_in_bf16(call: Call) -> Any:
    return _summed(call, lambda total, left, right: (total + left @ right).bfloat16().float())


def _fourteen_bits(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Products and sum so far, aligned to the largest of them and cut off after 14 bits, as Hopper's FP8 units do."""
    terms = torch.cat((left.unsqueeze(2) * right.unsqueeze(0), total.unsqueeze(1)), 1)
    exponent = torch.frexp(terms.abs().amax(1, keepdim=True)).exponent
    unit = torch.ldexp(torch.ones(exponent.shape, device=exponent.device), exponent - 14)
    return ((terms / unit).trunc() * unit).sum(1)


def accumulates_fast(call: Call) -> Any:
    return _summed(call, _fourteen_bits)


def computes_gelu_by_erf(call: Call) -> Any:
    made = call.sound()
    if call["epilogue"] == "gelu" and isinstance(made.out, torch.Tensor) and not call["accumulate"]:
        plain = call.sound(epilogue=None, aux_quantizer=None, out=None, out_dtype=torch.float32)
        made.out.copy_(torch.nn.functional.gelu(plain.out))
    return made


def saves_aux_after_gelu(call: Call) -> Any:
    made = call.sound()
    if isinstance(made.aux, torch.Tensor) and isinstance(made.out, torch.Tensor):
        made.aux.copy_(made.out)
    return made


def sums_bias_gradient_early(call: Call) -> Any:
    made = call.sound()
    if call["epilogue"] == "dgelu":
        plain = call.sound(
            epilogue=None, aux=None, out=None, accumulate=False, out_quantizer=None, out_dtype=torch.float32
        )
        made.dbias.copy_(plain.out.reshape(-1, plain.out.shape[-1]).sum(0))
    return made


def misses_bias_row(call: Call) -> Any:
    made = call.sound()
    if call["epilogue"] in ("bgrad_a", "bgrad_b"):
        operand = call["a"] if call["epilogue"] == "bgrad_a" else call["b"]
        made.dbias.copy_(operand.reshape(-1, operand.shape[-1])[:-1].float().sum(0))
    return made


def rounds_before_cast(call: Call) -> Any:
    if call["out_quantizer"] is None:
        return call.sound()
    dtype = call["out_dtype"] or call["a"].dtype
    made = call.sound(out_quantizer=None)
    return call.delivered(Gemm(cast(made.out, call["out_quantizer"], "row", dtype), made.aux, made.dbias))


def ignores_out_dtype(call: Call) -> Any:
    made = call.sound()
    if isinstance(made.out, torch.Tensor) and made.out.dtype != call["a"].dtype and call["out"] is None:
        made.out.copy_(made.out.to(call["a"].dtype))
    return made


def _changed(x: Quantized, **changes: Any) -> Quantized:
    names = (
        "row_data", "col_data", "row_scale_inv", "col_scale_inv", "encoding", "scaling", "scale_layout", "shape",
        "dtype", "device", "global_scale_inv",
    )  # fmt: skip
    return Quantized(**{**{name: getattr(x, name) for name in names}, **changes})


def reads_one_encoding(call: Call) -> Any:
    return call.sound(b=_changed(call["b"], encoding=call["a"].encoding))


def ignores_b_scale(call: Call) -> Any:
    b = call["b"]
    scales = {
        name: torch.ones_like(getattr(b, name))
        for name in ("row_scale_inv", "col_scale_inv")
        if getattr(b, name) is not None and b.scaling == "tensor"
    }
    return call.sound(b=_changed(b, **scales))


def shifts_block_scales(call: Call) -> Any:
    a = call["a"]
    scales = {
        name: getattr(a, name).roll(1, -1)
        for name in ("row_scale_inv", "col_scale_inv")
        if getattr(a, name) is not None and a.scaling != "tensor"
    }
    return call.sound(a=_changed(a, **scales))


def shifts_after_empty_group(call: Call) -> Any:
    a, b, splits = call["a"], list(call["b"]), call["splits"]
    rows = [x.shape[0] for x in a] if splits is None else list(splits)
    if 0 in rows and all(y.shape == b[0].shape for y in b):
        b = [*b[1:], b[0]]
    return call.sound(b=b)


def repeats_first_bias(call: Call) -> Any:
    bias = call["bias"]
    return call.sound(bias=None if bias is None else [bias[0]] * len(bias))
