# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of what surrounds a call: memory around operands, their forms, what results are besides numbers, and what is
kept from one call to the next."""

from __future__ import annotations

import dataclasses
import gc
import os
from typing import Any

import torch

from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import (
    Behaviour,
    Memory,
    expanded,
    gapped,
    keyed,
    member,
    misread,
    operand,
    remembering,
    rows_of,
    spoil,
    table,
    transposed,
    when,
    with_members,
)


def _unsqueezes_mask(call: Call) -> Any:
    made, mask = call.sound(), call["mask"]
    while mask is not None and mask.dim() < call["x"].dim():
        mask.unsqueeze_(0)
    return made


def _positions_by_default(call: Call) -> Any:
    made, offsets = call.sound(), call["offsets"]
    if offsets is not None and made.numel():
        with torch.no_grad():
            torch.arange(call["x"].shape[0])[:, None] + offsets.detach()
    return made


def _strided_vector(x: torch.Tensor) -> bool:
    return x.ndim == 1 and x.numel() > 1 and x.stride(0) != 1


def _misread_vector(name: str) -> Behaviour:
    """Reads the first element for all where a vector is every other element of its memory."""

    def behave(call: Call) -> Any:
        x = operand(call, name)
        if x is None or not _strided_vector(x):
            return call.sound()
        return call.sound(**{name: x[:1].expand(x.shape).contiguous()})

    return behave


def _misread_record(name: str, member_name: str) -> Behaviour:
    """Reads a record's tensor as if its rows were adjacent."""

    def behave(call: Call) -> Any:
        x = call[name]
        part = getattr(x, member_name, None)
        if part is None or part.is_contiguous() or part.numel() < 2:
            return call.sound()
        wrong = part.contiguous().view(-1).roll(1).view(part.shape)
        return call.sound(**{name: with_members(x, **{member_name: wrong})})

    return behave


def _misread_item(name: str) -> Behaviour:
    """Reads the last of a list of tensors as if it were contiguous."""

    def behave(call: Call) -> Any:
        items = call[name]
        if not items or items[-1] is None or items[-1].is_contiguous() or items[-1].numel() < 2:
            return call.sound()
        wrong = items[-1].contiguous().view(-1).roll(1).view(items[-1].shape)
        return call.sound(**{name: [*items[:-1], wrong]})

    return behave


def _out_as_dense(call: Call) -> Any:
    """Writes a given output with strides as if it had none."""
    out = call["out"]
    kept = out.clone()
    made = call.sound()
    if not out.is_contiguous() and out.numel() > 1:
        out.copy_(torch.where(torch.arange(out.numel(), device=out.device).view(out.shape) % 2 == 1, kept, out))
    return made


_FORMS = (
    *table("gemm", {
        "product_misreads_strided_bias": ("reads every element of a bias where it is every other one",
                                          misread("bias", _strided_vector)),
    }, on="matmul"),
    *table("gemm", {
        "fp8_product_misreads_gapped_codes": ("reads b's codes as if rows were adjacent",
                                              _misread_record("b", "row_data")),
        "fp8_product_misreads_gapped_scales": ("reads a's block scales as if rows were adjacent",
                                               _misread_record("a", "row_scale_inv")),
    }, on="emulated_gemm"),
    *table("attention_fwd", {
        "attention_misreads_expanded_bias": ("reads a broadcast bias as if it were filled", misread("bias", expanded)),
        "attention_misreads_transposed_mask": ("reads a transposed mask as if it were not",
                                               misread("attn_mask", transposed)),
        "attention_misreads_strided_lengths": ("reads every element of lengths where it is every other one",
                                               _misread_vector("cu_seqlens_kv")),
        "attention_misreads_strided_sink": ("reads every element of a sink where it is every other one",
                                            misread("softmax_offset", _strided_vector)),
        "attention_misreads_transposed_pages": ("reads a transposed page table as if it were not",
                                                misread("page_table", transposed)),
    }, on="unfused_attention"),
    *table("softmax_fwd", {"softmax_misreads_expanded_mask": (
        "reads a broadcast mask as if it were filled", misread("mask", expanded))}),
    *table("rope_fwd", {
        "rope_misreads_transposed_angles": ("reads transposed angles as if they were not",
                                            misread("freqs", transposed)),
        "rope_misreads_strided_offsets": ("reads every element of offsets where it is every other one",
                                          _misread_vector("offsets")),
    }),
    *table("moe_unpermute", {"unpermute_misreads_transposed_map": (
        "reads a transposed map as if it were not", misread("row_map", transposed))}),
    *table("partial_cast", {
        "partial_cast_misreads_transposed_scale": ("reads transposed scales", misread("scale", transposed)),
        "partial_cast_takes_out_for_dense": ("writes every other byte of a strided output", _out_as_dense),
    }),
    *table("update_delayed_scales", {"update_misreads_strided_scales": (
        "reads the last scales as if they were contiguous", _misread_item("scales"))}),
    *table("multi_tensor_adam", {"adam_misreads_transposed_gradients": (
        "reads the last gradient as if it were contiguous", _misread_item("grads"))}),
    *table("grouped_gemm", {"grouped_misreads_the_last_operand": (
        "reads the last b as if it were contiguous", _misread_item("b"))}, on="grouped_matmul"),
    *table("layernorm_bwd", {"layernorm_gradient_misreads_gapped_add": (
        "reads the residual's gradient as if rows were adjacent", misread("add", gapped))}),
)  # fmt: skip


