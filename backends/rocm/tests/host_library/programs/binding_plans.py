# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The binding's own plans of products, on whatever library it finds: prints of each whether there is an algorithm.

test_transcript.py runs it on the host library and on AMD's. With `run`, it runs a plan of fp32 at the end, too."""

from __future__ import annotations

import itertools
import sys

import torch

from te_dispatch_rocm import gemm_plans
from te_dispatch_rocm.codes import DTYPES, EPILOGUES, NONE, SCALINGS, type_code
from te_dispatch_rocm.native import load_with_libraries

M, N, K = 48, 32, 64
OPERANDS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    ("e4m3fn", "e4m3fn"),
    ("e5m2", "e4m3fn"),
    ("e4m3fnuz", "e4m3fnuz"),
]
LAYOUTS = {"NT": (False, True), "NN": (False, False), "TN": (True, False)}


def problem(a, b, out, layout="NT", bias=None, epilogue=None, accumulate=False, tf32=False):
    """The `gemm_plans.Problem` of a product of (M, K) by (K, N) on HIP's device 0."""
    turned_a, turned_b = LAYOUTS[layout]
    scaling = "tensor" if isinstance(a, str) else "none"
    return gemm_plans.Problem(
        device=0, m=M, n=N, k=K, a_turned=turned_a, b_turned=turned_b, lda=M if turned_a else K,
        ldb=K if turned_b else N, a_type=type_code(a), b_type=type_code(b), scaling=SCALINGS[scaling],
        out_type=DTYPES[out], accumulate=accumulate, bias_type=NONE if bias is None else DTYPES[bias],
        epilogue=EPILOGUES[epilogue], aux_type=DTYPES[out] if epilogue in ("gelu", "dgelu") else NONE, tf32=tf32,
        workspace_limit=32 << 20,
    )  # fmt: skip


def problems():
    for (a, b), out in itertools.product(OPERANDS, (torch.float32, torch.bfloat16, torch.float16)):
        facts = f"{a} {b} {out}"
        for layout in LAYOUTS:
            yield f"{facts} {layout}", problem(a, b, out, layout)
        yield f"{facts} accumulate", problem(a, b, out, accumulate=True)
        yield f"{facts} tf32", problem(a, b, out, tf32=True)
        for bias, epilogue in (
            (out, None), (torch.float32, None), (None, "gelu"), (out, "gelu"), (torch.float32, "gelu"),
            (out, "dgelu"), (torch.float32, "dgelu"), (out, "bgrad_a"), (torch.float32, "bgrad_b"),
        ):  # fmt: skip
            yield f"{facts} bias={bias} {epilogue}", problem(a, b, out, bias=bias, epilogue=epilogue)


def main() -> None:
    native = load_with_libraries()
    for name, one in problems():
        try:
            plan = native.new_gemm_plan(tuple(one), None)
        except native.GemmRefused as refused:
            print(name, "|", refused)
        else:
            print(name, "| a plan with", "some" if native.gemm_candidates(plan, 4) else "no", "candidates")
    if sys.argv[1:] == ["run"]:
        plan = native.new_gemm_plan(tuple(problem(torch.float32, torch.float32, torch.float32)), None)
        a, b, out = torch.ones(M, K), torch.ones(N, K), torch.zeros(M, N)
        workspace = torch.zeros(max(plan.workspace, 1), dtype=torch.uint8)
        try:
            addresses = (x.data_ptr() if x is not None else 0 for x in (a, b, None, None, out, None, None, workspace))
            native.gemm_run(plan, 0, *addresses, 1.0)
            print("ran:", out.unique().tolist())
        except RuntimeError as error:
            print("did not run:", error)


if __name__ == "__main__":
    main()
