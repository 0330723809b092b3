# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What comes later must not be seen: earlier results keep their bits when later tokens, or later rows, become others.

With one exception, which is measured and reported: a scale that all tokens share (current scaling) is made of the later
ones too, and moves the codes of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.memory import same_bits
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import moved
from te_dispatch.conformance.trial import Failure, Trial

#: Later rows become so many times themselves: enough to move any maximum that they take part in.
_CHANGE = -4.0
#: The same of rows that have nothing to do with the earlier ones: enough to be beyond what a fast path is for.
_ROWS_CHANGE = -256.0


def later_tokens(trial: Trial) -> None:
    """`Space.later` of a causal call."""
    assert trial.space.later is not None
    given = trial.arguments()
    later = trial.space.later(trial.case.values, moved(given, "cpu"), Maker(trial.case, trial.subject.manager))
    one, other = _run(trial, given)[0], _run(trial, later.arguments)[0]
    for path, earlier in later.earlier.items():
        if path in one:
            _compare(trial, path, one[path], other[path], earlier, later.shared)


def later_rows(trial: Trial) -> None:
    """Calls of independent rows (`Space.batch`)."""
    assert trial.space.batch is not None
    given = trial.arguments()
    half = trial.space.batch(trial.arguments())
    changed = moved(given, "cpu")
    for name, value in changed.items():
        rows = getattr(half.get(name), "shape", (0,))[:1]
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() and rows != value.shape[:1]:
            value[rows[0] :] *= _ROWS_CHANGE
    (one, _), (other, _), (part, _) = (_run(trial, arguments) for arguments in (given, changed, half))
    for path, of_half in part.items():
        rows = of_half.shape[0] if of_half.dim() else 0
        if of_half.shape[1:] != one[path].shape[1:] or rows == one[path].shape[0] or path.endswith("col_data"):
            continue  # a sum over rows, or a scale of them all
        earlier = torch.zeros(one[path].shape, dtype=torch.bool)
        earlier[:rows] = True
        _compare(trial, path, one[path], other[path], earlier, _shared(path, one, other))


def _shared(path: str, one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether a record's rows share scales, and those are others now."""
    scale = path.replace("row_data", "row_scale_inv")
    if not path.endswith(("row_data", "row_scale_inv")) or scale not in one:
        return False
    data = one[path.replace("row_scale_inv", "row_data")]
    rows = data.numel() // max(data.shape[-1], 1)
    tensor = path.replace("row_data", "global_scale_inv").replace("row_scale_inv", "global_scale_inv")
    of_all = one[scale].shape[0] != rows or tensor in one
    return of_all and any(not same_bits(one[name], other[name]) for name in (scale, tensor) if name in one)


def _run(trial: Trial, arguments: Arguments) -> tuple[dict[str, torch.Tensor], Any]:
    there = trial.on_device(arguments)
    trial.claim(there)
    result = trial.call(there)
    synchronize(trial)
    return {path: tensor.detach().cpu().clone() for path, tensor in trial.results(result, there).items()}, result


def _compare(
    trial: Trial, path: str, one: torch.Tensor, other: torch.Tensor, earlier: torch.Tensor, shared: bool
) -> None:
    chosen = earlier.expand(one.shape)
    a, b = one[chosen], other[chosen]
    if same_bits(a, b):
        return
    moved_by, largest = (
        float((a.double() - b.double()).abs().nan_to_num().max()),
        float(a.double().abs().nan_to_num().max()),
    )
    if not shared:
        raise Failure(
            f"{path}: what comes earlier moved by up to {moved_by:.3g} (of {largest:.3g}) when what comes later was "
            f"changed ({int((a != b).sum())} of {a.numel()} elements)"
        )
    of = "codes" if one.dtype == torch.uint8 else "values"
    trial.notes.append(
        f"{path}: later tokens moved earlier {of} through a shared scale, {int((a != b).sum())} of {a.numel()}, "
        f"by up to {moved_by:.3g}, the largest being {largest:.3g}"
    )


def _has_later(subject: Subject, space: Space) -> str | None:
    return None if space.later is not None else "not causal"


def _has_rows(subject: Subject, space: Space) -> str | None:
    return None if space.batch is not None else "a call has no independent rows"


CHECKS = (
    Check("later_tokens", later_tokens, _has_later, 2, None, "causality: what later tokens change in earlier outputs"),
    Check("later_rows", later_rows, _has_rows, 1, 4, "causality: what later rows change in earlier results"),
)
