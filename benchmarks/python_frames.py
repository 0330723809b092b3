# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""How many Python functions a training step of an FP8 `Linear` calls: host time, counted instead of timed.

Counted are the functions of this project and of the standard library. What an implementation calls is the backend's
and counted apart; PyTorch's own functions are left out. CPython before 3.12 runs each comprehension in a frame of its
own, so compare counts of one release of Python only.

    python benchmarks/python_frames.py [--device cpu] [--json] [--top 20]
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.core import scopes

RECIPE = DelayedScaling()
_HERE = Path(te_dispatch.__file__).parent


def backend_files() -> tuple[str, ...]:
    """Where the code of installed backends lies, and the functions that bind implementations of PyTorch's operators."""
    packages = []
    for backend in scopes.MANAGER.snapshot.backends.values():
        for implementation in backend.manifest.implementations[:1]:
            packages.append(f"/{implementation.target.partition(':')[0].partition('.')[0]}/")
    return (*packages, "below autograd")


def frames(call: Callable[[], Any], backends: tuple[str, ...]) -> tuple[Counter[str], int]:
    """(functions outside the backend by file and name, number of functions that the backend calls) of a call, in all
    threads."""
    found: Counter[str] = Counter()
    state = threading.local()
    inside_backend = 0

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside_backend
        depth = getattr(state, "depth", 0)
        if event == "return":
            state.depth = max(depth - 1, 0)
            return
        if event != "call":
            return
        file = frame.f_code.co_filename
        if depth or any(part in file for part in backends):
            state.depth = depth + 1
            inside_backend += "/torch/" not in file
        elif "/torch/" not in file and frame.f_code is not call.__code__:  # type: ignore[attr-defined]
            where = file.removeprefix(f"{_HERE}/") if file.startswith(str(_HERE)) else Path(file).name
            found[f"{where}:{frame.f_code.co_name}"] += 1

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return found, inside_backend


def measured(device: str) -> dict[str, tuple[Counter[str], int]]:
    """``hot``: a step of a layer whose call was captured. ``first``: the step in which a new layer is captured."""
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    grad = torch.randn(32, 96, dtype=torch.bfloat16, device=device)
    layer = te.Linear(64, 96, params_dtype=torch.bfloat16, device=device)

    def step() -> None:
        with te.autocast(recipe=RECIPE):
            y = layer(x)
        y.backward(grad)

    for _ in range(3):
        step()
    backends = backend_files()
    hot = frames(step, backends)
    layer = te.Linear(64, 96, params_dtype=torch.bfloat16, device=device)
    return {"hot": hot, "first": frames(step, backends)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--top", type=int, default=10, help="functions to name for each step")
    asked = parser.parse_args()
    found = measured(asked.device)
    if asked.json:
        document = {name: {"outside": outside.total(), "backend": inside} for name, (outside, inside) in found.items()}
        print(json.dumps({"python": sys.version.split()[0], "device": asked.device, **document}))
        return
    for name, (outside, inside) in found.items():
        print(f"{name} step: {outside.total()} Python functions outside the backend, {inside} inside")
        for where, count in outside.most_common(asked.top):
            print(f"  {count:4}  {where}")


if __name__ == "__main__":
    main()
