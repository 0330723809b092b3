# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The generated lookup finds what a plain dict would, reads each fact once, and is never seen half written."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from te_dispatch.core import codegen
from te_dispatch.core.requirements import Compare, MultipleOf
from te_dispatch.core.tables import ANY, CPU_ONLY, NO_DEVICE, Atom, Table
from tests.core.toy import TOYS

MIX = TOYS["mix"]
ATOMS: list[Atom] = [
    ("a.dtype", None),
    ("b.dtype", None),
    ("mode", None),
    ("fast", None),
    ("k", MultipleOf("k", 16)),
    ("k", Compare("k", ">=", 20)),
    ("m", MultipleOf("m", 3)),
]
DEVICES = {name: torch.device(name) for name in ("cpu", "cuda", "meta")}
DTYPES = ("fp32", "bf16", "fp16")


class Operand:
    """What a lookup reads of a tensor, with a count of the reads."""

    def __init__(self, dtype: str, shape: tuple[int, ...], kind: str = "cpu") -> None:
        self._values = {
            "dtype": dtype,
            "shape": shape,
            "device": DEVICES[kind],
            "is_cpu": kind == "cpu",
            "is_cuda": kind == "cuda",
        }
        self.reads: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.reads[name] += 1
        return self._values[name]


class Lookup:
    """A table with both generated functions over it, and the dict that it must agree with."""

    def __init__(self, atoms: list[Atom], devices: str) -> None:
        self.devices = devices
        self.table = Table(MIX, atoms, devices, self.miss)
        self.namespace = codegen.new_namespace("tables")
        self.namespace.__dict__.update(_REAL=frozenset((Operand,)), _mix_explain=lambda *args: None)
        self._key = codegen.reader(
            MIX, self.namespace, codegen.key_expression(MIX, self.table.atoms, by_device=False), "key"
        )
        self.keyed = codegen.keyed(MIX, self.namespace, self.table)
        code = codegen.inlined_code(MIX, self.namespace, self.table)
        self.inlined = FunctionType(code, self.namespace.__dict__)
        self.expected: dict[Any, str] = {}
        self.misses = 0

    def both(self, args: tuple[Any, ...]) -> tuple[Any, Any]:
        a, b, mode, out, alpha, fast = args
        return self.keyed(*args), self.inlined(a, b, mode=mode, out=out, alpha=alpha, fast=fast)

    def where(self, operand: Operand) -> Any:
        return None if self.devices == NO_DEVICE else operand._values["device"].type

    def miss(self, *args: Any) -> str:
        self.misses += 1
        return "miss"

    def insert(self, args: tuple[Any, ...], answer: str) -> None:
        key = self._key(*args)
        self.expected[self.where(args[0]), key] = answer
        self.table.insert(args[0]._values["device"], key, lambda *_: answer)

    def expects(self, args: tuple[Any, ...]) -> str:
        return self.expected.get((self.where(args[0]), self._key(*args)), "miss")


@st.composite
def calls(draw: st.DrawFn, kinds: tuple[str, ...]) -> tuple[Any, ...]:
    shape = (draw(st.sampled_from((3, 4))), draw(st.sampled_from((16, 24, 32))))
    a = Operand(draw(st.sampled_from(DTYPES)), shape, draw(st.sampled_from(kinds)))
    b = Operand(draw(st.sampled_from(DTYPES)), shape)
    # A string made at run time is equal to the literal, and not identical; 1 equals True.
    mode = draw(st.sampled_from(("plain", "odd", "".join(("pl", "ain")))))
    return a, b, mode, None, 1.0, draw(st.sampled_from((None, True, 1, 2)))


@pytest.mark.parametrize("devices", [NO_DEVICE, CPU_ONLY, "is_cuda", ANY])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_both_functions_find_what_a_dict_would(devices: str, data: st.DataObject) -> None:
    lookup = Lookup(data.draw(st.lists(st.sampled_from(ATOMS), unique=True)), devices)
    kinds = ("cpu", "cuda") if devices in ("is_cuda", ANY) else ("cpu",)
    for number in range(data.draw(st.integers(1, 25))):
        args = data.draw(calls(kinds))
        assert lookup.both(args) == (lookup.expects(args),) * 2
        if lookup.expects(args) == "miss" or data.draw(st.booleans()):  # or replaced, as after a decline
            lookup.insert(args, f"answer {number}")
            assert lookup.both(args) == (f"answer {number}",) * 2


