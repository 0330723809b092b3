# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The quantize family's spaces see what they are for: wrong casts, wrong bookkeeping, and calls the reference cannot
serve (sampled, stochastic)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_dispatch.conformance import checks, encoding
from te_dispatch.conformance.case import Case
from te_dispatch.conformance.decoding import decode
from te_dispatch.conformance.families.quantize_huge import places
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.oracle import Oracle
from te_dispatch.conformance.rules import Bitwise, judge
from te_dispatch.conformance.selection import cases_of
from te_dispatch.conformance.space import Space, find, spaces
from te_dispatch.conformance.subject import Claim, Subject, subjects
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core import scopes
from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.encodings import ENCODINGS
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import DelayedQuantizer

pytestmark = pytest.mark.sampled(6)

Arguments = dict[str, Any]
Call = Callable[[Arguments], Any]

CPU = torch.device("cpu")
ORACLE = Oracle(scopes.MANAGER)


class Changed(Subject):
    """The torch backend's implementation of an operator, with something done differently."""

    def __init__(self, operator: str, change: Callable[[Call, Arguments], Any]) -> None:
        own = next(s for s in subjects(scopes.MANAGER, OPERATORS[operator], CPU, "torch"))
        super().__init__(own.manager, own.operator, own.id, own.implementation, CPU)
        object.__setattr__(self, "change", change)

    def claim(self, arguments: Any) -> Claim:
        return Claim()

    def call(self, arguments: Any) -> Any:
        return self.change(super().call, arguments)  # type: ignore[attr-defined]


def _failures(subject: Subject, space: Space, check: str = "values", most: int = 1) -> list[str]:
    """Messages of the first failures among the cases of level full."""
    found: list[str] = []
    for case in cases_of(space, "full"):
        try:
            checks.find(check).run(Trial(subject, case, ORACLE, space))
        except Failure as failure:
            found.append(str(failure))
            if len(found) == most:
                break
    return found


# -- wrong implementations --------------------------------------------------------------------------------------------


def _with_x(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Call, Arguments], Any]:
    return lambda call, arguments: call({**arguments, "x": change(arguments["x"])})


def _after(change: Callable[[Any, Arguments], None]) -> Callable[[Call, Arguments], Any]:
    def changed(call: Call, arguments: Arguments) -> Any:
        result = call(arguments)
        change(result, arguments)
        return result

    return changed


def _negative_nan(result: Quantized, arguments: Arguments) -> None:
    for data in (result.row_data, result.col_data):
        if data is not None and result.encoding in ("e4m3fn", "e5m2"):
            data[data == 0x7F] = 0xFF


def _infinity_kept(result: Quantized, arguments: Arguments) -> None:
    x = arguments["x"]
    if result.encoding == "e5m2" and result.row_data is not None:
        result.row_data[x == torch.inf] = 0x7C


def _not_transposed(result: Quantized, arguments: Arguments) -> None:
    if result.row_data is not None and result.col_data is not None and result.scaling != "mxfp8":
        m, k = result.rows(), result.shape[-1]
        result.col_data.copy_(result.row_data.reshape(k, m)) if result.scaling == "tensor" else None


def _last_row_unscaled(result: Quantized, arguments: Arguments) -> None:
    if result.row_scale_inv is not None and result.row_scale_inv.numel() > 1:
        result.row_scale_inv.view(-1)[-1] = 1


def _amax_forgotten(call: Call, arguments: Arguments) -> Any:
    quantizer = arguments["quantizer"]
    before = None if quantizer.amax is None else quantizer.amax.clone()
    result = call(arguments)
    if before is not None:
        quantizer.amax.copy_(before)
    return result


def _amax_overwritten(call: Call, arguments: Arguments) -> Any:
    if arguments["quantizer"].amax is not None:
        arguments["quantizer"].amax.zero_()
    return call(arguments)


def _flag_ignored(call: Call, arguments: Arguments) -> Any:
    return call({**arguments, "noop_flag": None})


