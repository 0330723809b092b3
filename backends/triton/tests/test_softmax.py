# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Softmax beyond the conformance kit: rows in pieces, extremes, masks of any rank, arguments."""

from __future__ import annotations

import pytest
import torch


def expected_of(x: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    z = x.double() * scale
    if mask is not None:
        z = z.masked_fill(mask, -torch.inf)
    return torch.softmax(z, -1).nan_to_num(0.0).float()


@pytest.mark.interpreted
@pytest.mark.parametrize("scale", [1.0, -0.3])
@pytest.mark.parametrize("values", ["rising", "falling", "masked first"])
def test_rows_that_are_read_in_pieces(values: str, scale: float) -> None:
    """A new maximum in every piece, none after the first, and pieces of nothing before one of something."""
    from te_dispatch_triton import softmax

    x = torch.linspace(-60, 60, 5000).repeat(3, 1)
    if values == "falling":
        x = x.flip(-1)
    mask = torch.zeros(3, 5000, dtype=torch.bool)
    mask[0, :4000] = values == "masked first"
    mask[1] = True
    y = softmax.softmax_fwd(x, mask, scale=scale)
    torch.testing.assert_close(y, expected_of(x, mask, scale), rtol=3e-5, atol=1e-37)
    dy = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    dx = softmax.softmax_bwd(dy, y, scale=scale)
    expected = scale * y.double() * (dy - (dy.double() * y).sum(-1, keepdim=True))
    torch.testing.assert_close(dx, expected.float(), rtol=1e-4, atol=1e-9)


@pytest.mark.interpreted
@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_the_largest_numbers_do_not_overflow(scale: float) -> None:
    from te_dispatch_triton import softmax

    x = torch.tensor([[3e38, 3e38, -3e38, 0.0], [-3.4e38, 3.4e38, 3.4e38, 1.0]])
    torch.testing.assert_close(softmax.softmax_fwd(x, scale=scale), expected_of(x, None, scale))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "shape",
    [(), (1,), (5, 1), (1, 7), (5, 7), (3, 5, 7), (3, 1, 7), (2, 1, 5, 7), (1, 3, 1, 1), (4, 1, 3, 1, 7)],
)
def test_masks_broadcast_from_any_rank(shape: tuple[int, ...]) -> None:
    from te_dispatch_triton import softmax

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*((4, 2, 3, 5, 7) if len(shape) > 4 else (2, 3, 5, 7)), generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.4
    torch.testing.assert_close(softmax.softmax_fwd(x, mask), expected_of(x, mask.expand(x.shape), 1.0))


@pytest.mark.interpreted
def test_operands_that_do_not_lie_dense() -> None:
    from te_dispatch_triton import softmax

    x = torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(4)).transpose(0, 2)[..., ::2]
    mask = (torch.arange(8 * 3) % 3 == 0).view(3, 8).t()
    torch.testing.assert_close(softmax.softmax_fwd(x, mask), expected_of(x, mask.expand(x.shape), 1.0))


@pytest.mark.interpreted
def test_arguments_are_checked() -> None:
    from te_dispatch_triton import softmax

    with pytest.raises(ValueError, match=r"^mask: "):
        softmax.softmax_fwd(torch.zeros(2, 3), torch.zeros(3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"^dy: "):
        softmax.softmax_bwd(torch.zeros(2, 3), torch.zeros(2, 4))


@pytest.mark.compiles
@pytest.mark.parametrize("columns", [4, 40, 64])
@pytest.mark.parametrize("kind", ["none", "rows and columns", "column", "broadcast", "heads", "strided"])
def test_the_number_of_rows_does_not_choose_the_kernel(kind: str, columns: int) -> None:
    """Triton lays out a mask's loads by what it specializes on, and sums rows in that layout: one specialized on the
    number of rows gives a row other bits beside other rows (seen on an H100 with 96 and 24, and a mask of one column).
    """
    from te_dispatch_triton import softmax, targets
    from te_dispatch_triton.crosscompile import chips
    from te_dispatch_triton.crosscompile.matrix import specialization_of
    from te_dispatch_triton.launch import Launch, recording

    target, host = chips.TARGETS["sm_90"], torch.device("cpu")
    found = {}
    targets.pretend(host, target)
    try:
        for batch, heads, rows in ((1, 1, 96), (1, 1, 24), (2, 3, 1), (5, 16, 17), (16, 1, 2)):
            masks = {
                "none": None,
                "rows and columns": torch.zeros(batch, heads, rows, columns, dtype=torch.bool),
                "column": torch.zeros(batch, heads, rows, 1, dtype=torch.bool),
                "broadcast": torch.zeros(columns, dtype=torch.bool),
                "heads": torch.zeros(batch, 1, rows, columns, dtype=torch.bool),
                "strided": torch.zeros(batch, heads, rows, columns + 16, dtype=torch.bool)[..., :columns],
            }
            launches: list[Launch] = []
            x = torch.zeros(batch, heads, rows, columns, dtype=torch.bfloat16)
            with recording(launches):
                softmax.softmax_fwd(x, masks[kind], scale=0.5)
            found[batch, heads, rows] = specialization_of(launches[0], target)
    finally:
        targets.pretend(host, None)
    assert len(set(found.values())) == 1, found
