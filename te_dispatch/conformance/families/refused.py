# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls that the contracts refuse: operands that do not fit together, options without what they need.

Each is a plain call of another space with one mistake in it, which an implementation has to name in a `ValueError`
before it writes anything. A mistake that only the contents of a tensor on a device show is not among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from te_dispatch.conformance.families import (  # noqa: F401  # whose spaces right calls are taken from
    activation,
    attention,
    attention_bwd,
    gemm,
    gemm_records,
    grouped,
    moe,
    norm,
    position,
    quantize_bookkeeping,
    quantize_casts,
    quantize_forms,
    quantize_many,
    softmax,
    training,
)
from te_dispatch.conformance.families.quantize import bits
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.space import Arguments, Axis, Space, Values, find, register
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    NVFP4FourOverSixQuantizer,
    NVFP4HadamardQuantizer,
)

#: Arguments of a right call -> those that make it wrong.
Change = Callable[[Arguments], Arguments]


@dataclass(frozen=True)
class Mistake:
    """One way to call an operator wrongly.

    Attributes:
        change: what becomes of a right call's arguments.
        values: of the right call's space, where they are not the first of their axis.
    """

    change: Change
    values: Mapping[str, str] = field(default_factory=dict)


def _longer(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return torch.cat((x, x.narrow(dim, 0, 1)), dim)


def longer(name: str, dim: int = -1, **values: str) -> Mistake:
    """An operand with one element too many along a dimension."""
    return Mistake(lambda given: {name: _longer(given[name], dim)}, values)


def given(values: Mapping[str, str] | None = None, /, **arguments: Any) -> Mistake:
    """Arguments that do not go with the others; functions are called with the right ones."""
    return Mistake(
        lambda right: {name: value(right) if callable(value) else value for name, value in arguments.items()},
        values or {},
    )


def item(name: str, change: Callable[[Any], Any]) -> Mistake:
    """The last item of a list becomes another."""
    return Mistake(lambda right: {name: [*right[name][:-1], change(right[name][-1])]})


def short(name: str) -> Mistake:
    """A list without its last item."""
    return Mistake(lambda right: {name: right[name][:-1]})


def _make(base: Space, mistakes: Mapping[str, Mistake], values: Values, maker: Maker) -> Arguments:
    mistake = mistakes[values["mistake"]]
    plain = {axis.name: axis.values[0] for axis in base.axes}
    own = {name: value for name, value in values.items() if name != "mistake"}
    right = base.make({**plain, **own, **mistake.values}, maker)
    return {**right, **mistake.change(right)}


def _refused(operator: str, base: str, mistakes: Mapping[str, Mistake], name: str = "refused") -> Space:
    """A space of all the mistakes, in the dtypes of the one that it takes right calls from."""
    right = find(operator, base)
    dtypes = [axis for axis in right.axes if axis.name == "dtype"]
    return Space(
        operator, name, (Axis("mistake", tuple(mistakes)), *dtypes), functools.partial(_make, right, mistakes), bits,
        raises=ValueError, widen=right.widen, forward=right.forward,
    )  # fmt: skip


# -- matrix products ---------------------------------------------------------------------------------------------------


def _out(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Arguments], torch.Tensor]:
    """`out` of a plain NT product, changed."""

    def out(right: Arguments) -> torch.Tensor:
        a, b = right["a"], right["b"]
        return change(torch.ones(a.shape[0], b.shape[0], dtype=a.dtype))

    return out


def _narrower(right: Arguments) -> Quantized:
    """b, a row-wise record with one scale, without its last columns."""
    b = right["b"]
    data = b.row_data[:, :-16].contiguous()
    return Quantized(
        data, None, b.row_scale_inv, None, b.encoding, b.scaling, b.scale_layout, tuple(data.shape), b.dtype, b.device
    )


