# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Running a backend's code where it can do no harm: in a process of its own, with a time limit.

A manifest or a probe may end its process (a driver's library that calls exit), hang, or print. The child reports each
answer as soon as it has it, so that a death costs the probe that died and no other: a new child carries on with the
rest. Every answer has the whole time limit. What an import of PyTorch takes is not the first asker's fault: where the
time is up, the probe is asked once more by a child that has imported PyTorch before it.

This module is also the child: `child` reads its request from standard input.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from te_dispatch.core.devices import facts_problem, read_reason, unlisted_arch
from te_dispatch.core.errors import BindError
from te_dispatch.core.facts import UNKNOWN, FactValue
from te_dispatch.core.failures import phrase, place, traceback_text
from te_dispatch.core.hooks import HOOKS
from te_dispatch.core.manifest import Manifest
from te_dispatch.core.manifest_check import check_manifest
from te_dispatch.core.policy.known import FIRST_PARTY_BACKENDS
from te_dispatch.core.process_devices import current

#: Seconds for one answer. An import of PyTorch from a cold network disk is the longest thing in one.
TIME_LIMIT = 60.0

#: A probe that knows facts for every index it is asked about must not be asked forever.
_MOST_DEVICES = 64

_STATES = ("ok", "missing", "warning")

#: A line on the child's standard error where a probe begins: what earlier ones printed is not a later one's last words.
_BEGIN = "\x1e\n"

Probe = tuple[str, str, str]


@dataclass(frozen=True)
class Answer:
    """What became of one probe.

    Attributes:
        kind: ``manifest``, ``unavailable``, ``devices``, ``doctor`` or ``implementation``.
        subject: entry point, device type or implementation id; empty for the others.
        value: what it returned, as plain data; of a manifest the probes to ask after it, as `probes_of` makes them.
        problem: what is wrong with it, None if nothing is.
        returned: whether it returned at all; else it raised.
        ended: whether it ended its process, or had to be stopped.
        traceback: of what it raised.
    """

    kind: str
    subject: str
    value: Any = None
    problem: str | None = None
    returned: bool = field(default=True, compare=False)
    ended: bool = field(default=False, compare=False)
    traceback: str = field(default="", compare=False)

    @property
    def unavailable(self) -> bool:
        """Whether it says that its backend cannot run here."""
        return self.kind == "unavailable" and (bool(self.value) or not self.returned)

    @property
    def following(self) -> list[Probe]:
        """Probes that are asked next because of this answer."""
        return [tuple(probe) for probe in self.value or ()] if self.kind == "manifest" else []

    @property
    def what(self) -> str:
        """What was asked, as the subject of a sentence whose rest is `problem`."""
        return asked(self.kind, self.subject)


def asked(kind: str, subject: str) -> str:
    """What a probe is called in a sentence."""
    if kind == "devices":
        return f"its probe of {subject}"
    return {"unavailable": "its check of this machine", "doctor": "its own report"}.get(kind, subject)


def probes_of(manifest: Manifest, unusable: Mapping[str, str] | None = None) -> list[Probe]:
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


def run_probes(
    probes: Sequence[Probe],
    time_limit: float = TIME_LIMIT,
    manifest: Manifest | None = None,
    patient: bool = True,
    types: Collection[str] | None = None,
) -> list[Answer]:
    """Ask all probes, in child processes. Never raises for what a probe does.

    A backend that says it is unavailable is not asked to import its implementations.

    Args:
        probes: as `probes_of` makes them.
        time_limit: seconds for one answer.
        manifest: of the backend that is asked; what its probes return is checked against it.
        patient: whether who does not answer in time is asked again beside an imported PyTorch.
        types: device types beside this machine's whose probes are asked after each third-party manifest; None to ask
            for manifests alone.
    """
    answers: list[Answer] = []
    rest = list(probes)
    preload = False
    while rest:
        found, ending, late = _one_child(rest, time_limit, manifest, preload, types)
        answers += found
        for answer in found:
            rest = [*answer.following, *rest[1:]]
        if any(answer.unavailable for answer in found):
            rest = [probe for probe in rest if probe[0] != "implementation"]
        if rest and late and patient and not preload and importlib.util.find_spec("torch") is not None:
            preload = True
        elif rest:
            kind, subject, target = rest.pop(0)
            answers.append(Answer(kind, _shown(subject), problem=ending, returned=False, ended=True))
            if kind == "implementation":
                # The module's other implementations would only kill further children.
                module = target.partition(":")[0]
                rest = [probe for probe in rest if probe[2].partition(":")[0] != module]
            elif kind == "unavailable":
                rest = [probe for probe in rest if probe[0] != "implementation"]
    return answers


def _shown(subject: str) -> str:
    return subject.partition("=")[2] or subject


def _one_child(
    probes: Sequence[Probe],
    time_limit: float,
    manifest: Manifest | None,
    preload: bool,
    types: Collection[str] | None,
) -> tuple[list[Answer], str, bool]:
    """The answers of one child, how it ended if it did not get through, and whether it was stopped for its time."""
    request = {
        "probes": list(probes),
        "preload": preload,
        "types": None if types is None else list(types),
        "vendors": list(manifest.vendors) if manifest else [],
        "archs": {vendor: list(rows) for vendor, rows in manifest.archs.items()} if manifest else {},
    }
    # The caller's path, which it may have changed since it started.
    program = "import sys; sys.path[:] = sys.argv[1:]; from te_dispatch.core import probing; probing.child()"
    command = [sys.executable, "-c", program, *sys.path]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    assert child.stdin is not None
    lines: queue.Queue[str | None] = queue.Queue()
    noise: list[str] = []
    for follow in (lambda: _follow(child.stdout, lines.put, None), lambda: _follow(child.stderr, noise.append, "")):
        threading.Thread(target=follow, daemon=True).start()
    answers: list[Answer] = []
    # The interpreter's start is nobody's fault.
    limit = max(time_limit, TIME_LIMIT)
    try:
        child.stdin.write(json.dumps(request))
        child.stdin.close()
        while True:
            line = lines.get(timeout=limit)
            if line is None:
                return answers, _ending(child.wait(), "".join(noise)), False
            limit = time_limit
            said = json.loads(line)
            if said == "done":
                return answers, "", False
            if said != "ready":
                answers.append(Answer(**said))
    except queue.Empty:
        return answers, f"did not answer within {time_limit:g} s and was stopped", True
    except (OSError, ValueError):  # it died before it read its request, or in the middle of a line
        return answers, _ending(child.wait(), "".join(noise)), False
    finally:
        child.kill()
        child.wait()


def _follow(stream: Any, take: Any, end: str | None) -> None:
    for line in stream:
        take(line)
    take(end)


def _ending(code: int, noise: str) -> str:
    own = noise.rpartition(_BEGIN)[2]
    last = next((line.strip() for line in reversed(own.split("\n")) if line.strip()), "")
    said = f" (last words: {last[:200]})" if last else ""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed its process with {name}{said}"
    return f"ended its process with exit code {code}{said}"


# -- the child -------------------------------------------------------------------------------------------------------


class _Malformed(Exception):
    """A probe that returned what it must not.

    Attributes:
        value: what of it can be used all the same.
    """

    def __init__(self, problem: str, value: Any = None) -> None:
        super().__init__(problem)
        self.value = value


def child() -> None:
    """Answer the request on standard input, one JSON line per probe."""
    request = json.loads(sys.stdin.read())
    # What probes print must not land among the answers.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if request["preload"]:
        _preload()

    def say(what: Any) -> None:
        channel.write(json.dumps(what) + "\n")
        channel.flush()

    say("ready")
    unavailable = False
    waiting = deque(request["probes"])
    while waiting:
        kind, subject, target = waiting.popleft()
        if unavailable and kind == "implementation":
            break
        sys.stdout.flush()
        sys.stderr.write(_BEGIN)
        sys.stderr.flush()
        answer = _answer(kind, subject, target, request)
        unavailable = unavailable or answer.unavailable
        waiting.extendleft(reversed(answer.following))
        say(answer.__dict__)
    say("done")
    # Without the interpreter's shutdown: a library that crashes there has already answered.
    os._exit(0)


def _preload() -> None:
    try:
        import torch  # noqa: F401
    except Exception:
        return  # whoever needs it will say so


def _answer(kind: str, subject: str, target: str, request: Mapping[str, Any]) -> Answer:
    shown = _shown(subject)
    try:
        return Answer(kind, shown, _ask(kind, subject, target, request))
    except _Malformed as error:
        return Answer(kind, shown, error.value, str(error))
    except KeyboardInterrupt:
        raise  # the user's; one that a plugin raises ends this process, which names it
    except BaseException as error:
        # Of an implementation that cannot be bound the message says it all.
        bound = isinstance(error, BindError)
        told = str(error).removeprefix(f"{shown}: ") if bound else f"raised {phrase(error)}{place(error)}"
        return Answer(kind, shown, problem=told, returned=False, traceback=traceback_text(error))


def _ask(kind: str, subject: str, target: str, request: Mapping[str, Any]) -> Any:
    from te_dispatch.core.bind import import_target, load

    if kind == "implementation":
        from te_dispatch.core.operator import OPERATORS

        import_target(HOOKS["declared"])  # fills OPERATORS
        operator, _, candidate = subject.partition("=")
        load(OPERATORS[operator], candidate, target)
        return None
    function = import_target(target)
    if kind == "manifest":
        return _following(function, request["types"])
    if kind == "devices":
        return _devices(function, subject, request)
    if kind == "doctor":
        return _rows(function())
    reason, problem = read_reason(function())
    if problem is not None:
        raise _Malformed(problem, reason)
    return reason


def _following(manifest: object, types: Collection[str] | None) -> list[Probe]:
    """What resolution asks a third-party backend of this machine: whether it works, and about the devices here."""
    if types is None or not isinstance(manifest, Manifest) or manifest.name in FIRST_PARTY_BACKENDS:
        return []
    if check_manifest(manifest, manifest.name) is not None:
        return []  # it is refused, and nothing of it asked
    here = {"cpu", *types}
    if not here.issuperset(manifest.devices):
        here.add(current().type)
    found = [probe for probe in probes_of(manifest) if probe[0] in ("unavailable", "devices")]
    return [probe for probe in found if probe[0] == "unavailable" or probe[1] in here]


def _rows(answer: Any) -> list[list[str]]:
    if not isinstance(answer, (list, tuple)):
        raise _Malformed(f"returned {answer!r}, not a list of (subject, state, reason)")
    for row in answer:
        if not isinstance(row, (list, tuple)) or len(row) != 3 or not all(isinstance(part, str) for part in row):
            raise _Malformed(f"returned the row {row!r}, not (subject, state, reason)")
        if row[1] not in _STATES:
            raise _Malformed(f"returned the state {row[1]!r}; known: {', '.join(_STATES)}")
    return [list(row) for row in answer]


def _devices(probe: Any, type_: str, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    unlisted = None
    for index in range(1 if type_ == "cpu" else _MOST_DEVICES):
        facts = probe(index)
        problem = None if facts is None else facts_problem(facts, type_, request["vendors"])
        if problem is not None:
            raise _Malformed(problem, found)
        if facts is None or facts.index not in (None, index):
            break
        unlisted = unlisted or unlisted_arch(facts, request["vendors"], request["archs"])
        found.append({"index": index, "facts": {name: plain(facts[name]) for name in facts}})
    if unlisted is not None:
        raise _Malformed(unlisted, found)
    return found


def plain(value: FactValue) -> Any:
    """A fact's value for JSON. One that is unknown shows as the word: JSON's null means "none"."""
    if value is UNKNOWN:
        return "unknown"
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
