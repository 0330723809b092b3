# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Checkpoint regions: what a module's first forward leaves for its recomputation.

A forward that runs while a backward graph executes is a recompute. It must use the recipe and scales that the first
forward saw, although the autocast may be long gone and the scales updated since. What is needed hangs on the object
that owns the checkpoint (so it lives exactly as long) and is found again by module and position, so that early stops,
retained graphs, backward passes in another order and modules called twice all work.

torch.utils.checkpoint offers no hook for this. Its owner objects are read off the Python stack: every region has a
frame of its machinery on it, in the first forward and in the recompute. What is read there, checked on PyTorch 2.9 to
2.13: `_checkpoint_hook`'s ``unpack_hook(frame)``, `CheckpointFunction.forward/backward(ctx)`, the local ``gen`` of
`checkpoint`. Where one is missing, only `te_dispatch.pytorch.checkpoint` is recognised.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections import deque
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint as torch_checkpoint

from te_dispatch.torch_private import CheckpointFrame, saved_tensors_hooks, unpack_hook_code


class Region:
    """The forwards of one checkpointed call.

    Attributes:
        root: the graph task in which this region's first forward was itself a recompute (a checkpoint inside a
            checkpoint), else None.
    """

    __slots__ = ("root", "_entries", "_cursors")

    def __init__(self) -> None:
        self.root: int | None = None
        self._entries: dict[Any, list[Any]] = {}
        self._cursors: dict[int, dict[Any, int]] = {}

    def record(self, module: Any, entry: Any) -> None:
        self._entries.setdefault(module, []).append(entry)

    def replay(self, module: Any, task: int) -> Any | None:
        """The entry of the module's next call in the recompute that graph task `task` runs, None if it has none."""
        cursors = self._cursors.setdefault(task, {})
        position = cursors.get(module, 0)
        entries = self._entries.get(module, ())
        if position >= len(entries):
            return None
        cursors[module] = position + 1
        return entries[position]


class _Phase(threading.local):
    """Of this thread.

    Attributes:
        declared: whether it is in a declared checkpoint of FP8 modules. recomputing: whether for the second time.
        root: of `_DECLARED`.
    """

    declared = False
    recomputing = False
    root: int | None = None


phase = _Phase()


class _Declared(Region):
    """All checkpoints that `activation_recompute_forward` declares.

    Nothing tells which first forward a recomputation belongs to. As in Transformer Engine, those of each module are
    replayed in the order in which they ran, and only a module in training mode will be recomputed. Each has a root of
    its own: `root` is that of the one which this thread records, or has replayed last.
    """

    __slots__ = ("_queues",)

    def __init__(self) -> None:
        super().__init__()
        self._queues: WeakKeyDictionary[Any, deque[Any]] = WeakKeyDictionary()

    @property
    def root(self) -> int | None:  # type: ignore[override]
        return phase.root

    @root.setter
    def root(self, value: int | None) -> None:
        phase.root = value

    def record(self, module: Any, entry: Any) -> None:
        if module.training:
            self._queues.setdefault(module, deque()).append((self.root, entry))

    def replay(self, module: Any, task: int) -> Any | None:
        queue = self._queues.get(module)
        if not queue:
            return None
        self.root, entry = queue.popleft()
        return entry


_DECLARED = _Declared()

_ATTRIBUTE = "_te_dispatch_region"


def region_of(owner: Any) -> Region:
    """The region that hangs on a checkpoint's owner object."""
    found: Region | None = getattr(owner, _ATTRIBUTE, None)
    if found is None:
        found = Region()
        setattr(owner, _ATTRIBUTE, found)
    return found


_FORWARD, _FORWARD_REENTRANT, _RECOMPUTE, _RECOMPUTE_REENTRANT, _OWN = range(5)

# Code objects hash by content, which is slow: the key is the id, and `_codes` keeps the objects alive.
_codes: list[CodeType] = []
_marks: dict[int, int] = {}


def _mark(code: CodeType | None, kind: int) -> None:
    if code is not None:
        _codes.append(code)
        _marks[id(code)] = kind


