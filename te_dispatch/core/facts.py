# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What resolution knows: facts about a device and facts about one call.

Everything here is plain data. Nothing in this module looks at a machine: probes fill a `DeviceFacts`,
operators read a call's facts off its arguments, and the resolver compares both with requirements. That is what lets
an AMD or Blackwell resolution run on a laptop.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Union


class Unknown(enum.Enum):
    """The value of a fact nobody could establish, e.g. the library version of a machine that is not this one."""

    UNKNOWN = "unknown"

    def __repr__(self) -> str:
        return "unknown"

    __str__ = __repr__

    def __bool__(self) -> bool:
        return False


UNKNOWN = Unknown.UNKNOWN

# None is a value in its own right: "this option was not given".
FactValue = Union[str, int, float, bool, None, tuple[Any, ...], Unknown]

#: A call's facts by name, e.g. ``{"a.dtype": "e4m3fn", "layout": "TN", "k": 4096}``. A name that is absent is unknown.
CallFacts = Mapping[str, FactValue]


@dataclass(frozen=True)
class Arch:
    """One row of a vendor's arch table: what a chip generation can do, independent of any installed library.

    Attributes:
        encodings: FP8 encodings the chip's conversion instructions and matrix units read, best first
            (``e4m3fn``, ``e5m2`` or ``e4m3fnuz``, ``e5m2fnuz``). Empty where the chip has none.
        fp8_matmul: whether it has FP8 matrix units.
        fp8_layouts: GEMM layouts those units run without a transposed copy, of ``NT``, ``NN``, ``TN`` as the gemm
            operator defines them (row-major: NT is what column-major libraries call TN).
        block_scaled_matmul: scalings the matrix units apply in hardware (``mxfp8``, ``nvfp4``).
        warp_size: threads of one warp or wavefront.
    """

    encodings: tuple[str, ...] = ()
    fp8_matmul: bool = False
    fp8_layouts: tuple[str, ...] = ()
    block_scaled_matmul: tuple[str, ...] = ()
    warp_size: int = 32


@dataclass(frozen=True)
class DeviceFacts(Mapping[str, FactValue]):
    """The facts of one device. Reads as a mapping: ``facts["arch"]``, ``facts["version.cudnn"]``.

    Attributes:
        type: PyTorch's device type (``cpu``, ``cuda``, ``xpu``, ...). ROCm builds say ``cuda`` too: ask `vendor`.
        vendor: lower case, e.g. ``nvidia``, ``amd``, ``cpu``.
        arch: the chip generation as its vendor writes it, e.g. ``sm_90``, ``gfx942``.
        index: the device's index, or None for a description of a machine that is not this one.
        table: the row of the vendor's arch table, or `UNKNOWN` members where no manifest lists the arch.
        extra: further facts by dotted name (``version.cudnn``, ``memory``); their values may be `UNKNOWN`.
        described: whether it stands for a device that need not be here. What is known of this machine's software
            then says nothing.
    """

    type: str
    vendor: str
    arch: str
    name: str = ""
    index: int | None = None
    table: Arch | None = None
    extra: Mapping[str, FactValue] = field(default_factory=dict)
    described: bool = False

    def __post_init__(self) -> None:
        # Probes are plugins' code; manifests and policies compare vendors in lower case.
        object.__setattr__(self, "vendor", self.vendor.lower())

    _DIRECT = ("type", "vendor", "arch", "name", "index")
    _TABLE = ("encodings", "fp8_matmul", "fp8_layouts", "block_scaled_matmul", "warp_size")

    def __getitem__(self, name: str) -> FactValue:
        if name in self._DIRECT:
            value: FactValue = getattr(self, name)
            return value
        if name in self._TABLE:
            return UNKNOWN if self.table is None else getattr(self.table, name)
        # A fact nobody recorded is unknown, not an error: requirements report it as assumed or missing.
        return self.extra.get(name, UNKNOWN)

    def __iter__(self) -> Iterator[str]:
        yield from self._DIRECT
        yield from self._TABLE
        yield from self.extra

    def __len__(self) -> int:
        return len(self._DIRECT) + len(self._TABLE) + len(self.extra)

    def __hash__(self) -> int:
        return hash((self.type, self.vendor, self.arch, self.index))

    @property
    def emulated(self) -> bool:
        """Whether the device's memory is the host's, where a library or an emulator stands for the chip: the probe says
        so by the fact ``emulated``, and the device's type is then none of its vendor's."""
        return self.extra.get("emulated") is True

    def label(self) -> str:
        """Short name for tables and messages, e.g. ``nvidia:sm_90`` or ``cpu``."""
        return self.vendor if self.vendor == self.arch else f"{self.vendor}:{self.arch}"


