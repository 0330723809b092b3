#!/usr/bin/env python3
# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Run Transformer Engine's own PyTorch tests on te_dispatch, and say what passes and why the rest does not.

python tools/transformer_engine_tests FOLDER [FILE ...] [OPTION ...] [-- OPTION OF PYTEST ...]

FOLDER is tests/pytorch of a copy of Transformer Engine; without files, every test_*.py in it is run, each in a process
of its own. What stands behind ``--`` goes to pytest, such as ``-- -k "not 126m" --timeout 120``. The tests import
transformer_engine, which is te_dispatch there (`te_dispatch.as_transformer_engine`). Names that are not here can be
imported and raise where a test uses them: that test "needs" the name.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> int:
    options, to_pytest = _options(sys.argv[1:])
    if options.child is not None:
        return _run(options, to_pytest)
    files = _files(options)
    report: dict[str, Any] = {
        "of": options.of,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": _machine(options.cpu),
        "arguments": sys.argv[1:],
        "files": {},
    }
    import table

    with tempfile.TemporaryDirectory() as folder:
        for index, file in enumerate(files):
            outcomes = Path(folder, f"{index}.jsonl")
            mine = [sys.executable, str(Path(__file__).resolve().parent), str(options.folder.resolve()), file]
            mine += ["--child", str(outcomes), *(["--cpu"] if options.cpu else [])]
            mine += ["--cases", str(options.cases)] if options.cases else []
            done = subprocess.run([*mine, "--", *to_pytest], cwd=folder)  # what the tests write goes there
            report["files"][file] = table.read(outcomes, done.returncode)
    text = table.markdown(report)
    for path, content in ((options.markdown, text), (options.json, json.dumps(report, indent=1) + "\n")):
        if path is not None:
            path.write_text(content)
    print(text, end="")
    failed = sum(row["failed"] for functions in report["files"].values() for row in functions.values())
    return 1 if failed else 0


def _options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    to_pytest: list[str] = []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, to_pytest = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="transformer_engine_tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="tests/pytorch of a copy of Transformer Engine")
    parser.add_argument("files", nargs="*", help="files of tests, relative to FOLDER")
    parser.add_argument("--cpu", action="store_true", help='have the device "cuda" mean the CPU')
    parser.add_argument("--cases", type=_positive, help="run at most so many cases of each function, always the same")
    parser.add_argument("--of", default="", metavar="TEXT", help="whose tests these are, for the table's first line")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    parser.add_argument("--json", type=Path, help="write the data here, with all reasons")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(arguments), to_pytest


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def _files(options: argparse.Namespace) -> list[str]:
    folder = options.folder
    if not folder.is_dir():
        sys.exit(f"{folder} is not a folder")
    for path in filter(None, (options.markdown, options.json)):
        if not path.parent.is_dir():
            sys.exit(f"{path.parent} is not a folder")
    missing = [file for file in options.files if not (folder / file).is_file()]
    if missing:
        sys.exit(f"not in {folder}: {', '.join(missing)}")
    files = options.files or sorted(path.name for path in folder.glob("test_*.py"))
    return files or sys.exit(f"no test_*.py in {folder}")


def _machine(cpu: bool) -> str:
    import torch

    if cpu:
        device = f'{platform.machine()} CPU, where "cuda" means "cpu"'
    elif torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"{platform.machine()} CPU"
    return f"{device}, PyTorch {torch.__version__}, Python {platform.python_version()}"


def _run(options: argparse.Namespace, to_pytest: list[str]) -> int:
    """Run one file in this process."""
    import placeholders

    placeholders.install()
    if options.cpu:
        import cuda_is_cpu

        cuda_is_cpu.install()
    import pytest
    from outcomes import Outcomes

    folder = options.folder
    sys.path.insert(0, str(folder))  # the tests import their helpers by name
    own = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:te_dispatch_conformance"]
    own += ["-c", os.devnull, "--rootdir", str(folder), "--no-header", "-rN", "--tb=no"]
    return pytest.main(
        [*own, *to_pytest, str(folder / options.files[0])], plugins=[Outcomes(options.child, options.cases)]
    )


if __name__ == "__main__":
    sys.exit(main())
