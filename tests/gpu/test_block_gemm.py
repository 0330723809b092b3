# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Block-scaled FP8 products on Hopper's matrix units (`torch.scaled_mm_blocks`) against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.common import recipe
from te_dispatch.conformance.bounds import HALF_SUBNORMAL, U32
from te_dispatch.conformance.bounds.gemm import accumulation
from te_dispatch.numerics.quantizers import BlockQuantizer


def _missing() -> str:
    """Why this machine's units and libraries take no block scales; empty where they do."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"block scales in fp32 are sm_90's, this is sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
    for name, found, needed in (("PyTorch", torch.__version__, (2, 9)), ("CUDA", torch.version.cuda or "0.0", (12, 9))):
        if tuple(int(part) for part in found.split(".")[:2]) < needed:
            return f"needs {name} {needed[0]}.{needed[1]}, this is {found}"
    return ""


pytestmark = [
    pytest.mark.skipif(bool(_missing()), reason=_missing() or "-"),
    pytest.mark.usefixtures("torch_first"),
]

DEVICE = torch.device("cuda")
KINDS = {"1d": {}, "2d": {"two_d": True}, "2d-any-scale": {"two_d": True, "power_of_two": False}}
AXES = {"NT": ("mk", "nk"), "NN": ("mk", "kn"), "TN": ("km", "kn")}
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: U32}


def operands(
    layout: str, m: int, n: int, k: int, kinds: tuple[str, str], encodings: Any = ("e4m3fn",) * 2
) -> list[Any]:
    """Quantized matrices whose blocks differ in magnitude by up to 2^10."""
    torch.manual_seed(1)
    sizes, made = {"m": m, "n": n, "k": k}, []
    for axes, kind, encoding in zip(AXES[layout], kinds, encodings):
        x = torch.randn([sizes[axis] for axis in axes], device=DEVICE)
        x = x * torch.exp2(torch.linspace(-5, 5, x.shape[1], device=DEVICE))
        made.append(ops.quantize(x.bfloat16(), BlockQuantizer(encoding, **KINDS[kind]), usage="both"))
    return made


def magnitude(a: Any, b: Any, layout: str) -> torch.Tensor:
    """Sum over k of |a||b|, float64, of the copies that are multiplied: |x| is the values' where signs are cleared."""
    positive = [_positive(x) for x in (a, b)]
    with te_dispatch.using(gemm="reference"):
        return ops.gemm(*positive, layout=layout, out_dtype=torch.float32).out.double()


def _positive(x: Any) -> Any:
    from te_dispatch.numerics.quantized import Quantized

    parts = {name: getattr(x, name) for name in Quantized.__slots__}
    for name in ("row_data", "col_data"):
        parts[name] = parts[name] & 0x7F
    return Quantized(**parts)


