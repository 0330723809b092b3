# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Runs of the candidates of a call that is described by facts, on random operands."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.backend_kit.tuning import Candidate, repeated, sets_of
from te_dispatch.backend_kit.tuning_operands import DTYPES, Operands, random_operands
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import CANONICAL_SCALES
from te_dispatch_cuda import gemm as gemms
from te_dispatch_cuda.gemm_calls import problem_of
from te_dispatch_cuda.gemm_plans import LAID_OUT, Problem
from te_dispatch_cuda.memory import stream_of
from te_dispatch_cuda.native import load

_native = load()


class Scratch:
    """Several sets of operands and outputs of one call.

    Raises:
        Declined: the library has nothing for it.
    """

    def __init__(self, call: Mapping[str, Any], device: int) -> None:
        self.device = torch.device("cuda", device)
        self._call = call
        first = self._operands()
        self._sets = [first, *(self._operands() for _ in range(sets_of(first.bytes()) - 1))]
        self.problem = self._problem(first)
        try:
            self._plan = _native.gemm_plan(*self.problem, None)
        except _native.GemmRefused as error:
            raise Declined(str(error)) from None
        self._next = itertools.cycle(self._sets)

    def candidates(self, count: int) -> list[Candidate]:
        """The library's algorithms, its favourite first."""
        return [
            Candidate(
                {"algorithm": algorithm.hex() if place else None, "words": words},
                words,
                self._captured(algorithm, size),
            )
            for place, (algorithm, size, words) in enumerate(_native.gemm_candidates(self._plan, count))
        ]

    def _captured(self, algorithm: bytes, workspace: int) -> Callable[[], float] | None:
        """A function that runs an algorithm many times and returns the microseconds of one; None if it fails."""
        try:
            _native.gemm_take(self._plan, algorithm, workspace)
            memory = torch.empty(self._plan.workspace, dtype=torch.uint8, device=self.device)
            return repeated(lambda: self._run(next(self._next), memory), len(self._sets))
        except RuntimeError:
            return None

    def _run(self, given: Operands, workspace: torch.Tensor) -> None:
        addresses = [0 if x is None else x.data_ptr() for x in given]
        stream = stream_of(self.device.index)
        _native.gemm_run(self._plan, stream, *addresses, workspace.data_ptr(), 1.0)

    def _operands(self) -> Operands:
        return random_operands(
            self._call, self.device, lambda side, scaling: gemms.operand_format("NT", side, scaling)[1]
        )

    def _problem(self, given: Operands) -> Problem:
        call, (a, b, _, _, out, bias) = self._call, given
        kinds = call.get("a.dtype", "bf16"), call.get("b.dtype", "bf16")
        scalings = call.get("a.scaling", "tensor"), call.get("b.scaling", "tensor")
        layout, kind = "NT", (*kinds, not call.get("split_accumulator"))
        if kinds[0] in DTYPES:
            dtype = DTYPES[kinds[0]]
            layout, kind = call["layout"], (dtype, gemms.allows_tf32()) if dtype is torch.float32 else dtype
        elif scalings[0] != "tensor":
            formats = [gemms.operand_format("NT", side, scaling) for side, scaling in zip("ab", scalings, strict=True)]
            kind = (*kinds, *scalings, *(LAID_OUT * (scales != CANONICAL_SCALES) for _, scales in formats))
        low = (a.data_ptr() | b.data_ptr() | out.data_ptr()) & 255
        return problem_of(a, b, layout, kind, self.device.index, low, out.dtype, bool(call.get("accumulate")), bias)
