# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Uniform registers that a binary for Hopper reads although nothing wrote them: an assembler's mistake, for no source
can ask for it (`te_dispatch_triton.assembler`).

Read from the disassembly: along every path from the entry, what was written is carried on; a read of what no path wrote
is told. Writes count as too many rather than too few, so that nothing right is ever told.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P[T\d]+)\s+)?([\w.]+)\s*(.*?)\s*;")
_LABEL = re.compile(r"\s*\.(L_x_\d+):")
_TARGET = re.compile(r"\.(L_x_\d+)")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
#: A product's descriptors: two registers each, a's first; where a comes from ordinary registers, only b's are read.
_PRODUCT = re.compile(r"(R\d+), (R\d+, )?(?:R\d+, )?gdesc\[UR(\d+)\]")
Instruction = tuple[str | None, str, str]


def disassembly(binary: bytes) -> str:
    """What NVIDIA's disassembler, which comes with Triton, prints of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        run = subprocess.run([str(_TOOL), "-c", file.name], capture_output=True, text=True, check=True)
    return run.stdout


def unwritten(text: str) -> list[str]:
    """Instructions of one kernel's disassembly that read a uniform register that no path to them wrote."""
    instructions, labels = _parsed(text)
    effects = [_effects(*instruction) for instruction in instructions]
    written: dict[int, frozenset[int]] = {0: frozenset()}
    waiting = [0] if instructions else []
    while waiting:
        place = waiting.pop()
        after = written[place] | effects[place][1]
        for following in _following(place, instructions, labels):
            known = written.get(following)
            if known is None or not after <= known:
                written[following] = after if known is None else known | after
                waiting.append(following)
    return [
        f"{instructions[place][1]} {instructions[place][2]} reads UR{register}"
        for place in sorted(written)
        for register in sorted(effects[place][0] - written[place])
    ]


def _parsed(text: str) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        label, found = _LABEL.match(line), _LINE.search(line)
        if label:
            labels[label[1]] = len(instructions)
        elif found:
            instructions.append((found[1], found[2], found[3]))
    return instructions, labels


def _following(place: int, instructions: list[Instruction], labels: dict[str, int]) -> list[int]:
    guard, name, operands = instructions[place]
    target = _TARGET.search(operands)
    places = [labels[target[1]]] if target and name.startswith(("BRA", "CALL")) and target[1] in labels else []
    always = guard is None and not re.search(r"\bU?P\d", operands)
    if not (always and name.startswith(("BRA", "EXIT", "RET"))) and place + 1 < len(instructions):
        places.append(place + 1)
    return places


def _effects(guard: str | None, name: str, operands: str) -> tuple[frozenset[int], frozenset[int]]:
    """(uniform registers that are read, that may be written)."""
    product = _PRODUCT.search(operands) if "GMMA" in name else None
    if product:
        first = int(product[3])
        count = range(2, 4) if product[2] else range(4)
        return frozenset(first + i for i in count), frozenset()
    parts = [part.strip() for part in operands.split(",")]
    # Predicates may come before the register, and after it.
    at = next((i for i, part in enumerate(parts) if not re.fullmatch(r"U?P(\d+|T)", part)), 0)
    target = re.fullmatch(r"UR(\d+)", parts[at]) if parts else None
    if target is None or name.startswith(("UTMA", "UBLK", "SYNCS.ARRIVE", "ST", "RED")):
        return frozenset(map(int, _UNIFORM.findall(operands))), frozenset()
    wide = 4 if "128" in name else 2 if "64" in name or "WIDE" in name else 1
    read = {int(n) for part in parts[at + 1 :] for n in _UNIFORM.findall(part)}
    return frozenset(read), frozenset(int(target[1]) + i for i in range(wide))
