# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What an operator's call did, written down as Python source that does it again with other tensors.

A `Tape` records one call of an operator's host function: what `memory.empty` allocated, what was launched with which
arguments, what it returned. `Tape.source` is Python source that allocates and launches the same: sizes, grids and
constants are written out, addresses are read anew. Where another allocator than PyTorch's is in force, that is asked
for memory; where it begins at no multiple of 16 bytes, NotImplemented is returned, before any launch.

A call that did anything else (a PyTorch operation that computes, a launch through Triton's own path, an address within
a number) is not recorded: `Tape.failure` says why.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from te_dispatch.backend_kit.caches import BoundedDict
from te_dispatch.backend_kit.memory import contiguous_strides
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops import alloc
from te_dispatch.ops.results import Saved
from te_dispatch_triton.descriptor import CAPACITY, Descriptor

#: Tapes by the thread whose call they record; mostly there is none.
ACTIVE: dict[int, Tape] = {}
#: Operations of PyTorch that look at memory otherwise and do nothing to it.
_VIEWS = frozenset((
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split_with_sizes", "squeeze", "t",
    "transpose", "unbind", "unsqueeze", "view",
))  # fmt: skip
_CONSTANT = (str, float, bool, torch.dtype, torch.device)


class Given(NamedTuple):
    """A tensor of the call. `tensor` and `pointer`: the expressions that hold it and its address."""

    tensor: str
    pointer: str
    value: torch.Tensor


class Address(int):
    """An address in a recorded call. What is added to it, multiplied or set in it is recorded with it."""

    code: str
    #: The last operation of `code`, what it was applied to, and its other operand: operations of one kind are joined,
    #: so that an address which moves along hundreds of parts is not that many expressions in one another.
    last: tuple[str, str, int] | None

    @classmethod
    def told(cls, value: int, code: str, last: tuple[str, str, int] | None = None) -> Address:
        made = cls(value)
        made.code, made.last = code, last
        return made

    def __add__(self, other: int) -> int:
        return self._with(operator.add, "+", other)

    def __mul__(self, other: int) -> int:
        return self._with(operator.mul, "*", other)

    def __or__(self, other: int) -> int:
        return self._with(operator.or_, "|", other)

    __radd__, __rmul__, __ror__ = __add__, __mul__, __or__

    def _with(self, apply: Callable[[int, int], int], sign: str, other: int) -> int:
        value = apply(int(self), int(other))
        if isinstance(other, Address):
            return value
        before, operand = self.code, int(other)
        if self.last is not None and self.last[0] == sign:
            before, operand = self.last[1], apply(self.last[2], operand)
        return Address.told(value, f"({before} {sign} {operand})", (sign, before, operand))


class Unrecordable(Exception):
    """Says why a call cannot be recorded."""