_GEMM = {
    "accumulate_without_out": given(accumulate=True),
    "other_k": longer("b"),
    "long_bias": longer("bias", bias="same"),
    "short_bias": given({"bias": "same"}, bias=lambda right: right["bias"][:-1]),
    "wide_out": given(out=_out(_longer)),
    "tall_out": given(out=_out(lambda x: _longer(x, 0))),
    "out_of_shared_memory": given(out=_out(lambda x: x[:1].expand(x.shape))),
    "out_of_another_dtype": given(out=_out(lambda x: x.to(torch.float32)), out_dtype=torch.bfloat16),
    "out_and_out_quantizer": given(out=_out(lambda x: x), out_quantizer=CurrentQuantizer()),
    "dgelu_without_aux": given(epilogue="dgelu"),
    "gelu_with_aux": given(epilogue="gelu", aux=_out(lambda x: x)),
    "aux_without_epilogue": given(aux=_out(lambda x: x)),
    "bgrad_with_aux": given(epilogue="bgrad_b", aux=_out(lambda x: x)),
    "aux_of_another_size": given(epilogue="dgelu", aux=_out(_longer)),
    "aux_quantizer_without_gelu": given(aux_quantizer=CurrentQuantizer()),
    "unknown_layout": given(layout="TT"),
    "unknown_epilogue": given(epilogue="tanh"),
    "result_of_integers": given(out_dtype=torch.int32),
}
_RECORDS = {
    "accumulate_without_out": given(accumulate=True),
    "other_k": given(b=_narrower),
    "long_bias": longer("bias", bias="same"),
    "wide_out": given(out=_out(_longer)),
    "out_and_out_quantizer": given(out=_out(lambda x: x), out_quantizer=CurrentQuantizer()),
}
_GROUPED = {
    "accumulate_without_out": given(accumulate=True),
    "one_b_less": short("b"),
    "other_k": item("b", _longer),
    "one_bias_less": Mistake(lambda right: {"bias": right["bias"][:-1]}, {"bias": "yes"}),
    "one_out_less": Mistake(lambda right: {"out": right["out"][:-1]}, {"out": "given"}),
    "splits_beyond_the_rows": Mistake(lambda right: {"splits": [n + 1 for n in right["splits"]]}, {"splits": "host"}),
    "one_split_less": Mistake(lambda right: {"splits": right["splits"][:-1]}, {"splits": "host"}),
}

# -- attention ---------------------------------------------------------------------------------------------------------


def _scores(right: Arguments, dtype: torch.dtype) -> torch.Tensor:
    """(1, 1, s_q, s_kv + 1), which no score matrix broadcasts to."""
    return torch.zeros(1, 1, right["q"].shape[0], right["k"].shape[0] + 1, dtype=dtype)


_ATTENTION = {
    "wide_mask": given(mask="arbitrary", attn_mask=lambda right: _scores(right, torch.bool)),
    "no_mask": given(mask="arbitrary"),
    "other_head_dim": longer("k"),
    "more_keys_than_values": longer("k", 0),
    "heads_that_no_group_divides": given({"heads": "4/2"}, q=lambda right: _longer(right["q"], -2)),
    "another_batch": given(k=lambda right: _longer(right["k"], 1), v=lambda right: _longer(right["v"], 1)),
    "padding_without_lengths": given(mask="padding"),
    "lengths_of_too_few": given(mask="padding", cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
                                cu_seqlens_kv=torch.tensor([0, 1], dtype=torch.int32)),
    "wide_bias": given(bias_type="post_scale", bias=lambda right: _scores(right, torch.float32)),
    "no_bias": given(bias_type="post_scale"),
    "bias_without_a_type": given(bias=lambda right: _scores(right, torch.float32)[..., 1:].clone()),
    "slopes_of_more_heads": given(bias_type="alibi", alibi_slopes=lambda right: torch.ones(right["q"].shape[2] + 1)),
    "no_softmax_offset": given(softmax_type="learnable"),
    "dropout_without_rng_state": given(dropout_p=0.1),
    "dropout_of_all": given(dropout_p=1.0, rng_state=torch.zeros(2, dtype=torch.int64)),
    "window_of_minus_two": given(window=(-2, 0)),
    "packing_of_unequal_shapes": given({"shape": "2x17x33"}, packing="3hd"),
    "unknown_mask": given(mask="diagonal"),
    "unknown_softmax": given(softmax_type="hard"),
    "negative_cap": given(softcap=-1.0),
    "unknown_bias": given(bias_type="added"),
    "unknown_layout": given(layout="hbsd"),
    "slopes_without_alibi": given(alibi_slopes=lambda right: torch.ones(right["q"].shape[2])),
    "mask_of_numbers": given(mask="arbitrary", attn_mask=lambda right: _scores(right, torch.float32)[..., 1:].clone()),
    "offset_of_more_heads": given(
        softmax_type="learnable", softmax_offset=lambda right: torch.ones(right["q"].shape[2] + 1)
    ),
    "negative_dropout": given(dropout_p=-0.1, rng_state=torch.zeros(2, dtype=torch.int64)),
    "rng_state_of_one": given(dropout_p=0.1, rng_state=torch.zeros(1, dtype=torch.int64)),
}  # fmt: skip
_RAGGED = {
    "no_lengths": given(cu_seqlens_q=None),
    "keys_of_another_batch": longer("cu_seqlens_kv"),
    "int64_lengths": given(cu_seqlens_q=lambda right: right["cu_seqlens_q"].long()),
}
_ATTENTION_BWD = {
    "wide_dout": longer("dout"),
    "long_dout": longer("dout", 0),
    "dbias_without_bias": given(with_dbias=True),
}

