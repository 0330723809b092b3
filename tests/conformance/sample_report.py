# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Reports made up for tests: as many outcomes as asked for, of every state, judged by the kit's own rules."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch

from te_dispatch.conformance.case import Case, Unit
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.report.record import Report
from te_dispatch.conformance.rules import Bitwise, Codes, Finding, Open, Within, judge
from te_dispatch.conformance.settings import Settings
from te_dispatch.core.operator import OPERATORS

ENVIRONMENT = {
    "device": "NVIDIA H100 80GB HBM3",
    "arch": "nvidia:sm_90",
    "te_dispatch": "0.1.0",
    "python": "3.11.9",
    "torch": "2.13.0",
    "numpy": "2.4.6",
    "platform": "Linux-6.8-x86_64",
    "version.cuda": "12.8",
    "version.torch": "2.13.0+of.a.plugin",
    "backends": {
        "acme": "te-dispatch-acme 1.4.0",
        "reference": "te-dispatch-reference 0.1.0",
        "torch": "te-dispatch-torch 0.1.0",
    },
}

SHAPES = ("1x1x1", "127x129x64", "16x16x16", "4096x512x1024")


def report(outcomes: list[Outcome], **settings: object) -> Report:
    asked = Settings(**{"backends": ("torch", "acme"), "level": "full", **settings})  # type: ignore[arg-type]
    return Report(asked, dict(ENVIRONMENT), outcomes, "2026-11-20T09:30:00+00:00")


def whole(units: int, failures: int, *, backends: tuple[str, ...] = ("torch", "acme"), seed: int = 0) -> Report:
    """A run over every operator: `units` outcomes, of which `failures` failed, spread over all."""
    chance = random.Random(seed)
    wrong, right = _wrong(), _right()
    failing = set(chance.sample(range(units), failures))
    places = itertools.cycle((operator, backend) for operator in OPERATORS for backend in backends)
    outcomes = []
    for number, (operator, backend) in zip(range(units), places):
        name = unit(backend, operator, number)
        if number in failing:
            findings = chance.choice(wrong)
            message = "; ".join(finding.message for finding in findings if not finding.passed)
            message = message or "the process was killed by SIGSEGV (signal 11)"
            outcomes.append(Outcome(name, "failed", message, findings, seconds=0.1))
        elif chance.random() < 0.12:
            reason = f"requires a.dtype in bf16, fp16; got fp{8 + 24 * (number % 2)}"
            outcomes.append(Outcome(name, "not_claimed", reason))
        else:
            outcomes.append(Outcome(name, "passed", "", right[_largest(operator, chance)], seconds=chance.random()))
    return report(outcomes, backends=backends)


def _largest(operator: str, chance: random.Random) -> int:
    """Which of `_right`: some operators stay further from their bounds than others."""
    return chance.randrange(1 + list(OPERATORS).index(operator) % 7)


def unit(backend: str, operator: str, number: int, check: str = "values") -> str:
    """An id as long as real ones are; another one for every number."""
    axes = {
        "dtype": ("bf16", "fp16", "fp32")[number % 3],
        "scaling": "delayed-tensor",
        "layout": ("NT", "TN", "NN")[number % 3],
        "shape": SHAPES[number % len(SHAPES)],
        "epilogue": "gelu_aux",
        "values": ("normal", "one_sign", "saturating")[number % 3],
    }
    return Unit(f"{backend}.{operator}_v1", check, Case.of(operator, "plain", axes, number)).id


def _right() -> list[list[Finding]]:
    """Judged results that are as they must be, from exact to close to the bound."""
    found = []
    for error in (0.0, 2.0**-10, 0.06, 0.3, 0.7, 0.97):
        want = torch.linspace(-1, 1, 40 * 70, dtype=torch.float64).reshape(40, 70)
        noise = torch.rand(40, 70, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        got = want + noise * error * 1e-3
        found.append([judge("result", Within(torch.full_like(want, 1e-3)), got, want)])
    open_one = judge("result.scale", Open("the contract leaves it open"), torch.ones(1), torch.ones(1))
    return [*found, [judge("result.data", Bitwise(), torch.ones(8), torch.ones(8)), open_one]]


def _wrong() -> list[list[Finding]]:
    """Judged results that are wrong in ways that look different: an edge, a tile, scattered, everywhere, all bits."""
    generator = torch.Generator().manual_seed(2)
    want = torch.randn(129, 257, generator=generator, dtype=torch.float64)
    limit = Within(want.abs() * 1e-3 + 1e-6)
    edge, tile, scattered = want.clone(), want.clone(), want.clone()
    edge[:, 240:] *= 1.5
    tile[64:96, 32:96] += 0.02
    scattered[torch.rand(want.shape, generator=generator) < 0.003] = float("nan")
    # Every tile another ratio: the map that is hardest to keep small.
    everywhere = want + limit.limit * torch.randn(want.shape, generator=generator, dtype=torch.float64).mul(3).exp()
    found = [[judge("result", limit, got, want)] for got in (edge, tile, scattered, everywhere)]
    codes = torch.randint(0, 120, (64, 64), generator=generator, dtype=torch.uint8)
    moved = codes.clone()
    moved[3::4] += 6
    found.append([judge("result.data", Codes("e4m3fn", codes, codes), moved, codes), *found[0]])
    crashed: list[Finding] = []  # nothing could be judged
    return [*found, [judge("result.data", Bitwise(), moved, codes)], crashed]


def every_state() -> Iterator[Outcome]:
    """One outcome of each state, and one that a crash ended."""
    passed, wrong = _right()[3], _wrong()
    yield Outcome(unit("torch", "gemm", 1), "passed", "", passed, ["later tokens moved earlier outputs by 0.4 %"], 0.25)
    yield Outcome(unit("torch", "gemm", 2), "failed", wrong[0][0].message, wrong[0], [], 0.5)
    yield Outcome(unit("acme", "gemm", 3), "not_claimed", "requires device.arch >= sm_90")
    yield Outcome(unit("acme", "gemm", 4), "skipped", "no tanh (skip.txt:3)")
    yield Outcome(unit("acme", "gemm", 5), "expected_failure", "known: result is off", wrong[1], [], 0.1)
    yield Outcome(unit("acme", "gemm", 6), "unexpected_pass", "passes, but known.txt:1 expects a failure", [], [], 0.1)
    yield Outcome(unit("acme", "quantize", 7), "failed", "the process was killed by SIGSEGV (signal 11)", [], [], 1.5)
