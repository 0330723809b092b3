# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The examples of frameworks run, as docs/integrations.md says to run them."""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .states import DEVICE, TRAINER_REFUSED

REPOSITORY = Path(__file__).resolve().parents[2]

ON = f"FP8 on {DEVICE}(?::0)?"
LAUNCH = ("-m", "accelerate.commands.launch", *([] if DEVICE == "cuda" else ["--cpu"]))
#: On the CPU accelerate does not use FSDP. FSDP2 with its efficient loading fails in accelerate itself, which takes
#: every tensor of a state dict for a DTensor.
FSDP = (
    "--num_processes", "2", "--use_fsdp", "--fsdp_auto_wrap_policy", "NO_WRAP", "--fsdp_cpu_ram_efficient_loading",
    "false", "--fsdp_state_dict_type", "SHARDED_STATE_DICT", "--fsdp_version",
)  # fmt: skip
#: Of each run of an example: what it needs, the options before it, the file, and what it prints in the end.
EXAMPLES = {
    "accelerate": ("accelerate", (), "accelerate_fp8.py", rf"{ON}: loss [\d.]+ -> [\d.]+"),
    "accelerate launch": (
        "accelerate", LAUNCH, "accelerate_fp8.py", rf"{ON}: loss [\d.]+ -> [\d.]+",
    ),
    **{
        f"accelerate launch, FSDP{version}": (
            "accelerate", (*LAUNCH, *FSDP, version), "accelerate_fp8.py", rf"{ON}: loss [\d.]+ -> [\d.]+",
        )
        for version in ("1", "2")
    },
    "transformers": (
        "transformers", (), "transformers_trainer_fp8.py",
        rf"{ON}: loss [\d.]+ -> ([\d.]+); resumed at step 10: \1$",
    ),
    "lightning": (
        "lightning", (), "lightning_fp8.py",
        rf"{ON}: loss after 1, 20 and 40 steps: [\d.]+, [\d.]+, [\d.]+",
    ),
    "megatron": (
        "megatron.core", (), "megatron_gpt_fp8.py", rf"delayed {ON}: loss [\d.]+ -> [\d.]+",
    ),
    "peft": ("peft", (), "peft_lora_fp8.py", rf"{ON}: loss [\d.]+ -> [\d.]+"),
    "fsdp": (
        "torch", ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), "fsdp_fp8.py",
        r"FP8 on 2 x (?:cpu|cuda): loss [\d.]+ -> [\d.]+\nloss of the next step: ([\d.]+), of the resumed model: \1$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("run", EXAMPLES)
def test_example(run: str, tmp_path: Path) -> None:
    needs, options, name, expected = EXAMPLES[run]
    pytest.importorskip(needs)
    if FSDP[0] in options and torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    if not options:  # one process: the Trainer would have it use all GPUs, which accelerate refuses in FP8
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    # From another folder, so that te_dispatch is the installed one.
    done = subprocess.run(
        [sys.executable, "-m", "te_dispatch.cli", "run", *options, str(REPOSITORY / "examples" / name)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(expected, done.stdout, re.MULTILINE), done.stdout


def _blocks() -> dict[str, str]:
    """The Python blocks of docs/integrations.md by the heading that each is under."""
    page = (REPOSITORY / "docs" / "integrations.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^## (.+?)$\n+```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))


#: What each block needs.
BLOCKS = {
    "accelerate": "accelerate",
    "transformers": "transformers",
    "Lightning": "lightning",
    "Megatron Core": "megatron.core",
    "peft": "peft",
    "DDP and FSDP": "torch",
}
#: Those that torchrun starts.
OF_SEVERAL_RANKS = ("Megatron Core", "DDP and FSDP")


def test_every_block_of_the_documentation_is_run() -> None:
    assert sorted(_blocks()) == sorted(BLOCKS)


@pytest.fixture
def restored_environment() -> Iterator[None]:
    saved = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(saved)
    if torch.distributed.is_initialized():  # a block that failed
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("restored_environment")
@pytest.mark.parametrize("heading", BLOCKS)
def test_block_of_the_documentation(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(BLOCKS[heading])
    if heading == "transformers" and TRAINER_REFUSED:
        pytest.skip(TRAINER_REFUSED)
    monkeypatch.chdir(tmp_path)
    if heading in OF_SEVERAL_RANKS:
        # What torchrun sets for one process.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        named = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(named)
    exec(compile(_blocks()[heading], f"docs/integrations.md, {heading}", "exec"), {"__name__": "__main__"})


def test_every_example_of_a_framework_is_run() -> None:
    run = {name for _, _, name, _ in EXAMPLES.values()}
    assert run == {path.name for path in (REPOSITORY / "examples").glob("*_fp8.py")}


def test_the_documentation_names_the_versions_that_are_tested() -> None:
    lines = (Path(__file__).with_name("requirements.txt")).read_text(encoding="utf-8").splitlines()
    pinned = [line.split("==") for line in lines if line and not line.startswith("#")]
    page = (REPOSITORY / "docs" / "integrations.md").read_text(encoding="utf-8")
    assert len(pinned) >= 5
    for framework, version in pinned:
        assert f"{framework} {version}" in page
        try:
            installed = importlib.metadata.version(framework)
        except importlib.metadata.PackageNotFoundError:
            continue
        assert installed == version
