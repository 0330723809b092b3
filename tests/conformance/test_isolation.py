# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A backend that crashes, exits, hangs or answers nonsense: one failed unit each, told in words; the rest goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import zipfile
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from te_dispatch.conformance import running, serving
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.isolation import Worker, WorkerError
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.running import run
from te_dispatch.conformance.settings import Settings

from ..plugins.workshop import write_wheel

pytestmark = pytest.mark.slow

CASE = "softmax_fwd.plain[dtype=fp32,shape=2x16x16,mask=none,causal=no,scale=1.0,out=same,values=normal]"

_SIGNATURE = "(x, mask=None, *, scale=1.0, causal=False, out_dtype=None)"
#: Implementation -> its body.
MISDEEDS = {
    "right": "return torch.softmax(x * scale, -1, out=alloc.empty('out', tuple(x.shape), x.dtype, x.device))",
    "marks": "MARKED.append(1); return torch.softmax(x * scale, -1)",
    "remembers": "return torch.softmax(x * scale, -1) * (2 if MARKED else 1)",
    "differs": "return torch.softmax(x * scale, -1) * (2 if counted() in (0, 4) else 1)",
    "crashes": "os.kill(os.getpid(), signal.SIGSEGV)",
    "aborts": "print('assertion failed: m % 8'); sys.stdout.flush(); os.abort()",
    "leaves": "print('no licence'); sys.stdout.flush(); os._exit(7)",
    "chatters": "print('chatter of an earlier unit', end=''); return torch.softmax(x * scale, -1)",
    "hangs": "time.sleep(600)",
    "closes": "os.closerange(3, 256); time.sleep(600)",
    "babbles": "sys.stdout.write('noise ' * 2**20); sys.stdout.flush(); os._exit(3)",
    "exits": "sys.exit('bye')",
    "interrupts": "raise KeyboardInterrupt",
    "raises": "raise RuntimeError('no kernel for this')",
    "raises_much": "raise RuntimeError('no kernel for this ' * 1000)",
    "misses": "return {}['kernel']",
    "answers_text": "return 'softmax'",
    "answers_tuple": "return (torch.softmax(x, -1), 'text' * 1000)",
    "answers_numpy": "return torch.from_numpy(torch.softmax(x, -1).numpy() + np.float32(0)).view(x.dtype)",
    "answers_none": "return None",
    "answers_double": "return torch.softmax(x.double(), -1)",
    "answers_less": "return torch.softmax(x, -1)[:1]",
    "answers_meta": "return torch.empty(x.shape, dtype=x.dtype, device='meta')",
}
_BACKWARD = "def backward(dy, y, *, scale=1.0, out_dtype=None):\n    raise NotImplementedError\n\n\n"
#: What implementations keep: in the process, and in a file that outlives it.
_COUNTED = """
MARKED = []


def counted():
    with open(__file__ + '.calls', 'a+b') as calls:
        calls.write(b'.')
        return calls.tell() - 1


"""


def _manifest() -> str:
    lines = ", ".join(
        f"Implementation(op='softmax_fwd@1', name='{name}', target='rogue_kernels:{name}')" for name in MISDEEDS
    )
    return (
        "from te_dispatch.core.manifest import API_VERSION, Implementation, Manifest\n"
        "MANIFEST = Manifest(name='rogue', api_version=API_VERSION, description='does everything wrong', "
        f"implementations=({lines}, Implementation(op='softmax_bwd@1', name='b', target='rogue_kernels:backward')))\n"
    )


def _kernels() -> str:
    head = "import os, signal, sys, time\nimport numpy as np\nimport torch\nfrom te_dispatch.ops import alloc\n"
    return (
        head
        + _COUNTED
        + _BACKWARD
        + "\n\n".join(f"def {name}{_SIGNATURE}:\n    {body}\n" for name, body in MISDEEDS.items())
    )


