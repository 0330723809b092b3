# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Recipes: how a model is trained in 8 or 4 bits. Plain data with Transformer Engine 2.20's names and defaults.

A recipe says what is asked for. Whether this version can do it is checked where it is used (`unsupported_knob`), so
that a configuration file may hold a recipe for later. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Union

from te_dispatch.common.recipe_arguments import lenient, warn_without_effect
from te_dispatch.common.recipe_base import Recipe
from te_dispatch.common.recipe_defaults import flag, override, word
from te_dispatch.common.recipe_parameters import (
    Format,
    FormatLimits,
    MMParams,
    QParams,
    by_flags,
    require_choice,
)
from te_dispatch.common.recipe_values import Cast

__all__ = [
    "AmaxAlgorithm",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "FormatLimits",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]


_FAST, _SPLIT = MMParams(use_split_accumulator=False), MMParams(use_split_accumulator=True)


#: Pure E5M2 training does not converge: its two mantissa bits are for gradients.
_TRAINABLE = (Format.E4M3, Format.HYBRID)

AmaxAlgorithm = Union[Literal["max", "most_recent"], Callable[[Any], Any]]


@lenient
@dataclass(eq=False)
class DelayedScaling(Recipe):
    """Per-tensor scales from the amax history of earlier steps: casts need no extra pass over the data.

    scale = (fp8_max * 2^-margin) / amax, updated once a step. The first steps run with scale 1.

    Attributes:
        margin: power of two that scales back off by, as headroom for growing values.
        fp8_format: encodings; HYBRID gives gradients the wider range of E5M2.
        amax_history_len: how many steps a history remembers.
        amax_compute_algo: amax from a history: ``max`` of it, its ``most_recent`` entry, or a function
            ``(history (length, n) tensor) -> (n,) tensor``.
        scaling_factor_compute_algo: None for the formula above, or a function
            ``(amax (n,), scale (n,), fp8_max (n,), recipe) -> (n,) tensor``.
        reduce_amax: take the maximum over the amax reduction group, so that all ranks scale alike.
        fp8_dpa, fp8_mha: FP8 inside and around attention; not supported yet.
        backward_override: must be None: scales have changed by the backward. Default from NVTE_BACKWARD_OVERRIDE.
    """

    KIND: ClassVar[str] = "delayed"

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default_factory=override)

    def _check(self) -> None:
        self._check_shared(_TRAINABLE)
        if self.amax_history_len < 1:
            raise ValueError(f"DelayedScaling: amax_history_len must be at least 1, got {self.amax_history_len}")
        if not callable(self.amax_compute_algo):
            require_choice(self, "amax_compute_algo", ("max", "most_recent"))
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise TypeError(
                "DelayedScaling: scaling_factor_compute_algo must be a function or None, "
                f"got {self.scaling_factor_compute_algo!r}"
            )

    def unsupported_knob(self) -> str | None:
        if self.backward_override is not None:
            return f"backward_override={self.backward_override!r}; unset it and NVTE_BACKWARD_OVERRIDE"
        return super().unsupported_knob()


def _current(recipe: Float8CurrentScaling) -> QParams:
    return by_flags(power_2_scale=recipe.use_power_2_scales)


@lenient
@dataclass(eq=False)
class Float8CurrentScaling(Recipe):
    """Per-tensor scales from the tensor itself: exact range, at the price of one more pass over the data.

    In causal attention a shared scale lets later tokens touch earlier ones.

    Attributes:
        use_power_2_scales: round scales down to powers of two. Default from NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES.
        fp8_format: encodings.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: accumulation of the three GEMMs.
        fp8_dpa, fp8_mha: as in `DelayedScaling`.
        backward_override: what the backward of `Linear` and `LayerNormLinear` multiplies with the gradient as it comes:
            ``high_precision`` operands as they were before their casts, ``dequantized`` values of the forward's
            quantized operands; None for the recipe's casts. Default from NVTE_BACKWARD_OVERRIDE.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: how inputs, weights, gradients are cast: as the
            knobs say, or as assigned.
    """

    KIND: ClassVar[str] = "float8_current_scaling"
    CAST_OPTIONS: ClassVar[tuple[str, ...]] = ("power_2_scale", "amax_epsilon")

    use_power_2_scales: bool = field(default_factory=flag("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"))
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = _FAST
    fp8_gemm_dgrad: MMParams = _SPLIT
    fp8_gemm_wgrad: MMParams = _SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default_factory=override)

    fp8_quant_fwd_inp = Cast(_current)
    fp8_quant_fwd_weight = Cast(_current)
    fp8_quant_bwd_grad = Cast(_current)

    def _check(self) -> None:
        self._check_shared(_TRAINABLE)


