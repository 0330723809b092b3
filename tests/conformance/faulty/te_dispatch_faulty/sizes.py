# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults beyond a size: where kernels change strategy, run out of a launch's grid, or take another loop."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import (
    Behaviour,
    Condition,
    changing,
    columns,
    columns_from,
    elements_from,
    last_row,
    off,
    rows,
    rows_from,
    spoiled,
    table,
    when,
    zero,
)

#: Operators that work on rows: the result.
_BY_ROWS = {
    "layernorm_fwd": "y",
    "rmsnorm_fwd": "y",
    "layernorm_bwd": "dx",
    "rmsnorm_bwd": "dx",
    "softmax_fwd": "",
    "softmax_bwd": "",
    "activation_fwd": "out",
    "activation_bwd": "dx",
    "dropout_add_fwd": "out",
    "dropout_add_bwd": "",
    "quantize": "row_data",
}


def _of_rows(operator: str, result: str) -> tuple[Fault, ...]:
    entries: dict[str, tuple[str, Behaviour]] = {
        f"{operator}_stops_at_65535_rows": (
            "leaves rows from 65,535 on, the most blocks of a grid's second dimension",
            spoiled(result, rows_from(65535)),
        ),
        f"{operator}_stops_at_8192_columns": (
            "keeps 8,192 columns of a row in registers and forgets the others",
            spoiled(result, columns_from(8192)),
        ),
    }
    if operator not in ("softmax_fwd", "softmax_bwd"):
        entries[f"{operator}_stops_at_131072_elements"] = (
            "launches one wave of blocks: 2^17 elements",
            spoiled(result, elements_from(1 << 17)),
        )
    return table(operator, entries)


def _first_lists(count: int, *names: str) -> Behaviour:
    """A step over lists of tensors serves the first so many."""

    def behave(call: Call) -> Any:
        cut = {name: None if call[name] is None else call[name][:count] for name in names}
        return call.sound(**cut)

    return behave


def _norm_of_first(count: int) -> Behaviour:
    def behave(call: Call) -> Any:
        tensors = list(call["tensors"])
        return call.sound(tensors=[t if i < count else torch.zeros_like(t) for i, t in enumerate(tensors)])

    return behave


_ADAM = ("params", "grads", "exp_avgs", "exp_avg_sqs", "master")

_LISTS = (
    *table(
        "multi_tensor_adam",
        {
            "adam_stops_at_24_tensors": ("takes a launch's 24 tensors and no second one", _first_lists(24, *_ADAM)),
            "adam_stops_at_64_tensors": ("updates the first 64 tensors", _first_lists(64, *_ADAM)),
            "adam_counts_steps_in_16_bits": (
                "counts steps in 16 bits",
                changing(step=lambda call: max(call["step"] % 32768, 1)),
            ),
        },
    ),
    *table(
        "multi_tensor_l2norm",
        {
            "l2norm_stops_at_24_tensors": ("leaves the 25th and later tensors out", _norm_of_first(24)),
            "l2norm_stops_at_64_tensors": ("leaves the 65th and later tensors out", _norm_of_first(64)),
            "l2norm_stops_at_65536_elements": (
                "sums the first chunk of 65,536 elements of each tensor",
                changing(tensors=lambda call: [t.reshape(-1)[:65536] for t in call["tensors"]]),
            ),
        },
    ),
    *table(
        "multi_tensor_scale",
        {
            "scale_stops_at_24_tensors": ("scales the first 24 tensors", _first_lists(24, "inputs", "outputs")),
            "scale_stops_at_64_tensors": ("scales the first 64 tensors", _first_lists(64, "inputs", "outputs")),
            "scale_stops_at_65536_elements": (
                "scales the first chunk of 65,536 elements of each tensor",
                changing(
                    inputs=lambda call: [t.reshape(-1)[:65536] for t in call["inputs"]],
                    outputs=lambda call: [t.view(-1)[:65536] for t in call["outputs"]],
                ),
            ),
        },
    ),
)


def _tensors(name: str, more_than: int) -> Condition:
    return lambda call: len(call[name]) > more_than


def _last_tensor(call: Call) -> Any:
    made = call.sound()
    if made[-1].row_data is not None and made[-1].row_data.numel():
        made[-1].row_data.view(torch.uint8).bitwise_xor_(1)
    return made


