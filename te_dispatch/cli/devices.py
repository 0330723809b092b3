# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``--device``: a device of this machine, or one that is described by vendor and arch."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import te_dispatch.ops  # noqa: F401  # before scopes
from te_dispatch.cli.console import CommandError
from te_dispatch.core.devices import describe_device
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.scopes import MANAGER

#: ``--device``'s help.
HELP = "vendor:arch of any device, here or not (nvidia:sm_90), or a device of this machine (cuda:0, here)."
HERE = "here"


def find_device(text: str) -> DeviceFacts:
    """Facts for ``--device``.

    Args:
        text: ``vendor:arch`` or a vendor with one arch (``cpu``): described from the manifests, nothing is probed and
            PyTorch is not imported; ``here``: this machine's accelerator, else its CPU; a PyTorch device of this
            machine (``cuda:1``, ``cpu:0``).

    Raises:
        DispatchError: a vendor or arch that no manifest knows. CommandError: a device that is not here.
    """
    if text == HERE:
        return MANAGER.device_facts(_current())
    snapshot = MANAGER.snapshot
    type_, colon, number = text.lower().partition(":")
    types = {one for backend in snapshot.backends.values() for one in backend.manifest.devices}
    rows = snapshot.archs().get(type_)
    # A number is an index, unless the type is also a vendor with an arch of that name.
    is_local = type_ in types and (number.isdigit() and number not in (rows or ()) if colon else rows is None)
    return _local(text.lower()) if is_local else describe_device(snapshot, text)


def _current() -> Any:
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.accelerator.is_available():
            return torch.accelerator.current_accelerator()
    return SimpleNamespace(type="cpu", index=None)


def _local(text: str) -> DeviceFacts:
    type_, _, number = text.partition(":")
    facts = MANAGER.device_facts(SimpleNamespace(type=type_, index=int(number or 0)))
    # What no probe knows comes back named after its type alone.
    if type_ != "cpu" and facts.vendor == facts.arch == type_:
        raise CommandError(f"--device {text}: there is no such device here; describe one elsewhere as vendor:arch")
    return facts
