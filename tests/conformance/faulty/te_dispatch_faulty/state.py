# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of what a call leaves behind or keeps, of threads, and of claims that do not hold."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import torch

from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import (
    Behaviour,
    Memory,
    keyed,
    member,
    misaligned,
    operand,
    remembering,
    rows_of,
    spoil,
    table,
)


def _leaving(change: Any) -> Behaviour:
    """Changes the process's state after a call."""

    def behave(call: Call) -> Any:
        made = call.sound()
        change()
        return made

    return behave


def _kept_alive(call: Call, memory: Memory) -> Any:
    made = call.sound()
    memory.kept[memory.calls] = made
    return made


def _grows(call: Call, memory: Memory) -> Any:
    memory.kept[memory.calls] = torch.empty(1 << 18)
    return call.sound()


def _restoring(name: str) -> Behaviour:
    """Uses an operand as workspace and puts back what was there."""

    def behave(call: Call) -> Any:
        x = operand(call, name)
        if x is None or not x.numel():
            return call.sound()
        with torch.no_grad():
            kept = x.detach().clone()
            x.detach().mul_(2)
            made = call.sound(**{name: kept})
            x.detach().copy_(kept)
        return made

    return behave


def _refusing_gradients(name: str) -> Behaviour:
    """Writes into an operand that requires gradients, as PyTorch forbids."""

    def behave(call: Call) -> Any:
        x = operand(call, name)
        if x is not None and x.requires_grad:
            raise RuntimeError(f"{name} requires gradients, which this kernel does not serve")
        return call.sound()

    return behave


def _requiring(path: str) -> Behaviour:
    def behave(call: Call) -> Any:
        made = call.sound()
        found = member(made, path)
        if found is not None and found.is_floating_point() and torch.is_grad_enabled():
            found.requires_grad_()
        return made

    return behave


def _late(path: str, calls: int) -> Behaviour:
    """Right at first."""

    def behave(call: Call, memory: Memory) -> Any:
        made = call.sound()
        found = member(made, path)
        if found is not None and memory.calls >= calls:
            spoil(found)
        return made

    return remembering(behave)


def _second_backward(call: Call, memory: Memory) -> Any:
    """Frees what the forward saved when it has read it once."""
    made = call.sound()
    key = id(call["saved"])
    if memory.kept.get(key) is call["saved"] and isinstance(made.dq, torch.Tensor):
        made.dq.zero_()
    memory.kept[key] = call["saved"]
    return made


def _own_memory(call: Call) -> Any:
    """Writes the log-sum-exp by its address into memory that did not come from the allocator."""
    made = call.sound()
    if made.lse is None or not made.lse.numel() or not made.lse.is_contiguous():
        return made
    own = torch.empty_like(made.lse)
    ctypes.memmove(own.data_ptr(), made.lse.data_ptr(), made.lse.numel() * made.lse.element_size())
    return made._replace(lse=own)


def _static(path: str) -> Behaviour:
    """Gives its results through one buffer of the process."""
    buffers: dict[Any, torch.Tensor] = {}

    def behave(call: Call) -> Any:
        made = call.sound()
        found = member(made, path)
        if found is not None and found.numel():
            with torch.no_grad():
                buffer = buffers.setdefault((tuple(found.shape), found.dtype), torch.empty_like(found))
                buffer.copy_(found.detach())
                time.sleep(0.002)  # as long as the second kernel may take to start
                found.detach().copy_(buffer)
        return made

    return behave


def _statistics_in_one_buffer(call: Call, memory: Memory) -> Any:
    """A backward that reads the forward's statistics from where the last forward left them."""
    dy = call["dy"]
    buffer = memory.kept.setdefault(tuple(dy.shape), torch.empty(dy.shape, device=dy.device))
    with torch.no_grad():
        buffer.copy_(dy.detach())
        time.sleep(0.002)
        return call.sound(dy=buffer.to(dy.dtype))


def _sometimes(path: str, when: Any, one_in: int) -> Behaviour:
    """The last bit depends on which of many threads came first."""

    def behave(call: Call, memory: Memory) -> Any:
        made = call.sound()
        found = member(made, path)
        if found is not None and found.numel() and when(call) and memory.calls % one_in == 0:
            with torch.no_grad():
                flat = found.detach().view(-1) if found.is_contiguous() else found.detach().reshape(-1)
                flat[0] = (
                    torch.nextafter(flat[0].float(), flat.new_tensor(torch.inf))
                    if (flat.dtype == torch.float32)
                    else flat[0] * 1.01
                )
        return made

    return remembering(behave)


