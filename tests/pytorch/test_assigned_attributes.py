# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is assigned to an attribute of a module acts as the constructor's argument of that name, or raises.

Every argument of every module is gone through. One that an attribute has the name of is in `OTHERS`, with other values,
or in `WITHOUT_EFFECT`, with the reason why assigning it changes no result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import Float8CurrentScaling
from te_dispatch.pytorch.distributed.rng_tracker import RngStatesTracker
from te_dispatch.pytorch.modules.dropout_add import DropPath
from te_dispatch.pytorch.modules.normalization import L2Normalization

pytestmark = pytest.mark.sampled(4)

Call = Callable[[torch.nn.Module], Any]


class Case(NamedTuple):
    """A way to construct a module, and what it is called with."""

    kind: type[torch.nn.Module]
    arguments: dict[str, Any]
    call: Call


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def _with(*shape: int, **more: Any) -> Call:
    return lambda module: module(_random(*shape), **more)


def _packed(module: torch.nn.Module) -> Any:
    return module(qkv_layer=_random(8, 8, 3, 4, 8))


def _decoder(module: torch.nn.Module) -> Any:
    return module(_random(8, 8, 32), encoder_output=_random(8, 8, 32))


def _rotated(module: torch.nn.Module) -> Any:
    return module(_random(8, 8, 32), rotary_pos_emb=te.RotaryPositionEmbedding(8)(8).cpu())


