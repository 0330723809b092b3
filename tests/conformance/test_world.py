# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A call that leaves global state changed fails its unit, says what it changed, and harms no unit after it."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from te_dispatch.conformance.bench import bench_of
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.checks import find
from te_dispatch.conformance.execute import run_unit
from te_dispatch.conformance.settings import Settings
from te_dispatch.conformance.trial import Failure
from te_dispatch.conformance.world import World
from te_dispatch.ops import alloc

from .trials import case_of, trial_of

pytestmark = pytest.mark.sampled(6)

CPU = torch.device("cpu")
CASE = case_of("softmax_fwd", "plain", shape="2x16x16")
#: What a call does, and what the message names.
LEAKS: dict[str, tuple[Callable[[], Any], str]] = {
    "draws from PyTorch's generator": (lambda: torch.rand(1), "PyTorch's random generator of the CPU"),
    "seeds PyTorch's generator": (lambda: torch.manual_seed(11), "PyTorch's random generator of the CPU"),
    "draws from Python's generator": (random.random, "Python's random generator"),
    "draws from NumPy's generator": (np.random.rand, "NumPy's random generator"),
    "other floating-point errors": (lambda: np.seterr(under="raise"), "NumPy's handling of floating-point errors"),
    "another thread count": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "the number of threads"),
    "subnormals flushed": (lambda: torch.set_flush_denormal(True), "whether subnormal numbers are kept"),
    "another default dtype": (lambda: torch.set_default_dtype(torch.float64), "the default dtype"),
    "another default device": (lambda: torch.set_default_device("meta"), "the default device"),
    "no gradients": (lambda: torch.set_grad_enabled(False), "whether gradients are recorded"),
    "deterministic mode": (lambda: torch.use_deterministic_algorithms(True), "the deterministic mode"),
    "less precise products": (
        lambda: torch.set_float32_matmul_precision("medium"), "the precision of float32 products",
    ),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), "autocast"),
    "backward passes in one thread": (
        lambda: torch.autograd.set_multithreading_enabled(False), "threads of backward passes",
    ),
    "hooks": (
        lambda: torch.autograd.graph.saved_tensors_hooks(abs, abs).__enter__(), "hooks on what autograd saves",
    ),
    "cudnn's search": (lambda: setattr(torch.backends.cudnn, "benchmark", True), "cudnn.benchmark"),
    "no garbage collection": (gc.disable, "Python's garbage collection"),
    "another folder": (lambda: os.chdir(tempfile.gettempdir()), "the working directory"),
    "oneDNN off": (lambda: setattr(torch.backends.mkldnn, "enabled", False), "mkldnn.enabled"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """But for what pytest changes between the parts of a test: its own variable, and the handler of its alarm."""
    world = World(CPU)
    yield
    changed = [what for what in world.changes() if not what.startswith(("the environment's", "handlers of signals"))]
    assert changed == []


@pytest.mark.parametrize("name", list(LEAKS))
def test_a_call_that_leaves_state_behind_fails(name: str) -> None:
    leak, message = LEAKS[name]

    def leaving(right: Any, arguments: Any) -> Any:
        result = right.call(arguments)
        leak()
        return result

    with pytest.raises(Failure, match=f"changed global state and left it so: .*{message}"):
        find("values").run(trial_of(CASE, "torch.softmax_fwd", leaving))
    find("values").run(trial_of(CASE, "torch.softmax_fwd"))  # what was left is put back


def test_a_call_that_gives_an_operand_a_gradient_fails() -> None:
    def giving(right: Any, arguments: Any) -> Any:
        arguments["x"].grad = torch.zeros_like(arguments["x"])
        return right.call(arguments)

    with pytest.raises(Failure, match="x was given a gradient"):
        find("values").run(trial_of(CASE, "torch.softmax_fwd", giving))


def test_a_call_that_raises_and_leaves_state_behind_fails() -> None:
    def leaving(right: Any, arguments: Any) -> Any:
        torch.set_num_threads(torch.get_num_threads() + 1)
        raise ValueError("x: got too much")

    with pytest.raises(Failure, match="the number of threads"):
        trial_of(CASE, "torch.softmax_fwd", leaving).call({})


def test_state_that_a_call_puts_back_is_its_own_affair() -> None:
    def careful(right: Any, arguments: Any) -> Any:
        threads = torch.get_num_threads()
        torch.set_num_threads(threads + 1)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.rand(3)
            result = right.call(arguments)
        torch.set_num_threads(threads)
        return result

    find("values").run(trial_of(CASE, "torch.softmax_fwd", careful))


def test_what_the_forward_of_a_backward_leaves_fails_the_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_dispatch.conformance import forwards

    right = forwards.forward_of

    def drawing(*given: Any) -> Any:
        torch.rand(1)
        return right(*given)

    monkeypatch.setattr(forwards, "forward_of", drawing)
    case = case_of("attention_bwd", "plain")
    outcome = run_unit(Unit("torch.unfused_attention_bwd", "values", case), bench_of(Settings(device="cpu")))
    assert outcome.state == "failed"
    assert outcome.message.startswith("while this ran, global state changed and was left so: PyTorch's random")


def test_a_device_that_is_lost_fails_the_unit_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of a kernel comes up wherever the device is asked next, which may be behind the check."""
    from te_dispatch.conformance import execute

    def lost(self: World) -> list[str]:
        raise RuntimeError("CUDA error: device-side assert triggered")

    bench = bench_of(Settings(device="cpu"))
    unit = Unit("torch.softmax_fwd", "values", CASE)
    monkeypatch.setattr(execute.World, "changes", lost)
    monkeypatch.setattr(execute.Bench, "usable", lambda self: False)
    outcome = run_unit(unit, bench)
    assert outcome.state == "failed"
    assert "device-side assert" in outcome.message
    monkeypatch.setattr(execute.Bench, "usable", lambda self: True)
    with pytest.raises(RuntimeError, match="device-side assert"):
        run_unit(unit, bench)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda given: given["splits"].pop(), "splits"),
        (lambda given: given["splits"].append(0), "splits"),
        (lambda given: given["x"].resize_(0), "x"),
    ],
)
def test_a_call_that_changes_what_its_arguments_are_made_of_fails(change: Any, path: str) -> None:
    def changing(right: Any, arguments: Any) -> Any:
        result = right.call(arguments)
        change(arguments)
        return result

    case = case_of("pad_rows", "plain")
    with pytest.raises(Failure, match=rf"{path}(\.\d+)? is another list, tensor or number"):
        find("values").run(trial_of(case, "torch.pad_rows", changing))


def test_a_call_that_changes_whether_an_argument_requires_a_gradient_fails() -> None:
    def changing(right: Any, arguments: Any) -> Any:
        result = right.call(arguments)
        arguments["x"].requires_grad_()
        return result

    with pytest.raises(Failure, match="x requires a gradient after the call"):
        find("values").run(trial_of(case_of("pad_rows", "plain"), "torch.pad_rows", changing))


def test_memory_under_a_result_s_role_that_is_no_result_fails() -> None:
    def wasting(right: Any, arguments: Any) -> Any:
        alloc.empty("out", (3,), torch.float32, torch.device("cpu"))
        return right.call(arguments)

    with pytest.raises(Failure, match=r"out \(3,\) was allocated and is no result"):
        find("values").run(trial_of(CASE, "torch.softmax_fwd", wasting))


def test_what_only_integers_in_memory_show_is_no_mistake() -> None:
    """On a device nobody could see it without waiting."""

    def blind(right: Any, arguments: Any) -> Any:
        lengths, x = arguments["cu_seqlens"], arguments["x"]
        if not isinstance(lengths, torch.Tensor) or not isinstance(x, torch.Tensor):
            return right.call(arguments)
        return right.call({**arguments, "cu_seqlens": lengths.clamp(max=x.shape[0])})

    case = case_of("rope_fwd", "thd")
    trial = trial_of(case, "torch.rope_fwd", blind)
    find("mistaken").run(trial)
    assert int(trial.notes[-1].split()[0]) > 5


def test_the_first_unit_of_a_process_is_judged_fairly() -> None:
    """Reading a setting for the first time may import modules, which change variables and filters of warnings."""
    program = """
from te_dispatch.conformance.bench import bench_of
from te_dispatch.conformance.execute import run_unit
from te_dispatch.conformance.planning import plan
from te_dispatch.conformance.settings import Settings
bench = bench_of(settings := Settings(backends=("torch",), device="cpu", operators=("unpad_rows",)))
print(run_unit(next(iter(plan(bench.manager, settings).units)), bench))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "state='passed'" in done.stdout, done.stdout + done.stderr
