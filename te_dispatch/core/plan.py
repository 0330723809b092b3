# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Freezing what was chosen: a plan with a digest, as a lock file that another machine honours or refuses."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_dispatch.core import files
from te_dispatch.core.decision import Accepted
from te_dispatch.core.errors import PlanError
from te_dispatch.core.facts import UNKNOWN, DeviceFacts, FactValue
from te_dispatch.core.layout import check_layout
from te_dispatch.core.operator import OPERATORS

if TYPE_CHECKING:
    from te_dispatch.core.bindings import Bindings
    from te_dispatch.core.entries import Lookup
    from te_dispatch.core.manager import OpManager

#: Of the lock file's layout.
FORMAT = 1
_SCALAR = (str, int, float, bool, type(None))
_FACT = (*_SCALAR, [_SCALAR])
#: What `Plan.as_data` writes, as `check_layout` reads it.
_LAYOUT = {
    "format": int,
    "policy": {...: object},
    "distributions": {...: str},
    "kernels": {...: str},
    "devices": {...: {...: _FACT}},
    "choices": [{"operator": str, "device": str, "facts": {...: _FACT}, "chosen": str, "pieces": {...: str}}],
}


@dataclass(frozen=True)
class Choice:
    """One resolved call: the facts its choice depends on, and what was chosen."""

    operator: str
    device: str
    facts: Mapping[str, FactValue]
    chosen: str
    pieces: Mapping[str, str]

    def key(self) -> str:
        return json.dumps([self.operator, self.device, _jsonable(dict(self.facts))], sort_keys=True)