def _rows_at_least(name: str, count: int) -> Any:
    return lambda call: rows_of(call[name]) >= count


def _by_threads(call: Call) -> Any:
    """Splits K by the number of threads."""
    a, b = operand(call, "a"), operand(call, "b")
    threads = torch.get_num_threads()
    made = call.sound()
    if a is not None and b is not None and threads > 1 and isinstance(made.out, torch.Tensor):
        made.out.detach().mul_(1.0 + 2.0**-7)
    return made


def _by_alignment(call: Call) -> Any:
    """Sums in another order where an operand is not aligned."""
    made, x = call.sound(), call["x"]
    if misaligned(x) and made.y is not None and made.y.numel():
        flat = made.y.detach()
        flat.copy_(torch.where(flat == 0, flat, torch.nextafter(flat, flat * 2)))
    return made


def _neighbours(path: str, name: str, least: int) -> Behaviour:
    """Another summation from so many rows on."""

    def behave(call: Call) -> Any:
        made = call.sound()
        found = member(made, path)
        if found is not None and found.numel() and rows_of(call[name]) >= least:
            flat = found.detach()
            flat.copy_(torch.where(flat == 0, flat, torch.nextafter(flat, flat * 2)))
        return made

    return behave


def _reads_scale_late(call: Call, memory: Memory) -> Any:
    """Reports the scale that the quantizer has at the next call."""
    made = call.sound()
    scale = getattr(call["quantizer"], "scale", None)
    if scale is not None and made.row_scale_inv is not None and call["out"] is None:
        last = memory.kept.get("scale")
        memory.kept["scale"] = scale.detach().clone()
        if last is not None:
            made.row_scale_inv.copy_((1.0 / last).view(made.row_scale_inv.shape))
    return made