def _scale_followed(result: Quantized, arguments: Arguments) -> None:
    scale = arguments["quantizer"].scale
    if arguments.get("out") is None and float(scale) == 1.0 and result.row_scale_inv is not None:
        result.row_scale_inv = scale
        result.col_scale_inv = None if result.col_scale_inv is None else scale


def _both_copies(call: Call, arguments: Arguments) -> Any:
    """Writes the copy of `out` that the usage leaves alone."""
    out = arguments.get("out")
    whole = out is not None and out.row_data is not None and out.col_data is not None
    return call({**arguments, "usage": "both"} if whole else arguments)


def _changed_quantizer(**changes: Any) -> Callable[[Call, Arguments], Any]:
    import dataclasses

    def changed(call: Call, arguments: Arguments) -> Any:
        return call({**arguments, "quantizer": dataclasses.replace(arguments["quantizer"], **changes)})

    return changed


def _flushed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < torch.finfo(x.dtype).tiny, torch.zeros_like(x), x)


def _bf16_product(call: Call, arguments: Arguments) -> Any:
    """Scales in the operand's dtype, then casts with scale 1."""
    import dataclasses

    x, quantizer = arguments["x"], arguments["quantizer"]
    ones = dataclasses.replace(quantizer, scale=torch.ones(1), amax=None)
    inverse = call({**arguments, "out": None, "noop_flag": None})
    result = call(
        {**arguments, "x": x * quantizer.scale.to(x.dtype), "quantizer": ones, "out": None, "noop_flag": None}
    )
    result.row_scale_inv, result.col_scale_inv = inverse.row_scale_inv, inverse.col_scale_inv
    return result


WRONG: dict[str, tuple[str, str, Callable[[Call, Arguments], Any]]] = {
    "nan_sign_kept": ("quantize", "delayed", _after(_negative_nan)),
    "inf_not_saturated": ("quantize", "delayed", _after(_infinity_kept)),
    "copy_not_transposed": ("quantize", "delayed", _after(_not_transposed)),
    "amax_forgotten": ("quantize", "delayed", _amax_forgotten),
    "amax_overwritten": ("quantize", "delayed", _amax_overwritten),
    "flag_ignored": ("quantize", "delayed", _flag_ignored),
    "other_copy_written": ("quantize", "delayed", _both_copies),
    "scale_inv_follows_scale": ("quantize", "delayed", _after(_scale_followed)),
    "product_in_bf16": ("quantize", "delayed", _bf16_product),
    "subnormals_flushed": ("quantize", "current", _with_x(_flushed)),
    "epsilon_ignored": ("quantize", "current", _changed_quantizer(epsilon=0.0)),
    "power_of_two_ignored": ("quantize", "current", _changed_quantizer(power_of_two=False)),
    "common_ignored": ("quantize", "nvfp4", _changed_quantizer(common=False)),
    "given_amax_ignored": ("quantize", "nvfp4", lambda call, arguments: call({**arguments, "amax": None})),
    "last_scale_wrong": ("quantize", "mxfp8", _after(_last_row_unscaled)),
    "one_d_for_two_d": ("quantize", "nvfp4", _changed_quantizer(two_d=False)),
    "fp16_in_between": ("quantize", "patterns", _with_x(lambda x: x.half())),
    "dbias_in_bf16": (
        "quantize_dbias", "plain",
        _after(lambda result, a: result.dbias.copy_(a["x"].reshape(-1, a["x"].shape[-1]).bfloat16().sum(0))),
    ),
    "dbias_without_last_row": (
        "quantize_dbias", "plain",
        _after(lambda result, a: result.dbias.copy_(a["x"].reshape(-1, a["x"].shape[-1])[:-1].float().sum(0))),
    ),
    "usage_row_read": (
        "dequantize", "plain", lambda call, a: call(a) if a["x"].col_data is None else call(a).flip(-1),
    ),
    "margin_ignored": ("update_delayed_scales", "plain", lambda call, a: call({**a, "margin": 0})),
    "algorithm_ignored": ("update_delayed_scales", "plain", lambda call, a: call({**a, "algorithm": "max"})),
    "count_ignored": ("convert_encoding", "plain", lambda call, a: call({**a, "count": None})),
    "start_ignored": ("partial_amax", "plain", lambda call, a: call({**a, "start": 0})),
    "padding_kept": ("unpad_rows", "plain", lambda call, a: a["x"][: sum(a["splits"])].clone()),
    "padding_not_zero": ("pad_rows", "plain", _after(lambda result, a: result[-1:].fill_(1))),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_implementations_fail(name: str) -> None:
    operator, space, change = WRONG[name]
    assert _failures(Changed(operator, change), find(operator, space)), f"{name} passes every case of level full"


def _own_amax(call: Call, arguments: Arguments) -> Any:
    """Casts with quantizers that record into memory of their own."""
    import dataclasses

    given = arguments["quantizers"]
    copies = [dataclasses.replace(q, amax=None) if isinstance(q, DelayedQuantizer) else q for q in given]
    return call({**arguments, "quantizers": copies})


@pytest.mark.parametrize("operator", ["split_quantize", "multi_tensor_quantize"])
def test_the_amaxes_of_several_quantizers_are_judged(operator: str) -> None:
    found = _failures(Changed(operator, _own_amax), find(operator, "plain"))
    assert found and "argument:quantizers." in found[0] and ".amax" in found[0]


def _one_too_many(call: Call, arguments: Arguments) -> Any:
    """Writes a byte behind the end of memory that the caller gave."""
    result = call(arguments)
    out = arguments["out"]
    end = out.storage_offset() + out.numel()
    if out.numel() and out.untyped_storage().nbytes() > end:
        torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage(), end, (1,), (1,)).fill_(3)
    return result


