# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Decorators about compilation, and the elementwise functions that Transformer Engine fuses with PyTorch's compiler.

The dropouts here run the operators of the dispatch, which need no compiler, and the activations PyTorch's kernels.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from te_dispatch.pytorch.arguments import resolve_device
from te_dispatch.pytorch.autograd.scoped import outside_autocast
from te_dispatch.pytorch.modules.dropout_add import dropout_add

__all__ = [
    "bgrad_dgelu_fused",
    "bgrad_dgelu_fused_",
    "bias_dropout_add",
    "bias_dropout_add_fused_inference",
    "bias_dropout_add_fused_inference_",
    "bias_dropout_add_fused_train",
    "bias_dropout_add_fused_train_",
    "bias_gelu_fused",
    "bias_gelu_fused_",
    "dgelu_fused_",
    "gelu_fused_",
    "get_bias_dropout_add",
    "jit_fuser",
    "l2normalization_backward_fused",
    "l2normalization_backward_fused_",
    "l2normalization_fused",
    "l2normalization_fused_",
    "l2normalization_fwd_fused",
    "l2normalization_fwd_fused_",
    "lazy_compile",
    "no_torch_dynamo",
    "set_jit_fusion_options",
    "warmup_jit_bias_dropout_add",
    "warmup_jit_bias_dropout_add_all_dtypes",
    "warmup_jit_bias_gelu",
    "warmup_jit_bias_gelu_all_dtypes",
    "warmup_jit_l2normalization",
    "warmup_jit_l2normalization_all_dtypes",
]

Function = Callable[..., Any]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def lazy_compile(func: Function) -> Function:
    """`torch.compile(func)`, made at the first call. Inside a compiled program it is `func` itself."""
    compiled: list[Function] = []

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(func))
        return compiled[0](*args, **kwargs)

    return wrapper


#: The decorator of functions to be fused.
jit_fuser = lazy_compile


def no_torch_dynamo(
    recursive: bool = True, when: Callable[[dict[str, Any]], str | None] | None = None
) -> Callable[[Function], Function]:
    """A decorator that keeps torch.compile out of a function, as `torch.compiler.disable` does.

    Args:
        recursive: keep it out of what the function calls, too.
        when: decides for each call in a compiled program. It takes the arguments that were passed, by name, and returns
            why the call cannot be compiled, which a warning then says, or None to compile it.

    Raises:
        TypeError: `when` of a function with ``*args``, whose values have no names.
    """

    def decorate(func: Function) -> Function:
        if when is None:
            return torch.compiler.disable(func, recursive=recursive)  # type: ignore[no-any-return, no-untyped-call]
        parameters = inspect.signature(func).parameters.values()
        if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
            raise TypeError(f"no_torch_dynamo: when needs arguments with names, but {func.__name__} takes *args")
        names = [parameter.name for parameter in parameters]

        def left_out(reason: str, *args: Any, **kwargs: Any) -> Any:
            warnings.warn(f"{func.__name__} runs outside of the compiled program: {reason}", stacklevel=2)
            return func(*args, **kwargs)

        left_out = torch.compiler.disable(left_out, recursive=recursive)  # type: ignore[no-untyped-call]

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                return func(*args, **kwargs)
            reason = when({**dict(zip(names, args)), **kwargs})
            return func(*args, **kwargs) if reason is None else left_out(reason, *args, **kwargs)

        return wrapper

    return decorate


def set_jit_fusion_options() -> None:
    """Nothing: the options are of PyTorch's compilers before 2.2, which nothing here uses."""


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float, training: bool
) -> torch.Tensor:
    """residual + dropout(x + bias).

    Args:
        x, residual: (..., K); where their dtypes differ, the residual's counts. bias: broadcast to x.
        prob: probability of dropping in training.
    """
    return dropout_add(x + bias, residual, prob if training else 0.0)


def get_bias_dropout_add(training: bool) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]:
    """`bias_dropout_add` without its last argument."""
    return functools.partial(bias_dropout_add, training=training)


