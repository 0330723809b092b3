# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Arguments of attention out of axis values. Every space of the family uses the same function: an axis that a space
does not have takes its default here.

| axis | values |
|---|---|
| shape | batch x queries x keys of dense layouts, ``2x17x33`` |
| lengths | of thd sequences' queries, ``5+3+0``, or ``67:5``: 67 of 0 to 4 in turn |
| keys | of thd sequences: ``same``, or ``turned``: the same in reverse, plus one |
| gaps | ``none``; ``some``: between thd sequences, and behind the last; ``behind``: there alone |
| valid | of a padded batch: ``full``, ``ragged``, ``zero`` (the first sequence has no key, the last no query) |
| heads | query heads / key heads; dims: head dimension of q and k / of v |
| values | of q and k: a kind of `te_dispatch.conformance.inputs`, or ``large``: logits in the hundreds, |
| | or ``low``: all logits far below 0, 20,000 and more with 16 features |
| | or ``nan_v``, ``nan_k``: normal, with NaN in the last element of v, or of k |
| hole | what lies where no sequence is, and in the output's gradient where rows see nothing: ``number``, ``nan`` |
| | or ``inf`` |
| bias_values | ``normal``, or ``minus_inf``: with entries, and most of a row or its first tile, -Inf |
| same | one tensor as q, k and v (``qkv``), or as k and v (``kv``) |
| operands | ``plain``, or a cast of q, k, v and of the output's gradient: ``delayed``, ``current``, ``mxfp8``, ... |
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch

from te_dispatch.conformance.families.quantize import counts, quantizer_of
from te_dispatch.conformance.maker import DTYPES, Maker
from te_dispatch.conformance.space import Arguments, Values
from te_dispatch.conformance.spread import spread
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import CurrentQuantizer, Quantizer
from te_dispatch.ops.attention import lse_shape, out_shape

#: ``large`` makes each of q and k so many times as large: with 64 features logits reach the hundreds.
_LARGE = 6.0
#: ``low`` makes of q and k numbers around this and around minus this.
_LOW = 80.0
#: Rows of a gap after each thd sequence.
_GAP = 3
_MISSING = -1

#: A kind of values -> the operand that holds a NaN. Not q: PyTorch's own kernel for CPUs takes a row of nothing but NaN
#: for one without keys.
NAN_IN = {"nan_v": "v", "nan_k": "k"}
#: packing -> which operands are packed, and the axis, from the end, of the packed tensor that they are stacked on.
PACKED = {"3hd": ("qkv", -3), "h3d": ("qkv", -2), "2hd": ("kv", -3), "h2d": ("kv", -2)}


def _pair(text: str) -> tuple[int, int]:
    one, _, other = text.partition("/")
    return int(one), int(other or one)


def _filled(maker: Maker, shape: tuple[int, ...], values: Values, kind: str) -> torch.Tensor:
    kind = "normal" if kind in NAN_IN else kind
    if kind == "large":
        dtype = DTYPES[values.get("dtype", "fp32")]
        return (maker.tensor(*shape) * _LARGE).to(dtype)
    if kind.startswith("low"):
        return (maker.tensor(*shape) / 4 + (-_LOW if kind == "low_k" else _LOW)).to(DTYPES[values.get("dtype", "fp32")])
    return maker.tensor(*shape, dtype=values.get("dtype", "fp32"), values=kind)


def _lengths(values: Values, maker: Maker) -> tuple[list[int], list[int], tuple[int, int]]:
    """Valid queries and keys of every sequence, and the extents of the score matrix."""
    if values.get("layout") == "thd":
        queries = counts(values["lengths"])
        keys = queries if values.get("keys", "same") == "same" else [n + 1 for n in queries[::-1]]
        return queries, keys, (max(queries), max(keys))
    batch, rows, columns = (int(n) for n in values["shape"].split("x"))
    queries, keys = [rows] * batch, [columns] * batch
    how = values.get("valid", "full")
    if values.get("mask", "none").startswith("padding") and how != "full":
        queries = [int(maker.integers(min(1, rows), rows + 1)) for _ in queries]
        keys = [int(maker.integers(min(1, columns), columns + 1)) for _ in keys]
        if how == "zero" and batch:
            keys[0] = queries[-1] = 0
    return queries, keys, (rows, columns)