def test_a_write_past_the_end_of_a_given_result_is_seen() -> None:
    found = _failures(Changed("partial_cast", _one_too_many), find("partial_cast", "plain"))
    assert found and "wrote 1 bytes past the end of out" in found[0]


# -- calls that must raise --------------------------------------------------------------------------------------------


def _raising(call: Call, arguments: Arguments) -> Any:
    if arguments["overflow"] == "error":
        raise ValueError("x: no such code")
    return call(arguments)


def _counting_before(call: Call, arguments: Arguments) -> Any:
    arguments["count"].add_(1)
    raise ValueError("x: no such code")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_raising, None),
        (lambda call, arguments: call({**arguments, "overflow": "saturate"}), "returned, where the contract asks"),
        (_counting_before, "had changed count"),
    ],
)
def test_an_error_that_the_contract_asks_for(change: Any, message: str | None) -> None:
    found = _failures(Changed("convert_encoding", change), find("convert_encoding", "overflow"), "raises")
    assert (not found) if message is None else message in found[0]


# -- what the reference cannot serve ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ENCODINGS))
@pytest.mark.parametrize("common", [False, True])
def test_the_kits_encoder_agrees_with_the_references(name: str, common: bool) -> None:
    reference = pytest.importorskip("te_dispatch_reference.encodings")
    found = ENCODINGS[name]
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(1))
    points = decode(torch.arange(2**found.bits, dtype=torch.uint8), name).float()
    ordered = points[points.isfinite()].sort().values
    middles = (ordered[1:] + ordered[:-1]) / 2
    special = torch.cat((points, middles, torch.nextafter(middles, middles + 1), torch.nextafter(middles, middles - 1)))
    y = torch.cat((patterns.to(torch.int32).view(torch.float32), special))
    limit = found.common_max if common else found.max
    keeps = found.negative_zero and not common
    expected = torch.from_numpy(reference.encode(y.numpy(), found, limit, keeps))
    assert torch.equal(encoding.nearest(y, name, limit, keeps), expected)
    inner, outer = encoding.neighbours(y, name, limit, keeps)
    assert bool(((expected == inner) | (expected == outer)).all())


_HUGE = [space for space in spaces() if space.name == "huge" and OPERATORS[space.operator].family == "quantize"]


