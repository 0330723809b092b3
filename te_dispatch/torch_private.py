# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The only place where te_dispatch uses names of PyTorch that PyTorch does not document.

Each name is looked up when this module is imported. Where a PyTorch release does not have it, the name here is a
replacement made of documented functions: it gives the same answer in more time, or an answer that sends its caller to
the slow path. `MISSING` lists the names that were replaced, and ``te-dispatch doctor`` shows them. Names without a
possible replacement raise an ImportError that says which one is absent.

``tests/core/test_torch_private.py`` tests the replacements, and checks that no other module uses a private name of
PyTorch. Add a name here, its replacement, and a case to that test.

Not here, because PyTorch documents how they are used: ``torch.utils._pytree`` and ``torch.utils._python_dispatch``
for tensor subclasses, ``torch._dynamo.mark_static``, ``torch._register_device_module``.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.utils.checkpoint

#: Dotted names that this PyTorch does not have and that were replaced.
MISSING: list[str] = []

_GPU_BUILD = torch.version.cuda is not None or torch.version.hip is not None


def _lookup(path: str) -> Any:
    """``torch.<path>``, or None where a part of it is absent."""
    value: Any = torch
    for part in path.split("."):
        value = getattr(value, part, None)
        if value is None:
            return None
    return value


def _found(path: str, replacement: Any, needed: bool = True) -> Any:
    """``torch.<path>``, or the replacement.

    Args:
        needed: whether a build of this kind has the name; a CPU build lacks those of CUDA.
    """
    value = _lookup(path)
    if value is None and needed:
        MISSING.append(f"torch.{path}")
    return replacement if value is None else value


def _required(path: str) -> Any:
    value = _lookup(path)
    if value is None:
        raise ImportError(
            f"te_dispatch needs torch.{path}, which PyTorch {torch.__version__} does not have; it is tested with "
            "PyTorch 2.9 to 2.13"
        )
    return value


def examine() -> list[tuple[str, str, str]]:
    """What ``te-dispatch doctor`` shows: (name, "warning", reason) for each of `MISSING`."""
    reason = f"PyTorch {torch.__version__} does not have it: a slower replacement serves"
    return [(name, "warning", reason) for name in MISSING]


# -- autograd ----------------------------------------------------------------------------------------------------------

#: () -> whether backward passes may run in several threads. The replacement: as PyTorch starts.
multithreading: Callable[[], bool] = _found("_C._is_multithreading_enabled", lambda: True)


