# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Running a backend's probes where they can do no harm: in a process of their own, with a time limit.

A probe may end its process (a driver's library that calls exit), hang, or print. The child reports each answer as
soon as it has it, so that a death costs the probe that died and no other: a new child carries on with the rest.

This module is also the child: `child` reads its request from standard input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from te_dispatch.core.facts import UNKNOWN, FactValue
from te_dispatch.core.manifest import Manifest

#: Seconds one child may take. An import of PyTorch from a cold network disk is the longest thing in it.
TIME_LIMIT = 60.0

#: A probe that knows facts for every index it is asked about must not be asked forever.
_MOST_DEVICES = 64


@dataclass(frozen=True)
class Answer:
    """What became of one probe.

    Attributes:
        kind: ``unavailable``, ``devices``, ``doctor`` or ``implementation``.
        subject: device type or implementation id; empty for the others.
        value: what it returned, as plain data.
        problem: how it failed, None if it did not.
    """

    kind: str
    subject: str
    value: Any = None
    problem: str | None = None


def probes_of(manifest: Manifest, unusable: Mapping[str, str] | None = None) -> list[tuple[str, str, str]]:
    """(kind, subject, target) of everything a backend lets us ask, cheapest first."""
    found = []
    if manifest.unavailable:
        found.append(("unavailable", "", manifest.unavailable))
    found += [("devices", type_, target) for type_, target in manifest.devices.items()]
    if manifest.doctor:
        found.append(("doctor", "", manifest.doctor))
    for implementation in manifest.implementations:
        candidate = f"{manifest.name}.{implementation.name}"
        if candidate not in (unusable or {}):
            found.append(("implementation", f"{implementation.operator}={candidate}", implementation.target))
    return found


def run_probes(probes: Sequence[tuple[str, str, str]], time_limit: float = TIME_LIMIT) -> list[Answer]:
    """Ask all probes, in child processes. Never raises for what a probe does.

    A backend that says it is unavailable is not asked to import its implementations.
    """
    answers: list[Answer] = []
    rest = list(probes)
    while rest:
        found, ending = _one_child(rest, time_limit)
        answers += found
        rest = rest[len(found) :]
        if any(answer.kind == "unavailable" and (answer.value or answer.problem) for answer in found):
            rest = [probe for probe in rest if probe[0] != "implementation"]
        if rest:
            kind, subject, target = rest.pop(0)
            problem = ending or "ended its process without an answer"
            answers.append(Answer(kind, subject.partition("=")[2] or subject, problem=problem))
            if kind == "implementation":
                # The module's other implementations would only kill further children.
                module = target.partition(":")[0]
                rest = [probe for probe in rest if probe[2].partition(":")[0] != module]
    return answers


def _one_child(probes: Sequence[tuple[str, str, str]], time_limit: float) -> tuple[list[Answer], str | None]:
    """The answers of one child, and how it ended if it did not get through."""
    request = json.dumps(list(probes))
    # The caller's path, which it may have changed since it started.
    program = "import sys; sys.path[:] = sys.argv[1:]; from te_dispatch.cli import probing; probing.child()"
    command = [sys.executable, "-c", program, *sys.path]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        answered, noise = child.communicate(request, timeout=time_limit)
        ending = _ending(child.returncode, noise)
    except subprocess.TimeoutExpired:
        child.kill()
        answered, _ = child.communicate()
        ending = f"did not answer within {time_limit:g} s and was stopped"
    answers = []
    for line in answered.splitlines():
        try:
            answers.append(Answer(**json.loads(line)))
        except (ValueError, TypeError):
            break  # cut off in the middle of an answer
    return answers, ending


def _ending(code: int, noise: str) -> str | None:
    last = next((line.strip() for line in reversed(noise.splitlines()) if line.strip()), "")
    said = f" (last words: {last[:200]})" if last else ""
    if code == 0:
        return None
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed its process with {name}{said}"
    return f"ended its process with exit code {code}{said}"


# -- the child -------------------------------------------------------------------------------------------------------


def child() -> None:
    """Answer the request on standard input, one JSON line per probe."""
    probes = json.loads(sys.stdin.read())
    # What probes print must not land among the answers.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    unavailable = False
    for kind, subject, target in probes:
        if unavailable and kind == "implementation":
            break
        shown = subject.partition("=")[2] or subject
        try:
            answer = Answer(kind, shown, _ask(kind, subject, target))
        except (Exception, SystemExit) as error:
            answer = Answer(kind, shown, problem=f"raised {type(error).__name__}: {error}")
        unavailable = unavailable or (kind == "unavailable" and bool(answer.value or answer.problem))
        channel.write(json.dumps(answer.__dict__) + "\n")
        channel.flush()
    # Without the interpreter's shutdown: a library that crashes there has already answered.
    os._exit(0)


def _ask(kind: str, subject: str, target: str) -> Any:
    from te_dispatch.core.bind import import_target, load

    if kind == "implementation":
        import te_dispatch.ops.declared  # noqa: F401  # fills OPERATORS
        from te_dispatch.core.operator import OPERATORS

        operator, _, candidate = subject.partition("=")
        load(OPERATORS[operator], candidate, target)
        return None
    function = import_target(target)
    if kind == "devices":
        return _devices(function, subject)
    if kind == "doctor":
        return [[str(part) for part in row] for row in function()]
    reason = function()
    return None if reason is None else str(reason)


def _devices(probe: Any, type_: str) -> list[dict[str, Any]]:
    found = []
    for index in range(1 if type_ == "cpu" else _MOST_DEVICES):
        facts = probe(index)
        if facts is None or facts.index not in (None, index):
            break
        found.append({"index": index, "facts": {name: plain(facts[name]) for name in facts}})
    return found


def plain(value: FactValue) -> Any:
    """A fact's value for JSON. One that is unknown shows as the word: JSON's null means "none"."""
    if value is UNKNOWN:
        return "unknown"
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
