# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""An operand that is loaded and stored in tiles by hardware (TMA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from te_dispatch.backend_kit.caches import BoundedDict
from te_dispatch_triton.triton_private import descriptors_of


class Descriptor:
    """A row-major matrix, loaded and stored in tiles by hardware.

    Args:
        base: holds the elements, from a multiple of 16 bytes on.
        dtype: what they are, of base's element size.
        shape: rows and columns, each at least 1.
        strides: (elements between rows, 1); the rows lie a multiple of 16 bytes apart.
        block_shape: of a tile, as the kernel loads it.
    """

    __slots__ = ("base", "dtype", "shape", "strides", "block_shape")
    # What Triton's launchers read of a descriptor beyond the above.
    padding = "zero"
    round_f32_to_tf32 = False

    def __init__(
        self,
        base: torch.Tensor,
        dtype: torch.dtype,
        shape: tuple[int, int],
        strides: tuple[int, int],
        block_shape: tuple[int, int],
    ) -> None:
        self.base = base
        self.dtype = dtype
        self.shape = shape
        self.strides = strides
        self.block_shape = block_shape

    def data_ptr(self) -> int:
        return self.base.data_ptr()

    def of_triton(self, gluon: bool = False) -> Any:
        """Triton's own descriptor, which its full argument path takes. `gluon`: for a kernel in Gluon."""
        parts = self.base.view(self.dtype), list(self.shape), list(self.strides), list(self.block_shape)
        if not gluon:
            return TensorDescriptor(*parts)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Described

        return Described(*parts, layout=self.layout())

    def layout(self) -> Any:
        """How a tile lies in shared memory, which Gluon is told and Triton finds."""
        from triton.experimental.gluon.language import NVMMASharedLayout

        size = self.base.element_size()
        return NVMMASharedLayout(min(128, self.block_shape[1] * size), 8 * size, rank=2)


class Maps(NamedTuple):
    """The parts of a launcher that keeps tensor maps.

    Attributes:
        launcher: takes a map where there was a descriptor.
        make: (descriptor, meta) -> what the launcher takes for it.
        kept: (place among the launcher's arguments, meta, address, sizes and strides -> what was made), last first.
    """

    launcher: Callable[..., None]
    make: Callable[[Any, Any], Any]
    kept: list[tuple[int, Any, BoundedDict[Any, Any]]]


#: Tensor maps that one place of a kernel keeps. A model's weights and buffers come back at the same addresses.
CAPACITY = 1024


def mapped(launch: Callable[..., None]) -> Callable[..., None]:
    """A kernel's launcher with the tensor maps of its descriptors kept from call to call.

    Triton makes them anew at every launch, in Python, which takes longer than the launch. A map depends on address,
    sizes and strides alone. A launcher without descriptors, or one that looks otherwise, is returned as it is.
    """
    parts = descriptors_of(launch)
    if parts is None:
        return launch
    launcher, make, described = parts
    # From the last on, because a descriptor becomes several arguments.
    kept: list[tuple[int, Any, BoundedDict[Any, Any]]] = [
        (place, meta, BoundedDict(CAPACITY)) for place, meta in reversed(described)
    ]

    def run(*args: Any) -> None:
        given = list(args)
        for place, meta, maps in kept:
            x = args[place]
            key = (x.base.data_ptr(), x.shape, x.strides)
            found = maps.get(key)
            if found is None:
                found = maps[key] = make(x, meta)
            given[place : place + 1] = found
        launcher(*given)

    run.parts = Maps(launcher, make, kept)  # type: ignore[attr-defined]  # for recordings
    return run
