# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Units under compute-sanitizer: what its logs say, and that trouble with one unit is not taken for another's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"

RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at void ted::norm::sums<float, (int)8>(float *, long)+0x2e0
=========     and Write access at void ted::norm::sums<float, (int)8>(float *, long)+0x3c40 [24 hazards]
=========
========= Error: Race reported between Read access at void ted::norm::sums<float, (int)8>(float *, long)+0x310
=========     and Write access at void ted::norm::sums<float, (int)8>(float *, long)+0x3c40 [4 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (28 errors, 0 warnings)
"""
OF_CUDNN = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at cudnn_generated_fort_native_sdpa_sm90_knob_7_kernel0_0+0x2e0
=========     and Write access at cudnn_generated_fort_native_sdpa_sm90_knob_7_kernel0_0+0x3c40 [24 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (24 errors, 0 warnings)
"""
INTERNAL = """\
========= COMPUTE-SANITIZER
========= Internal Sanitizer Error: Detected a failure to track a kernel launch. Future records might be incomplete
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
INVALID = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at void ted::move<float>(float *)+0x560
=========     by thread (3,0,0) in block (0,0,0)
=========     Access at 0x7f4e0a000200 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f4e0a000000 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cudaLaunchKernel [0x44beb] in _native.so
=========
========= Program hit cudaErrorStreamCaptureUnsupported (error 900) due to "operation not permitted when stream is \
capturing" on CUDA API call to cudaMalloc.
=========     Saved host backtrace up to driver entry point at error
=========
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""

#: Plays compute-sanitizer and the kit: what becomes of a unit is its axis `is`.
PLAYED = """\
#!{python}
import json, os, sys, time
given = sys.argv[1:]
value = lambda name: given[given.index(name) + 1]
if given == ["--version"]:
    sys.exit(print("By Nobody\\nVersion 1.2"))
if "-c" in given:
    open(value("--log-file"), "w").write("========= Invalid write\\n=========     at _ZN3ted_planted+0x1\\n")
    sys.exit()
units = [given[i + 1] for i, word in enumerate(given) if word == "--unit"]
tried = "blocking" if "--force-blocking-launches" in given else "alone" if len(units) == 1 else "company"
with open({record!r}, "a") as record:
    record.write(json.dumps([tried, os.environ.get("CUDA_VISIBLE_DEVICES"), units]) + "\\n")
log = open(value("--log-file"), "w", buffering=1)
journal = open(value("--out") + "/journal.jsonl", "w", buffering=1)
journal.write("{{}}\\n")
for unit in units:
    kind = unit.partition("is=")[2].rstrip("]")
    state = "passed"
    if kind == "crash":
        log.write("========= Internal Sanitizer Error: The Sanitizer failed to handle a hardware exception.\\n")
        print("no memory left", flush=True)
        os.abort()
    if kind == "hang":
        time.sleep(60)
    if kind == "hazard" or kind == "company" == tried:
        log.write("========= Error: Race reported between Read access at ted::sums+0x10\\n")
        log.write("=========     and Write access at ted::sums+0x20 [2 hazards]\\n")
    if kind == "blocking" and tried != "blocking":
        log.write("========= Internal Sanitizer Error: Detected a failure to track a kernel launch.\\n")
    if kind == "fails":
        state = "failed"
    journal.write(json.dumps({{"unit": unit, "state": state, "message": "off by one" * (state == "failed")}}) + "\\n")
log.write("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\\n")
"""


def unit(kind: str, number: int = 0) -> str:
    return f"cuda.pad_rows/values/pad_rows.plain[number={number},is={kind}]"


@pytest.fixture(scope="module")
def sanitize(script: Callable[[str], ModuleType]) -> Any:
    sys.path.insert(0, str(TOOLS))
    try:
        return script("tools/sanitize.py")
    finally:
        sys.path.remove(str(TOOLS))


@pytest.fixture
def played(sanitize: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(program, record): the played compute-sanitizer, and the file in which it says how it was called."""
    monkeypatch.setattr(sanitize.sanitizer, "START_S", 20.0)
    program, record = tmp_path / "compute-sanitizer", tmp_path / "calls"
    program.write_text(PLAYED.format(python=sys.executable, record=str(record)))
    program.chmod(0o755)
    return program, record


def judged(sanitize: Any, played: Any, folder: Path, kinds: list[str], seconds: float = 60.0) -> dict[str, Any]:
    """Kind -> verdict, of one batch."""
    tool = sanitize.Tool("racecheck", str(played[0]), limit_s=1.0)
    deadline = sanitize.Deadline(time.monotonic() + seconds)
    found: dict[str, Any] = {}

    def process(batch: Any, slot: int, number: int) -> Any:
        return sanitize.sanitizer.run(tool, batch, folder / f"{slot}-{number}", slot, None, deadline)

    sweep = sanitize.Sweep(process, 2, deadline, lambda verdict: found.update({verdict.unit: verdict}))
    units = [unit(kind, number) for number, kind in enumerate(kinds)]
    sweep.judge([sanitize.Batch(tuple(units))])
    assert set(found) == set(units)
    return {kind: found[name] for kind, name in zip(kinds, units)}


def calls(played: Any) -> list[Any]:
    return [json.loads(line) for line in played[1].read_text().splitlines()]


def test_a_log_is_read(sanitize: Any) -> None:
    read = sanitize.Log.read
    race = read(RACE)
    sums = "void ted::norm::sums<float, (int)8>(float *, long)"
    assert race.hazards == [f"Error: Race reported between Read access at {sums} and Write access at {sums}"]
    assert race.ended and not race.troubles
    assert read(OF_CUDNN).hazards[0].startswith("library: Error: Race reported")
    assert read(INVALID).hazards == ["Invalid __global__ write of size 4 bytes at void ted::move<float>(float *)"]
    for hazard in (
        "Error: Potential WAW hazard detected at __shared__ 0x0 in block (0,0,0) :",
        "Potential invalid __shared__ read of size 4 bytes",
        "Malloc/Free error encountered : Double free",
    ):
        assert read(f"========= {hazard}\n=========     at ted::sums(int *)+0x90\n").hazards == [
            f"{hazard} at ted::sums(int *)"
        ]
    assert not read(INVALID).troubles  # what a call of CUDA's returned is the unit's business


def test_an_error_of_the_tool_is_no_hazard_and_not_clean(sanitize: Any) -> None:
    log = sanitize.Log.read(INTERNAL)
    assert not log.hazards and log.ended
    assert log.troubles == [
        "Internal Sanitizer Error: Detected a failure to track a kernel launch. Future records might be incomplete"
    ]
    assert sanitize.Log.read("========= What nobody has seen before\n").troubles == ["What nobody has seen before"]
    assert not sanitize.Log.read("========= COMPUTE-SANITIZER\n").ended


def test_the_filter_names_all_kernels_of_ours_and_none_of_cudnn(sanitize: Any, resources: Any, build: Path) -> None:
    reports = resources._reports(build).values()
    kernels = {name for path in reports for name, _ in resources.parse(path.read_text())}
    assert kernels
    others = {name for name in kernels if not name.startswith(sanitize.sanitizer.NAMESPACE)}
    assert not others, "racecheck would pass these over: put them into namespace ted"
    assert sanitize.sanitizer.NAMESPACE not in OF_CUDNN  # as plain "ted" is: "generated"


def test_racecheck_looks_at_ours_memcheck_at_all(sanitize: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    racecheck, memcheck = (sanitize.Tool(name) for name in ("racecheck", "memcheck"))
    assert "kernel_substring=_ZN3ted" in racecheck.command(tmp_path, 0, False)
    assert not [word for word in memcheck.command(tmp_path, 0, False) if "kernel" in word]
    alone = "PYTORCH_NO_CUDA_MEMORY_CACHING"
    assert alone in memcheck.environment(captures=False, gpu="1")
    assert alone not in memcheck.environment(captures=True, gpu="1")
    assert alone not in racecheck.environment(captures=False, gpu="1")
    assert memcheck.environment(captures=False, gpu="1")["CUDA_VISIBLE_DEVICES"] == "1"


def test_trouble_of_one_unit_does_not_hide_the_others(sanitize: Any, played: Any, tmp_path: Path) -> None:
    found = judged(sanitize, played, tmp_path, ["well", "crash", "hazard", "fails", "blocking"])
    assert {kind: verdict.state for kind, verdict in found.items()} == {
        "well": "clean",
        "crash": "tool",
        "hazard": "hazard",
        "fails": "tool",
        "blocking": "clean",
    }
    assert "hardware exception" in found["crash"].message and "no memory left" in found["crash"].message
    assert found["hazard"].found == [
        "Error: Race reported between Read access at ted::sums and Write access at ted::sums"
    ]
    assert "failed only under the tool: off by one" in found["fails"].message
    assert found["well"].how == "alone" and found["blocking"].how == "alone, launches blocking"


def test_units_that_hang_are_stopped(sanitize: Any, played: Any, tmp_path: Path) -> None:
    found = judged(sanitize, played, tmp_path, ["well", "hang"])
    assert found["well"].state == "clean"
    assert found["hang"].state == "unfinished" and "no unit ended for 1 s" in found["hang"].message


def test_what_ends_cleanly_runs_once(sanitize: Any, played: Any, tmp_path: Path) -> None:
    found = judged(sanitize, played, tmp_path, ["well", "fine"])
    assert {verdict.how for verdict in found.values()} == {"with 1 others"}
    assert len(calls(played)) == 1


def test_a_hazard_that_shows_in_company_alone_is_not_lost(sanitize: Any, played: Any, tmp_path: Path) -> None:
    found = judged(sanitize, played, tmp_path, ["well", "company"])
    assert {verdict.state for verdict in found.values()} == {"hazard"}
    assert {verdict.message for verdict in found.values()} == {"seen in company, but not alone"}


def test_when_the_time_is_up_nothing_is_called_clean(sanitize: Any, played: Any, tmp_path: Path) -> None:
    found = judged(sanitize, played, tmp_path, ["well", "hang"], seconds=0.0)
    assert {verdict.state for verdict in found.values()} == {"unfinished"}
    assert not played[1].exists()


def test_an_error_of_a_process_ends_the_run(sanitize: Any) -> None:
    def process(batch: Any, slot: int, number: int) -> Any:
        raise OSError("no processes left")

    sweep = sanitize.Sweep(process, 2, sanitize.Deadline(time.monotonic() + 60), print)
    with pytest.raises(OSError, match="no processes left"):
        sweep.judge([sanitize.Batch((unit("well", number),)) for number in range(3)])


def test_a_run_that_is_interrupted_leaves_no_process(sanitize: Any, played: Any, tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(TOOLS)!r})
import sanitize
from te_dispatch.conformance import Outcome
sanitize.claimed = lambda *_: [Outcome({unit("hang")!r}, "passed")]
sanitize._gpus = lambda: []
sys.exit(sanitize.main())
"""
    given = ["--program", str(played[0]), "--out", str(tmp_path / "out"), "--jobs", "1"]
    with subprocess.Popen([sys.executable, "-c", code, *given], stderr=subprocess.PIPE, text=True) as process:
        journals: list[Path] = []
        while not journals and process.poll() is None:
            journals = list((tmp_path / "out").glob("logs-*/*/journal.jsonl"))
            time.sleep(0.05)
        process.terminate()
        process.communicate(timeout=30)
    assert journals
    hanging = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(played[0]).encode() in _read(path)]
    assert not hanging
    assert json.loads((tmp_path / "out" / "verdicts.jsonl").read_text().splitlines()[1])["state"] == "unfinished"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended meanwhile
        return b""


def test_batches_are_of_one_operator_and_one_allocator(sanitize: Any) -> None:
    from te_dispatch.conformance import Outcome

    names = [f"cuda.gemm/values/gemm.plain[n={i}]" for i in range(5)]
    names += ["cuda.gemm/capture/gemm.plain[n=0]", "cuda.pad_rows/values/pad_rows.plain[n=0]"]
    made = sanitize.batches([Outcome(name, "passed") for name in names], 3, ["pad*"])
    assert [len(batch.units) for batch in made] == [1, 2, 3, 1]
    assert made[0].units == (names[6],)
    assert [batch.captures for batch in made] == [False, False, False, True]
    assert sorted(name for batch in made for name in batch.units) == sorted(names)


def _main(sanitize: Any, played: Any, out: Path, monkeypatch: Any, outcomes: list[Any], *more: str) -> int:
    monkeypatch.setattr(sanitize, "claimed", lambda *_: outcomes)
    monkeypatch.setattr(sanitize, "_gpus", lambda: ["4", "5"])
    monkeypatch.setattr(sys, "argv", ["sanitize", "--program", str(played[0]), "--out", str(out), "--jobs", "2", *more])
    code: int = sanitize.main()
    return code


def test_a_run_is_resumed(sanitize: Any, played: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from te_dispatch.conformance import Outcome

    outcomes = [Outcome(unit(kind), "passed") for kind in ("well", "crash")]
    assert _main(sanitize, played, tmp_path / "out", monkeypatch, outcomes, "--batch", "1") == 3
    assert sorted(gpu for _, gpu, _ in calls(played))[0] == "4"
    assert {call[2][0] for call in calls(played)} == {unit("well"), unit("crash")}
    os.remove(played[1])
    capsys.readouterr()
    code = _main(sanitize, played, tmp_path / "out", monkeypatch, outcomes, "--batch", "1", "--resume", "--json")
    assert code == 3
    assert {call[2][0] for call in calls(played)} == {unit("crash")}
    printed = json.loads(capsys.readouterr().out)
    assert [verdict["state"] for verdict in printed["verdicts"]] == ["clean", "tool"]
    assert printed["control"] == "found" and printed["version"] == "Version 1.2"


@pytest.mark.parametrize(("kinds", "code"), [(["well"], 0), (["well", "hazard"], 1), (["crash", "hazard"], 1)])
def test_exit_codes(sanitize: Any, played: Any, tmp_path: Path, monkeypatch: Any, kinds: list[str], code: int) -> None:
    from te_dispatch.conformance import Outcome

    outcomes = [Outcome(unit(kind), "passed") for kind in kinds]
    assert _main(sanitize, played, tmp_path / "out", monkeypatch, outcomes) == code


def test_what_fails_by_itself_is_not_laid_to_the_tool(
    sanitize: Any, played: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    from te_dispatch.conformance import Outcome

    outcomes = [Outcome(unit("well"), "failed", "off by one")]
    assert _main(sanitize, played, tmp_path / "out", monkeypatch, outcomes) == 1
    assert "failed: " + unit("well") in capsys.readouterr().err


def test_a_tool_that_overlooks_what_is_planted_is_told(
    sanitize: Any, played: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    from te_dispatch.conformance import Outcome

    played[0].write_text(played[0].read_text().replace("Invalid write", "Program hit nothing"))
    assert _main(sanitize, played, tmp_path / "out", monkeypatch, [Outcome(unit("well"), "passed")]) == 3
    assert "did not report a kernel that is wrong on purpose" in capsys.readouterr().err


def test_claimed_units_are_those_that_run(sanitize: Any, tmp_path: Path, monkeypatch: Any) -> None:
    import argparse

    monkeypatch.setattr(sanitize, "BACKEND", "torch")
    options = argparse.Namespace(op=["convert_encoding"], check=["values", "threads"], level="smoke", resume=False)
    outcomes = sanitize.claimed(options, 1, tmp_path / "plain.jsonl")
    assert outcomes and {outcome.state for outcome in outcomes} == {"passed"}
    assert {outcome.parsed.check for outcome in outcomes} == {"values", "threads"}
    for name in ("op", "check"):
        wrong = argparse.Namespace(**{**vars(options), name: ["nothing_of_that_name"]})
        with pytest.raises(SystemExit, match="nothing_of_that_name"):
            sanitize.claimed(wrong, 1, tmp_path / "plain.jsonl")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--jobs", "-1"), ("--jobs", "0"), ("--batch", "0"), ("--batch", "2.5"), ("--time", "-3"), ("--limit", "nan")],
)
def test_numbers_that_cannot_be_are_refused_before_anything_runs(
    sanitize: Any, tmp_path: Path, monkeypatch: Any, capsys: Any, option: str, value: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--program", sys.executable, "--out", str(tmp_path / "out")])
    sys.argv.append(f"{option}={value}")
    with pytest.raises(SystemExit) as error:
        sanitize.main()
    assert error.value.code == 2 and not (tmp_path / "out").exists()
    assert f"argument {option}: got '{value}', expected " in capsys.readouterr().err
