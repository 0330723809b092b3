# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The verb: check, train all runs, report. What there is when it is interrupted is saved and marked incomplete."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

import te_dispatch
from te_dispatch.cli.console import INTERRUPTED, MISTAKE, emit, err, out
from te_dispatch.cli.demo import report
from te_dispatch.cli.demo.data import Batches, Corpus, standard_library
from te_dispatch.cli.demo.display import Display
from te_dispatch.cli.demo.options import Options, check_folder, read_options
from te_dispatch.cli.demo.train import BF16, Run, Trainer, fastest_threads
from te_dispatch.core.errors import DispatchError
from te_dispatch.core.scopes import MANAGER

JSON_NAME = "te_dispatch_demo.json"
PNG_NAME = "te_dispatch_demo.png"


def run(arguments: Mapping[str, Any], as_json: bool, quiet: bool) -> int:
    """Run the demo.

    Args:
        arguments: the command's, for `read_options`.
        as_json: the document on standard output instead of tables.
        quiet: no progress.

    Returns:
        0; 130 if interrupted; 2 if a run failed. In both cases the document so far is saved.

    Raises:
        CommandError, PolicyError: a mistake in the arguments, before anything runs or is written.
    """
    policy = arguments.get("policy")
    # Entering the scope reads the policy, and asking for the effective one reads the environment.
    with te_dispatch.policy(policy) if policy else contextlib.nullcontext():
        effective = MANAGER.capture().policy
        options = read_options(arguments)
        corpus = standard_library()
        for text in (corpus.train, corpus.validation):
            Batches(text, options.seq, options.batch, torch.device("cpu"))
        check_folder(options.out)
        if options.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(fastest_threads())
        display = Display(options, quiet)
        display.header(corpus, effective)
        runs: list[Run] = []
        try:
            code, message = _train_all(options, corpus, runs, display)
        except Exception as error:
            _save(options, corpus, runs, f"{type(error).__name__}: {error}", display)
            raise
        data = _save(options, corpus, runs, message, display)
    if as_json:
        emit(data)
    elif runs:
        report.show(data, out())
    if message:
        err().print(Text(f"te-dispatch: {message}"))
    return code


def _train_all(options: Options, corpus: Corpus, runs: list[Run], display: Display) -> tuple[int, str | None]:
    """Fill `runs`. Returns the exit code and what went wrong."""
    try:
        for name in (BF16, *options.recipes):
            trainer = Trainer(options, name, corpus)
            runs.append(trainer.run)
            with display.progress(name) as progress:
                trainer.train(progress)
            del trainer  # two models of this size need not fit at once
            if options.device.type == "cuda":
                torch.cuda.empty_cache()
    except KeyboardInterrupt:
        return INTERRUPTED, f"interrupted; what there is so far is in {options.out / JSON_NAME}"
    except torch.OutOfMemoryError:
        return MISTAKE, f"{options.device} is out of memory: choose a smaller --size, --batch or --seq"
    except DispatchError as error:
        return MISTAKE, str(error)
    return 0, None


def _save(options: Options, corpus: Corpus, runs: list[Run], message: str | None, display: Display) -> dict[str, Any]:
    """Write the document, and the picture of a complete one. Returns the document."""
    data = report.document(options, corpus, runs, te_dispatch.freeze().digest)
    if message:
        data |= {"complete": False, "error": message}
    target = options.out / JSON_NAME
    with _replacing(target) as temporary:
        temporary.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    saved = [str(target)]
    if data["complete"]:
        from te_dispatch.cli.demo import plot

        picture = options.out / PNG_NAME
        with _replacing(picture) as temporary:
            plot.draw(data, temporary)
        saved.append(str(picture))
    display.say(f"saved {' and '.join(saved)}")
    return data


@contextlib.contextmanager
def _replacing(target: Path) -> Any:
    """A temporary path beside `target` that takes its place when the block ends well."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}.", suffix=target.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