@pytest.fixture(scope="module")
def rogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the backend, as installed."""
    folder = tmp_path_factory.mktemp("rogue")
    modules = {"rogue": _manifest(), "rogue_kernels": _kernels()}
    wheel = write_wheel(folder, "te-dispatch-rogue", modules, {"rogue": "rogue:MANIFEST"})
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def outcomes(rogue: Path) -> dict[str, Outcome]:
    """Of every implementation on one case, one after the other, in one run."""
    units = [Unit.parse(f"rogue.{name}/values/{CASE}") for name in (*MISDEEDS, "right")]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(rogue))
        # Long enough for a first call on a busy machine; the two that hang wait so long.
        found = list(run(units, Settings(limit_s=20)))
    assert [outcome.unit for outcome in found] == [unit.id for unit in units]
    assert found[-1].state == "passed", "nothing ran any more after all that"
    return {outcome.parsed.implementation.partition(".")[2]: outcome for outcome in found}


MESSAGES = {
    "remembers": ("only behind another unit, rogue.marks/values/", "--unit 'rogue.remembers/values/"),
    "differs": ("not reproducible: it differs from call to call, and failed in 1 of 4 more runs: ",),
    "crashes": ("the process was killed by SIGSEGV (signal 11) in crashes (rogue_kernels.py:",),
    "aborts": ("the process was killed by SIGABRT (signal 6)", "it last printed: assertion failed: m % 8"),
    "leaves": ("the process ended with exit code 7; it last printed: no licence",),
    "hangs": ("hung: no result within 20 s, stopped in hangs (rogue_kernels.py:",),
    "closes": ("the process closed its pipe and went on; it was stopped",),
    "babbles": ("the process ended with exit code 3; it last printed: ", "noise"),
    "exits": ("SystemExit: bye",),
    "interrupts": ("killed by SIGINT (signal 2)", "KeyboardInterrupt"),
    "raises": ("RuntimeError: no kernel for this [raises (rogue_kernels.py:",),
    "raises_much": ("RuntimeError: no kernel for this no kernel", " ... ", "for this  [raises_much (rogue_kernels.py:"),
    "misses": ("KeyError: 'kernel'",),
    "answers_text": ("not what the shape function says", "'softmax'", "torch.float32 tensor (2, 16, 16)"),
    "answers_tuple": (
        "result is a tuple of 2 (a torch.float32 tensor (2, 16, 16) on cpu, 'texttext",
        "expected a torch.float32 tensor (2, 16, 16) on cpu",
    ),
    "answers_numpy": ("result was written into memory that did not come from te_dispatch.ops.alloc.empty",),
    "answers_none": ("not what the shape function says", "None"),
    "answers_double": ("not what the shape function says", "torch.float64", "torch.float32"),
    "answers_less": ("not what the shape function says", "(1, 16, 16)", "(2, 16, 16)"),
    "answers_meta": ("not what the shape function says", "meta", "cpu"),
}


def test_the_right_one_passes(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["right"].state == "passed" and outcomes["right"].findings


@pytest.mark.parametrize("name", MESSAGES)
def test_a_misdeed_is_one_failure_in_words(outcomes: dict[str, Outcome], name: str) -> None:
    outcome = outcomes[name]
    assert outcome.state == "failed"
    for part in MESSAGES[name]:
        assert part in outcome.message
    assert len(outcome.message) < (700 if name != "remembers" else 1200)  # which has both units twice


def test_every_misdeed_is_told() -> None:
    assert {*MESSAGES, "right", "marks", "chatters"} == set(MISDEEDS)


def test_what_an_earlier_unit_printed_is_not_told(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["chatters"].state == "passed" and "chatter" not in outcomes["hangs"].message


def test_a_worker_whose_set_up_is_wrong_says_so() -> None:
    worker = Worker(Settings(device="cpux"))
    with pytest.raises(WorkerError, match="device: 'cpux' cannot be used"):
        worker.run(Unit.parse(f"torch.softmax_fwd/values/{CASE}"))


def _threads(manager: object, settings: Settings) -> tuple[int, str | None]:
    return torch.get_num_threads(), os.environ.get("OPENBLAS_NUM_THREADS")


def test_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)

    def threads(jobs: int) -> tuple[int, str | None]:
        worker = Worker(Settings(backends=("torch",), operators=("pad_rows",), jobs=jobs))
        try:
            found: tuple[int, str | None] = worker.call(_threads)
            return found
        finally:
            worker.stop()

    assert threads(3) == (2, "2") and threads(8) == (1, "1")
    assert threads(1)[1] is None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads(3) == (1, None)


def test_a_worker_that_dies_as_it_starts_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('this torch is a stub')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(WorkerError, match=r"died while it started: the process ended with exit code 1; .*is a stub"):
        Worker(Settings()).run(Unit.parse(f"torch.softmax_fwd/values/{CASE}"))


def test_a_script_without_a_guard_can_certify(tmp_path: Path) -> None:
    """Workers must not run the caller's script again."""
    script = tmp_path / "cell.py"
    script.write_text(
        "import sys\n"
        f"sys.path[:] = {sys.path!r}\n"
        "from te_dispatch.conformance import Unit, certify\n"
        "print('started', flush=True)\n"
        f"report = certify(units=[Unit.parse('torch.softmax_fwd/values/{CASE}')])\n"
        "assert report.ok and report.counts['passed'] == 1, report.outcomes\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr


def test_a_lost_device_costs_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kernel's fault no unit of that process means anything: the outcome is its last."""

    class Lost:
        @staticmethod
        def usable() -> bool:
            return False

    text = "torch.softmax_fwd/values/softmax_fwd.plain[shape=2x16x16]"
    monkeypatch.setattr("te_dispatch.conformance.serving.bench_of", lambda settings: Lost())
    for state, kind in (("failed", "last"), ("passed", "outcome")):
        outcome = Outcome(text, state, "misaligned address")
        monkeypatch.setattr("te_dispatch.conformance.serving.run_unit", lambda unit, bench, made=outcome: made)
        ours, theirs = Pipe()
        server = threading.Thread(target=serving.serve, args=(theirs, Settings()))
        server.start()
        assert ours.recv() == ("ready", None)
        ours.send(text)
        assert ours.recv() == (kind, outcome.as_data())
        ours.close()
        server.join(10)


@pytest.mark.parametrize("jobs", [1, 2, 3, 16])
@pytest.mark.parametrize("count", [0, 1, 5, 17, 300])
def test_stretches_are_all_units_in_order(count: int, jobs: int) -> None:
    cut = running.stretches(range(count), jobs)  # type: ignore[arg-type]
    assert [unit for stretch in cut for unit in stretch] == list(range(count))
    assert all(cut) and len(cut) >= min(count, jobs) and (jobs > 1 or len(cut) <= 1)


def test_a_worker_that_is_done_takes_what_another_is_too_slow_for(monkeypatch: pytest.MonkeyPatch) -> None:
    others, all_but_one = [], threading.Event()

    class Played:
        def __init__(self, settings: Settings) -> None:
            pass

        def run(self, unit: int) -> int:
            if unit == 0:
                assert all_but_one.wait(30)
            else:
                others.append(unit)
                if len(others) == 15:
                    all_but_one.set()
            return unit

        def stop(self) -> None:
            pass

    monkeypatch.setattr(running, "Worker", Played)
    assert sorted(run(range(16), Settings(jobs=2))) == list(range(16))  # type: ignore[arg-type]
