# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""How attention is judged: every element within the largest of three limits.

- the bound of `te_dispatch.conformance.bounds.attention`;
- twice PyTorch's own error in the operands' dtype (`bounds.attention_own`), where nothing is cast or dropped;
- of the output: 2 ulp at the row's largest magnitude.

A kernel with the trait ``flash`` that casts p works tile by tile: it casts e^(z - m), m the largest logit so far, and
divides by the sum afterwards. Its codes are those of other numbers than p, so each weight is only known to half a step
of the encoding. cuDNN's exponential errs by some 2^-12 besides, which its amax shows.

Rows that belong to no sequence (behind the valid ones of a padded batch, between those of a thd tensor) are fully
masked ones: output 0, log-sum-exp -Inf, gradient 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_dispatch.conformance.bounds import U32, UNIT
from te_dispatch.conformance.bounds import attention as bounds
from te_dispatch.conformance.bounds.attention_own import Own, own, twice
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.casting import cast_rules, through
from te_dispatch.conformance.rules import Instead, Rule, Within
from te_dispatch.conformance.space import Arguments, Judged
from te_dispatch.conformance.spread import Spread, read_like_queries, spread
from te_dispatch.numerics.encodings import encoding
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import DelayedQuantizer, Quantizer


def _dtype(q: Any) -> torch.dtype:
    """What operands are multiplied as: values of records are no 16-bit numbers."""
    found: torch.dtype = torch.float32 if isinstance(q, Quantized) else q.dtype
    return found


def _at_least(known: Known, limit: torch.Tensor) -> Known:
    """Where there is something to compute: zeros that must be 0 stay exact."""
    return Known(known.value, torch.where(known.error > 0, torch.maximum(known.error, limit), known.error))


def _two_ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """At the row's largest magnitude, NaN left out: an ulp is 2 u 2^floor(log2 x)."""
    if not value.shape[-1]:
        return value
    largest = value.abs().nan_to_num(0.0, torch.inf).amax(-1, keepdim=True)
    return 2 * 2 * UNIT[dtype] * torch.exp2(largest.log2().floor())


def _laid(call: Spread, known: Known, shape: tuple[int, ...], keys: bool = False) -> Known:
    """As the operator lays out queries, or keys and values."""
    side = call.keys if keys else call.queries
    return Known(side.write(known.value).reshape(shape), side.write(known.error).reshape(shape))


def compare_with_own(arguments: Mapping[str, Any]) -> bool:
    """Whether PyTorch's operations can say anything of the call."""
    casts = (arguments.get(name) for name in ("s_quantizer", "dp_quantizer"))
    return not isinstance(arguments["q"], Quantized) and not any(casts) and not arguments.get("dropout_p")


#: Relative error of the exponential that a tiled FP8 kernel may use.
_TILED_EXP = 2.0**-10


def _tiled(judged: Judged) -> bool:
    return "flash" in judged.traits


def _left_by(quantizer: Quantizer, known: Known, tiled: bool) -> Known:
    """What a cast of p or of its gradient leaves."""
    found = through(known, quantizer)
    if not tiled or not isinstance(quantizer, DelayedQuantizer):
        return found
    kind, scale = encoding(quantizer.encoding), quantizer.scale.double()
    step = 2.0 ** -(kind.mantissa_bits + 1) * known.largest + kind.min_subnormal / 2 / scale
    # The oracle's code is within a step of the number, and so is the kernel's.
    error = torch.where(known.largest > 0, known.error + 2 * step + _TILED_EXP * known.largest, 0.0)
    return Known(found.value, torch.maximum(found.error, error))


def forward_known(
    arguments: Mapping[str, Any],
    keep: torch.Tensor | None = None,
    dout: torch.Tensor | None = None,
    tiled: bool = False,
) -> tuple[bounds.Forward, Own | None]:
    """The forward of a call of either operator, casts of p included, and PyTorch's own."""
    call = spread(arguments)
    dtype = _dtype(arguments["q"])
    made = bounds.forward(call, dtype, keep, tiled and isinstance(arguments["q"], Quantized))
    quantizer = arguments.get("s_quantizer")
    if quantizer is not None:
        made = bounds.with_weights(made, _left_by(quantizer, _before_cast(made), tiled))
    if not compare_with_own(arguments):
        return made, None
    return made, own(call, dtype, None if dout is None else read_like_queries(call, dout))


