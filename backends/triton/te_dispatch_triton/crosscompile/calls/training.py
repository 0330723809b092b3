# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of the training family: a layer's activations, lists of parameters, routed tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from te_dispatch_triton import training

_TOKENS, _HIDDEN, _TOP_K, _EXPERTS = 8192, 4096, 2, 64


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, a function that makes the call) of every form that matters."""
    yield from _dropout()
    yield from _lists()
    yield from _experts()


def _dropout() -> Iterator[tuple[str, Callable[[], object]]]:
    state = torch.zeros(2, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(_TOKENS, _HIDDEN, dtype=dtype)
        bias, mask = torch.empty(_HIDDEN, dtype=dtype), torch.empty(x.shape, dtype=torch.uint8)
        yield (
            f"dropout_add_fwd {dtype}",
            partial(training.dropout_add_fwd, x, x, bias=bias, dropout_p=0.1, rng_state=state),
        )
        yield f"dropout_add_bwd {dtype}", partial(training.dropout_add_bwd, x, mask, dropout_p=0.1)
    narrow = torch.empty(_TOKENS, 100, dtype=torch.float16)
    yield "dropout_add_fwd without dropout", partial(training.dropout_add_fwd, narrow, bias=narrow[0])
    yield "dropout_add_fwd of two dtypes", partial(training.dropout_add_fwd, narrow, bias=narrow[0].bfloat16())


def _lists() -> Iterator[tuple[str, Callable[[], object]]]:
    def made(dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.empty(_HIDDEN, _HIDDEN, dtype=dtype), torch.empty(_HIDDEN, dtype=dtype)]

    low, full = made(torch.bfloat16), made(torch.float32)
    flag = torch.zeros(1)
    step = {"lr": 1e-3, "weight_decay": 0.1, "noop_flag": flag}
    yield (
        "multi_tensor_adam with master",
        partial(training.multi_tensor_adam, low, low, full, full, master=full, **step),
    )
    yield "multi_tensor_adam, L2", partial(training.multi_tensor_adam, full, full, full, full, adam_w=False, **step)
    many = full * 20
    for lists in (low, many):
        yield f"multi_tensor_l2norm of {len(lists)}", partial(training.multi_tensor_l2norm, lists)
        yield (
            f"multi_tensor_scale of {len(lists)}",
            partial(training.multi_tensor_scale, lists, lists, 0.5, noop_flag=flag),
        )
    yield "multi_tensor_l2norm of each", partial(training.multi_tensor_l2norm, low, per_tensor=True)


def _experts() -> Iterator[tuple[str, Callable[[], object]]]:
    indices = torch.zeros(_TOKENS, _TOP_K, dtype=torch.int32)
    probs = torch.empty(_TOKENS, _TOP_K)
    for columns in (_HIDDEN, 32):
        x = torch.empty(_TOKENS, columns, dtype=torch.bfloat16)
        rows = torch.empty(_TOKENS * _TOP_K, columns, dtype=torch.bfloat16)
        yield f"moe_permute of {columns}", partial(training.moe_permute, x, indices, probs=probs)
        yield f"moe_unpermute of {columns}", partial(training.moe_unpermute, rows, indices, probs=probs)
        yield f"moe_unpermute_bwd of {columns}", partial(training.moe_unpermute_bwd, x, rows, indices, probs=probs)
    halves, low = rows.half(), probs.bfloat16()
    yield "moe_unpermute of three dtypes", partial(training.moe_unpermute, halves, indices, probs=low)
    yield "moe_unpermute_bwd of three dtypes", partial(training.moe_unpermute_bwd, x, halves, indices, probs=low)
    codes, wide = torch.empty(_TOKENS, _HIDDEN, dtype=torch.uint8), indices.to(torch.int64)
    yield "moe_permute of codes", partial(training.moe_permute, codes.view(torch.int8).float(), wide)
    many = torch.zeros(_TOKENS, 12, dtype=torch.int32)
    all_rows = torch.empty(_TOKENS * 12, _HIDDEN, dtype=torch.float16)
    yield "moe_unpermute of 12 choices", partial(training.moe_unpermute, all_rows, many)
