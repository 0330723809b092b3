# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""How a product is launched: which kernel variant, which configuration, how many programs. Found once per kind of call.

A kind of product names a table of ``configs/gemm.json``:

``half``, ``tf32``, ``fp32``    plain operands; fp32 ones by what PyTorch's setting for its own products allows.
``fp8``, ``fp8_split``          codes on FP8 units with one scale per operand; partial sums promoted to fp32.
``fp8_blocks``                  codes on FP8 units with a scale per 128 along K.
``decoded``, ``micro``          codes that are decoded first: scales of operands or blocks, microscaling.
``microscaled``                 codes whose scales the units apply.

``<kind>_described`` is the variant that loads its operands through descriptors. An entry's
``up_to`` may bound m, n, k, their product ``area`` m n, ``finish`` (`_finish`) and ``pointers`` (0 where the output may
go through a descriptor too). Beside the kernel's block sizes it holds PROGRAMS, programs per processor (0: one per tile
of the output), STORE, whether such an output does, and TEAMS, which takes the kernel of `kernels.gemm_turns` for it,
whose tiles have so many times BLOCK_M rows; that loads scales of TURN steps at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit import caches
from te_dispatch_triton import configs, tuning_cache
from te_dispatch_triton.configs import Choice
from te_dispatch_triton.launch import Config, blocks
from te_dispatch_triton.targets import INTERPRETER, Target, target_of

