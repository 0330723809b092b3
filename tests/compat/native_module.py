# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A stand-in for Transformer Engine's native module: its names, as functions that record their calls and enumerations.

Executed as the source of a module ``transformer_engine_torch``, so it imports nothing of this project.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

_NAMES = (Path(__file__).parent / "te_native_functions.txt").read_text().split()

#: (function, positional arguments, keyword arguments) of every call.
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

_MEMBERS = {
    "DType": "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1",
    "NVTE_Fused_Attn_Backend": "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8",
}


def _function(name: str) -> Any:
    def native(*args: Any, **kwargs: Any) -> Any:
        CALLS.append((name, args, kwargs))
        return ("native", name)

    native.__name__ = name
    return native


class _Enumeration(type):
    """Makes members when they are asked for, as there are many and only a few matter."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls.__members__.setdefault(name, cls(name, len(cls.__members__)))


def _enumeration(name: str) -> Any:
    class Enumeration(metaclass=_Enumeration):
        __members__: ClassVar[dict[str, Any]] = {}

        def __init__(self, name: str, value: int) -> None:
            self.name, self.value = name, value

        def __int__(self) -> int:
            return self.value

    Enumeration.__name__ = Enumeration.__qualname__ = name
    for member in _MEMBERS.get(name, "").split():
        getattr(Enumeration, member)
    return Enumeration


globals().update({name: _function(name) for name in _NAMES})
for _name in (
    "CommOverlap", "CommOverlapHelper", "CommOverlapP2P", "CommOverlapType", "DType", "FP8BwdTensors", "FP8FwdTensors",
    "FP8TensorMeta", "NVTEQBHistogramMode", "NVTERoutingMapFormat", "NVTEScalingMode", "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend", "NVTE_Mask_Type", "NVTE_QKV_Format", "NVTE_QKV_Layout", "NVTE_Softmax_Type",
):  # fmt: skip
    globals()[_name] = _enumeration(_name)


def get_cudnn_version() -> int:
    return 91200
