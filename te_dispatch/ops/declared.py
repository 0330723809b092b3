# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Declares every operator by importing its family, then the decompositions. A new family is added to these lists."""

from __future__ import annotations

from collections.abc import Mapping

from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.parameters import Parameter
from te_dispatch.ops import (  # noqa: F401
    activation,
    attention,
    gemm,
    norm,
    position,
    quantize,
    softmax,
    training,
)
from te_dispatch.ops.composites import activation as _activation  # noqa: F401
from te_dispatch.ops.composites import attention as _attention  # noqa: F401
from te_dispatch.ops.composites import gemm as _gemm  # noqa: F401
from te_dispatch.ops.composites import norm as _norm  # noqa: F401
from te_dispatch.ops.composites import quantize as _quantize  # noqa: F401


def parameters(operator: str) -> Mapping[str, Parameter]:
    """The parameters of an operator by name, in the order of its signature.

    For host code that caches results per call signature: its keys are made of these.

    Raises:
        KeyError: there is no such operator.
    """
    return OPERATORS[operator].parameters
