# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Whatever changes between the steps of a module, a captured one gives what another gives: bit for bit, errors too.

The same changes are made to two copies of a module, one whose calls are captured and one whose are not.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import te_dispatch.pytorch as te
from te_dispatch.ops.checks import guards
from te_dispatch.pytorch.capture.signatures import CapturedCalls

from .capturing import MODULES, captured, made
from .changes import CHANGES
from .worlds import WORLDS, World, same, step, without_capture

#: One change: ("module", its name), or (an attribute of `World`, its value).
Change = tuple[str, Any]

EVERY: list[Change] = [
    *(("module", name) for name in CHANGES),
    *((attribute, value) for attribute, values in WORLDS.items() for value in values),
    ("arguments", (("fp8_output", True),)),
    ("arguments", (("fp8_grad", True),)),
    ("arguments", ()),
]
#: Steps after each change: a call is captured in the first that is like it and replayed in the next; a layer's call as
#: a whole is recorded in the second, and replayed in the third.
STEPS, COMPOSED_STEPS = 2, 3


def walk(name: str, changes: list[Change], recipe: str = "delayed") -> None:
    """Make the changes one after the other to a captured module and to a copy that captures nothing."""
    module = made(name)
    world = World(recipe=recipe)
    for seed in range(2):
        step(module, world, seed)
    assert captured(module) or module.return_layernorm_output
    composed = isinstance(module, te.TransformerLayer)
    assert not composed or len(module.composed_calls.signatures)
    twin = copy.deepcopy(module)
    seed = 10
    for number, (attribute, value) in enumerate(changes):
        if attribute == "module":
            module = CHANGES[value](module) or module
            twin = CHANGES[value](twin) or twin
        else:
            world = dataclasses.replace(world, **{attribute: value})
        for _ in range(COMPOSED_STEPS if composed else STEPS):
            seed += 1
            found = step(module, world, seed)
            with without_capture():
                expected = step(twin, world, seed)
            assert same(found, expected), f"after {changes[: number + 1]}: {world}\n{found}\n{expected}"


@pytest.mark.sampled(8)
@pytest.mark.parametrize("change", EVERY, ids=lambda change: f"{change[0]}={change[1]}")
@pytest.mark.parametrize("name", MODULES)
def test_a_change_and_its_opposite(name: str, change: Change) -> None:
    """One change alone, and what was before it again."""
    attribute, _ = change
    back = ("module", "training") if attribute == "module" else (attribute, getattr(World(), attribute))
    walk(name, [change, back])


@pytest.mark.parametrize("name", MODULES)
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    changes=st.lists(st.sampled_from(EVERY), min_size=2, max_size=6),
    recipe=st.sampled_from(["delayed", "none", "current"]),
    natively=st.booleans(),
)
def test_any_changes(name: str, changes: list[Change], recipe: str, natively: bool) -> None:
    """Also where guards compare in Python, as with a PyTorch that lacks those of torch.compile."""
    with pytest.MonkeyPatch.context() as patch:
        if not natively:
            patch.setattr(guards, "TensorGuards", None)
        walk(name, changes, recipe)


@pytest.mark.parametrize("change", [("shape", (64, 1)), ("recipe", "current"), ("run", "torch.autocast")])
def test_a_capture_that_is_replayed_where_it_does_not_fit_is_found(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness itself: with a lookup that compares nothing."""
    monkeypatch.setattr(
        CapturedCalls, "find", lambda self, *args: next(iter(self.signatures)).options if self.signatures else None
    )
    with pytest.raises(AssertionError, match="after"):
        walk("Linear", [change])
