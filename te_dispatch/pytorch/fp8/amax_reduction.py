# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The maximum of amaxes over ranks, of states that the ranks know by the same names.

Ranks may run modules in different orders, run some on one rank only, and free them at different times, so neither
positions nor lengths can be relied on. Each rank sends its amaxes in the order of a list of labels, in a buffer whose
length hardly depends on the list, followed by the list's checksum. Where checksums differ nothing is taken over; the
ranks then exchange their labels, and go on with the union. A state that a rank has not run yet is sent as 0.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dispatch.torch_private import foreach_copy

#: Entries of the smallest buffer. Lists that differ still meet in buffers of one length, short of this many amaxes.
_CAPACITY = 1024
#: Entries of a checksum: two numbers of 24 bits, which float32 holds exactly, each with its negative. The maxima of
#: both over the ranks cancel where all ranks sent the same.
_CHECKSUM = 4
#: How many labels of states that have ended here are kept at least.
_ENDED = 64

_REMEDY = (
    "construct the same modules of te_dispatch in the same order on all ranks of the group, or pass the ranks that do "
    "as autocast's amax_reduction_group, or set the recipe's reduce_amax=False"
)


class _Constructed(threading.local):
    """How many modules this thread has constructed, and which, as a checksum. Threads have no common order."""

    def __init__(self) -> None:
        self.count = 0
        self.history = ""


_constructed = _Constructed()
#: Names of all origins of this process: a name that others send and that is not here tells that the ranks' programs
#: differ. Names of modules that have been freed stay, because ranks free theirs at different times.
_names: set[str] = set()