def _before_cast(made: bounds.Forward) -> Known:
    """p after dropout, as s_quantizer sees it."""
    return bounds.kept(made.p, made.keep, made.call.dropout_p)


def _cast_of_p(made: bounds.Forward, arguments: Mapping[str, Any], judged: Judged) -> dict[str, Rule]:
    quantizer = arguments.get("s_quantizer")
    if quantizer is None:
        return {}
    p = _before_cast(made)
    if _tiled(judged):
        p = Known(p.value, p.error + _TILED_EXP * p.largest)
    return _amax_rules([p], quantizer, "s_quantizer", judged)


def _amax_rules(cast: list[Known], quantizer: Quantizer, name: str, judged: Judged) -> dict[str, Rule]:
    """Of the amax that one quantizer's casts record together."""
    together = Known(torch.cat([c.value.flatten() for c in cast]), torch.cat([c.error.flatten() for c in cast]))
    return cast_rules("", quantizer, together, judged.actual, judged.expected, name)


def forward_rules(judged: Judged, keep: torch.Tensor | None = None) -> Mapping[str, Rule]:
    """Of `attention_fwd`."""
    arguments, actual, expected = judged.arguments, judged.actual, judged.expected
    made, plain = forward_known(arguments, keep, tiled=_tiled(judged))
    call, q = made.call, arguments["q"]
    shape = (*q.shape[:-1], arguments["v"].shape[-1])
    rules = _cast_of_p(made, arguments, judged)
    known = made.out
    if "out" in actual:
        own_unit = UNIT[_dtype(q)]
        known = bounds.narrowed(known, own_unit) if own_unit > UNIT[actual["out"].dtype] else known
        known = _at_least(known, _two_ulp(known.value, actual["out"].dtype))
        if plain is not None:
            known = _at_least(known, twice(plain.out, known.value))
        rules["out"] = within(_laid(call, known, shape), expected["out"], actual["out"])
    else:
        rules |= cast_rules(
            "out", arguments["out_quantizer"], _laid(call, known, shape), actual, expected, "out_quantizer"
        )
    if "lse" in actual:
        rules["lse"] = _lse_rule(made, plain, judged)
    if "max_logit" in actual:
        rules["max_logit"] = within(made.max_logit, expected["max_logit"], actual["max_logit"])
    return rules


def _lse_rule(made: bounds.Forward, plain: Own | None, judged: Judged) -> Within:
    lse = made.lse if plain is None else _at_least(made.lse, twice(plain.lse, made.lse.value))
    laid = Known(made.call.rows_of(lse.value[..., 0]), made.call.rows_of(lse.error[..., 0]))
    instead = () if made.call.sink is None else (_only_offset(made),)
    return within(laid, judged.expected["lse"], judged.actual["lse"], instead)


def _only_offset(made: bounds.Forward) -> Instead:
    """Rows that see keys, all of whose logits a bias makes -Inf: their denominator is the softmax offset alone."""
    call = made.call
    assert call.sink is not None
    where, sink = (call.sees & made.empty[..., 0]).double(), call.sink.expand_as(made.empty)[..., 0]
    laid = (call.queries.write(x) if call.layout == "thd" else x for x in (where, sink, 8 * U32 * sink.abs()))
    shown, value, limit = laid
    return Instead(shown > 0, value, limit)


def backward_rules(judged: Judged, keep: torch.Tensor | None = None) -> Mapping[str, Rule]:
    """Of `attention_bwd`."""
    arguments, actual, expected = judged.arguments, judged.actual, judged.expected
    tiled = _tiled(judged)
    made, plain = forward_known(arguments, keep, arguments["dout"], tiled)
    call = made.call
    dout = read_like_queries(call, arguments["dout"])
    found, capped = bounds.backward(made, dout, _out_unit(arguments))
    rules = _cast_of_p(made, arguments, judged)
    s_quantizer, dp_quantizer = arguments.get("s_quantizer"), arguments.get("dp_quantizer")
    if s_quantizer is not None or dp_quantizer is not None:
        weights = bounds.backward_weights(made)
        weights = weights if s_quantizer is None else _left_by(s_quantizer, _before_cast(made), tiled)
        ds = found.ds if dp_quantizer is None else _left_by(dp_quantizer, capped, tiled)
        found = bounds.products(made, dout, weights, ds, found.dz, found.dsoftmax_offset)
    if dp_quantizer is not None:
        before = Known(capped.value, capped.error + _TILED_EXP * capped.largest) if tiled else capped
        rules |= _amax_rules([before], dp_quantizer, "dp_quantizer", judged)
    rules |= _gradient_rules(found, plain, call, judged)
    if "dbias" in actual:
        dbias = bounds.bias_gradient(made, found, capped, tuple(arguments["bias"].shape))
        rules["dbias"] = within(dbias, expected["dbias"], actual["dbias"])
    if "dsoftmax_offset" in actual:
        assert found.dsoftmax_offset is not None
        rules["dsoftmax_offset"] = within(found.dsoftmax_offset, expected["dsoftmax_offset"], actual["dsoftmax_offset"])
    return rules


