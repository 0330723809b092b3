# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What recipes convert, warn of and refuse, as the pydantic dataclasses of Transformer Engine 2.20 do.

Tables of values were made by calling those with pydantic 2.14.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
import types
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from te_dispatch.common import recipe_arguments
from te_dispatch.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)


class _Whole(enum.IntEnum):
    THREE = 3


class _Three(enum.Enum):
    THREE = 3


class _All(str, enum.Enum):
    ALL = "all"


_NO = "refused"

#: value -> what fields of int, bool and float make of it.
CONVERSIONS: list[tuple[Any, Any, Any, Any]] = [
    (0, 0, False, 0.0), (1, 1, True, 1.0), (2, 2, _NO, 2.0), (-1, -1, _NO, -1.0), (True, 1, True, 1.0),
    (0.0, 0, False, 0.0), (1.0, 1, True, 1.0), (16.0, 16, _NO, 16.0), (1.5, _NO, _NO, 1.5), (1e30, _NO, _NO, 1e30),
    (2.0**62, 2**62, _NO, 2.0**62), (2.0**63, _NO, _NO, 2.0**63), (math.inf, _NO, _NO, math.inf),
    ("0", 0, False, 0.0), ("1", 1, True, 1.0), (" 1\n", 1, _NO, 1.0), ("1.0", 1, _NO, 1.0), ("1.", _NO, _NO, 1.0),
    ("1.5", _NO, _NO, 1.5), ("+1", 1, _NO, 1.0), ("-1", -1, _NO, -1.0), ("1_0", 10, _NO, 10.0), ("1__0", _NO, _NO, _NO),
    ("01", 1, _NO, 1.0), ("1e3", _NO, _NO, 1e3), ("0x1", _NO, _NO, _NO), (".5", _NO, _NO, 0.5), ("", _NO, _NO, _NO),
    ("x", _NO, _NO, _NO), ("\u0661", _NO, _NO, _NO), ("9" * 30, int("9" * 30), _NO, 1e30),
    ("true", _NO, True, _NO), ("TRUE", _NO, True, _NO), ("t", _NO, True, _NO), ("Yes", _NO, True, _NO),
    ("y", _NO, True, _NO), ("on", _NO, True, _NO), ("False", _NO, False, _NO), ("f", _NO, False, _NO),
    ("no", _NO, False, _NO), ("n", _NO, False, _NO), ("OFF", _NO, False, _NO), (" true", _NO, _NO, _NO),
    (b"1", 1, True, 1.0), (b"true", _NO, True, _NO), (b"\xff", _NO, _NO, _NO), (bytearray(b"1"), _NO, _NO, _NO),
    (Decimal("1.0"), 1, True, 1.0), (Decimal("1.5"), _NO, _NO, 1.5), (Fraction(3, 2), _NO, _NO, 1.5),
    (np.int64(1), 1, True, 1.0), (np.float32(1.5), _NO, _NO, 1.5), (np.bool_(True), 1, True, 1.0),
    (_Whole.THREE, 3, _NO, 3.0), (_Three.THREE, 3, _NO, _NO), (10**30, 10**30, _NO, 1e30), (10**400, 10**400, _NO, _NO),
    (None, _NO, _NO, _NO), ([], _NO, _NO, _NO), ([1], _NO, _NO, _NO), ({}, _NO, _NO, _NO), (1j, _NO, _NO, _NO),
    (object, _NO, _NO, _NO),
]  # fmt: skip

#: Field of a type -> what makes an instance of it.
FIELDS: dict[type, tuple[str, Callable[..., Any]]] = {
    int: ("margin", DelayedScaling),
    bool: ("use_split_accumulator", MMParams),
    float: ("amax_epsilon", QParams),
}


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe_arguments, "_warned", set())


