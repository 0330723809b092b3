# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A call described on the command line: ``k=4096 a.dtype=e4m3fn layout=TN``."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence

from te_dispatch.cli.console import CommandError
from te_dispatch.core.facts import FactValue
from te_dispatch.core.operator import Fact, Operator
from te_dispatch.core.policy.known import did_you_mean
from te_dispatch.numerics.encodings import ENCODINGS
from te_dispatch.numerics.quantizers import QUANTIZERS, BlockQuantizer

SHORTHAND = "dtype"

#: Operands whose dtype the contracts fix (statistics in float32, indices): the shorthand leaves them alone.
_OWN_DTYPE = {"mean", "rstd", "lse", "freqs", "indices", "row_map", "mask", "amax"}

#: What a quantizer's kind settles about its result. Block scaling comes in two shapes and stays open.
_SCALING = {kind: q.scaling for kind, q in QUANTIZERS.items() if q is not BlockQuantizer}

_LONG_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
_LONG_DTYPES |= {f"float8_{name}": name for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")}


def read_facts(operator: Operator, given: Sequence[str], dtypes: Collection[str]) -> dict[str, FactValue]:
    """Facts of a call.

    Facts that are not given take the operator's defaults; those without a default stay unknown. A given optional
    operand brings its presence along, and leaves open what else is not said about it.

    Args:
        operator: what is called.
        given: ``fact=value`` each. ``dtype=X`` sets the dtype of the required operands.
        dtypes: words that a dtype can be.

    Raises:
        CommandError: something that cannot be read; names the nearest fact or value.
    """
    explicit: dict[str, FactValue] = {}
    for text in given:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise CommandError(f"cannot read {text!r}: facts are given as fact=value, e.g. k=4096")
        for fact in _meant(operator, name):
            if fact.name in explicit and name != SHORTHAND:
                raise CommandError(f"{name} is given twice")
            if name != SHORTHAND or fact.name not in explicit:
                explicit[fact.name] = _value(fact, value.strip(), dtypes)
    facts = operator.default_facts()
    for parameter in dict.fromkeys(name.partition(".")[0] for name in explicit):
        _follow(operator, parameter, explicit, facts)
    return {**facts, **explicit}


def _meant(operator: Operator, name: str) -> list[Fact]:
    fact = operator.facts.get(name)
    if fact is not None:
        return [fact]
    if name == SHORTHAND:
        required = [p.name for p in operator.signature.parameters.values() if p.default is inspect.Parameter.empty]
        found = [
            operator.facts[f"{p}.dtype"] for p in required if f"{p}.dtype" in operator.facts and p not in _OWN_DTYPE
        ]
        if found:
            return found
    valid = [fact for fact in operator.facts if not fact.endswith(".default")]
    hint = did_you_mean(name, [*valid, SHORTHAND]) or f"; te-dispatch ops {operator.name} lists its facts"
    raise CommandError(f"{operator.name} has no fact {name!r}{hint}")


def _value(fact: Fact, text: str, dtypes: Collection[str]) -> FactValue:
    """A word as the fact's kind reads it; ``none`` means: not given."""
    if fact.kind == "size":
        if not text.isdigit():
            raise CommandError(f"{fact.name} is a size: a whole number, got {text!r}")
        return int(text)
    if fact.presence:
        if text.lower() not in ("true", "false"):
            raise CommandError(f"{fact.name} says whether the argument is given: true or false, got {text!r}")
        return text.lower() == "true"
    if fact.kind == "dtype":
        word = text.removeprefix("torch.")
        word = _LONG_DTYPES.get(word, word)
        if word == "none":
            return None
        if word not in dtypes:
            raise CommandError(f"{fact.name}: unknown dtype {text!r}{did_you_mean(word, dtypes, listing=False)}")
        return word
    if "," in text:
        return tuple(_scalar(part.strip()) for part in text.split(","))
    # 'none' is also the name of a scaling and of a mask: only where it is no word of its own does it mean None.
    if text == "none" and fact.name.endswith((".scaling", "mask_type", "mask", "bias_type")):
        return text
    value = _scalar(text)
    if fact.words and value is not None and value not in fact.words:
        raise CommandError(f"{fact.name}: can never be {text!r}{did_you_mean(text, fact.words)}")
    return value


def _scalar(text: str) -> FactValue:
    words: dict[str, FactValue] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _follow(operator: Operator, parameter: str, explicit: dict[str, FactValue], facts: dict[str, FactValue]) -> None:
    """Bring the other facts of a parameter in line with those given of it."""
    related = [f for f in operator.facts if f.partition(".")[0] == parameter and f != f"{parameter}.default"]
    absent = all(explicit[name] in (None, False) for name in related if name in explicit)
    signature = operator.signature.parameters.get(parameter)
    if signature is not None and signature.default is not inspect.Parameter.empty:
        whole = operator.facts.get(parameter)
        if absent:
            same = signature.default in (None, False) or explicit.get(parameter, ...) == signature.default
        elif whole is not None and not whole.presence and parameter in explicit:
            same = whole.canonical(signature.default) == explicit[parameter]
        else:
            same = False
        facts[f"{parameter}.default"] = same
        if not absent and whole is not None and parameter not in explicit:
            facts.pop(parameter, None)
            if whole.presence:
                facts[parameter] = True
    if absent:
        return
    for name in related:
        if name not in explicit and name != parameter:
            facts.pop(name, None)
    dtype = explicit.get(f"{parameter}.dtype")
    kind = explicit.get(parameter)
    if f"{parameter}.scaling" in related:
        if isinstance(dtype, str) and dtype not in ENCODINGS:
            facts[f"{parameter}.scaling"] = "none"
        elif isinstance(kind, str) and kind in _SCALING:
            facts[f"{parameter}.scaling"] = _SCALING[kind]