@lenient
@dataclass(eq=False)
class MXFP8BlockScaling(Recipe):
    """OCP microscaling: 32 elements along the contracted dimension share a power-of-two (E8M0) scale.

    Attributes:
        margin: no effect, in Transformer Engine neither: block scales have no history to leave headroom for.
        fp8_format: encodings; E4M3 both ways by default, because block scales make E5M2's range unnecessary.
        fp8_dpa, fp8_mha: as in `DelayedScaling`. backward_override: as in `Float8CurrentScaling`.
        enable_2d_quantization: weights have one scale per 32x32 values, so that their two copies hold the same codes.
    """

    KIND: ClassVar[str] = "mxfp8"
    alignment: ClassVar[int] = 32
    untrained_row_alignment: ClassVar[int] = 32

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default_factory=override)
    enable_2d_quantization: bool = False

    def _check(self) -> None:
        self._check_shared(_TRAINABLE)
        if self.margin != 0:
            # From the caller of the constructor: through _check, __post_init__ and both constructors.
            why = "block scales have no history to leave headroom for"
            warn_without_effect(type(self), "margin", lambda: why, stacklevel=6)


def _block(recipe: Float8BlockScaling) -> QParams:
    return by_flags(power_2_scale=not recipe.use_f32_scales)


@lenient
@dataclass(eq=False)
class Float8BlockScaling(Recipe):
    """One scale per 1x128 (activations, gradients) or 128x128 (weights) values.

    Attributes:
        use_f32_scales: any float32 scale instead of powers of two. Default from NVTE_FP8_BLOCK_SCALING_FP32_SCALES.
        fp8_format: encodings; E4M3 both ways by default.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 for 1x128 blocks, 2 for 128x128. Two
            operands of one GEMM cannot both have 2.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: accumulation; always split, since scales change along k.
        fp8_dpa, fp8_mha: as in `DelayedScaling`. backward_override: as in `Float8CurrentScaling`.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: how inputs, weights, gradients are cast: as the
            knobs say, or as assigned.
    """

    KIND: ClassVar[str] = "float8_block_scaling"
    CAST_OPTIONS: ClassVar[tuple[str, ...]] = ("power_2_scale", "amax_epsilon")

    use_f32_scales: bool = field(default_factory=flag("NVTE_FP8_BLOCK_SCALING_FP32_SCALES"))
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = _SPLIT
    fp8_gemm_dgrad: MMParams = _SPLIT
    fp8_gemm_wgrad: MMParams = _SPLIT
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default_factory=override)

    fp8_quant_fwd_inp = Cast(_block)
    fp8_quant_fwd_weight = Cast(_block)
    fp8_quant_bwd_grad = Cast(_block)

    def _check(self) -> None:
        self._check_shared(_TRAINABLE)
        dims = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        for name in dims:
            require_choice(self, name, (1, 2))
        if sum(getattr(self, name) == 2 for name in dims) > 1:
            given = ", ".join(f"{name}={getattr(self, name)}" for name in dims)
            raise ValueError(
                f"Float8BlockScaling: {given}: at most one may be 2, every pair meets in a GEMM and 2D times 2D "
                "is not defined"
            )
        for name in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, name).use_split_accumulator:
                raise ValueError(f"Float8BlockScaling: {name} must have use_split_accumulator=True, got False")


