# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The three FlashAttention packages behind one pair of functions. Imported when first called.

Their public functions hide the backward behind autograd, so the functions below those are called, by keyword.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.flash import FlashOptions as Options

Gradients = tuple[torch.Tensor, ...]


class Package(NamedTuple):
    """One package.

    Attributes:
        name: of the implementation. equal_heads: values have as many features as keys.
        ragged_multiple: its gradients of packed sequences are right for multiples of so many features.
        forward: (q, k, v, options) -> out, log-sum-exp (b, h, s) or (h, t).
        backward: (dout, q, k, v, out, log-sum-exp, options, gradients), which it writes.
    """

    name: str
    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Options], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., None]
    equal_heads: bool = True
    ragged_multiple: int = 1

    @property
    def format(self) -> str:
        return f"cuda.{self.name}/1"


def _lengths(o: Options) -> dict[str, Any]:
    if o.cu_seqlens_q is None:
        return {}
    return {
        "cu_seqlens_q": o.cu_seqlens_q, "cu_seqlens_k": o.cu_seqlens_kv, "max_seqlen_q": o.longest_q,
        "max_seqlen_k": o.longest_kv,
    }  # fmt: skip


# -- FlashAttention 2: flash_attn -------------------------------------------------------------------------------------


def _two(o: Options) -> dict[str, Any]:
    return {
        **_lengths(o), "dropout_p": 0.0, "softmax_scale": o.scale, "causal": o.causal, "window_size_left": o.left,
        "window_size_right": o.right, "softcap": o.softcap, "alibi_slopes": None,
    }  # fmt: skip


def _two_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn import flash_attn_interface as library

    run = library._flash_attn_forward if o.cu_seqlens_q is None else library._flash_attn_varlen_forward
    out, lse, _, _ = run(q, k, v, return_softmax=False, **_two(o))
    return out, lse


def _two_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    o: Options, gradients: Gradients,
) -> None:  # fmt: skip
    from flash_attn import flash_attn_interface as library

    run = library._flash_attn_backward if o.cu_seqlens_q is None else library._flash_attn_varlen_backward
    dq, dk, dv = gradients
    run(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, deterministic=o.deterministic, rng_state=None, **_two(o))


# -- FlashAttention 3: flash_attn_interface ---------------------------------------------------------------------------


@functools.cache
def _unasked(run: Callable[..., Any], positional: int) -> dict[str, Any] | None:
    """What a function of the first releases has to be given besides, None for each; None for those of later ones.

    The first releases take the window as a pair, and have no defaults for what is mostly absent.
    """
    parameters = inspect.signature(run).parameters
    if "window_size" not in parameters:
        return None
    rest = list(parameters.values())[positional:]
    return {parameter.name: None for parameter in rest if parameter.default is parameter.empty}


def _three(run: Callable[..., Any], positional: int, causal: str, o: Options) -> dict[str, Any]:
    """Keywords of a function; positional: how many arguments come before. causal: its name in later releases."""
    common = {**_lengths(o), "softmax_scale": o.scale, "softcap": o.softcap}
    unasked = _unasked(run, positional)
    if unasked is None:
        return {**common, causal: o.causal, "window_size_left": o.left, "window_size_right": o.right}
    return {**unasked, **common, "causal": o.causal, "window_size": (o.left, o.right)}


def _three_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    import flash_attn_interface as library

    run = library._flash_attn_forward
    out, lse, *_ = run(q, k, v, **_three(run, 3, "causal", o))
    return out, lse


def _three_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    o: Options, gradients: Gradients,
) -> None:  # fmt: skip
    import flash_attn_interface as library

    run = library._flash_attn_backward
    options = {**_three(run, 6, "is_causal", o), **dict(zip(("dq", "dk", "dv"), gradients))}
    run(dout, q, k, v, out, lse, **options, deterministic=o.deterministic)


# -- FlashAttention 4: flash_attn.cute --------------------------------------------------------------------------------


#: It compiles kernels in Python when they are first called, and two threads that do so spoil each other's.
_compiling = threading.Lock()


def _four(o: Options) -> dict[str, Any]:
    return {
        "softmax_scale": o.scale, "causal": o.causal, "cu_seqlens_q": o.cu_seqlens_q, "cu_seqlens_k": o.cu_seqlens_kv,
    }  # fmt: skip


def _four_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: Options) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.cute import interface as library

    with _compiling:
        out, lse = library._flash_attn_fwd(q, k, v, return_lse=True, **_four(o))[:2]
    return out, lse


def _four_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    o: Options, gradients: Gradients,
) -> None:  # fmt: skip
    from flash_attn.cute import interface as library

    with _compiling:
        made = library._flash_attn_bwd(q, k, v, out, dout, lse, **_four(o))
    for target, source in zip(gradients, made, strict=False):
        target.copy_(source)


TWO = Package("flash_attention_2", _two_forward, _two_backward)
THREE = Package("flash_attention_3", _three_forward, _three_backward, equal_heads=False)
#: On an H200 4.0.0b36 gives a wrong dq from the second sequence on for 8, 16, 48 and 112 features, by its public
#: function too, and a right one for 24, 32, 64, 96 and 128.
FOUR = Package("flash_attention_4", _four_forward, _four_backward, ragged_multiple=64)
