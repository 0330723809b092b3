# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What else a training step needs: dropout with residual add, multi-tensor optimizer steps, mixture-of-experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from te_dispatch.core.facts import Derived, fact
from te_dispatch.core.operator import Fact, operator
from te_dispatch.ops.results import DropoutAddForward, MoePermute, MoeUnpermuteBackward

if TYPE_CHECKING:
    import torch

    from te_dispatch.numerics.quantized import Operand


def _dropout_shape(x: Any, residual: Any = None, *, dropout_p: float = 0.0, **_: Any) -> DropoutAddForward:
    import torch

    mask = torch.empty(x.shape, dtype=torch.uint8, device=x.device) if dropout_p > 0 else None
    return DropoutAddForward(torch.empty_like(x), mask)


@operator(
    family="training",
    version=1,
    shape=_dropout_shape,
    device="x.device",
    facts=(Fact("dropout", "(dropout_p > 0.0)", doc="whether dropout is on", boolean=True),),
    companion="dropout_add_bwd",
    companion_facts=lambda call: Derived(
        call,
        {
            "dy.dtype": fact("x.dtype"),
            "mask": fact("dropout"),
            "mask.dtype": lambda c: "uint8" if c.get("dropout") else None,
            "dropout": fact("dropout"),
        },
    ),
)
def dropout_add_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> DropoutAddForward:
    """out = residual + dropout(x + bias).

    Args:
        x: (..., K); residual: like x; bias: (K,), float32, bfloat16 or float16.
        dropout_p: probability of dropping; kept values are scaled by 1 / (1 - p).
        rng_state: int64 (2,), (seed, offset), required when dropout_p > 0. Equal states drop the same elements;
            elements and states draw independently.

    Returns:
        out like x; mask uint8 like x, 1 where kept; None when dropout_p is 0.
    """
    raise NotImplementedError


@operator(
    family="training",
    version=1,
    shape=lambda dy, mask=None, **_: _dropout_shape(dy).out,
    device="dy.device",
    facts=(Fact("dropout", "(dropout_p > 0.0)", doc="whether dropout is on", boolean=True),),
    companion="dropout_add_fwd",
    backward=True,
)
def dropout_add_bwd(dy: torch.Tensor, mask: torch.Tensor | None = None, *, dropout_p: float = 0.0) -> torch.Tensor:
    """Gradient of x (and, summed, of bias): dy * mask / (1 - p); the residual's gradient is dy itself."""
    raise NotImplementedError


_LISTS = (Fact("params.dtype", "params[0].dtype", "dtype"), Fact("grads.dtype", "grads[0].dtype", "dtype"))


@operator(
    family="training",
    version=1,
    shape=lambda *_, **__: None,
    device="params[0].device",
    facts=(
        *_LISTS,
        Fact("params", "len(params)", "size"),
        Fact("grads", "len(grads)", "size"),
        Fact("exp_avgs", "exp_avgs[0].dtype", "dtype"),
        Fact("exp_avg_sqs", "exp_avg_sqs[0].dtype", "dtype"),
        Fact("master", "(master is not None)"),
    ),
    mutates=("params", "exp_avgs", "exp_avg_sqs", "master"),
)
def multi_tensor_adam(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    step: int = 1,
    weight_decay: float = 0.0,
    adam_w: bool = True,
    bias_correction: bool = True,
    master: Sequence[torch.Tensor] | None = None,
    noop_flag: torch.Tensor | None = None,
) -> None:
    """One Adam (Kingma and Ba, 2014) or AdamW (Loshchilov and Hutter, 2017) step, in place, in fp32.

    Args:
        params, grads, exp_avgs, exp_avg_sqs: equally long lists of equally shaped tensors on one device; params and
            grads of one dtype each, moments float32.
        lr, beta1, beta2, eps, step (from 1), weight_decay: as in the papers.
        adam_w: decoupled weight decay; else it is added to the gradient.
        bias_correction: divide the moments by 1 - beta^step, computed in float64 and rounded to fp32.
        master: float32 copies to update instead; params then receive their rounded values.
        noop_flag: float32 (1,): nonzero skips the step (an overflow was found). It is read only.
    """
    raise NotImplementedError


def _norm_shape(tensors: Any, *, per_tensor: bool = False) -> torch.Tensor:
    import torch

    return torch.empty((len(tensors) if per_tensor else 1,), dtype=torch.float32, device=tensors[0].device)


@operator(
    family="training",
    version=1,
    shape=_norm_shape,
    device="tensors[0].device",
    facts=(Fact("tensors", "len(tensors)", "size"), Fact("tensors.dtype", "tensors[0].dtype", "dtype")),
)
def multi_tensor_l2norm(tensors: Sequence[torch.Tensor], *, per_tensor: bool = False) -> torch.Tensor:
    """The Euclidean norm of all tensors together, float32 (1,), or of each, (n,); accumulated in fp32."""
    raise NotImplementedError


