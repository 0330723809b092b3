# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Whether graphs that this thread makes are for ONNX, and which implementations they are made of."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from te_dispatch.core import scopes
from te_dispatch.core.bindings import Bindings
from te_dispatch.core.policy import Policy, Selector
from te_dispatch.core.scope import Scope

#: ONNX knows PyTorch's operations only. Composites come first so that a cast behind a norm or an activation is a
#: `quantize` of its own; attention head by head would unroll the batch.
_POLICY = Policy(
    name="onnx_export",
    prefer=(Selector("composite"),),
    allow=(Selector("trait:plain_torch"),),
    deny=(Selector("composite.unfused_attention"),),
)


class _Thread(threading.local):
    def __init__(self) -> None:
        #: The bindings around the mode, None outside of it.
        self.around: Bindings | None = None


_thread = _Thread()


def is_in_onnx_export_mode() -> bool:
    """Whether this thread is inside `onnx_export(enabled=True)`."""
    return _thread.around is not None


@contextlib.contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Context manager: graphs made inside consist of operations that `torch.onnx.export` translates.

    Operators run on implementations made of PyTorch operations, whatever the policy prefers, and a cast to FP8 becomes
    the pair QuantizeLinear and DequantizeLinear, through `te_translation_table`:

    .. code-block:: python

        with torch.no_grad(), te.autocast(recipe=recipe), te.onnx_export(enabled=True):
            torch.onnx.export(model, (x,), "model.onnx", dynamo=True, custom_translation_table=te_translation_table)

    It belongs to the thread and nests; the innermost decides. Eager calls inside compute as the policy for graphs says.

    Args:
        enabled: False leaves the mode for the block.

    Raises (while the graph is made; torch.onnx.export wraps what it raises):
        NotImplementedError: dropout in training mode, NVFP4, `fp8_output`; while it is translated, FP8 below opset 19.
        NoImplementation: the policy in force denies what is made of PyTorch operations.
        DispatchError: the graph is made by dynamo (``strict=True``, torch.compile).
    """
    around = before = _thread.around
    scope: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if enabled and before is None:
        around = scopes.capture()
        # With an observer no call goes around the slow path, where fake tensors are noticed.
        scope = Scope(scopes.MANAGER, lambda: scopes.MANAGER.scope(_POLICY, _seen))
    elif not enabled and before is not None:
        around, scope = None, scopes.reenter(before)
    with scope:
        _thread.around = around
        try:
            yield
        finally:
            _thread.around = before


def _seen(*_: Any) -> None:
    """Nothing is done about calls with data."""
