# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Amax reduction where the ranks do not do the same: they then reduce the amaxes of the same modules, or say so."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.pytorch.fp8 import amax_reduction

from . import ranks

pytestmark = pytest.mark.sampled(6)

RECIPE = DelayedScaling(amax_history_len=3)


def linear() -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(32, 32, device="cpu")


def step(*runs: tuple[torch.nn.Module, float], recipe: DelayedScaling = RECIPE) -> None:
    """Run modules, each on a constant input, in this order."""
    with te.autocast(recipe=recipe):
        outs = [module(torch.full((16, 32), value, requires_grad=True)) for module, value in runs]
    torch.stack([out.sum() for out in outs]).sum().backward()


def input_scale(module: Any) -> float:
    return float(module.fp8_state.scales.forward.scale[0])


def same_on_all_ranks(*modules: Any) -> None:
    for module in modules:
        for state in (module.fp8_state.scales.forward, module.fp8_state.scales.backward):
            parts = [torch.empty_like(state.scale) for _ in range(ranks.WORLD)]
            dist.all_gather(parts, state.scale)
            assert torch.equal(parts[0], parts[1])


# -- bodies, run on every rank ------------------------------------------------------------------------------------


def freed_at_different_times(rank: int) -> None:
    temporary = linear()
    step((temporary, 1.0))
    if rank == 0:
        cycle = [temporary]
        cycle.append(cycle)
    del temporary
    main = linear()
    step((main, 2.0 + rank))
    if rank == 0:
        del cycle
        gc.collect()
    for _ in range(2):
        step((main, 2.0 + rank))
    assert input_scale(main) == torch.tensor(448 / 3, dtype=torch.float32)
    same_on_all_ranks(main)


def run_in_different_orders(rank: int) -> None:
    small, large = linear(), linear()
    runs = [(small, 1.0), (large, 1000.0)]
    step(*(runs if rank == 0 else runs[::-1]))
    assert input_scale(small) == 448 and input_scale(large) == torch.tensor(448 / 1000, dtype=torch.float32)
    same_on_all_ranks(small, large)


def run_on_different_ranks(rank: int) -> None:
    experts = [linear() for _ in range(3)]
    step((experts[rank], 2.0 ** (10 * rank)))  # expert 0 on rank 0, expert 1 on rank 1
    assert input_scale(experts[rank]) == 448 / 2.0 ** (10 * rank)
    step((experts[1 - rank], 2.0 ** (10 * (1 - rank))))  # the other way round
    assert [input_scale(expert) for expert in experts[:2]] == [448, 448 / 1024]
    same_on_all_ranks(*experts[:2])
    # One rank starts with expert 2. What it saw before the other ranks ran it is its own; the rest is shared.
    step((experts[0], 1.0) if rank == 0 else (experts[2], 4.0))
    step((experts[2], 1.0 + rank))
    assert input_scale(experts[2]) == (224.0, 112.0)[rank]
    for _ in range(RECIPE.amax_history_len - 1):
        step((experts[2], 1.0 + rank))
    assert input_scale(experts[2]) == 224.0
    same_on_all_ranks(*experts)


def differences_are_noticed_one_update_later_on_a_device(rank: int) -> None:
    """The host does not wait for a device: a reduction that does not fit takes over nothing, the next one exchanges."""

    def copied(tensor: torch.Tensor) -> Any:
        copy = tensor.clone()
        return lambda: copy

    amax_reduction.reads_at_once = lambda device: False
    amax_reduction.to_host = copied
    experts = [linear(), linear()]
    step((experts[rank], 2.0 ** (10 * rank)))
    assert input_scale(experts[rank]) == 448 / 2.0 ** (10 * rank)
    for _ in range(RECIPE.amax_history_len):
        step((experts[0], 1.0 + rank), (experts[1], 8.0 - rank))
    assert [input_scale(expert) for expert in experts] == [224.0, 56.0]
    same_on_all_ranks(*experts)


def copies_run_in_different_orders(rank: int) -> None:
    first = linear()
    experts = [first, *(copy.deepcopy(first) for _ in range(2))]
    runs = [(expert, 2.0**i) for i, expert in enumerate(experts)]
    step(*(runs if rank == 0 else runs[::-1]))
    assert [input_scale(expert) for expert in experts] == [448.0, 224.0, 112.0]
    again = [pickle.loads(pickle.dumps(expert)) for expert in experts]
    step(*zip(again, (8.0, 16.0, 32.0)))
    assert [input_scale(expert) for expert in again] == [56.0, 28.0, 14.0]


def evaluated_on_one_rank(rank: int) -> None:
    main = linear()
    step((main, 1.0 + rank))
    if rank == 0:
        average = copy.deepcopy(main).eval()
        with torch.no_grad(), te.autocast(recipe=RECIPE):
            average(torch.ones(16, 32))
            main(torch.full((16, 32), 99.0))
    step((main, 1.0 + rank))
    assert input_scale(main) == 224.0
    same_on_all_ranks(main)


def constructed_on_one_rank(rank: int) -> None:
    if rank == 0:
        linear()
    first, second = linear(), te.LayerNormLinear(32, 32, device="cpu")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step((first, 1.0 + rank), (second, 1.0))
    assert any("matched in the order of construction" in str(warning.message) for warning in told)
    assert input_scale(first) == 224.0
    same_on_all_ranks(first, second)


def other_modules(rank: int) -> None:
    make = te.Linear if rank == 0 else te.LayerNormLinear
    module = make(32, 32, device="cpu")
    with pytest.raises(RuntimeError, match=r"has not constructed a .*construct the same modules .* in the same order"):
        step((module, 1.0))
    assert input_scale(module) == 1.0


def other_recipes(rank: int) -> None:
    module = linear()
    with pytest.raises(RuntimeError, match="the ranks reduce amaxes of different recipes at the same time"):
        step((module, 1.0), recipe=DelayedScaling(amax_history_len=3, margin=rank))


def recipes_first_used_in_different_orders(rank: int) -> None:
    recipes = [DelayedScaling(amax_history_len=3, margin=margin) for margin in (0, 1)]
    modules = [linear(), linear()]
    order = (0, 1) if rank == 0 else (1, 0)
    for i in order:  # first used without the other ranks
        step((modules[i], 1.0), recipe=DelayedScaling(amax_history_len=3, margin=i, reduce_amax=False))
    with te.autocast(recipe=recipes[0]):
        for i in order:
            with te.autocast(recipe=recipes[i]):
                modules[i](torch.full((16, 32), 2.0 + rank))
    assert [input_scale(module) for module in modules] == [
        float(torch.tensor(448 / 3, dtype=torch.float32)), float(torch.tensor(224 / 3, dtype=torch.float32))
    ]  # fmt: skip


# -- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        freed_at_different_times,
        run_in_different_orders,
        run_on_different_ranks,
        differences_are_noticed_one_update_later_on_a_device,
        copies_run_in_different_orders,
        evaluated_on_one_rank,
        constructed_on_one_rank,
        other_modules,
        other_recipes,
        recipes_first_used_in_different_orders,
    ],
    ids=lambda body: body.__name__,
)
def test_ranks_that_differ(body: Any, tmp_path: Path) -> None:
    ranks.run(body, tmp_path)
