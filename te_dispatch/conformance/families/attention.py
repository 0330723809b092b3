# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `attention_fwd`. Axes: `te_dispatch.conformance.families.attention_inputs`."""

from __future__ import annotations

from te_dispatch.conformance.families import attention_inputs as inputs
from te_dispatch.conformance.families.attention_rules import forward_rules
from te_dispatch.conformance.space import Arguments, Axis, Space, Turned, Values, register, turned_lengths
from te_dispatch.ops.attention import LAYOUTS, MASKS, PACKINGS, SOFTMAX_TYPES

DTYPE = Axis("dtype", ("fp32", "bf16", "fp16"))
DENSE = Axis("layout", ("sbhd", "bshd"))
LAYOUT = Axis("layout", LAYOUTS)
#: Around tiles of 16 and 128, primes, tall, wide, without sequences, queries or keys.
SHAPES = (
    "2x16x16", "2x17x33", "1x1x1", "1x15x17", "1x127x129", "1x129x127", "2x128x128", "1x1x131", "1x67x9",
    "0x4x4", "1x0x5", "2x5x0",
)  # fmt: skip
#: Two tiles of 128 both ways; more queries or keys than 512, 1,024 and 4,096; more sequences than 64.
LARGE = ("1x129x129", "1x256x256", "1x9x520", "1x520x9", "1x5x1032", "1x1032x5", "1x2x4104", "1x4104x2", "67x3x5")
#: More heads than 8, 16 and 32, alone and in groups.
MANY_HEADS = ("17/17", "33/3", "40/8", "64/64")
#: Wider heads than 128, and others that kernels have a path of their own for.
WIDE = ("129/129", "160/160", "192/128", "256/256", "32/32", "40/40", "80/80", "96/96")
SHAPE = Axis("shape", SHAPES, ("2x17x33", "1x129x127", "2x5x0"), once=LARGE)
SMALL = Axis("shape", ("2x17x33", "3x16x16", "1x33x9", "2x1x20", "1x129x127"), ("2x17x33",), once=LARGE)
HEADS = Axis("heads", ("2/2", "4/2", "6/1", "3/3", "1/1", "8/2"), ("4/2", "3/3"), once=MANY_HEADS)
DIMS = Axis("dims", ("16/16", "64/64", "24/8", "8/32", "1/1", "128/128", "7/7"), ("64/64", "24/8"), once=WIDE)
KINDS = Axis(
    "values", ("normal", "large", "one_sign", "cancelling", "zeros", *inputs.NAN_IN), ("normal", "large"),
    once=("low",), dull=("low", *inputs.NAN_IN),
)  # fmt: skip
SCALE = Axis("scale", ("default", "0.5", "1.0", "0.0", "-0.25"))
MASK = Axis("mask", MASKS)
DENSE_MASK = Axis("mask", ("none", "causal", "causal_bottom_right"))
WINDOW = Axis("window", ("none", "-1:-1", "4:0", "0:0", "7:-1", "3:5", "-1:2"), ("none", "3:5", "4:0"))
MASK_SHAPE = Axis("attn_mask", ("bhqk", "b1qk", "11qk", "b11k", "hqk", "qk"))
VALID = Axis("valid", ("full", "ragged", "zero"))
HOLE = Axis("hole", ("number", "nan", "inf"))
#: Of which ``67:5`` is 67 sequences of 0 to 4 tokens in turn.
LENGTHS = Axis(
    "lengths", ("5+3+8", "16", "1+1", "17+0+15", "127+2", "0+0", "3+33+1+9"), ("5+3+8", "17+0+15", "3+33+1+9"),
    once=("67:5", "3+520", "1032", "300:3"),
)  # fmt: skip
KEYS = Axis("keys", ("same", "turned"))
GAPS = Axis("gaps", ("none", "some"), once=("behind",))
LONGEST = Axis("longest", ("given", "absent"))
BIAS = Axis("bias", ("none", "pre_scale", "post_scale", "alibi", "alibi/h", "alibi/bh"))
BIAS_SHAPE = Axis("bias_shape", ("11", "1h", "b1", "bh"))
BIAS_DTYPE = Axis("bias_dtype", ("fp32", "bf16"))
BIAS_VALUES = Axis("bias_values", ("normal", "minus_inf"))
SOFTMAX = Axis("softmax", SOFTMAX_TYPES)
#: Far from the logits, which have no part beside it, or it has none beside them.
FAR_SOFTMAX = Axis("softmax", (*SOFTMAX_TYPES, "learnable/far"), dull=("learnable/far",))
SOFTCAP = Axis("softcap", ("0", "20.0", "2.0"))
SCALED_OPERANDS = Axis("operands", ("delayed", "current", "plain", "mxfp8", "block_1d"), ("delayed", "current"))
CAST_OF_P = Axis("s", ("none", "delayed", "delayed_seen", "delayed_silent", "current"))
INFERENCE = Axis("inference", ("no", "yes"))
MAX_LOGIT = Axis("max_logit", ("no", "yes"))
OUT = Axis("out", ("same", "fp32", "bf16"))
PACKING = Axis("packing", PACKINGS)
#: Keys as long as queries; padding masks of dense layouts have spaces of their own.
PACKED_SHAPE = Axis("shape", ("2x16x16", "1x17x17", "3x1x1"))
_PACKED_LENGTHS = Axis("lengths", ("5+3+8", "17+0+15"))
_SHARED_HEADS = "4/2"


