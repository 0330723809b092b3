# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Recipes: names, defaults, predicates, refusals, and how their knobs reach the quantizers."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

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
    Recipe,
)

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(),
    "float8_current_scaling": Float8CurrentScaling(),
    "float8_block_scaling": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "custom": CustomRecipe(lambda role: None),
}

#: Positional order and defaults of Transformer Engine 2.20, with no environment variable set.
ARGUMENTS: dict[type, dict[str, Any]] = {
    DelayedScaling: {
        "margin": 0, "fp8_format": Format.HYBRID, "amax_history_len": 1024, "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None, "reduce_amax": True, "fp8_dpa": False, "fp8_mha": False,
        "backward_override": None,
    },
    Float8CurrentScaling: {
        "use_power_2_scales": False, "fp8_format": Format.HYBRID, "fp8_gemm_fprop": MMParams(False),
        "fp8_gemm_dgrad": MMParams(True), "fp8_gemm_wgrad": MMParams(True), "fp8_dpa": False, "fp8_mha": False,
        "backward_override": None,
    },
    MXFP8BlockScaling: {
        "margin": 0, "fp8_format": Format.E4M3, "fp8_dpa": False, "fp8_mha": False, "backward_override": None,
        "enable_2d_quantization": False,
    },
    Float8BlockScaling: {
        "use_f32_scales": False, "fp8_format": Format.E4M3, "x_block_scaling_dim": 1, "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1, "fp8_gemm_fprop": MMParams(True), "fp8_gemm_dgrad": MMParams(True),
        "fp8_gemm_wgrad": MMParams(True), "fp8_dpa": False, "fp8_mha": False, "backward_override": None,
    },
    NVFP4BlockScaling: {
        "disable_rht": False, "disable_stochastic_rounding": False, "disable_2d_quantization": False,
        "row_scaled_activation": False, "nvfp4_4over6": "none", "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE", "fp4_format": Format.E2M1, "fp8_format": Format.E4M3, "fp8_dpa": False,
        "fp8_mha": False, "backward_override": None,
    },
    MMParams: {"use_split_accumulator": True},
    QParams: {
        "power_2_scale": False, "amax_epsilon": 0.0, "random_hadamard_transform": False,
        "stochastic_rounding": False, "fp4_2d_quantization": False,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(__import__("os").environ):
        if name.startswith("NVTE_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("kind", ARGUMENTS, ids=lambda kind: kind.__name__)
def test_arguments_and_defaults(kind: type) -> None:
    assert list(inspect.signature(kind).parameters) == list(ARGUMENTS[kind])
    made = kind()
    assert {name: getattr(made, name) for name in ARGUMENTS[kind]} == ARGUMENTS[kind]


@pytest.mark.parametrize("name", RECIPES)
def test_predicates_tell_recipes_apart(name: str) -> None:
    recipe = RECIPES[name]
    assert [other for other in RECIPES if getattr(recipe, other)()] == [name]
    assert recipe.float8_per_tensor_scaling() == (name in ("delayed", "float8_current_scaling"))
    assert getattr(type(recipe), name)()


def test_importing_recipes_loads_no_torch() -> None:
    code = "import sys, te_dispatch.common.recipe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_formats() -> None:
    assert (Format.E4M3.value.max_fwd, Format.E4M3.value.max_bwd) == (448, 448)
    assert (Format.HYBRID.value.max_fwd, Format.HYBRID.value.max_bwd) == (448, 57344)
    assert Format.E2M1.value == (6, 6)
    assert (Format.HYBRID.fwd, Format.HYBRID.bwd, Format.E5M2.fwd) == ("e4m3", "e5m2", "e5m2")


def test_derived_parameters_follow_the_knobs() -> None:
    assert Float8CurrentScaling().fp8_quant_fwd_inp == QParams(power_2_scale=False, amax_epsilon=0.0)
    assert Float8CurrentScaling(use_power_2_scales=True).fp8_quant_bwd_grad.power_2_scale
    assert Float8BlockScaling().fp8_quant_fwd_weight.power_2_scale
    assert not Float8BlockScaling(use_f32_scales=True).fp8_quant_fwd_inp.power_2_scale


@pytest.mark.parametrize(
    ("variable", "kind", "attribute", "value"),
    [
        ("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", Float8CurrentScaling, "use_power_2_scales", True),
        ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", Float8BlockScaling, "use_f32_scales", True),
        ("NVTE_NVFP4_DISABLE_RHT", NVFP4BlockScaling, "disable_rht", True),
    ],
)
def test_defaults_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, kind: type, attribute: str, value: Any
) -> None:
    assert getattr(kind(), attribute) is False
    monkeypatch.setenv(variable, "1")
    assert getattr(kind(), attribute) is value


def test_backward_override_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")
    assert DelayedScaling().backward_override == "high_precision"
    assert "backward_override" in (DelayedScaling().unsupported_knob() or "")


@pytest.mark.parametrize(
    ("make", "error", "name"),
    [
        (lambda: DelayedScaling(amax_history_len=0), ValueError, "amax_history_len"),
        (lambda: DelayedScaling(amax_history_len=1.5), TypeError, "amax_history_len"),
        (lambda: DelayedScaling(margin="x"), TypeError, "margin must be an int, got 'x'"),
        (lambda: DelayedScaling(amax_compute_algo="mean"), ValueError, "amax_compute_algo"),
        (lambda: DelayedScaling(scaling_factor_compute_algo="x"), TypeError, "scaling_factor_compute_algo"),
        (lambda: DelayedScaling(fp8_format=Format.E5M2), ValueError, "fp8_format"),
        (lambda: DelayedScaling(fp8_format="HYBRID"), TypeError, "fp8_format"),
        (lambda: DelayedScaling(reduce_amax=2), TypeError, "reduce_amax must be a bool, got 2"),
        (lambda: DelayedScaling(backward_override="fast"), ValueError, "backward_override"),
        (lambda: Float8CurrentScaling(fp8_gemm_dgrad=True), TypeError, "fp8_gemm_dgrad"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=3), ValueError, "x_block_scaling_dim"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=2), ValueError, "2D times 2D"),
        (lambda: Float8BlockScaling(fp8_gemm_wgrad=MMParams(False)), ValueError, "fp8_gemm_wgrad"),
        (lambda: NVFP4BlockScaling(fp4_format=Format.E4M3), ValueError, "fp4_format"),
        (lambda: NVFP4BlockScaling(nvfp4_4over6="some"), ValueError, "nvfp4_4over6"),
        (lambda: QParams(amax_epsilon=-1.0), ValueError, "amax_epsilon"),
        (lambda: QParams(power_2_scale=None), TypeError, "power_2_scale"),
        (lambda: MMParams(use_split_accumulator=None), TypeError, "use_split_accumulator"),
        (lambda: CustomRecipe("factory"), TypeError, "qfactory"),
    ],
)
def test_bad_values_are_refused_by_name(make: Any, error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        make()


def test_recipes_compare_by_value() -> None:
    recipe = DelayedScaling()
    assert recipe == DelayedScaling()
    assert hash(recipe) == hash(DelayedScaling())
    assert recipe != DelayedScaling(margin=1)
    assert DelayedScaling() != MXFP8BlockScaling() and DelayedScaling() != "delayed"


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (DelayedScaling(fp8_dpa=True), "fp8_dpa"),
        (Float8CurrentScaling(fp8_mha=True), "fp8_mha"),
        (DelayedScaling(backward_override="high_precision"), "backward_override"),
        (
            NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, row_scaled_activation=True),
            "row_scaled_activation",
        ),
        (NVFP4BlockScaling(nvfp4_4over6="all"), "nvfp4_4over6"),
        (CustomRecipe(lambda role: None, fp8_dpa=True), "fp8_dpa"),
    ],
)
def test_knobs_without_effect_are_refused_where_used(recipe: Recipe, name: str) -> None:
    te = pytest.importorskip("te_dispatch.pytorch")
    with pytest.raises(NotImplementedError, match=name):
        te.autocast(recipe=recipe)
    te.autocast(enabled=False, recipe=recipe)  # asks for nothing


