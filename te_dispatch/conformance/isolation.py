# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Units in processes of their own: one that crashes or hangs is one failed unit, and the rest goes on.

A worker serves many units one after the other and is started again where it died. What it printed last is kept, for a
crash says more there than its signal does.

The process is started from its command line and not by `multiprocessing`, which would run the caller's script once
more in every worker unless that script is guarded, and forbids workers processes of their own.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from te_dispatch.conformance import last_words
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.settings import Settings

#: Seconds a worker may take to import torch, the backends, and to find the device.
START_S = 300.0
#: Seconds between the end of a worker's pipe and the end of its process: a crash may write a core file.
_END_S = 10.0
_TAIL = 400
#: Failed units that a worker runs again in a fresh process, to tell faults from what earlier units left behind.
_RUN_AGAIN = 20
#: How often such a unit that passes alone is run once more in that process.
_REPEATS = 3
#: What OpenMP, OpenBLAS and MKL read.
_THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_BOOT = "import sys; sys.path[:] = {path!r}; from te_dispatch.conformance.serving import main; main({descriptor})"


#: Whether this process is a worker, whose output is kept.
_is_worker = False


def become_worker() -> None:
    """Say that this process is a worker from now on: where a crash or a hang finds it is printed as it ends."""
    global _is_worker
    _is_worker = True
    last_words.printed_at_the_end()


def announce(text: str) -> None:
    """Say what comes next, where a crash would show it as what was printed last."""
    if _is_worker:
        print(text, flush=True)


