# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Runs of the candidates of a call that is described by facts, on random operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.backend_kit.products import allows_tf32
from te_dispatch.backend_kit.tuning import Candidate, repeated, sets_of
from te_dispatch.backend_kit.tuning_operands import DTYPES, Operands, random_operands
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import CANONICAL_SCALES
from te_dispatch_rocm.gemm_plans import Operand, Problem, plain_operands, problem_of
from te_dispatch_rocm.memory import address, device_of, place_of
from te_dispatch_rocm.native import load

_native = load()


class Scratch:
    """Several sets of operands and outputs of one call.

    Raises:
        Declined: the library has nothing for it.
    """

    def __init__(self, call: Mapping[str, Any], device: int) -> None:
        self.device = device_of(device)
        self._call = call
        first = self._operands()
        self._sets = [first, *(self._operands() for _ in range(sets_of(first.bytes()) - 1))]
        self.problem = self._problem(first)
        try:
            self._plan = _native.new_gemm_plan(tuple(self.problem), None)
        except _native.GemmRefused as error:
            raise Declined(str(error)) from None
        self._next = itertools.cycle(self._sets)

    def candidates(self, count: int) -> list[Candidate]:
        """The library's algorithms, its favourite first."""
        return [
            Candidate(
                {"algorithm": algorithm.hex() if place else None, "words": words}, words, self._timed(algorithm, size)
            )
            for place, (algorithm, size, words) in enumerate(_native.gemm_candidates(self._plan, count))
        ]

    def _timed(self, algorithm: bytes, workspace: int) -> Callable[[], float] | None:
        """A function that runs an algorithm many times and returns the microseconds of one; None if it fails."""
        try:
            _native.gemm_take(self._plan, algorithm, workspace)
            memory = torch.empty(workspace, dtype=torch.uint8, device=self.device)
            return repeated(lambda: self.run(next(self._next), memory), len(self._sets))
        except RuntimeError:
            return None

    def run(self, given: Operands, workspace: torch.Tensor) -> None:
        """The product by the algorithm that was taken last."""
        index, stream_of = place_of(given.a)
        places = [address(x) for x in (given.a, given.b, given.a_scale, given.b_scale, given.out, given.bias)]
        _native.gemm_run(self._plan, stream_of(index), *places, 0, address(workspace), 1.0)

    def _operands(self) -> Operands:
        return random_operands(self._call, self.device, lambda side, scaling: CANONICAL_SCALES)

    def _problem(self, given: Operands) -> Problem:
        call = self._call
        sizes = call["m"], call["n"], call["k"]
        scaling = "none"
        a, b, _ = plain_operands(given.a, given.b, call["layout"])
        if call.get("a.dtype", "bf16") not in DTYPES:
            scaling = call.get("a.scaling", "tensor")
            a = Operand(given.a, given.a_scale, call["a.dtype"], False)
            b = Operand(given.b, given.b_scale, call["b.dtype"], True)
        bias = None if given.bias is None else given.bias.dtype
        return problem_of(
            a, b, sizes, scaling, place_of(given.a)[0], given.out.dtype, bool(call.get("accumulate")), bias,
            tf32=a.kind is torch.float32 and allows_tf32(),
        )  # fmt: skip
