# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`plain_torch` means: one graph under torch.compile with the same bits as in eager, and shapes on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch_backend_support import MEMBERS, assert_same_bits

from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dispatch.ops.results import Saved
from te_dispatch_torch import (
    activation,
    attention,
    attention_unfused,
    gemm,
    norm,
    position,
    quantize,
    softmax,
    state,
    training,
)

pytestmark = pytest.mark.sampled(8)

M, N, K = 32, 48, 64
RNG = torch.tensor([3, 4])


def _delayed(device: str = "cpu") -> DelayedQuantizer:
    return DelayedQuantizer(scale=torch.full((1,), 3.0, device=device), amax=torch.zeros(1, device=device))


def _quantizers(device: str) -> list[Any]:
    blocks = [BlockQuantizer(), BlockQuantizer(two_d=True), MXFP8Quantizer("e5m2"), NVFP4Quantizer()]
    return [_delayed(device), CurrentQuantizer(), CurrentQuantizer("e4m3fnuz", common=True), *blocks]


def _codes(shape: tuple[int, ...], device: str, quantizer: Any = None) -> Quantized:
    made = quantize.quantize(torch.randn(shape).bfloat16(), quantizer or CurrentQuantizer(), usage="both")
    tensors = {n: getattr(made, n) for n in MEMBERS}
    moved = {n: None if t is None else t.to(device) for n, t in tensors.items()}
    return Quantized(
        moved["row_data"], moved["col_data"], moved["row_scale_inv"], moved["col_scale_inv"], made.encoding,
        made.scaling, made.scale_layout, made.shape, made.dtype, torch.device(device), moved["global_scale_inv"],
    )  # fmt: skip