def _out_unit(arguments: Arguments | Mapping[str, Any]) -> float:
    """Of the output that the backward may read: u of its dtype or of the operands', or half a step of its encoding."""
    out = arguments["out"]
    if isinstance(out, Quantized):
        return 2.0 ** -(encoding(out.encoding).mantissa_bits + 1)
    return max(UNIT[out.dtype], UNIT[_dtype(arguments["q"])])


def _gradient_rules(found: bounds.Backward, plain: Own | None, call: Spread, judged: Judged) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    quantizer = judged.arguments.get("dqkv_quantizer")
    cast = []
    for name, keys in (("dq", False), ("dk", True), ("dv", True)):
        known: Known = getattr(found, name)
        shape = tuple(judged.arguments[name[1]].shape)
        if quantizer is None:
            if plain is not None:
                known = _at_least(known, twice(getattr(plain, name), known.value))
            rules[name] = within(_laid(call, known, shape, keys), judged.expected[name], judged.actual[name])
            continue
        laid = _laid(call, known, shape, keys)
        cast.append(laid)
        made = cast_rules(name, quantizer, laid, judged.actual, judged.expected, "dqkv_quantizer")
        rules |= {path: rule for path, rule in made.items() if path.startswith(f"{name}.")}
    return rules | (_amax_rules(cast, quantizer, "dqkv_quantizer", judged) if quantizer is not None else {})


def forward_results(arguments: Mapping[str, Any]) -> dict[str, Known]:
    """`out` and `lse` as the operator lays them out, of a call without casts."""
    made, plain = forward_known(arguments)
    shape = (*arguments["q"].shape[:-1], arguments["v"].shape[-1])
    out = _at_least(made.out, _two_ulp(made.out.value, arguments["q"].dtype))
    out = out if plain is None else _at_least(out, twice(plain.out, out.value))
    lse = Known(made.lse.value[..., 0], made.lse.error[..., 0])
    return {"out": _laid(made.call, out, shape), "lse": lse}


def forward_expected(judged: Judged, keep: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the kit's own float64 attention gives with the mask that an implementation drew."""
    made, _ = forward_known(judged.arguments, keep)
    q = judged.arguments["q"]
    lse = torch.where(made.empty, -torch.inf, made.lse.value)[..., 0]
    max_logit = torch.where(_max_absent(made), -torch.inf, made.max_logit.value)
    known = {
        "out": _laid(made.call, made.out, (*q.shape[:-1], judged.arguments["v"].shape[-1])).value,
        "lse": made.call.rows_of(lse), "max_logit": max_logit,
    }  # fmt: skip
    return {path: known[path].float() for path in judged.actual}


def _max_absent(made: bounds.Forward) -> torch.Tensor:
    """Heads without an unmasked logit."""
    return made.call.hidden.expand(made.z.value.shape).transpose(0, 1).flatten(1).all(1)


def backward_expected(judged: Judged, keep: torch.Tensor) -> dict[str, torch.Tensor]:
    """As `forward_expected`."""
    arguments = judged.arguments
    made, _ = forward_known(arguments, keep)
    found, capped = bounds.backward(made, read_like_queries(made.call, arguments["dout"]), _out_unit(arguments))
    known: dict[str, torch.Tensor] = {}
    for name, keys in (("dq", False), ("dk", True), ("dv", True)):
        known[name] = _laid(made.call, getattr(found, name), tuple(arguments[name[1]].shape), keys).value
    if "dbias" in judged.actual:
        known["dbias"] = bounds.bias_gradient(made, found, capped, tuple(arguments["bias"].shape)).value
    if found.dsoftmax_offset is not None:
        known["dsoftmax_offset"] = found.dsoftmax_offset.value
    return {path: known[path].float() for path in judged.actual}
