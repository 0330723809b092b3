# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`te_dispatch::quantize_linear` and `te_dispatch::dequantize_linear`: ONNX's operators for FP8, as PyTorch operators.

They compute what ONNX says (QuantizeLinear-19, DequantizeLinear-19), so that an exported program can be run before it
is translated. PyTorch and ONNX have the same four FP8 dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: The first opset whose QuantizeLinear, DequantizeLinear and Cast know FP8.
_OPSET = 19

DTYPES = {
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2": torch.float8_e5m2,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}

_library = torch.library.Library("te_dispatch", "FRAGMENT")
_library.define("quantize_linear(Tensor x, Tensor scale_inv, str encoding) -> Tensor")
_library.define("dequantize_linear(Tensor codes, Tensor scale_inv, str encoding) -> Tensor")


def _quantize_linear(x: torch.Tensor, scale_inv: torch.Tensor, encoding: str) -> torch.Tensor:
    """encode(RN32(x / scale_inv)), saturated; scale_inv float32 (). Infinities saturate, NaN stays NaN."""
    dtype = DTYPES[encoding]
    limit = torch.finfo(dtype).max
    return (x / scale_inv).clamp(-limit, limit).to(dtype)


def _dequantize_linear(codes: torch.Tensor, scale_inv: torch.Tensor, encoding: str) -> torch.Tensor:
    """RN32(decode(codes) * scale_inv); scale_inv float32 ()."""
    return codes.to(torch.float32) * scale_inv


def _quantize_linear_fake(x: torch.Tensor, scale_inv: torch.Tensor, encoding: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=DTYPES[encoding], device=x.device)


def _dequantize_linear_fake(codes: torch.Tensor, scale_inv: torch.Tensor, encoding: str) -> torch.Tensor:
    return torch.empty(codes.shape, dtype=torch.float32, device=codes.device)


_library.impl("quantize_linear", _quantize_linear, "CompositeExplicitAutograd")
_library.impl("dequantize_linear", _dequantize_linear, "CompositeExplicitAutograd")
torch.library.register_fake("te_dispatch::quantize_linear", _quantize_linear_fake, lib=_library)
torch.library.register_fake("te_dispatch::dequantize_linear", _dequantize_linear_fake, lib=_library)


# onnxscript, which torch.onnx.export needs too, is imported when a graph is translated: it is optional. Arguments
# without an annotation are inputs of the ONNX operator.
def _translated_quantize(x, scale_inv, encoding: str):  # type: ignore[no-untyped-def]
    from onnxscript import opset19

    return opset19.QuantizeLinear(x, scale_inv, _zero_point(encoding))


def _translated_dequantize(codes, scale_inv, encoding: str):  # type: ignore[no-untyped-def]
    from onnxscript import opset19

    # Optional, but onnxruntime 1.32 takes one that is missing for uint8 where it moves the pair across a Reshape.
    return opset19.DequantizeLinear(codes, scale_inv, _zero_point(encoding))


def _zero_point(encoding: str) -> Any:
    """What says, in ONNX, which dtype codes have."""
    import onnx
    from onnxscript import evaluator, opset19

    version = evaluator.default().opset.version  # type: ignore[attr-defined]
    if version < _OPSET:
        raise NotImplementedError(
            f"onnx_export: opset {version} has no FP8, opset {_OPSET} and later have; call torch.onnx.export with "
            f"opset_version={_OPSET + 1}"
        )
    dtype = getattr(onnx.TensorProto, f"FLOAT8{encoding.upper()}")
    return opset19.Constant(value=onnx.helper.make_tensor("zero_point", dtype, [], b"\0", raw=True))


#: What `torch.onnx.export` takes as `custom_translation_table`.
te_translation_table: dict[Any, Callable[..., Any]] = {
    torch.ops.te_dispatch.quantize_linear.default: _translated_quantize,
    torch.ops.te_dispatch.dequantize_linear.default: _translated_dequantize,
}
