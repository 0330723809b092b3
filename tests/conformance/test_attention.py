# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention's bounds: two float64 attentions agree, mistakes are beyond the bound, and the bound is not far off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance.bounds import attention as bounds
from te_dispatch.conformance.bounds import rounding
from te_dispatch.conformance.bounds.attention_own import own
from te_dispatch.conformance.case import Case
from te_dispatch.conformance.checks import find
from te_dispatch.conformance.families import attention_rules
from te_dispatch.conformance.families.attention_rules import backward_expected, forward_expected
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.selection import cases_of
from te_dispatch.conformance.space import Judged
from te_dispatch.conformance.space import find as find_space
from te_dispatch.conformance.spread import read_like_queries, spread
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import widened
from te_dispatch.conformance.trial import Failure
from te_dispatch.core import scopes

from .trials import case_of, trial_of

FORWARD, BACKWARD = "torch.unfused_attention", "torch.unfused_attention_bwd"

CASES = (
    case_of("attention_fwd", "plain", values="large", mask="causal", dtype="fp32"),
    case_of("attention_fwd", "masked", mask="padding_causal_bottom_right", hole="nan"),
    case_of("attention_fwd", "masked", mask="arbitrary", attn_mask="b11k"),
    case_of("attention_fwd", "ragged", gaps="some", hole="nan", bias="alibi"),
    case_of("attention_fwd", "scored", bias="pre_scale", softcap="2.0", softmax="learnable"),
    case_of("attention_fwd", "scored", bias="alibi/bh", softmax="off-by-one"),
    case_of("attention_fwd", "paged", kv_lengths="given"),
)
BACKWARD_CASES = (
    case_of("attention_bwd", "masked", mask="arbitrary", attn_mask="b1qk", hole="nan"),
    case_of("attention_bwd", "packed", packing="2hd", layout="thd", heads="4/2", gaps="some"),
    case_of("attention_bwd", "plain", mask="causal", dtype="bf16"),
    case_of("attention_bwd", "scored", bias="pre_scale", dbias="yes", softmax="learnable"),
    case_of("attention_bwd", "ragged", gaps="some", bias="post_scale", dbias="yes"),
)


def _arguments(case: Case, trial: Any) -> dict[str, Any]:
    return dict(trial.space.make(case.values, Maker(case, scopes.MANAGER)))


@pytest.mark.parametrize("case", CASES + BACKWARD_CASES, ids=lambda case: case.id)
def test_the_kits_attention_is_the_references(case: Case) -> None:
    """Both are float64 and share no line; the reference rounds to fp32."""
    backward = case.operator == "attention_bwd"
    trial = trial_of(case, "reference.attention_bwd" if backward else "reference.attention_fwd")
    expected = trial.expected()
    judged = Judged(case.values, widened(_arguments(case, trial)), expected, expected)
    call = spread(judged.arguments)
    keep = torch.ones((), dtype=torch.bool).expand(call.q.shape[0], call.heads, call.queries.extent, call.keys.extent)
    found = (backward_expected if backward else forward_expected)(judged, keep)
    for path, want in expected.items():
        # The same sums in another order, in float64; larger terms may cancel: 2^-40 of the largest result.
        largest = want.nan_to_num(0, 0, 0).abs().max() if want.numel() else 0
        limit = rounding(want.nan_to_num(0, 0, 0), torch.float32) + 2.0**-40 * largest
        same = (found[path] == want) | ((found[path].double() - want.double()).abs() <= limit)
        assert bool(same.all()), path


@pytest.mark.parametrize("case", BACKWARD_CASES, ids=lambda case: case.id)
def test_explicit_gradients_are_those_of_automatic_differentiation(case: Case) -> None:
    arguments = _arguments(case, trial_of(case, BACKWARD))
    call = spread(arguments)
    dout = read_like_queries(call, arguments["dout"])
    made, _ = bounds.backward(bounds.forward(call, torch.float32), dout, 0.0)
    plain = own(call, torch.float64, dout)
    for name in ("dq", "dk", "dv"):
        one, other = getattr(made, name).value, getattr(plain, name)
        assert float((one - other).abs().max()) <= 2.0**-40 * float(other.abs().max()), name


def _with(**changed: Any) -> Any:
    return lambda right, arguments: right.call({**arguments, **changed})


def _of_result(name: str, change: Any) -> Any:
    def mistake(right: Subject, arguments: Mapping[str, Any]) -> Any:
        result = right.call(arguments)
        return result._replace(**{name: change(getattr(result, name))})

    return mistake


def _narrow_window(right: Subject, arguments: Mapping[str, Any]) -> Any:
    left, ahead = arguments["window"]
    return right.call({**arguments, "window": (left - 1, ahead)})