def _wide(more_than: int) -> Condition:
    return lambda call: call["q"].shape[-1] > more_than


def _keys(more_than: int) -> Condition:
    def holds(call: Call) -> bool:
        k, layout = call["k"], call["layout"]
        if layout == "thd":
            bounds = call["cu_seqlens_kv"]
            lengths = torch.zeros(0, device=k.device) if bounds is None else bounds.flatten().diff()
            return bool((lengths > more_than).any())
        return bool(k.shape[0 if layout == "sbhd" else 1] > more_than)

    return holds


def _sequences(more_than: int) -> Condition:
    return lambda call: call["layout"] == "thd" and call["cu_seqlens_q"].numel() - 1 > more_than


def _blocks(more_than: int) -> Condition:
    """Sequences times heads."""

    def holds(call: Call) -> bool:
        q, layout = call["q"], call["layout"]
        batch = call["cu_seqlens_q"].numel() - 1 if layout == "thd" else q.shape[1 if layout == "sbhd" else 0]
        return bool(batch * q.shape[-2] > more_than)

    return holds


def _heads_from(first: int, path: str) -> Behaviour:
    def behave(call: Call) -> Any:
        made = call.sound()
        found = getattr(made, path)
        if isinstance(found, torch.Tensor) and found.shape[-2] > first:
            found[..., first:, :].mul_(0.5)
        return made

    return behave


def _attention(half: str, path: str) -> tuple[Fault, ...]:
    entries = {
        f"attention_{half}_stops_at_8_heads": ("serves 8 heads", _heads_from(8, path)),
        f"attention_{half}_stops_at_16_heads": ("serves 16 heads", _heads_from(16, path)),
        f"attention_{half}_reads_512_keys": ("takes another path beyond 512 keys", spoiled(path, on=_keys(512))),
        f"attention_{half}_reads_1024_keys": ("takes another path beyond 1,024 keys", spoiled(path, on=_keys(1024))),
        f"attention_{half}_needs_128_features": ("keeps 128 features of a head", spoiled(path, on=_wide(128))),
        f"attention_{half}_needs_17_sequences": (
            "keeps the bounds of 17 packed sequences",
            spoiled(path, on=_sequences(17)),
        ),
        f"attention_{half}_stops_at_65535_blocks": (
            "leaves what the second dimension of a grid has no room for",
            spoiled(path, last_row, zero, on=_blocks(65_535)),
        ),
    }
    suffix = "_bwd" if half == "bwd" else ""
    return table(f"attention_{half}", entries, on=f"unfused_attention{suffix}")


def _k(more_than: int) -> Condition:
    def holds(call: Call) -> bool:
        a = call["a"]
        return bool(a.shape[0 if call["layout"] == "TN" else -1] > more_than)

    return holds


_PRODUCTS = (
    *table(
        "gemm",
        {
            "product_loses_k_beyond_512": ("adds 512 products of a sum", spoiled("out", on=_k(512))),
            "product_loses_k_beyond_1024": ("adds 1,024 products of a sum", spoiled("out", on=_k(1024))),
            "product_loses_k_beyond_2048": ("splits K beyond 2,048 and adds one part", spoiled("out", on=_k(2048))),
            "product_stops_at_512_rows": ("serves 512 rows", spoiled("out", rows_from(512))),
            "product_stops_at_1024_columns": ("serves 1,024 columns", spoiled("out", columns_from(1024))),
            "product_in_tf32_from_512": (
                "rounds fp32 operands to TF32 where K is 512 or more",
                when(
                    lambda call: _k(511)(call) and call["a"].dtype == torch.float32,
                    changing(a=lambda call: _tf32(call["a"]), b=lambda call: _tf32(call["b"])),
                ),
            ),
        },
        on="matmul",
    ),
    *table(
        "gemm",
        {
            "fp8_product_loses_k_beyond_512": ("adds 512 products of a sum", spoiled("out", on=_k(512))),
            "fp8_product_loses_k_beyond_2048": ("splits K beyond 2,048, adds one part", spoiled("out", on=_k(2048))),
            "fp8_product_stops_at_128_rows": ("serves 128 rows", spoiled("out", rows_from(128))),
        },
        on="emulated_gemm",
    ),
)


