# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Recipes and process groups as names: what a compiled graph can hand to a function that runs outside of it.

Equal recipes are stood for by one object, a copy that cannot be changed, so that modules compare by identity. A recipe
that compiled code makes or receives is known by its fields, which become guards.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
from operator import index
from typing import Any, cast

import torch

from te_dispatch.common import recipe as recipes
from te_dispatch.common.recipe import DelayedScaling, MMParams, QParams, Recipe
from te_dispatch.common.recipe_values import CHANGES
from te_dispatch.pytorch.compile import hook
from te_dispatch.pytorch.compile.hook import constant


class _Named:
    """Recipes by name, as attributes: dynamo takes a dict as it first saw it, and this one grows."""


_named = _Named()
_names: dict[tuple[Any, ...], str] = {}
_numbers = itertools.count()
#: What each thread asked for last, which is not forgotten before the thread has made use of it.
_latest = threading.local()
#: How many recipes there may be before those that nothing uses are forgotten.
_KEPT = 256
_groups: list[Any] = []

_CLASSES = {c.__name__: c for c in vars(recipes).values() if dataclasses.is_dataclass(c) and isinstance(c, type)}
_FIELDS = {name: tuple(field.name for field in dataclasses.fields(c) if field.init) for name, c in _CLASSES.items()}


def intern_recipe(recipe: Recipe) -> str:
    """The name of the recipe that stands for all equal ones, for `recipe_named`."""
    with CHANGES:
        name = recipe._name  # a training loop hashes its recipe once, not at every step
        used = None if name is None else getattr(_named, name, None)
        if name is None or used is None:
            key = recipe.key()
            name = _names.get(key)
            if name is None:
                if len(_names) >= _KEPT:
                    _forget_unused()
                name = f"recipe_{next(_numbers)}"
                used = recipe.in_use()
                used.__dict__["_name"] = name
                setattr(_named, name, used)
                _names[key] = name
            used = recipe_named(name)
            recipe.__dict__["_name"] = name
        _latest.recipe = used
        return name


def _forget_unused() -> None:
    """Forget recipes that no autocast, plan or group refers to: a program may make another one at every step.

    Names are not used again, so a compiled graph that knows one is traced anew.
    """
    for name, used in list(vars(_named).items()):
        # `_named`, the pair in the list, this variable and the argument refer to it.
        if sys.getrefcount(used) <= 4:
            _names.pop(used.key(), None)
            delattr(_named, name)


def recipe_named(name: str) -> Recipe:
    return getattr(_named, name)  # type: ignore[no-any-return]


def intern_group(process_group: Any) -> int:
    """A number for a process group, -1 for None, for `group_numbered`.

    Raises:
        NotImplementedError: under tracing, for any but None.
    """
    if process_group is None:
        return -1
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "autocast: amax_reduction_group must be None inside a compiled region; put the autocast around the "
            "compiled call"
        )
    for i, group in enumerate(_groups):
        if group is process_group:
            return i
    _groups.append(process_group)
    return len(_groups) - 1


def group_numbered(number: int) -> Any:
    return None if number < 0 else _groups[number]


def _intern_traced(recipe: Recipe) -> str:
    kind = recipe.__class__.__name__
    values: tuple[Any, ...] = ()
    for name in _FIELDS[kind]:
        value = getattr(recipe, name)
        if isinstance(value, MMParams):
            value = value.use_split_accumulator
        elif isinstance(value, int) and not isinstance(value, bool):
            value = index(value)  # dynamic shapes make it symbolic
        elif callable(value):
            raise NotImplementedError(
                f"autocast: {kind}.{name} must not be a function inside a compiled region; put the autocast around the "
                "compiled call"
            )
        values = (*values, value)
    casts: tuple[Any, ...] = ()
    for name, params in recipe._assigned:
        options = (
            params.power_2_scale,
            params.amax_epsilon,
            params.random_hadamard_transform,
            params.stochastic_rounding,
            params.fp4_2d_quantization,
        )
        casts = (*casts, (name, options))
    return _name_of(kind, values, casts)  # type: ignore[no-any-return]


@constant
def _name_of(kind: str, values: tuple[Any, ...], casts: tuple[tuple[str, tuple[Any, ...]], ...]) -> str:
    given = {}
    for field, value in zip((f for f in dataclasses.fields(_CLASSES[kind]) if f.init), values, strict=True):
        given[field.name] = MMParams(value) if isinstance(field.default, MMParams) else value
    recipe = cast(Recipe, _CLASSES[kind](**given))
    for name, options in casts:
        setattr(recipe, name, QParams(*options))
    return intern_recipe(recipe)


@constant
def default_name() -> str:
    """The name of the recipe that an autocast has if it names none."""
    return intern_recipe(DelayedScaling())


hook.substitute(intern_recipe, _intern_traced)
