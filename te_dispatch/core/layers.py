# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The policy layers of a process: the environment's, the one that was set, the shipped default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from te_dispatch.core.policy import Policy

if TYPE_CHECKING:
    from te_dispatch.core.environment import Debug
    from te_dispatch.core.policy.known import Known


class ProcessLayers:
    """Holds and reads them. Not thread-safe: its manager's lock guards it.

    Args:
        environ: environment variables; None for the process's.
        known: gives the words that policies may use on this machine.

    Attributes:
        chosen: what `set_policy` put in force, None for nothing.
        debug: what NVTE_DEBUG asks for; None until the environment is read.
    """

    def __init__(self, environ: Mapping[str, str] | None, known: Callable[[], Known]) -> None:
        self.chosen: Policy | None = None
        self.debug: Debug | None = None
        self._environ = environ
        self._known = known
        self._environment: tuple[Policy, ...] | None = None
        self._default: Policy | None = None

    @property
    def loaded(self) -> bool:
        """Whether anything has been read yet, and so a policy been in force."""
        return self._default is not None

    def all(self) -> list[Policy]:
        """Strongest first. What has not been read is read now."""
        from te_dispatch.core.environment import debug_setting, environment_layers

        if self._environment is None:
            environ = os.environ if self._environ is None else self._environ
            self._environment = tuple(environment_layers(environ, self._known()))
            self.debug = debug_setting(environ)
        if self._default is None:
            self._default = self.load("default")
        chosen = [self.chosen] if self.chosen is not None else []
        return [*self._environment, *chosen, self._default]

    def load(self, policy: Policy | str | os.PathLike[str]) -> Policy:
        """A layer from a `Policy`, a shipped name or a path.

        Raises:
            PolicyError: the file cannot be used; TypeError: it is none of these.
        """
        if isinstance(policy, Policy):
            return policy
        if not isinstance(policy, (str, os.PathLike)):
            raise TypeError(f"policy: got {type(policy).__name__}, expected a Policy, a shipped name or a path")
        from te_dispatch.core.policy.file import load_policy

        return load_policy(policy, self._known())

    def forget_environment(self) -> None:
        """Read the environment again when it is next needed."""
        self._environment = None

    def forget_words(self) -> None:
        """Read all files again when they are next needed: their words are checked against what is known."""
        self._environment = self._default = None