def bias_dropout_add_fused_train(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """`bias_dropout_add` of training, with gradients even under ``torch.no_grad()`` and outside of torch.autocast."""
    with torch.enable_grad():
        return outside_autocast(bias_dropout_add, x, bias, residual, prob, True)  # type: ignore[no-any-return]


def bias_dropout_add_fused_train_(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """`bias_dropout_add` of training, under torch.autocast and the grad mode as they are. Nothing is in place."""
    return bias_dropout_add(x, bias, residual, prob, True)


def bias_dropout_add_fused_inference(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """`bias_dropout_add` without dropout, outside of torch.autocast."""
    return outside_autocast(bias_dropout_add, x, bias, residual, prob, False)  # type: ignore[no-any-return]


def bias_dropout_add_fused_inference_(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """`bias_dropout_add` without dropout, with torch.autocast left on. It writes nothing in place."""
    return bias_dropout_add(x, bias, residual, prob, False)


@contextmanager
def _warming_up(dtype: torch.dtype) -> Iterator[Callable[..., torch.Tensor]]:
    """Gives a function that makes random tensors of a shape on the current device, which require gradients.

    Gradients are on, and random states are as before afterwards.
    """
    device = resolve_device(None)
    accelerators = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(accelerators, device_type=device.type), torch.enable_grad():
        yield functools.partial(torch.rand, requires_grad=True, dtype=dtype, device=device)


def warmup_jit_bias_dropout_add(hidden_size: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int) -> None:
    """Run `bias_dropout_add_fused_train` and its backward once, so that kernels are chosen and compiled.

    Args:
        hidden_size, seq_length, micro_batch_size, dtype: of the activations, which are
            (seq_length, micro_batch_size, hidden_size) on the current device.

    Random states are as before afterwards.
    """
    shape = (seq_length, micro_batch_size, hidden_size)
    with _warming_up(dtype) as rand:
        x, residual, bias = rand(*shape), rand(*shape), rand(hidden_size)
        out = bias_dropout_add_fused_train(x, bias, residual, 0.1)
        torch.autograd.grad(out, (x, bias, residual), torch.ones_like(out))


def warmup_jit_bias_dropout_add_all_dtypes(hidden_size: int, seq_length: int, micro_batch_size: int) -> None:
    """`warmup_jit_bias_dropout_add` in float32, bfloat16 and float16."""
    for dtype in _DTYPES:
        warmup_jit_bias_dropout_add(hidden_size, dtype, seq_length, micro_batch_size)


def bias_gelu_fused(inp: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """gelu(inp + bias) in the tanh approximation (Hendrycks and Gimpel, 2016), outside of torch.autocast.

    Args:
        inp: (..., K). bias: (K,); None or empty for none.
    """
    return outside_autocast(_bias_gelu, inp, bias)  # type: ignore[no-any-return]


def bgrad_dgelu_fused(
    grad_output: torch.Tensor, inp: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The gradients of `bias_gelu_fused` for a matrix, outside of torch.autocast.

    Args:
        grad_output, inp: (M, K). bias: (K,); None or empty for none.

    Returns:
        The bias's gradient (K,), None without a bias; the input's (M, K).
    """
    return outside_autocast(_bias_gelu_gradients, grad_output, inp, bias)  # type: ignore[no-any-return]


def bias_gelu_fused_(inp: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`bias_gelu_fused`, with torch.autocast left on. It writes nothing in place, as there."""
    return _bias_gelu(inp, bias)


def bgrad_dgelu_fused_(
    grad_output: torch.Tensor, inp: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`bgrad_dgelu_fused` of a bias that is there, with torch.autocast left on. It writes nothing in place."""
    gradient = _gelu_gradient(grad_output, inp + bias)
    return gradient.sum(0), gradient


def gelu_fused_(inp: torch.Tensor) -> torch.Tensor:
    """`bias_gelu_fused` without a bias. Nothing is written in place, there neither."""
    return bias_gelu_fused(inp, None)


def dgelu_fused_(grad_output: torch.Tensor, inp: torch.Tensor) -> torch.Tensor:
    """The gradient of `gelu_fused_`: both (..., K)."""
    return bgrad_dgelu_fused(grad_output, inp, None)[1]


def l2normalization_fused(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(sum of x^2 along the last dimension + eps), of x's dtype, computed in float32."""
    return l2normalization_fwd_fused(x, eps)[0]


def l2normalization_fwd_fused(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`l2normalization_fused`, and what x was multiplied by: (..., 1), float32."""
    wide = x.float()
    rsqrt_norm = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)
    return (wide * rsqrt_norm).to(x.dtype), rsqrt_norm


def l2normalization_backward_fused(
    grad_output: torch.Tensor, x: torch.Tensor, rsqrt_norm: torch.Tensor, eps: float
) -> torch.Tensor:
    """The gradient of `l2normalization_fused`: with y = x r, it is r (grad - y sum(grad y)), of x's dtype.

    Args:
        grad_output, x: (..., K). rsqrt_norm: of `l2normalization_fwd_fused`. eps: has no effect, r holds it.
    """
    grad, y = grad_output.float(), x.float() * rsqrt_norm
    return (rsqrt_norm * (grad - y * (grad * y).sum(-1, keepdim=True))).to(x.dtype)


#: Nothing here depends on torch.autocast: these are computed in float32. Nothing is written in place, there neither.
l2normalization_fused_ = l2normalization_fused
l2normalization_fwd_fused_ = l2normalization_fwd_fused
l2normalization_backward_fused_ = l2normalization_backward_fused


def warmup_jit_bias_gelu(
    ffn_hidden_size_per_partition: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int
) -> None:
    """Run `bias_gelu_fused`, `gelu_fused_` and their backward once, as `warmup_jit_bias_dropout_add` does.

    Args:
        ffn_hidden_size_per_partition, seq_length, micro_batch_size, dtype: of the activations, which are
            (seq_length * micro_batch_size, ffn_hidden_size_per_partition).
    """
    width = ffn_hidden_size_per_partition
    with _warming_up(dtype) as rand:
        x, bias = rand(seq_length * micro_batch_size, width), rand(width)
        out = bias_gelu_fused(x, bias) + gelu_fused_(x)
        torch.autograd.grad(out, (x, bias), torch.ones_like(out))
        bgrad_dgelu_fused(out.detach(), x.detach(), bias.detach())


def warmup_jit_bias_gelu_all_dtypes(ffn_hidden_size: int, seq_length: int, micro_batch_size: int) -> None:
    """`warmup_jit_bias_gelu` in float32, bfloat16 and float16."""
    for dtype in _DTYPES:
        warmup_jit_bias_gelu(ffn_hidden_size, dtype, seq_length, micro_batch_size)


def warmup_jit_l2normalization(hidden_size: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int) -> None:
    """Run `l2normalization_fused` and `l2normalization_backward_fused` once, as `warmup_jit_bias_dropout_add` does.

    Args:
        hidden_size, seq_length, micro_batch_size, dtype: of the activations, which are
            (seq_length * micro_batch_size, hidden_size).
    """
    with _warming_up(dtype) as rand:
        x = rand(seq_length * micro_batch_size, hidden_size).detach()
        out, rsqrt_norm = l2normalization_fwd_fused(x, 1e-6)
        l2normalization_backward_fused(out, x, rsqrt_norm, 1e-6)


def warmup_jit_l2normalization_all_dtypes(hidden_size: int, seq_length: int, micro_batch_size: int) -> None:
    """`warmup_jit_l2normalization` in float32, bfloat16 and float16."""
    for dtype in _DTYPES:
        warmup_jit_l2normalization(hidden_size, dtype, seq_length, micro_batch_size)


def _with_bias(inp: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return inp if bias is None or not bias.numel() else inp + bias


def _bias_gelu(inp: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.gelu(_with_bias(inp, bias), approximate="tanh")


def _bias_gelu_gradients(
    grad_output: torch.Tensor, inp: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    gradient = _gelu_gradient(grad_output, _with_bias(inp, bias))
    return (None if bias is None or not bias.numel() else gradient.sum(0)), gradient


def _gelu_gradient(grad_output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(grad_output, x, approximate="tanh")  # type: ignore[no-any-return]