def _environment(jobs: int) -> dict[str, str]:
    """Of each of so many workers: as many threads for PyTorch and NumPy as its share of the cores; OMP_NUM_THREADS
    decides where it is set.

    By default both start a thread for each core in each worker. On 64 cores, 64 workers had not planned in nine minutes
    what they plan in two with a thread each.
    """
    if jobs < 2 or "OMP_NUM_THREADS" in os.environ:
        return dict(os.environ)
    share = str(max(torch.get_num_threads() // jobs, 1))
    return dict.fromkeys(_THREAD_COUNTS, share) | os.environ


class WorkerError(Exception):
    """A worker could not start, or met an error of the kit; the message says which."""


class Worker:
    """One process that runs units.

    Args:
        settings: of the run; the worker makes its own bench of them.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._ran: list[Unit] = []
        self._again = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        #: Bytes that earlier units printed.
        self._before = 0
        self._printed = tempfile.NamedTemporaryFile(prefix="te_dispatch_conformance_", suffix=".log")  # noqa: SIM115

    def run(self, unit: Unit, limit_s: float | None = None) -> Outcome:
        """Run one unit, in a fresh process if the last one died.

        A unit that fails behind others is run again in fresh processes. Where it passes there, the failure stands, and
        its message says what is known of the cause: the printed command alone would not show it.

        Raises:
            WorkerError: the process cannot start, or the kit itself failed.
        """
        before = list(self._ran)
        outcome = self._run(unit, limit_s)
        hung = outcome.seconds >= (limit_s or self.settings.limit_s)
        if outcome.state != "failed" or not before or hung or self._again >= _RUN_AGAIN:
            return outcome
        self._again += 1
        self.stop()
        alone = self._run(unit, limit_s)
        if alone.state == "failed":
            return alone
        again = [self._run(unit, limit_s) for _ in range(_REPEATS)]
        behind: list[Outcome] = []
        while all(one.state != "failed" for one in again) and len(behind) < 2:
            behind.append(self._behind(before[-1], unit, limit_s))
        if [one.state for one in behind] == ["failed", "failed"]:
            command = f"te-dispatch conformance --unit {shlex.quote(before[-1].id)} --unit {shlex.quote(unit.id)}"
            behind[0].message = f"only behind another unit, {before[-1].id} ({command}): {behind[0].message}"
            return behind[0]
        runs = [alone, *again, *behind]
        failures = sum(one.state == "failed" for one in runs)
        if failures:
            cause = f"it differs from call to call, and failed in {failures} of {len(runs)} more runs"
        else:
            cause = (
                f"it passed in {len(runs)} more runs, alone and behind {before[-1].id}, so it differs from call to "
                f"call, or only behind several of the {len(before)} units that this process had run"
            )
        outcome.message = f"not reproducible: {cause}: {outcome.message}"
        return outcome

    def _behind(self, first: Unit, unit: Unit, limit_s: float | None) -> Outcome:
        """A unit's outcome behind another one in a fresh process."""
        self.stop()
        self._run(first, limit_s)
        return self._run(unit, limit_s)

    def _run(self, unit: Unit, limit_s: float | None = None) -> Outcome:
        limit = limit_s or self.settings.limit_s
        pipe = self._started()
        self._ran.append(unit)
        self._before = os.path.getsize(self._printed.name)
        try:
            pipe.send(unit.id)
            if not pipe.poll(limit):
                assert self._process is not None
                last_words.ask(self._process)
                self.stop()
                message = self._with_tail(f"hung: no result within {limit:g} s, stopped")
                return Outcome(unit.id, "failed", message, seconds=limit)
            kind, data = pipe.recv()
        except (EOFError, OSError):
            return Outcome(unit.id, "failed", self._obituary())
        if kind == "error":
            raise WorkerError(data)
        if kind == "last":  # its device is lost to it: the next unit gets another process
            self.stop()
        return Outcome.from_data(data)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What ``function(manager, settings, *arguments)`` returns in the worker, where the manager is that process's.

        Raises:
            WorkerError: the process cannot start or died, or the function raised.
        """
        pipe = self._started()
        try:
            pipe.send((function, arguments))
            kind, data = pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerError(f"{function.__name__}: {self._obituary()}") from error
        if kind == "error":
            raise WorkerError(data)
        return data

    def _started(self) -> Connection:
        if self._pipe is not None:
            return self._pipe
        self._printed.truncate(0)
        self._before = 0
        ours, theirs = socket.socketpair()
        boot = _BOOT.format(path=sys.path, descriptor=theirs.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-c", boot],
            pass_fds=[theirs.fileno()],
            env=_environment(self.settings.jobs),
            stdin=subprocess.DEVNULL,
            # Appended, so that what several processes of a worker print does not overwrite itself.
            stdout=(log := os.open(self._printed.name, os.O_WRONLY | os.O_APPEND)),
            stderr=subprocess.STDOUT,
        )
        os.close(log)
        theirs.close()
        self._pipe = pipe = Connection(ours.detach())
        try:
            pipe.send(self.settings)
            if not pipe.poll(START_S):
                self.stop()
                raise WorkerError(f"a worker did not start within {START_S:g} s")
            kind, data = pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerError(f"a worker died while it started: {self._obituary()}") from error
        if kind == "error":
            self.stop()
            raise WorkerError(data)
        return pipe

    def _obituary(self) -> str:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        code = self._process.returncode
        self.stop()
        if code is None:
            return self._with_tail("the process closed its pipe and went on; it was stopped")
        if code < 0:
            with contextlib.suppress(ValueError):
                return self._with_tail(f"the process was killed by {signal.Signals(-code).name} (signal {-code})")
        return self._with_tail(f"the process ended with exit code {code}")

    def _with_tail(self, message: str) -> str:
        """The message with where Python was, and with what the unit printed last."""
        with open(self._printed.name, "rb") as printed:
            # UTF-8 has up to 4 bytes each, and what is printed at the end is behind the unit's own.
            printed.seek(max(os.path.getsize(self._printed.name) - 4 * _TAIL - last_words.LONGEST, self._before))
            text, frames = last_words.parted(printed.read().decode(errors="replace"))
        tail = " | ".join(text[-_TAIL:].split("\n")).strip(" |")
        message += f" in {frames}" if frames else ""
        return f"{message}; it last printed: {tail}" if tail else message

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()  # nothing, where it has ended
            self._process.wait()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None
        self._ran.clear()
