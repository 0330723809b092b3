# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults that the plain call of a case does not show: they need a tuple for a list, one tensor given twice, a
parameter, more threads or dimensions, other strides on the same memory, a quantizer in the place of a dead one; or they
leave the thread otherwise than they found it."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Behaviour, Memory, operand, remembering, rows_of, spoil, table


def _as_given(call: Call) -> Any:
    """Gives its results in a tuple where parts are given in one."""
    made = call.sound()
    return tuple(made) if isinstance(call["splits"], tuple) else made


def _one_product_twice(call: Call) -> Any:
    """Makes a product once that is asked for twice."""
    made = call.sound()
    if call["out"] is not None or call["splits"] is not None:
        return made
    bias, seen = call["bias"], {}
    for i, (a, b) in enumerate(zip(call["a"], call["b"])):
        key = (id(a), id(b), None if bias is None else id(bias[i]))
        made[i] = made[seen.setdefault(key, i)]
    return made


def _pins(call: Call) -> Any:
    """Binds the calling thread to one CPU, as OpenMP's runtimes may, and leaves it there."""
    made = call.sound()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    return made


def _eight_threads(call: Call) -> Any:
    """Has partial sums for 8 threads."""
    made = call.sound()
    if torch.get_num_threads() > 8 and made.dgamma.numel() and rows_of(call["x"]) > 8:
        spoil(made.dgamma)
    return made


def _no_parameters(call: Call) -> Any:
    """Knows tensors by their class alone."""
    for name in ("a", "b", "bias"):
        if isinstance(call[name], torch.nn.Parameter):
            raise TypeError(f"{name}: {type(call[name]).__name__}, expected a torch.Tensor")
    return call.sound()


def _one_mask_for_all(call: Call) -> Any:
    """Indexes the mask of x's last four dimensions: of five, the first one's first item serves all."""
    mask = call["mask"]
    if mask is None or mask.dim() < 5 or mask.shape[0] < 2:
        return call.sound()
    return call.sound(mask=mask[:1].expand(mask.shape))


def _beside_nan(call: Call) -> Any:
    """Compares 16-bit numbers in pairs, and leaves out a pair that holds a NaN."""
    x = call["x"]
    if x.dtype == torch.float32 or not x.isnan().any():
        return call.sound()
    flat = x.detach().reshape(-1).clone()
    even = flat[: flat.numel() // 2 * 2].view(-1, 2)
    even[even.isnan().any(1)] = 0
    return call.sound(x=flat)


def _without_strides(call: Call, memory: Memory) -> Any:
    """Keeps a packed copy of the last b by its memory, shape and bytes, and not by its strides."""
    b = operand(call, "b")
    if b is None or b.is_inference() or not b.numel():
        return call.sound()
    key = (b.untyped_storage()._cdata, b.data_ptr(), tuple(b.shape), b.dtype)
    with torch.inference_mode(False), torch.no_grad():
        image = _image(b)
        kept = memory.kept.get(key)
        if kept is not None and kept[1].device == b.device and torch.equal(kept[0], image):
            return call.sound(b=kept[1].clone())
        memory.kept.clear()
        memory.kept[key] = (image, b.detach().clone(memory_format=torch.contiguous_format))
    return call.sound()


def _once_for_an_address(call: Call) -> Any:
    """Sums each address once in a call: of two parts that begin at one place, the second has the first one's sum."""
    seen: dict[int, torch.Tensor] = {}
    return call.sound(tensors=[seen.setdefault(x.data_ptr(), x) if x.numel() else x for x in call["tensors"]])


def _image(b: torch.Tensor) -> torch.Tensor:
    """The bytes of the memory that a tensor is in, from its first element to its last."""
    storage = b.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=b.device).set_(storage, 0, (storage.nbytes(),), (1,))
    first = b.storage_offset() * b.element_size()
    last = first + (sum((size - 1) * stride for size, stride in zip(b.shape, b.stride())) + 1) * b.element_size()
    return whole[first:last].clone()


def _by_id(call: Call, memory: Memory) -> Any:
    """Keeps a cast's options by the quantizer's id, which another one has when that is gone."""
    quantizer = call["quantizer"]
    names = [name for name in ("epsilon", "power_of_two") if hasattr(quantizer, name)]
    if not names:
        return call.sound()
    key = (id(quantizer), quantizer.kind, quantizer.encoding)
    kept = memory.kept.setdefault(key, {name: getattr(quantizer, name) for name in names})
    if all(getattr(quantizer, name) == kept[name] for name in names):
        return call.sound()
    return call.sound(quantizer=dataclasses.replace(quantizer, **kept))