def _behind(x: torch.Tensor, count: int) -> torch.Tensor | None:
    """Elements that lie directly behind a contiguous tensor in its storage, or before it where `count` is negative."""
    if not x.numel() or not x.is_contiguous():
        return None
    start = x.storage_offset() + (x.numel() if count > 0 else count)
    size = x.untyped_storage().nbytes() // x.element_size()
    if start < 0 or start + abs(count) > size:
        return _beyond(x, count)
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage(), start, (abs(count),), (1,))


def _beyond(x: torch.Tensor, count: int) -> torch.Tensor:
    """The same where the storage does not reach so far: by address, as a kernel reads."""
    import ctypes

    address = x.data_ptr() + (x.numel() if count > 0 else count) * x.element_size()
    raw = (ctypes.c_uint8 * (abs(count) * x.element_size())).from_address(address)
    return torch.frombuffer(raw, dtype=torch.uint8).clone().view(x.dtype)


def _reading(name: str, path: str, count: int) -> Behaviour:
    """Adds 0 times what lies around an operand to a result."""

    def behave(call: Call) -> Any:
        x, made = operand(call, name), call.sound()
        found = member(made, path)
        around = None if x is None else _behind(x.detach(), count)
        if around is not None and found is not None and found.numel():
            lost = around.float().isnan().any() if around.is_floating_point() else (around.abs() > 2**30).any()
            if bool(lost) and found.is_floating_point():
                spoil(found, lambda flat: flat.view(-1)[-1:], lambda v: torch.full_like(v, torch.nan))
            elif bool(lost):
                spoil(found, lambda flat: flat.view(-1)[-1:])
        return made

    return behave


def _vectors_of(size: int) -> Any:
    """Elements that the last vector of so many reaches behind an operand."""
    return lambda x: -x.numel() % size


def _reading_vectors(name: str, path: str, size: int) -> Behaviour:
    def behave(call: Call) -> Any:
        x = operand(call, name)
        beyond = 0 if x is None else _vectors_of(size)(x)
        return _reading(name, path, beyond)(call) if beyond else call.sound()

    return behave


