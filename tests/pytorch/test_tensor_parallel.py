# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Modules whose weights two ranks divide, against the whole on one.

Where arithmetic is the same, results are compared bit for bit: numbers are then small integers, of which every sum is
exact, and each part of a tensor has an element of 7, so that parts get the scale of the whole: 448 / 7 is a power of
two, and casts are exact, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling, Format

from . import ranks

TOKENS, BATCH, HIDDEN, FFN = 32, 2, 32, 64
RECIPES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "current": Float8CurrentScaling,
    "delayed": lambda: DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4, reduce_amax=False),
}


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def integers(seed: int, *shape: int) -> torch.Tensor:
    """-1 to 1, seldom other than 0, with a 7 in every eighth of each dimension's parts."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-1, 2, shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.2)
    x = drawn.float()
    flat = x.view(-1, shape[-1])
    for row in range(0, flat.shape[0], max(flat.shape[0] // 8, 1)):
        flat[row, row % 4 :: max(shape[-1] // 4, 1)] = 7
    return x.to(device())


def part(x: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    return x.chunk(ranks.WORLD, dim)[rank].contiguous()


def passes(
    module: torch.nn.Module, recipe: Any, x: torch.Tensor, gradient: torch.Tensor, **others: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of a forward, and the input's gradient of a backward."""
    leaf = x.clone().requires_grad_()
    with te.autocast(recipe=recipe) if recipe is not None else nullcontext():
        y = module(leaf, **others)
    y.backward(gradient)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def layer(mode: str, group: Any, sequence_parallel: bool, split: bool) -> te.Linear:
    """A column's or a row's product; the whole of it where group is None."""
    sizes = (HIDDEN, FFN) if mode == "column" else (FFN, HIDDEN)
    names = {"first": sizes[1] // 4, "second": sizes[1] // 4 * 3} if split else None
    return te.Linear(
        *sizes, parallel_mode=mode, tp_group=group, sequence_parallel=sequence_parallel, parameters_split=names,
        params_dtype=torch.float32, device=device(),
    )  # fmt: skip


def fill(whole: te.Linear, divided: te.Linear, dim: int, rank: int) -> None:
    """The same numbers, each parameter by itself: parts of a split weight are divided one by one."""
    with torch.no_grad():
        for i, ((name, one), (_, other)) in enumerate(zip(whole.named_parameters(), divided.named_parameters())):
            one.copy_(integers(i, *one.shape))
            other.copy_(part(one, dim, rank) if name.endswith("weight") or dim == 0 else one)


def features_of(whole: te.Linear, y: torch.Tensor, rank: int) -> torch.Tensor:
    """The features of a column's output that a rank has: its part of each part of the weight."""
    return torch.cat([part(x, -1, rank) for x in y.split(whole.parameter_split_sizes, -1)], -1)


def train(rank: int, mode: str, sequence_parallel: bool, recipe: str, split: bool) -> None:
    column = mode == "column"
    alone = layer(mode, None, False, split)
    together = layer(mode, dist.group.WORLD, sequence_parallel, split)
    assert together.tp_size == 2 and together.sequence_parallel is sequence_parallel
    assert (together.in_features, together.out_features) == (HIDDEN, FFN // 2) if column else (FFN // 2, HIDDEN)
    fill(alone, together, 0 if column else 1, rank)
    made = RECIPES[recipe]()

    def tokens(x: torch.Tensor) -> torch.Tensor:
        return part(x, 0, rank) if sequence_parallel else x

    def inputs(x: torch.Tensor) -> torch.Tensor:
        return tokens(x) if column else part(x, -1, rank)

    def outputs(y: torch.Tensor) -> torch.Tensor:
        return features_of(alone, y, rank) if column else tokens(y)

    for step in range(3):
        x, dy = (
            integers(1000 + step, TOKENS, BATCH, alone.in_features),
            integers(2000 + step, TOKENS, BATCH, alone.out_features),
        )
        found = []
        for module, given, gradient in ((alone, x, dy), (together, inputs(x), outputs(dy))):
            found.append(passes(module, made, given, gradient))
        (y, dx), (y_here, dx_here) = found
        torch.testing.assert_close(y_here, outputs(y), rtol=0, atol=0)
        torch.testing.assert_close(dx_here, inputs(dx), rtol=0, atol=0)
    for (name, whole), (_, divided) in zip(alone.named_parameters(), together.named_parameters()):
        assert whole.grad is not None and divided.grad is not None
        kept = whole.grad
        if name.endswith("weight") or column:
            kept = part(kept, 0 if column else 1, rank)
        elif sequence_parallel:
            assert divided.sequence_parallel  # type: ignore[attr-defined]  # which tells a program to add it up
            dist.all_reduce(divided.grad)
        torch.testing.assert_close(divided.grad, kept, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def _trained(rank: int) -> None:
    for options in itertools.product(("column", "row"), (False, True), RECIPES, (False, True)):
        train(rank, *options)


@pytest.mark.slow
def test_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    ranks.run(_trained, tmp_path)


def test_recorded_calls_exchange_again(tmp_path: Path) -> None:
    ranks.run(_recorded, tmp_path)


def _recorded(rank: int) -> None:
    """The third call is replayed, collectives and all: `train` compares three steps."""
    for mode, sequence_parallel in itertools.product(("column", "row"), (False, True)):
        before = te.capture_stats().hits
        train(rank, mode, sequence_parallel, "delayed", False)
        assert te.capture_stats().hits > before


#: Modules that begin with a norm, of a group and whether it divides the tokens, and the dimension along which each
#: parameter is divided.
NORMED: dict[str, tuple[Callable[..., torch.nn.Module], dict[str, int]]] = {
    "LayerNormLinear": (
        lambda **kw: te.LayerNormLinear(HIDDEN, FFN, parallel_mode="column", **kw),
        {"weight": 0, "bias": 0},
    ),
    "LayerNormMLP": (
        lambda **kw: te.LayerNormMLP(HIDDEN, FFN, set_parallel_mode=True, activation="relu", **kw),
        {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1},
    ),
}


def balanced(seed: int, *shape: int) -> torch.Tensor:
    """256 and -256, as many of each in every row: mean 0 and deviation 256, so that a norm is exact, too."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(shape, generator=generator).argsort(-1)
    return torch.where(order < shape[-1] // 2, 256.0, -256.0).to(device())


def train_normed(rank: int, name: str, sequence_parallel: bool, recipe: str, norm: str) -> None:
    build, dims = NORMED[name]
    given: dict[str, Any] = {"params_dtype": torch.float32, "device": device(), "normalization": norm}
    alone = build(**given)
    together = build(tp_group=dist.group.WORLD, sequence_parallel=sequence_parallel, **given)
    with torch.no_grad():
        for i, ((key, one), (_, other)) in enumerate(zip(alone.named_parameters(), together.named_parameters())):
            if key.startswith("layer_norm"):
                one.fill_(4.0 if key.endswith("bias") else 3.0)
            else:
                one.copy_(integers(i, *one.shape))
            other.copy_(part(one, dims[key], rank) if key in dims else one)
    # Ranks that reduce their amaxes have the scales of the whole.
    recipes = [None, None] if recipe == "none" else [
        DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4, reduce_amax=reduces) for reduces in (False, True)
    ]  # fmt: skip
    divided = name == "LayerNormLinear"
    # Numbers behind two products are larger than fp32 holds exactly, and scales of casts are no powers of two.
    exact = divided and recipe == "none"
    nearly: dict[str, float] = {"rtol": 1e-5, "atol": 1e-2}
    close: dict[str, float] = {"rtol": 0, "atol": 0} if exact else nearly

    def tokens(x: torch.Tensor) -> torch.Tensor:
        return part(x, 0, rank) if sequence_parallel else x

    for step in range(3):
        x, dy = balanced(step, TOKENS, BATCH, HIDDEN), integers(step, TOKENS, BATCH, FFN if divided else HIDDEN)
        found = []
        dy_here = part(dy, -1, rank) if divided else tokens(dy)
        calls = ((alone, recipes[0], x, dy), (together, recipes[1], tokens(x), dy_here))
        for module, made, given_x, gradient in calls:
            found.append(passes(module, made, given_x, gradient))
        (y, dx), (y_here, dx_here) = found
        torch.testing.assert_close(y_here, part(y, -1, rank) if divided else tokens(y), **close)
        torch.testing.assert_close(dx_here, tokens(dx), **close)
    for (key, whole), (_, other) in zip(alone.named_parameters(), together.named_parameters()):
        assert whole.grad is not None and other.grad is not None
        if key not in dims and sequence_parallel:
            assert other.sequence_parallel  # type: ignore[attr-defined]
            dist.all_reduce(other.grad)
        kept = part(whole.grad, dims[key], rank) if key in dims else whole.grad
        bound = nearly if key.startswith("layer_norm") else close
        torch.testing.assert_close(other.grad, kept, **bound, msg=lambda m, n=key: f"{n}: {m}")


def _normed(rank: int) -> None:
    for options in itertools.product(NORMED, (False, True), ("none", "delayed"), ("LayerNorm", "RMSNorm")):
        train_normed(rank, *options)


def test_modules_with_a_norm(tmp_path: Path) -> None:
    ranks.run(_normed, tmp_path)


def _norms_returned(rank: int) -> None:
    """The norm of this rank's tokens, or of all: gradients of the latter are added up over ranks."""
    given: dict[str, Any] = {"params_dtype": torch.float32, "device": device(), "return_layernorm_output": True}
    for name, (build, dims) in NORMED.items():
        for gathers in (False, True):
            alone = build(**given)
            together = build(
                tp_group=dist.group.WORLD, sequence_parallel=True, return_layernorm_output_gathered=gathers, **given
            )
            with torch.no_grad():
                pairs = zip(alone.named_parameters(), together.named_parameters())
                for i, ((key, one), (_, other)) in enumerate(pairs):
                    one.copy_(integers(i, *one.shape))
                    other.copy_(part(one, dims[key], rank) if key in dims else one)
            x = balanced(0, TOKENS, BATCH, HIDDEN)
            leaf, here = x.clone().requires_grad_(), part(x, 0, rank).requires_grad_()
            (y, normed), (y_here, normed_here) = alone(leaf), together(here)
            torch.testing.assert_close(normed_here, normed if gathers else part(normed, 0, rank), rtol=0, atol=0)
            dy, dnormed = integers(1, *y.shape), integers(2, *normed.shape)
            dy_here = part(dy, -1, rank) if name == "LayerNormLinear" else part(dy, 0, rank)
            torch.autograd.backward((y, normed), (dy, dnormed))
            share = dnormed / ranks.WORLD if gathers else part(dnormed, 0, rank)
            torch.autograd.backward((y_here, normed_here), (dy_here, share))
            assert leaf.grad is not None and here.grad is not None
            torch.testing.assert_close(here.grad, part(leaf.grad, 0, rank), rtol=0, atol=0)


def test_norms_that_are_returned(tmp_path: Path) -> None:
    ranks.run(_norms_returned, tmp_path)


#: Layers whose heads are divided, by what is special about them.
LAYERS: dict[str, dict[str, Any]] = {
    "own parameters": {},
    "fused, groups": {"fuse_qkv_params": True, "num_gqa_groups": 2},
    "decoder, RMSNorm": {"layer_type": "decoder", "normalization": "RMSNorm", "bias": False},
    "batch first": {"attn_input_format": "bshd", "qk_norm_type": "RMSNorm", "softmax_type": "learnable"},
    "norm behind": {"apply_residual_connection_post_layernorm": True},
}


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """Relative; absolute where y is small, as the gradient of a bias of keys, which cancels."""
    return float((x - y).norm() / y.norm().clamp_min(1))


def train_layer(rank: int, kind: str, sequence_parallel: bool, recipe: str) -> None:
    given = {
        "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "params_dtype": torch.float32, "device": device(), "set_parallel_mode": True,
        **LAYERS[kind],
    }  # fmt: skip
    torch.manual_seed(0)
    alone = te.TransformerLayer(**given)
    together = te.TransformerLayer(tp_group=dist.group.WORLD, sequence_parallel=sequence_parallel, **given)
    pairs = list(zip(alone.named_parameters(), together.parameters(), strict=True))

    def here(x: torch.Tensor, one: torch.Tensor, key: str) -> torch.Tensor:
        if key.endswith("softmax_offset"):
            return part(x, 0, rank)
        return part(x, one.partition_dim, rank) if hasattr(one, "partition_dim") else x  # type: ignore[attr-defined]

    with torch.no_grad():
        for (key, one), other in pairs:
            one.add_(torch.randn_like(one) / 8)
            other.copy_(here(one, one, key))

    def tokens(x: torch.Tensor) -> torch.Tensor:
        return part(x, 0, rank) if sequence_parallel else x

    made = [None if recipe == "none" else DelayedScaling(amax_history_len=4, reduce_amax=r) for r in (False, True)]
    bound = 1e-5 if recipe == "none" else 0.05
    for step in range(3):
        torch.manual_seed(step)
        x, dz, seen = (torch.randn(32, 2, 64, device=device()) for _ in range(3))
        found = []
        for module, recipe_of, given_x, gradient, encoded in (
            (alone, made[0], x, dz, seen), (together, made[1], tokens(x), tokens(dz), tokens(seen)),
        ):  # fmt: skip
            others = {"encoder_output": encoded} if given.get("layer_type") == "decoder" else {}
            found.append(passes(module, recipe_of, given_x, gradient, **others))
        for whole, ours in zip(*found, strict=True):
            assert distance(ours, tokens(whole)) < bound
    for (key, one), other in pairs:
        assert one.grad is not None and other.grad is not None, key
        if getattr(other, "sequence_parallel", False):  # which tells a program to add gradients up
            dist.all_reduce(other.grad)
        assert distance(other.grad, here(one.grad, one, key)) < bound, key


def _layers(rank: int) -> None:
    for kind, sequence_parallel in itertools.product(LAYERS, (False, True)):
        if kind == "batch first" and sequence_parallel:
            continue  # ranks divide the first dimension, which is not the tokens'
        train_layer(rank, kind, sequence_parallel, "none")
    for sequence_parallel in (False, True):
        train_layer(rank, "own parameters", sequence_parallel, "delayed")


def test_layers(tmp_path: Path) -> None:
    ranks.run(_layers, tmp_path)


def _other_calls(rank: int) -> None:
    group = dist.group.WORLD
    given: dict[str, Any] = {"params_dtype": torch.float32, "device": device()}
    # A group that comes later, a bias that is returned, and calls without gradients.
    row = te.Linear(FFN, HIDDEN, parallel_mode="row", tp_size=2, return_bias=True, **given)
    with pytest.raises(RuntimeError, match="call set_tensor_parallel_group first"):
        row(integers(0, TOKENS, FFN // 2))
    row.set_tensor_parallel_group(group)
    with torch.no_grad():
        row.weight.fill_(1)
        out, bias = row(torch.full((TOKENS, FFN // 2), float(rank + 1), device=device()))
    assert bias is row.bias and bool((out == 3 * FFN // 2).all())
    empty, _ = row(torch.empty(0, FFN // 2, device=device()))
    assert empty.shape == (0, HIDDEN)
    with te.autocast(recipe=Float8CurrentScaling()), pytest.raises(NotImplementedError, match="fp8_output"):
        row(integers(0, TOKENS, FFN // 2), fp8_output=True)
    with pytest.raises(ValueError, match=r"\(tokens, ..., features\)"):
        row(integers(0, 1, FFN // 2)[0])
    with pytest.raises(AttributeError, match="tp_size cannot become 1"):
        row.tp_size = 1

    class Column(te.Linear):
        """As Megatron writes its wrappers."""

        def __init__(self) -> None:
            self.tp_size = 2
            assert self.tp_size == 2
            super().__init__(HIDDEN, FFN, parallel_mode="column", tp_group=group, tp_size=2, **given)

    assert Column().weight.shape == (FFN // 2, HIDDEN)
    none = te.Linear(HIDDEN, FFN, tp_group=group, **given)  # divided by nobody: the whole weight on each
    assert none.weight.shape == (FFN, HIDDEN)
    assert none(integers(0, TOKENS, HIDDEN)).shape == (TOKENS, FFN)
    alone = dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(ValueError, match="tp_group has 1 ranks, and the parameters were made for 2"):
        row.set_tensor_parallel_group(alone)
    assert row.tp_group is group


def test_calls_of_several_ranks(tmp_path: Path) -> None:
    ranks.run(_other_calls, tmp_path)


@pytest.fixture
def two() -> Iterator[Any]:
    """What says of itself that it has two ranks."""
    yield torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parallel_mode": "column", "out_features": 31}, "out_features must be divisible by the 2 ranks"),
        ({"parallel_mode": "row", "in_features": 33}, "in_features must be divisible by the 2 ranks"),
        ({"tp_size": 4}, "tp_size=4 and a tp_group of 2 ranks contradict"),
        ({"tp_size": 0}, "tp_size must be a positive int"),
        (
            {"parallel_mode": "column", "parameters_split": {"a": 3, "b": 29}},
            "parameters_split: a must be divisible by the 2 ranks",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(given: dict[str, Any], message: str, two: Any) -> None:
    sizes = {"in_features": 32, "out_features": 32, "device": "cpu", "tp_group": two}
    with pytest.raises(ValueError, match=message):
        te.Linear(**{**sizes, **given})


def test_a_compiled_region_is_refused(two: Any) -> None:
    layer = te.Linear(32, 32, parallel_mode="row", tp_group=two, device="cpu")
    with pytest.raises(Exception, match="not supported in a compiled region"):
        torch.compile(layer, backend="eager", fullgraph=True)(torch.ones(16, 16))


def test_a_plan_communicates_nothing(two: Any) -> None:
    """The group has no ranks that would answer."""
    given: dict[str, Any] = {"tp_group": two, "sequence_parallel": True, "device": "cpu"}
    layer = te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, set_parallel_mode=True, **given)
    planned = te.plan(layer, te.TensorSpec((32, 2, 64)))
    assert {"gemm", "attention_fwd", "layernorm_bwd"} <= {call.operator for call in planned.calls}
