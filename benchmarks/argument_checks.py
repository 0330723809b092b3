# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the shared argument checks cost: a valid call of each family, seen before and for the first time.

Each check is called with a call that its cache holds, and without the cache (`te_dispatch.ops.checks.check_cache`),
against a direct call: a function of the same parameters that returns at once. All three run in interleaved rounds; the
figures are minima over the rounds, because everything else that runs on a machine only ever adds. Trust the ratio: it
is in direct calls, of which an idle machine makes one in some 50 ns. On an accelerator the arguments lie there.

    python benchmarks/argument_checks.py [--rounds 25] [--calls 5000] [--json FILE]
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer
from te_dispatch.ops.checks import attention, gemm, quantize, rows, training

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def valid_calls(device: torch.device) -> dict[str, list[Call]]:
    """Case, named ``family: what``, to the checks that an implementation makes, with their arguments."""

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    x, weight, grad = randn(64, 32, 128), randn(256, 128), randn(64, 32, 256)
    delayed = DelayedQuantizer(scale=torch.ones(1, device=device), amax=torch.zeros(1, device=device))
    fp8 = {usage: [ops.quantize(t, delayed, usage=usage) for t in (x, weight)] for usage in ("row", "both")}
    block = [
        ops.quantize(x, BlockQuantizer(), usage="row"),
        ops.quantize(weight, BlockQuantizer(two_d=True), usage="row"),
    ]
    # Distinct tensors, as in a model: comparing one with itself takes a longer way.
    dy, gamma, beta = randn(64, 32, 128), randn(128), randn(128)
    mean, rstd = (randn(64, 32, dtype=torch.float32) for _ in range(2))
    q, k, v, out, dout = (randn(256, 4, 8, 64) for _ in range(5))
    lse = randn(4, 8, 256, dtype=torch.float32)
    shared = (
        q, k, v, "sbhd", None, "causal", None, None, None, None, None, None, None, None, None, None, "none", None,
        0.125, "vanilla", None, 0.0, 0.0, None,
    )  # fmt: skip
    row_map = torch.zeros(64, 2, dtype=torch.int64, device=device)
    return {
        "quantize: delayed": [(quantize.quantize, (x, delayed, "both"))],
        "quantize: current": [(quantize.quantize, (x, CurrentQuantizer(), "both"))],
        "quantize: dbias": [(quantize.quantize_dbias, (grad, delayed, "both", None))],
        "gemm: bf16": [(gemm.gemm, (x, weight, "NT"))],
        "gemm: bf16 into out": [(gemm.gemm, (x, weight, "NT", grad, True))],
        "gemm: fp8 per tensor, row-wise": [(gemm.gemm, (*fp8["row"], "NT"))],
        "gemm: fp8 per tensor, both copies": [(gemm.gemm, (*fp8["both"], "NT"))],
        "gemm: fp8 blocks, row-wise": [(gemm.gemm, (*block, "NT"))],
        "norm: layernorm_fwd": [(rows.norm_fwd, (x, gamma, beta, 1e-5, None, None, "row", None))],
        "norm: layernorm_fwd, delayed": [(rows.norm_fwd, (x, gamma, beta, 1e-5, None, delayed, "both", None))],
        "norm: layernorm_bwd": [(rows.norm_bwd, (dy, x, gamma, mean, rstd, None, True))],
        "activation: forward": [(rows.activation_fwd, (x, "swiglu", None, None, "row", None))],
        "activation: forward, delayed": [(rows.activation_fwd, (x, "swiglu", None, delayed, "both", None))],
        "activation: backward": [(rows.activation_bwd, (x, grad, "swiglu", None, None, "row"))],
        "softmax: forward": [(rows.softmax_fwd, (x, None, 0.5, None))],
        "position: rope": [(rows.rope, ("x", q, randn(256, 1, 1, 64, dtype=torch.float32), "sbhd", None, None))],
        "attention: forward": [
            (attention.attention, shared),
            (attention.forward, (False, None, None, None, None, device)),
        ],
        "attention: backward": [
            (attention.attention, shared),
            (attention.backward, (dout, q, v, out, lse, "sbhd", None, False, None, None, None)),
        ],
        "training: moe_permute": [(training.moe_permute, (weight[:64], row_map, None, None))],
    }


def empty_like(check: Callable[..., Any]) -> Callable[..., None]:
    """A function of the same parameters that returns at once."""
    scope: dict[str, Any] = {}
    exec(f"def direct({', '.join(inspect.signature(check).parameters)}):\n    return None\n", scope)
    scope["direct"].__defaults__ = check.__defaults__  # type: ignore[attr-defined]
    return scope["direct"]


def per_call(calls: list[Call], repeats: int) -> float:
    total = 0
    for function, arguments in calls:
        start = time.perf_counter_ns()
        for _ in range(repeats):
            function(*arguments)
        total += time.perf_counter_ns() - start
    return total / repeats


def measure(calls: list[Call], rounds: int, repeats: int) -> tuple[float, float, float]:
    """Nanoseconds of direct calls, of checks that remember, of checks that do not."""
    variants = (
        [(empty_like(check), arguments) for check, arguments in calls],
        calls,
        [(getattr(check, "__wrapped__", check), arguments) for check, arguments in calls],
    )
    found: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for times, variant in zip(found, variants):
            times.append(per_call(variant, repeats))
    direct, seen, first = map(min, found)
    return direct, seen, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--json", help="also write everything here")
    options = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator()
    device = torch.empty(1, device=accelerator or "cpu").device
    rows_found = []
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, {device}")
    print(f"{'case':<36}{'direct ns':>11}{'seen ns':>9}{'ratio':>7}{'first ns':>10}{'ratio':>7}")
    for case, calls in valid_calls(device).items():
        direct, seen, first = measure(calls, options.rounds, options.calls)
        rows_found.append({"case": case, "direct_ns": direct, "seen_ns": seen, "first_ns": first})
        print(f"{case:<36}{direct:>11.0f}{seen:>9.0f}{seen / direct:>7.1f}{first:>10.0f}{first / direct:>7.1f}")
    if options.json:
        data = {"python": platform.python_version(), "torch": torch.__version__, "device": str(device)}
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({**data, "rows": rows_found}, file, indent=1)


if __name__ == "__main__":
    main()