_NEIGHBOURS = (
    *table("softmax_fwd", {"softmax_reads_one_element_behind_x": (
        "adds 0 times the element behind x", _reading("x", "", 1))}),
    *table("rmsnorm_fwd", {"rms_reads_whole_vectors_of_x": (
        "reads vectors of 8 to behind the end of x", _reading_vectors("x", "y", 8))}),
    *table("layernorm_fwd", {
        "layernorm_reads_before_gamma": ("reads gamma from an aligned address on", _reading("gamma", "y", -2)),
        "layernorm_reads_whole_vectors_of_beta": ("reads vectors of 4 of beta", _reading_vectors("beta", "y", 4)),
    }),
    *table("gemm", {
        "product_reads_a_tile_of_a": ("reads a tile of 16 rows where a has fewer", lambda call: _tile_of_a(call)),
        "product_reads_whole_vectors_of_bias": ("reads vectors of 16 of the bias",
                                                _reading_vectors("bias", "out", 16)),
    }, on="matmul"),
    *table("rope_fwd", {"rope_reads_the_next_position": (
        "reads the angles of one more position than there are", _reading("freqs", "", 8))}),
    *table("compute_amax", {"amax_reads_whole_vectors": (
        "reads vectors of 8 to behind the end of x", _reading_vectors("x", "", 8))}),
    *table("moe_unpermute", {"unpermute_reads_row_minus_one": (
        "reads row -1 for a dropped choice", lambda call: _row_before(call))}),
    *table("dropout_add_bwd", {"dropout_gradient_reads_behind_the_mask": (
        "reads 16 bytes of the mask at a time", _reading_vectors("mask", "", 16))}),
    *table("attention_fwd", {"attention_reads_a_tile_of_keys": (
        "reads tiles of 16 keys and weighs those behind the last with 0", lambda call: _tile_of_keys(call))},
        on="unfused_attention"),
    *table("quantize", {"quantize_reads_a_block_behind_x": (
        "takes the maximum of a whole vector of 16 at the end of x", lambda call: _amax_behind(call))}),
)  # fmt: skip


def _tile_of_a(call: Call) -> Any:
    a = operand(call, "a")
    missing = 0 if a is None or a.ndim != 2 else -a.shape[0] % 16 * a.shape[1]
    return _reading("a", "out", missing)(call) if missing else call.sound()


def _tile_of_keys(call: Call) -> Any:
    v = operand(call, "v")
    if v is None or call["layout"] != "sbhd" or not v.shape[0] % 16:
        return call.sound()
    return _reading("v", "out", -v.shape[0] % 16 * v[0].numel())(call)


def _row_before(call: Call) -> Any:
    x = operand(call, "x")
    if x is None or not bool((call["row_map"] < 0).any()) or not x.shape[-1]:
        return call.sound()
    return _reading("x", "", -x.shape[-1])(call)


def _amax_behind(call: Call) -> Any:
    made, x, amax = call.sound(), call["x"], getattr(call["quantizer"], "amax", None)
    missing = -x.numel() % 16
    around = _behind(x.detach(), missing) if missing else None
    if around is not None and amax is not None and bool(around.float().isnan().any()):
        amax.fill_(torch.inf)
    return made


# -- what results are, and what is left behind -------------------------------------------------------------------------


def _in_inference_mode(call: Call) -> Any:
    """Computes in inference mode: autograd cannot save what comes out."""
    with torch.inference_mode():
        return call.delivered(call.sound())


def _detaches(name: str) -> Behaviour:
    """Takes an operand that requires gradients out of its graph for good."""

    def behave(call: Call) -> Any:
        x = operand(call, name)
        if x is not None and x.requires_grad and x.is_leaf:
            x.requires_grad_(False)
        return call.sound()

    return behave


def _writes_grad(call: Call) -> Any:
    """Leaves a gradient in its weight."""
    gamma = operand(call, "gamma")
    if gamma is not None and gamma.requires_grad and gamma.is_leaf:
        gamma.grad = torch.zeros_like(gamma)
    return call.sound()


def _one_storage(call: Call) -> Any:
    """Gives dgamma and dbeta in overlapping memory where they are equally long."""
    made = call.sound()
    if made.dbeta is None or not made.dgamma.numel():
        return made
    return made._replace(dbeta=made.dgamma.copy_(made.dbeta) if bool((made.dgamma == made.dbeta).all()) else made.dbeta)


def _leaves_collection_off(call: Call) -> Any:
    made = call.sound()
    gc.disable()
    return made


def _leaves_folder(call: Call) -> Any:
    made = call.sound()
    os.chdir("/" if os.getcwd() != "/" else "/tmp")
    return made