def test_knobs_reach_the_quantizers() -> None:
    import torch

    from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, MXFP8Quantizer, NVFP4Quantizer
    from te_dispatch.pytorch.fp8.casts import build_plan

    def casts(recipe: Recipe) -> Any:
        return build_plan(recipe, torch.device("cpu"), None, 1, None, None).gemms[0]

    current = casts(Float8CurrentScaling(use_power_2_scales=True, fp8_gemm_fprop=MMParams(True)))
    assert current.input == CurrentQuantizer("e4m3fn", False, True, 0.0)
    assert current.grad == CurrentQuantizer("e5m2", False, True, 0.0)
    assert current.fprop_split and current.dgrad_split and current.wgrad_split
    default = casts(Float8CurrentScaling())
    assert (default.fprop_split, default.dgrad_split, default.wgrad_split) == (False, True, True)
    block = casts(Float8BlockScaling(use_f32_scales=True))
    assert block.input == BlockQuantizer("e4m3fn", False, False, False, 0.0)
    assert block.weight.two_d and not block.grad.two_d and block.fprop_split
    assert casts(MXFP8BlockScaling()).grad == MXFP8Quantizer("e4m3fn")
    nvfp4 = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
    assert (casts(nvfp4).input, casts(nvfp4).weight) == (NVFP4Quantizer(), NVFP4Quantizer(two_d=True))
    flat = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    assert casts(flat).weight == NVFP4Quantizer(two_d=False)


def test_common_portability_makes_casts_common_and_accumulation_split() -> None:
    import torch

    from te_dispatch.core import scopes
    from te_dispatch.core.policy import Numerics, Policy
    from te_dispatch.pytorch.fp8.casts import build_plan

    with scopes.policy(Policy(name="common", numerics=Numerics(fp8_portability="common"))):
        casts = build_plan(Float8CurrentScaling(), torch.device("cpu"), None, 1, None, None).gemms[0]
    assert casts.input.common and casts.weight.common and casts.grad.common
    assert casts.fprop_split and casts.dgrad_split and casts.wgrad_split


