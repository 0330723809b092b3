# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Results that a kernel wrote through a pointer, into memory that did not come from `te_dispatch.ops.alloc`.

Neither canaries nor poison are around such memory, so an overrun of it would not be seen. What PyTorch's own operators
return, or fill, needs no guard. Memory of another library (`torch.from_numpy`, `torch.frombuffer`, `torch.from_dlpack`,
``torch::from_blob``) comes from no operator, and PyTorch cannot resize its storage. Nor can it that of a tensor whose
`numpy` was called, so both are asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

_FACTORIES = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class Uninitialized(TorchDispatchMode):
    """While entered, notes the memory that PyTorch gives out uninitialized and that none of its operators fills."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._held: dict[int, StorageWeakRef] = {}
        #: The memory that PyTorch's operators made with contents, or wrote to, by address. The address of memory that
        #: was freed may be another library's next, so that an address alone would tell nothing.
        self._filled: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        result = function(*args, **given)
        name = function.overloadpacket.__name__
        if name in _FACTORIES:
            if result.numel():
                _note(self._held, result)
        else:
            for written in _written(function, args, given):
                _note(self._filled, written)
                self._held.pop(_address(written), None)
            known = {_address(x) for x in _tensors((*args, *given.values()))}
            for made in _tensors((result,)):
                if _address(made) not in known:
                    _note(self._filled, made)
        return result

    def unfilled(self, results: Mapping[str, torch.Tensor], allowed: Iterable[torch.Tensor] = ()) -> str | None:
        """The first of a call's results in such memory. A part of a larger piece of PyTorch's is no such: it is a
        pool's, which may have had it from the allocator in an earlier call.

        Args:
            allowed: tensors in whose memory results may lie: what the allocator gave, and what the caller did.
        """
        given = {_address(x) for x in allowed}
        for path, tensor in results.items():
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if not tensor.numel() or storage.nbytes() != tensor.numel() * tensor.element_size():
                continue
            if _alive(self._held, address):
                return path
            if not storage.resizable() and address not in given and not _alive(self._filled, address):
                return path
        return None


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _note(memory: dict[int, StorageWeakRef], x: torch.Tensor) -> None:
    """Enter a tensor's storage without keeping it alive."""
    storage = x.untyped_storage()
    memory[storage.data_ptr()] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _alive(memory: Mapping[int, StorageWeakRef], address: int) -> bool:
    """Whether the storage that was entered under an address has not been freed since."""
    reference = memory.get(address)
    return reference is not None and not reference.expired()  # type: ignore[no-untyped-call]


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among what an operator takes or returns."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _written(function: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The arguments that an operator's schema says it writes."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[place] if place < len(args) else given.get(argument.name)
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield item