def bound(size: torch.Tensor, k: int, want: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """|error| per element of a block-scaled product: of a split accumulation, as the conformance kit derives it, and
    of this result's and the reference's rounding to the output's dtype, subnormal numbers included.
    """
    rounded = 2 * (ROUNDOFF[dtype] * want.double().abs() + HALF_SUBNORMAL[dtype])
    return size * accumulation(k, "split") + rounded


def gemm(*args: Any, **options: Any) -> tuple[Any, list[str]]:
    """The result and what ran."""
    ran: list[str] = []

    def note(operator: Any, accepted: Any, *_: Any) -> None:
        if operator.name == "gemm":
            ran.append(accepted.id)

    with te_dispatch.observe(note):
        return ops.gemm(*args, **options), ran


def reference(*args: Any, **options: Any) -> Any:
    with te_dispatch.using(gemm="reference"):
        return ops.gemm(*args, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("kinds", [("1d", "1d"), ("1d", "2d"), ("2d", "1d"), ("2d", "2d-any-scale")], ids="-x-".join)
@pytest.mark.parametrize("layout", AXES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    # Tiles as such (K a multiple of 512), tiles spread over rows, one block only, edges in every dimension.
    [(256, 384, 1024), (256, 128, 512), (128, 256, 384), (128, 256, 128), (144, 272, 336), (16, 16, 16)],
)
def test_products_stay_within_the_units_bound(
    m: int, n: int, k: int, layout: str, kinds: tuple[str, str], dtype: torch.dtype
) -> None:
    a, b = operands(layout, m, n, k, kinds)
    if dtype == torch.float16:  # what float16 can hold
        a, b = (ops.quantize(ops.dequantize(x) / 256, BlockQuantizer(two_d="2d" in kind), usage="both")
                for x, kind in zip((a, b), kinds))  # fmt: skip
    got, ran = gemm(a, b, layout=layout, out_dtype=dtype)
    want = reference(a, b, layout=layout, out_dtype=dtype).out
    assert ran == ["torch.scaled_mm_blocks"] and got.out.dtype == dtype
    error = (got.out.double() - want.double()).abs()
    limit = bound(magnitude(a, b, layout), k, want, dtype)
    assert (error <= limit).all(), f"{float((error / limit).max())} of the bound"


def test_long_sums_of_one_sign() -> None:
    """Where a sum kept to 14 bits shows most: K = 4096 with nothing that cancels."""
    k = 4096
    x, w = (torch.rand(128, k, device=DEVICE).bfloat16() for _ in range(2))
    a, b = ops.quantize(x, BlockQuantizer(), usage="both"), ops.quantize(w, BlockQuantizer(two_d=True), usage="both")
    got, ran = gemm(a, b, layout="NT", out_dtype=torch.float32)
    want = reference(a, b, layout="NT", out_dtype=torch.float32).out
    assert ran == ["torch.scaled_mm_blocks"]
    assert ((got.out.double() - want.double()).abs() <= bound(want.double(), k, want, torch.float32)).all()


@pytest.mark.parametrize("encodings", [("e4m3fn", "e5m2"), ("e5m2", "e4m3fn")])
def test_mixed_encodings(encodings: tuple[str, str]) -> None:
    a, b = operands("TN", 128, 256, 512, ("1d", "1d"), encodings)
    got, ran = gemm(a, b, layout="TN")
    want = reference(a, b, layout="TN").out
    assert ran == ["torch.scaled_mm_blocks"]
    assert ((got.out.double() - want.double()).abs() <= bound(magnitude(a, b, "TN"), 512, want, torch.bfloat16)).all()


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
def test_alpha_and_bias(alpha: float, bias_dtype: torch.dtype) -> None:
    """The scale times alpha, and the sum with the bias: two roundings more, of terms as large as both."""
    a, b = operands("NT", 128, 256, 512, ("1d", "2d"))
    bias = torch.randn(256, device=DEVICE).to(bias_dtype) * 100
    options: dict[str, Any] = {"layout": "NT", "alpha": alpha, "bias": bias}
    got, ran = gemm(a, b, **options)
    want = reference(a, b, **options).out
    assert ran == ["torch.scaled_mm_blocks"]
    size = magnitude(a, b, "NT") * alpha
    limit = bound(size, 512, want, torch.bfloat16) + 2 * U32 * (size + bias.double().abs())
    assert ((got.out.double() - want.double()).abs() <= limit).all()


@pytest.mark.parametrize("epilogue", ["gelu", "dgelu", "bgrad_b"])
def test_epilogues(epilogue: str) -> None:
    """gelu and its derivative change by at most 1.13 of what their argument changes by, and take some 16 roundings."""
    layout = "TN" if epilogue == "bgrad_b" else "NT"
    a, b = operands(layout, 128, 256, 512, ("1d", "1d"))
    options: dict[str, Any] = {"layout": layout, "epilogue": epilogue, "out_dtype": torch.float32}
    if epilogue == "dgelu":
        options["aux"] = torch.randn(128, 256, device=DEVICE).bfloat16()
    got, ran = gemm(a, b, **options)
    want = reference(a, b, **options)
    size = magnitude(a, b, layout)
    limit = 1.13 * bound(size, 512, want.out, torch.float32) + 16 * U32 * (size + 1)
    assert ran == ["torch.scaled_mm_blocks"] and ((got.out.double() - want.out.double()).abs() <= limit).all()
    if epilogue == "gelu":
        assert ((got.aux.double() - want.aux.double()).abs() <= bound(size, 512, want.aux, torch.float32)).all()
    if epilogue == "dgelu":
        assert ((got.dbias.double() - want.dbias.double()).abs() <= limit.sum(0) + 128 * U32 * size.sum(0)).all()
    if epilogue == "bgrad_b":  # a sum of 512 values, of the row-wise copy or of the column-wise
        values = ops.dequantize(b, dtype=torch.float32).double()
        assert ((got.dbias.double() - values.sum(0)).abs() <= 512 * U32 * values.abs().sum(0)).all()


def test_accumulate_into_a_main_gradient() -> None:
    a, b = operands("TN", 128, 256, 512, ("1d", "1d"))
    start = torch.randn(128, 256, device=DEVICE) * 1000
    out, other = start.clone(), start.clone()
    got, ran = gemm(a, b, layout="TN", out=out, accumulate=True)
    want = reference(a, b, layout="TN", out=other, accumulate=True).out
    assert ran == ["torch.scaled_mm_blocks"] and got.out is out
    size = magnitude(a, b, "TN")
    limit = bound(size, 512, want, torch.float32) + U32 * (size + start.double().abs())
    assert ((out.double() - want.double()).abs() <= limit).all()


@pytest.mark.parametrize(("m", "k"), [(24, 512), (0, 512), (32, 520)])
def test_other_sizes_are_multiplied_all_the_same(m: int, k: int) -> None:
    """They are declined, for this call alone: the next one of a size that fits is on the units again."""
    a, b = operands("NT", m, 64, k, ("1d", "2d"))
    got, _ = gemm(a, b, layout="NT", out_dtype=torch.float32)
    want = reference(a, b, layout="NT", out_dtype=torch.float32).out
    assert got.out.shape == (m, 64)
    assert ((got.out.double() - want.double()).abs() <= bound(magnitude(a, b, "NT"), k, want, torch.float32)).all()
    assert gemm(*operands("NT", 32, 64, 512, ("1d", "2d")), layout="NT")[1] == ["torch.scaled_mm_blocks"]


def test_runs_repeat_by_bits_and_capture() -> None:
    a, b = operands("NT", 256, 384, 1024, ("1d", "2d"))
    first = ops.gemm(a, b, layout="NT").out
    assert torch.equal(first, gemm(a, b, layout="NT")[0].out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.gemm(a, b, layout="NT").out
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, first)


def train_step(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    module.zero_grad()
    with te.autocast(enabled=True, recipe=recipe.Float8BlockScaling()):
        out = module(x)
    out.float().square().mean().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def test_a_modules_three_products_run_on_the_units() -> None:
    """fprop, dgrad and wgrad. Against the emulation, which sums in fp32: what the output differs by is bounded by
    the units' bound, the magnitudes being those of the operands, which casts raise by less than 1/16 each.
    """
    torch.manual_seed(0)
    m, k, n = 256, 512, 384
    module = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
    ran: list[str] = []
    with te_dispatch.observe(lambda op, accepted, *_: ran.append(accepted.id) if op.name == "gemm" else None):
        got = train_step(module, x)
    assert ran == ["torch.scaled_mm_blocks"] * 3
    with te_dispatch.using(gemm="torch.emulated_gemm"):
        want = train_step(module, x)
    size = (17 / 16) ** 2 * (x.double().abs() @ module.weight.detach().double().abs().T)
    assert ((got[0].double() - want[0].double()).abs() <= bound(size, k, want[0], torch.bfloat16)).all()
    assert all(g.isfinite().all() and g.any() for g in got)


def test_a_compiled_module_equals_the_eager_one_by_bits() -> None:
    torch.manual_seed(0)
    module = te.Linear(256, 384, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(128, 256, device=DEVICE, dtype=torch.bfloat16)
    eager = train_step(module, x)
    with te.autocast(enabled=True, recipe=recipe.Float8BlockScaling()):
        out = torch.compile(module, fullgraph=True)(x.requires_grad_())
    assert torch.equal(out, eager[0])
