# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Bounds on rounding errors, each with its derivation. u(dtype) is the unit roundoff.

Notation: u32 = 2^-24. A sum of n fp32 terms in any order errs by at most gamma(n - 1) sum |terms| (Higham, "Accuracy
and Stability of Numerical Algorithms", 2nd ed., section 4.2). A result rounded to its dtype errs by u(dtype) |result|
more, and below the normal range by half the smallest subnormal.

| module | bounds of |
|---|---|
| `known` | values computed in fp32: a number, and how far off an implementation may be before it rounds it |
| `elementary` | exp, tanh, logistic, and what activations make of them |
| `gemm`, `norm`, `activation`, `softmax`, `position`, `attention`, `training` | the operators of one family each |
| `attention_own` | attention in PyTorch's own operations, whose error the contract allows twice |

Start with `gemm`. May import: torch, `te_dispatch.ops` for constants of the contracts, and of the kit `rules` and
`spread`.
"""

from __future__ import annotations

import torch

#: Unit roundoff of round to nearest: half the spacing at 1.
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
U32 = UNIT[torch.float32]
#: Half the smallest subnormal: what rounding errs by where spacing no longer shrinks.
HALF_SUBNORMAL = {torch.float32: 2.0**-150, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}


def rounding(expected: torch.Tensor, dtype: torch.dtype, oracle: torch.dtype = torch.float32) -> torch.Tensor:
    """Of one rounding of `expected` to `dtype`, plus the oracle's own to `oracle`. float64, of `expected`'s shape."""
    units = UNIT[dtype] + UNIT[oracle]
    return units * expected.double().abs() + HALF_SUBNORMAL[dtype] + HALF_SUBNORMAL[oracle]