@pytest.mark.parametrize("space", _HUGE, ids=lambda space: space.id)
def test_sampled_spaces_on_a_small_shape(space: Space) -> None:
    """The oracle of samples agrees with torch, which agrees with the reference; and an error at the end is seen."""

    def spoil(result: Any, arguments: Arguments) -> None:
        tensor = result if isinstance(result, torch.Tensor) else result.row_data
        tensor.view(-1)[-1] = 3

    for plain in cases_of(space, "soak"):
        case = Case.of(space.operator, space.name, {**plain.values, "shape": "131x261"})
        for change, wrong in ((lambda call, a: call(a), False), (_after(spoil), True)):
            trial = Trial(Changed(space.operator, change), case, Oracle(scopes.MANAGER), space)
            arguments = trial.on_device()
            result = trial.call(arguments)
            if wrong:
                with pytest.raises(Failure, match="elements are wrong"):
                    trial.judge(result, arguments)
            else:
                trial.judge(result, arguments)


def test_samples_lie_on_both_sides_of_every_edge() -> None:
    count = 2**32 + 1000
    found = places(count)
    assert {0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, count - 1} <= set(found.tolist())
    assert bool((found[1:] > found[:-1]).all()) and int(found[-1]) == count - 1


def _drawn(step: int) -> Callable[[Call, Arguments], Any]:
    """Stochastic rounding: one of the two neighbours by chance; with `step` 1, a code further away from zero."""

    def cast(call: Call, arguments: Arguments) -> Quantized:
        x, quantizer, state = arguments["x"], arguments["quantizer"], arguments["rng_state"]
        nearest = call({**arguments, "rng_state": None})
        ends = encoding.neighbours(
            x.float() * quantizer.scale, quantizer.encoding, quantizer.max_value, quantizer.keeps_negative_zero
        )
        generator = torch.Generator().manual_seed(int(state[0]))
        codes = torch.where(torch.rand(x.shape, generator=generator) < 0.5, *ends)
        special = (x == 0) | ~x.isfinite() | ((codes & 0x7F) >= ENCODINGS[quantizer.encoding].max_code)
        codes = torch.where(special, codes, codes + step)
        return Quantized(
            codes, None, nearest.row_scale_inv, None, quantizer.encoding, "tensor", CANONICAL_SCALES, tuple(x.shape),
            x.dtype, x.device,
        )  # fmt: skip

    return cast


def test_stochastic_rounding_takes_one_of_two_neighbours() -> None:
    space = find("quantize", "stochastic")
    for case in cases_of(space, "full"):
        for step in (0, 2):
            trial = Trial(Changed("quantize", _drawn(step)), case, ORACLE, space)
            arguments = trial.on_device()
            if step and arguments["x"].numel():
                with pytest.raises(Failure, match="row_data"):
                    trial.judge(trial.call(arguments), arguments)
            else:
                trial.judge(trial.call(arguments), arguments)


# -- the rule ---------------------------------------------------------------------------------------------------------


def test_a_nan_is_any_nan_where_it_is_computed_and_the_same_where_it_is_moved() -> None:
    bits = torch.tensor([0x7FC0, 0x7FC1 - 2**16, 0x7F81], dtype=torch.int32).to(torch.int16)
    one, other = bits.view(torch.bfloat16), bits.flip(0).view(torch.bfloat16)
    assert bool(one.isnan().all())
    assert judge("y", Bitwise(), one, other).passed
    assert not judge("y", Bitwise(moved=True), one, other).passed
    assert not judge("y", Bitwise(), one, torch.ones_like(one)).passed
    zeros = torch.tensor([0.0, -0.0])
    assert not judge("y", Bitwise(), zeros, -zeros).passed


def test_cases_have_data_of_their_own() -> None:
    first, second = cases_of(find("quantize", "delayed"), "full")[:2]
    x = [Maker(case, scopes.MANAGER).tensor(64) for case in (first, second)]
    assert not torch.equal(*x)
