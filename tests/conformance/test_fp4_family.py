# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The spaces of rotated and stochastically rounded FP4 casts, and of tiles and choices, see what they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_dispatch.conformance import checks
from te_dispatch.conformance.oracle import Oracle
from te_dispatch.conformance.selection import cases_of
from te_dispatch.conformance.space import find, rules_for
from te_dispatch.conformance.subject import subjects
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core import scopes
from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.quantizers import MXFP8Quantizer, NVFP4HadamardQuantizer, NVFP4Quantizer
from te_dispatch_torch import blocks, four_over_six, stochastic

pytestmark = pytest.mark.sampled(5)

CPU = torch.device("cpu")
ORACLE = Oracle(scopes.MANAGER)
Rotation = Callable[[torch.Tensor], torch.Tensor]

right: Rotation = blocks._rotated
draw = stochastic.Draws.rounded


def failures(operator: str, space: str) -> list[str]:
    """Of the torch backend's values, in the cases of level full."""
    subject = next(s for s in subjects(scopes.MANAGER, OPERATORS[operator], CPU, "torch"))
    found = []
    for case in cases_of(find(operator, space), "full"):
        try:
            checks.find("values").run(Trial(subject, case, ORACLE, find(operator, space)))
        except Failure as failure:
            found.append(str(failure))
    return found


def _by_other_signs(x: torch.Tensor) -> torch.Tensor:
    signs = torch.ones(x.shape[1])
    signs[::16] = -1
    return right((x.float() * signs).to(x.dtype))


def _last_block_left(x: torch.Tensor) -> torch.Tensor:
    y = right(x)
    y[:, -16:] = x[:, -16:].float()
    return y


ROTATIONS: dict[str, Rotation] = {
    "none": lambda x: x.float(),
    "not orthogonal": lambda x: right(x) * 2,
    "other signs": _by_other_signs,
    "the last block left": _last_block_left,
    "backwards": lambda x: right(x).unflatten(1, (-1, 16)).flip(-1).flatten(1),
}


@pytest.mark.parametrize(
    "operator",
    ("quantize", "quantize_dbias", "split_quantize", "multi_tensor_quantize", "activation_fwd", "rmsnorm_fwd"),
)
def test_right_rotations_pass_and_others_are_seen(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures(operator, "rotated") == []
    for name, rotation in ROTATIONS.items():
        monkeypatch.setattr(blocks, "_rotated", rotation)
        assert any("col_" in failure for failure in failures(operator, "rotated")), name


def test_draws_of_other_values_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures("quantize", "stochastic_fp4") == []

    def spaced(self: Any, y: torch.Tensor, info: Any, max_value: float) -> torch.Tensor:
        return draw(self, y * 1.25, info, max_value)

    monkeypatch.setattr(stochastic.Draws, "rounded", spaced)
    assert any("_data" in failure for failure in failures("quantize", "stochastic_fp4"))


def _blocks_apart(x: torch.Tensor, quantizer: Any, draws: Any) -> blocks.Parts:
    return blocks.cast_mxfp8(x, MXFP8Quantizer(quantizer.encoding, quantizer.common), "both", draws)


def _narrower(scaled: torch.Tensor, wanted: torch.Tensor, quantizer: Any) -> Any:
    return candidate(scaled, wanted * 0.75, quantizer)


candidate = four_over_six._candidate


@pytest.mark.parametrize(
    ("operator", "prefix"),
    [("quantize_dbias", "quantized."), ("split_quantize", "0."), ("activation_bwd", "dx_"), ("layernorm_fwd", "y_")],
)
def test_wrong_tiles_and_scales_of_choices_are_seen(
    operator: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failures(operator, "tiles_and_choices") == []
    with monkeypatch.context() as patched:
        patched.setattr(blocks, "cast_mxfp8_2d", _blocks_apart)
        found = failures(operator, "tiles_and_choices")
        assert found and all("_scale_inv" in failure and prefix in failure for failure in found)
    monkeypatch.setattr(four_over_six, "_candidate", _narrower)
    found = failures(operator, "tiles_and_choices")
    assert found and all("_scale_inv" in failure and prefix in failure for failure in found)


def test_recorded_calls_are_judged_by_these_rules() -> None:
    x = torch.randn(32, 32)
    plain = {"x": x, "quantizer": NVFP4HadamardQuantizer(), "usage": "both"}
    drawn = {"x": x, "quantizer": NVFP4Quantizer(), "usage": "both", "rng_state": torch.tensor([1, 2])}
    found = [
        rules_for("quantize", arguments) for arguments in (plain, drawn, {**plain, "rng_state": drawn["rng_state"]})
    ]
    assert [space and space.name for space in found] == ["rotated", "stochastic_fp4", "stochastic_fp4"]