def calls(device: str) -> list[tuple[str, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """(label, operator, implementation, arguments, options); quantizers with state are fresh in each list."""

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape).to(dtype).to(device)

    x, w, dy = randn(4, 8, K), randn(N, K), randn(4, 8, N)
    found: list[tuple[str, str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def add(op: str, run: Callable[..., Any], *args: Any, **options: Any) -> None:
        found.append((f"{len(found)}-{op}", op, run, args, options))

    for q in _quantizers(device):
        for usage in ("row", "both"):
            add("quantize", quantize.quantize, x, q, usage=usage)
        add("quantize_dbias", quantize.quantize_dbias, x, q, usage="both")
        add(
            "dequantize",
            quantize.dequantize,
            _codes((4, 8, K), device, CurrentQuantizer() if q.kind == "delayed" else q),
        )
    add("multi_tensor_quantize", quantize.multi_tensor_quantize, [x, w], [CurrentQuantizer()] * 2, usage="both")
    add("transpose_quantized", quantize.transpose_quantized, _codes((M, K), device))
    add("compute_amax", state.compute_amax, x)
    add("convert_encoding", state.convert_encoding, _codes((M, K), device), encoding="e4m3fnuz")
    add("gemm", gemm.matmul, x, w, layout="NT", bias=randn(N))
    add("gemm", gemm.matmul, x, w, layout="NT", epilogue="gelu", out_quantizer=_delayed(device))
    add("gemm", gemm.matmul, dy, w, layout="NN", epilogue="dgelu", aux=x)
    out = torch.ones(N, K, device=device)
    add("gemm", gemm.matmul, dy, x, layout="TN", out=out, accumulate=True, epilogue="bgrad_a")
    for q in (CurrentQuantizer(), BlockQuantizer(), MXFP8Quantizer()):
        add("gemm", gemm.emulated, _codes((4, 8, K), device, q), _codes((N, K), device, q), layout="NT")
    gamma, mean, rstd = randn(K), randn(4, 8, dtype=torch.float32), randn(4, 8, dtype=torch.float32)
    add("layernorm_fwd", norm.layernorm_fwd, x, gamma, gamma, quantizer=_delayed(device), usage="both", with_y=True)
    add("rmsnorm_fwd", norm.rmsnorm_fwd, x, gamma, residual=x, zero_centered_gamma=True)
    add("layernorm_bwd", norm.layernorm_bwd, x, x, gamma, mean, rstd, add=x)
    add("rmsnorm_bwd", norm.rmsnorm_bwd, x, x, gamma, rstd)
    for kind in ("gelu", "swiglu", "clamped_swiglu", "srelu"):
        half = x if kind in ("gelu", "srelu") else x[..., : K // 2]
        add("activation_fwd", activation.activation_fwd, x, kind=kind, quantizer=CurrentQuantizer(), usage="both")
        add("activation_bwd", activation.activation_bwd, half, x, kind=kind, with_dbias=True)
    score = randn(2, 3, 8, 8)
    add("softmax_fwd", softmax.softmax_fwd, score, score > 0, scale=0.5, causal=True)
    add("softmax_bwd", softmax.softmax_bwd, score, score, scale=0.5)
    q4, freqs = randn(8, 2, 4, 16), randn(8, 1, 1, 16, dtype=torch.float32)
    add("rope_fwd", position.rope_fwd, q4, freqs)
    add("rope_bwd", position.rope_bwd, q4, freqs, interleaved=True)
    rng = RNG.to(device)
    add("dropout_add_fwd", training.dropout_add_fwd, x, x, dropout_p=0.3, rng_state=rng)
    add("attention_fwd", attention_unfused.attention_fwd, q4, q4, q4, mask="causal", dropout_p=0.2, rng_state=rng)
    add("attention_fwd", attention.cpu_fwd, q4, q4, q4, mask="causal")
    indices = torch.tensor([[0, 1]] * M).to(device)
    add("moe_permute", training.moe_permute, randn(M, K), indices, probs=randn(M, 2))
    add("moe_unpermute", training.moe_unpermute, randn(M * 2, K), indices.int())
    return found


LABELS = [c[0] for c in calls("cpu")]


def _parts(result: Any) -> Any:
    """A result without what is no tensor: a forward's `saved` reduces to its tensors."""
    if isinstance(result, tuple) and not isinstance(result, torch.Tensor):
        return [list(r.tensors) if isinstance(r, Saved) else r for r in result]
    return result


def _fresh(index: int) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(1)
    _, _, run, args, options = calls("cpu")[index]
    return run, args, options


def _state_of(args: Sequence[Any], options: dict[str, Any]) -> list[torch.Tensor]:
    """What a call may have written: amaxes and `out`."""
    written = [a.amax for a in (*args, *options.values()) if isinstance(a, DelayedQuantizer)]
    return written + ([options["out"]] if "out" in options else [])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("index", range(len(LABELS)), ids=LABELS)
def test_fullgraph_equals_eager(index: int, backend: str) -> None:
    torch._dynamo.reset()
    run, args, options = _fresh(index)
    want = run(*args, **options)
    again, args2, options2 = _fresh(index)
    compiled = torch.compile(lambda *a: again(*a, **options2), backend=backend, fullgraph=True)
    got = compiled(*args2)
    assert_same_bits(_parts(got), _parts(want))
    assert_same_bits(_state_of(args2, options2), _state_of(args, options), "state")
    assert all(t.any() for t in _state_of(args, options))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("unfused", [False, True])
def test_attention_pair_compiles(backend: str, unfused: bool) -> None:
    torch._dynamo.reset()
    forward = attention_unfused.attention_fwd if unfused else attention.cpu_fwd
    backward = attention_unfused.attention_bwd if unfused else attention.cpu_bwd

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Any:
        made = forward(q, k, v, layout="sbhd", mask="causal")
        return backward(dout, q, k, v, made.out, made.lse, made.saved, layout="sbhd", mask="causal")

    args = [torch.randn(16, 2, 4, 8) for _ in range(4)]
    assert_same_bits(torch.compile(step, backend=backend, fullgraph=True)(*args), step(*args))


@pytest.mark.parametrize("index", range(len(LABELS)), ids=LABELS)
def test_meta_gives_the_shape_functions_shapes(index: int) -> None:
    torch.manual_seed(1)
    _, op, run, args, options = calls("meta")[index]
    got, want = run(*args, **options), OPERATORS[op].shape(*args, **options)
    _same_shapes(got, want, op)


def _same_shapes(got: Any, want: Any, name: str) -> None:
    if isinstance(want, Quantized):
        for member in MEMBERS:
            _same_shapes(getattr(got, member), getattr(want, member), f"{name}.{member}")
    elif isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor) and got.device.type == "meta", name
        assert (tuple(got.shape), got.dtype) == (tuple(want.shape), want.dtype), name
    elif isinstance(want, (tuple, list)):
        assert type(got) is type(want) and len(got) == len(want), name
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            _same_shapes(g, w, f"{name}[{i}]")
    elif want is None:
        assert got is None, name
