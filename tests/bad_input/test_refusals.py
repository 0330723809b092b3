# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What spoiling one argument at a time does not reach: the bound call, overlapping outputs, devices, NaN and Inf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import te_dispatch
from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.core.devices import describe_device
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.resolve import resolve
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer
from tests.bad_input import outcomes
from tests.bad_input.valid_calls import CALLS, ints, randn, record

OPERATOR_NAMES = sorted(OPERATORS)


@pytest.mark.parametrize("name", OPERATOR_NAMES)
@pytest.mark.parametrize(
    "value", [None, 1.0, "x", [1.0], {}, object()], ids=["None", "1.0", "x", "list", "dict", "object"]
)
@pytest.mark.parametrize("warm", [False, True], ids=["first call", "bound"])
def test_the_first_argument_of_another_kind(name: str, value: Any, warm: bool) -> None:
    """Outside any scope: before the operator was ever called, and where its lookup reads the argument's attributes."""
    if name == "attention_bwd":
        x = randn(6, 2, 4, 8)
        forward = ops.attention_fwd(x, x, x)
        given = {"dout": x, "q": x, "k": x, "v": x, "out": forward.out, "lse": forward.lse, "saved": forward.saved}
    else:
        given = next(make for operator, make in CALLS.values() if operator == name)()
    if warm:
        getattr(ops, name)(**outcomes.duplicate(given))
    first = next(iter(given))
    with pytest.raises((TypeError, ValueError), match=rf"^{first}(\[\d\])?: got .*expected"):
        getattr(ops, name)(**{**given, first: value})


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_an_output_whose_elements_share_memory(backend: str) -> None:
    one = torch.zeros(1, 8).expand(6, 8)
    with (
        te_dispatch.using(gemm=backend),
        pytest.raises(ValueError, match=r"out: got strides \(0, 1\).*expected memory"),
    ):
        ops.gemm(randn(6, 16), randn(8, 16), layout="NT", out=one)
    held = record(16, 32)
    held.row_data = held.row_data[:1].expand(16, 32)  # type: ignore[index]
    with te_dispatch.using(quantize=backend), pytest.raises(ValueError, match=r"out\.row_data: got strides"):
        ops.quantize(randn(16, 32), CurrentQuantizer(), usage="row", out=held)
    assert not one.any()


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_later_group_is_checked_before_the_first_is_written(backend: str) -> None:
    out = [torch.zeros(4, 6), torch.zeros(3, 5)]
    with te_dispatch.using(grouped_gemm=backend), pytest.raises(ValueError, match=r"out: got shape \(3, 5\)"):
        ops.grouped_gemm([randn(4, 8), randn(3, 8)], [randn(6, 8)] * 2, layout="NT", out=out)
    assert not out[0].any()


