# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Native functions given nonsense: an exception that names the argument, never a crash, and nothing is launched.

The Python side checks operators' arguments; these checks are the last ones before a launch. They run without a GPU,
where whatever passes them ends at the missing driver.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from te_dispatch_cuda import probe

pytestmark = pytest.mark.skipif(probe.driver_version() is not None, reason="what passes the checks would be launched")

#: A null and a good address, misaligned ones, sizes that are negative, large, and too large to multiply.
INTEGERS = (0, 1, 2, 3, 16, 64, 4096, -1, -(2**31), 2**31, 2**40, 2**62, 2**63 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e30, float("inf"), float("nan"))


def arguments(signature: str) -> list[str] | None:
    """The kinds of a pybind11 function's arguments, from its docstring; None where one is an object."""
    inner = signature[signature.index("(") + 1 : signature.rindex(") ->")]
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(inner + ","):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(inner[start:i].partition(": ")[2])
            start = i + 1
    kinds = [_kind(part) for part in parts if part]
    return None if "object" in kinds else kinds


def _kind(annotation: str) -> str:
    if "Plan" in annotation:
        return "object"
    if fixed := re.search(r"Sequence\[typing.Annotated.*FixedSize\((\d+)\)", annotation):
        return f"rows of {fixed[1]}"
    listed = "list of " if "Sequence[" in annotation else ""
    for word, kind in (("SupportsFloat", "float"), ("SupportsInt", "int"), ("bool", "bool"), ("str", "str")):
        if word in annotation:
            return listed + kind
    return "object"


def nonsense(kind: str, of: random.Random) -> Any:
    """A value of a kind; lists have up to four elements."""
    if kind.startswith("rows of "):
        return [[of.choice(INTEGERS) for _ in range(int(kind[8:]))] for _ in range(of.randrange(4))]
    if kind.startswith("list of "):
        return [nonsense(kind[8:], of) for _ in range(of.randrange(4))]
    choices: dict[str, tuple[Any, ...]] = {"int": INTEGERS, "float": FLOATS, "bool": (False, True), "str": ("", "none")}
    return of.choice(choices[kind])


def functions(native: Any) -> Iterator[tuple[str, list[str]]]:
    for name in sorted(vars(native)):
        function = getattr(native, name)
        if type(function).__name__ == "builtin_function_or_method" and name != "open_cublaslt":
            kinds = arguments(function.__doc__)
            if kinds is not None:
                yield name, kinds


def shower() -> None:
    """In a process of its own: calls every function with much nonsense, and prints what is not as it should be."""
    from te_dispatch_cuda.native import load

    native = load()
    of = random.Random(20)
    for name, kinds in functions(native):
        print(f"{name} ...", flush=True)  # the last line, should the process die
        for _ in range(400):
            given = [nonsense(kind, of) for kind in kinds]
            try:
                getattr(native, name)(*given)
            except (native.CudaError, native.GemmRefused, TypeError, ImportError):
                pass  # no driver; an address below 0; no library
            except ValueError as error:
                if not re.match(r"[\w .\[\]]+: ", str(error)):
                    print(f"{name}{tuple(given)}: unnamed: {error}")
            except Exception as error:
                print(f"{name}{tuple(given)}: {type(error).__name__}: {error}")


def test_nonsense_ends_in_an_exception_that_names_an_argument(native: Any) -> None:
    here = Path(__file__)
    code = f"import sys; sys.path.insert(0, {str(here.parent)!r}); import {here.stem}; {here.stem}.shower()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    said = [line for line in done.stdout.splitlines() if not line.endswith(" ...")]
    last = done.stdout.splitlines()[-1:] if done.returncode else []
    assert (done.returncode, said[:20], last) == (0, [], []), done.stderr[-2000:]


def test_functions_are_found(native: Any) -> None:
    assert len(list(functions(native))) > 20
