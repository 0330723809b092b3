# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Native softmax calls refuse wrong arguments by name, before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("softmax_fwd", (0, 0, 0, 0, 16, 1, 1, 4, 4, 0, 0, 0, 0, 1.0, False, 0, 0), "x: got a null pointer for 16"),
        ("softmax_fwd", (0, 0, 16, 0, 17, 1, 1, 4, 4, 0, 0, 0, 0, 1.0, False, 0, 1), "out: got a pointer that is not"),
        ("softmax_fwd", (0, 0, 16, 16, 16, 1, 1, 4, 4, 0, 0, 0, 2, 1.0, False, 0, 0), "mask: got stride 2 between"),
        ("softmax_fwd", (0, 0, 16, 0, 16, 2**40, 2**40, 4, 4, 0, 0, 0, 0, 1.0, False, 0, 0), "x: got 1099511627776 x"),
        ("softmax_fwd", (0, 0, 16, 0, 16, 1, 1, 4, 4, 0, 0, 0, 0, 1.0, False, 7, 0), "x: got dtype code 7"),
        ("softmax_bwd", (0, 0, 16, 16, 0, 4, 4, 1.0, 0, 0, 0), "dx: got a null pointer for 16 elements"),
        ("softmax_bwd", (0, 0, 16, 16, 16, 4, -4, 1.0, 0, 0, 0), "y: got -4, expected at least 0"),
    ],
)
def test_a_wrong_argument_is_named(native: Any, name: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        getattr(native, name)(*arguments)
    assert str(error.value).startswith(message)
