# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of the kit's spaces whose arguments hold nothing."""

from __future__ import annotations

import pytest
import torch

from te_dispatch.conformance.blank import NotServed, calls, region, run
from te_dispatch.numerics.quantized import Quantized


def test_regions_are_every_combination_at_any_size() -> None:
    made = list(calls([region("gemm.plain", shape="2048x1024x512", dtype="bf16 fp16", layout="NT TN")]))
    assert [call.name for call in made] == [
        f"gemm.plain[shape=2048x1024x512,dtype={dtype},layout={layout}]"
        for dtype in ("bf16", "fp16")
        for layout in ("NT", "TN")
    ]
    assert [tuple(call.arguments["a"].shape) for call in made[:2]] == [(2048, 512), (512, 2048)]
    assert {call.arguments["a"].dtype for call in made} == {torch.bfloat16, torch.float16}
    assert all(call.forward is None for call in made)


def test_operands_are_what_backends_know() -> None:
    (call,) = calls([region("gemm.quantized", shape="256x256x256", scaling="mxfp8+mxfp8")])
    assert type(call.arguments["a"]) is Quantized and call.arguments["a"].shape == (256, 256)
    (backward,) = calls([region("attention_bwd.plain", shape="2x64x64")])
    assert backward.forward is not None and "dout" not in backward.forward
    (sliced,) = calls([region("quantize.current", shape="64x32")._replace(sliced=True)])
    assert sliced.arguments["x"].stride(0) > 32


@pytest.mark.parametrize(
    ("space", "axes", "message"),
    [
        ("gemm.plane", {}, "gemm has no space 'plane'"),
        ("gemm.plain", {"shapes": "1x1x1"}, "gemm.plain has no axis 'shapes'"),
        ("gemm.quantized", {"scaling": "nvfp4+nvfp4", "encodings": "e5m2+e4m3fn"}, "gemm.quantized has no case with"),
    ],
)
def test_what_does_not_exist_is_refused(space: str, axes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(calls([region(space, **axes)]))


def test_a_call_is_served_by_the_backend_s_own_choice_for_the_device() -> None:
    (forward,) = calls([region("softmax_fwd.plain", shape="2x16x16")])
    run(forward, "torch", "nvidia:sm_90")
    with pytest.raises(NotServed, match=r"softmax_fwd.plain\[shape=2x16x16\]: absent has no implementation of it"):
        run(forward, "absent", "nvidia:sm_90")
    (rotated,) = calls([region("quantize.rotated", shape="48x33")])
    with pytest.raises(NotServed, match=r"quantize\.rotated.* on nvidia:sm_90: triton\.quantize: "):
        run(rotated, "triton", "nvidia:sm_90")
