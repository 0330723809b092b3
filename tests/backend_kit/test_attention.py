# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention's parameters as one spec, and the implementations that are made of functions of it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from te_dispatch import ops
from te_dispatch.backend_kit import attention as kit
from te_dispatch.core.bind import load, positional
from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.quantizers import CurrentQuantizer
from te_dispatch.ops.attention import lse_shape, out_shape
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved


@kit.attention_forward
def forward(*given: Any) -> AttentionForward:
    """What it was given, as `out`."""
    return AttentionForward(given, None, None, None)  # type: ignore[arg-type]


@kit.attention_backward
def backward(*given: Any) -> AttentionBackward:
    return AttentionBackward(given, None, None, None, None)  # type: ignore[arg-type]


def qkv(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(*shape), torch.randn(*shape), torch.randn(*shape)


@pytest.mark.parametrize(("made", "operator"), [(forward, "attention_fwd"), (backward, "attention_bwd")])
def test_an_implementation_has_the_operator_s_signature(made: Any, operator: str) -> None:
    target = f"{__name__}:{made.__name__}"
    function, lacking = load(OPERATORS[operator], "acme.attention", target)
    assert function is made and lacking == ()
    # Dispatch forwards by position, to a copy of the code, and not through a launcher.
    assert positional(OPERATORS[operator], made, lacking).__code__.co_name == operator
    assert made.__doc__ == ("What it was given, as `out`." if made is forward else None)


def test_every_argument_arrives_in_its_place() -> None:
    """Each argument of the operators, given by itself, is in the spec, the tensors or what follows them."""
    q, k, v = qkv(4, 2, 3, 8)
    lengths, other = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (3, 4))
    rng, scale = torch.zeros(2, dtype=torch.int64), CurrentQuantizer()
    ragged = {"mask": "padding", "cu_seqlens_q": lengths, "cu_seqlens_kv": other}
    for options in (
        {"packing": "3hd", "softmax_scale": 0.5, "softcap": 2.0, "deterministic": True},
        {"max_seqlen_q": 5, "max_seqlen_kv": 6, "dropout_p": 0.25, "rng_state": rng},
        ragged,
        {"bias": torch.randn(1, 3, 4, 4), "bias_type": "post_scale"},
        {"bias_type": "alibi", "alibi_slopes": torch.randn(2, 3)},
        {"softmax_type": "learnable", "softmax_offset": torch.randn(3)},
        {"mask": "arbitrary", "attn_mask": torch.zeros(1, 1, 4, 4, dtype=torch.bool)},
    ):
        found: Any = forward(q, k, v, **options).out
        spec, tensors = found[3], found[4]
        assert found[:3] == (q, k, v) and isinstance(spec, AttentionSpec) and isinstance(tensors, AttentionTensors)
        for name, value in options.items():
            assert getattr(tensors if isinstance(value, torch.Tensor) else spec, name) is value, name
        out, lse = torch.empty(out_shape(q, v, "sbhd")), torch.empty(lse_shape(q, "sbhd"))
        saved = Saved("acme.attention", "acme/1")
        back: Any = backward(out, q, k, v, out, lse, saved, **options).dq
        assert back[:7] == (out, q, k, v, out, lse, saved) and back[7] == spec
        assert all(x is y for x, y in zip(back[8], tensors, strict=True))
    more: Any = forward(q, k, v, inference=True, with_max_logit=True, out_quantizer=scale, out_dtype=q.dtype).out
    assert more[5:] == (True, True, None, scale, q.dtype)
    more = backward(out, q, k, v, out, lse, saved, dp_quantizer=scale).dq
    assert more[9:] == (None, scale, None, False)


def test_arguments_are_checked() -> None:
    q, k, v = qkv(4, 2, 3, 8)
    with pytest.raises(ValueError, match="mask: got"):
        forward(q, k, v, mask="circular")
    with pytest.raises(ValueError, match="out_dtype: got"):
        forward(q, k, v, out_dtype="float32")
    out = torch.empty(4, 2, 3, 8)
    with pytest.raises(ValueError, match="lse: got"):
        backward(out, q, k, v, out, torch.empty(2, 3, 5), Saved("acme.attention", "acme/1"))


