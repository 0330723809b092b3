# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Finding backends: entry points of the group ``te_dispatch.backends``, listed and loaded through stevedore.

stevedore's own listing goes through an on-disk cache that keys on coarse file times (a package reinstalled within two
minutes is seen stale) and drops each entry point's distribution; `_FreshExtensionManager` lists afresh instead. A
plugin that fails, in whatever way short of killing the process, is that plugin's failure and nobody else's, and a
backend is registered whole or not at all. A plugin that kills the process, or hangs, is found by
`te_dispatch.core.trial`, which the command and the conformance kit ask first.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

from stevedore.extension import Extension, ExtensionManager

from te_dispatch.core.failures import on_request, phrase, place, traceback_text
from te_dispatch.core.importing import Tampering, importing_manifest
from te_dispatch.core.manifest import Manifest
from te_dispatch.core.manifest_check import check_manifest, operator_problems
from te_dispatch.core.operator import Operator
from te_dispatch.core.snapshot import InstalledBackend, PluginFailure, Snapshot, grouped

GROUP = "te_dispatch.backends"

#: Seconds from which the import of one manifest is told of: every program that uses te_dispatch waits for it.
SLOW = 5.0

_log = logging.getLogger("te_dispatch")


class PluginLoadError(Exception):
    """What a plugin did instead of loading, as an ordinary exception."""


class _FreshExtensionManager(ExtensionManager):  # type: ignore[type-arg]
    """stevedore's manager without its cache, tolerant of unreadable distributions and of plugins that exit.

    Args:
        vetoes: entry points that are not to be imported, with the reason.
    """

    def __init__(
        self,
        namespace: str,
        on_failure: Callable[[Any, Any, BaseException], None],
        vetoes: Mapping[importlib.metadata.EntryPoint, str],
    ) -> None:
        self.unreadable: list[PluginFailure] = []
        self._vetoes = vetoes
        super().__init__(namespace, on_load_failure_callback=on_failure)

    def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
        found, self.unreadable = list_entry_points(self.namespace)
        return found

    def _load_one_plugin(self, ep: importlib.metadata.EntryPoint, *args: Any, **kwargs: Any) -> Any:
        if ep in self._vetoes:
            raise PluginLoadError(self._vetoes[ep])
        started = time.perf_counter()
        try:
            with importing_manifest(ep.name):
                return super()._load_one_plugin(ep, *args, **kwargs)
        except Tampering as error:
            raise PluginLoadError(str(error)) from error
        except AssertionError as error:  # which stevedore would let through
            raise PluginLoadError(f"raised {phrase(error)} while it was imported") from error
        except KeyboardInterrupt:
            _log.warning("interrupted while the manifest of backend %r was imported", ep.name)
            raise
        except Exception:
            raise
        except BaseException as error:  # SystemExit, a test framework's way to skip
            raise PluginLoadError(f"raised {phrase(error)} while it was imported") from error
        finally:
            took = time.perf_counter() - started
            if took > SLOW:
                _log.warning(
                    "the manifest of backend %r took %.1f s to import, for which every program that uses te_dispatch "
                    "waits; libraries belong into the modules of its probes and kernels",
                    ep.name,
                    took,
                )


def list_entry_points(group: str = GROUP) -> tuple[list[importlib.metadata.EntryPoint], list[PluginFailure]]:
    """The installed entry points of a group, each with its distribution, and distributions that cannot be read."""
    found: list[importlib.metadata.EntryPoint] = []
    unreadable: list[PluginFailure] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            ours = [ep for ep in distribution.entry_points if ep.group == group]
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
                unreadable.append(PluginFailure("?", str(where), "?", f"unreadable metadata: {error!r}"))
    return found, unreadable


def misspelt_groups(group: str = GROUP) -> list[str]:
    """A line for each installed entry point whose group reads almost like `group`, so that nothing looks there."""
    told = []
    for distribution in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # metadata that cannot be read is told of elsewhere
            told += [
                f"{distribution.metadata['Name']} {distribution.version} declares {ep.name!r} in the entry point group "
                f"{ep.group!r}, which nothing reads; backends are declared in {group!r}"
                for ep in distribution.entry_points
                if ep.group != group and _alike(ep.group, group)
            ]
    return told


def _alike(word: str, other: str) -> bool:
    import difflib  # only doctor asks

    return difflib.SequenceMatcher(None, word.lower(), other).ratio() > 0.85


def _mentions_group(distribution: importlib.metadata.Distribution) -> bool:
    try:
        return GROUP in (distribution.read_text("entry_points.txt") or "")
    except Exception:
        return False  # its text cannot be read either, so nothing ties it to us


def discover(operators: Mapping[str, Operator]) -> Snapshot:
    """List, load and check every installed backend. What is wrong with them is logged once, as warnings, and kept."""
    snapshot = find(operators)
    report(snapshot)
    return snapshot


def report(snapshot: Snapshot) -> None:
    """Warn of every plugin that failed, and of implementations that cannot be used: calls go to others."""
    for failure in snapshot.failures:
        _log.warning("%s%s", failure, on_request(failure.traceback))
    for backend in snapshot.backends.values():
        unusable = [(id_, why) for id_, why in snapshot.unusable.items() if id_.partition(".")[0] == backend.name]
        for line in grouped(unusable):
            _log.warning("backend %r of %s %s: %s", backend.name, backend.distribution, backend.version, line)


def find(
    operators: Mapping[str, Operator], vetoes: Mapping[importlib.metadata.EntryPoint, str] | None = None
) -> Snapshot:
    """`discover` without the warnings.

    Args:
        operators: that implementations may be of.
        vetoes: entry points that are not to be imported, with the reason, which becomes their failure.
    """
    failures: list[PluginFailure] = []

    def failed(_: Any, entry_point: importlib.metadata.EntryPoint, error: BaseException) -> None:
        failures.append(_failure(entry_point, *_describe(error)))

    manager = _FreshExtensionManager(GROUP, failed, vetoes or {})
    failures += manager.unreadable
    snapshot = register(manager.extensions, operators)
    return Snapshot(snapshot.backends, (*failures, *snapshot.failures), unusable=snapshot.unusable)


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


def _failure(entry_point: importlib.metadata.EntryPoint, reason: str, traceback: str = "") -> PluginFailure:
    return PluginFailure(entry_point.name, *_distribution(entry_point), reason, traceback)


def _describe(error: BaseException) -> tuple[str, str]:
    """A failure to load, in a phrase, and its traceback."""
    if isinstance(error, PluginLoadError):
        cause = error.__cause__
        return (str(error), "") if cause is None else (f"{error}{place(cause)}", traceback_text(cause))
    return f"cannot be imported: {phrase(error)}{place(error)}", traceback_text(error)