_LAYER = {"hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 4, "device": "cpu"}
_LAYER |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
_MHA = {"hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0, "device": "cpu"}
_ROWS = _with(16, 32)
_TOKENS = _with(8, 8, 32)

CASES = {
    "LayerNorm": Case(te.LayerNorm, {"normalized_shape": 32, "device": "cpu"}, _ROWS),
    "RMSNorm": Case(te.RMSNorm, {"normalized_shape": 32, "device": "cpu"}, _ROWS),
    "L2Normalization": Case(L2Normalization, {}, _ROWS),
    "Linear": Case(te.Linear, {"in_features": 32, "out_features": 32, "device": "cpu"}, _ROWS),
    "LayerNormLinear": Case(te.LayerNormLinear, {"in_features": 32, "out_features": 32, "device": "cpu"}, _ROWS),
    "LayerNormMLP": Case(te.LayerNormMLP, {"hidden_size": 32, "ffn_hidden_size": 32, "device": "cpu"}, _ROWS),
    "LayerNormMLP, clamped": Case(
        te.LayerNormMLP,
        {"hidden_size": 32, "ffn_hidden_size": 32, "activation": "clamped_swiglu", "device": "cpu"},
        _ROWS,
    ),
    "DotProductAttention": Case(te.DotProductAttention, {"num_attention_heads": 4, "kv_channels": 8}, _packed),
    "DotProductAttention, learnable": Case(
        te.DotProductAttention, {"num_attention_heads": 4, "kv_channels": 8, "softmax_type": "learnable"}, _packed
    ),
    "MultiheadAttention": Case(te.MultiheadAttention, _MHA, _TOKENS),
    "MultiheadAttention, fused": Case(
        te.MultiheadAttention,
        {**_MHA, "fuse_qkv_params": True, "input_layernorm": True, "qk_norm_type": "RMSNorm"},
        _rotated,
    ),
    "TransformerLayer": Case(te.TransformerLayer, _LAYER, _TOKENS),
    "TransformerLayer, decoder": Case(te.TransformerLayer, {**_LAYER, "layer_type": "decoder"}, _decoder),
    "TransformerLayer, post norm": Case(
        te.TransformerLayer, {**_LAYER, "apply_residual_connection_post_layernorm": True}, _TOKENS
    ),
    "RotaryPositionEmbedding": Case(te.RotaryPositionEmbedding, {"dim": 16}, lambda module: module(8)),
    "Fp8Padding": Case(te.Fp8Padding, {"num_gemms": 2, "align_size": 16}, _with(24, 32, m_splits=[4, 20])),
    "Fp8Unpadding": Case(te.Fp8Unpadding, {"num_gemms": 2, "align_size": 16}, _with(48, 32, m_splits=[4, 20])),
    "DropPath": Case(DropPath, {"drop_prob": 0.25}, _ROWS),
}

_TRACKER = RngStatesTracker()
_TRACKER.add("model-parallel-rng", 5)


def _tracker() -> RngStatesTracker:
    return _TRACKER


_EVERY_MASK = ("no_mask", "causal", "causal_bottom_right", "causal,bottom_right")

#: Argument -> values to assign. Those that a case has already are left out.
OTHERS: dict[str, tuple[Any, ...]] = {
    "eps": (0.5, 1),
    "zero_centered_gamma": (True,),
    "normalization": ("RMSNorm", "BatchNorm"),
    "return_bias": (True,),
    "return_layernorm_output": (True,),
    "activation": ("relu", "swiglu", "squared_relu", "tanh"),
    "activation_params": ({"limit": 0.1, "alpha": 2.0}, {"limit": 0.2}, None),
    "checkpoint": (True,),
    "save_original_input": (True,),
    "fuse_wgrad_accumulation": (True,),
    "symmetric_ar_type": ("one_shot",),
    **{f"ub_overlap_{name}": (True,) for name in ("ag", "rs", "rs_dgrad")},
    **{f"ub_bulk_{name}": (True,) for name in ("dgrad", "wgrad")},
    "tp_size": (2,),
    "tp_group": ("ranks",),
    "cp_group": ("ranks",),
    "num_attention_heads": (2,),
    "num_gqa_groups": (2, 3),
    "hidden_size": (64,),
    "kv_channels": (16,),
    "attention_dropout": (0.5, 1.5),
    "hidden_dropout": (0.5, 1.5),
    "qkv_format": ("bshd", "sdhb"),
    "attn_input_format": ("bshd", "sdhb"),
    "attn_mask_type": (*_EVERY_MASK, "cause"),
    "self_attn_mask_type": (*_EVERY_MASK, "cause"),
    "enc_dec_attn_mask_type": (*_EVERY_MASK, "cause"),
    "window_size": ((2, 0), (-2, 0)),
    "enc_dec_window_size": ((2, 0),),
    "bottom_right_diagonal": (False,),
    "enc_dec_bottom_right_diagonal": (False,),
    "softcap": (0.5, -1.0),
    "softmax_scale": (3.0,),
    "softmax_type": ("off-by-one", "vanilla", "learnable", "none"),
    "return_max_logit": (True,),
    "attention_type": ("cross", "none"),
    "input_layernorm": (True, False),
    "fuse_qkv_params": (True, False),
    "qkv_weight_interleaved": (False,),
    "rotary_pos_interleaved": (True,),
    "qk_norm_before_rope": (True,),
    "params_dtype": (torch.bfloat16,),
    "layer_type": ("decoder", "encoder"),
    "apply_residual_connection_post_layernorm": (True, False),
    "output_layernorm": (True,),
    "parallel_attention_mlp": (True,),
    "get_rng_state_tracker": (_tracker,),
    "dim": (32,),
    "rotary_base": (500.0,),
    "interleaved": (True,),
    "num_gemms": (3,),
    "align_size": (8,),
    "drop_prob": (0.75,),
}

#: It leaves no state, so that steps before an assignment change nothing in those after it.
RECIPE = Float8CurrentScaling()
QUANTIZED = "Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer"

_ONE_RANK = "it acts on several ranks alone"
_INITIALIZATION = "it acts on the initialization and on marks of parameters"
_SHAPES = "Transformer Engine does not read it, and sizes are those of the parameters, which a program may replace"
_TOGETHER = "the one acts together with the other alone: `test_interpolation`"
#: Argument -> why assigning it changes no result.
WITHOUT_EFFECT = {
    "sequence_parallel": _ONE_RANK,
    "parallel_mode": _INITIALIZATION,
    "set_parallel_mode": _INITIALIZATION,
    "rng_tracker_name": _INITIALIZATION,
    "return_layernorm_output_gathered": _ONE_RANK,
    "cp_global_ranks": _ONE_RANK,
    "cp_stream": _ONE_RANK,
    "cp_comm_type": _ONE_RANK,
    "in_features": _SHAPES,
    "out_features": _SHAPES,
    "normalized_shape": _SHAPES,
    "ffn_hidden_size": _SHAPES,
    "name": "it is for the user",
    "ub_name": "it is for the user",
    "layer_number": "it is for the user",
    "seq_length": "nothing here depends on sizes that are known ahead",
    "seq_len_interpolation_factor": _TOGETHER,
    "pretrained_max_position_embeddings": _TOGETHER,
}
#: The same in some modules.
WITHOUT_EFFECT_IN = {
    ("LayerNormMLP", "hidden_size"): _SHAPES,
    **{(name, "get_rng_state_tracker"): _INITIALIZATION for name in ("Linear", "LayerNormLinear", "LayerNormMLP")},
    # The core attention, which draws, has an attribute of its own.
    **{(name, "get_rng_state_tracker"): _INITIALIZATION for name in ("MultiheadAttention", "TransformerLayer")},
}


def _attributes(case: Case) -> Iterator[str]:
    """The constructor's arguments that are attributes, too, and no parameters."""
    module = case.kind(**case.arguments)
    for name in inspect.signature(case.kind).parameters:
        held = name in module._parameters or name in module._buffers or name in module._modules
        if hasattr(module, name) and not held and name != "bias":
            yield name


def _without_effect(case: Case, name: str) -> bool:
    return name in WITHOUT_EFFECT or (case.kind.__name__, name) in WITHOUT_EFFECT_IN


def _assignments() -> Iterator[Any]:
    for label, case in CASES.items():
        for name in _attributes(case):
            if not _without_effect(case, name):
                for value in OTHERS[name]:
                    if value != case.arguments.get(name):
                        shown = f"{label}, {name}={getattr(value, '__name__', value)}"
                        yield pytest.param(case, name, value, None, id=shown)
                        if label.startswith(QUANTIZED):
                            yield pytest.param(case, name, value, RECIPE, id=f"{shown}, quantized")


Results = dict[str, Any]


def _step(module: torch.nn.Module, call: Call, recipe: Any) -> Results:
    """Everything that a step gives: outputs, and gradients of parameters by name."""
    torch.manual_seed(3)
    _TRACKER.reset()
    _TRACKER.add("model-parallel-rng", 5)
    for parameter in module.parameters():
        parameter.grad = None
        if not hasattr(parameter, "main_grad"):
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.main_grad.zero_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = call(module)
    outputs = out if isinstance(out, tuple) else (out,)
    total = sum(x.square().sum() for x in outputs if isinstance(x, torch.Tensor))
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    found = {f"output {i}": x for i, x in enumerate(outputs)}
    for name, parameter in module.named_parameters():
        name = name.removeprefix("_orig_mod.")  # of torch.compile
        found |= {f"{name}.grad": parameter.grad, f"{name}.main_grad": parameter.main_grad.clone()}
    return found


def _equal(found: Results, expected: Results) -> bool:
    """An assignment adds and removes no parameter: of those that one has and the other has not nothing is asked."""
    outputs = [{name for name in one if name.startswith("output")} for one in (found, expected)]
    return outputs[0] == outputs[1] and all(
        torch.equal(found[name], expected[name])
        if isinstance(found[name], torch.Tensor) and isinstance(expected[name], torch.Tensor)
        else found[name] == expected[name]
        for name in found.keys() & expected.keys()
    )


def _made(case: Case, **more: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    module = case.kind(**{**case.arguments, **more})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())))
    return module


