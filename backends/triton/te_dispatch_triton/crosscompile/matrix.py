# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Launches recorded on this machine, compiled for another chip."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from te_dispatch_triton import assembler
from te_dispatch_triton.kinds import in_reach
from te_dispatch_triton.launch import (
    CompileFailure,
    Descriptor,
    Launch,
    constant_names,
    describe,
    options_of,
    reason_of,
)
from te_dispatch_triton.targets import Target
from te_dispatch_triton.triton_private import gluon_source

_TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "u8", torch.int8: "i8",
    torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8", torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip
_ALIGNED, _REACHED = ["tt.divisibility", 16], ["tt.pointer_range", 32]


def compile_for(launch: Launch, target: Target) -> Any:
    """What Triton makes of a recorded launch for a target: an object with ``asm`` and ``metadata``.

    Raises:
        CompileFailure: names kernel, target and configuration.
    """
    source = source_of(launch, target)
    gpu = GPUTarget(target.backend, target.triton_arch, target.warp_size)
    try:
        with assembler.chosen(target.backend, target.triton_arch) as more:
            return triton.compile(source, target=gpu, options={**options_of(launch.config), **more})
    except Exception as error:
        raise CompileFailure(
            f"Triton kernel {launch.kernel.name} for {target.arch} with "
            f"{describe(launch.kernel, launch.constants, launch.config)}: {reason_of(error)}"
        ) from error


def source_of(launch: Launch, target: Target) -> ASTSource:
    """A launch's kernel, specialized as a call with its arguments would be."""
    signature, constants, attributes = specialization_of(launch, target)
    known = {
        place: [*([_ALIGNED] if aligned else ()), *([_REACHED] if reached else ())]
        for place, aligned, reached in attributes
    }
    function = launch.kernel.function
    if not function.is_gluon():
        return ASTSource(function, dict(signature), dict(constants), known)
    return gluon_source(function, dict(signature), dict(constants), known)


def specialization_of(launch: Launch, target: Target) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """((parameter, type), ...), ((place, constant), ...), ((place, whether a multiple of 16, whether 32 bits reach all
    of it), ...) where one of these holds."""
    signature: list[tuple[str, Any]] = []
    constants: list[tuple[tuple[int, ...], Any]] = []
    attributes: list[tuple[tuple[int, ...], bool, bool]] = []
    chosen = dict(zip(constant_names(launch.kernel), launch.constants))
    for place, parameter in enumerate(launch.kernel.function.params):
        value = chosen[parameter.name] if parameter.is_constexpr else launch.args[place]
        specialized = not parameter.do_not_specialize
        kind = "constexpr" if parameter.is_constexpr else type_of(value, launch.kernel.function.is_gluon(), specialized)
        signature.append((parameter.name, kind))
        if kind == "constexpr":
            constants.append(((place,), value))
        elif kind[0] == "*":
            aligned, reached = value.data_ptr() % 16 == 0, target.backend == "hip" and in_reach(value)
            if aligned or reached:
                attributes.append(((place,), aligned, reached))
        elif value.__class__ is int and value % 16 == 0 and specialized:
            attributes.append(((place,), True, False))
    return tuple(signature), tuple(constants), tuple(attributes)


def type_of(value: Any, gluon: bool = False, specialized: bool = True) -> Any:
    """A run-time argument's type as Triton writes it; ``constexpr`` for what it compiles in: None, and 1 unless the
    kernel says that the parameter is not `specialized` on."""
    if value.__class__ is Descriptor:
        layout = f",{value.layout()!r}" if gluon else ""
        return f"tensordesc<{_TYPES[value.dtype]}{list(value.block_shape)}{layout}>"
    if value is None or (value.__class__ is int and value == 1 and specialized):
        return "constexpr"
    if value.__class__ is int:
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if value.__class__ is float:
        return "fp32"
    if value.__class__ is tuple:
        return ("i64",) * len(value)
    return "*" + _TYPES[value.dtype]
