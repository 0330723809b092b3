# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The base of all recipes."""

from __future__ import annotations

from typing import ClassVar

from te_dispatch.common.recipe_parameters import Format, require_choice
from te_dispatch.common.recipe_values import RecipeValues


class Recipe(RecipeValues):
    """Base of all recipes, with predicates that tell them apart without isinstance.

    Attributes may be assigned; `RecipeValues` says what then holds.
    """

    #: Which of the predicates is true of the class.
    KIND: ClassVar[str] = ""
    #: Both dimensions of every quantized GEMM operand must be multiples of this.
    alignment: ClassVar[int] = 16
    #: The same of an input's rows where no gradient of a weight, which sums over them, will be computed.
    untrained_row_alignment: ClassVar[int] = 8

    fp8_format: Format
    fp8_dpa: bool
    fp8_mha: bool
    backward_override: str | None

    @classmethod
    def nvfp4(cls) -> bool:
        return cls.KIND == "nvfp4"

    @classmethod
    def mxfp8(cls) -> bool:
        return cls.KIND == "mxfp8"

    @classmethod
    def delayed(cls) -> bool:
        return cls.KIND == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return cls.KIND == "float8_current_scaling"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return cls.KIND == "float8_block_scaling"

    @classmethod
    def custom(cls) -> bool:
        return cls.KIND == "custom"

    def row_alignment(self) -> int:
        """What the rows of each part of a grouped input are padded to, if nothing else is asked for."""
        return self.alignment

    def unsupported_knob(self) -> str | None:
        """What this version cannot do of what the recipe asks: the knob with its value and the remedy, or None."""
        if self.fp8_dpa:
            return "fp8_dpa=True (attention in FP8); set it to False"
        if self.fp8_mha:
            return "fp8_mha=True (FP8 between attention and its projections); set it to False"
        return self._unsupported_cast()

    def _check_shared(self, formats: tuple[Format, ...]) -> None:
        if self.fp8_format not in formats:
            allowed = ", ".join(f"Format.{f.name}" for f in formats)
            raise ValueError(
                f"{type(self).__name__}: fp8_format must be one of {allowed}, got Format.{self.fp8_format.name}"
            )
        require_choice(self, "backward_override", (None, "high_precision", "dequantized"))
