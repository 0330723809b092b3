# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Shadow mode: a sample of a running job's calls is made again by another backend and compared.

Where the effective policy has a `shadow` section, each implementation is bound behind a countdown
(`codegen.sampling`): one subtraction and one more Python call. At zero the call is copied, made as ever, made again on
the copies by the other backend, and judged by the rules of the conformance kit. Nothing of it touches the job's tensors
or generators. Where no policy asks for it, nothing is bound differently.

What is compared is an implementation, so the pieces of a composite are, each by itself. Compiled graphs bind
implementations directly and are not sampled.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from te_dispatch.core import codegen
from te_dispatch.core.bind import import_target
from te_dispatch.core.devices import is_capturing, is_compiling
from te_dispatch.core.errors import ShadowMismatch
from te_dispatch.core.hooks import HOOKS
from te_dispatch.core.operator import Operator
from te_dispatch.core.policy import Shadow

if TYPE_CHECKING:
    from te_dispatch.core.manager import OpManager

_log = logging.getLogger("te_dispatch")

#: Further than any process counts.
_NEVER = 2**62

#: Whether this thread is making a sampled call: what that one calls in turn is not sampled.
_within = threading.local()


class NotComparable(Exception):
    """There is nothing that a call could be judged by; the message says why."""


@dataclass
class Comparisons:
    """What became of one implementation's sampled calls in this process.

    Attributes:
        operator, implementation, against: what was compared with which backend.
        sampled: calls that were chosen, each of which is one of the following three.
        compared: judged, and as it must be.
        mismatched: judged, and not.
        not_comparable: why -> how many.
        files: where offending inputs were written.
    """

    operator: str
    implementation: str
    against: str
    sampled: int = 0
    compared: int = 0
    mismatched: int = 0
    not_comparable: dict[str, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)


class Shadows:
    """What one manager's samplers have in common: counts, files, and what was said already."""

    def __init__(self, manager: OpManager) -> None:
        self._manager = manager
        self._comparisons: dict[tuple[str, str, str], Comparisons] = {}
        self._said: set[str] = set()
        self._written = 0
        self._random: Any = None

    def report(self) -> list[Comparisons]:
        with self._manager.lock:
            return copy.deepcopy(list(self._comparisons.values()))

    def comparisons(self, operator: str, implementation: str, against: str) -> Comparisons:
        """The counts to add to, under the manager's lock."""
        key = (operator, implementation, against)
        return self._comparisons.setdefault(key, Comparisons(*key))

    def say_once(self, message: str) -> None:
        with self._manager.lock:
            new = message not in self._said
            self._said.add(message)
        if new:
            _log.warning("%s", message)

    def countdown(self, fraction: float) -> int:
        """Calls until the next sample: geometric, so that each call is sampled with the same probability.

        With u uniform in (0, 1], 1 + floor(log(u) / log(1 - p)) is n with probability (1 - p)^(n - 1) p.
        """
        if fraction >= 1.0:
            return 1
        if self._random is None:
            import random

            self._random = random.Random()  # of its own: the job's generators must stay as they are
        return 1 + min(_NEVER, int(math.log(1.0 - self._random.random()) / math.log1p(-fraction)))

    def take_file_number(self, limit: int) -> int | None:
        """The number of the next file, None where there are enough."""
        with self._manager.lock:
            if self._written >= limit:
                return None
            self._written += 1
            return self._written

    def sampler(
        self, operator: Operator, candidate: str, bound: Callable[..., Any], shadow: Shadow, policy: str
    ) -> Callable[..., Any]:
        """`bound`, some of whose calls are compared; `bound` itself where its calls are not to be.

        Args:
            candidate: its id.
            policy: digest of the policy in force, for the file.
        """
        if not shadow.speaks_of(operator.name, operator.family) or candidate.partition(".")[0] == shadow.against:
            return bound
        if shadow.against not in self._manager.snapshot.backends:
            self.say_once(f"shadow: backend {shadow.against!r} is not installed here, so no call is compared with it")
            return bound
        sampler = Sampler(self._manager, operator, candidate, bound, shadow, policy)
        return codegen.sampling(operator, self._manager.namespace, bound, sampler.countdown, sampler.call)


