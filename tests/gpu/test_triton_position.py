# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary embedding on the triton backend in sizes of real models, judged by the kit's bounds."""

from __future__ import annotations

import pytest
import torch

from te_dispatch.conformance.bounds import position as bounds
from te_dispatch.conformance.bounds.known import within
from te_dispatch.conformance.rules import judge

position = pytest.importorskip("te_dispatch_triton.position")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "features", "rotated"), [(32, 128, 128), (5, 80, 32), (2, 576, 576), (71, 64, 20)])
def test_heads_of_any_size(heads: int, features: int, rotated: int, interleaved: bool, backward: bool) -> None:
    torch.manual_seed(features)
    x = torch.randn(130, 3, heads, features, device=DEVICE, dtype=torch.bfloat16)
    half = torch.rand(140, 1, 1, rotated // 2, device=DEVICE) * 1e5
    freqs = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
    offsets = torch.tensor([10, 0, 3], dtype=torch.int32, device=DEVICE)
    turn = position.rope_bwd if backward else position.rope_fwd
    places = torch.arange(130)[:, None] + offsets.cpu()
    angles = freqs.cpu().view(140, rotated)[places][:, :, None]
    known = bounds.rotated(x.cpu(), angles, interleaved, backward)
    for layout in ("sbhd", "bshd"):
        given = x if layout == "sbhd" else x.transpose(0, 1)
        y = turn(given, freqs, layout=layout, interleaved=interleaved, offsets=offsets)
        actual = (y if layout == "sbhd" else y.transpose(0, 1)).cpu()
        expected = known.value.float()
        finding = judge("result", within(known, expected, actual), actual, expected)
        assert finding.passed, finding.message


def test_positions_without_angles_give_nothing_that_looks_like_a_result() -> None:
    x = torch.ones(4, 2, 1, 8, device=DEVICE)
    freqs = torch.zeros(5, 1, 1, 8, device=DEVICE)
    offsets = torch.tensor([0, 3], dtype=torch.int32, device=DEVICE)
    y = position.rope_fwd(x, freqs, offsets=offsets)
    assert y[:, 0].isfinite().all() and y[:2, 1].isfinite().all() and y[2:, 1].isnan().all()
