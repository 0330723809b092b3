# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What dispatch costs: an operator's trampoline against a direct call of the very function it forwards to.

Implementations that are made of PyTorch's operators are bound behind a switch that turns autograd and torch.autocast
off (`te_dispatch.core.autograd`). The rows "autograd off" are what the switch costs, without gradients and with; the
rows "one binding" are what dispatch costs beside it.

Both are called with the same arguments in the same run, in interleaved rounds; the figure is the difference of the two
minima over the rounds. A round is shorter than a scheduler's time slice, so that on a busy machine some are not
disturbed. Backends are made up in memory and their implementations return at once, so that nothing but dispatch is
measured. Import times are of fresh processes, against a bare interpreter.

A keyed call costs more after others of its operator that differ in formats or options (`te_dispatch.core.tables`), so
those rows are measured for the first, the second and the third format met; from the third on there is no budget.

Rows that end in "shadowed" are of calls under a policy with `shadow` that are not sampled; none is in the measurement.

    python benchmarks/dispatch_overhead.py [--rounds 300] [--calls 500] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable

import torch

import te_dispatch.ops  # noqa: F401  # declares the operators
from te_dispatch.core.bind import callable_of
from te_dispatch.core.manager import OpManager
from te_dispatch.core.manifest import API_VERSION, Implementation, Manifest
from te_dispatch.core.operator import OPERATORS, Operator, dtype_name
from te_dispatch.core.policy import Policy, Selector, Shadow
from te_dispatch.core.requirements import Condition, MultipleOf, OneOf
from te_dispatch.core.snapshot import InstalledBackend, Snapshot
from te_dispatch.numerics.quantizers import CurrentQuantizer

BACKENDS = (1, 4, 20)
#: Nanoseconds over a direct call. A binding gets 60 up to 10 parameters and 4 for each further one: 100 at 20.
BUDGETS = {
    "one binding": 60,
    "device and format": 200,
    "device, format, shape": 300,
    "autograd off, no gradients": 250,
    "autograd off, gradients": 450,
}
PER_PARAMETER = 4
#: Under a policy with `shadow`, a call that is not sampled may cost so many times that of one without.
SHADOWED = 2.5
#: The last is the one that is measured.
FORMATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclasses.dataclass
class Row:
    case: str
    operator: str
    parameters: int
    backends: int
    direct_ns: float
    overhead_ns: float
    budget_ns: int | None

    @property
    def within(self) -> bool:
        return self.budget_ns is None or self.overhead_ns <= self.budget_ns


def _result(expected: str) -> object:
    """Something of a class of the name that an operator's signature has: a first call's result is checked for it."""
    return torch.empty(0) if expected == "torch.Tensor" else type(expected, (), {})()


def implementation_module(operator: Operator) -> str:
    """A module with one function of the operator's exact signature that returns at once."""
    name = f"te_dispatch_overhead_{operator.name}"
    if name not in sys.modules:
        module = types.ModuleType(name)
        signature = operator.signature.replace(
            parameters=[p.replace(annotation=p.empty) for p in operator.signature.parameters.values()],
            return_annotation=inspect.Signature.empty,
        )
        module.__dict__["_result"] = _result(str(operator.signature.return_annotation))
        exec(f"def implementation{signature}:\n    return _result\n", module.__dict__)
        sys.modules[name] = module
    return name


def snapshot(operator: Operator, backends: int, conditions: tuple[Condition, ...], traits: frozenset[str]) -> Snapshot:
    """`backends` made-up backends that all offer the operator under the same conditions."""
    target = f"{implementation_module(operator)}:implementation"
    installed = {}
    for number in range(backends):
        names = [operator] + ([OPERATORS[operator.companion]] if operator.companion else [])
        implementations = tuple(
            Implementation(f"{o.name}@{o.version}", o.name, f"{implementation_module(o)}:implementation", c, number)
            for o, c in zip(names, (conditions, ()))
        )
        implementations = tuple(
            Implementation(i.op, i.name, i.target, i.requires, i.rank, traits=traits) for i in implementations
        )
        name = f"backend{number}"
        installed[name] = InstalledBackend(Manifest(name, API_VERSION, implementations), f"made-up-{name}", "1")
    assert target
    return Snapshot(installed)