class Sampler:
    """The sampled calls of one implementation under one policy."""

    def __init__(
        self,
        manager: OpManager,
        operator: Operator,
        candidate: str,
        bound: Callable[..., Any],
        shadow: Shadow,
        policy: str,
    ) -> None:
        self.manager = manager
        self.operator = operator
        self.candidate = candidate
        self.bound = bound
        self.shadow = shadow
        self.policy = policy
        self._possible = True

    def countdown(self) -> int:
        return self.manager.shadows.countdown(self.shadow.fraction) if self._possible else _NEVER

    def call(self, *args: Any) -> Any:
        """Make a call and compare it.

        Raises:
            ShadowMismatch: it differs, and the policy says ``raise``.
        """
        if getattr(_within, "sampled", False) or self._imitated(args):
            return self.bound(*args)
        if is_capturing():
            self._count(not_comparable="made during CUDA graph capture")
            return self.bound(*args)
        comparison = self._comparison()
        if comparison is None:
            return self.bound(*args)
        _within.sampled = True
        try:
            return self._compared(comparison, args)
        finally:
            _within.sampled = False

    def _imitated(self, args: tuple[Any, ...]) -> bool:
        """Whether nothing is computed: a call with meta or fake tensors, or one that is being traced."""
        # What the device is does not matter here: an operand on it is among the arguments.
        devices = [getattr(arg, "device", None) for arg in args]
        return is_compiling() or any(self.manager.imitated(device, args) for device in devices)

    def _comparison(self) -> Any:
        """What copies and judges a call; None, said once, where the conformance kit's requirements are missing."""
        try:
            return import_target(HOOKS["comparison"])
        except ImportError as error:
            self._possible = False
            self.manager.shadows.say_once(
                f"shadow: no call is compared, because the conformance kit cannot be imported ({error}); "
                "pip install 'te-dispatch[conformance]'"
            )
            return None

    def _compared(self, make: Any, args: tuple[Any, ...]) -> Any:
        try:
            comparison = make(self.manager, self.operator, self.candidate, self.shadow.against, args)
        except Exception as error:
            result = self.bound(*args)
            self._count(not_comparable=_reason(error))
            return result
        result = self.bound(*args)
        try:
            finding = comparison.finding(result, args)
        except Exception as error:  # of the comparison, which must not cost the job anything
            self._count(not_comparable=_reason(error))
            return result
        self._count(mismatched=finding is not None)
        if finding is not None:
            self._tell(comparison, finding)
        return result

    def _count(self, mismatched: bool = False, not_comparable: str | None = None) -> None:
        with self.manager.lock:
            found = self.manager.shadows.comparisons(self.operator.name, self.candidate, self.shadow.against)
            found.sampled += 1
            if not_comparable is not None:
                found.not_comparable[not_comparable] = found.not_comparable.get(not_comparable, 0) + 1
            elif mismatched:
                found.mismatched += 1
            else:
                found.compared += 1

    def _tell(self, comparison: Any, finding: str) -> None:
        file, where = self._write(comparison, finding)
        message = (
            f"shadow: {self.operator.name} on {self.candidate} differs from {self.shadow.against}: {finding}; {where}"
        )
        if self.shadow.on_mismatch == "raise":
            raise ShadowMismatch(message, self.operator.name, self.candidate, self.shadow.against, finding, file)
        with self.manager.lock:
            count = self.manager.shadows.comparisons(self.operator.name, self.candidate, self.shadow.against).mismatched
        if count == 1:
            _log.warning("%s (further ones are only counted: te_dispatch.shadow_report())", message)

    def _write(self, comparison: Any, finding: str) -> tuple[str | None, str]:
        """The file with the call's arguments, and a phrase about it."""
        number = self.manager.shadows.take_file_number(self.shadow.limit)
        if number is None:
            return None, f"its inputs are not written: the limit of {self.shadow.limit} files is reached"
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{self.operator.name}-{self.candidate}-{stamp}-{os.getpid()}-{number}.pt"
        try:
            path = str(_folder(self.shadow.directory) / name)
            comparison.save(path, finding, self.policy)
        except Exception as error:  # a full disk, say; the mismatch is told all the same
            return None, f"its inputs could not be written: {_reason(error)}"
        with self.manager.lock:
            self.manager.shadows.comparisons(self.operator.name, self.candidate, self.shadow.against).files.append(path)
        return path, f"its inputs are in {path}; te-dispatch conformance --replay {path} makes the call again"


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, NotComparable) else f"{type(error).__name__}: {error}"


def _folder(directory: str | None) -> Path:
    """The folder for files, which is made if need be.

    Raises:
        OSError: it cannot be made, or the default one belongs to someone else.
    """
    if directory is not None:
        path = Path(directory).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        return path
    import tempfile

    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    path = Path(tempfile.gettempdir()) / f"te_dispatch_shadow_{user}"
    path.mkdir(mode=0o700, exist_ok=True)
    # Not what a link leads to: anyone may put one here that leads to a folder of this user.
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or (hasattr(os, "getuid") and found.st_uid != user):
        raise PermissionError(f"{path} is a link or belongs to another user; set shadow.directory")
    return path
