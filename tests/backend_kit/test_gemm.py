# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Implementations of `gemm` that are made of a function of an epilogue."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.backend_kit.gemm import gemm_with_epilogue
from te_dispatch.core.bind import load, positional
from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.quantizers import CurrentQuantizer
from te_dispatch.ops.gemm import Epilogue
from te_dispatch.ops.results import Gemm


@gemm_with_epilogue
def multiply(*given: Any) -> Gemm:
    """What it was given, as `out`."""
    return Gemm(given, None, None)  # type: ignore[arg-type]


def test_an_implementation_has_the_operator_s_signature() -> None:
    function, lacking = load(OPERATORS["gemm"], "acme.gemm", f"{__name__}:multiply")
    assert function is multiply and lacking == () and multiply.__doc__ == "What it was given, as `out`."
    # Dispatch forwards by position, to a copy of the code, and not through a launcher.
    assert positional(OPERATORS["gemm"], multiply, lacking).__code__.co_name == "gemm"


def test_every_argument_arrives_in_its_place() -> None:
    a, b, bias = torch.randn(2, 4, 16), torch.randn(8, 16), torch.randn(8)
    aux, out, quantizer = torch.randn(2, 4, 8), torch.zeros(2, 4, 8, dtype=torch.bfloat16), CurrentQuantizer()
    plain = Epilogue((2, 4, 8), torch.float32, 1.0, None, False, None, None, None, None, None)
    for options, expected in (
        ({"alpha": 0.5, "bias": bias, "epilogue": "dgelu", "aux": aux},
         plain._replace(alpha=0.5, bias=bias, kind="dgelu", aux=aux)),
        ({"out": out, "accumulate": True}, plain._replace(dtype=torch.bfloat16, out=out, accumulate=True)),
        ({"epilogue": "gelu", "aux_quantizer": quantizer, "out_dtype": torch.float16},
         plain._replace(dtype=torch.float16, kind="gelu", aux_quantizer=quantizer)),
        ({"out_quantizer": quantizer}, plain._replace(out_quantizer=quantizer)),
    ):  # fmt: skip
        found: Any = multiply(a, b, layout="NT", split_accumulator=True, **options).out
        assert found[:3] == (a, b, "NT") and found[4] is True
        assert all(x is y or x == y for x, y in zip(found[3], expected, strict=True))


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="bias: got shape"):
        multiply(torch.randn(4, 16), torch.randn(8, 16), layout="NT", bias=torch.randn(4))