def _tf32(x: torch.Tensor) -> torch.Tensor:
    rounded = ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(x.isfinite() & rounded.isfinite(), rounded, x)


def _experts(more_than: int) -> Condition:
    return lambda call: call["indices"].numel() > 0 and int(call["indices"].max()) >= more_than


def _positions(more_than: int) -> Condition:
    return lambda call: call["freqs"].shape[0] > more_than


def _late_groups_off(call: Call) -> Any:
    made = call.sound()
    for out in made[17:]:
        out.mul_(0.5)
    return made


_REST = (
    *table("grouped_gemm", {"grouped_needs_17_groups": ("keeps 17 groups' pointers", _late_groups_off)},
           on="grouped_matmul"),
    *table(
        "moe_permute",
        {
            "permute_needs_256_experts": (
                "counts rows of 256 experts", spoiled("permuted", change=zero, on=_experts(256)),
            ),
            "permute_stops_at_1024_rows": ("moves 1,024 rows", spoiled("permuted", rows_from(1024), zero)),
            "permute_stops_at_4096_rows": ("moves 4,096 rows", spoiled("permuted", rows_from(4096), zero)),
        },
    ),
    *table("moe_unpermute", {"unpermute_stops_at_1024_rows": ("sums 1,024 tokens", spoiled("", rows_from(1024)))}),
    *table(
        "rope_fwd",
        {
            "rope_stops_at_4096_positions": (
                "keeps angles of 4,096 positions", spoiled(part=lambda flat: flat[-1:], on=_positions(4096)),
            ),
            "rope_stops_at_65536_elements": ("serves 65,536 elements", spoiled(part=elements_from(65536))),
        },
    ),
    *table("rope_bwd", {"rope_bwd_stops_at_4096_positions": (
        "keeps angles of 4,096 positions", spoiled(part=lambda flat: flat[-1:], on=_positions(4096)))}),
    *table(
        "compute_amax",
        {
            "amax_stops_at_131072_elements": (
                "reads 2^17 elements", changing(x=lambda call: call["x"].reshape(-1)[: 1 << 17]),
            ),
        },
    ),
    *table(
        "layernorm_bwd",
        {
            "dgamma_loses_rows_beyond_1024": ("sums dgamma over 1,024 rows", spoiled("dgamma", on=rows("x", 1024))),
            "dbeta_loses_rows_beyond_65535": ("sums dbeta over 65,535 rows", spoiled("dbeta", on=rows("x", 65535))),
            "dgamma_loses_columns_beyond_4096": (
                "sums dgamma of 4,096 columns", spoiled("dgamma", columns_from(4096), off, columns("x", 4096)),
            ),
        },
    ),
    *table(
        "rmsnorm_bwd",
        {"rms_dgamma_loses_rows_beyond_1024": ("sums dgamma over 1,024 rows", spoiled("dgamma", on=rows("x", 1024)))},
    ),
    *table("quantize_dbias", {"dbias_loses_rows_beyond_1024": (
        "sums the bias gradient over 1,024 rows", spoiled("dbias", on=rows("x", 1024)))}),
    *table("dequantize", {"dequantize_stops_at_131072_elements": (
        "reads 2^17 elements", spoiled(part=elements_from(1 << 17), change=zero))}),
    *table("multi_tensor_quantize", {"casts_24_tensors": (
        "casts the first 24 tensors", when(_tensors("xs", 24), _last_tensor))}),
    *table("split_quantize", {"splits_into_17": (
        "makes 17 parts", when(_tensors("splits", 17), _last_tensor))}),
    *table("update_delayed_scales", {
        "updates_24_histories": ("updates 24 tensors", _first_lists(24, "histories", "scales", "max_values", "amaxes")),
        "reads_64_rows_of_history": (
            "takes the maximum of 64 rows", changing(histories=lambda call: [h[:64] for h in call["histories"]])),
    }),
    *table("pad_rows", {"pads_17_splits": (
        "pads 17 splits", spoiled(change=zero, on=_tensors("splits", 17)))}),
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (
    *(one for operator, result in _BY_ROWS.items() for one in _of_rows(operator, result)),
    *_LISTS,
    *_attention("fwd", "out"),
    *_attention("bwd", "dq"),
    *_PRODUCTS,
    *_REST,
)
