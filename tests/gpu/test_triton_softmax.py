# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Softmax on the triton backend in the row lengths that choose how rows are read, judged by the kit's bounds."""

from __future__ import annotations

import pytest
import torch

from te_dispatch.conformance.bounds import softmax as bounds
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.rules import judge

softmax = pytest.importorskip("te_dispatch_triton.softmax")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
COLUMNS = (3, 64, 1000, 2048, 2049, 8192, 10000, 16384, 16385, 50001)


def near(actual: torch.Tensor, known: Known) -> None:
    actual = actual.cpu()
    expected = known.value.float().reshape(actual.shape)
    finding = judge("result", within(known, expected, actual), actual, expected)
    assert finding.passed, finding.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", COLUMNS)
def test_rows_of_any_length(columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(columns)
    x = torch.randn(2, 2, 9, columns, device=DEVICE, dtype=dtype) * 5
    mask = torch.rand(2, 1, 9, columns, device=DEVICE) < 0.3
    mask[0, 0, 4] = True
    y = softmax.softmax_fwd(x, mask, scale=-0.7)
    near(y, bounds.forward(x.cpu(), mask.cpu().expand(x.shape), -0.7))
    dy = torch.randn_like(x)
    near(softmax.softmax_bwd(dy, y, scale=-0.7), bounds.backward(dy.cpu(), y.cpu(), -0.7))


@pytest.mark.parametrize(("rows", "columns"), [(300, 2500), (1000, 1000), (70, 64), (9, 20000)])
def test_causal_rows(rows: int, columns: int) -> None:
    """Rows of which a quarter, a half and all is worked out, and rows in pieces."""
    x = torch.randn(2, 3, rows, columns, device=DEVICE, dtype=torch.bfloat16)
    above = torch.ones(rows, columns, dtype=torch.bool).triu(1)
    near(softmax.softmax_fwd(x, causal=True), bounds.forward(x.cpu(), above, 1.0))


@pytest.mark.parametrize("columns", [4, 40, 64, 1037])
@pytest.mark.parametrize("broadcast", ["column", "row", "none"])
def test_rows_have_the_same_bits_whatever_their_number(columns: int, broadcast: str) -> None:
    """What Triton specialized on once changed with the number of rows, and with it the order of a row's sum."""
    torch.manual_seed(columns)
    x = torch.randn(96, columns, device=DEVICE, dtype=torch.float32) * 4
    mask = torch.rand(1 if broadcast == "row" else 96, 1 if broadcast == "column" else columns, device=DEVICE) < 0.3
    whole = softmax.softmax_fwd(x, mask, scale=0.3)
    for rows in (48, 24, 12, 7, 1):
        part = mask if broadcast == "row" else mask[:rows].contiguous()
        assert torch.equal(softmax.softmax_fwd(x[:rows].contiguous(), part, scale=0.3), whole[:rows]), rows
