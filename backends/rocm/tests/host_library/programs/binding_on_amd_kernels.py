# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The binding on AMD's library and AMD's kernels for gfx90a: products of fp16 as te_dispatch writes them, row-major.

    binding_on_amd_kernels.py HIP HIPBLASLT

As amd_kernels.py, to be run with the glibc that came along with AMD's library, HOST_HIP_DEVICES=gfx90a, and
TE_DISPATCH_ROCM_PATH with the folders of both files. Prints a JSON object for each case: the kernels, and of each
result the largest difference from float64, in units of the last place of fp16 at the result's largest value."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import amd_kernels
import torch
from binding_plans import K, M, N, problem

from te_dispatch_rocm.native import load_with_libraries

#: By name: the layout, what follows the product, and whether it is given a bias (True), writes a bias gradient of this
#: many elements, or neither.
CASES: dict[str, tuple[str, str | None, bool | int]] = {
    "gelu": ("NT", "gelu", True),
    "dgelu": ("NN", "dgelu", N),
    "bgrad_a": ("TN", "bgrad_a", M),
    "bgrad_b": ("TN", "bgrad_b", N),
}
ALPHA = 0.125


def expected(
    case: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, aux: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The results in float64, by name; `bias` and `aux` as they were before."""
    layout = CASES[case][0]
    a, b, bias, aux = (x.double() for x in (a, b, bias, aux))
    rows, columns = (a.t() if layout[0] == "T" else a), (b.t() if layout[1] == "T" else b)
    x = rows @ columns * ALPHA
    if case == "gelu":
        x = x + bias
        return {"out": torch.nn.functional.gelu(x, approximate="tanh"), "aux": x}
    if case == "dgelu":
        aux.requires_grad_()
        torch.nn.functional.gelu(aux, approximate="tanh").backward(x)
        assert aux.grad is not None
        return {"out": aux.grad, "bias": aux.grad.sum(0)}
    return {"out": x, "bias": rows.sum(1) if case == "bgrad_a" else columns.sum(0)}


def main() -> None:
    amd_kernels.extend_the_emulator()
    emulated = amd_kernels.Emulated(*(Path(one) for one in sys.argv[1:3]))
    native, half = load_with_libraries(), torch.float16
    for case, (layout, epilogue, biased) in CASES.items():
        torch.manual_seed(3)
        a, b = torch.randn((K, M) if layout[0] == "T" else (M, K)), torch.randn((N, K) if layout[1] == "T" else (K, N))
        bias = torch.randn(N) if biased is True else torch.zeros(int(biased))
        a, b, bias, aux, out = (x.to(half) for x in (a, b, bias, torch.randn(M, N), torch.zeros(M, N)))
        wanted = expected(case, a, b, bias, aux)
        plan = native.new_gemm_plan(tuple(problem(half, half, half, layout, bias=half, epilogue=epilogue)), None)
        workspace = torch.zeros(max(plan.workspace, 1), dtype=torch.uint8)
        emulated.arrays[:] = [x.numpy() for x in (a, b, bias, aux, out, workspace)]
        emulated.kernels.clear()
        at = [x.data_ptr() if x is not None else 0 for x in (a, b, None, None, out, bias, aux, workspace)]
        native.gemm_run(plan, 0, *at, ALPHA)
        if emulated.error is not None:
            raise emulated.error
        units = {}
        for name, value in wanted.items():
            unit = 2.0 ** (math.floor(math.log2(value.abs().max().item())) - 10)
            units[name] = ({"out": out, "aux": aux, "bias": bias}[name].double() - value).abs().max().item() / unit
        print(json.dumps({"case": case, "kernels": emulated.kernels, "units": units}), flush=True)


if __name__ == "__main__":
    main()