def bound(operator: Operator, traits: frozenset[str]) -> Callable[..., object]:
    """The made-up implementation as the runtime binds it, with the operator's defaults."""
    made = callable_of(operator, traits, sys.modules[implementation_module(operator)].implementation, ())
    assert isinstance(made, types.FunctionType)
    parameters = operator.signature.parameters.values()
    made.__defaults__ = tuple(None if p.default is p.empty else p.default for p in parameters)
    return made


def per_call(function: Callable[[], object], calls: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(calls):
        function()
    return (time.perf_counter_ns() - start) / calls


def measure(
    case: str,
    operator: Operator,
    call: Callable[[Callable[..., object]], Callable[[], object]],
    conditions: tuple[Condition, ...],
    traits: frozenset[str],
    budget: int | None,
    options: argparse.Namespace,
    before: Callable[[Callable[..., object]], None] | None = None,
    shadowed: bool = False,
) -> list[Row]:
    """Rows for each number of backends. `before` makes other calls of the operator that it is given."""
    rows = []
    for backends in BACKENDS:
        manager = OpManager(snapshot(operator, backends + shadowed, conditions, traits), environ={}, label="overhead")
        # A backend that no policy names comes after composites, whose conditions a key would have to hold.
        policy = Policy(name="made up", prefer=(Selector("backend0"),))
        if shadowed:
            # Against the last backend, which is never chosen, and so rarely that it never happens.
            policy = dataclasses.replace(policy, shadow=Shadow(f"backend{backends}", 1e-15))
        manager.set_policy(policy)
        direct = call(sys.modules[implementation_module(operator)].implementation)
        if before is not None:
            before(getattr(manager.ops, operator.name))
        dispatched = call(getattr(manager.ops, operator.name))
        for _ in range(2000):
            direct(), dispatched()
        # Interleaved, and the minimum of each: everything else that runs on a machine only ever adds.
        base, whole, twin, switched = [], [], [], []
        calls = [(direct, base), (dispatched, whole)]
        if "plain_torch" in traits:
            calls += [(call(bound(operator, frozenset())), twin), (call(bound(operator, traits)), switched)]
        for _ in range(options.rounds):
            for function, times in calls:
                times.append(per_call(function, options.calls))
        switch = min(switched) - min(twin) if switched else 0.0
        rows.append(
            Row(
                case,
                operator.name,
                len(operator.signature.parameters),
                backends,
                round(min(base), 1),
                round(min(whole) - min(base) - switch, 1),
                budget,
            )
        )
    return rows


def measure_switch(
    operator: Operator, call: Callable[[Callable[..., object]], Callable[[], object]], options: argparse.Namespace
) -> list[Row]:
    """A bound function of PyTorch's operators against one that is not."""
    direct, switched = call(bound(operator, frozenset())), call(bound(operator, frozenset({"plain_torch"})))
    rows = []
    for case, gradients in (("autograd off, no gradients", False), ("autograd off, gradients", True)):
        base, whole = [], []
        with torch.set_grad_enabled(gradients):
            for _ in range(options.rounds):
                base.append(per_call(direct, options.calls))
                whole.append(per_call(switched, options.calls))
        over, parameters = round(min(whole) - min(base), 1), len(operator.signature.parameters)
        rows.append(Row(case, operator.name, parameters, 1, round(min(base), 1), over, BUDGETS[case]))
    return rows


def cases(options: argparse.Namespace) -> list[Row]:
    device = torch.accelerator.current_accelerator() or "cpu"
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
    q = torch.randn(16, 2, 4, 32, dtype=torch.bfloat16, device=device)
    quantizer = CurrentQuantizer()
    plain = frozenset({"plain_torch"})
    opaque: frozenset[str] = frozenset()

    def softmax(f):
        return lambda: f(x, x, scale=0.5)

    def quantize(f):
        return lambda: f(x, quantizer, usage="both")

    def gemm(f):
        return lambda: f(x, x, layout="NT", out_dtype=None)

    def attention(f):
        return lambda: f(q, q, q, layout="sbhd", mask="causal", softmax_scale=0.1)

    ops = OPERATORS
    dtype = OneOf("x.dtype", *(dtype_name(each) for each in FORMATS))
    rows: list[Row] = []
    calls = {"softmax_bwd": softmax, "quantize": quantize, "gemm": gemm, "attention_fwd": attention}
    for name, call in calls.items():
        budget = BUDGETS["one binding"] + PER_PARAMETER * max(0, len(ops[name].signature.parameters) - 10)
        rows += measure("one binding", ops[name], call, (), plain, budget, options)
        limit = round(SHADOWED * budget)
        rows += measure("one binding, shadowed", ops[name], call, (), plain, limit, options, shadowed=True)
        rows += measure_switch(ops[name], call, options)
    shape = MultipleOf("k", 16)
    for met, ordinal in ((1, ""), (2, ", 2nd"), (3, ", 3rd")):

        def others(f, met=met):
            for other in FORMATS[-met:-1]:
                f(x.to(other), quantizer, usage="both")

        for case, conditions in (("device and format", (dtype,)), ("device, format, shape", (dtype, shape))):
            budget = BUDGETS[case] if met < 3 else None
            rows += measure(case + ordinal, ops["quantize"], quantize, conditions, opaque, budget, options, others)
    return rows


def fresh(code: str) -> str:
    """What a fresh interpreter prints. It may write byte code, so that repetitions measure what users meet."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    ).stdout


def process_ms(code: str, repeats: int = 7) -> float:
    """Median wall time of a fresh interpreter that runs `code`, after one that is not counted."""
    fresh(code)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        fresh(code)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def inner_ms(code: str, repeats: int = 5) -> float:
    """Median of a duration in ms that `code` itself prints, after a run that is not counted."""
    fresh(code)
    return statistics.median(float(fresh(code).split()[-1]) for _ in range(repeats))


FIRST_RESOLUTION = """
import time, torch
x = torch.randn(32, 64)
start = time.perf_counter()
from te_dispatch import ops
from te_dispatch.numerics.quantizers import CurrentQuantizer
ops.quantize(x, CurrentQuantizer(), usage="row")
print((time.perf_counter() - start) * 1e3)
"""
NO_TORCH = "import sys, te_dispatch; sys.exit('torch' in sys.modules)"


def imports() -> dict[str, float]:
    bare = process_ms("pass")
    return {
        "bare interpreter ms": round(bare, 1),
        "import te_dispatch over it ms": round(process_ms(NO_TORCH) - bare, 1),
        "import te_dispatch.ops over it ms": round(process_ms("import te_dispatch.ops") - bare, 1),
        "first resolution after import torch ms": round(inner_ms(FIRST_RESOLUTION), 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--json", help="also write everything here")
    options = parser.parse_args()
    rows = cases(options)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}")
    print(f"{'case':<30}{'operator':<16}{'params':>7}{'backends':>9}{'direct ns':>11}{'over ns':>9}{'budget':>8}")
    for r in rows:
        mark = "" if r.within else "  OVER"
        print(
            f"{r.case:<30}{r.operator:<16}{r.parameters:>7}{r.backends:>9}{r.direct_ns:>11.1f}{r.overhead_ns:>9.1f}"
            f"{r.budget_ns or '-':>8}{mark}"
        )
    found = imports()
    for name, value in found.items():
        print(f"{name:<45}{value:>8.1f}")
    if options.json:
        measured = [dataclasses.asdict(row) for row in rows]
        data = {"python": platform.python_version(), "torch": torch.__version__, "rows": measured}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({**data, "imports": found}, file, indent=1)
    return 0 if all(r.within for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