def test_every_attribute_is_listed() -> None:
    for label, case in CASES.items():
        listed = {name: name in OTHERS or _without_effect(case, name) for name in _attributes(case)}
        assert all(listed.values()), (label, listed)


@pytest.mark.parametrize(("case", "name", "value", "recipe"), list(_assignments()))
def test_it_acts_as_the_argument_or_raises(case: Case, name: str, value: Any, recipe: Any) -> None:
    module = _made(case)
    for _ in range(3):  # the third is replayed
        before = _step(module, case.call, recipe)
    shown, known = repr(module), getattr(module, name)
    try:
        setattr(module, name, value)
    except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
        spoken_of = name.removeprefix("self_").removeprefix("enc_dec_")  # of the part
        assert spoken_of in str(error) and "setter" not in str(error)
        assert repr(module) == shown and getattr(module, name) == known
        assert _equal(_step(module, case.call, recipe), before)
        return
    expected = _made(case, **{name: value})
    assert repr(module) == repr(expected)
    assert getattr(module, name) == getattr(expected, name)
    for _ in range(3):
        wanted = _outcome(expected, case.call, recipe)
    for _ in range(3):
        found = _outcome(module, case.call, recipe)
    assert found == wanted if isinstance(wanted, str) else _equal(found, wanted)


