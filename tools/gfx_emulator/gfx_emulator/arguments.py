# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The kernarg segment: a kernel's arguments as it reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gfx_emulator.code_object import Kernel
from gfx_emulator.errors import EmulatorError


def packed(kernel: Kernel, values: Sequence[Any]) -> bytes:
    """Arguments in the order of the kernel's metadata; those that the compiler hid may be left out, and are zero.

    Args:
        values: integers, for addresses and integers of the argument's size; NumPy scalars or bytes of that size;
            floats, which become float32.

    Raises:
        EmulatorError: if their number or a size is wrong.
    """
    expected = kernel.arguments
    shown = [one for one in expected if not one.kind.startswith("hidden_")]
    if len(values) not in (len(shown), len(expected)):
        raise EmulatorError(f"kernel {kernel.name} has {len(shown)} arguments, {len(values)} were given")
    segment = bytearray(kernel.descriptor.kernarg_bytes)
    for argument, value in zip(shown if len(values) == len(shown) else expected, values):
        raw = _bytes(value, argument.size)
        if len(raw) != argument.size:
            name = argument.name or f"at {argument.offset}"
            raise EmulatorError(f"kernel {kernel.name}, argument {name}: {len(raw)} bytes, it has {argument.size}")
        segment[argument.offset : argument.offset + argument.size] = raw
    return bytes(segment)


def _bytes(value: Any, size: int) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, float):
        return np.float32(value).tobytes()
    return int(value & (1 << 8 * size) - 1).to_bytes(size, "little")