def masked(values: Values) -> bool:
    """One value of an axis that says nothing about this mask is enough; a mask with a window of its own too."""
    if values["mask"] != "arbitrary" and values["attn_mask"] != "bhqk":
        return False
    if not values["mask"].startswith("padding") and values["valid"] != "full":
        return False
    return values["hole"] == "number" or values["valid"] != "full" or values["mask"] == "arbitrary"


def propagating(values: Values) -> bool:
    """Where everything is seen, a NaN reaches every result that depends on it. What a mask hides may be weighed with 0.
    A NaN among the logits is asked of who gives their maximum."""
    if values["values"] not in inputs.NAN_IN:
        return True
    return values["mask"] == "none" and (values["values"] != "nan_k" or values.get("max_logit", "no") == "yes")


def ragged(values: Values) -> bool:
    """`attn_mask` has no rows and columns of a thd tensor; what lies in gaps is nothing where there are none."""
    return values["mask"] != "arbitrary" and (values["gaps"] == "some" or values["hole"] == "number")


def biased(values: Values) -> bool:
    """The shape and dtype of a bias tensor matter where there is one."""
    given = values["bias"] in ("pre_scale", "post_scale")
    plain = (values["bias_shape"], values["bias_dtype"], values.get("bias_values", "normal"))
    return given or plain == ("11", "fp32", "normal")


def stackable(values: Values) -> bool:
    """One value of an axis that says nothing about this layout is enough. Heads share keys where q lies apart."""
    thd = values["layout"] == "thd"
    for axis in (PACKED_SHAPE,) if thd else (_PACKED_LENGTHS, GAPS, LONGEST):
        if values[axis.name] != axis.values[0]:
            return False
    return values["heads"] != _SHARED_HEADS or values["packing"] in ("2hd", "h2d")


def castable(values: Values) -> bool:
    """A cast of p belongs to FP8 attention."""
    return values["operands"] in ("delayed", "current") or values["s"] == "none"


def halved(arguments: Arguments) -> Arguments:
    """The first half of the batch, which bshd has first."""
    half = arguments["q"].shape[0] // 2
    return {**arguments, **{name: arguments[name][:half] for name in ("q", "k", "v", "out", "lse", "dout")
                            if name in arguments}}  # fmt: skip


#: With gaps, what may lie between sequences would come to lie inside of one.
TURNED = Turned(turned_lengths, ("cu_seqlens_q_padded", "cu_seqlens_kv_padded"))


#: name -> axes and constraint of the spaces that forward and backward share.
PLAIN = (DTYPE, DENSE, SHAPE, DENSE_MASK, HEADS, DIMS, KINDS, SCALE, OUT, Axis("deterministic", ("no", "yes")))
MASKED = (MASK, DENSE, SMALL, VALID, WINDOW, MASK_SHAPE, HOLE, HEADS, DTYPE)
RAGGED = (
    LENGTHS, Axis("layout", ("thd",)), MASK, KEYS, GAPS, HOLE, LONGEST, WINDOW, HEADS,
    Axis("bias", ("none", "alibi", "post_scale", "pre_scale")), Axis("bias_shape", ("11", "bh")),
    Axis("bias_dtype", ("fp32",)), SOFTCAP, SOFTMAX, DTYPE,
)  # fmt: skip
SCORED = (
    BIAS, BIAS_SHAPE, BIAS_DTYPE, BIAS_VALUES,
    Axis("shape", ("2x17x33", "1x33x9", "2x16x16"), once=("1x9x150", "1x9x520", "1x2x4104")), SOFTCAP, FAR_SOFTMAX,
    Axis("mask", ("none", "causal", "causal_bottom_right", "padding", "padding_causal_bottom_right")), DENSE,
    Axis("valid", ("full", "ragged")), Axis("heads", ("2/2", "6/3", "5/1", "4/4"), once=("33/3", "48/48")),
    Axis("scale", ("default", "0.5")), Axis("values", ("normal", "large")), Axis("window", ("none", "3:5", "4:0")),
    DTYPE,
)  # fmt: skip
STACKED = (
    PACKING, LAYOUT, PACKED_SHAPE, _PACKED_LENGTHS, GAPS, LONGEST, Axis("mask", ("none", "causal")),
    Axis("heads", ("2/2", "3/3", _SHARED_HEADS)), DTYPE, Axis("dims", ("16/16", "5/5")),
)  # fmt: skip
#: One tensor as q, k and v, and as k and v.
SAME = (
    Axis("same", ("qkv", "kv")), DENSE, Axis("shape", ("2x17x17", "1x64x64")),
    Axis("mask", ("none", "causal")), Axis("heads", ("2/2", "3/3")), DTYPE,
)  # fmt: skip
EIGHT_BIT = (
    SCALED_OPERANDS, CAST_OF_P, Axis("shape", ("2x16x16", "2x17x33", "1x40x129")), DENSE,
    Axis("mask", ("none", "causal", "causal_bottom_right")), Axis("heads", ("2/2", "4/2")),
    Axis("dims", ("32/32", "64/16"), once=("128/128",)), Axis("softmax", ("vanilla", "off-by-one")),
    Axis("dtype", ("bf16", "fp32")),
)  # fmt: skip