def _last_key_missing(right: Subject, arguments: Mapping[str, Any]) -> Any:
    shorter = arguments["cu_seqlens_kv"].clone()
    shorter[-1] -= 1
    return right.call({**arguments, "cu_seqlens_kv": shorter})


def _tf32(right: Subject, arguments: Mapping[str, Any]) -> Any:
    narrow = {n: ((arguments[n].view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for n in "qkv"}
    return right.call({**arguments, **narrow})


def _heads_interleaved(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """Query head i reads group i % g."""
    heads, groups = arguments["q"].shape[-2], arguments["k"].shape[-2]
    order = torch.arange(heads) % groups
    return right.call({**arguments, **{n: arguments[n][..., order, :] for n in ("k", "v")}})


def _fully_masked_is_nan(right: Subject, arguments: Mapping[str, Any]) -> Any:
    result = right.call(arguments)
    shape = [1] * result.out.dim()
    at = 0 if arguments["layout"] == "sbhd" else 1
    shape[at] = result.out.shape[at]
    first = (torch.arange(result.out.shape[at]) == 0).view(shape)
    return result._replace(out=torch.where(first, torch.nan, result.out))


MISTAKES = {
    "scale off by 2^-12": ("plain", {"mask": "none", "values": "normal", "dtype": "fp32", "scale": "1.0"},
                           _with(softmax_scale=1 + 2.0**-12)),
    "causal from the other corner": ("plain", {"mask": "causal", "shape": "1x15x17"},
                                     _with(mask="causal_bottom_right")),
    "TF32": ("plain", {"values": "normal", "dtype": "fp32", "mask": "none"}, _tf32),
    "lse in log2": ("plain", {"inference": "no", "mask": "none", "shape": "2x17x33"},
                    _of_result("lse", lambda x: x * 1.4427)),
    "one ulp of bf16 in fp32": ("plain", {"dtype": "fp32", "mask": "none", "shape": "2x16x16", "out": "same"},
                                _of_result("out", lambda x: x.bfloat16().float())),
    "largest logit of the masked too": ("plain", {"max_logit": "yes", "mask": "causal", "shape": "1x129x127"},
                                        _of_result("max_logit", lambda x: x + 1)),
    "window too narrow": ("masked", {"window": "7:-1", "mask": "none"}, _narrow_window),
    "mask ignored": ("masked", {"mask": "arbitrary", "shape": "2x17x33"}, _with(mask="none", attn_mask=None)),
    "NaN where nothing is seen": ("masked", {"mask": "arbitrary", "attn_mask": "qk"}, _fully_masked_is_nan),
    "last key missing": ("ragged", {"mask": "padding", "lengths": "5+3+8", "gaps": "some"}, _last_key_missing),
    "query heads dealt out": ("masked", {"heads": "4/2", "mask": "causal"}, _heads_interleaved),
    "slopes of a power of two": ("scored", {"bias": "alibi", "heads": "5/1"},
                                 _with(alibi_slopes=2.0 ** -(8 / 5 * torch.arange(1.0, 6)))),
    "bias not scaled": ("scored", {"bias": "pre_scale", "scale": "0.5", "softcap": "0"}, _with(bias_type="post_scale")),
    "no cap": ("scored", {"softcap": "2.0"}, _with(softcap=0.0)),
    "sign of the offset": ("scored", {"softmax": "learnable"},
                           lambda right, a: right.call({**a, "softmax_offset": -a["softmax_offset"]})),
    "s ignored": ("scored", {"softmax": "off-by-one"}, _with(softmax_type="vanilla")),
    "p not cast": ("eight_bit", {"s": "delayed", "mask": "none"}, _with(s_quantizer=None)),
    "pages in order": ("paged", {"page": "4"},
                       lambda right, a: right.call({**a, "page_table": a["page_table"].sort(1).values.roll(1, 0)})),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MISTAKES))
def test_mistakes_of_a_forward_are_beyond_the_bound(name: str) -> None:
    space, values, mistake = MISTAKES[name]
    case = case_of("attention_fwd", space, **values)
    implementation = "torch.varlen_attention" if case.values.get("longest") == "absent" else FORWARD
    find("values").run(trial_of(case, implementation))
    with pytest.raises(Failure):
        find("values").run(trial_of(case, implementation, mistake))


BACKWARD_MISTAKES = {
    "scale missing": _of_result("dq", lambda x: x * 4),
    "dk and dv exchanged": lambda right, a: (lambda r: r._replace(dk=r.dv, dv=r.dk))(right.call(a)),
    "gradient in bf16": _of_result("dv", lambda x: x.bfloat16().to(x.dtype)),
    "one group's heads not added": _of_result("dk", lambda x: x / 2),
    "off by 2^-10": _of_result("dq", lambda x: x + 2.0**-10),
    "TF32": _tf32,
}


@pytest.mark.parametrize("name", list(BACKWARD_MISTAKES))
def test_mistakes_of_a_backward_are_beyond_the_bound(name: str) -> None:
    case = case_of("attention_bwd", "plain", dtype="fp32", heads="4/2", values="normal")
    find("values").run(trial_of(case, BACKWARD))
    with pytest.raises(Failure):
        find("values").run(trial_of(case, BACKWARD, BACKWARD_MISTAKES[name]))


#: Three sums lie between p and dq: magnitudes are added where rounding errors cancel, in each of them. Accumulators
#: that truncate and products of three TF32 ones are allowed, which the host does not use.
NESTED = 1 / 400


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "operator,implementation,least",
    [
        ("attention_fwd", FORWARD, {"out": 0.01, "lse": 0.01}),
        ("attention_bwd", BACKWARD, {"dv": 0.01, "dq": NESTED, "dk": NESTED}),
    ],
)
def test_bounds_are_near_the_worst_error(
    operator: str, implementation: str, least: dict[str, float], dtype: str
) -> None:
    """On ordinary values: within 100 times, with exceptions that `NESTED` gives the reason of."""
    worst = dict.fromkeys(least, 0.0)
    for case in cases_of(find_space(operator, "plain"), "full"):
        if case.values["dtype"] != dtype or case.values["values"] != "normal":
            continue
        trial = trial_of(case, implementation)
        find("values").run(trial)
        for finding in trial.findings:
            if finding.path in worst:
                worst[finding.path] = max(worst[finding.path], finding.ratio)
    if dtype != "fp32":
        worst.pop("lse", None)  # 16-bit operands allow an exp that the host's is far better than
    assert all(ratio > least[path] for path, ratio in worst.items()), worst


@pytest.mark.parametrize("cast", ["none", "delayed", "current"])
@pytest.mark.parametrize("packing", ["3hd", "h3d", "2hd", "h2d"])
def test_gradients_that_lie_apart_are_not_packed(packing: str, cast: str) -> None:
    """Nor are the codes of those that are cast."""
    case = case_of("attention_bwd", "packed", packing=packing, shape="2x16x16", dqkv=cast)
    find("placement").run(trial_of(case, BACKWARD))
    with pytest.raises(Failure, match="are not packed as"):
        find("placement").run(trial_of(case, BACKWARD, _with(packing=None)))


#: Logits so far apart that probabilities reach down to fp32's smallest numbers.
_APART = Case.parse(
    "attention_bwd.scored[bias=post_scale,bias_shape=1h,bias_dtype=bf16,bias_values=normal,shape=1x33x9,softcap=0,"
    "softmax=learnable,mask=padding,layout=bshd,valid=ragged,heads=2/2,scale=default,values=large,dtype=bf16,dbias=yes]"
)


def _flushing(smallest: float, factor: str) -> Any:
    """p, or the gradient of z times the scale, is 0 below the smallest number; the scale is divided out again."""

    def backward(right: Subject, arguments: Mapping[str, Any]) -> Any:
        made = right.call(arguments)
        call = spread(widened(arguments))
        known = bounds.forward(call, torch.bfloat16)
        p = known.p.value
        scaled = p if factor == "p" else call.scale * made.dbias.double()
        lost = scaled.abs() < smallest
        assert bool((lost & (p > 0)).any())
        return made._replace(dbias=made.dbias.masked_fill(lost, 0.0))

    return backward


@pytest.mark.parametrize("factor", ["p", "p times the scale"])
def test_numbers_below_fp32_s_normal_ones_may_be_flushed(factor: str) -> None:
    find("values").run(trial_of(_APART, BACKWARD, _flushing(2.0**-126, factor)))
    with pytest.raises(Failure, match="dbias"):
        find("values").run(trial_of(_APART, BACKWARD, _flushing(2.0**-118, factor)))


@pytest.mark.parametrize("shape", ["11", "bh"])
def test_a_bias_gradient_may_come_in_the_operands_dtype(shape: str) -> None:
    """What fp16 cannot hold is then 0, whatever the bias's dtype."""
    values = {"bias": "post_scale", "bias_shape": shape, "bias_dtype": "bf16", "values": "large", "dbias": "yes"}
    case = case_of("attention_bwd", "scored", dtype="fp16", **values)

    def backward(right: Subject, arguments: Mapping[str, Any]) -> Any:
        made = right.call(arguments)
        rounded = made.dbias.half().to(made.dbias.dtype)
        assert bool(((rounded == 0) & (made.dbias != 0)).any())
        return made._replace(dbias=rounded)

    find("values").run(trial_of(case, BACKWARD, backward))
    with pytest.raises(Failure, match="dbias"):
        # A sum over batch and heads is rounded in each of its terms.
        bits = 20 if shape == "bh" else 17
        find("values").run(trial_of(case, BACKWARD, lambda right, given: _coarse(right.call(given), bits)))


def test_a_bias_gradient_may_be_rounded_times_the_scale() -> None:
    """As cuDNN does it: fp16 of dz times the scale, the scale divided out again."""
    values = {"bias": "post_scale", "bias_shape": "bh", "bias_dtype": "bf16", "values": "large", "dbias": "yes"}
    case = case_of("attention_bwd", "scored", dtype="fp16", **values)

    def backward(right: Subject, arguments: Mapping[str, Any]) -> Any:
        made = right.call(arguments)
        scale = arguments["q"].shape[-1] ** -0.5
        scaled = (made.dbias.float() * scale).half()
        assert bool(((scaled == 0) & (made.dbias.abs() > 2.0**-25)).any()), "more is lost than without the scale"
        return made._replace(dbias=(scaled.float() / scale).to(made.dbias.dtype))

    find("values").run(trial_of(case, BACKWARD, backward))


@pytest.mark.parametrize("softmax", ["learnable", "off-by-one"])
def test_what_a_row_of_infinite_logits_leaves_may_be_the_offset(softmax: str) -> None:
    """A bias of -Inf at every key leaves only the offset in the softmax's denominator."""
    values = {"bias": "post_scale", "bias_shape": "bh", "bias_values": "minus_inf", "softmax": softmax}
    case = case_of("attention_fwd", "scored", shape="1x33x9", **values)

    def hidden(arguments: dict[str, Any]) -> dict[str, Any]:
        return {**arguments, "bias": arguments["bias"].index_fill(-2, torch.tensor(3), -torch.inf)}

    def judged(shift: float) -> None:
        def forward(right: Subject, arguments: Mapping[str, Any]) -> Any:
            made = right.call(arguments)
            offset = arguments.get("softmax_offset")
            lse = made.lse.clone()
            assert bool((lse[:, :, 3] == -torch.inf).all())
            lse[:, :, 3] = shift if offset is None else offset + shift
            return made._replace(lse=lse)

        find("values").run(trial_of(case, FORWARD, forward).with_values("row", hidden))

    judged(0.0)
    with pytest.raises(Failure, match="lse"):
        judged(0.01)


def _coarse(made: Any, bits: int) -> Any:
    """dbias as fixed-point numbers of 2^-bits."""
    return made._replace(dbias=(made.dbias * 2.0**bits).round() / 2.0**bits)


def _by_tiles(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """FP8 units and a cast of e^(z - m) before the division by its sum, as kernels that work tile by tile have them."""
    made = right.call(arguments)
    call = spread(widened(arguments))
    q, k = call.q, call.per_head(call.k)
    products = q[..., :, None, :] * k[..., None, :, :]
    unit = 2.0**-13 * products.abs().amax(-1, keepdim=True)
    z = ((products / unit).trunc() * unit).sum(-1) * call.scale
    z = z.masked_fill(call.hidden, -torch.inf)
    weight = torch.exp(z - z.amax(-1, keepdim=True))
    scale = arguments["s_quantizer"].scale.double()
    cast = (weight * scale).clamp_max(448.0).to(torch.float8_e4m3fn).double() / scale
    out = cast @ call.per_head(call.v) / weight.sum(-1, keepdim=True)
    lse = z.logsumexp(-1)
    written = call.queries.write(out).reshape(made.out.shape)
    return made._replace(out=written.to(made.out.dtype), lse=None if made.lse is None else lse.to(made.lse))


@pytest.mark.parametrize("dims", ["32/32", "128/128"])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_fp8_attention_by_tiles_is_right_for_who_says_so(dims: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("attention_fwd", "eight_bit", s="delayed", mask=mask, dims=dims, dtype="fp32", out_cast="none")
    with pytest.raises(Failure):
        find("values").run(trial_of(case, FORWARD, _by_tiles))
    monkeypatch.setattr(attention_rules, "_tiled", lambda judged: True)
    find("values").run(trial_of(case, FORWARD, _by_tiles))
    with pytest.raises(Failure):  # half a step more
        coarse = lambda right, a: (lambda r: r._replace(out=r.out * 1.2))(_by_tiles(right, a))  # noqa: E731
        find("values").run(trial_of(case, FORWARD, coarse))
