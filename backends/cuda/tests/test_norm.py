# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Native norm calls refuse wrong arguments by name, before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest

#: device, stream, x, its dtype, rows, columns, residual and its sum, gamma, beta, ..., eps, mean, rstd, y, its dtype.
FORWARD = (0, 0, 64, 1, 4, 8, 0, 0, 64, 1, 64, 0, False, 1e-5, 64, 64, 64, 1)
#: workspace, scaling, row, column, cast, scale, amax, scale_inv of rows, of columns, of the whole, epsilon, ...
CAST = (64, 1, 64, 64, 0, 64, 64, 64, 0, 0, 0.0, False, False)
#: device, stream, dy, x, rows, columns, gamma, zero_centered, mean, rstd, add, dx, dgamma, dbeta, workspace, parts.
BACKWARD = (0, 0, 64, 1, 64, 1, 4, 8, 64, 1, False, 64, 64, 0, 0, 64, 64, 64, 64, 1)


def changed(arguments: tuple[Any, ...], changes: dict[int, Any]) -> tuple[Any, ...]:
    return tuple(changes.get(i, value) for i, value in enumerate(arguments))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({2: 0}, "x: got a null pointer for 32 elements"),
        ({2: 63}, "x: got a pointer that is not a multiple of 2 bytes"),
        ({3: 5}, "x: got dtype code 5"),
        ({4: -4}, "x: got -4, expected at least 0"),
        ({4: 2**40, 5: 2**40}, "x: got 1099511627776 x 1099511627776 elements"),
        ({6: 64}, "residual_out: got a null pointer for 32 elements"),
        ({8: 0}, "gamma: got a null pointer for 8 elements"),
        ({10: 66}, "beta: got a pointer that is not a multiple of 4 bytes"),
        ({14: 66}, "mean: got a pointer that is not a multiple of 4 bytes"),
        ({15: 0}, "rstd: got a null pointer for 4 elements"),
        ({16: 0}, "y: got a null pointer for 32 elements"),
    ],
)
def test_forward(native: Any, changes: dict[int, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        native.norm_forward(*changed(FORWARD, changes))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: 0}, "workspace: got a null pointer"),
        ({0: 8}, "workspace: got a pointer that is not a multiple of 16 bytes"),
        ({1: 7}, "scaling: got code 7, expected 0 to 6"),
        ({2: 0, 3: 0}, "row_data: got null, and col_data too"),
        ({5: 0}, "scale: got a null pointer"),
        ({6: 2}, "amax: got a pointer that is not a multiple of 4 bytes"),
        ({7: 0}, "scale_inv: got a null pointer"),
        ({1: 6}, "global_scale_inv: got a null pointer"),
    ],
)
def test_forward_with_a_cast(native: Any, changes: dict[int, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        native.norm_forward_cast(*FORWARD, *changed(CAST, changes))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({2: 0}, "dy: got a null pointer for 32 elements"),
        ({3: 3}, "dy: got dtype code 3"),
        ({4: 0}, "x: got a null pointer for 32 elements"),
        ({7: -8}, "x: got -8, expected at least 0"),
        ({11: 0}, "mean: got a null pointer for 4 elements"),
        ({13: 2, 14: 0}, "add: got a pointer that is not a multiple of 4 bytes"),
        ({16: 0}, "dgamma: got a null pointer for 8 elements"),
        ({18: 0}, "workspace: got a null pointer for 16 elements"),
        ({19: -1}, "parts: got -1, expected at least 0"),
    ],
)
def test_backward(native: Any, changes: dict[int, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        native.norm_backward(*changed(BACKWARD, changes))
    assert str(error.value).startswith(message)