_GLOBAL = {
    "draws_from_the_generator": ("draws from PyTorch's generator", _leaving(lambda: torch.rand(()))),
    "leaves_flush_to_zero": ("leaves flush-to-zero on", _leaving(lambda: torch.set_flush_denormal(True))),
    "leaves_default_dtype": (
        "leaves another default dtype", _leaving(lambda: torch.set_default_dtype(torch.float64)),
    ),
    "leaves_other_seed": ("seeds PyTorch's generator", _leaving(lambda: torch.manual_seed(0))),
    "leaves_thread_count": (
        "leaves another number of threads", _leaving(lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    ),
}  # fmt: skip

_LEFT = (
    *table("rmsnorm_fwd", _GLOBAL),
    *table("activation_fwd", {
        "keeps_results_alive": ("keeps every result", remembering(_kept_alive)),
        "grows_by_a_megabyte": ("allocates a workspace at every call and keeps it", remembering(_grows)),
        "doubles_its_input_and_restores": ("uses x as workspace and restores it", _restoring("x")),
        "refuses_inputs_that_require_gradients": ("raises where x requires gradients", _refusing_gradients("x")),
        "returns_what_requires_gradients": ("returns a result that requires gradients", _requiring("out")),
        "is_wrong_from_the_hundredth_call": ("is right 99 times", _late("out", 100)),
        "caches_by_address": ("gives a result again for the same address", keyed(
            lambda call: (call["kind"], getattr(call["x"], "data_ptr", int)(), call["quantizer"] is None,
                          tuple(call["x"].shape), call["out_dtype"], call["params"], call["x"].dtype))),
    }),
    *table("gemm", {
        "restores_its_bias": ("uses the bias as workspace and restores it", _restoring("bias")),
        "product_requires_gradients": ("returns a result that requires gradients", _requiring("out")),
        "product_refuses_weights_that_require_gradients": ("raises where b requires gradients",
                                                           _refusing_gradients("b")),
        "product_buffers_in_process": ("copies the result through a buffer of the process", _static("out")),
        "product_depends_on_threads": ("splits K by the number of threads and claims to be deterministic",
                                       _by_threads),
    }, on="matmul"),
    *table("layernorm_fwd", {
        "layernorm_is_wrong_from_the_hundredth_call": ("is right 99 times", _late("y", 100)),
        "layernorm_buffers_in_process": ("keeps a buffer that all threads share", _static("y")),
        "layernorm_depends_on_alignment": ("sums by alignment, and claims to be deterministic", _by_alignment),
    }),
    *table("layernorm_bwd", {
        "layernorm_gradient_restores_dy": ("uses dy as workspace and restores it", _restoring("dy")),
        "layernorm_gradient_buffers_in_process": ("keeps dy in a buffer that all threads share",
                                                  remembering(_statistics_in_one_buffer)),
        "dgamma_alternates_from_64_rows": ("sums 64 rows and more in any order, and claims to be deterministic",
                                           _sometimes("dgamma", _rows_at_least("x", 64), 2)),
    }),
    *table("softmax_fwd", {
        "softmax_alternates_rarely": ("differs every seventh time, and claims to be deterministic",
                                      _sometimes("", _rows_at_least("x", 64), 7)),
        "softmax_sums_by_batch": ("sums in another order from 64 rows on, and claims to be batch invariant",
                                  _neighbours("", "x", 64)),
        "softmax_caches_by_shape": ("gives a result again for the same shape", keyed(
            lambda call: (tuple(call["x"].shape), call["x"].dtype, call["out_dtype"], call["causal"],
                          call["mask"] is None, call["scale"], float(call["x"].float().nan_to_num().sum().sign())))),
    }),
    *table("softmax_bwd", {"softmax_gradient_sums_by_batch": (
        "sums in another order from 128 rows on, and claims to be batch invariant", _neighbours("", "y", 128))}),
    *table("rope_fwd", {
        "rope_sums_by_batch": ("rounds otherwise from 64 rows on, and claims to be batch invariant",
                               _neighbours("", "x", 64)),
        "rope_buffers_in_process": ("keeps a buffer that all threads share", _static("")),
        "rope_caches_angles": ("gives a result again for the same tables", keyed(
            lambda call: (tuple(call["x"].shape), call["x"].dtype, call["interleaved"], call["layout"],
                          call["offsets"] is None, call["x"].data_ptr(), call["freqs"].data_ptr()))),
    }),
    *table("quantize", {
        "reports_the_last_scale": ("reports the scale of the call before", remembering(_reads_scale_late)),
        "quantize_buffers_in_process": ("keeps codes in a buffer that all threads share", _static("row_data")),
    }),
    *table("attention_bwd", {
        "frees_what_it_read": ("has zeroed what was saved when it is called twice", remembering(_second_backward)),
        "attention_gradient_buffers_in_process": ("keeps a buffer that all threads share", _static("dq")),
        "attention_gradient_alternates": ("sums dq in any order, and claims to be deterministic",
                                          _sometimes("dq", lambda call: getattr(call["q"], "numel", int)() > 4096, 2)),
    }, on="unfused_attention_bwd"),
    *table("attention_fwd", {
        "attention_buffers_in_process": ("keeps a buffer that all threads share", _static("out")),
        "attention_lse_outside_the_allocator": ("takes memory for the log-sum-exp elsewhere", _own_memory),
    }, on="unfused_attention"),
    *table("multi_tensor_adam", {"adam_is_wrong_from_the_hundredth_call": (
        "is right 99 times", remembering(lambda call, memory: call.sound(
            lr=call["lr"] * (2 if memory.calls >= 100 else 1))))}),
    *table("dequantize", {"dequantize_keeps_results_alive": ("keeps every result", remembering(_kept_alive))}),
    *table("moe_permute", {"permute_keeps_results_alive": ("keeps every result", remembering(_kept_alive))}),
)  # fmt: skip

_LOCK = threading.Lock()


def _holds_a_lock(call: Call) -> Any:
    """Takes a lock and gives it back only where the call returns."""
    if not _LOCK.acquire(timeout=0.2):
        raise RuntimeError("another thread holds the workspace")
    time.sleep(0.25)
    made = call.sound()
    _LOCK.release()
    return made


_THREADS = table("rmsnorm_bwd", {
    "serves_one_thread_at_a_time": ("raises where another thread is inside", _holds_a_lock),
    "rms_gradient_buffers_in_process": ("keeps a buffer that all threads share", _static("dx")),
    "rms_dgamma_alternates_from_64_rows": ("sums 64 rows and more in any order, and claims to be deterministic",
                                           _sometimes("dgamma", _rows_at_least("x", 64), 2)),
})  # fmt: skip

FAULTS: tuple[Fault, ...] = (*_LEFT, *_THREADS)