class Origin:
    """Where a module comes from, as a name that is the same on every rank whose program constructs the same modules.

    Names sort in the order of construction. Copies by `copy.deepcopy` have names of their own; pickles have the name
    of what was pickled.
    """

    __slots__ = ("name", "_copies")

    def __init__(self, kind: str) -> None:
        _constructed.count += 1
        _constructed.history = name = _digest(f"{_constructed.history} {kind}")
        self._adopt(f"{_constructed.count:08}-{kind}-{name}")

    def _adopt(self, name: str) -> Origin:
        self.name = name
        self._copies = 0
        _names.add(name)
        return self

    def __deepcopy__(self, memo: Any) -> Origin:
        self._copies += 1
        return _restore(f"{self.name}.{self._copies}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.name,)


def _restore(name: str) -> Origin:
    return object.__new__(Origin)._adopt(name)


def _digest(text: str) -> str:
    return hashlib.blake2s(text.encode(), digest_size=8).hexdigest()


class Buffer:
    """How one rank's amaxes are sent.

    Attributes:
        sent: what the buffer consists of: rows, zeros for labels without a state here, filling, checksum.
        rows: of the states here. sizes: of all that was sent. places: the rows' among them.
    """

    __slots__ = ("sent", "rows", "sizes", "places")

    def __init__(self, labels: dict[str, int], rows: dict[str, torch.Tensor], what: str) -> None:
        self.sent: list[torch.Tensor] = []
        self.rows: list[torch.Tensor] = []
        self.places: list[int] = []
        device = next(iter(rows.values())).device
        for place, (label, count) in enumerate(labels.items()):
            row = rows.get(label)
            if row is None:
                self.sent.append(torch.zeros(count, device=device))
            else:
                self.sent.append(row)
                self.rows.append(row)
                self.places.append(place)
        used = sum(labels.values()) + _CHECKSUM
        capacity = max(_CAPACITY, 1 << (used - 1).bit_length())
        self.sent.append(torch.zeros(capacity - used, device=device))
        bits = int(_digest(" ".join((what, *labels)))[:12], 16)
        high, low = float(bits >> 24), float(bits & 0xFFFFFF)
        self.sent.append(torch.tensor([high, -high, low, -low], device=device))
        self.sizes = [part.numel() for part in self.sent]


class AmaxReduction:
    """The reductions of one group of states.

    Args:
        process_group: over which; None for the default one.
        what: what all ranks of the group must have in common besides labels.
    """

    __slots__ = ("process_group", "what", "_labels", "_aliases", "_mine", "_ended", "_last")

    def __init__(self, process_group: Any, what: str) -> None:
        self.process_group = process_group
        self.what = what
        #: Number of amaxes by label, in the order in which they are sent.
        self._labels: dict[str, int] = {}
        #: Of states here: what another rank calls them, where the ranks have constructed different modules.
        self._aliases: dict[str, str] = {}
        self._mine: set[str] = set()
        self._ended: set[str] = set()
        #: Gives the checksums' maxima of the last reduction, where the host has not waited for it.
        self._last: Callable[[], torch.Tensor] | None = None

    def buffer(self, labels: Sequence[str], rows: Sequence[torch.Tensor]) -> Buffer:
        """How the rows of the states with these labels are sent; made anew whenever a state joins, moves or ends."""
        named = self._named(labels, rows)
        mine = set(named)
        self._ended = (self._ended | (self._mine - mine)) - mine
        self._mine = mine
        known = {**self._labels, **{label: row.numel() for label, row in named.items()}}
        if len(self._ended) > max(_ENDED, len(known) // 2):
            known = {label: count for label, count in known.items() if label not in self._ended}
            self._ended = set()
        self._labels = {label: known[label] for label in sorted(known)}
        return Buffer(self._labels, named, self.what)

    def reduce(self, buffer: Buffer, labels: Sequence[str], rows: Sequence[torch.Tensor]) -> Buffer:
        """Write the maximum over the ranks to the rows.

        Args:
            buffer: of `labels` and `rows`.

        Returns:
            The buffer for the next time: another one where the ranks had to exchange labels.

        Raises:
            RuntimeError: the ranks' modules or recipes differ, on every rank.
        """
        if self._last_differed(rows[0].device):
            buffer = self._exchanged(labels, rows)
        sums = self._reduced(buffer)
        if sums is not None and not _agree(sums):
            buffer = self._exchanged(labels, rows)
            sums = self._reduced(buffer)
            if sums is None or not _agree(sums):
                raise RuntimeError(
                    f"autocast: the ranks reduce amaxes of different recipes at the same time; this one: {self.what}; "
                    "use the same recipes in the same order on all ranks of the group"
                )
        return buffer

    def _reduced(self, buffer: Buffer) -> torch.Tensor | None:
        """One collective; the checksums' maxima where they can be read without waiting for a device."""
        dist = torch.distributed
        amaxes = torch.cat(buffer.sent)
        if reads_at_once(amaxes.device):
            dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=self.process_group)
            if _agree(amaxes[-_CHECKSUM:]):
                self._take(buffer, amaxes)
            return amaxes[-_CHECKSUM:]
        mine = amaxes.clone()
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=self.process_group)
        sums = amaxes[-_CHECKSUM:]
        agreed = (sums[0::2] + sums[1::2] == 0).all()
        self._take(buffer, torch.where(agreed, amaxes, mine))
        if not _capturing(sums.device):
            self._last = to_host(sums)
        return None

    @staticmethod
    def _take(buffer: Buffer, amaxes: torch.Tensor) -> None:
        parts = amaxes.split(buffer.sizes)
        foreach_copy(buffer.rows, [parts[place] for place in buffer.places])

    def _last_differed(self, device: torch.device) -> bool:
        """Whether checksums differed in the last reduction on a device: it took over nothing, and all ranks know."""
        if self._last is None or _capturing(device):
            return False
        last, self._last = self._last, None
        return not _agree(last())

    def _exchanged(self, labels: Sequence[str], rows: Sequence[torch.Tensor]) -> Buffer:
        """A buffer for all labels of all ranks, which every rank calls for at the same time."""
        self._aliases = {}
        named = self._named(labels, rows)
        theirs = self._gathered([(label, named[label].numel()) for label in sorted(named)])
        union = {label: count for rank in theirs for label, count in rank}
        unknown = self._gathered([label for label in union if _origin(label) not in _names])
        if any(unknown):
            self._match_by_order(theirs, unknown)
            union = dict(theirs[0])
            named = self._named(labels, rows)
        self._labels = {label: union[label] for label in sorted(union)}
        self._mine, self._ended = set(named), set()
        return Buffer(self._labels, named, self.what)

    def _match_by_order(self, theirs: list[list[tuple[str, int]]], unknown: list[list[str]]) -> None:
        """Name the states here as the first rank names its own, in the order of construction.

        Raises:
            RuntimeError: the ranks' states are not of the same kinds in the same order.
        """
        rank, missing = next((rank, missing[0]) for rank, missing in enumerate(unknown) if missing)
        differ = (
            f"autocast: rank {rank} of the amax reduction group has not constructed a {_kind(missing)[0]} as another "
            "rank has, whose amaxes are to be reduced"
        )
        kinds = [[(*_kind(label), count) for label, count in states] for states in theirs]
        if any(of_rank != kinds[0] for of_rank in kinds):
            raise RuntimeError(f"{differ}; {_REMEDY}")
        warnings.warn(f"{differ}; modules are matched in the order of construction: {_REMEDY}", stacklevel=2)
        mine = theirs[torch.distributed.get_rank(self.process_group)]
        self._aliases = {own: first for (own, _), (first, _) in zip(mine, theirs[0], strict=True)}

    def _named(self, labels: Sequence[str], rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rows by label. Unpickled twice, modules have the same: these count in the order in which they joined."""
        named: dict[str, torch.Tensor] = {}
        seen: dict[str, int] = {}
        for label, row in zip(labels, rows, strict=True):
            seen[label] = count = seen.get(label, 0) + 1
            distinct = label if count == 1 else f"{label}#{count}"
            named[self._aliases.get(distinct, distinct)] = row
        return named

    def _gathered(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * torch.distributed.get_world_size(self.process_group)
        torch.distributed.all_gather_object(found, value, group=self.process_group)
        return found


def reads_at_once(device: torch.device) -> bool:
    """Whether the host can read tensors there without waiting for other work."""
    return device.type == "cpu"


def to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Have a device's tensor copied to the host when it is ready; what is returned waits for that."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()

    def read() -> torch.Tensor:
        event.synchronize()
        return copy

    return read


def _capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which the host can wait for nothing."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _agree(sums: torch.Tensor) -> bool:
    high, minus_high, low, minus_low = sums.tolist()
    return high + minus_high == 0 and low + minus_low == 0  # type: ignore[no-any-return]


def _origin(label: str) -> str:
    """The name of the module that a label belongs to."""
    return label.partition("/")[0]


def _kind(label: str) -> tuple[str, str]:
    """Which kind of module a label belongs to, and which of its states."""
    origin, _, state = label.partition("/")
    return origin.split("-")[1], state
