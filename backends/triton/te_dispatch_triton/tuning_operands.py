# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Random operands of a product that is described by facts, and runs of its candidates on them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.backend_kit.tuning import repeated, sets_of
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dispatch.ops.gemm import gemm_sizes, operand_format
from te_dispatch_triton import gemm as gemms
from te_dispatch_triton import gemm_plans, gemm_product, quantize, tuning_cache
from te_dispatch_triton.configs import Choice
from te_dispatch_triton.launch import CompileFailure
from te_dispatch_triton.targets import target_of

if TYPE_CHECKING:
    from te_dispatch.numerics.quantized import Operand

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def quantizer_of(encoding: str, scaling: str) -> Quantizer:
    """A quantizer that makes operands of an encoding and a scaling."""
    if scaling == "tensor":
        return CurrentQuantizer(encoding)
    if scaling == "mxfp8":
        return MXFP8Quantizer(encoding)
    if scaling == "nvfp4":
        return NVFP4Quantizer()
    return BlockQuantizer(encoding, two_d=scaling == "block_2d")


class Scratch:
    """Several sets of operands and outputs of one call.

    Raises:
        Declined: the backend does not multiply them.
    """

    def __init__(self, call: Mapping[str, Any], device: int) -> None:
        self.device = torch.device("cuda", device)
        self._call = call
        self._options = {
            "layout": call["layout"],
            "accumulate": bool(call.get("accumulate")),
            "split_accumulator": call.get("split_accumulator"),
        }
        first = self._operands()
        size = sum(_bytes(x) for x in first if x is not None)
        self._sets = [first, *(self._operands() for _ in range(sets_of(size) - 1))]
        self._next = itertools.cycle(self._sets)
        self._run(first)
        self.problem = self._problem(*first)
        self.target = target_of(self.device)

    def _problem(self, a: Operand, b: Operand, bias: Any, out: torch.Tensor) -> gemm_plans.Problem:
        layout, split = self._options["layout"], bool(self._options["split_accumulator"])
        left, right = gemm_product.side_of(a, "a", layout), gemm_product.side_of(b, "b", layout)
        sizes, scaling = gemm_sizes(a, b, layout), gemm_product.pair_of(a, b)
        tf32 = a.dtype is torch.float32 and gemms.allows_tf32()
        return gemm_product.problem_of(
            left, right, sizes, scaling, tf32, split and scaling != "none", False, out, self._options["accumulate"]
        )

    def key(self) -> str:
        """What the winner is kept as."""
        return tuning_cache.key_of(
            gemm_plans.FAMILY, self._name()[0], self.target, (self.problem.a_code, self.problem.b_code), self._sizes()
        )

    def _sizes(self) -> tuple[int, int, int]:
        return self.problem.m, self.problem.n, self.problem.k

    def _name(self) -> tuple[str, Choice]:
        """(the table of configurations, its default for this problem)."""
        kind, described, choice = gemm_plans.choice_of(self.problem, self.target, tuned=False)
        return (f"{kind}_described" if described else kind), choice

    def candidates(self) -> list[tuple[Choice, Callable[[], float]]]:
        """(configuration, a function that runs it many times and returns the microseconds of one), the default first;
        without those that do not compile here, and those whose results are not the default's."""
        name, default = self._name()
        expected = self._result(name, default)
        if expected is None:
            return []
        found = []
        for choice in dict.fromkeys(map(_Hashable, (default, *gemm_plans.candidates(name, self.target)))):
            result = self._result(name, choice.choice)
            if result is not None and torch.equal(result, expected):
                found.append((choice.choice, self._captured(name, choice.choice)))
        return found

    def _result(self, name: str, choice: Choice) -> torch.Tensor | None:
        """The first set's output as bits; None where the configuration does not fit the chip."""
        given = self._sets[0]
        given[3].zero_()
        with self._forced(name, choice):
            try:
                self._run(given)
            except CompileFailure as error:
                warnings.warn(f"left out: {error}", RuntimeWarning, stacklevel=2)
                return None
        return given[3].view(torch.uint8).clone()

    def _captured(self, name: str, choice: Choice) -> Callable[[], float]:
        with self._forced(name, choice):
            return repeated(lambda: self._run(next(self._next)), len(self._sets))

    def _forced(self, name: str, choice: Choice) -> _Forced:
        return _Forced(name, choice, self._sizes())

    def _run(self, given: tuple[Any, Any, Any, torch.Tensor]) -> None:
        a, b, bias, out = given
        product = gemms.gemm if isinstance(a, torch.Tensor) else gemms.gemm_codes
        product(a, b, out=out, bias=bias, **self._options)

    def _operands(self) -> tuple[Any, Any, Any, torch.Tensor]:
        """a, b, bias, out."""
        call = self._call
        m, n, k, layout = call["m"], call["n"], call["k"], call["layout"]
        shapes = {"a": (k, m) if layout[0] == "T" else (m, k), "b": (n, k) if layout[1] == "T" else (k, n)}
        a, b = (self._operand(side, shape, layout) for side, shape in shapes.items())
        plain = call.get("a.dtype", "bf16")
        out_dtype = _DTYPES[call.get("out_dtype") or (plain if plain in _DTYPES else "bf16")]
        out = torch.zeros((m, n), dtype=out_dtype, device=self.device)
        bias = torch.randn(n, device=self.device).to(out_dtype) if call.get("bias") else None
        return a, b, bias, out

    def _operand(self, side: str, shape: tuple[int, int], layout: str) -> Operand:
        kind = self._call.get(f"{side}.dtype", "bf16")
        x = torch.randn(shape, device=self.device)
        if kind in _DTYPES:
            return x.to(_DTYPES[kind])
        scaling = self._call.get(f"{side}.scaling", "tensor")
        usage, _ = getattr(gemms, "operand_format", operand_format)(layout, side, scaling)
        return quantize.quantize(x.bfloat16(), quantizer_of(kind, scaling), usage=usage)


class _Hashable:
    """A configuration that equals another of the same values."""

    __slots__ = ("choice", "_key")

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        self._key = (tuple(sorted(choice.constants.items())), choice.config)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hashable) and self._key == other._key


class _Forced:
    """A block in which a table's products of some sizes take one configuration."""

    def __init__(self, name: str, choice: Choice, sizes: tuple[int, int, int]) -> None:
        self._name, self._choice, self._sizes = name, choice, sizes

    def __enter__(self) -> None:
        gemm_plans.force(self._name, self._choice, self._sizes)

    def __exit__(self, *_: object) -> None:
        gemm_plans.force(self._name, None, self._sizes)


def _bytes(x: Any) -> int:
    parts = (x,) if isinstance(x, torch.Tensor) else (x.row_data, x.col_data)
    return sum(part.numel() * part.element_size() for part in parts if part is not None)