def _amax_of_4096(call: Call) -> Any:
    """Records the amax of 4,096 columns of what it casts."""
    amax = getattr(call["quantizer"], "amax", None)
    if amax is None or call["x"].shape[-1] <= 4096:
        return call.sound()
    before = amax.detach().clone()
    made = call.sound()
    y = call.sound(quantizer=None, out_dtype=torch.float32).y
    with torch.no_grad():
        amax.detach().copy_(torch.maximum(before, y[..., :4096].abs().nan_to_num(0.0, posinf=torch.inf).max().view(1)))
    return made


def _equal_leading(call: Call) -> Any:
    """Asks for equal leading dimensions where they are contracted; the contract flattens them."""
    a, b = call["a"], call["b"]
    if call["layout"] == "TN" and a.shape[:-1] != b.shape[:-1]:
        raise ValueError(f"b must have the leading dimensions {tuple(a.shape[:-1])}, got {tuple(b.shape[:-1])}")
    return call.sound()


def _in_default_dtype(call: Call) -> Any:
    """Has a constant of its formula in the default dtype, where that has 16 bits."""
    made = call.sound()
    if torch.get_default_dtype() == torch.float16 and made.numel():
        spoil(made)
    return made


def _under_autocast(name: str) -> Behaviour:
    """Computes in autocast's dtype, as PyTorch's own operators do."""

    def behave(call: Call) -> Any:
        x = operand(call, name)
        if x is None or not torch.is_autocast_enabled(x.device.type):
            return call.sound()
        return call.sound(**{name: x.detach().to(torch.get_autocast_dtype(x.device.type)).to(x.dtype)})

    return behave


def _one_workspace(call: Call, memory: Memory) -> Any:
    """Copies what it reads into one workspace for all threads."""
    x = operand(call, "x")
    if x is None or not x.numel():
        return call.sound()
    with torch.inference_mode(False), torch.no_grad():
        made = memory.kept.get((x.dtype, x.device))
        if made is None or made.numel() < x.numel():
            made = memory.kept[x.dtype, x.device] = torch.empty(x.numel(), dtype=x.dtype, device=x.device)
        workspace = made[: x.numel()].view(x.shape)
        workspace.copy_(x.detach())
    return call.sound(x=workspace)


FAULTS: tuple[Fault, ...] = (
    *table("rope_fwd", {"has_a_constant_in_the_default_dtype": (
        "has a constant in the default dtype, where that is float16", _in_default_dtype)}),
    *table("softmax_bwd", {"softmax_gradient_follows_autocast": (
        "rounds what it reads to autocast's dtype", _under_autocast("dy"))}),
    *table("activation_fwd", {
        "activation_follows_autocast": ("rounds what it reads to autocast's dtype", _under_autocast("x")),
        "activation_copies_to_one_workspace": (
            "copies its operand into one workspace for all threads", remembering(_one_workspace)),
    }),
    *table("split_quantize", {"returns_a_tuple_for_one": ("returns a tuple where splits are one", _as_given)}),
    *table("grouped_gemm", {"makes_one_product_once": (
        "returns one product twice for operands that are given twice", _one_product_twice)}, on="grouped_matmul"),
    *table("moe_unpermute_bwd", {"leaves_its_thread_pinned": ("leaves its thread bound to one CPU", _pins)}),
    *table("rmsnorm_fwd", {"amax_of_4096_columns": ("records the amax of 4,096 columns", _amax_of_4096)}),
    *table("rmsnorm_bwd", {"sums_in_eight_threads": ("has partial sums for 8 threads", _eight_threads)}),
    *table("gemm", {
        "asks_for_equal_leading_dimensions": (
            "refuses operands whose contracted dimensions lead differently", _equal_leading),
        "refuses_parameters": ("refuses torch.nn.Parameter", _no_parameters),
        "keeps_a_weight_without_strides": (
            "keeps a weight by its memory and shape, and not by strides", remembering(_without_strides)),
    }, on="matmul"),
    *table("softmax_fwd", {"takes_the_first_of_five_dimensions": (
        "takes the first item of a mask of five dimensions", _one_mask_for_all)}),
    *table("multi_tensor_l2norm", {"sums_an_address_once": (
        "takes list items that begin at one address for one tensor", _once_for_an_address)}),
    *table("compute_amax", {"leaves_out_what_is_beside_nan": ("leaves out a 16-bit number beside a NaN", _beside_nan)}),
    *table("quantize", {"keeps_options_by_id": ("keeps options by a quantizer's id", remembering(_by_id))}),
)  # fmt: skip
