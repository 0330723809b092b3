# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where a worker's Python code was when it crashed, or when it did not answer: what `faulthandler` prints, read."""

from __future__ import annotations

import faulthandler
import re
import signal
import subprocess
import time

#: Bytes that are read of what is printed at the end: up to a hundred frames of each thread.
LONGEST = 1 << 18
#: Frames that a message shows, the innermost first.
_FRAMES = 3
#: Seconds that a process which does not answer has for printing where it is.
_PRINT_S = 0.5
#: What a process prints once it is asked, besides at a crash.
_SIGNAL = signal.SIGUSR1
_HEAD = re.compile(r"^(?:Fatal Python error: .*|(?:Current thread|Thread) 0x[0-9a-f]+ .*)$", re.MULTILINE)
_THREAD = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+ .*$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
#: Modules whose functions a thread is in that waits for another.
_WAITING = ("threading.py", "queue.py", "thread.py", "connection.py", "_base.py", "selectors.py")


def printed_at_the_end() -> None:
    """Print the frames of this process's threads to standard error at a crash, and whenever `ask` asks."""
    faulthandler.enable()
    faulthandler.register(_SIGNAL)


def ask(process: subprocess.Popen[bytes]) -> None:
    """Have a process that called `printed_at_the_end` print its frames now, and wait until it has had time to."""
    process.send_signal(_SIGNAL)
    time.sleep(_PRINT_S)


def parted(printed: str) -> tuple[str, str]:
    """What was printed before the frames, and the frames of the thread that matters in words; empty where there are
    none.

    At a crash that is the thread which crashed. Of a process that was asked, it is the first thread that does not wait
    for another one.
    """
    head = _HEAD.search(printed)
    if head is None:
        return printed, ""
    before, dump = printed[: head.start()], printed[head.start() :]
    heads = list(_THREAD.finditer(dump))
    ends = [one.start() for one in heads[1:]] + [len(dump)]
    threads = [
        (one.group(1) == "Current thread", _FRAME.findall(dump[one.end() : end].partition("\n\n")[0]))
        for one, end in zip(heads, ends)
    ]
    crashed = dump.startswith("Fatal")
    told = [frames for current, frames in threads if frames and (current or not crashed)]
    busy = [frames for frames in told if crashed or _module(frames[0][0]) not in _WAITING]
    frames = next(iter(busy or told), [])
    return before, " < ".join(f"{name} ({_module(file)}:{line})" for file, line, name in frames[:_FRAMES])


def _module(file: str) -> str:
    return file.rpartition("/")[2]
