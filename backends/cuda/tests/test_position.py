# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Native rotary embedding refuses wrong arguments by name, before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest

# Strides of x, of the result, of freqs; not interleaved, forward, bf16.
_REST = (1, 1, 1, 1, 1, 1, 4, False, False, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 16, 16, 0, 0, 2, 2, 2, 4, 4, 8, 0), "x: got a null pointer for 32 elements"),
        ((16, 17, 16, 0, 0, 2, 2, 2, 4, 4, 8, 0), "out: got a pointer that is not a multiple of 2 bytes"),
        ((16, 16, 0, 0, 0, 2, 2, 2, 4, 4, 8, 0), "freqs: got a null pointer for 32 elements"),
        ((16, 16, 16, 2, 0, 2, 2, 2, 4, 4, 8, 1), "cu_seqlens: got a pointer that is not a multiple of 4 bytes"),
        ((16, 16, 16, 0, 0, 2, 2, 2, 4, 6, 8, 0), "freqs: got 6 angles a position, expected an even number up to 4"),
        ((16, 16, 16, 0, 0, 2, 2, 2, 8192, 8192, 8, 0), "freqs: got 8192 angles a position"),
        ((16, 16, 16, 0, 0, -2, 2, 2, 4, 4, 8, 0), "x: got -2, expected at least 0"),
    ],
)
def test_a_wrong_argument_is_named(native: Any, arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        native.rope(0, 0, *arguments, *_REST)
    assert str(error.value).startswith(message)