def _cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _inside(values: Values, lengths: list[int], extent: int) -> torch.Tensor:
    """bool, over the leading dimensions of an operand in its layout: rows that belong to a sequence."""
    if values.get("layout") == "thd":
        gaps = values.get("gaps")
        gap = _GAP if gaps == "some" else 0
        rows = [row < n for n in lengths for row in range(n + gap)]
        return torch.tensor([*rows, *([False] * _GAP if gaps == "behind" else ())], dtype=torch.bool)
    inside = torch.arange(extent) < torch.tensor(lengths, dtype=torch.int64)[:, None]
    return inside.t() if values.get("layout", "sbhd") == "sbhd" else inside


def _holed(x: torch.Tensor, inside: torch.Tensor, values: Values) -> torch.Tensor:
    hole = values.get("hole", "number")
    if hole != "number":
        x[~inside] = float(hole)
    return x


def _blind(dout: torch.Tensor, made: Arguments, values: Values) -> torch.Tensor:
    """The output's gradient, with what lies in a hole in the rows of sequences that see no key, too."""
    if values.get("hole", "number") == "number":
        return dout
    call = spread(made)
    shown = call.sees.expand(call.q.shape[:-1]).unsqueeze(-1)
    seeing = call.queries.write(shown.to(torch.float32), 1.0).reshape(*dout.shape[:-1], 1) > 0
    return torch.where(seeing, dout, float(values["hole"]))


def _sequences(values: Values, queries: list[int], keys: list[int]) -> Arguments:
    found: Arguments = {}
    thd = values.get("layout") == "thd"
    if thd or values.get("mask", "none").startswith("padding"):
        found = {"cu_seqlens_q": _cumulative(queries), "cu_seqlens_kv": _cumulative(keys)}
    if thd and values.get("gaps") == "some":
        found["cu_seqlens_q_padded"] = _cumulative([n + _GAP for n in queries])
        found["cu_seqlens_kv_padded"] = _cumulative([n + _GAP for n in keys])
    if thd and values.get("longest") == "given":
        found |= {"max_seqlen_q": max(queries), "max_seqlen_kv": max(keys)}
    return found


def _operands(values: Values, maker: Maker, queries: list[int], keys: list[int], extents: tuple[int, int]) -> Arguments:
    (heads, groups), (dim, dim_v) = _pair(values.get("heads", "2")), _pair(values.get("dims", "16"))
    of_q, of_kv = _inside(values, queries, extents[0]), _inside(values, keys, extents[1])
    kind = values.get("values", "normal")
    if "packing" in values:
        return _packed(values, maker, of_q, of_kv, (heads, groups), dim)
    if values.get("same", "none") != "none":
        x, other = (_filled(maker, (*of_q.shape, heads, dim), values, kind) for _ in range(2))
        return {"q": x if values["same"] == "qkv" else other, "k": x, "v": x}
    of_k = "low_k" if kind == "low" else kind
    sizes = {"q": (of_q, heads, dim, kind), "k": (of_kv, groups, dim, of_k), "v": (of_kv, groups, dim_v, _of_v(kind))}
    made = {
        name: _holed(_filled(maker, (*inside.shape, h, d), values, of), inside, values)
        for name, (inside, h, d, of) in sizes.items()
    }
    if kind in NAN_IN and made[NAN_IN[kind]].numel():
        made[NAN_IN[kind]].view(-1)[-1] = torch.nan
    return made


def _of_v(kind: str) -> str:
    return "normal" if kind in ("large", "low") or kind in NAN_IN else kind


def _packed(
    values: Values, maker: Maker, of_q: torch.Tensor, of_kv: torch.Tensor, of_heads: tuple[int, int], dim: int
) -> Arguments:
    """q, k, v, or k and v, as views of one tensor."""
    names, axis = PACKED[values["packing"]]
    heads, groups = of_heads
    size = [groups, dim]
    size.insert(len(size) + 1 + axis, len(names))
    whole = _filled(maker, (*of_kv.shape, *size), values, values.get("values", "normal"))
    made: Arguments = dict(zip(names, _holed(whole, of_kv, values).unbind(axis)))
    if "q" not in made:
        made = {"q": _holed(_filled(maker, (*of_q.shape, heads, dim), values, "normal"), of_q, values), **made}
    return made


