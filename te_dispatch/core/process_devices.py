# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The devices of this process: what backends know of each, asked once."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from te_dispatch.core.devices import current_accelerator, is_capturing, probe_device
from te_dispatch.core.errors import CaptureError
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.importing import released
from te_dispatch.core.tables import ANY, CPU_ONLY

if TYPE_CHECKING:
    from te_dispatch.core.manager import OpManager


class ProcessDevices:
    """Devices and their facts, under one registry of a manager: another registry has an object of its own, so that
    what an earlier one's probe still answers is not kept.

    Args:
        manager: whose backends are asked.
    """

    def __init__(self, manager: OpManager) -> None:
        self._manager = manager
        #: (type, index) -> facts.
        self.known: dict[tuple[str, int | None], DeviceFacts] = {}
        self._several: bool | None = None

    def facts(self, device: Any) -> DeviceFacts:
        """Facts of a ``torch.device`` (or anything with ``type`` and ``index``), probed once."""
        key = (device.type, device.index)
        found = self.known.get(key)
        if found is not None:
            return found
        manager = self._manager
        snapshot = manager.snapshot
        with released(manager.lock):
            found, problems = probe_device(snapshot, *key)
        with manager.lock:
            if manager.devices is not self:
                return found
            if key not in self.known:
                self.known[key] = found
                manager.report_problems(problems)
            return self.known[key]

    def seen(self) -> list[DeviceFacts]:
        """Facts of the CPU, the current accelerator if there is one, and every device met so far."""
        accelerator = current_accelerator()
        if accelerator is not None:
            self.facts(accelerator)
        self.facts(SimpleNamespace(type="cpu", index=None))
        return list(self.known.values())

    def several(self) -> bool:
        """Whether calls on different kinds of devices may meet in this process."""
        if self._several is None:
            self._several = current_accelerator() is not None
        return self._several

    def mode(self) -> str:
        """How a lookup tells this process's devices apart (`te_dispatch.core.tables.Table`)."""
        torch = sys.modules.get("torch")
        if torch is None:
            return ANY
        self._manager.namespace.__dict__["_REAL"] = frozenset((torch.Tensor, torch.nn.Parameter))
        if not self.several():
            return CPU_ONLY
        kind = torch.accelerator.current_accelerator().type
        attribute = f"is_{kind}"
        archs = {self.facts(torch.device(kind, i)).arch for i in range(torch.accelerator.device_count())}
        return attribute if len(archs) == 1 and hasattr(torch.Tensor, attribute) else ANY

    def refuse_during_capture(self, operator: str) -> None:
        """Resolution imports, allocates and may synchronize: none of it may happen inside a CUDA graph capture."""
        if self.several() and is_capturing():
            raise CaptureError(
                f"{operator}: this combination of device, dtypes and options has not been called yet, and resolving "
                "it is not possible during CUDA graph capture; run the step once before capturing it"
            )
