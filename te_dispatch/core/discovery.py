# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Finding backends: entry points of the group ``te_dispatch.backends``, listed and loaded through stevedore.

stevedore's own listing goes through an on-disk cache that keys on coarse file times (a package reinstalled within two
minutes is seen stale) and drops each entry point's distribution; `_FreshExtensionManager` lists afresh instead. A
plugin that fails, in whatever way short of killing the process, is that plugin's failure and nobody else's, and a
backend is registered whole or not at all.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from stevedore.extension import Extension, ExtensionManager

from te_dispatch.core.manifest import Manifest
from te_dispatch.core.manifest_check import check_manifest, operator_problems
from te_dispatch.core.operator import Operator
from te_dispatch.core.snapshot import InstalledBackend, PluginFailure, Snapshot

GROUP = "te_dispatch.backends"

_log = logging.getLogger("te_dispatch")


class PluginLoadError(Exception):
    """What a plugin did instead of loading, as an ordinary exception."""


class _FreshExtensionManager(ExtensionManager):  # type: ignore[type-arg]
    """stevedore's manager without its cache, tolerant of unreadable distributions and of plugins that exit."""

    def __init__(self, namespace: str, on_failure: Callable[[Any, Any, BaseException], None]) -> None:
        self.unreadable: list[PluginFailure] = []
        super().__init__(namespace, on_load_failure_callback=on_failure)

    def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
        found: list[importlib.metadata.EntryPoint] = []
        seen: set[str] = set()
        for distribution in importlib.metadata.distributions():
            try:
                ours = [ep for ep in distribution.entry_points if ep.group == self.namespace]
                if not ours:
                    continue  # before its name is asked for: parsing everybody's metadata is most of a scan's time
                # The first one on the path is the one that imports get; a doubled path is not a duplicate backend.
                canonical = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
                if canonical not in seen:
                    seen.add(canonical)
                    found += ours
            except Exception as error:
                where = getattr(distribution, "_path", "an unreadable place")
                if _mentions_group(distribution):
                    self.unreadable.append(PluginFailure("?", str(where), "?", f"unreadable metadata: {error!r}"))
        return found

    def _load_one_plugin(self, ep: importlib.metadata.EntryPoint, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._load_one_plugin(ep, *args, **kwargs)
        except (AssertionError, SystemExit) as error:
            raise PluginLoadError(f"{type(error).__name__}: {error}") from error


def _mentions_group(distribution: importlib.metadata.Distribution) -> bool:
    try:
        return GROUP in (distribution.read_text("entry_points.txt") or "")
    except Exception:
        return False  # its text cannot be read either, so nothing ties it to us


def discover(operators: Mapping[str, Operator]) -> Snapshot:
    """List, load and check every installed backend. Each failure is logged once as a warning and kept."""
    failures: list[PluginFailure] = []

    def failed(_: Any, entry_point: importlib.metadata.EntryPoint, error: BaseException) -> None:
        failures.append(_failure(entry_point, _describe(error)))

    manager = _FreshExtensionManager(GROUP, failed)
    failures += manager.unreadable
    snapshot = register(manager.extensions, operators)
    failures += snapshot.failures
    for failure in failures:
        _log.warning("%s", failure)
    return Snapshot(snapshot.backends, tuple(failures), unusable=snapshot.unusable)


def register(extensions: list[Extension[Any]], operators: Mapping[str, Operator]) -> Snapshot:
    """Check loaded extensions and make a snapshot of those that pass. Order does not matter."""
    failures: list[PluginFailure] = []
    passed: dict[str, list[InstalledBackend]] = {}
    unusable: dict[str, str] = {}
    for extension in extensions:
        entry_point, manifest = extension.entry_point, cast(object, extension.plugin)
        name, version = _distribution(entry_point)
        try:
            problem = check_manifest(manifest, entry_point.name)
        except Exception as error:  # a field of another type than declared
            problem = f"its manifest cannot be read: {type(error).__name__}: {error}"
        if problem is not None:
            failures.append(_failure(entry_point, problem))
        else:
            assert isinstance(manifest, Manifest)  # checked above
            passed.setdefault(manifest.name, []).append(InstalledBackend(manifest, name, version))
    backends: dict[str, InstalledBackend] = {}
    for backend_name in sorted(passed):
        same = passed[backend_name]
        if len(same) > 1:
            # Neither is taken: which one won would depend on the order of the path.
            both = " and ".join(sorted(f"{b.distribution} {b.version}" for b in same))
            reason = f"the name {backend_name!r} is declared by {both}; uninstall one"
            failures += [PluginFailure(backend_name, b.distribution, b.version, reason) for b in same]
            continue
        backends[backend_name] = same[0]
        unusable |= operator_problems(same[0].manifest, operators)
    return Snapshot(backends, tuple(failures), unusable=unusable)


def _distribution(entry_point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    distribution = entry_point.dist
    if distribution is None:
        return "unknown distribution", "?"
    return distribution.metadata["Name"], distribution.version


def _failure(entry_point: importlib.metadata.EntryPoint, reason: str) -> PluginFailure:
    return PluginFailure(entry_point.name, *_distribution(entry_point), reason)


def _describe(error: BaseException) -> str:
    if isinstance(error, PluginLoadError):
        return f"raised {error} while it was imported"
    return f"cannot be imported: {type(error).__name__}: {error}"