@lenient
@dataclass(eq=False)
class NVFP4BlockScaling(Recipe):
    """4-bit training: E2M1 values, an E4M3 scale per 16 of them and one float32 scale per tensor.

    Attributes:
        disable_rht: no random Hadamard transform of the column-wise copies of inputs and gradients. Default from
            NVTE_NVFP4_DISABLE_RHT.
        disable_stochastic_rounding: round gradients to nearest even. Default from
            NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING.
        disable_2d_quantization: one scale per 16 weights instead of per 16x16.
        row_scaled_activation: one float32 scale per row of an activation; not supported yet.
        nvfp4_4over6: tensors whose blocks map their amax to 4 where that leaves a smaller error than 6: ``none``,
            ``weights``, ``activations`` (inputs, which must not be rotated then), or ``all`` of these. Gradients never
            do. Default from NVTE_NVFP4_4OVER6.
        nvfp4_4over6_e4m3_use_256: for which of them the scales of blocks that map to 6 span 256 instead of 448, which
            leaves room for those that map to 4. Default from NVTE_NVFP4_4OVER6_E4M3_USE_256.
        nvfp4_4over6_err_mode: errors are compared by the sum of their magnitudes, ``MAE``, or squares, ``MSE``. Default
            from NVTE_NVFP4_4OVER6_ERR_MODE.
        fp4_format, fp8_format: of values and of block scales; fixed.
        fp4_quant_fwd_inp, fp4_quant_fwd_weight, fp4_quant_bwd_grad: how inputs, weights, gradients are cast: as the
            knobs say, or as assigned.
        fp8_dpa, fp8_mha: as in `DelayedScaling`. backward_override: as in `Float8CurrentScaling`.
    """

    KIND: ClassVar[str] = "nvfp4"
    alignment: ClassVar[int] = 32
    untrained_row_alignment: ClassVar[int] = 32

    CAST_OPTIONS: ClassVar[tuple[str, ...]] = (
        "fp4_2d_quantization", "random_hadamard_transform", "stochastic_rounding",
    )  # fmt: skip

    disable_rht: bool = field(default_factory=flag("NVTE_NVFP4_DISABLE_RHT"))
    disable_stochastic_rounding: bool = field(default_factory=flag("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING"))
    disable_2d_quantization: bool = field(default_factory=flag("NVTE_NVFP4_DISABLE_2D_QUANTIZATION"))
    row_scaled_activation: bool = field(default_factory=flag("NVTE_NVFP4_ROW_SCALED_ACTIVATION"))
    nvfp4_4over6: str = field(default_factory=word("NVTE_NVFP4_4OVER6", "none"))
    nvfp4_4over6_e4m3_use_256: str = field(default_factory=word("NVTE_NVFP4_4OVER6_E4M3_USE_256", "all"))
    nvfp4_4over6_err_mode: str = field(default_factory=lambda: word("NVTE_NVFP4_4OVER6_ERR_MODE", "MAE")().upper())
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default_factory=override)

    fp4_quant_fwd_inp = Cast(lambda recipe: by_flags(random_hadamard_transform=not recipe.disable_rht))
    fp4_quant_fwd_weight = Cast(lambda recipe: by_flags(fp4_2d_quantization=not recipe.disable_2d_quantization))
    fp4_quant_bwd_grad = Cast(
        lambda recipe: by_flags(
            random_hadamard_transform=not recipe.disable_rht, stochastic_rounding=not recipe.disable_stochastic_rounding
        )
    )

    def _check(self) -> None:
        self._check_shared((Format.E4M3,))
        require_choice(self, "fp4_format", (Format.E2M1,))
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            require_choice(self, name, ("none", "weights", "activations", "all"))
        require_choice(self, "nvfp4_4over6_err_mode", ("MAE", "MSE"))

    def row_alignment(self) -> int:
        return 128

    def unsupported_knob(self) -> str | None:
        if self.row_scaled_activation:
            return "row_scaled_activation=True; set it to False"
        if self.four_over_six("input") is not None and self.fp4_quant_fwd_inp.random_hadamard_transform:
            return (
                f"nvfp4_4over6={self.nvfp4_4over6!r} with a random Hadamard transform of inputs; set disable_rht=True, "
                "or nvfp4_4over6='weights'"
            )
        return super().unsupported_knob() or self._unsupported_rotation()

    def four_over_six(self, role: str) -> tuple[int, str] | None:
        """How the blocks of an ``input``, a ``weight`` or a ``grad`` choose between 4 and 6: what scales span, and the
        measure of errors. None where they do not choose."""
        scope = {"input": "activations", "weight": "weights"}.get(role)
        if scope is None or self.nvfp4_4over6 not in (scope, "all"):
            return None
        narrow = self.nvfp4_4over6_e4m3_use_256 in (scope, "all")
        return (256 if narrow else 448), self.nvfp4_4over6_err_mode

    def _unsupported_rotation(self) -> str | None:
        """What assigned casts ask for that no product of theirs would come out right with, or that is not there."""
        inp, weight, grad = self.fp4_quant_fwd_inp, self.fp4_quant_fwd_weight, self.fp4_quant_bwd_grad
        if weight.random_hadamard_transform:
            return (
                "fp4_quant_fwd_weight.random_hadamard_transform=True (a weight's column-wise copy is multiplied by a "
                "gradient that is not rotated); assign a QParams without it"
            )
        if inp.random_hadamard_transform != grad.random_hadamard_transform:
            return (
                f"fp4_quant_fwd_inp.random_hadamard_transform={inp.random_hadamard_transform} with "
                f"fp4_quant_bwd_grad's {grad.random_hadamard_transform} (their product needs both or neither); "
                "assign QParams that agree"
            )
        for name, cast in (("fp4_quant_fwd_inp", inp), ("fp4_quant_bwd_grad", grad)):
            if cast.random_hadamard_transform and cast.fp4_2d_quantization:
                return (
                    f"{name} with both random_hadamard_transform and fp4_2d_quantization; assign a QParams without one"
                )
        for name, cast in (("fp4_quant_fwd_inp", inp), ("fp4_quant_fwd_weight", weight)):
            if cast.stochastic_rounding:
                return (
                    f"{name}.stochastic_rounding=True (only gradients are rounded stochastically); assign a QParams "
                    "without it"
                )
        return None


