# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tests that run in two processes: over NCCL with a GPU each where there are two, else over gloo and without GPUs."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

WORLD = 2
#: Seconds for a whole test, less than a test may take. Two ranks need about ten on an idle machine; a loaded one must
#: not look like a defect.
PATIENCE = 480


def run(body: Callable[[int], None], tmp_path: Path) -> None:
    """Run `body(rank)`, a function of a test file, in a process per rank, with the paths of this process.

    Ranks meet through a file of this test's own, and over the loopback: no port to clash over. Output goes to files,
    since a full pipe would stop a rank that the others wait for. Where one rank fails or time runs out, the others,
    which may be waiting for it in a collective, are killed, and the message has the output of all.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "GLOO_SOCKET_IFNAME": "lo"}
    if torch.cuda.device_count() < WORLD:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    named = [inspect.getfile(body), body.__name__, str(tmp_path / "rendezvous")]
    command = [sys.executable, "-X", "faulthandler", __file__, *named]
    logs = [tmp_path / f"rank{rank}.log" for rank in range(WORLD)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as file:
                ranks.append(
                    subprocess.Popen([*command, str(rank)], env=environment, stdout=file, stderr=subprocess.STDOUT)
                )
        _wait(ranks, time.monotonic() + PATIENCE)
        codes = [process.poll() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    told = (f"rank {rank}, exit code {codes[rank]}:\n{log.read_text()}" for rank, log in enumerate(logs))
    assert codes == [0] * WORLD, "\n".join(told)


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until every rank has ended, one has failed, or the deadline."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        if None not in codes or any(codes):
            return
        time.sleep(0.02)


def _main(file: str, body: str, rendezvous: str, rank: int) -> None:
    # As part of a package, so that test files can import their neighbours as they do under pytest.
    package = types.ModuleType("in_a_rank")
    package.__path__ = [str(Path(file).parent)]
    sys.modules[package.__name__] = package
    tests = importlib.import_module(f"{package.__name__}.{Path(file).stem}")
    torch.set_num_threads(1)
    backends = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backends = "cpu:gloo,cuda:nccl"
    patience = timedelta(seconds=PATIENCE)
    dist.init_process_group(backends, init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=patience)
    getattr(tests, body)(rank)
    dist.barrier()
    dist.destroy_process_group()
    # DDP's reducer and FSDP's mesh keep the process group, and so gloo's threads, beyond its destruction. On a loaded
    # machine such a thread may let go of the last collective's tensors, which takes Python's lock, while the
    # interpreter is being taken down, and aborts the process. All has been checked by now: leave without that.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:4], int(sys.argv[4]))
