# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The policy layers of a process: the environment's, the one that was set, the shipped default."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_dispatch.core.bounded import BoundedDict
from te_dispatch.core.policy import Policy
from te_dispatch.core.startup import no_collection

if TYPE_CHECKING:
    from te_dispatch.core.environment import Debug
    from te_dispatch.core.policy.file import LoadedPolicy
    from te_dispatch.core.policy.known import Known

_log = logging.getLogger("te_dispatch")

#: How many policies from files are kept.
_LOADED = 64


@dataclass(frozen=True)
class Contents:
    """What the environment and the package say.

    Attributes:
        environment: its layers, strongest first.
        debug: what NVTE_DEBUG asks for.
        default: the shipped default.
    """

    environment: tuple[Policy, ...]
    debug: Debug
    default: Policy

    def digest(self) -> str:
        """Equal where calls resolve alike and the same is said of them."""
        layers = (*self.environment, self.default)
        return " ".join([*(f"{one.name}:{one.digest()}" for one in layers), repr(self.debug)])


class Sources:
    """The environment and the shipped default, read once, when they are first needed.

    Args:
        environ: environment variables; None for the process's.
        known: gives the words that policies may use on this machine.
    """

    def __init__(self, environ: Mapping[str, str] | None, known: Callable[[], Known]) -> None:
        self._environ = environ
        self._known = known
        self._contents: Contents | None = None
        #: `watched.values()` when the environment was read.
        self._watched: tuple[Any, ...] | None = None
        #: Variables without effect that were warned of.
        self._warned: set[str] = set()
        #: name or path -> what was read: a scope in a loop names the same file each time.
        self._loaded: BoundedDict[str, LoadedPolicy] = BoundedDict(_LOADED)

    def read(self) -> Contents:
        """Not thread-safe: the manager's lock guards it.

        Raises:
            PolicyError: a variable or a file cannot be used; the next call reads again.
        """
        from te_dispatch.core.environment import debug_setting, environment_layers
        from te_dispatch.core.nvte_variables import ignored
        from te_dispatch.core.watched import values

        if self._contents is None:
            environ = os.environ if self._environ is None else self._environ
            watched = values() if self._environ is None else None  # first: what changes meanwhile is read again
            with no_collection():
                layers = tuple(environment_layers(environ, self._known()))
                contents = Contents(layers, debug_setting(environ), self.load("default"))
            self._contents, self._watched = contents, watched
            for name, what in ignored(environ).items():
                if name not in self._warned:
                    self._warned.add(name)
                    _log.warning("%s", what)
        return self._contents

    @property
    def contents(self) -> Contents | None:
        """None until they have been read."""
        return self._contents

    @property
    def watched(self) -> tuple[Any, ...] | None:
        """The variables of `te_dispatch.core.watched` as they were read; None where they do not count."""
        return self._watched

    def again(self) -> Sources:
        """The same, not read yet."""
        again = Sources(self._environ, self._known)
        again._warned = self._warned
        return again

    def load(self, policy: Policy | str | os.PathLike[str]) -> Policy:
        """A layer from a `Policy`, a shipped name or a path.

        Raises:
            PolicyError: the file cannot be used; TypeError: it is none of these.
        """
        if isinstance(policy, Policy):
            return policy
        if not isinstance(policy, (str, os.PathLike)):
            raise TypeError(f"policy: got {type(policy).__name__}, expected a Policy, a shipped name or a path")
        from te_dispatch.core.policy.file import load_files

        name = os.fspath(policy)
        found = self._loaded.get(name)
        if found is None or not found.current():
            found = load_files(policy, self._known())
            self._loaded[name] = found
        return found.policy


@dataclass(frozen=True)
class ProcessLayers:
    """The layers below any scope. A change makes a new value, so that what was captured before keeps its own.

    Attributes:
        sources: environment and default.
        chosen: what `set_policy` put in force, None for nothing.
        generation: differs where the registry or what the sources say differs.
    """

    sources: Sources
    chosen: Policy | None = None
    generation: int = 0

    def all(self) -> list[Policy]:
        """Strongest first. What has not been read is read now."""
        contents = self.sources.read()
        chosen = [self.chosen] if self.chosen is not None else []
        return [*contents.environment, *chosen, contents.default]

    def token(self, layers: tuple[Policy, ...]) -> str:
        """What tells bindings apart: all that their resolutions depend on, without reading the environment yet."""
        chosen = layers if self.chosen is None else (*layers, self.chosen)
        return " ".join([f"generation {self.generation}", *(f"{one.name}:{one.digest()}" for one in chosen)])
