# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The devices of this process: what backends know of each, asked once."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from te_dispatch.core.devices import current_accelerator, describe_device, is_capturing, probe_device
from te_dispatch.core.errors import CaptureError, DispatchError
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.importing import released
from te_dispatch.core.tables import ANY, CPU_ONLY

if TYPE_CHECKING:
    from te_dispatch.core.manager import OpManager


#: The name of this machine's accelerator, or of its CPU without one.
HERE = "here"


class ProcessDevices:
    """Devices and their facts, under one registry of a manager: another registry has an object of its own, so that
    what an earlier one's probe still answers is not kept.

    Args:
        manager: whose backends are asked.
        stand_in: facts of another device that the CPU counts as.
    """

    def __init__(self, manager: OpManager, stand_in: DeviceFacts | None = None) -> None:
        self._manager = manager
        #: Of what the CPU counts as; None: of itself.
        self.stand_in = stand_in
        #: (type, index) -> facts.
        self.known: dict[tuple[str, int | None], DeviceFacts] = {}
        self._several: bool | None = None

    def facts(self, device: Any) -> DeviceFacts:
        """Facts of a ``torch.device`` (or anything with ``type`` and ``index``), probed once."""
        if self.stand_in is not None and device.type == "cpu":
            return self.stand_in
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

    def named(self, text: str) -> DeviceFacts:
        """Facts of a device by its name.

        Args:
            text: ``vendor:arch``, or one of both where that is enough (``cpu``, ``sm_90``): described from the
                manifests, nothing is probed and PyTorch is not imported; ``here``: this machine's accelerator, else its
                CPU; a PyTorch device of this machine (``cuda:1``, ``cpu:0``).

        Raises:
            DispatchError: a vendor or arch that no manifest knows, or a device that is not here.
        """
        if text == HERE:
            return self.facts(current())
        snapshot = self._manager.snapshot
        type_, colon, number = text.lower().partition(":")
        types = {one for backend in snapshot.backends.values() for one in backend.manifest.devices}
        rows = snapshot.archs().get(type_)
        # A number is an index, unless the type is also a vendor with an arch of that name.
        is_local = type_ in types and (number.isdigit() and number not in (rows or ()) if colon else rows is None)
        if not is_local:
            return describe_device(snapshot, text)
        facts = self.facts(SimpleNamespace(type=type_, index=int(number or 0)))
        # What no probe knows comes back named after its type alone.
        if type_ != "cpu" and facts.vendor == facts.arch == type_:
            raise DispatchError(f"device {text}: there is no such device here; describe one elsewhere as vendor:arch")
        return facts

    def seen(self) -> list[DeviceFacts]:
        """Facts of the CPU, the current accelerator if there is one, and every device met so far."""
        accelerator = current_accelerator()
        if accelerator is not None:
            self.facts(accelerator)
        host = self.facts(SimpleNamespace(type="cpu", index=None))
        return [*self.known.values(), *([] if self.stand_in is None else [host])]

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


def current() -> Any:
    """This machine's accelerator as PyTorch has it, else its CPU. Imports PyTorch."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.accelerator.is_available():
            return torch.accelerator.current_accelerator()
    return SimpleNamespace(type="cpu", index=None)