# -- casts -------------------------------------------------------------------------------------------------------------


def _uneven(right: Arguments) -> list[int]:
    """Splits of one row more than there are."""
    return [*right["splits"][:-1], right["splits"][-1] + 1]


def _more(right: Arguments) -> list[Any]:
    return [*right["quantizers"], right["quantizers"][-1]]


_SHARD = {"beyond_the_matrix": given(start=10**9), "block_of_seven": given(block=7)}

# -- rows --------------------------------------------------------------------------------------------------------------


def _tall(name: str) -> Callable[[Arguments], torch.Tensor]:
    return lambda right: _longer(right[name], 0)


def _odd(right: Arguments) -> torch.Tensor:
    """x with an odd number of columns, which no gate splits."""
    x: torch.Tensor = right["x"]
    return x[:, : (x.shape[1] - 1) // 2 * 2 + 1].clone()


_NORM = {
    "long_gamma": longer("gamma"),
    "residual_of_another_shape": given(residual=_tall("x")),
    "result_of_integers": given(out_dtype=torch.int32),
    "negative_eps": given(eps=-1e-5),
    "gamma_of_two_dimensions": given(gamma=lambda right: right["gamma"][None]),
}
_NORM_BWD = {
    "tall_dy": longer("dy", 0),
    "long_gamma": longer("gamma"),
    "long_rstd": longer("rstd"),
    "rstd_in_bf16": given(rstd=lambda right: right["rstd"].bfloat16()),
    "tall_add": given(add=_tall("x")),
}


def _wide_mask(right: Arguments) -> torch.Tensor:
    x = right["x"]
    return torch.zeros(*x.shape[:-1], x.shape[-1] + 1, dtype=torch.bool)


#: One sequence more than there are.
_OFFSETS = given(offsets=lambda right: torch.zeros(right[_rotated(right)].shape[1] + 1, dtype=torch.int32))
_ROPE = {
    "unknown_layout": given(layout="hbsd"),
    "more_angles_than_features": given(freqs=lambda right: torch.cat([right["freqs"]] * 3, -1)),
    "angles_in_fp64": given(freqs=lambda right: right["freqs"].double()),
    "odd_angles": given(freqs=lambda right: right["freqs"][..., :-1].clone()),
    "fewer_angles_than_positions": given(freqs=lambda right: right["freqs"][: _positions(right) - 1].clone()),
    "offsets_of_more": _OFFSETS,
    "sequences_of_a_dense_layout": given(cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)),
}


def _rotated(right: Arguments) -> str:
    return "x" if "x" in right else "dy"


def _positions(right: Arguments) -> int:
    """How many a sequence of sbhd layout has."""
    return int(right[_rotated(right)].shape[0])


#: Words and dtypes that the forms of records do not know; scalings and formats that they are not made for.
_LAYOUTS = {
    "layout_of_another_scaling": given({"scaling": "block_1d"}, scale_layout="swizzled_32x4x4"),
    "unknown_layout": given({"scaling": "block_1d"}, scale_layout="gemm_3d"),
}
_UPDATES = {
    "unknown_algorithm": given(algorithm="mean"),
    "scales_of_more": item("scales", _longer),
    "one_maximum_less": item("max_values", lambda values: values[:-1]),
    "one_amax_less": short("amaxes"),
}


def _of_another_format(right: Arguments) -> str:
    return "e5m2fnuz" if right["x"].encoding.startswith("e4") else "e4m3fnuz"