@operator(
    family="training",
    version=1,
    shape=lambda *_, **__: None,
    device="inputs[0].device",
    facts=(
        Fact("inputs", "len(inputs)", "size"),
        Fact("outputs", "len(outputs)", "size"),
        Fact("inputs.dtype", "inputs[0].dtype", "dtype"),
        Fact("outputs.dtype", "outputs[0].dtype", "dtype"),
    ),
    mutates=("outputs", "noop_flag"),
)
def multi_tensor_scale(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    scale: float,
    *,
    noop_flag: torch.Tensor | None = None,
) -> None:
    """outputs[i] = inputs[i] * scale, in fp32, rounded once.

    Args:
        noop_flag: float32 (1,): becomes 1 where an input holds Inf or NaN, and stays what it was where none does.
    """
    raise NotImplementedError


def _permuted_shape(x: Any, rows: int) -> Any:
    """Like x with another number of rows; of a `Quantized` only the row-wise copy moves."""
    import torch

    from te_dispatch.numerics.quantized import FakeQuantized
    from te_dispatch.ops.shapes import data_shapes, scale_shapes

    shape = (rows, x.shape[-1])
    if not hasattr(x, "row_data"):
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    scale = x.row_scale_inv
    if x.scaling != "tensor":
        scale = torch.empty(scale_shapes(shape, x.scaling)[0], dtype=scale.dtype, device=x.device)
    data = torch.empty(data_shapes(shape, x.scaling)[0], dtype=torch.uint8, device=x.device)
    return FakeQuantized(
        data, None, scale, None, x.encoding, x.scaling, x.scale_layout, shape, x.dtype, x.device, x.global_scale_inv
    )


def _permute_shape(x: Any, indices: Any, *, probs: Any = None, capacity: int | None = None) -> MoePermute:
    import torch

    tokens, top_k = indices.shape
    rows = capacity if capacity is not None else tokens * top_k
    return MoePermute(
        _permuted_shape(x, rows),
        torch.empty((tokens, top_k), dtype=torch.int32, device=x.device),
        None if probs is None else torch.empty((rows,), dtype=probs.dtype, device=x.device),
    )


@operator(
    family="training",
    version=1,
    shape=_permute_shape,
    device="x.device",
)
def moe_permute(
    x: Operand, indices: torch.Tensor, *, probs: torch.Tensor | None = None, capacity: int | None = None
) -> MoePermute:
    """Sort tokens by expert: every (token, choice) becomes one row, rows of one expert adjacent and in token order.

    Args:
        x: (T, K) float32, bfloat16 or float16, or a `Quantized` with a row-wise copy and canonical scales, of any
            scaling but block_2d and nvfp4_rht.
        indices: int32 or int64 (T, top_k), the experts of each token; -1 drops the choice.
        probs: (T, top_k), carried along.
        capacity: rows of the result; choices that come behind it in this order are dropped. None for T * top_k.

    Returns:
        permuted (rows, K) like x, rows that no choice fills are 0, scales too. Of a `Quantized` it is a record with the
        row-wise copy alone, whose rows' scales move with them; a scale of the whole tensor is x's own. row_map int32
        (T, top_k), each choice's row or -1; probs (rows,), 0 where unfilled.
    """
    raise NotImplementedError


def _unpermute_shape(x: Any, row_map: Any, *, probs: Any = None) -> torch.Tensor:
    import torch

    return torch.empty((row_map.shape[0], x.shape[-1]), dtype=x.dtype, device=x.device)


@operator(
    family="training",
    version=1,
    shape=_unpermute_shape,
    device="x.device",
)
def moe_unpermute(x: torch.Tensor, row_map: torch.Tensor, *, probs: torch.Tensor | None = None) -> torch.Tensor:
    """Undo `moe_permute`: out[t] = sum over choices c of x[row_map[t, c]] (times probs[t, c]), summed in fp32.

    Args:
        x: (rows, K).
        row_map: int32 (T, top_k), -1 for a dropped choice. Rows that x does not have are an error, which is raised
            where the map lies on the host.
        probs: (T, top_k).
    """
    raise NotImplementedError


def _unpermute_bwd_shape(dy: Any, x: Any, row_map: Any, *, probs: Any = None) -> MoeUnpermuteBackward:
    import torch

    return MoeUnpermuteBackward(torch.empty_like(x), None if probs is None else torch.empty_like(probs))


@operator(
    family="training",
    version=1,
    shape=_unpermute_bwd_shape,
    device="dy.device",
)
def moe_unpermute_bwd(
    dy: torch.Tensor, x: torch.Tensor, row_map: torch.Tensor, *, probs: torch.Tensor | None = None
) -> MoeUnpermuteBackward:
    """Gradient of `moe_unpermute`: dinput like x, dprobs like probs. (`moe_permute`'s gradient is `moe_unpermute`.)

    The dprobs of a dropped choice, and the rows of dinput that no choice takes, are 0, whatever dy holds.
    """
    raise NotImplementedError