@dataclass(frozen=True)
class Plan:
    """What a process chose.

    Attributes:
        choices: every resolved call.
        distributions: name -> version, of every package a choice comes from.
        devices: label -> facts.
        policy: the effective policy, as plain data.
        kernels: implementation id -> its version, of everything chosen.
    """

    choices: tuple[Choice, ...]
    distributions: Mapping[str, str]
    devices: Mapping[str, Mapping[str, Any]]
    policy: Mapping[str, Any]
    kernels: Mapping[str, str] = field(default_factory=dict)

    def as_data(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "policy": dict(self.policy),
            "distributions": dict(sorted(self.distributions.items())),
            "kernels": dict(sorted(self.kernels.items())),
            "devices": {name: dict(facts) for name, facts in sorted(self.devices.items())},
            "choices": [
                {
                    "operator": c.operator,
                    "device": c.device,
                    "facts": _jsonable(dict(sorted(c.facts.items()))),
                    "chosen": c.chosen,
                    "pieces": dict(c.pieces),
                }
                for c in sorted(self.choices, key=Choice.key)
            ],
        }

    @property
    def digest(self) -> str:
        """Of the whole plan; equal digests mean equal choices from equal packages on equal devices."""
        return hashlib.sha256(json.dumps(self.as_data(), sort_keys=True).encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the lock file, at once; a link is followed.

        Raises:
            OSError: it cannot be written; the file that was there before stays.
        """
        files.replace(path, json.dumps({**self.as_data(), "digest": self.digest}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str], manager: OpManager | None = None) -> Plan:
        """Read a lock file and check that this machine would choose the same.

        Raises:
            PlanError: the file cannot be read, was edited, or does not fit; in the last case the message is the
                difference, one line each.
        """
        plan = cls._read(Path(path))
        differences = plan.differences(manager or _default_manager())
        if differences:
            raise PlanError(f"{path} does not fit this machine:\n" + "\n".join(f"  {line}" for line in differences))
        return plan

    @classmethod
    def _read(cls, path: Path) -> Plan:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise PlanError(f"{path} is not a lock file: {error}") from error
        try:
            data = json.loads(text)
            plan = cls._from_data(data)
            unchanged = data.get("digest") == plan.digest
        except RecursionError:
            raise PlanError(f"{path} is not a lock file: it is nested too deeply") from None
        except ValueError as error:
            raise PlanError(f"{path} is not a lock file: {error}") from error
        if not unchanged:
            raise PlanError(f"{path}: its digest does not match its content; it was edited or damaged")
        return plan

    @classmethod
    def _from_data(cls, data: Any) -> Plan:
        """The plan that `as_data` gave this data of.

        Raises:
            ValueError: it is of another format, or a value has another type than `as_data` gives; says where.
        """
        if isinstance(data, dict) and data.get("format", FORMAT) != FORMAT:
            raise ValueError(f"format {data['format']!r}, this te_dispatch reads {FORMAT}")
        check_layout(data, _LAYOUT)
        return cls(
            choices=tuple(
                Choice(c["operator"], c["device"], _restored(c["facts"]), c["chosen"], c["pieces"])
                for c in data["choices"]
            ),
            distributions=data["distributions"],
            devices=data["devices"],
            policy=data["policy"],
            kernels=data["kernels"],
        )

    def differences(self, manager: OpManager) -> list[str]:
        """What this machine has or would do differently, as readable lines."""
        from te_dispatch.core.resolve import resolve

        found: list[str] = []
        here = {b.distribution: b.version for b in manager.snapshot.backends.values()}
        here["te-dispatch"] = _own_version()
        for name, version in self.distributions.items():
            if name in here and here[name] != version:
                found.append(f"{name} is {here[name]}, the plan has {version}")
            elif name not in here:
                found.append(f"{name} {version} is not installed")
        policy = manager.capture().policy
        if _choosing(policy.as_data()) != dict(self.policy):
            ours = _choosing(policy.as_data())
            found.append("the effective policy differs: " + _policy_difference(dict(self.policy), ours))
        devices = {facts.label(): facts for facts in manager.devices.seen()}
        for label, theirs in self.devices.items():
            if label not in devices:
                found.append(f"there is no {label} device here")
                continue
            ours = _device_data(devices[label])
            for name in sorted({*theirs, *ours}):
                if theirs.get(name) != ours.get(name):
                    found.append(f"{label}: {name} is {ours.get(name)!r}, the plan has {theirs.get(name)!r}")
        for candidate, version in self.kernels.items():
            installed = _kernel_version(manager, candidate)
            if installed is not None and installed != version:
                found.append(f"{candidate} is version {installed}, the plan has {version}")
        for choice in self.choices:
            device = devices.get(choice.device)
            if device is None:
                continue
            operator = OPERATORS.get(choice.operator)
            if operator is None:
                found.append(f"operator {choice.operator!r} does not exist here")
                continue
            decision = resolve(operator, choice.facts, device, policy, manager.snapshot)
            chosen = decision.chosen.id if decision.chosen else "nothing"
            if chosen != choice.chosen:
                found.append(f"{choice.operator} would run on {chosen}, the plan has {choice.chosen}")
            elif decision.chosen is not None:
                pieces = _pieces(decision.chosen)
                for name in sorted({*pieces, *choice.pieces}):
                    if pieces.get(name) != choice.pieces.get(name):
                        instead, there = pieces.get(name, "nothing"), choice.pieces.get(name, "nothing")
                        found.append(f"{choice.operator}: {name} would run on {instead}, the plan has {there}")
        return found


def freeze(manager: OpManager | None = None) -> Plan:
    """The plan of everything resolved so far under the policy in force here: run a step first."""
    manager = manager or _default_manager()
    bindings = manager.capture()
    choices: dict[str, Choice] = {}
    distributions: dict[str, str] = {}
    kernels: dict[str, str] = {}
    devices: dict[str, DeviceFacts] = {}
    for lookup in _resolved(manager, bindings):
        names = sorted({name for name, _ in lookup.atoms})
        for entry in (*lookup.superseded, *lookup.entries.values()):
            decision = entry.decision
            chosen = entry.chosen
            devices[decision.device.label()] = decision.device
            pieces = _pieces(chosen)
            for part in _parts(chosen):
                distributions[part.distribution] = part.version
                if not part.pieces:
                    kernels[part.id] = manager.snapshot.implementation(part.id)[1].version
            known = {name: decision.call.get(name, UNKNOWN) for name in names}
            facts = {name: value for name, value in known.items() if value is not UNKNOWN}
            choice = Choice(decision.operator, decision.device.label(), facts, chosen.id, pieces)
            choices[choice.key()] = choice
    distributions["te-dispatch"] = _own_version()
    return Plan(
        choices=tuple(choices[key] for key in sorted(choices)),
        distributions=distributions,
        devices={name: _device_data(facts) for name, facts in devices.items()},
        policy=_choosing(bindings.policy.as_data()),
        kernels=kernels,
    )


def _own_version() -> str:
    from te_dispatch import __version__

    return __version__


def _resolved(manager: OpManager, bindings: Bindings) -> list[Lookup]:
    """What every operator resolved until now, as it is between two resolutions of other threads."""
    with manager.lock:
        lookups = [dispatcher.lookup for dispatcher in bindings.dispatchers.values()]
        return [one._replace(entries=dict(one.entries)) for one in lookups if one is not None]


def _parts(chosen: Accepted) -> Iterator[Accepted]:
    """What runs: the candidate, and all pieces of a composite."""
    yield chosen
    for piece in chosen.pieces.values():
        if piece.chosen is not None:
            yield from _parts(piece.chosen)


def _pieces(chosen: Accepted, prefix: str = "") -> dict[str, str]:
    """A composite's pieces by name, those of a composite inside it as ``outer.inner``."""
    found: dict[str, str] = {}
    for name, piece in chosen.pieces.items():
        if piece.chosen is not None:
            found[prefix + name] = piece.chosen.id
            found |= _pieces(piece.chosen, f"{prefix}{name}.")
    return found


def _default_manager() -> OpManager:
    from te_dispatch.core.scopes import MANAGER

    return MANAGER


def _device_data(facts: DeviceFacts) -> dict[str, Any]:
    data = {name: facts[name] for name in ("type", "vendor", "arch", "encodings", "fp8_matmul", "warp_size")}
    data.update({name: value for name, value in facts.extra.items() if name.startswith("version.")})
    return {name: _jsonable(value) for name, value in data.items()}


def _kernel_version(manager: OpManager, candidate: str) -> str | None:
    try:
        return manager.snapshot.implementation(candidate)[1].version
    except KeyError:
        return None  # what runs instead is told by the choices


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _jsonable(v) for name, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_jsonable(v) for v in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _restored(facts: Mapping[str, Any]) -> dict[str, FactValue]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in facts.items()}


def _choosing(policy: Mapping[str, Any]) -> dict[str, Any]:
    """What of a policy chooses: whether calls are compared with another backend's does not."""
    return {key: value for key, value in policy.items() if key != "shadow"}


def _policy_difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    return "; ".join(
        f"{key} is {ours.get(key)!r}, the plan has {theirs.get(key)!r}"
        for key in sorted({*theirs, *ours})
        if theirs.get(key) != ours.get(key)
    )