def mark_own(code: CodeType) -> None:
    """Declare the frame in which `te_dispatch.pytorch.checkpoint` calls the user's function.

    Its locals: ``self.region`` and ``replaying``.
    """
    _mark(code, _OWN)


_mark(getattr(inspect.unwrap(torch_checkpoint.checkpoint), "__code__", None), _FORWARD)
_mark(torch_checkpoint.CheckpointFunction.forward.__code__, _FORWARD_REENTRANT)
_mark(torch_checkpoint.CheckpointFunction.backward.__code__, _RECOMPUTE_REENTRANT)
_mark(unpack_hook_code, _RECOMPUTE)


def _forward_owner(frame: FrameType) -> Any | None:
    """The `_CheckpointFrame` of a non-reentrant checkpoint whose first forward runs below `frame`."""
    generator = frame.f_locals.get("gen")
    inner = getattr(generator, "gi_frame", None)
    return None if inner is None else inner.f_locals.get("new_frame")


def find() -> tuple[list[Region], Region | None]:
    """(targets, source): the regions in their first forward, and the innermost one being recomputed.

    There are several targets where checkpoints nest: each recomputes on its own, so each keeps an entry. Targets
    below a source are checkpoints inside a recomputed one. Outside any checkpoint there is nothing. What is declared
    is a region where no frame is that of another: a checkpoint around it runs its first forward again.
    """
    targets, source = _on_stack()
    if phase.declared and phase.recomputing:
        return targets, _DECLARED
    if phase.declared and not targets:
        return [_DECLARED], source
    return targets, source


def _on_stack() -> tuple[list[Region], Region | None]:
    """(targets, source) as the machinery of PyTorch's checkpoints and this project's shows them."""
    targets: list[Region] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        kind = _marks.get(id(frame.f_code))
        if kind is not None:
            region, recomputing = _region_at(kind, frame.f_locals, frame)
            if recomputing:
                return targets, region
            if region is not None and region not in targets:
                targets.append(region)
        frame = frame.f_back
    hooked = None if targets else _hooked_region()
    return targets if hooked is None else [hooked], None


def _region_at(kind: int, values: Any, frame: FrameType) -> tuple[Region | None, bool]:
    """The region that a marked frame belongs to, and whether it is being recomputed there."""
    if kind == _OWN:
        return values["self"].region, values["replaying"]
    if kind == _FORWARD:
        owner = _forward_owner(frame)
    else:
        owner = values.get("frame" if kind == _RECOMPUTE else "ctx")
    return None if owner is None else region_of(owner), kind in (_RECOMPUTE, _RECOMPUTE_REENTRANT)


def _hooked_region() -> Region | None:
    """The region of a checkpoint that was set up by hooks alone, found in the closure of its pack hook."""
    hooks = saved_tensors_hooks(True)
    if hooks is None or CheckpointFrame is None:
        return None
    for cell in getattr(hooks[0], "__closure__", None) or ():
        if isinstance(cell.cell_contents, CheckpointFrame):
            return region_of(cell.cell_contents)
    return None


def maybe_checkpointed() -> bool:
    """Whether this forward may be a checkpoint's first one; False in ordinary training, at the cost of two reads."""
    if not torch.is_grad_enabled():
        return not torch.is_inference_mode_enabled()
    return saved_tensors_hooks(True) is not None


def any_around() -> bool:
    """Whether the caller runs in a checkpoint's first forward, or in its recomputation."""
    targets, source = find()
    return bool(targets) or source is not None


def in_reentrant_forward() -> bool:
    """Whether the caller runs in a reentrant checkpoint's first forward that will have a backward."""
    if phase.declared and not phase.recomputing:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Under an outer no_grad the node has no edges, and there will be no backward. A checkpoint in a checkpoint has
        # none either, but the outer one has.
        if _marks.get(id(frame.f_code)) == _FORWARD_REENTRANT and frame.f_locals["ctx"].next_functions:
            return True
        frame = frame.f_back
    return False