def _paged(values: Values, maker: Maker, made: Arguments, keys: list[int]) -> Arguments:
    """Keys and values in pages, in no order, with pages that nobody uses."""
    size = int(values["page"])
    pages = max(1, -(-max(keys, default=0) // size))
    table = torch.randperm(len(keys) * pages + 2, generator=maker.generator)[: len(keys) * pages]
    given: Arguments = {"page_table": table.view(len(keys), pages).int(), "inference": True}
    for name in ("k", "v"):
        shape = (len(keys) * pages + 2, size, *made[name].shape[-2:])
        given[name] = _filled(maker, shape, values, "normal")
    lengths = keys if values["kv_lengths"] == "given" else None
    found = {n: x for n, x in made.items() if n != "cu_seqlens_kv"} | given
    return found if lengths is None else {**found, "cu_seqlens_kv": _cumulative(lengths)}


def _window(text: str) -> tuple[int, int] | None:
    if text == "none":
        return None
    left, _, right = text.partition(":")
    return int(left), int(right)


#: `attn_mask` axis -> its shape for (b, h, s_q, s_kv).
_MASK_SHAPES = {"bhqk": (0, 1, 2, 3), "b1qk": (0, _MISSING, 2, 3), "11qk": (_MISSING, _MISSING, 2, 3),
                "b11k": (0, _MISSING, _MISSING, 3), "hqk": (1, 2, 3), "qk": (2, 3)}  # fmt: skip


def _masks(values: Values, maker: Maker, extents: tuple[int, ...]) -> Arguments:
    mask = values.get("mask", "none")
    found: Arguments = {"mask": mask}
    if "window" in values:
        found["window"] = _window(values["window"])
    if mask == "arbitrary":
        shape = [1 if axis == _MISSING else extents[axis] for axis in _MASK_SHAPES[values["attn_mask"]]]
        hidden = maker.boolean(*shape, share=0.4)
        if shape[-2] > 1:
            hidden[..., 0, :] = True  # a row that sees nothing
        found["attn_mask"] = hidden
    return found


def _closed(values: Values, maker: Maker, *shape: int) -> torch.Tensor:
    """bool: entries of a bias that become -Inf, in every row some, in none all that a mask leaves: the first key stays
    open, or, where all keys are seen, those behind the first tile do."""
    closed = maker.boolean(*shape, share=0.3)
    rows, columns = shape[-2:]
    closed[..., rows // 2, :] = True
    closed[..., :1] = False
    if values.get("mask", "none") == "none" and columns > 140:
        closed[..., : rows // 2, :128] = True
        closed[..., : rows // 2, 128:] = False
    return closed


def _scores(values: Values, maker: Maker, extents: tuple[int, ...]) -> Arguments:
    """Bias, ALiBi, scale, cap and softmax offset."""
    batch, heads, rows, columns = extents
    kind = values.get("bias", "none")
    found: Arguments = {"bias_type": kind.partition("/")[0]}
    if kind in ("pre_scale", "post_scale"):
        shape = (batch if "b" in values["bias_shape"] else 1, heads if "h" in values["bias_shape"] else 1)
        found["bias"] = maker.tensor(*shape, rows, columns, dtype=values["bias_dtype"])
        if values.get("bias_values") == "minus_inf":
            found["bias"].masked_fill_(_closed(values, maker, *found["bias"].shape), -torch.inf)
    elif kind.startswith("alibi/"):
        of = (heads,) if kind == "alibi/h" else (batch, heads)
        found["alibi_slopes"] = maker.tensor(*of, values="one_sign")
    if values.get("scale", "default") != "default":
        found["softmax_scale"] = float(values["scale"])
    found["softcap"] = float(values.get("softcap", "0"))
    found["softmax_type"], _, far = values.get("softmax", "vanilla").partition("/")
    if found["softmax_type"] == "learnable":
        # Far: beyond the logits on either side, by more than exp holds in fp32.
        found["softmax_offset"] = maker.tensor(heads) + (120.0 * (1 - torch.arange(heads) % 2 * 2) if far else 0)
    return found


def _flags(values: Values) -> Arguments:
    given = {"deterministic": "deterministic", "inference": "inference", "max_logit": "with_max_logit"}
    found: Arguments = {name: values[axis] == "yes" for axis, name in given.items() if axis in values}
    if values.get("packing", "none") != "none":
        found["packing"] = values["packing"]
    if values.get("out", "same") != "same":
        found["out_dtype"] = DTYPES[values["out"]]
    return found


def _quantizer(cast: str, encoding: str, scale: float) -> Quantizer | None:
    """By the name of what it makes; ``none`` is None."""
    return None if cast == "none" else quantizer_of(cast, encoding, scale=scale)


def record(maker: Maker, x: Any, cast: str, encoding: str) -> Any:
    """x through a cast; ``plain`` leaves it."""
    if cast == "plain":
        return x
    return maker.quantized(x, quantizer_of(cast, encoding, scale=24.0), "row")


def forward(values: Values, maker: Maker) -> Arguments:
    """Arguments of `attention_fwd`."""
    queries, keys, extents = _lengths(values, maker)
    made: Arguments = {**_operands(values, maker, queries, keys, extents), **_sequences(values, queries, keys)}
    made["layout"] = values.get("layout", "sbhd")
    whole = (len(queries), made["q"].shape[-2], *extents)
    made |= _flags(values)
    if "page" in values:
        made = _paged(values, maker, made, keys)
    made |= _masks(values, maker, whole) | _scores(values, maker, whole)
    cast = values.get("operands", "plain")
    made |= {name: record(maker, made[name], cast, "e4m3fn") for name in ("q", "k", "v")}
    if "s" in values:
        # p is at most 1, and 448 the largest code.
        made["s_quantizer"] = _quantizer(values["s"], "e4m3fn", 448.0)
    if "out_cast" in values:
        made["out_quantizer"] = _quantizer(values["out_cast"], "e4m3fn", 40.0)
    if float(values.get("dropout", "0")):
        made |= {"dropout_p": float(values["dropout"]), "rng_state": maker.rng_state()}
    return made


#: What only the forward takes.
_FORWARD_ONLY = ("inference", "with_max_logit", "page_table", "out_quantizer", "out_dtype")


def backward(values: Values, maker: Maker) -> Arguments:
    """Arguments of `attention_bwd`. `out`, `lse` and `saved` stand for what the forward will put there."""
    made = forward(values, maker)
    dtype = made.get("out_dtype") or made["q"].dtype
    shape = out_shape(made["q"], made["v"], made["layout"])
    dout = maker.tensor(*shape).to(dtype)
    queries, _, extents = _lengths(values, maker.again())
    dout = _holed(dout, _inside(values, queries, extents[0]), values)
    dout = _blind(dout, made, values)
    cast = values.get("operands", "plain")
    out: Any = torch.zeros(shape, dtype=dtype)
    if values.get("out_cast", "none") != "none":
        out = maker.quantized(out, CurrentQuantizer("e4m3fn"), "row")
    made = {name: x for name, x in made.items() if name not in _FORWARD_ONLY}
    made |= {
        "dout": record(maker, dout, cast, "e5m2"), "out": out,
        "lse": torch.zeros(lse_shape(made["q"], made["layout"])), "saved": None,
    }  # fmt: skip
    if "dp" in values:
        made["dp_quantizer"] = _quantizer(values["dp"], "e5m2", 4096.0)
    if "dqkv" in values:
        made["dqkv_quantizer"] = _quantizer(values["dqkv"], "e5m2", 16.0)
    if "dbias" in values:
        made["with_dbias"] = values["dbias"] == "yes"
    return made


def forward_of(arguments: Arguments) -> Arguments:
    """The forward's arguments out of the backward's. Its casts record into amaxes of their own."""
    own = ("dout", "out", "lse", "saved", "dp_quantizer", "dqkv_quantizer", "with_dbias", "s_quantizer")
    made = {name: x for name, x in arguments.items() if name not in own}
    dtype = arguments["out"].dtype
    if dtype != arguments["q"].dtype:
        made["out_dtype"] = dtype
    if isinstance(arguments["out"], Quantized):
        made["out_quantizer"] = CurrentQuantizer(arguments["out"].encoding)
    made["s_quantizer"] = _fresh(arguments.get("s_quantizer"))
    return made


def _fresh(found: Any) -> Any:
    amax = getattr(found, "amax", None)
    return found if amax is None else dataclasses.replace(found, amax=torch.zeros_like(amax))
