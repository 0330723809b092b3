# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Declares every operator by importing its family. A new family is added to this list."""

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
