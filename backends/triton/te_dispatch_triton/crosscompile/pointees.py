# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which memory a launch may access: its arguments' storages, and those of tensors whose addresses it gets as numbers.

Kernels on several tensors get addresses in a tuple or in a tensor of 64-bit integers. Nothing says whose they are, so
that tensors are looked for among Python's objects: only when a kernel goes there, the youngest objects first.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator

import numpy as np
import torch

from gfx_emulator.arrays import Array
from gfx_emulator.memory import Finder
from te_dispatch_triton.launch import Launch

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
#: Numbers below are no addresses of tensors.
_LOWEST = 1 << 16
#: Objects to look through before those that are there are left out of later searches.
_MANY = 100_000


def storages(given: Launch) -> list[torch.UntypedStorage]:
    """Those of a launch's tensors, each once."""
    found = (one.untyped_storage() for one in given.args if isinstance(one, torch.Tensor))
    return list({one.data_ptr(): one for one in found}.values())


def allocation(storage: torch.UntypedStorage) -> tuple[Array, int, str]:
    """A storage as `gfx_emulator.Memory.register` takes it."""
    raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
    return raw, storage.data_ptr(), f"{storage.nbytes()} bytes"


class Pointees:
    """Finds the storages that launches' addresses point into."""

    def __init__(self) -> None:
        #: Tensors among the objects that are not looked through any more, and those that were found.
        self._kept: dict[int, weakref.ref[torch.Tensor]] = {}
        self._frozen = False

    def finder(self, given: Launch) -> Finder | None:
        """What finds an address's storage for a launch; None where it is given no addresses."""
        pointers = _numbers(given)
        if not len(pointers):
            return None

        # Looked through once in a launch, as far as it takes: none of its tensors goes away meanwhile.
        seen: list[torch.Tensor] = []
        left = self._tensors()

        def find(address: int) -> tuple[Array, int, str] | None:
            for tensor in itertools.chain(tuple(seen), _noting(left, seen)):
                storage = tensor.untyped_storage()
                begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
                if not begin <= address < end:
                    continue
                # Only what the launch was pointed to: an access beside it must not pass because a tensor is there.
                place = int(np.searchsorted(pointers, begin))
                if place < len(pointers) and pointers[place] < end:
                    self._keep(tensor)
                    return allocation(storage)
            return None

        return find

    def tensor(self, address: int, dtype: torch.dtype) -> torch.Tensor:
        """What lies from an address on, to the end of its storage: (N,). Empty at address 0.

        Raises:
            LookupError: no tensor lies there.
        """
        if not address:
            return torch.empty(0, dtype=dtype, device="cpu")
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            behind = address - storage.data_ptr()
            if 0 <= behind < storage.nbytes():
                self._keep(tensor)
                raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)[behind:]
                return raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        raise LookupError(f"a launch was given the address {address:#x}, where no tensor lies")

    def close(self) -> None:
        """Let Python collect again what was left out of searches."""
        if self._frozen:
            gc.unfreeze()

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Living tensors of the host: those found before, then all, the youngest first."""
        for key, reference in list(self._kept.items()):
            tensor = reference()
            if tensor is None:
                del self._kept[key]
            else:
                yield tensor
        for generation in range(3):
            objects = gc.get_objects(generation)
            many = len(objects) > _MANY
            if many:
                objects = gc.get_objects()
            tensors = [one for one in objects if type(one) in _TENSORS and _in_memory(one)]
            # What waits in the middle of a search would be one of the objects that it holds: a reference cycle.
            del objects
            if many:
                # What modules are made of, mostly, and stays.
                for one in tensors:
                    self._keep(one)
                self._frozen = True
                gc.freeze()
            yield from tensors
            if many:
                return

    def _keep(self, tensor: torch.Tensor) -> None:
        self._kept[id(tensor)] = weakref.ref(tensor)


def _noting(tensors: Iterator[torch.Tensor], seen: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same, each added to a list."""
    for tensor in tensors:
        seen.append(tensor)
        yield tensor


def _in_memory(x: torch.Tensor) -> bool:
    """Whether a tensor has one storage in the host's memory: sparse ones do not, nor do wrappers of other tensors, as
    functionalization makes them, which some other code may have left."""
    if x.device.type != "cpu" or x.layout is not torch.strided:
        return False
    try:
        x.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def _numbers(given: Launch) -> Array:
    """Numbers of a launch that may be addresses: int64, sorted."""
    found = [np.array([one for one in value if isinstance(one, int)], np.int64)
             for value in given.args if isinstance(value, tuple)]  # fmt: skip
    for value in given.args:
        if isinstance(value, torch.Tensor) and value.dtype is torch.int64:
            found.append(value.detach().reshape(-1).numpy())
    every = np.concatenate(found) if found else np.zeros(0, np.int64)
    return np.unique(every[every >= _LOWEST])
