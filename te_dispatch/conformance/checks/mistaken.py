# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Right calls with one thing changed in one argument, whatever the operator: where the oracle refuses such a call, so
does every implementation.

What an operator's own contract refuses beyond that has cases (`te_dispatch.conformance.families.refused`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.memoized import call_again, require_operands_freed
from te_dispatch.conformance.checks.refusing import require_refusal
from te_dispatch.conformance.checks.sizes import serves
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import mapped, moved
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.encodings import ENCODINGS, FP8_ENCODINGS
from te_dispatch.numerics.quantized import SCALINGS, Quantized
from te_dispatch.numerics.quantizers import QUANTIZERS, CurrentQuantizer, MXFP8Quantizer, Quantizer
from te_dispatch.ops.quantize_forms import SCALE_LAYOUTS

#: What a record's labels may be.
_WORDS = {"scaling": SCALINGS, "encoding": tuple(ENCODINGS), "scale_layout": SCALE_LAYOUTS}


def mistaken(trial: Trial) -> None:
    """The changed calls that the oracle refuses raise a `ValueError` that names the argument, and write nothing; and
    the right call is served behind them."""
    _changed(trial)
    other = _with_other_out(trial)
    if other is not None:
        try:
            _changed(other)
        except Failure as failure:
            raise Failure(f"with out {other.case.values['out']}: {failure}") from failure


def _with_other_out(trial: Trial) -> Trial | None:
    """The same case with `out` given instead of allocated, or the other way round. A refused call must leave a given
    `out` unchanged, and a list of given results also tells how many are expected. None where there is no such case."""
    for axis in trial.space.axes:
        if axis.name != "out" or not {"new", "given"} <= set(axis.values):
            continue
        values = {**trial.case.values, "out": "given" if trial.case.values["out"] == "new" else "new"}
        if trial.space.valid(values):
            other = trial.with_axes(values)
            return other if serves(other) else None
    return None


def _changed(trial: Trial) -> None:
    given = trial.arguments()
    # With 0 for all that says where something is: what only such contents show, which lie on the device, is no mistake.
    blank = {name: mapped(value, _blank) for name, value in given.items()}
    oracles = [oracle for oracle in trial.oracle.subjects(trial.space.operator) if not _refuses(oracle, blank)]
    tried, skipped, refused = 0, 0, None
    for name, value in given.items():
        for what, change in _mistakes(value):
            wrong = {**given, name: change}
            without = {**blank, name: mapped(change, _blank)}
            if not any(_refuses(oracle, without) and _refuses(oracle, wrong) for oracle in oracles):
                continue
            tried += 1
            arguments = moved(wrong, trial.device)
            try:
                trial.claim(arguments)
            except Exception:  # not claimed, or the facts of what is malformed cannot be read
                skipped += 1
                continue
            try:
                require_refusal(trial, arguments, ValueError, name)
            except Declined:
                continue
            except Failure as failure:
                raise Failure(f"with {what} {name}: {failure}") from failure
            refused = refused or wrong
    trial.notes.append(f"{tried} changed calls that the oracle refuses")
    if skipped:
        trial.notes.append(f"{skipped} of them are refused before an implementation is chosen, and were not made")
    if refused is not None:
        make = functools.partial(trial.on_device, refused)
        require_operands_freed(trial, make, "operands of calls that were refused")
    if tried:
        call_again(trial, moved(given, trial.device), "behind calls that it had refused: ")


