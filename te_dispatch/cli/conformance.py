# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch conformance``: certify backends, with progress on the way and a matrix, a page and files at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from te_dispatch.cli import conformance_view
from te_dispatch.cli.console import FOUND, CommandError, emit, err, out
from te_dispatch.conformance import certification, checks
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.isolation import WorkerError
from te_dispatch.conformance.oracle import OracleError
from te_dispatch.conformance.outcome import failed
from te_dispatch.conformance.report import junit, markdown, page
from te_dispatch.conformance.report.record import Report
from te_dispatch.conformance.settings import Settings

#: Where files go. Single units have a folder of their own: looking at a failure must not replace the report it is in.
FOLDER, UNIT_FOLDER = "te_dispatch_conformance", "te_dispatch_conformance/unit"


def run(arguments: Mapping[str, Any], *, as_json: bool, quiet: bool) -> int:
    """Certify, show, and write the files.

    Args:
        arguments: the verb's options by name.

    Returns:
        0 if nothing claimed failed, else 1.

    Raises:
        CommandError: an option names what does not exist.
    """
    try:
        if arguments["replay"] is not None:
            return _replay(arguments["replay"], arguments["backend"] or (), as_json)
        report, folder = _certify(arguments, quiet or as_json)
    except (ValueError, OracleError, WorkerError) as error:  # UsageError is a ValueError
        raise CommandError(str(error)) from error
    files = {name: str(folder / f"conformance.{name}") for name in ("html", "json", "md", "xml")}
    report.save(files["json"])
    junit.save(report, files["xml"])
    markdown.save(report, files["md"])
    page.save(report, files["html"])
    if as_json:
        emit(report.as_data() | {"files": files})
    else:
        conformance_view.show(report)
        told = f"page {files['html']}, data {files['json']}, tables {files['md']}, JUnit {files['xml']}"
        out().print(Text(told, style="dim"), soft_wrap=True)
    return 0 if report.ok else FOUND


def _certify(arguments: Mapping[str, Any], quiet: bool) -> tuple[Report, Path]:
    """The report, and the folder that its files go to."""
    settings = _settings(arguments)
    units = _units(arguments)
    folder = Path(arguments["out"] or (FOLDER if units is None else UNIT_FOLDER))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--out: {folder} is no folder and cannot be made one: {error.strerror}") from error
    try:
        with conformance_view.progress(quiet) as told:
            report = certification.certify(
                settings=settings,
                units=units,
                skip_file=arguments["skip_file"],
                expected_failures_file=arguments["expect_file"],
                journal_file=folder / "journal.jsonl",
                resume=arguments["resume"],
                progress=told.unit,
                planning=told.planning,
            )
    except KeyboardInterrupt:
        if not quiet:
            err().print("what ran is kept: the same command with --resume goes on from there")
        raise
    return report, folder


def _units(arguments: Mapping[str, Any]) -> list[Unit] | None:
    """The units that are named, if any. An id says everything about its unit, so nothing else may choose."""
    texts = arguments["unit"]
    if not texts:
        return None
    chosen = {
        "backend": (),
        "op": (),
        "check": (),
        "skip_check": (),
        "level": "smoke",
        "seed": 0,
        "shard": "1/1",
        "product": False,
    }
    given = [
        f"--{name.replace('_', '-')}" for name, default in chosen.items() if (arguments[name] or default) != default
    ]
    if given:
        raise CommandError(f"--unit: names all that runs; leave {' and '.join(given)} away")
    return [Unit.parse(text) for text in dict.fromkeys(texts)]


def _settings(arguments: Mapping[str, Any]) -> Settings:
    part, slash, parts = arguments["shard"].partition("/")
    if not (slash and part.isascii() and part.isdigit() and parts.isascii() and parts.isdigit()):
        raise CommandError(f"--shard: got {arguments['shard']!r}, expected I/N, e.g. 1/4")
    return Settings(
        backends=tuple(arguments["backend"] or ()),
        against=arguments["against"],
        operators=tuple(arguments["op"] or ()),
        level=arguments["level"],
        seed=arguments["seed"],
        shard=(int(part), int(parts)),
        product=arguments["product"],
        checks=_checks(arguments["check"] or (), arguments["skip_check"] or ()),
        device=arguments["device"],
        limit_s=arguments["limit"],
        jobs=arguments["jobs"],
        isolated=not arguments["in_process"],
    )


def _checks(wanted: Sequence[str], skipped: Sequence[str]) -> tuple[str, ...]:
    """Names of the checks to run; none for all."""
    if not skipped:
        return tuple(wanted)
    left = {checks.find(name).name for name in skipped}
    found = tuple(name for name in (wanted or [check.name for check in checks.checks()]) if name not in left)
    if not found:
        raise CommandError(f"--skip-check: leaves no check of {', '.join(wanted)}")
    return found


def _replay(file: str, backends: Sequence[str], as_json: bool) -> int:
    from te_dispatch.conformance import replay

    outcomes = replay.replay(file, tuple(backends))
    if as_json:
        emit({"file": file, "outcomes": [outcome.as_data() for outcome in outcomes]})
    for outcome in outcomes if not as_json else ():
        style = "red" if failed(outcome) else "green"
        out().print(Text(f"{outcome.state}: {outcome.unit} {outcome.message}".rstrip(), style=style))
    return FOUND if any(map(failed, outcomes)) else 0
