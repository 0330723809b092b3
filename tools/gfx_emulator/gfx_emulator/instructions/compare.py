# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Comparisons: V_CMP, which writes a mask of lanes, and V_CMPX, which writes EXEC as well."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from gfx_emulator import floats
from gfx_emulator.arrays import Array, whole
from gfx_emulator.decode import Instruction
from gfx_emulator.errors import NotImplementedInstruction
from gfx_emulator.registers import EXEC, VCC, Active
from gfx_emulator.registry import Builder, Context, Execute, add
from gfx_emulator.vector_forms import sources

_Relation = Callable[[Array, Array], Array]


def _ordered(a: Array, b: Array) -> Array:
    return np.asarray(~(np.isnan(a) | np.isnan(b)))


_RELATIONS: dict[str, _Relation] = {
    "F": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), np.bool_),
    "T": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), np.bool_),
    "LT": lambda a, b: a < b, "EQ": lambda a, b: a == b, "LE": lambda a, b: a <= b, "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b, "NE": lambda a, b: a != b,
}  # fmt: skip
_FLOAT_RELATIONS: dict[str, _Relation] = {
    **{name: _RELATIONS[name] for name in ("F", "LT", "EQ", "LE", "GT", "GE")},
    "TRU": _RELATIONS["T"],
    "LG": lambda a, b: (a < b) | (a > b),
    "O": _ordered, "U": lambda a, b: ~_ordered(a, b),
    "NGE": lambda a, b: ~(a >= b), "NLG": lambda a, b: ~((a < b) | (a > b)), "NGT": lambda a, b: ~(a > b),
    "NLE": lambda a, b: ~(a <= b), "NEQ": lambda a, b: ~(a == b), "NLT": lambda a, b: ~(a < b),
}  # fmt: skip


def _comparison(relation: _Relation, kinds: tuple[str, str], exec_too: bool) -> Builder:
    def build(instruction: Instruction, context: Context) -> Execute:
        if instruction.form.endswith("_DPP16"):
            raise NotImplementedInstruction(f"{instruction}: comparisons of neighbouring lanes")
        reads = sources(instruction, kinds)
        flush = context.flush_32 and kinds[0] == "f32"
        target = VCC
        if instruction.form.startswith("VOP3"):
            target = instruction["vdst"]
        elif instruction.get("sd"):
            target = instruction["sdst"]

        def execute(active: Active) -> None:
            values = [read(active) for read in reads]
            if flush:
                values = [floats.flushed(value) if value.dtype == np.float32 else value for value in values]
            lanes = whole(relation(*values), active.count) & active.active_lanes()
            active.set_mask(target, lanes)
            if exec_too:
                active.set_mask(EXEC, lanes)

        return execute

    return build


def _class(value: Array, wanted: Array) -> Array:
    """V_CMP_CLASS: whether a number is of one of the classes whose bits are set."""
    size = value.dtype.itemsize
    bits = value.view(f"u{size}")
    fraction = {2: 10, 4: 23, 8: 52}[size]
    quiet = bits >> bits.dtype.type(fraction - 1) & bits.dtype.type(1) == 1
    negative = np.signbit(value)
    smallest = np.finfo(value.dtype).smallest_normal
    kind = np.select(
        [np.isnan(value) & ~quiet, np.isnan(value), np.isinf(value), np.abs(value) >= smallest, value != 0],
        [0, 1, np.where(negative, 2, 9), np.where(negative, 3, 8), np.where(negative, 4, 7)],
        np.where(negative, 5, 6),
    )
    return np.asarray(wanted.astype(np.uint32) >> kind.astype(np.uint32) & np.uint32(1) == 1)


for _exec_too, _verb in ((False, "V_CMP"), (True, "V_CMPX")):
    for _name, _kind in itertools.product(_RELATIONS, ("i16", "u16", "i32", "u32", "i64", "u64")):
        add([f"{_verb}_{_name}_{_kind.upper()}"], _comparison(_RELATIONS[_name], (_kind, _kind), _exec_too))
    for _name, _kind in itertools.product(_FLOAT_RELATIONS, ("f16", "f32", "f64")):
        add([f"{_verb}_{_name}_{_kind.upper()}"], _comparison(_FLOAT_RELATIONS[_name], (_kind, _kind), _exec_too))
    for _kind in ("f16", "f32", "f64"):
        add([f"{_verb}_CLASS_{_kind.upper()}"], _comparison(_class, (_kind, "u32"), _exec_too))
