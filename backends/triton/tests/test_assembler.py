# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Kernels go to an assembler that makes right binaries of them, whatever Triton would take, and nobody else's do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from te_dispatch_triton import assembler, targets
from te_dispatch_triton.launch import Launch, recording

CPU = torch.device("cpu")
OLD, NEW = SimpleNamespace(path="/bin/old", version="12.8"), SimpleNamespace(path="/bin/new", version="12.9")


@pytest.fixture
def fresh() -> Iterator[None]:
    assembler.replacement.cache_clear()
    yield
    assembler.replacement.cache_clear()


@pytest.mark.parametrize(
    ("tools", "path"),
    [
        ({"ptxas": OLD, "ptxas_blackwell": NEW}, "/bin/new"),
        ({"ptxas": NEW, "ptxas_blackwell": NEW}, None),
        ({"ptxas": OLD, "ptxas_blackwell": OLD}, None),
        ({"ptxas": OLD}, None),
        ({}, None),
    ],
)
def test_an_old_assembler_is_replaced_where_there_is_a_better(
    tools: dict[str, Any], path: str | None, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    monkeypatch.setattr(assembler, "knobs", SimpleNamespace(nvidia=SimpleNamespace(**tools)))
    found = assembler.replacement()
    assert (found and found.path) == path
    assert found is None or found.ptx_version == 88


def test_it_is_the_setting_of_our_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    good = assembler.Assembler(knobs.nvidia.ptxas_blackwell.path, 88)
    monkeypatch.setattr(assembler, "replacement", lambda: good)
    before = knobs.nvidia.ptxas.path
    assert before != good.path
    with assembler.chosen("cuda", 90) as options:
        assert options == {"ptx_version": 88}
        assert knobs.nvidia.ptxas.path == good.path
        with assembler.chosen("cuda", 90):
            pass
        assert knobs.nvidia.ptxas.path == good.path
    assert knobs.nvidia.ptxas.path == before and "TRITON_PTXAS_PATH" not in os.environ
    for backend, arch in (("cuda", 100), ("hip", "gfx942"), ("interpreter", "interpreter")):
        with assembler.chosen(backend, arch) as options:
            assert not options and knobs.nvidia.ptxas.path == before


def at(start: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Memory that begins at an element."""
    count = torch.Size(shape).numel()
    return torch.empty(count + 16, dtype=dtype)[start : start + count].view(shape)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("start", "features", "features_v"), [(0, 24, 8), (1, 64, 32)], ids=["odd sizes", "odd places"]
)
def test_attention_reads_no_register_that_nothing_wrote(
    start: int, features: int, features_v: int, hopper: targets.Target
) -> None:
    """ptxas 12.8 multiplied these weights by values from somewhere."""
    from te_dispatch_triton.attention.operators import attention_bwd, attention_fwd
    from te_dispatch_triton.crosscompile.matrix import compile_for
    from te_dispatch_triton.crosscompile.unwritten import disassembly, unwritten

    q, k, v = (at(start, 129, 1, h, n) for h, n in ((4, features), (2, features), (2, features_v)))
    launches: list[Launch] = []
    with recording(launches):
        made = attention_fwd(q, k, v, mask="causal")
        attention_bwd(made.out, q, k, v, made.out, made.lse, made.saved, mask="causal")
    for launch in launches:
        text = disassembly(compile_for(launch, hopper).asm["cubin"])
        assert "HGMMA" in text, launch.kernel
        assert unwritten(text) == [], launch.kernel


@pytest.mark.compiles
def test_what_nothing_wrote_is_found() -> None:
    """Lines as the disassembler prints them."""
    from te_dispatch_triton.crosscompile.unwritten import unwritten

    lines = [
        "ULDC.64 UR4, c[0x0][0x208]", "ISETP.NE.AND P0, PT, R2, UR5, PT", "@P0 BRA `(.L_x_1)",
        "UIADD3 UR6, UP0, UR4, 0x20, URZ", ".L_x_1:", "UIADD3.X UR7, UR7, URZ, URZ, UP0, !UPT",
        "UMOV UR10, UR6", "UMOV UR11, UR7",
        "HGMMA.64x16x16.F32 R56, R24, gdesc[UR8].tnspB, R56", "HGMMA.64x16x16.F32 R56, gdesc[UR8], R56", "EXIT",
    ]  # fmt: skip
    text = "\n".join(x if x[0] == "." else f"/*{16 * i:04x}*/ {x} ;" for i, x in enumerate(lines))
    assert unwritten(text) == [
        "UIADD3.X UR7, UR7, URZ, URZ, UP0, !UPT reads UR7",
        "HGMMA.64x16x16.F32 R56, gdesc[UR8], R56 reads UR8",
        "HGMMA.64x16x16.F32 R56, gdesc[UR8], R56 reads UR9",
    ]
