# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""FlashAttention's packages, where they are installed, in what the conformance kit's small calls leave out."""

from __future__ import annotations

import threading

import pytest
import torch

import te_dispatch
from te_dispatch import ops
from te_dispatch.core.errors import DispatchError

VERSIONS = ("2", "3", "4")


def _serves(version: str) -> bool:
    """Whether the version is installed and made for this chip."""
    if not torch.cuda.is_available():
        return False
    q = torch.randn(64, 1, 1, 64, device="cuda", dtype=torch.bfloat16)
    try:
        with te_dispatch.using(attention=f"cuda.flash_attention_{version}"):
            ops.attention_fwd(q, q, q)
    except DispatchError:
        return False
    return True


def ragged(implementation: str, heads: int, groups: int, features: int) -> list[torch.Tensor]:
    """Output and gradients of sequences of several tiles, one row and part of a tile."""
    torch.manual_seed(0)
    lengths = (300, 1, 77)
    q, dout = (torch.randn(sum(lengths), heads, features, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(sum(lengths), groups, features, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bounds = torch.tensor([0, 300, 301, 378], dtype=torch.int32, device="cuda")
    how = {
        "layout": "thd", "mask": "padding_causal", "cu_seqlens_q": bounds, "cu_seqlens_kv": bounds,
        "max_seqlen_q": 300, "max_seqlen_kv": 300,
    }  # fmt: skip
    with te_dispatch.using(attention=implementation):
        made = ops.attention_fwd(q, k, v, **how)
        assert made.saved.implementation == implementation
        grads = ops.attention_bwd(dout, q, k, v, made.out, made.lse, made.saved, **how)
    return [made.out, made.lse, grads.dq, grads.dk, grads.dv]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("heads, groups", [(4, 4), (8, 2)])
@pytest.mark.parametrize("features", [64, 128])
def test_sequences_of_several_tiles(version: str, heads: int, groups: int, features: int) -> None:
    """Within the rounding of their 16 bits of cuDNN's, which the kit has judged."""
    if not _serves(version):
        pytest.skip(f"FlashAttention {version} is not installed, or not for this chip")
    found = ragged(f"cuda.flash_attention_{version}", heads, groups, features)
    for one, other in zip(found, ragged("cuda.cudnn_attention", heads, groups, features), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.04)


@pytest.mark.parametrize("version", VERSIONS)
def test_threads_that_call_at_once(version: str) -> None:
    if not _serves(version):
        pytest.skip(f"FlashAttention {version} is not installed, or not for this chip")
    name, found = f"cuda.flash_attention_{version}", {}

    def call(length: int) -> None:
        generator = torch.Generator("cuda").manual_seed(length)
        x = torch.randn(length, 2, 2, 96, device="cuda", dtype=torch.float16, generator=generator)
        with te_dispatch.using(attention=name):
            found[length] = ops.attention_fwd(x, x, x, mask="causal" if length % 2 else "none").out

    lengths = (64, 65, 128, 129)
    threads = [threading.Thread(target=call, args=(length,)) for length in lengths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(found)
    for length in lengths:
        call(length)
        assert torch.equal(together[length], found[length])