def test_a_later_tensor_is_checked_before_the_first_amax_is_recorded() -> None:
    quantizers = [DelayedQuantizer(scale=torch.ones(1), amax=torch.zeros(1)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"xs\[1\]: got dtype torch.float64"):
        ops.multi_tensor_quantize([randn(4, 8), randn(4, 8).double()], quantizers, usage="row")
    assert quantizers[0].amax == 0


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("copies", [("row", "column"), ("column", "row"), ("row", "row"), ("column", "column")])
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_a_product_takes_whichever_copy_there_is(backend: str, copies: tuple[str, str], layout: str) -> None:
    a = record(16, 16, usage=copies[0])
    b = record(16, 16, usage=copies[1])
    with te_dispatch.using(gemm=backend):
        out = ops.gemm(a, b, layout=layout).out
    left, right = (ops.dequantize(x).double() for x in (a, b))
    exact = (left.T if layout[0] == "T" else left) @ (right.T if layout[1] == "T" else right)
    # 16 products and 15 sums, each rounded to fp32, and one rounding of the result.
    bound = 32 * 2.0**-24 * (left.abs().max() * right.abs().max() * 16)
    assert (out.double() - exact).abs().max() <= bound


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_mixed_flavours_of_fp8(backend: str) -> None:
    ocp, fnuz = record(16, 16), record(16, 16, quantizer=CurrentQuantizer("e5m2fnuz"))
    with (
        te_dispatch.using(gemm=backend),
        pytest.raises(ValueError, match="b: got encoding e5m2fnuz, expected the flavour"),
    ):
        ops.gemm(ocp, fnuz, layout="NT")


@pytest.mark.parametrize(
    ("device", "encoding"), [("nvidia:sm_90", "e4m3fnuz"), ("nvidia:sm_100", "e4m3fnuz"), ("amd:gfx942", "e4m3fn")]
)
def test_matrix_units_that_do_not_read_an_encoding(device: str, encoding: str) -> None:
    """Resolved without the device: the units' candidate is passed over, for the encodings, and the table says so."""
    manager = scopes.MANAGER
    facts = {**OPERATORS["gemm"].default_facts(), "a.dtype": encoding, "b.dtype": encoding, "a.scaling": "tensor"}
    facts |= {"b.scaling": "tensor", "layout": "NT", "n": 128, "k": 128, "m": 128}
    decision = resolve(
        OPERATORS["gemm"], facts, describe_device(manager.snapshot, device), manager.capture().policy, manager.snapshot
    )
    assert "torch.scaled_mm" not in {accepted.id for accepted in decision.accepted}
    line = next(row for row in decision.table().splitlines() if "torch.scaled_mm" in row)
    assert "encodings" in line and encoding in line


def test_a_required_implementation_that_is_for_another_device() -> None:
    a, b = record(16, 16), record(16, 16)
    with te_dispatch.using(gemm="torch.scaled_mm"), pytest.raises(te_dispatch.NoImplementation) as caught:
        ops.gemm(a, b, layout="NT")
    assert "torch.scaled_mm" in str(caught.value) and "device" in str(caught.value)


SPECIAL = torch.tensor([[float("nan"), float("inf"), float("-inf"), 1.0, -0.0, 0.0, -3.0, 1e-30]] * 4)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("encoding", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_casts_of_nan_and_inf(backend: str, encoding: str) -> None:
    """NaN has a code of its own, +-Inf saturates, amax ignores NaN and keeps Inf, an amax of Inf gives scale 1."""
    quantizer = CurrentQuantizer(encoding)
    delayed = DelayedQuantizer(encoding, scale=torch.ones(1), amax=torch.zeros(1))
    with te_dispatch.using(quantize=backend):
        made, recorded = (ops.quantize(SPECIAL, q, usage="row") for q in (quantizer, delayed))
    assert made.row_scale_inv.item() == 1.0 and delayed.amax.item() == float("inf")
    assert torch.equal(made.row_data, recorded.row_data)
    nan_code = 0x80 if encoding.endswith("fnuz") else 0x7F
    assert made.row_data[0, 0] == nan_code
    values = ops.dequantize(made)
    assert values[0, 1:4].tolist() == [quantizer.max_value, -quantizer.max_value, 1.0]


@pytest.mark.parametrize("operator", ["layernorm_fwd", "rmsnorm_fwd", "activation_fwd", "softmax_fwd", "gemm NT"])
def test_nan_and_inf_go_where_the_reference_says(operator: str) -> None:
    name, make = CALLS[operator]
    given = make()
    operand = "a" if name == "gemm" else "x"
    given.pop("quantizer", None)
    flat = given[operand].view(-1)
    flat[0], flat[-1] = float("nan"), float("inf")
    results = []
    for backend in ("torch", "reference"):
        with te_dispatch.using(**{name: backend}):
            results.append(outcomes.numbers(getattr(ops, name)(**outcomes.duplicate(given))))
    for ours, reference in zip(*results, strict=True):
        np.testing.assert_array_equal(ours.isnan().numpy(), reference.isnan().numpy())
        np.testing.assert_array_equal(ours.isinf().numpy(), reference.isinf().numpy())


LISTS = ("multi_tensor_adam", "multi_tensor_l2norm", "multi_tensor_scale", "multi_tensor_quantize")


@pytest.mark.parametrize("name", [*LISTS, "update_delayed_scales", "grouped_gemm"])
def test_empty_lists(name: str) -> None:
    given = next(make for operator, make in CALLS.values() if operator == name)()
    empty = {key: [] if isinstance(value, list) else value for key, value in given.items()}
    with pytest.raises(ValueError, match=r"got (an empty list|none), expected at least one"):
        getattr(ops, name)(**empty)


def test_blocks_cannot_be_transposed() -> None:
    with pytest.raises(ValueError, match="x: got block_1d scaling, whose copies differ, expected tensor or block_2d"):
        ops.transpose_quantized(record(16, 32, quantizer=BlockQuantizer(), usage="row"))


def test_padding_helper_makes_rows_a_multiple_of_16() -> None:
    x, splits, padded = randn(9, 16), [4, 5], [16, 16]
    made = ops.pad_rows(x, splits, padded)
    assert made.shape[0] % 16 == 0 and torch.equal(ops.unpad_rows(made, splits, padded), x)
    with pytest.raises(ValueError, match=r"padded_splits: got \[16, 4\], expected at least \[4, 5\]"):
        ops.pad_rows(x, splits, [16, 4])


@pytest.mark.parametrize("name", ["offsets", "cu_seqlens"])
def test_positions_outside_the_table(name: str) -> None:
    if name == "offsets":
        options: dict[str, Any] = {"offsets": ints(0, 3)}
        x = randn(4, 2, 3, 8)
    else:
        options = {"layout": "thd", "cu_seqlens": ints(0, 1, 8)}
        x = randn(8, 3, 8)
    for backend in ("torch", "reference"):
        with te_dispatch.using(rope_fwd=backend), pytest.raises(ValueError, match="freqs: got 6 positions, expected"):
            ops.rope_fwd(x, randn(6, 1, 1, 8), **options)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_lazily_negated_tensor_is_refused(backend: str) -> None:
    """What lies in its memory has the other sign."""
    plain = torch.randn(16, 16)
    negated = torch.complex(torch.zeros_like(plain), plain).conj().imag
    assert negated.is_neg() and not negated.is_contiguous()
    with te_dispatch.using(activation_fwd=backend):
        te_dispatch.ops.activation_fwd(plain, kind="gelu")
        for x in (negated, negated.clone(memory_format=torch.contiguous_format)._neg_view()):
            with pytest.raises(ValueError, match=r"^x: got a lazily negated tensor.*resolve_neg"):
                te_dispatch.ops.activation_fwd(x, kind="gelu")
        te_dispatch.ops.activation_fwd(negated.resolve_neg(), kind="gelu")