FLAGS = {
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": (Float8CurrentScaling, "use_power_2_scales"),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": (Float8BlockScaling, "use_f32_scales"),
    "NVTE_NVFP4_DISABLE_RHT": (NVFP4BlockScaling, "disable_rht"),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": (NVFP4BlockScaling, "disable_stochastic_rounding"),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": (NVFP4BlockScaling, "disable_2d_quantization"),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": (NVFP4BlockScaling, "row_scaled_activation"),
}


#: variable -> (field of NVFP4BlockScaling, a value that is not the default).
WORDS = {
    "NVTE_BACKWARD_OVERRIDE": ("backward_override", "dequantized"),
    "NVTE_NVFP4_4OVER6": ("nvfp4_4over6", "weights"),
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": ("nvfp4_4over6_e4m3_use_256", "none"),
    "NVTE_NVFP4_4OVER6_ERR_MODE": ("nvfp4_4over6_err_mode", "MSE"),
}
WITHOUT_ARGUMENTS = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling)


@pytest.mark.parametrize("variable", FLAGS)
def test_flags_are_0_or_1(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, field = FLAGS[variable]
    for value, expected in ((" 1", True), ("1", True), ("0", False), ("", False), ("0 ", False)):
        monkeypatch.setenv(variable, value)
        assert getattr(recipe(), field) is expected
    for value in ("true", "yes", "2", "on", "01"):
        monkeypatch.setenv(variable, value)
        with pytest.raises(ValueError, match=f"^{variable}={value}: expected 0 or 1, got '{value}'$"):
            recipe()
        assert getattr(recipe(**{field: True}), field) is True  # the variable is not read


@pytest.mark.parametrize("nothing", ["", " "])
def test_a_variable_set_to_nothing_counts_as_not_set(nothing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unset = [kind() for kind in WITHOUT_ARGUMENTS]
    for variable in (*FLAGS, *WORDS):
        monkeypatch.setenv(variable, nothing)
    assert [kind() for kind in WITHOUT_ARGUMENTS] == unset


@pytest.mark.parametrize("variable", WORDS)
def test_words_are_read_without_spaces_around_them(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    field, value = WORDS[variable]
    monkeypatch.setenv(variable, f" {value} ")
    assert getattr(NVFP4BlockScaling(), field) == value


def test_nvfp4_says_how_it_casts() -> None:
    default, plain = NVFP4BlockScaling(), NVFP4BlockScaling(True, True, True)
    assert default.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert default.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    assert default.fp4_quant_bwd_grad == QParams(random_hadamard_transform=True, stochastic_rounding=True)
    assert plain.fp4_quant_fwd_inp == plain.fp4_quant_fwd_weight == plain.fp4_quant_bwd_grad == QParams()


def test_keywords_that_mean_nothing_here_are_warned_of_once_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's recipes take any keyword in silence, and frameworks pass those of its earlier releases."""
    monkeypatch.setattr(recipe_arguments, "_warned", set())

    def told(make: Callable[[], Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make()
        return [str(one.message) for one in caught]

    # As accelerate passes them.
    assert told(lambda: DelayedScaling(margin=1, interval=1, override_linear_precision=(False, False, False))) == []
    (interval,) = told(lambda: DelayedScaling(interval=4))
    assert interval == "DelayedScaling: interval has no effect: scales are updated at every step"
    assert told(lambda: DelayedScaling(interval=4)) == []
    (precision,) = told(lambda: DelayedScaling(override_linear_precision=(False, False, True)))
    assert precision.startswith("DelayedScaling: override_linear_precision has no effect: all products are quantized")
    (misspelt,) = told(lambda: DelayedScaling(amax_history_length=4))
    assert misspelt.endswith("there is no argument of this name; did you mean 'amax_history_len'?")
    both = told(lambda: Float8CurrentScaling(fp8_quant_fwd_inp=QParams(), device="cuda"))
    assert [text.partition(":")[2].split()[0] for text in both] == ["device", "fp8_quant_fwd_inp"]
    made = DelayedScaling(margin=1, amax_history_length=4)
    assert made == DelayedScaling(margin=1) and "amax_history_length" not in repr(made)
    with pytest.raises(TypeError, match="margin must be an int"):
        DelayedScaling(margin="x", amax_history_length=4)
    assert next(iter(inspect.signature(DelayedScaling).parameters)) == "margin"


def test_the_margin_of_mxfp8_changes_nothing_and_says_so_where_the_recipe_is_made(monkeypatch: Any) -> None:
    monkeypatch.setattr(recipe_arguments, "_warned", set())
    with pytest.warns(UserWarning, match="MXFP8BlockScaling: margin has no effect: block scales") as caught:
        recipe = MXFP8BlockScaling(margin=2)
        MXFP8BlockScaling(margin=3)
    assert [one.filename for one in caught] == [__file__]
    te = pytest.importorskip("te_dispatch.pytorch")
    torch = pytest.importorskip("torch")
    layer, x, found = te.Linear(32, 32, device="cpu"), torch.randn(32, 32), []
    for one in (recipe, MXFP8BlockScaling()):
        with te.autocast(recipe=one):
            found.append(layer(x))
    assert torch.equal(*found)