@pytest.mark.parametrize("devices", [CPU_ONLY, "is_cuda"])
def test_what_is_on_none_of_the_devices_always_misses(devices: str) -> None:
    lookup = Lookup(ATOMS, devices)
    lookup.insert((Operand("fp32", (4, 16)), Operand("fp32", (4, 16)), "plain", None, 1.0, None), "found")
    meta = Operand("fp32", (4, 16), "meta")
    assert lookup.both((meta, meta, "plain", None, 1.0, None)) == ("miss", "miss")


@pytest.mark.parametrize("devices", [NO_DEVICE, CPU_ONLY, "is_cuda"])
@pytest.mark.parametrize("combinations", [1, 9])
@pytest.mark.parametrize("count", range(1, len(ATOMS) + 1))
def test_each_fact_is_read_once(devices: str, combinations: int, count: int) -> None:
    """For those compared by identity as for those that come too late to be."""
    lookup = Lookup(ATOMS[:count], devices)
    for number in range(combinations):
        dtypes = DTYPES[number // 3], DTYPES[number % 3]
        a, b = (Operand(dtype, (4, 16)) for dtype in dtypes)
        lookup.insert((a, b, "plain", None, 1.0, None), "found")
    for call in (lookup.keyed, lookup.inlined):
        a, b = (Operand(dtype, (4, 16)) for dtype in dtypes)
        positional, keywords = ((a, b, "plain"), {}) if call is lookup.keyed else ((a, b), {"mode": "plain"})
        assert call(*positional, **keywords, out=None, alpha=1.0, fast=None) == "found"
        assert all(reads == 1 for reads in (a.reads | b.reads).values()), (a.reads, b.reads)
        assert lookup.misses == 0


class Hashed(str):
    """A value that counts how often it is looked up."""

    hashes = 0

    def __hash__(self) -> int:
        type(self).hashes += 1
        return super().__hash__()


@pytest.mark.parametrize("devices", [NO_DEVICE, CPU_ONLY, "is_cuda"])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_first_combinations_are_found_without_a_hash(devices: str, kind: str) -> None:
    lookup = Lookup([("a.dtype", None), ("mode", None), ("k", MultipleOf("k", 16))], devices)
    kind = kind if devices == "is_cuda" else "cpu"
    dtypes = [Hashed(name) for name in DTYPES]
    found = []
    variables = set(lookup.table.variables)
    for dtype in dtypes:
        operands = Operand(dtype, (4, 16), kind), Operand(dtype, (4, 16), kind)
        args = (*operands, "plain", None, 1.0, None)
        lookup.insert(args, f"answer {dtype}")
        before = Hashed.hashes
        assert lookup.both(args) == (f"answer {dtype}",) * 2
        found.append(Hashed.hashes == before)
    assert found == [True, True, False], "the shortcut holds two, the others are looked up"
    assert set(lookup.table.variables) == variables, "code that is published has no new names to learn"


def test_a_thread_sees_the_right_function_or_none() -> None:
    """Calls go on while the table grows: a half-written combination must lead to no other one's function."""
    lookup = Lookup([("a.dtype", None), ("b.dtype", None), ("mode", None), ("k", MultipleOf("k", 16))], CPU_ONLY)
    programs = [
        (Operand(a, (4, k)), Operand(b, (4, k)), mode, None, 1.0, None)
        for a in DTYPES
        for b in DTYPES
        for mode in ("plain", "odd")
        for k in (16, 24)
    ]
    wrong: list[Any] = []
    done = threading.Event()

    def calling(call: Callable[..., Any]) -> None:
        while not done.is_set():
            for number, args in enumerate(programs):
                found = call(args)
                if any(answer not in ("miss", f"answer {number}") for answer in found):
                    wrong.append((number, found))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=calling, args=(lookup.both,)) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for number, args in enumerate(programs):
            lookup.insert(args, f"answer {number}")
            threading.Event().wait(0.002)
    finally:
        done.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not wrong
    assert [lookup.both(args) for args in programs] == [(f"answer {n}",) * 2 for n in range(len(programs))]