def _outcome(module: torch.nn.Module, call: Call, recipe: Any) -> Any:
    """What a step gives, or the message of its error."""
    try:
        return _step(module, call, recipe)
    except (NotImplementedError, ValueError) as error:
        return str(error)


#: Of these some value must change something: a test whose values act alike would say nothing.
@pytest.mark.parametrize(
    ("label", "name"),
    [
        *((label, name) for label in ("LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP")
          for name in ("eps", "zero_centered_gamma")),
        ("LayerNormMLP", "activation"), ("LayerNormMLP, clamped", "activation_params"),
        ("MultiheadAttention", "attn_mask_type"), ("MultiheadAttention", "qkv_format"),
        ("MultiheadAttention", "return_bias"), ("MultiheadAttention, fused", "return_layernorm_output"),
        ("TransformerLayer", "self_attn_mask_type"), ("TransformerLayer, decoder", "enc_dec_attn_mask_type"),
        ("TransformerLayer", "attn_input_format"), ("TransformerLayer", "softmax_type"),
        ("TransformerLayer", "apply_residual_connection_post_layernorm"),
        ("TransformerLayer", "parallel_attention_mlp"), ("RotaryPositionEmbedding", "rotary_base"),
    ],
)  # fmt: skip
def test_it_changes_the_result(label: str, name: str) -> None:
    case = CASES[label]
    module = _made(case)
    before = _step(module, case.call, None)
    setattr(module, name, next(value for value in OTHERS[name] if value != getattr(module, name)))
    assert not _equal(_step(module, case.call, None), before)
    setattr(module, name, getattr(_made(case), name))
    assert _equal(_step(module, case.call, None), before)


def test_dropout_draws_from_the_tracker_that_is_assigned() -> None:
    case = CASES["DotProductAttention"]._replace(
        arguments={"num_attention_heads": 4, "kv_channels": 8, "attention_dropout": 0.5}
    )
    module, expected = _made(case), _made(case, get_rng_state_tracker=_tracker)
    assert not _equal(_step(module, case.call, None), _step(expected, case.call, None))
    module.get_rng_state_tracker = _tracker
    assert _equal(_step(module, case.call, None), _step(expected, case.call, None))


def test_interpolation() -> None:
    module = te.RotaryPositionEmbedding(16)
    module.seq_len_interpolation_factor, module.pretrained_max_position_embeddings = 2, 4
    expected = te.RotaryPositionEmbedding(16, seq_len_interpolation_factor=2, pretrained_max_position_embeddings=4)
    assert torch.equal(module(32), expected(32))


@pytest.mark.parametrize(
    ("label", "name", "value"),
    [("LayerNorm", "eps", 0.5), ("LayerNormMLP", "zero_centered_gamma", True), ("LayerNormMLP", "activation", "relu"),
     ("MultiheadAttention", "attn_mask_type", "no_mask"), ("TransformerLayer", "self_attn_mask_type", "no_mask"),
     ("TransformerLayer", "apply_residual_connection_post_layernorm", True)],
)  # fmt: skip
def test_a_compiled_module_is_traced_again(label: str, name: str, value: Any) -> None:
    torch._dynamo.reset()
    case = CASES[label]
    module = _made(case)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    _step(compiled, case.call, None)
    setattr(module, name, value)
    assert _equal(_step(compiled, case.call, None), _step(_made(case, **{name: value}), case.call, None))