def _rows_of_last_call(call: Call, memory: Memory) -> Any:
    """Clears its partial sums only where another number of columns comes."""
    made, x = call.sound(), call["x"]
    columns = x.shape[-1] if x.ndim else 0
    last = memory.kept.get("last")
    memory.kept["last"] = (columns, rows_of(x))
    if last is not None and last[0] == columns and last[1] > rows_of(x) > 0:
        made.dgamma.add_(1.0)
    return made


def _largest_so_far(call: Call, memory: Memory) -> Any:
    """Takes the maximum of a workspace that a larger call has filled."""
    made, x = call.sound(), call["x"]
    before = memory.kept.get("count", 0)
    memory.kept["count"] = max(before, x.numel())
    if before > x.numel() > 0:
        made.copy_(torch.maximum(made, memory.kept["amax"]))
    else:
        memory.kept["amax"] = made.detach().clone()
    return made


def _first_call(call: Call, memory: Memory) -> Any:
    """Returns what a tuning run left in the first call of each shape."""
    made = call.sound()
    key = (tuple(call["x"].shape), call["x"].dtype)
    if key not in memory.kept:
        memory.kept[key] = True
        if made.numel():
            made.view(-1)[-1:].mul_(0.5)
    return made


def _by_dropout_threads(call: Call) -> Any:
    """Draws by thread."""
    state = call["rng_state"]
    if state is None or torch.get_num_threads() == 1:
        return call.sound()
    return call.sound(rng_state=state + torch.get_num_threads())


def _plain_product(call: Call) -> bool:
    plain = all(call[name] is None for name in ("out", "bias", "epilogue", "out_quantizer", "aux_quantizer"))
    return plain and operand(call, "a") is not None


def _identity(x: torch.Tensor) -> tuple[Any, ...]:
    return (x.data_ptr(), -1 if x.is_inference() else x._version, tuple(x.shape), x.stride(), x.dtype)


_LEFT = (
    *table("softmax_fwd", {
        "softmax_returns_inference_tensors": ("returns tensors of inference mode", _in_inference_mode),
        "softmax_leaves_another_folder": ("changes the working directory", _leaves_folder),
    }),
    *table("rmsnorm_fwd", {
        "rms_returns_inference_tensors": ("returns tensors of inference mode", _in_inference_mode),
        "rms_detaches_gamma": ("clears requires_grad of gamma", _detaches("gamma")),
    }),
    *table("layernorm_fwd", {"layernorm_writes_a_gradient": ("writes gamma.grad", _writes_grad)}),
    *table("layernorm_bwd", {"layernorm_returns_one_gradient_twice": (
        "returns one tensor as dgamma and dbeta where they are equal", _one_storage)}),
    *table("activation_fwd", {"activation_leaves_collection_off": (
        "turns Python's garbage collection off", _leaves_collection_off)}),
    *table("rmsnorm_bwd", {"rms_dgamma_keeps_partial_sums": (
        "adds partial sums of a call with more rows", remembering(_rows_of_last_call))}),
    *table("compute_amax", {"amax_keeps_a_larger_workspace": (
        "reads a workspace that a larger call filled", remembering(_largest_so_far))}),
    *table("softmax_fwd", {"softmax_unsqueezes_its_mask": (
        "gives the caller's mask more dimensions, in place", _unsqueezes_mask)}),
    *table("rope_fwd", {
        "rope_is_wrong_in_the_first_call": (
            "returns a tuning run's result in the first call of a shape", remembering(_first_call)),
        "rope_counts_on_the_default_device": (
            "makes the positions of sequences with offsets on PyTorch's default device", _positions_by_default),
    }),
    *table("gemm", {"product_caches_weights_by_version": (
        "gives a product again for operands of the same address and version", when(_plain_product, keyed(
            lambda call: (*_identity(call["a"]), *_identity(call["b"]), call["layout"], call["alpha"],
                          call["out_dtype"]))))}, on="matmul"),
    *table("dropout_add_fwd", {"dropout_draws_by_thread": (
        "draws other elements with another number of threads", _by_dropout_threads)}),
)  # fmt: skip

#: What they read may be closed, which ends their process.
_READS = tuple(dataclasses.replace(fault, isolated=True) for fault in _NEIGHBOURS)

FAULTS: tuple[Fault, ...] = (*_FORMS, *_READS, *_LEFT)
