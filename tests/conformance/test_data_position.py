# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Positions, heads, sequences and experts beyond the sizes that tables and grids hold are judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance.checks import find
from te_dispatch.conformance.coverage import goals_of
from te_dispatch.conformance.space import find as find_space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure

from .trials import Mistake, case_of, trial_of


def _angles_of_first(positions: int) -> Mistake:
    """A table of angles of so many positions, whose last is used for those behind."""

    def mistake(right: Subject, arguments: Mapping[str, Any]) -> Any:
        freqs = arguments["freqs"].clone()
        freqs[positions:] = freqs[min(positions, freqs.shape[0]) - 1]
        return right.call({**arguments, "freqs": freqs})

    return mistake


def _along(dim: int, count: int) -> Mistake:
    """Nothing done from a place of a dimension on."""

    def mistake(right: Subject, arguments: Mapping[str, Any]) -> Any:
        result = right.call(arguments)
        x = arguments["x"] if "x" in arguments else arguments["dy"]
        rest = (slice(None),) * dim + (slice(count, None),)
        result[rest] = x[rest]
        return result

    return mistake


def _last_sequences(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """Bounds of 128 sequences."""
    result = right.call(arguments)
    end = int(arguments["cu_seqlens"][128])
    result[end:] = arguments["x"][end:]
    return result


def _experts_of(count: int) -> Mistake:
    """A histogram of so many experts: those beyond count with the last."""

    def mistake(right: Subject, arguments: Mapping[str, Any]) -> Any:
        return right.call({**arguments, "indices": arguments["indices"].clamp_max(count - 1)})

    return mistake


def _rows(name: str | None, count: int) -> Mistake:
    def mistake(right: Subject, arguments: Mapping[str, Any]) -> Any:
        result = right.call(arguments)
        found = result if name is None else getattr(result, name)
        found[count:] = 0
        return result

    return mistake


_ROPE = {"dtype": "fp32", "values": "normal", "rotated": "all", "offsets": "no", "angles": "small"}
_MOE = {"dropped": "0.0", "capacity": "none", "values": "normal", "dtype": "fp32", "top_k": "2"}

MISTAKES: dict[str, tuple[str, str, dict[str, str], Mistake]] = {
    "positions past 4,096": ("rope_fwd", "dense", {**_ROPE, "shape": "4211x1x2x8"}, _angles_of_first(4096)),
    "positions past 65,535": ("rope_bwd", "dense", {**_ROPE, "shape": "65549x1x1x2"}, _angles_of_first(1 << 16)),
    "far offsets": ("rope_fwd", "dense", {**_ROPE, "offsets": "far", "shape": "17x2x3x32"}, _angles_of_first(1 << 16)),
    "heads past the 64th": (
        "rope_fwd", "dense", {**_ROPE, "layout": "sbhd", "shape": "5x1x67x16"}, _along(2, 64)
    ),
    "batches past the 1,024th": (
        "rope_fwd", "dense", {**_ROPE, "layout": "sbhd", "shape": "3x1031x1x4"}, _along(1, 1024)
    ),
    "features past the 512th": (
        "rope_fwd", "dense", {**_ROPE, "layout": "sbhd", "shape": "3x2x2x1024"}, _along(3, 512)
    ),
    "sequences past the 128th": ("rope_fwd", "thd", {**_ROPE, "lengths": "3*129"}, _last_sequences),
    "packed positions past 4,096": ("rope_fwd", "thd", {**_ROPE, "lengths": "4211+3"}, _angles_of_first(4096)),
    "experts past 256": ("moe_permute", "plain", {**_MOE, "cast": "plain", "experts": "257", "shape": "4099x16"},
                         _experts_of(256)),
    "experts past 512": ("moe_permute", "plain", {**_MOE, "cast": "plain", "experts": "600", "shape": "4099x16"},
                         _experts_of(512)),
    "experts past 1,024": ("moe_permute", "plain", {**_MOE, "cast": "plain", "experts": "1100", "shape": "4099x16"},
                           _experts_of(1024)),
    "tokens past 65,535": ("moe_unpermute", "plain", {**_MOE, "shape": "65549x2", "probs": "fp32"},
                           _rows(None, 1 << 16)),
    "features of a token past 8,192": (
        "moe_unpermute_bwd", "plain", {**_MOE, "shape": "5x8209", "probs": "fp32", "grads": "fp32"},
        lambda right, a: (lambda r: r._replace(dinput=torch.cat((r.dinput[:, :8192], r.dinput[:, 8192:] * 0), 1)))(
            right.call(a)
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_are_found(name: str) -> None:
    operator, space, values, mistake = MISTAKES[name]
    case = case_of(operator, space, **values)
    find("values").run(trial_of(case, f"torch.{operator}"))
    with pytest.raises(Failure):
        find("values").run(trial_of(case, f"torch.{operator}", mistake))


def test_tables_of_experts_meet_choices_beyond_them() -> None:
    """A size alone would do nothing where its case drops every choice, or has one token."""
    fixed = [dict(goal) for goal in goals_of(find_space("moe_permute", "plain")) if len(goal) == 3]
    assert {"experts": "257", "shape": "4099x16", "dropped": "0.0"} in fixed
