# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the native functions of block casts and of quantized forms refuse before a launch."""

from __future__ import annotations

from typing import Any

import pytest

#: A plain bf16 matrix of 4x8 at address 64 (`te_dispatch_cuda.sources`).
SOURCE = (0, 1, 4, 8, 64, 8, 0, 0, 0.0, 0.0, -1, 0)


def block_cast(
    native: Any, *, scaling: int = 1, code: int = 0, row: int = 64, row_scale: int = 64, **more: int
) -> None:
    asked = {"column": 0, "column_scale": 0, "whole": 0, "workspace": 0, "size": 0, **more}
    native.block_cast(
        0, 0, *SOURCE, scaling, code, row, row_scale, asked["column"], asked["column_scale"], asked["whole"], 0, 0, 0,
        0, 0.0, True, False, 0, 0, asked["workspace"], asked["size"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scaling": 5}, "scaling: got code 5"),
        ({"code": 4}, "cast: got code 4 with scaling 1"),
        ({"scaling": 4, "code": 0}, "cast: got code 0 with scaling 4"),
        ({"row_scale": 0}, "row_scale_inv: got a null pointer"),
        ({"row_scale": 66}, "row_scale_inv: got a pointer that is not a multiple of 4"),
        ({"column_scale": 64}, "col_data: got a null pointer"),
        ({"scaling": 4, "code": 4}, "global_scale_inv: got a null pointer"),
        ({"scaling": 4, "code": 4, "whole": 64, "workspace": 64, "size": 8}, "workspace: got 8 floats"),
    ],
)
def test_block_cast_refuses(native: Any, wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_cast(native, **wrong)


def test_parts_must_fit(native: Any) -> None:
    with pytest.raises(ValueError, match="splits: got more rows than there are"):
        native.copy_parts(0, 0, 64, 64, 16, [4], [3], [4])
    with pytest.raises(ValueError, match="splits: got lists of different lengths"):
        native.copy_parts(0, 0, 64, 64, 16, [4], [4], [])


def test_a_shard_must_lie_within_its_matrix(native: Any) -> None:
    with pytest.raises(ValueError, match="start: got 30"):
        native.partial_amax(0, 0, 64, 0, 8, 30, 4, 8, 128, 64)
    with pytest.raises(ValueError, match="block: got 64"):
        native.partial_amax(0, 0, 64, 0, 8, 0, 4, 8, 64, 64)