FAMILY = "gemm"
#: Products that are kept, by shape.
CAPACITY = 4096
#: What a tuner put in place of the tables, by kind and by what `bucket` makes of the sizes.
FORCED: dict[Any, Choice] = {}
#: torch dtypes of codes, as descriptors give them to the units.
UNIT_TYPES = {
    "e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip
SCALINGS = {"none": "none", "tensor": "tensor", "block_1d": "block", "block_2d": "block", "mxfp8": "mx", "nvfp4": "nv"}
#: Generations whose FP8 units keep fewer bits than fp32 between products.
_IMPRECISE = ("sm_89", "sm_90")


class Problem(NamedTuple):
    """What decides how a product is launched. Codes are encodings, or ``none`` for plain operands."""

    m: int
    n: int
    k: int
    a_along_k: bool
    b_along_k: bool
    a_code: str
    b_code: str
    a_tiles: bool
    b_tiles: bool
    scaling: str
    dtype: torch.dtype
    tf32: bool
    split: bool
    #: Whether operands, and the output, begin and have rows at multiples of 16 bytes.
    aligned: bool
    out_aligned: bool
    #: Whether codes are decoded even where units know them.
    decoded: bool
    epilogue: str
    accumulate: bool
    out_code: str = "none"
    out_common: bool = False
    aux_code: str = "none"
    aux_common: bool = False


class Plan(NamedTuple):
    """How a product is launched.

    Attributes:
        described, store: whether operands and output are given as descriptors.
        part: columns that are finished together.
        units, promote, promoted: as the kernel takes them (`kernels.gemm`).
        turns: whether the kernel is that of `kernels.gemm_turns`, whose teams take block_m rows each.
    """

    constants: tuple[Any, ...]
    config: Config
    grid: tuple[int, int, int]
    described: bool
    store: bool
    block_m: int
    block_n: int
    block_k: int
    group: int
    part: int
    units: bool
    promote: bool
    promoted: int
    turns: bool


def kind_of(problem: Problem, target: Target) -> str:
    """The table that serves a problem."""
    if problem.a_code == "none":
        if problem.dtype is not torch.float32:
            return "half"
        return "tf32" if problem.tf32 and _has_tf32(target) else "fp32"
    if problem.scaling in ("mx", "nv"):
        return "microscaled" if on_units(problem, target) else "micro"
    if not on_units(problem, target):
        return "decoded"
    if problem.scaling == "block":
        return "fp8_blocks"
    return "fp8_split" if problem.split and target.arch in _IMPRECISE else "fp8"


def on_units(problem: Problem, target: Target) -> bool:
    """Whether codes go to matrix units as they are. FP8 ones read what runs along K, and scales come after."""
    if problem.decoded or problem.a_code == "none":
        return False
    if problem.scaling in ("mx", "nv"):
        return ("mxfp8" if problem.scaling == "mx" else "nvfp4") in target.scaled and "fnuz" not in problem.a_code
    after = problem.scaling in ("tensor", "block") and problem.a_along_k and problem.b_along_k
    return after and problem.a_code in target.dots and problem.b_code in target.dots


def _has_tf32(target: Target) -> bool:
    return target.backend == "cuda" or target.arch == "gfx942"


def choice_of(problem: Problem, target: Target, tuned: bool = True) -> tuple[str, bool, Choice]:
    """(kind, whether operands are given as descriptors, configuration). `tuned`: what was timed here comes first."""
    kind = kind_of(problem, target)
    table = configs.table(FAMILY)
    described = target.descriptors and problem.aligned and problem.k > 0 and f"{kind}_described" in table
    name = f"{kind}_described" if described else kind
    forced = FORCED.get((name, problem.m, problem.n, problem.k)) or FORCED.get(name)
    if forced is not None:
        return kind, described, forced
    codes, extent = (problem.a_code, problem.b_code), (problem.m, problem.n, problem.k)
    timed = tuning_cache.tuned(FAMILY, name, target, codes, extent, True) if tuned else None
    if timed is not None:
        return kind, described, timed
    return kind, described, configs.choose(
        FAMILY, name, target, True, m=problem.m, n=problem.n, k=problem.k, area=problem.m * problem.n,
        finish=_finish(problem), pointers=int(not (described and _storable(problem))),
    )  # fmt: skip


def _storable(problem: Problem) -> bool:
    """Whether the output may go through a descriptor. A tile of the old output that came through one would take the
    operands' shared memory.
    """
    return problem.out_aligned and not problem.accumulate and problem.out_code == "none" and problem.epilogue == "none"


def _finish(problem: Problem) -> int:
    """How much a tile's end takes: 0 for no epilogue, 1 for gelu, 2 for its derivative and casts."""
    if problem.out_code != "none" or problem.aux_code != "none" or problem.epilogue == "dgelu":
        return 2
    return int(problem.epilogue != "none")


@caches.cached(CAPACITY)
def planned(device: torch.device, problem: Problem) -> Plan:
    """How to launch a problem on a device."""
    return plan_of(problem, target_of(device))


def forget() -> None:
    """Plan all products anew: configurations have changed."""
    caches.clear("te_dispatch_triton.gemm")


def plan_of(problem: Problem, target: Target) -> Plan:
    """How to launch a problem whose output is not empty."""
    kind, described, choice = choice_of(problem, target)
    chosen: Mapping[str, Any] = choice.constants
    block_m, block_n, block_k = chosen["BLOCK_M"], chosen["BLOCK_N"], chosen["BLOCK_K"]
    units = on_units(problem, target)
    promoted = chosen.get("PROMOTED", 0) if kind == "fp8_split" else 0
    promote = kind == "fp8_split" and not promoted
    parts = chosen.get("PARTS", 1)
    store = bool(described and chosen.get("STORE", False) and _storable(problem))
    teams = chosen.get("TEAMS", 0) if store else 0
    constants: tuple[Any, ...] = (
        problem.a_along_k, problem.b_along_k, problem.a_code, problem.b_code, problem.a_tiles, problem.b_tiles,
        problem.scaling, units, promote, "tf32" if kind == "tf32" else "ieee", described, problem.k % block_k == 0,
        target is INTERPRETER, problem.epilogue, problem.accumulate,
        problem.out_code, problem.out_common, problem.out_code in target.encodings,
        problem.aux_code, problem.aux_common, problem.aux_code in target.encodings,
        block_m, block_n, block_k, chosen["GROUP"], parts, promoted, chosen.get("FLATTEN", False), store,
    )  # fmt: skip
    if teams:
        constants = (
            problem.a_tiles, problem.b_tiles, problem.scaling, choice.config.num_stages, chosen["GROUP"],
            chosen["TURN"], teams,
        )  # fmt: skip
    tiles = blocks(problem.m, block_m * max(teams, 1)) * blocks(problem.n, block_n)
    per_processor = chosen["PROGRAMS"]
    programs = min(tiles, target.processors * per_processor) if per_processor else tiles
    return Plan(
        constants, choice.config, (programs, 1, 1), described, store, block_m, block_n, block_k, chosen["GROUP"],
        block_n // parts, units, promote, promoted, bool(teams),
    )  # fmt: skip


def candidates(name: str, target: Target) -> Iterator[Choice]:
    """The configurations of a table that a tuner may try, the default ones first."""
    for entry in configs.entries(FAMILY, name, target.arch):
        yield configs.as_choice(entry, True)
    more: Any = configs.table(FAMILY).get("candidates", {})
    for entry in more.get(name, {}).get(target.arch, ()):
        yield configs.as_choice(entry, True)


def force(name: str, choice: Choice | None, sizes: tuple[int, int, int] | None = None) -> None:
    """Use a configuration for a table, for products (m, n, k) or for all (None: the file's again)."""
    key: Any = name if sizes is None else (name, *sizes)
    if choice is None:
        FORCED.pop(key, None)
    else:
        FORCED[key] = choice
    forget()