@pytest.mark.parametrize("row", CONVERSIONS, ids=lambda row: repr(row[0])[:20])
def test_values_are_converted_as_pydantic_does(row: tuple[Any, ...]) -> None:
    value = row[0]
    for (kind, (name, make)), expected in zip(FIELDS.items(), row[1:]):
        if expected is _NO or (kind is float and (expected < 0 or expected == math.inf)):
            with pytest.raises((TypeError, ValueError), match=f"{make.__name__}: {name} must be"):
                make(**{name: value})
        else:
            got = getattr(make(**{name: value}), name)
            assert type(got) is kind and got == expected


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: DelayedScaling(margin=0.0, amax_history_len=16.0), DelayedScaling(0, amax_history_len=16)),
        (lambda: DelayedScaling(reduce_amax=0, fp8_dpa=1), DelayedScaling(reduce_amax=False, fp8_dpa=True)),
        (lambda: Float8CurrentScaling(use_power_2_scales=1), Float8CurrentScaling(use_power_2_scales=True)),
        (lambda: NVFP4BlockScaling(disable_rht="yes"), NVFP4BlockScaling(disable_rht=True)),
        (lambda: NVFP4BlockScaling(True, nvfp4_4over6=_All.ALL), NVFP4BlockScaling(True, nvfp4_4over6="all")),
        (lambda: Float8BlockScaling(x_block_scaling_dim="1", use_f32_scales="on"), Float8BlockScaling(True)),
        (lambda: MXFP8BlockScaling("0", fp8_mha=1.0), MXFP8BlockScaling(fp8_mha=True)),
        (lambda: CustomRecipe(len, quantization_alignment="32"), CustomRecipe(len, quantization_alignment=32)),
        (lambda: DelayedScaling(backward_override=b"dequantized"), DelayedScaling(backward_override="dequantized")),
        (lambda: DelayedScaling(fp8_format=(448, 448)), DelayedScaling(fp8_format=Format.E4M3)),
        (lambda: dataclasses.replace(DelayedScaling(), margin="3"), DelayedScaling(margin=3)),
    ],
)  # fmt: skip
def test_recipes_convert_what_they_are_given(made: Callable[[], Any], expected: Any) -> None:
    recipe = made()
    assert recipe == expected and repr(recipe) == repr(expected)


@pytest.mark.parametrize("given", [{"use_split_accumulator": "no"}, collections.OrderedDict(use_split_accumulator=0)])
def test_a_mapping_makes_mm_params(given: Any) -> None:
    assert Float8CurrentScaling(fp8_gemm_dgrad=given).fp8_gemm_dgrad == MMParams(False)
    with pytest.raises(ValueError, match="fp8_gemm_dgrad must have use_split_accumulator=True, got False"):
        Float8BlockScaling(fp8_gemm_dgrad=given)


@pytest.mark.parametrize(
    ("kind", "name", "value", "expected"),
    [
        (MXFP8BlockScaling, "margin", "x", "an int"),
        (DelayedScaling, "amax_history_len", 1.5, "an int"),
        (NVFP4BlockScaling, "disable_rht", "maybe", "a bool"),
        (DelayedScaling, "fp8_format", [448, 57344], "a Format"),
        (Float8CurrentScaling, "fp8_gemm_fprop", True, "an MMParams, or a dict"),
        (Float8CurrentScaling, "fp8_gemm_fprop", QParams(), "an MMParams, or a dict"),
        (Float8CurrentScaling, "fp8_gemm_fprop", types.MappingProxyType({}), "an MMParams, or a dict"),
        (Float8CurrentScaling, "fp8_gemm_fprop", {1: 2}, "an MMParams, or a dict"),
        (Float8CurrentScaling, "fp8_gemm_fprop", {"use_split_accumulator": None}, "an MMParams, or a dict"),
    ],
)
def test_what_pydantic_refuses_is_refused_with_what_is_expected(
    kind: Callable[..., Any], name: str, value: Any, expected: str
) -> None:
    with pytest.raises(TypeError) as caught:
        kind(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{kind.__name__}: {name} must be {expected}") and f"got {value!r}" in message
    if value == {"use_split_accumulator": None}:
        assert message.endswith(": MMParams: use_split_accumulator must be a bool, got None")


def test_assigned_values_are_converted_too() -> None:
    recipe = DelayedScaling()
    recipe.margin = 1.0  # type: ignore[assignment]
    recipe.reduce_amax = "off"  # type: ignore[assignment]
    assert recipe == DelayedScaling(margin=1, reduce_amax=False) and type(recipe.margin) is int
    with pytest.raises(TypeError, match="DelayedScaling: margin must be an int, got 'x'"):
        recipe.margin = "x"  # type: ignore[assignment]
    assert recipe.margin == 1
    current = Float8CurrentScaling()
    current.fp8_gemm_fprop = {"use_split_accumulator": True}  # type: ignore[assignment]
    assert current.fp8_gemm_fprop == MMParams(True)


@pytest.mark.parametrize("kind", [MMParams, QParams])
def test_unknown_keywords_of_parameters_are_warned_of_once(kind: Callable[..., Any]) -> None:
    with pytest.warns(UserWarning, match=f"{kind.__name__}: foo has no effect: there is no argument of this name"):
        made = kind(foo=1)
    assert made == kind()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind(foo=2)


def test_subclasses_convert_their_own_fields() -> None:
    @dataclasses.dataclass(eq=False)
    class Longer(DelayedScaling):
        steps: int = 1

    recipe = Longer(margin="2", steps="3")  # type: ignore[arg-type]
    assert (recipe.margin, recipe.steps) == (2, 3)
    assert recipe.delayed() and not recipe.mxfp8()