def _mxfp8(right: Arguments) -> Quantized:
    """x, a record with one scale, said to be in blocks of 32."""
    x = right["x"]
    scale = torch.full((x.rows(), -(-x.shape[-1] // 32)), 127, dtype=torch.uint8)
    return Quantized(
        x.row_data, None, scale, None, x.encoding, "mxfp8", x.scale_layout, x.shape, x.dtype, x.device
    )  # fmt: skip


def _nvfp4(right: Arguments) -> Quantized:
    """A record of x's shape in blocks of 16."""
    x = right["x"]
    rows, columns = x.rows(), x.shape[-1]
    codes = torch.zeros((*x.shape[:-1], -(-columns // 2)), dtype=torch.uint8)
    scale = torch.full((rows, -(-columns // 16)), 0x38, dtype=torch.uint8)
    return Quantized(
        codes, None, scale, None, "e2m1", "nvfp4", CANONICAL_SCALES, x.shape, x.dtype, x.device, torch.ones(1)
    )  # fmt: skip


def _rotated_columns(right: Arguments) -> Quantized:
    """A record with nothing but a rotated copy, which does not hold the values."""
    codes = torch.zeros((32, 16), dtype=torch.uint8)
    scale = torch.full((32, 2), 0x38, dtype=torch.uint8)
    x = right["x"]
    return Quantized(
        None, codes, None, scale, "e2m1", "nvfp4_rht", CANONICAL_SCALES, (32, 32), x.dtype, x.device, torch.ones(2)
    )  # fmt: skip


def _block_1d(right: Arguments) -> Quantized:
    """x, a record with one scale, said to be in blocks of 128 columns."""
    x = right["x"]
    scale = torch.ones(x.rows(), -(-x.shape[-1] // 128))
    return Quantized(
        x.row_data, None, scale, None, x.encoding, "block_1d", x.scale_layout, x.shape, x.dtype, x.device
    )  # fmt: skip


def _probs_of_more(right: Arguments) -> torch.Tensor:
    tokens, top_k = right["row_map"].shape
    return torch.ones(tokens + 1, top_k)


register(
    _refused("gemm", "plain", _GEMM),
    _refused("gemm", "quantized", _RECORDS, "refused_quantized"),
    _refused("grouped_gemm", "plain", _GROUPED),
    _refused("attention_fwd", "plain", _ATTENTION),
    _refused("attention_fwd", "ragged", _RAGGED, "refused_ragged"),
    _refused("attention_bwd", "plain", _ATTENTION_BWD),
    _refused(
        "quantize",
        "current",
        {
            "amax_of_two": given(amax=torch.ones(2)),
            "noop_flag_without_out": given(noop_flag=torch.zeros(1)),
            "usage": given(usage="rows"),
            "fp64": given(x=lambda right: right["x"].double()),
            "rng_state_of_one": given(rng_state=torch.zeros(1, dtype=torch.int64)),
            "rng_state_in_int32": given(rng_state=torch.zeros(2, dtype=torch.int32)),
            "draws_for_a_choice": given(
                quantizer=NVFP4FourOverSixQuantizer(), rng_state=torch.zeros(2, dtype=torch.int64)
            ),
            "rotated_rows_of_no_16": given({"shape": "33x65"}, quantizer=NVFP4HadamardQuantizer(), usage="column"),
            "amax_of_blocks": given(quantizer=BlockQuantizer(), amax=torch.ones(1)),
        },
    ),
    _refused(
        "quantize",
        "delayed",
        {"given_amax": given(amax=torch.ones(1)), "noop_flag_without_out": given(noop_flag=torch.zeros(1))},
        "refused_delayed",
    ),
    _refused("quantize_dbias", "plain", {"usage": given(usage="rows"), "int": given(bias_dtype=torch.int64)}),
    _refused(
        "dequantize",
        "plain",
        {"result_of_integers": given(dtype=torch.int32), "rotated_columns_alone": given(x=_rotated_columns)},
    ),
    _refused("split_quantize", "plain", {"too_many_rows": given(splits=_uneven), "no_quantizer": short("quantizers")}),
    _refused("multi_tensor_quantize", "plain", {"more": given(quantizers=_more), "usage": given(usage="rows")}),
    _refused(
        "compute_amax",
        "plain",
        {"out_of_two": given(out=torch.zeros(2)), "bf16_out": given(out=torch.zeros(1, dtype=torch.bfloat16))},
    ),
    _refused("partial_amax", "plain", {**_SHARD, "amax_of_more_blocks": longer("amax")}),
    _refused(
        "partial_cast",
        "plain",
        {
            **_SHARD,
            "scale_of_more_blocks": longer("scale"),
            "long_out": longer("out"),
            "fp4": given(encoding="e2m1"),
        },
    ),
    _refused(
        "pad_rows",
        "plain",
        {
            "too_many_rows": given(splits=_uneven),
            "one_part_less": short("padded_splits"),
            "shorter": given(padded_splits=lambda right: [1 for _ in right["splits"]]),
        },
    ),
    _refused(
        "unpad_rows",
        "plain",
        {
            "tall_x": longer("x", 0),
            "one_part_less": short("padded_splits"),
            "beyond": given(splits=lambda right: [n + 1 for n in right["padded_splits"]]),
        },
    ),
    _refused("layernorm_fwd", "plain", {**_NORM, "long_beta": longer("beta")}),
    _refused("rmsnorm_fwd", "plain", _NORM),
    _refused("layernorm_bwd", "plain", {**_NORM_BWD, "long_mean": longer("mean")}),
    _refused("rmsnorm_bwd", "plain", _NORM_BWD),
    _refused(
        "activation_fwd",
        "plain",
        {
            "odd": given(kind="swiglu", x=_odd),
            "params": given(params=(7.0, 1.7)),
            "kind": given(kind="tanh"),
            "result_of_integers": given(out_dtype=torch.int32),
        },
    ),
    _refused(
        "activation_bwd",
        "plain",
        {
            "wide_dy": longer("dy"),
            "tall_dy": longer("dy", 0),
            "params": given(params=(7.0, 1.7)),
        },
    ),
    _refused(
        "softmax_fwd",
        "plain",
        {
            "wide_mask": given(mask=_wide_mask),
            "mask_of_numbers": given(mask=lambda right: torch.zeros(right["x"].shape)),
            "result_of_integers": given(out_dtype=torch.int32),
        },
    ),
    _refused("softmax_bwd", "plain", {"wide_dy": longer("dy"), "tall_dy": longer("dy", 0)}),
    _refused("rope_fwd", "dense", _ROPE),
    _refused("rope_bwd", "dense", _ROPE),
    _refused("rope_fwd", "thd", {"no_sequences": given(cu_seqlens=None)}, "refused_thd"),
    _refused(
        "transpose_quantized",
        "plain",
        {
            "blocks_of_rows": given(x=_mxfp8),
            "block_1d": given(x=_block_1d),
            "blocks_of_16": given(x=_nvfp4),
        },
    ),
    _refused("relayout_scales", "plain", _LAYOUTS),
    _refused(
        "convert_encoding",
        "plain",
        {
            "another_format": given(encoding=_of_another_format),
            "count_of_two": given(count=torch.zeros(2).long()),
            "its_own_encoding": given(encoding=lambda right: right["x"].encoding),
            "scales_of_8_bits": given(x=_mxfp8),
        },
    ),
    _refused("update_delayed_scales", "plain", _UPDATES),
    _refused(
        "dropout_add_fwd",
        "plain",
        {
            "no_rng_state": given(dropout_p=0.1),
            "wide_residual": longer("residual"),
            "long_bias": longer("bias", bias="fp32"),
            "negative_share": given(dropout_p=-0.1, rng_state=torch.zeros(2, dtype=torch.int64)),
        },
    ),
    _refused(
        "dropout_add_bwd",
        "plain",
        {
            "no_mask": given(mask=None),
            "wide_mask": longer("mask"),
            "mask_of_numbers": given(mask=lambda right: right["mask"].float()),
            "share_of_all": given(dropout_p=1.0),
        },
    ),
    _refused(
        "moe_permute",
        "plain",
        {
            "tall_indices": longer("indices", 0),
            "indices_of_numbers": given(indices=lambda right: right["indices"].float()),
            "negative_capacity": given(capacity=-1),
        },
    ),
    _refused(
        "moe_unpermute",
        "plain",
        {"tall_probs": given(probs=_probs_of_more), "int64_map": given(row_map=lambda right: right["row_map"].long())},
    ),
    _refused(
        "moe_unpermute_bwd",
        "plain",
        {
            "tall_dy": longer("dy", 0),
            "wide_dy": longer("dy"),
            "int64_map": given(row_map=lambda right: right["row_map"].long()),
        },
    ),
    _refused(
        "multi_tensor_adam",
        "plain",
        {
            "one_gradient_less": short("grads"),
            "moment_of_another_shape": item("exp_avgs", _longer),
            "one_second_moment_less": short("exp_avg_sqs"),
            "long_gradient": item("grads", _longer),
            "beta_of_one": given(beta1=1.0),
            "negative_beta": given(beta2=-0.5),
            "negative_eps": given(eps=-1.0),
            "step_of_zero": given(step=0),
        },
    ),
    _refused(
        "multi_tensor_scale", "plain", {"one_output_less": short("outputs"), "long_output": item("outputs", _longer)}
    ),
)
