# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Recipes as values: how they compare, what assigning to one does, and the copies that are in use."""

from __future__ import annotations

import copy
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, ClassVar, TypeVar

from te_dispatch.common.recipe_arguments import convert_fields, converted, names
from te_dispatch.common.recipe_parameters import QParams

#: Held while a recipe changes and while one is copied for use, so that a copy is of one state.
CHANGES = threading.RLock()
if hasattr(os, "register_at_fork"):
    # The thread that held it does not exist in a child.
    os.register_at_fork(after_in_child=CHANGES._at_fork_reinit)  # type: ignore[attr-defined]

_Self = TypeVar("_Self", bound="RecipeValues")


class Cast:
    """An attribute of recipes, how a kind of tensor is cast: what `by_knobs` makes of the recipe, until assigned."""

    def __init__(self, by_knobs: Callable[[Any], QParams]) -> None:
        self.by_knobs = by_knobs

    def __set_name__(self, owner: type[RecipeValues], name: str) -> None:
        self.name = name
        owner.CASTS = (*owner.CASTS, name)

    def __get__(self, recipe: RecipeValues | None, owner: Any = None) -> QParams:
        if recipe is None:
            return self  # type: ignore[return-value]
        return dict(recipe._assigned).get(self.name) or self.by_knobs(recipe)

    def __set__(self, recipe: RecipeValues, value: QParams) -> None:
        if not isinstance(value, QParams):
            raise TypeError(f"{type(recipe).__name__}: {self.name} must be a QParams, got {value!r}")
        given = {**dict(recipe._assigned), self.name: value}
        recipe.__dict__["_assigned"] = tuple((name, given[name]) for name in recipe.CASTS if name in given)


class RecipeValues:
    """What is common to recipes, whatever they say.

    Recipes of one class with equal attributes are equal, and have equal hashes. Attributes may be assigned: the new
    value is converted and checked as the constructor does it, and one that is refused changes nothing. An `autocast`
    takes the recipe as it is when the autocast is made, so that what is assigned later holds for later ones. Do not
    change a recipe that is a key of a dict.

    An assigned cast (`CASTS`) holds whatever the knobs say. `copy.copy` keeps it, `dataclasses.replace` does not.
    """

    #: Names of attributes that say how tensors are cast, which follow the knobs until they are assigned.
    CASTS: ClassVar[tuple[str, ...]] = ()
    #: Which options of an assigned cast this version honours.
    CAST_OPTIONS: ClassVar[tuple[str, ...]] = ()

    #: Whether the constructor has ended.
    _ready = False
    #: Whether this is `in_use`.
    _in_use = False
    #: (name, value) of each assigned cast, in the order of `CASTS`.
    _assigned: tuple[tuple[str, QParams], ...] = ()
    #: What the runtime calls recipes that are equal to this one; None before the first use and after a change.
    _name: str | None = None

    def __post_init__(self) -> None:
        convert_fields(self)
        self._check()
        self._ready = True

    def _check(self) -> None:
        """Raise a TypeError or ValueError that names an attribute with a value that no recipe of the class has.

        Values have been converted (`te_dispatch.common.recipe_arguments`).
        """
        raise NotImplementedError

    def _unsupported_cast(self) -> str | None:
        """An option of an assigned cast without effect in this version, with its value and the remedy, or None."""
        for name, value in self._assigned:
            for option in _OPTIONS:
                found = getattr(value, option)
                if found and option not in self.CAST_OPTIONS:
                    return f"{name}.{option}={found!r}; assign a QParams without it"
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        if not self._ready:
            super().__setattr__(name, value)
            return
        kind = type(self).__name__
        if self._in_use:
            raise AttributeError(
                f"{kind}: {name} cannot be assigned: this is the copy that an autocast uses; assign to the recipe that "
                "the autocast was given, or to a copy.copy() of this one"
            )
        if name not in self.CASTS and name not in names(type(self)):
            known = ", ".join((*names(type(self)), *self.CASTS))
            raise AttributeError(f"{kind}: there is no {name!r} to assign, only {known}")
        with CHANGES:
            before = dict(self.__dict__)
            try:
                super().__setattr__(name, converted(type(self), name, value))
                self._check()
            except BaseException:
                self.__dict__.update(before)
                raise
            self.__dict__["_name"] = None

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}: {name} cannot be deleted")

    def key(self) -> tuple[Any, ...]:
        """What equal recipes have in common. An assigned cast counts where it is not what the knobs give."""
        kind = type(self)
        casts = tuple((name, cast) for name, cast in self._assigned if cast != getattr(kind, name).by_knobs(self))
        return kind, _reader(kind)(self), casts

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        assert isinstance(other, RecipeValues)
        return self.key() == other.key()

    def __hash__(self) -> int:
        return hash(self.key())

    def __getstate__(self) -> dict[str, Any]:
        # Names are of this process, and a copy of what is in use may be changed.
        return {name: value for name, value in self.__dict__.items() if name not in ("_name", "_in_use")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ready=True)

    def in_use(self: _Self) -> _Self:
        """A copy that cannot be changed."""
        with CHANGES:
            made = copy.copy(self)
        made.__dict__["_in_use"] = True
        return made


_OPTIONS = tuple(option.name for option in fields(QParams))


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """What reads all fields of a recipe of a class."""
    return attrgetter(*names(kind))
