# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of attention: head dimensions, dtypes, and every option that compiles to other code; each with its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_dispatch_triton.attention.operators import attention_bwd, attention_fwd

_ROWS, _BATCH, _HEADS, _GROUPS = 4096, 2, 32, 8
_BF16 = torch.bfloat16
#: What each says of its own; all are bf16 with 128 features.
_OPTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {"mask": "none"}),
    ("window", {"mask": "causal_bottom_right", "window": (1024, 0)}),
    ("alibi", {"bias_type": "alibi"}),
    ("softcap and offset", {"softcap": 30.0, "softmax_type": "learnable", "softmax_offset": torch.zeros(_HEADS)}),
    ("dropout", {"dropout_p": 0.1, "rng_state": torch.zeros(2, dtype=torch.int64)}),
    ("max_logit", {"with_max_logit": True}),
)
_FORWARD_ONLY = ("with_max_logit", "out_dtype")


def _both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> None:
    made = attention_fwd(q, k, v, **options)
    assert made.lse is not None and made.saved is not None
    rest = {name: x for name, x in options.items() if name not in _FORWARD_ONLY}
    dout = torch.empty_like(made.out)
    attention_bwd(dout, q, k, v, made.out, made.lse, made.saved, with_dbias="bias" in options, **rest)


def _operands(dtype: torch.dtype, features: int, features_v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of which nothing is ever touched."""
    q = torch.empty((_ROWS, _BATCH, _HEADS, features), dtype=dtype)
    k = torch.empty((_ROWS, _BATCH, _GROUPS, features), dtype=dtype)
    return q, k, torch.empty((_ROWS, _BATCH, _GROUPS, features_v), dtype=dtype)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Name, and what makes the call."""
    for dtype, features, features_v in (
        (_BF16, 64, 64), (_BF16, 128, 128), (_BF16, 192, 128), (_BF16, 256, 256), (torch.float16, 128, 128),
        (torch.float32, 64, 64), (torch.float32, 128, 128), (torch.float32, 256, 256),
    ):  # fmt: skip
        operands = _operands(dtype, features, features_v)
        name = f"{str(dtype).removeprefix('torch.')} {features}/{features_v}"
        yield f"causal {name}", lambda x=operands: _both(*x, {})
    # Outputs, and their gradients, may be wider than the operands.
    wide = {"out_dtype": torch.float32}
    for features in (128, 256):
        yield f"fp32 out {features}", lambda n=features: _both(*_operands(_BF16, n, n), wide)
    for name, options in _OPTIONS:
        yield name, lambda o=options: _both(*_operands(_BF16, 128, 128), o)
    yield from _uneven()
    bias = torch.empty((1, _HEADS, _ROWS, _ROWS), dtype=_BF16)
    yield "bias", lambda: _both(*_operands(_BF16, 128, 128), {"bias": bias, "bias_type": "post_scale"})
    hidden = torch.empty((_BATCH, 1, _ROWS, _ROWS), dtype=torch.bool)
    yield "arbitrary", lambda: _both(*_operands(_BF16, 128, 128), {"mask": "arbitrary", "attn_mask": hidden})


def _uneven() -> Iterator[tuple[str, Callable[[], object]]]:
    """Sequences with lengths of their own, one query each over pages of keys last."""
    bounds = torch.tensor([0, 1000, _ROWS], dtype=torch.int32)
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    yield "padding", lambda: _both(*_operands(_BF16, 128, 128), {"mask": "padding_causal", **lengths})
    q, k, v = (x[:, 0] for x in _operands(_BF16, 128, 128))
    yield "thd", lambda: _both(q, k, v, {"layout": "thd", "mask": "padding_causal", **lengths})
    table = torch.zeros((_BATCH, 64), dtype=torch.int32)
    pages = torch.empty((256, 64, _GROUPS, 128), dtype=_BF16)
    query = torch.empty((1, _BATCH, _HEADS, 128), dtype=_BF16)
    yield (
        "pages",
        lambda: attention_fwd(query, pages, pages, mask="none", page_table=table, inference=True),
    )
