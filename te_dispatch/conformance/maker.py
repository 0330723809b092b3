# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Making the arguments of a case: always on the host, always from the case's own seed, so that an id is enough."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.conformance import inputs
from te_dispatch.conformance.case import Case
from te_dispatch.conformance.subject import Subject, subjects
from te_dispatch.core.manager import OpManager
from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    Quantizer,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

#: Which backend turns high precision into the records that other operators read.
REFERENCE = "reference"


class Maker:
    """What a space's `make` builds arguments with.

    Args:
        case: of the arguments.
        manager: whose registry holds the reference.
        seed: of the data; None for the case's own.
    """

    def __init__(self, case: Case, manager: OpManager, seed: int | None = None) -> None:
        self.case = case
        self.manager = manager
        self.seed = case.random_seed if seed is None else seed
        self.generator = torch.Generator().manual_seed(self.seed)

    def again(self) -> Maker:
        """One that draws from the start what this one has drawn."""
        return Maker(self.case, self.manager, self.seed)

    def tensor(self, *shape: int, dtype: str = "fp32", values: str = "normal") -> torch.Tensor:
        """A contiguous tensor of `shape` whose values are one of `te_dispatch.conformance.inputs.KINDS`."""
        return inputs.fill(values, shape, DTYPES[dtype], self.generator)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Uniform in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype)

    def boolean(self, *shape: int, share: float = 0.5) -> torch.Tensor:
        """True with probability `share`."""
        return torch.rand(shape, generator=self.generator) < share

    def choice(self, options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=self.generator))]

    def rng_state(self) -> torch.Tensor:
        """int64 (2,): a seed and an offset, as operators take them."""
        return torch.randint(0, 2**40, (2,), generator=self.generator, dtype=torch.int64)

    def quantized(self, x: torch.Tensor, quantizer: Quantizer, usage: str = "both") -> Quantized:
        """x as a record, cast by the reference."""
        result = self.reference("quantize").call({"x": x, "quantizer": quantizer, "usage": usage})
        assert isinstance(result, Quantized)
        return result

    def laid_out(self, x: Quantized, scale_layout: str) -> Quantized:
        """The same record with its scales in another layout, moved by the reference."""
        result = self.reference("relayout_scales").call({"x": x, "scale_layout": scale_layout})
        assert isinstance(result, Quantized)
        return result

    def reference(self, operator: str) -> Subject:
        """The reference's implementation of an operator, e.g. to make a backward's operands with its forward."""
        return subjects(self.manager, OPERATORS[operator], torch.device("cpu"), REFERENCE)[0]


class Sketch(Maker):
    """Makes arguments of which only facts are read, such as shapes and dtypes: every number of theirs is 0.

    Planning asks of tens of thousands of combinations who claims them, and most of what making them costs are numbers.
    """

    def tensor(self, *shape: int, dtype: str = "fp32", values: str = "normal") -> torch.Tensor:
        return torch.zeros(shape, dtype=DTYPES[dtype])

    def quantized(self, x: torch.Tensor, quantizer: Quantizer, usage: str = "both") -> Quantized:
        result = OPERATORS["quantize"].shape(x, quantizer, usage=usage)
        assert isinstance(result, Quantized)
        return result

    def laid_out(self, x: Quantized, scale_layout: str) -> Quantized:
        result = OPERATORS["relayout_scales"].shape(x, scale_layout=scale_layout)
        assert isinstance(result, Quantized)
        return result