class _Watch(TorchDispatchMode):
    """Fails a tape where PyTorch computes."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name not in _VIEWS and not self.tape.unwatched:
            self.tape.fail(f"PyTorch's {name}")
        return func(*args, **(kwargs or {}))


class Tape:
    """Attributes:
    failure: why the call cannot be recorded, None while it can.
    names: the source's constants.
    """

    def __init__(self, given: Sequence[Given]) -> None:
        """Args:
        given: the call's tensors, of which no two lie at one address.
        """
        self.failure: str | None = None
        self.unwatched = False
        self.names: dict[str, Any] = {
            "Quantized": Quantized,
            "Saved": Saved,
            "Descriptor": Descriptor,
            "ask": alloc.empty,
        }
        self._settings: list[str] = []
        self._fast: list[str] = []  # allocations, by PyTorch's entry and by `alloc.empty`
        self._asked: list[str] = []
        self._lines: list[str] = []  # addresses and launches
        self._tensors = {id(x.value): x for x in given}
        self._given = frozenset(self._tensors)
        self._kept = list(given)  # an id belongs to one object only while that lives
        self._read: set[str] = {x.pointer for x in given}

    @contextmanager
    def recording(self) -> Iterator[None]:
        thread = threading.get_ident()
        ACTIVE[thread] = self
        try:
            with _Watch(self):
                yield
        finally:
            del ACTIVE[thread]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """PyTorch's operations inside do not fail the recording."""
        before, self.unwatched = self.unwatched, True
        try:
            yield
        finally:
            self.unwatched = before

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def read(self, setting: Callable[[], Any]) -> Any:
        """The value of a setting, for which the recording holds."""
        value = setting()
        self._settings.append(f"{self._constant(setting)}() != {self._constant(value)}")
        return value

    def allocated(
        self, empty: Callable[..., torch.Tensor], role: str, shape: Any, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate, and record it."""
        with self.aside():
            made = empty(role, shape, dtype, device)
        name, told = f"a{len(self._kept)}", f"{tuple(made.shape)}"
        if made.data_ptr() & 15 or not made.is_contiguous():
            self.fail("an allocator of another kind")
        self._fast.append(f"{name} = empty({told}, {contiguous_strides(made.shape)}, {self._constant(dtype)})")
        self._asked.append(f"{name} = ask({role!r}, {told}, {self._constant(dtype)}, {self._constant(device)})")
        self._tensors[id(made)] = found = Given(name, f"p{name}", made)
        self._kept.append(found)
        return made

    def launched(
        self, run: Any, given: tuple[Any, ...], grid: Sequence[int], args: Sequence[Any], constants: Sequence[Any]
    ) -> None:
        """Record a launch.

        Args:
            run, given: what `launch.launcher_of` returned.
        """
        try:
            parts = getattr(run, "parts", None)
            maps = {} if parts is None else {meta[0]: meta for meta in parts.kept}
            before = 4 + len(given)
            told = [self._argument(x, parts, maps.get(before + place)) for place, x in enumerate(args)]
            target = self._constant(run if parts is None else parts.launcher)
            fixed = [self._constant(x) for x in given]
            numbers = [str(int(n)) for n in grid]
            compiled_in = [self._constant(x) for x in constants]
            self._lines.append(f"{target}({', '.join([*numbers, 'stream', *fixed, *told, *compiled_in])})")
        except Unrecordable as error:
            self.fail(str(error))

    def address(self, x: torch.Tensor) -> int:
        """An address that may go into numbers."""
        try:
            return Address.told(x.data_ptr(), self._address(x))
        except Unrecordable as error:
            self.fail(str(error))
            return x.data_ptr()

    def source(self, result: Any) -> tuple[list[str], list[str]] | None:
        """Conditions under which the call cannot be replayed, and the lines that do it, which read the stream as
        ``stream`` and PyTorch's entry for allocations, or None, as ``empty``. None where the call was not recorded."""
        try:
            returned = self._result(result)
        except Unrecordable as error:
            self.fail(str(error))
        if self.failure is not None:
            return None
        made: list[str] = []
        if self._asked:
            low = " | ".join(f"{line.partition(' ')[0]}.data_ptr()" for line in self._asked)
            made = [
                "if empty is not None:", *(f"    {x}" for x in self._fast), "else:",
                *(f"    {x}" for x in self._asked), f"    if ({low}) & 15:", "        return NotImplemented",
            ]  # fmt: skip
        return self._settings, [*made, *self._lines, f"return {returned}"]

    def _constant(self, value: Any) -> str:
        """An expression for something that is the same in every call."""
        if value is None or value.__class__ in (bool, int, str):
            return repr(value)
        for name, known in self.names.items():
            if known is value:
                return name
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def _place(self, x: torch.Tensor) -> tuple[Given, int]:
        """The tensor whose memory x looks at, and how many bytes behind its beginning x begins."""
        found = self._tensors.get(id(x))
        if found is not None:
            return found, 0
        storage = x.untyped_storage().data_ptr()
        owners = [one for one in self._kept if storage and one.value.untyped_storage().data_ptr() == storage]
        if len(owners) != 1:
            raise Unrecordable("a tensor that is neither an argument nor allocated")
        return owners[0], x.data_ptr() - owners[0].value.data_ptr()

    def _address(self, x: torch.Tensor) -> str:
        owner, behind = self._place(x)
        if x is not owner.value and not x.numel():
            return "0"  # as PyTorch says of a part without elements, wherever it lies
        if owner.pointer not in self._read:
            self._read.add(owner.pointer)
            self._lines.append(f"{owner.pointer} = {owner.tensor}.data_ptr()")
        return f"({owner.pointer} + {behind})" if behind else owner.pointer

    def _argument(self, x: Any, parts: Any, mapping: Any) -> str:
        if x is None or isinstance(x, _CONSTANT):
            return self._constant(x)
        if x.__class__ is Address:
            return x.code
        if x.__class__ is tuple:
            return f"({''.join(f'{self._argument(one, None, None)}, ' for one in x)})"
        if x.__class__ is int:
            if any(x == one.value.data_ptr() for one in self._kept if x):
                raise Unrecordable("an address among the numbers")
            return repr(x)
        if x.__class__ is Descriptor:
            return self._described(x, parts, mapping)
        if not isinstance(x, torch.Tensor):
            raise Unrecordable(f"a {type(x).__name__} among a launch's arguments")
        return self._address(x)

    def _described(self, x: Descriptor, parts: Any, mapping: Any) -> str:
        owner, behind = self._place(x.base)
        if behind:
            raise Unrecordable("a descriptor of a part of a tensor")
        fixed = (x.dtype, x.shape, x.strides, x.block_shape)
        if parts is None:
            return f"Descriptor({owner.tensor}, *{self._constant(fixed)})"
        if mapping is None:
            raise Unrecordable("a descriptor at an unknown place")
        address = self._address(x.base)
        kept = self._constant(BoundedDict(CAPACITY))  # constants are told apart by identity: this place's own
        fresh = self._constant(functools.partial(_mapped, self.names[kept], parts.make, mapping[1], fixed))
        return f"*({kept}.get({address}) or {fresh}({address}, {owner.tensor}))"

    def _result(self, x: Any) -> str:
        if x is None or isinstance(x, (*_CONSTANT, int)):
            return self._constant(x)
        if isinstance(x, torch.Tensor):
            owner, behind = self._place(x)
            if x is owner.value:
                return owner.tensor
            if behind % x.element_size() or x.dtype is not owner.value.dtype:
                raise Unrecordable("a result that reads memory otherwise")
            first = f"{owner.tensor}.storage_offset() + {behind // x.element_size()}"
            return f"{owner.tensor}.as_strided({tuple(x.shape)}, {x.stride()}, {first})"
        if x.__class__ is Quantized:
            parts = [getattr(x, name) for name in _RECORD]
            if all(one in self._given for one in map(id, parts) if one in self._tensors):
                raise Unrecordable("a record that was an argument, which is returned itself")
            return f"Quantized({', '.join(map(self._result, parts))})"
        if x.__class__ is Saved:
            return f"Saved({', '.join(map(self._result, (x.implementation, x.format, x.tensors, x.options)))})"
        if x.__class__ is list:
            return f"[{', '.join(map(self._result, x))}]"
        if isinstance(x, tuple):
            members = "".join(f"{self._result(member)}, " for member in x)
            return f"({members})" if x.__class__ is tuple else f"{self._constant(type(x))}({members})"
        raise Unrecordable(f"a {type(x).__name__} among the results")


#: `Quantized`'s arguments in their order.
_RECORD = (
    "row_data", "col_data", "row_scale_inv", "col_scale_inv", "encoding", "scaling", "scale_layout", "shape", "dtype",
    "device", "global_scale_inv",
)  # fmt: skip


def active() -> Tape | None:
    """The tape that records this thread's call."""
    return ACTIVE.get(threading.get_ident()) if ACTIVE else None


def read(setting: Callable[[], Any]) -> Any:
    """The value of a setting that may change from call to call: a recording holds for this one."""
    tape = active()
    return setting() if tape is None else tape.read(setting)


def _mapped(
    kept: BoundedDict[int, tuple[Any, ...]], make: Any, meta: Any, fixed: tuple[Any, ...], address: int, base: Any
) -> tuple[Any, ...]:
    """What a launcher takes for a descriptor of a tensor at an address that was not seen yet."""
    found = kept[address] = tuple(make(Descriptor(base, *fixed), meta))
    return found