def hooks(x: torch.Tensor) -> int:
    """How many hooks a tensor's gradient has."""
    kinds = (getattr(x, name, None) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
    return sum(len(kind) for kind in kinds if kind)


#: () -> None: take away the innermost default hooks on saved tensors. The replacement leaves them.
pop_saved_tensors_hooks: Callable[[], None] = _found("_C._autograd._pop_saved_tensors_default_hooks", lambda: None)

#: () -> the number of the backward pass that this thread runs, -1 outside of one.
graph_task: Callable[[], int] = _required("_C._current_graph_task_id")

#: (callback) -> None: call it when the backward pass that this thread runs ends; a RuntimeError outside of one.
queue_callback: Callable[[Callable[[], None]], None] = _required("autograd.Variable._execution_engine.queue_callback")


def _unknown_hooks(ignore_is_tracing: bool) -> tuple[Any, Any]:
    """Hooks that may be there: callers take the slow path."""
    return None, None


#: (True) -> (pack, unpack), the innermost default hooks on saved tensors, or None.
saved_tensors_hooks: Callable[[bool], tuple[Any, Any] | None] = _found(
    "_C._autograd._top_saved_tensors_default_hooks", _unknown_hooks
)

#: (mode) -> None: record gradients or not, from here on, in this thread.
set_grad_enabled: Callable[[bool], Any] = _found("_C._set_grad_enabled", torch.set_grad_enabled)

#: (node of a graph) -> whether the backward pass that this thread runs executes it; a RuntimeError for a leaf whose
#: gradient is what is asked for. None where PyTorch does not have it.
will_execute: Callable[[Any], bool] | None = _found("_C._will_engine_execute_node", None)

#: () -> whether a hook was registered for all modules. The replacement sends its caller to the slow path.
global_module_hooks: Callable[[], Any] = _found("nn.modules.module._has_any_global_hook", lambda: True)

#: () -> whether a transform of torch.func is active; None where PyTorch cannot tell.
transforms_active: Callable[[], bool] | None = _found("_C._are_functorch_transforms_active", None)

#: (x) -> x, without the wrapper of a torch.func transform that has ended; None where PyTorch does not have it.
unwrap_if_dead: Callable[[Any], Any] | None = _found("_C._functorch.unwrap_if_dead", None)


def _unpack_hook_code() -> CodeType | None:
    """The code of ``unpack_hook`` in ``torch.utils.checkpoint._checkpoint_hook``."""
    hook = _found("utils.checkpoint._checkpoint_hook.__init__", None)
    code = getattr(inspect.unwrap(hook), "__code__", None) if callable(hook) else None
    for constant in getattr(code, "co_consts", ()):
        if isinstance(constant, CodeType) and constant.co_name == "unpack_hook":
            return constant
    return None


#: What non-reentrant checkpoints keep of a region, and the code that runs a region again; None where PyTorch does not
#: have them.
CheckpointFrame: Any = _found("utils.checkpoint._CheckpointFrame", None)
unpack_hook_code: CodeType | None = _unpack_hook_code()


# -- autocast ----------------------------------------------------------------------------------------------------------


def _any_autocast() -> bool:
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", "cuda"} if accelerator is None else {"cpu", "cuda", accelerator.type}
    return any(map(torch.is_autocast_enabled, kinds))


#: () -> whether torch.autocast is on for any type of device.
any_autocast: Callable[[], bool] = _found("_C._is_any_autocast_enabled", _any_autocast)


# -- modes and subclasses ----------------------------------------------------------------------------------------------


def _mode_entered() -> int:
    """A mode that may be there: callers take the slow path."""
    return 1


#: () -> how many modes of ``__torch_dispatch__``, and of ``__torch_function__``, are entered.
dispatch_modes: Callable[[], int] = _found("_C._len_torch_dispatch_stack", _mode_entered)
function_modes: Callable[[], int] = _found("_C._len_torch_function_stack", _mode_entered)

#: The wrapper tensor of a subclass with ``__torch_dispatch__``.
make_wrapper_subclass: Callable[..., Any] = _required("Tensor._make_wrapper_subclass")


def _without_torch_function(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **(kwargs or {}))


#: ``__torch_function__`` of a subclass that does nothing above the dispatcher.
disabled_torch_function: Any = _found("_C._disabled_torch_function_impl", classmethod(_without_torch_function))


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """A context in which no mode sees what is computed: tensors made inside are real while something is traced.

    Raises:
        RuntimeError: PyTorch does not have what this needs.
    """
    modes = _lookup("utils._python_dispatch._disable_current_modes")
    functions = _lookup("_C.DisableTorchFunction")
    if modes is None or functions is None:
        raise RuntimeError(
            f"PyTorch {torch.__version__} cannot leave its modes: run the module once in eager mode before a trace"
        )
    stack = contextlib.ExitStack()
    stack.enter_context(modes())
    stack.enter_context(functions())
    return stack


# -- tensors without data ----------------------------------------------------------------------------------------------

#: The mode under which tensors have shapes, strides, dtypes and devices, and no data.
FakeTensorMode: Any = _required("_subclasses.fake_tensor.FakeTensorMode")

#: What operations raise under it whose results depend on data.
DataDependent: tuple[type[BaseException], ...] = (
    _required("_subclasses.fake_tensor.DataDependentOutputException"),
    _required("_subclasses.fake_tensor.DynamicOutputShapeException"),
    _required("_subclasses.fake_tensor.UnsupportedOperatorException"),
)


# -- guards, memory, streams -------------------------------------------------------------------------------------------

#: The native comparison of tensors' metadata that torch.compile guards with; None where PyTorch does not have it.
TensorGuards: Any = _found("_C._dynamo.guards.TensorGuards", None)

#: (shape, strides, dtype) -> uninitialized memory of the current CUDA device; None where PyTorch does not have it.
empty_strided_cuda: Callable[..., torch.Tensor] | None = _found(
    "_C._dynamo.guards._empty_strided_cuda", None, _GPU_BUILD
)


def _raw_stream(index: int) -> int:
    stream: int = torch.cuda.current_stream(index).cuda_stream
    return stream


#: () -> index of the current CUDA device. (index) -> address of PyTorch's current stream there. () -> whether the
#: current stream is being captured into a graph.
current_device: Callable[[], int] = _found("_C._cuda_getDevice", torch.cuda.current_device, _GPU_BUILD)
raw_stream: Callable[[int], int] = _found("_C._cuda_getCurrentRawStream", _raw_stream, _GPU_BUILD)
is_capturing: Callable[[], bool] = _found(
    "_C._cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing, _GPU_BUILD
)

#: (cycles) -> None: keep the current CUDA stream busy; None where PyTorch does not have it.
sleep: Callable[[int], None] | None = _found("cuda._sleep", None)

#: DLPack's exchange functions, for native code that reads tensors; None before PyTorch 2.10.
dlpack_exchange: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _fp32_precision(backend: str, operation: str) -> str:
    """Of ``cuda`` and ``matmul``."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


#: ("cuda", "matmul") -> how fp32 products are computed: "tf32", or another word.
fp32_precision: Callable[[str, str], str] = _found("_C._get_fp32_precision_getter", _fp32_precision)


def _amx_tiles() -> bool:
    """Whether the processor says that it has AMX tiles: Linux's words for them."""
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


#: () -> whether PyTorch multiplies matrices of the CPU on AMX tiles.
amx_tiles: Callable[[], bool] = _found("cpu._is_amx_tile_supported", _amx_tiles)


def _foreach_copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources):
        target.copy_(source)


#: (targets, sources) -> None: copy each, in few launches.
foreach_copy: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], Any] = _found("_foreach_copy_", _foreach_copy)

#: (a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum) -> the product of FP8 matrices.
scaled_mm: Callable[..., torch.Tensor] = _required("_scaled_mm")


# -- serialization -----------------------------------------------------------------------------------------------------


def _rebuild_tensor(
    storage: Any, offset: int, size: Any, stride: Any, requires_grad: bool, hooks: Any, metadata: Any = None
) -> torch.Tensor:
    made = torch.empty(0, dtype=storage.dtype, device=storage.device)
    return made.set_(storage, offset, size, stride).requires_grad_(requires_grad)


#: What pickles of tensors call to make one.
rebuild_tensor: Callable[..., torch.Tensor] = _found("_utils._rebuild_tensor_v2", _rebuild_tensor)

# -- printing ----------------------------------------------------------------------------------------------------------

#: What `torch.set_printoptions` writes, as attributes; None where PyTorch keeps it elsewhere.
print_options: Any = _found("_tensor_str.PRINT_OPTS", None)
