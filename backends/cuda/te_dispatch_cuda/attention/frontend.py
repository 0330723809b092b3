# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""NVIDIA's Python package ``nvidia-cudnn-frontend`` (module ``cudnn``), made to use the cuDNN that this process holds.

The package looks for a cuDNN by itself, and two of them in one process switch fused attention off. So the folder of the
process's copy stands first on the path that the package searches, while it is imported.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from te_dispatch.core.errors import CaptureError, Declined
from te_dispatch_cuda import libraries

_SEARCHED = "LD_LIBRARY_PATH"


@functools.cache
def load() -> Any:
    """The package's compiled module.

    Raises:
        Declined: no cuDNN, no package, or two cuDNNs; in words.
    """
    library = libraries.cudnn()
    if isinstance(library, str):
        raise Declined(library)
    ours = "cudnn" not in sys.modules
    try:
        with _searched_first(os.path.dirname(library.path)):
            import cudnn
    except ImportError as error:
        raise Declined(f"nvidia-cudnn-frontend does not load ({error}): pip install nvidia-cudnn-frontend") from error
    module = getattr(cudnn, "_pybind_module", None) or cudnn._compiled_module
    held = libraries.loaded(libraries.CUDNN)
    if len(held) > 1:
        raise Declined(libraries.duplicate_text(libraries.CUDNN, held))
    if ours:
        module._set_dlhandle_cudnn(ctypes.CDLL(library.path)._handle)
    return module


@contextmanager
def _searched_first(folder: str) -> Iterator[None]:
    before = os.environ.get(_SEARCHED)
    os.environ[_SEARCHED] = folder if not before else f"{folder}{os.pathsep}{before}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SEARCHED]
        else:
            os.environ[_SEARCHED] = before


def graph_class() -> Any:
    """The graph builder over cuDNN alone; later releases call it ``backend_graph``."""
    module = load()
    return getattr(module, "backend_graph", None) or module.pygraph


class _Handles(threading.local):
    """cuDNN handles of one thread, device -> [handle, the stream it runs on]: a handle serves one thread at a time."""

    def __init__(self) -> None:
        self.known: dict[int, list[int]] = {}


_handles = _Handles()


def handle_of(device: int, stream: int) -> int:
    """This thread's handle for a device, set to a stream. The device must be the current one."""
    found = _handles.known.get(device)
    if found is None:
        refuse_capture(torch.device("cuda", device), "cuDNN's first call in this thread")
        module = load()
        found = _handles.known[device] = [module.create_handle(), -1]
    if found[1] != stream:
        _set_stream()(found[0], stream)
        found[1] = stream
    return found[0]


@functools.cache
def _set_stream() -> Any:
    module = load()
    # Later releases wrap handles in objects; what is created here is the plain number.
    return getattr(module, "_raw_set_stream", None) or (lambda handle, stream: module.set_stream(handle, stream))


def refuse_capture(device: torch.device, what: str) -> None:
    """What is done once allocates and works on the host, which would break a capture under way.

    Raises:
        CaptureError: the device's current stream is being captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{what} would allocate and compile while CUDA graph capture is under way on {device}: run the same "
            "call (shapes, strides, dtypes, options) once before the capture, in the same thread, to warm it up"
        )
