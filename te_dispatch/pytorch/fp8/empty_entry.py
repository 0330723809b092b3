# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""An empty ``_extra_state`` into which `torch.distributed.checkpoint` reads one of any length.

That library reads a checkpoint into the tensors of a state_dict and refuses a tensor of another size than the saved
one. A module that never ran has no state yet, and how large it will be depends on a recipe that nobody has named. So
its entry implements the protocol that the library has for tensors which know best what to read (DTensor implements
it): `EmptyEntry` names a chunk that is longer than any entry, and takes what is there. Everything else sees an empty
tensor of bytes: copies, pickles and results of operators are plain tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.pytorch.fp8 import extra_state
from te_dispatch.torch_private import disabled_torch_function

if TYPE_CHECKING:
    # Not before the library calls: PyTorch may be built without torch.distributed.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

#: Bytes that an entry may have. A history of 1,024 steps of LayerNormMLP's two products takes 24 KiB; memory that
#: nothing is read into is never touched.
LONGEST_ENTRY = 1 << 22


class _AnyLength(list[int]):
    """The size of an entry that takes one of any length: [0], and equal to every size of one dimension.

    A list, which operators take for a size. A tuple would be compared by `torch.Size`, which is one.
    """

    def __init__(self) -> None:
        super().__init__((0,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(other) == 1

    def __ne__(self, other: object) -> bool:
        return not self == other

    def numel(self) -> int:
        """As of `torch.Size`."""
        return 0


class EmptyEntry(torch.Tensor):
    """A uint8 tensor of shape (0,) on the CPU; `received` gives what `torch.distributed.checkpoint` read into it."""

    _room: torch.Tensor | None

    @staticmethod
    def __new__(cls) -> EmptyEntry:
        entry = torch.empty(0, dtype=torch.uint8).as_subclass(cls)
        entry._room = None
        return entry

    __torch_function__ = disabled_torch_function

    def size(self, dim: int | None = None) -> Any:
        """As of any tensor, but that the sizes of all entries equal it."""
        return _AnyLength() if dim is None else super().size(dim)

    def received(self) -> torch.Tensor:
        """What was read, as a plain tensor; an empty one where nothing was."""
        if self._room is None:
            return self.as_subclass(torch.Tensor)
        # A copy: whoever saves a view saves all of the memory that it is a view of.
        return extra_state.trimmed(self._room).clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.received().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.received().__reduce_ex__(protocol)

    # -- the protocol of torch.distributed.checkpoint ------------------------------------------------------------------

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        self._room = torch.zeros(LONGEST_ENTRY, dtype=torch.uint8)
        return [ChunkStorageMetadata(offsets=torch.Size([0]), sizes=self._room.shape)]

    def __create_write_items__(self, fqn: str, entry: object) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        # From here on the entry is what is written: its length and its bytes are asked for one after the other.
        self._room = content = self.received()
        start = torch.Size([0])
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=start, sizes=content.shape),
            properties=TensorProperties.create_from_tensor(content),
            size=content.shape,
        )
        return [WriteItem(index=MetadataIndex(fqn, start), type=WriteItemType.TENSOR, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert self._room is not None  # one of the two above was called before
        return self._room


def received(state: Any) -> Any:
    """What an `EmptyEntry` received; any other state unchanged."""
    return state.received() if isinstance(state, EmptyEntry) else state