def arch_number(arch: str) -> tuple[str, int] | None:
    """Split an arch into family and number so that archs of one family compare: ``sm_90`` -> ``("sm_", 90)``.

    The trailing digits may be hexadecimal as in AMD's names (``gfx90a`` < ``gfx942`` < ``gfx1100``). A feature
    suffix as in ``sm_90a`` is dropped: it selects a code target, it does not order chips.
    """
    text = arch.lower()
    if text.startswith("gfx"):
        digits = text[3:]
        if len(digits) < 3:
            return None
        try:
            # gfx<major><minor:hex><stepping:hex>; the major part is decimal and one or two digits long.
            return "gfx", int(digits[:-2]) * 256 + int(digits[-2], 16) * 16 + int(digits[-1], 16)
        except ValueError:
            return None
    match = re.fullmatch(r"(.*?)(\d+)[a-z]*", text)
    return None if match is None else (match.group(1), int(match.group(2)))


class Derived(Mapping[str, FactValue]):
    """Facts of a call that another call leads to (a backward's, a decomposition's piece's), computed when read.

    Lazily, because the runtime keys its tables on exactly the facts that a resolution read: copying all of a call's
    facts would read them all.

    Args:
        base: the facts derived from.
        changes: name -> constant, or a function of the base facts.
        inherit: whether names that `changes` lacks read as in `base`; else they are unknown.
    """

    def __init__(
        self,
        base: CallFacts,
        changes: Mapping[str, FactValue | Callable[[CallFacts], FactValue]],
        inherit: bool = False,
    ) -> None:
        self._base = base
        self._changes = changes
        self._inherit = inherit

    def read(self, name: str, condition: object) -> FactValue:
        if name in self._changes:
            value = self._changes[name]
            return value(_Under(self._base, condition)) if callable(value) else value
        return read_call(self._base, name, condition) if self._inherit else UNKNOWN

    def __getitem__(self, name: str) -> FactValue:
        return self.read(name, None)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.read(name, None)
        return default if value is UNKNOWN else value

    def __contains__(self, name: object) -> bool:
        # Mapping's own asks for a KeyError, which an unknown fact never raises.
        return isinstance(name, str) and self.read(name, None) is not UNKNOWN

    def __iter__(self) -> Iterator[str]:
        yield from self._changes
        if self._inherit:
            yield from (name for name in self._base if name not in self._changes)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Under(Mapping[str, FactValue]):
    """Facts read while a condition is being checked, so that the condition is what gets recorded."""

    def __init__(self, base: CallFacts, condition: object) -> None:
        self._base = base
        self._condition = condition

    def __getitem__(self, name: str) -> FactValue:
        return read_call(self._base, name, self._condition)

    def get(self, name: str, default: Any = None) -> Any:
        value = read_call(self._base, name, self._condition)
        return default if value is UNKNOWN else value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and read_call(self._base, name, self._condition) is not UNKNOWN

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


class Recording(Mapping[str, FactValue]):
    """Facts that note which of them were read, by section, and under which condition.

    Attributes:
        reads: section -> set of (name, condition or None).
        section: where reads are noted now.
    """

    def __init__(self, base: CallFacts) -> None:
        self._base = base
        self.reads: dict[str, set[tuple[str, object]]] = {}
        self.section = ""

    def read(self, name: str, condition: object) -> FactValue:
        self.reads.setdefault(self.section, set()).add((name, condition))
        return self._base.get(name, UNKNOWN)

    def __getitem__(self, name: str) -> FactValue:
        return self.read(name, None)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.read(name, None)
        return default if value is UNKNOWN else value

    def __contains__(self, name: object) -> bool:
        # Mapping's own asks for a KeyError, which an unknown fact never raises.
        return isinstance(name, str) and self.read(name, None) is not UNKNOWN

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


def read_call(call: CallFacts, name: str, condition: object = None) -> FactValue:
    """A fact of a call, `UNKNOWN` if absent. `condition` is what asks, for `Recording`."""
    if isinstance(call, (Derived, Recording)):
        return call.read(name, condition)
    return call.get(name, UNKNOWN)


def fact(name: str, *otherwise: str) -> Callable[[CallFacts], FactValue]:
    """For `Derived`: the base's fact `name`, or the first of the others where that is None or unknown."""

    def read(call: CallFacts) -> FactValue:
        value: FactValue = call.get(name, UNKNOWN)
        for other in otherwise:
            if value is not None and value is not UNKNOWN:
                break
            value = call.get(other, UNKNOWN)
        return value

    return read
