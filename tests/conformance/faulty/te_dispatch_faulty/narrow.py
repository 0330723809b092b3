# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of backends that claim little: primitives, or one operator. Each is wrong in one value of what it claims."""

from __future__ import annotations

import itertools

import torch

from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Behaviour, Condition, given, of_dtype, spoiled, table, where

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_KINDS = (
    "gelu", "qgelu", "relu", "srelu", "silu", "geglu", "qgeglu", "reglu", "sreglu", "swiglu", "glu", "clamped_swiglu",
)  # fmt: skip
_LAYOUTS = ("NT", "NN", "TN")
_PAIRS = (("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e4m3fn", "e5m2"))


def _encodings(a: str, b: str) -> Condition:
    return lambda call: (call["a"].encoding, call["b"].encoding) == (a, b)


def _quantizer(**wanted: str) -> Condition:
    return lambda call: all(getattr(call["quantizer"], name) == value for name, value in wanted.items())


def _wrong(backend: str, operator: str, name: str, path: str, cases: dict[str, Condition]) -> tuple[Fault, ...]:
    entries: dict[str, tuple[str, Behaviour]] = {
        f"{backend}_{name}_wrong_for_{case}": (f"is wrong for {case.replace('_', ' ')}", spoiled(path, on=condition))
        for case, condition in cases.items()
    }
    return table(operator, entries, on=f"{backend}.{name}")


def _by_dtype(operand: str) -> dict[str, Condition]:
    return {name: of_dtype(operand, dtype) for name, dtype in _DTYPES.items()}


def _fp8_cases() -> dict[str, Condition]:
    pairs = itertools.product(_LAYOUTS, _PAIRS)
    return {f"{layout}_{a}_by_{b}": where(given(layout=layout), _encodings(a, b)) for layout, (a, b) in pairs}


_PRODUCTS = (
    *_wrong("narrow", "gemm", "product", "out", {
        f"{layout}_{name}": where(given(layout=layout), of_dtype("a", dtype))
        for layout, (name, dtype) in itertools.product(_LAYOUTS, _DTYPES.items())
    }),
    *_wrong("narrow", "gemm", "fp8_product", "out", {
        **_fp8_cases(),
        **{f"{layout}_accumulated": given(layout=layout, accumulate=True) for layout in _LAYOUTS},
        "split_accumulation": given(split_accumulator=True),
        "fast_accumulation": given(split_accumulator=False),
    }),
    *_wrong("single", "gemm", "fp8_product", "out", {
        **_fp8_cases(),
        **{f"fp32_result_of_{layout}": given(layout=layout, out_dtype=torch.float32) for layout in _LAYOUTS},
    }),
)  # fmt: skip

_ROWS = (
    *_wrong("narrow", "activation_fwd", "activation_fwd", "out", {
        **{kind: given(kind=kind) for kind in _KINDS}, **_by_dtype("x"),
        "swiglu_in_fp16": where(given(kind="swiglu"), of_dtype("x", torch.float16)),
        "geglu_in_fp32": where(given(kind="geglu"), of_dtype("x", torch.float32)),
    }),
    *_wrong("narrow", "activation_bwd", "activation_bwd", "dx", {
        **{kind: given(kind=kind) for kind in _KINDS}, **_by_dtype("dy"),
    }),
    *_wrong("narrow", "layernorm_fwd", "layernorm_fwd", "y", {
        **_by_dtype("x"),
        "fp32_to_fp32": where(of_dtype("x", torch.float32), given(out_dtype=(None, torch.float32))),
        "bf16_to_fp32": where(of_dtype("x", torch.bfloat16), given(out_dtype=torch.float32)),
        "zero_centred_gamma": given(zero_centered_gamma=True),
        "no_beta": given(beta=None),
    }),
    *_wrong("narrow", "layernorm_bwd", "layernorm_bwd", "dgamma", {
        **_by_dtype("x"), "zero_centred_gamma": given(zero_centered_gamma=True),
    }),
    *_wrong("narrow", "softmax_fwd", "softmax_fwd", "", {
        **_by_dtype("x"), "causal": given(causal=True), "a_mask": given(mask=...),
        "a_causal_mask": given(causal=True, mask=...),
    }),
    *_wrong("narrow", "softmax_bwd", "softmax_bwd", "", _by_dtype("dy")),
    *_wrong("narrow", "quantize", "quantize", "row_data", {
        **{f"{kind}_{encoding}": _quantizer(kind=kind, encoding=encoding)
           for kind in ("delayed", "current") for encoding in ("e4m3fn", "e5m2")},
        **_by_dtype("x"), "both_copies": given(usage="both"),
    }),
    *_wrong("narrow", "dequantize", "dequantize", "", {
        **{encoding: lambda call, encoding=encoding: call["x"].encoding == encoding for encoding in ("e4m3fn", "e5m2")},
        "fp16_results": given(dtype=torch.float16),
    }),
    *_wrong("narrow", "rope_fwd", "rope_fwd", "", {
        "interleaved_pairs": given(interleaved=True), "bshd": given(layout="bshd"), "offsets": given(offsets=...),
    }),
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (*_PRODUCTS, *_ROWS)