def _blank(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.dtype in (torch.int32, torch.int64) else x


def _refuses(oracle: Subject, arguments: Arguments) -> bool:
    """Whether an oracle raises the error of a wrong call: another of its errors says nothing of the contract."""
    try:
        oracle.call(moved(arguments, "cpu"))
    except ValueError:
        return True
    except Exception:  # of a malformed argument anything may be raised
        return False
    return False


def _mistakes(value: Any) -> Iterator[tuple[str, Any]]:
    """Words for a change, and the changed argument."""
    if value is not None:
        yield "None as", None
    if isinstance(value, torch.Tensor):
        yield "a number as", 1.0
        yield "a list of one as", [value]
        yield from _of_tensor(value)
    elif isinstance(value, (list, tuple)) and value:
        yield "one item too many in", [*value, value[-1]]
        yield "one item too few in", list(value[:-1])
        if all(type(item) is int for item in value):
            yield "a larger last item of", [*value[:-1], value[-1] + 1]
            yield "a smaller last item of", [*value[:-1], value[-1] - 1]
            yield from _of_equal_sum(value)
        elif isinstance(value[-1], torch.Tensor):
            for what, change in _of_tensor(value[-1]):
                yield f"{what} last item of", [*value[:-1], change]
        elif type(value[-1]) in QUANTIZERS.values() and len(value) > 1:
            for other in _other_quantizers(value[-1]):
                yield f"a {other.kind} quantizer to {other.encoding} as last item of", [*value[:-1], other]
    elif isinstance(value, Quantized):
        yield from _of_record(value)
    elif isinstance(value, str):
        yield "an unknown word as", f"{value}x"
        yield "a number as", 1
    elif isinstance(value, float):
        yield "a word as", "1.0"
        for number in (-1.0, 0.0, 1.0, 2.0, math.inf, math.nan):
            yield f"{number:g} as", number
    elif type(value) is int:
        yield "a fraction as", value + 0.5
        for number in (-1, 0):
            yield f"{number} as", number


def _of_equal_sum(value: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
    """Integers that add up to as much: where a sum alone is compared, nothing is wrong with them."""
    if len(value) > 1:
        first, *between, last = value
        if last:
            yield "all of the last item added to the first of", [first + last, *between, 0]
        yield "a negative last item, made up for in the first, of", [first + last + 1, *between, -1]


def _other_quantizers(value: Quantizer) -> Iterator[Quantizer]:
    """One of another kind, and one of another encoding, which a list of one kind and encoding must not end in."""
    yield (
        CurrentQuantizer(value.encoding)
        if value.encoding in FP8_ENCODINGS and value.kind != "current"
        else MXFP8Quantizer()
    )
    if value.encoding in FP8_ENCODINGS:
        yield dataclasses.replace(value, encoding="e5m2" if value.encoding == "e4m3fn" else "e4m3fn")


def _of_record(x: Quantized) -> Iterator[tuple[str, Quantized]]:
    """Records one of whose parts is not as the others say."""
    for name in Quantized.__slots__:
        value = getattr(x, name)
        changes: list[tuple[str, Any]] = []
        if isinstance(value, torch.Tensor):
            changes += _of_tensor(value)
        elif isinstance(value, str):
            changes.append(("an unknown word as", f"{value}x"))
            changes += ((f"{word} as", word) for word in _WORDS.get(name, ()) if word != value)
        elif isinstance(value, tuple) and value:
            changes.append(("a larger last item of", (*value[:-1], value[-1] + 1)))
        for what, change in changes:
            wrong = copy.copy(x)
            setattr(wrong, name, change)
            yield f"{what} {name} of", wrong


def _of_tensor(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    for dtype in (torch.int32, torch.float64, torch.uint8):
        if x.dtype != dtype:
            # The same numbers, where there are such: what only the contents of a tensor show is no mistake here.
            yield f"{dtype} for {x.dtype} as", x.to(dtype)
    yield "a dimension too many in", x.unsqueeze(0)
    for dim in range(x.dim()):
        if x.shape[dim]:
            # The last again: cumulated lengths stay sorted, and the oracle and a kernel, which may not read them
            # without a synchronization, find the same thing wrong.
            yield f"a longer dimension {dim} of", torch.cat((x, x.narrow(dim, x.shape[dim] - 1, 1)), dim)
            yield f"a shorter dimension {dim} of", x.narrow(dim, 0, x.shape[dim] - 1).contiguous()


def _applies(subject: Subject, space: Space) -> str | None:
    if subject.operator.backward and space.forward is not None:
        return "what its forward saved belongs to the right call"
    return None if space.oracle is None else "the oracle of this space judges no arguments"


CHECKS = (Check("mistaken", mistaken, _applies, 1, 2, "the errors of calls with one argument changed", of_forms=True),)