@lenient
@dataclass(eq=False)
class CustomRecipe(Recipe):
    """Quantizers from a user's factory.

    Attributes:
        qfactory: called with the `te_dispatch.pytorch.QuantizerRole` of a tensor, and with None for what leaves a
            module quantized (unless the module was given a role for that); returns one of the quantizers of
            `te_dispatch.pytorch.tensor`, or None for high precision. It is called once for each tensor of a module and
            each recipe, so that it must not depend on when. Equal functions make equal recipes.
        fp8_format: only what `te_dispatch.pytorch.fp8.support.get_fp8_torch_dtype` says of the recipe.
        fp8_dpa, fp8_mha: as in `DelayedScaling`. backward_override: as in `Float8CurrentScaling`; with one, the factory
            is not asked about gradients.
        quantization_alignment: what `Fp8Padding` pads rows to.
    """

    KIND: ClassVar[str] = "custom"

    qfactory: Callable[..., Any]
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = field(default_factory=override)
    quantization_alignment: int = 128

    def _check(self) -> None:
        if not callable(self.qfactory):
            raise TypeError(f"CustomRecipe: qfactory must be a function, got {self.qfactory!r}")
        self._check_shared((Format.E4M3, Format.E5M2, Format.HYBRID))
        if self.quantization_alignment < 1:
            raise ValueError(
                f"CustomRecipe: quantization_alignment must be at least 1, got {self.quantization_alignment}"
            )

    def row_alignment(self) -> int:
        return self.quantization_alignment