def test_a_spec_is_the_key_of_a_call_and_tells_calls_apart() -> None:
    q, k, v = qkv(4, 2, 3, 8)
    spec = kit.spec_of(q=q, k=k, v=v)
    assert hash(spec) == hash(kit.spec_of(q=q.clone(), k=k, v=v)) and spec == kit.spec_of(q=q.clone(), k=k, v=v)
    wide = torch.randn(4, 2, 3, 16)[..., ::2]
    slopes = {"bias_type": "alibi", "alibi_slopes": torch.randn(3)}
    masks = [torch.zeros(4, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.bool).expand(4, 4)]
    others = [
        kit.spec_of(q=q.bfloat16(), k=k.bfloat16(), v=v.bfloat16()),
        *(kit.spec_of(**{"q": q, "k": k, "v": v, name: wide}) for name in "qkv"),
        kit.spec_of(q=q, k=k, v=v, softmax_scale=0.0), kit.spec_of(q=q, k=k, v=v, softmax_scale=1.0),
        kit.spec_of(q=q, k=k, v=v, packing="h3d"), kit.spec_of(q=q, k=k, v=v, deterministic=True),
        kit.spec_of(q=q, k=k, v=v, **slopes),
        *(kit.spec_of(q=q, k=k, v=v, mask="arbitrary", attn_mask=mask) for mask in masks),
    ]  # fmt: skip
    assert len({spec, *others}) == len(others) + 1
    # -0.0 == 0.0, but products with it have other signs: the cached check does not give one for the other.
    assert str(kit.spec_of(q=q, k=k, v=v, softmax_scale=-0.0).scale) == "-0.0"
    assert str(kit.spec_of(q=q, k=k, v=v, softmax_scale=0.0).scale) == "0.0"


def test_a_spec_says_what_follows_from_the_arguments() -> None:
    q, k, v = torch.randn(5, 2, 4, 16), torch.randn(7, 2, 2, 16), torch.randn(7, 2, 2, 8)
    spec = kit.spec_of(q=q, k=k, v=v, mask="causal_bottom_right", window=(3, 2))
    assert (spec.scale, spec.band, spec.bottom_right, spec.ragged, spec.batch) == (0.25, (3, 0), True, False, 2)
    assert kit.spec_of(q=q, k=k, v=v, mask="none", window=(3, 2)).band == (3, 2)
    assert kit.spec_of(q=q, k=k, v=v, mask="none").band == (-1, -1)
    # One band, one key.
    assert (
        kit.spec_of(q=q, k=k, v=v, window=(-1, -1))
        == kit.spec_of(q=q, k=k, v=v)
        == kit.spec_of(q=q, k=k, v=v, window=(-1, 4))
    )
    lengths = torch.tensor([0, 4, 9, 10], dtype=torch.int32)
    thd = {"layout": "thd", "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    ragged = kit.spec_of(q=q.flatten(0, 1), k=k.flatten(0, 1), v=v.flatten(0, 1), **thd)
    assert ragged.ragged and ragged.batch == 3 and not ragged.kv_lengths
    for one, layout, x, y in ((spec, "sbhd", q, v), (ragged, "thd", q.flatten(0, 1), v.flatten(0, 1))):
        assert (one.out_shape, one.lse_shape) == (out_shape(x, y, layout), lse_shape(x, layout))
    bshd = kit.spec_of(q=q, k=torch.randn(5, 7, 2, 16), v=torch.randn(5, 7, 2, 8), layout="bshd")
    assert (bshd.out_shape, bshd.lse_shape, bshd.batch) == ((5, 2, 4, 8), lse_shape(q, "bshd"), 5)


def test_a_spec_of_quantized_operands_has_the_strides_of_their_rows() -> None:
    q, k = (ops.quantize(torch.randn(4, 2, 3, 16), CurrentQuantizer(), usage="row") for _ in range(2))
    column = ops.quantize(torch.randn(4, 2, 3, 16), CurrentQuantizer(), usage="column")
    spec = kit.spec_of(q=q, k=k, v=column)
    assert (spec.q_stride, spec.v_stride, spec.dtype) == ((96, 48, 16, 1), (), torch.float32)


@pytest.mark.parametrize("packing", [None, "3hd", "h3d", "2hd", "h2d"])
def test_gradients_lie_as_packed_operands_do(packing: str | None) -> None:
    q, k, v = qkv(5, 2, 4, 8)
    spec = kit.spec_of(q=q, k=k, v=v, packing=packing)
    grads = kit.empty_gradients(spec, torch.bfloat16)
    assert all(x.shape == q.shape and x.dtype == torch.bfloat16 for x in grads)
    packed = [] if packing is None else grads[3 - int(packing.strip("hd")) :]
    axis = -3 if packing is not None and packing.endswith("hd") else -2
    for x in packed:
        base = x._base
        assert base is not None and base is packed[0]._base and base.shape[axis] == len(packed)
    assert all(x.is_contiguous() for x in grads[: 3 - len(packed)])


def test_the_signature_of_the_check_follows_the_operator() -> None:
    operator = OPERATORS["attention_fwd"].signature.parameters
    checked = list(inspect.signature(kit.checks.attention).parameters)
    assert checked == [name for name in operator if name in checked]
