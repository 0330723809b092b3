# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Native casts refuse wrong arguments by name, before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest

#: device, stream, then form, dtype, rows, columns, x, stride, dy, kind, limit, alpha, x_encoding, x_scale_inv.
SOURCE = (0, 0, 0, 1, 4, 8, 64, 8, 64, 0, 7.0, 1.702, -1, 0)
#: row, column, out and its dtype, cast, scale, find_amax, amax, epsilon, power_of_two, scale_inv of rows, of columns,
#: recorded amax, noop_flag, dbias and its dtype, workspace.
CAST = (64, 64, 0, 0, 0, 64, False, 0, 0.0, False, 64, 0, 64, 0, 0, 0, 0)
_FORM, _DTYPE, _ROWS, _COLUMNS, _X, _DY, _KIND, _ENCODING = 2, 3, 4, 5, 6, 8, 9, 12
_OUT, _OUT_DTYPE, _CODE, _SCALE, _FIND, _AMAX, _DBIAS, _WORKSPACE = 16, 17, 18, 19, 20, 26, 28, 30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({_FORM: 3}, "form: got 3, expected 0, 1 or 2"),
        ({_DTYPE: 9}, "x: got dtype code 9"),
        ({_X: 0}, "x: got a null pointer for 32 elements"),
        ({_X: 63}, "x: got a pointer that is not a multiple of 2 bytes"),
        ({_ROWS: -4}, "x: got -4, expected at least 0"),
        ({_ROWS: 2**40, _COLUMNS: 2**40}, "x: got 1099511627776 x 1099511627776 elements"),
        ({_CODE: 4}, "cast: got code 4, expected an 8-bit encoding's"),
        ({_SCALE: 0}, "scale: got a null pointer, and no amax to make it from"),
        ({_SCALE: 0, _FIND: True}, "workspace: got a null pointer"),
        ({_SCALE: 66}, "scale: got a pointer that is not a multiple of 4 bytes"),
        ({_AMAX: 66}, "quantizer.amax: got a pointer that is not a multiple of 4 bytes"),
        ({_DBIAS: 64}, "workspace: got a null pointer"),
        ({_OUT: 62, _OUT_DTYPE: 0}, "out: got a pointer that is not a multiple of 4 bytes"),
        ({_OUT_DTYPE: 3}, "out: got dtype code 3, expected 0, 1 or 2"),
        ({_FORM: 1, _KIND: 7}, "kind: got code 7, which names no activation"),
        ({_FORM: 1, _ENCODING: 4, 13: 64}, "x: got encoding code 4, expected 0 to 3"),
        ({_FORM: 1, _ENCODING: 0}, "x.scale_inv: got a null pointer"),
        ({_FORM: 2, _DY: 0}, "dy: got a null pointer"),
        ({_FORM: 2, _KIND: 12, _COLUMNS: 7}, "columns: got 7, expected an even number"),
        ({_FORM: 2, _DTYPE: 0, _ENCODING: 0}, "dy: got dtype code 0 with a quantized x, expected 1"),
    ],
)
def test_cast_tensor(native: Any, changes: dict[int, Any], message: str) -> None:
    arguments = (changes.get(i, value) for i, value in enumerate((*SOURCE, *CAST)))
    with pytest.raises(ValueError) as error:
        native.cast_tensor(*arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 0, 1, 8, 64), "x: got a null pointer for 8 elements"),
        ((0, 0, 64, 1, -1, 64), "x: got -1"),
        ((0, 0, 64, 1, 8, 0), "out: got a null pointer"),
    ],
)
def test_compute_amax(native: Any, arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError) as error:
        native.compute_amax(*arguments)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("entries", "numerators", "message"),
    [
        ([(64, 64, 0, 4, 8, 0, 8)], [], "numerators: got 0, expected 1"),
        ([(0, 64, 0, 4, 8, 0, 8)], [448.0], "histories: got a null pointer for 32 elements"),
        ([(64, 0, 0, 4, 8, 0, 8)], [448.0], "scales: got a null pointer for 8 elements"),
        ([(64, 64, 66, 4, 8, 0, 8)], [448.0], "amaxes: got a pointer that is not a multiple of 4 bytes"),
        ([(64, 64, 0, 4, 8, 4, 8)], [448.0], "histories: got columns 4 + 8 of 8"),
    ],
)
def test_update_delayed_scales(native: Any, entries: list[Any], numerators: list[float], message: str) -> None:
    with pytest.raises(ValueError) as error:
        native.update_delayed_scales(0, 0, entries, numerators, False)
    assert str(error.value).startswith(message)
