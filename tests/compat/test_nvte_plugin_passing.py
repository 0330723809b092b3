# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls that the plugin leaves to the native functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.compat.nvte_plugin.manifest import SERVED
from tests.compat.formulas import random


class _Subclass(torch.Tensor):
    pass


def _passed_on_calls(tex: Any) -> dict[str, list[tuple[Any, ...]]]:
    """Function -> calls that it passes on."""
    x, w, flag, quantizer = random(12, 32), random(32), torch.zeros(1, dtype=torch.int32), object()
    sub, bf16, f32 = x.as_subclass(_Subclass), x.bfloat16(), tex.DType.kFloat32
    codes, e4m3, mean = torch.zeros(6, 10, dtype=torch.uint8), tex.DType.kFloat8E4M3, random(12)
    x4, freqs, sbhd = random(6, 2, 3, 16), torch.zeros(12, 1, 1, 8), tex.NVTE_QKV_Format.NVTE_SBHD
    rope = (freqs, None, sbhd, False, None)
    row_map, none = torch.zeros(24, dtype=torch.int32), torch.empty(0)
    forward = [(x, quantizer), (sub, None), (x.long(), None)]
    backward = [(x, x, quantizer), (sub, x, None), (bf16, x, None)]
    calls: dict[str, list[tuple[Any, ...]]] = {}
    for name, entry in SERVED.items():
        if entry.family == "activations":
            calls[name] = list(forward if entry.operator == "activation_fwd" else backward)
        elif entry.family == "softmaxes":
            calls[name] = [(sub, 0.5) if name.endswith("forward") and "scaled_masked" not in name else (sub, x, 0.5)]
    calls["clamped_swiglu"].append((x, None, 7.0, 1.702, 0.5))
    calls["clamped_dswiglu"].append((x[:, :16], x, None, 7.0, 1.702, 0.5))
    calls["scaled_masked_softmax_forward"].append((x4, x4.to(torch.uint8), 0.5))
    calls["scaled_aligned_causal_masked_softmax_forward"].append((x4.new_zeros(1, 1, 9, 8), 0.5))
    norm = [(None, quantizer, f32, 0), (x, None, f32, 0), (None, None, f32, 4), (None, None, e4m3, 0)]
    calls["layernorm_fwd"] = [(x, w, w, 1e-5, *rest, False) for rest in norm]
    calls["layernorm_fwd"] += [(x4, w, w, 1e-5, *norm[0][:1], None, f32, 0, False)]
    calls["rmsnorm_fwd"] = [(x, w, 1e-5, *rest, False) for rest in norm]
    calls["layernorm_bwd"] = [(x, x, mean, mean, w, 4, False), (sub, x, mean, mean, w, 0, False)]
    calls["rmsnorm_bwd"] = [(x, x, mean, w, 4, False), (sub, x, mean, w, 0, False)]
    for name, arguments in (("rmsnorm_fwd", (1e-5, None, None, f32)), ("layernorm_fwd", (None, 1e-5, None, None, f32))):
        calls[name].append((x, w.half(), *arguments, 0, False))
    calls["layernorm_fwd"].append((x, w, w.half(), 1e-5, None, None, f32, 0, False))
    calls["rmsnorm_bwd"].append((x, x, mean, w.half(), 0, False))
    calls["rmsnorm_bwd_add"] = [(x, x, x, mean, w, 4, False), (x, x, sub, mean, w, 0, False)]
    for name in ("fused_rope_forward", "fused_rope_backward"):
        other = tex.NVTE_QKV_Format.NVTE_BHSD
        calls[name] = [(x4, *rope, 2, 0), (x4, freqs, None, other, False, None, 1, 0), (sub, *rope, 1, 0)]
    calls["moe_permute_fwd"] = [(codes, e4m3, row_map.view(12, 2), -1, [], 24), (sub, f32, row_map, -1, [], 24)]
    calls["moe_permute_bwd"] = calls["moe_unpermute_fwd"] = [(codes, e4m3, row_map, none, 12, 2)]
    calls["moe_unpermute_bwd"] = [(x, x, f32, row_map, none)]
    calls["fused_multi_row_padding"] = calls["fused_multi_row_unpadding"] = [(sub, x, [12], [12])]
    lists = [[x], [x], [bf16], [bf16]]
    rest = (0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0)
    calls["multi_tensor_adam"] = [(9, flag, lists, *rest), (9, flag, [[x, bf16], [x, x], [x, x], [x, x]], *rest)]
    calls["multi_tensor_l2norm"] = [(9, flag, [[x, bf16]]), (9, flag, [[sub]]), (9, flag, [[codes]])]
    calls["multi_tensor_scale"] = [(9, flag, [[x, bf16], [x, x]], 1.0), (9, flag, [[x], [codes]], 1.0)]
    calls["compute_amax"] = [(sub, w), (codes, w)]
    update = "fused_amax_and_scale_update_after_reduction"
    calls[update] = [(w, [x], [w], "max", e4m3, 0.5), (w, [x], [w], "max", f32, 0)]
    calls[update] += [(w, [x], [w], "mean", e4m3, 0), (w, [], [], "max", e4m3, 0)]
    calls["dequantize"] = [(x, f32), (object(), f32), (object(), e4m3)]
    calls["fp8_transpose"] = [(sub, e4m3), (codes, f32)]
    return calls


def test_calls_that_are_passed_on_reach_the_native_function_with_their_arguments(tex: Any) -> None:
    calls = _passed_on_calls(tex)
    assert {*calls, "generic_gemm"} == set(SERVED)
    seam = tex.__te_dispatch__
    for name, variants in calls.items():
        for arguments in variants:
            seam.native.CALLS.clear()
            keywords = {"out": None} if name == "fp8_transpose" else {}
            assert getattr(tex, name)(*arguments, **keywords) == ("native", name)
            ((called, args, kwargs),) = seam.native.CALLS
            assert called == name and kwargs == keywords
            assert all(one is other for one, other in zip(args, arguments, strict=True))
        assert sum(seam.calls()[name]["passed_on"].values()) == len(variants), name
    assert not seam.served


@pytest.mark.parametrize(
    "change",
    [
        {5: object()}, {0: torch.ones(8, 16, dtype=torch.bfloat16)}, {16: object()}, {18: torch.ones(1)},
        {19: True}, {21: 0.5}, {1: True, 3: True}, {9: True, 11: True}, {9: True, 10: torch.ones(1)},
        {0: random(8, 16).long()}, {7: torch.ones(8), 11: True}, {4: torch.ones(6, 8).as_subclass(_Subclass)},
    ],
)  # fmt: skip
def test_products_that_are_passed_on(tex: Any, change: dict[int, Any]) -> None:
    arguments: list[Any] = [random(8, 16), True, random(6, 16), False, None, None, None, None, tex.DType.kFloat32]
    arguments += [False, None, False, torch.empty(4), 4, False, False, None, None, None, False, 1.0, 0.0]
    for position, value in change.items():
        arguments[position] = value
    assert tex.generic_gemm(*arguments) == ("native", "generic_gemm")


def test_what_the_operator_refuses_reaches_the_caller(tex: Any) -> None:
    """An error is no reason to go to the native function."""
    with pytest.raises(ValueError, match="got a last dimension of 7, expected an even one for swiglu"):
        tex.swiglu(random(4, 7), None)
    assert tex.__te_dispatch__.native.CALLS == []
