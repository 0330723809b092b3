# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch explain --module``: who would serve each call of a module's step, from shapes alone."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import te_dispatch.pytorch
from te_dispatch.cli.console import FOUND, CommandError, emit, out
from te_dispatch.cli.devices import HERE, find_device
from te_dispatch.cli.expressions import read_call
from te_dispatch.common import recipe as recipes
from te_dispatch.core.errors import DispatchError
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.module_plan import ModulePlan
from te_dispatch.core.policy.known import did_you_mean
from te_dispatch.core.scopes import MANAGER
from te_dispatch.pytorch.planning.module_plan import TensorSpec, plan

_FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
#: Of inputs that are no activations: masks, lengths.
_OTHERS = {"bool": torch.bool, "int32": torch.int32, "int64": torch.int64}


@dataclass(frozen=True)
class Described:
    """A module as the command line describes it.

    Attributes:
        module: a constructor's call, for `read_call`. inputs: ``SIZES`` or ``SIZES:DTYPE`` each.
        dtype: of parameters and inputs, bfloat16 for None. recipe: a constructor's call, or None.
        backward: whether there is one.
    """

    module: str
    inputs: Sequence[str]
    dtype: str | None
    recipe: str | None
    backward: bool


def explain(described: Described, device: str | None, policy: str | None, as_json: bool) -> int:
    """Plan a described module and show every call.

    Args:
        described: the module.
        device: as for `find_device`; None is this machine's.
        policy: a shipped policy or a file, put on top of those in force.

    Returns:
        0, or 1 where nothing serves one of the calls.
    """
    found = find_device(device or HERE)
    with MANAGER.policy(policy) if policy else contextlib.nullcontext():
        planned = planned_module(described, found)
    if as_json:
        emit({"expression": described.module, **planned.to_dict()})
    else:
        show(planned, described.module, out())
    return FOUND if planned.unserved else 0


def planned_module(described: Described, device: DeviceFacts) -> ModulePlan:
    """The plan of a described module.

    Raises:
        CommandError: something that cannot be read, that a constructor refuses, or that the forward does.
    """
    dtype = _dtype("--dtype", described.dtype or "bfloat16", _FLOATS)
    module = _module(described.module, dtype)
    if not described.inputs:
        raise CommandError(f"give --input for each tensor that {type(module).__name__} takes, e.g. --input 2048x1024")
    specs = [_spec(text, dtype) for text in described.inputs]
    recipe = _recipe(described.recipe)
    with _mistakes(f"--module {described.module} --input {' --input '.join(described.inputs)}"):
        return plan(module, *specs, recipe=recipe, device=device, backward=described.backward)


def modules() -> dict[str, type]:
    """The classes that ``--module`` takes, by name."""
    names = {name: getattr(te_dispatch.pytorch, name) for name in te_dispatch.pytorch.__all__}
    return {n: c for n, c in names.items() if isinstance(c, type) and issubclass(c, torch.nn.Module)}


def _module(text: str, dtype: torch.dtype) -> torch.nn.Module:
    """The module, without memory for its parameters where its constructor can do without."""
    made, args, named = read_call("--module", text, modules())
    parameters = inspect.signature(made).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, value in (("device", "meta"), ("params_dtype", dtype)):
        if name in parameters or (any_name and name == "device"):
            named.setdefault(name, value)
    with _mistakes(f"--module {text}"):
        module: torch.nn.Module = made(*args, **named)
    return module


def _recipe(text: str | None) -> recipes.Recipe | None:
    if text is None or text == "none":
        return None
    classes = {n: c for n, c in vars(recipes).items() if isinstance(c, type) and issubclass(c, recipes.Recipe)}
    classes.pop("Recipe", None)
    made, args, named = read_call("--recipe", text, classes)
    with _mistakes(f"--recipe {text}"):
        recipe: recipes.Recipe = made(*args, **named)
    return recipe


def _spec(text: str, dtype: torch.dtype) -> TensorSpec:
    sizes, colon, word = text.partition(":")
    parts = sizes.lower().split("x")
    if not all(part.isdigit() for part in parts):
        raise CommandError(f"--input takes sizes with x between, such as 2048x1024 or 8x128:int64, got {text!r}")
    return TensorSpec(tuple(map(int, parts)), _dtype("--input", word, {**_FLOATS, **_OTHERS}) if colon else dtype)


def _dtype(option: str, text: str, known: dict[str, torch.dtype]) -> torch.dtype:
    word = text.lower().removeprefix("torch.")
    word = _SHORT.get(word, word)
    if word not in known:
        raise CommandError(f"{option}: unknown dtype {text!r}{did_you_mean(word, known)}")
    return known[word]


@contextlib.contextmanager
def _mistakes(where: str) -> Iterator[None]:
    """What a constructor or a forward says of its arguments, as a mistake of the command's caller."""
    try:
        yield
    except DispatchError:
        raise
    except Exception as error:
        raise CommandError(f"{where}: {error}") from error


def show(planned: ModulePlan, expression: str, console: Console) -> None:
    """Print a plan as a table, and the whole decision of each call that nothing serves."""
    console.print(Text.assemble((expression, "bold"), f": {planned.heading()}"))
    table = Table()
    for column in ("phase", "call site", "operator", "implementation", "facts"):
        table.add_column(column, overflow="fold")
    for phase, site, operator, choice, facts in planned.rows():
        style = "red" if choice == "nothing" else "green"
        table.add_row(phase, Text(site), operator, Text(choice, style), Text(facts, "dim"))
    console.print(table)
    for assumption in planned.assumed:
        console.print(Text(f"the plan assumes: {assumption}", "yellow"))
    for call in planned.unserved:
        console.print(Text(f"Nothing serves {call.operator} of {call.site or 'the module'}:", "bold red"))
        console.print(Text(call.decision.table()))