#: What models call most, at sizes above the usual tiles.
COMMON = tuple(
    {"dtype": dtype, "layout": layout, "mask": mask, "heads": heads, "dims": dims, "shape": "1x129x129"}
    for dtype in ("bf16", "fp16", "fp32")
    for layout in ("sbhd", "bshd")
    for mask in ("none", "causal")
    for heads, dims in (("8/2", "64/64"), ("4/2", "128/128"))
)


def scored(values: Values) -> bool:
    """`biased`, and lengths where the mask has them."""
    return biased(values) and (values["mask"].startswith("padding") or values["valid"] == "full")


def uneven(values: Values) -> bool:
    return ragged(values) and biased(values)


register(
    Space(
        "attention_fwd", "plain", (*PLAIN, INFERENCE, MAX_LOGIT), inputs.forward, forward_rules, valid=propagating,
        together=(("dtype", "layout", "mask", "dims"),), fixed=COMMON,
    ),
    Space(
        "attention_fwd", "masked", (*MASKED, MAX_LOGIT), inputs.forward, forward_rules, valid=masked, forms=("mask",),
        together=(("layout", "mask", "window"),),
    ),
    Space(
        "attention_fwd", "ragged", (*RAGGED, MAX_LOGIT), inputs.forward, forward_rules, valid=uneven, turned=TURNED,
        together=(("keys", "gaps", "window"), ("mask", "keys", "gaps")),
    ),
    Space(
        "attention_fwd", "scored", (*SCORED, MAX_LOGIT), inputs.forward, forward_rules, valid=scored, forms=("bias",),
        together=(("softmax", "mask", "shape"),),
    ),
    Space("attention_fwd", "twice", SAME, inputs.forward, forward_rules, like="plain"),
    Space("attention_fwd", "packed", STACKED, inputs.forward, forward_rules, valid=stackable, views=True),
    Space(
        "attention_fwd", "eight_bit",
        (
            *EIGHT_BIT,
            Axis(
                "out_cast",
                ("none", "delayed", "delayed_seen", "delayed_silent", "current", "current_floored", "mxfp8"),
            ),
            OUT, INFERENCE,
        ),
        inputs.forward, forward_rules, valid=castable,
    ),
    Space(
        "attention_fwd", "paged",
        (
            Axis("page", ("16", "4", "1", "12"), once=("128",)), Axis("kv_lengths", ("given", "absent")),
            Axis("mask", ("none", "causal", "padding", "padding_causal_bottom_right")), DENSE,
            Axis("shape", ("2x1x37", "3x5x16", "1x17x33"), once=("2x1x1032", "67x1x20")),
            Axis("valid", ("full", "ragged", "zero")), Axis("heads", ("4/2", "2/2")), Axis("window", ("none", "4:0")),
            SOFTCAP, SOFTMAX, DTYPE,
        ),
        inputs.forward, forward_rules,
        valid=lambda values: values["mask"].startswith("padding") or values["valid"] == "full",
    ),
    Space(
        "attention_fwd", "paged_ragged",
        (
            Axis("page", ("16", "4")), Axis("kv_lengths", ("given", "absent")), Axis("layout", ("thd",)),
            Axis("lengths", ("1+1+1", "5+3+8"), once=("67:5",)), Axis("keys", ("turned", "same")),
            Axis("mask", ("padding", "padding_causal", "padding_causal_bottom_right")), DTYPE,
        ),
        inputs.forward, forward_rules, like="paged",
    ),
    Space(
        "attention_fwd", "batch",
        (
            DTYPE, Axis("layout", ("bshd",)), Axis("shape", ("4x17x33", "2x16x128")), Axis("mask", ("none", "causal")),
            Axis("heads", ("2/2", "4/2")),
        ),
        inputs.forward, forward_rules, batch=halved, like="plain",
    ),
)  # fmt: skip
