# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The command's verbs, their arguments and their help. What a verb does is in the module of its name, imported when it
runs: ``--help`` must not wait for libraries."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from te_dispatch.cli.console import CommandError, require, resolving, verb

app = typer.Typer(
    name="te-dispatch",
    help="Which FP8 kernel runs where, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
policy_app = typer.Typer(help="Check and show policies.", no_args_is_help=True)
plan_app = typer.Typer(help="Check lock files that te_dispatch.freeze() made.", no_args_is_help=True)
app.add_typer(policy_app, name="policy")
app.add_typer(plan_app, name="plan")

_DEVICE = (
    "vendor:arch of any device, here or not (nvidia:sm_90, amd:gfx942), a PyTorch device of this machine, or here."
)
Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")]
Device = Annotated[str | None, typer.Option("--device", "-d", metavar="DEVICE", help=_DEVICE)]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", "-p", metavar="POLICY", help="A shipped policy's name, or a YAML file.")
]


def _version(asked: bool) -> None:
    if asked:
        import te_dispatch

        typer.echo(f"te-dispatch {te_dispatch.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    pass


@app.command()
@verb
def doctor(
    as_json: Json = False,
    time_limit: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="For each answer of a plugin.")] = 60.0,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show those of what plugins raised.")] = False,
) -> int:
    """What is installed, what this machine has, what is broken (exit code 1)."""
    from te_dispatch.cli import doctor as module

    return module.doctor(as_json, time_limit, traceback)


@app.command()
@resolving
def ops(
    name: Annotated[str | None, typer.Argument(metavar="[OPERATOR]", help="Show this one's contract.")] = None,
    family: Annotated[str | None, typer.Option("--family", "-f", help="Only this family.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> int:
    """Operators x backends; with an operator, its contract."""
    from te_dispatch.cli import ops as module

    if name is None:
        return module.matrix(family, device, as_json)
    if family is not None or device is not None:
        raise CommandError("--family and --device go with the list; leave OPERATOR away")
    return module.contract(name, as_json)


@app.command()
@resolving
def explain(
    operator: Annotated[str | None, typer.Argument(metavar="[OPERATOR]")] = None,
    facts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FACT=VALUE]...", help="E.g. k=4096 a.dtype=e4m3fn layout=TN; dtype=bf16 for all."),
    ] = None,
    module: Annotated[
        str | None, typer.Option("--module", "-m", metavar="CALL", help='In place of OPERATOR: "Linear(1024, 4096)".')
    ] = None,
    input: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", metavar="SIZES", help="Of --module: 2048x1024, 8x128:int64; repeat it."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of parameters and inputs of --module; bfloat16 if left.")] = None,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", metavar="RECIPE", help="Of --module: DelayedScaling, ...")
    ] = None,
    no_backward: Annotated[bool, typer.Option("--no-backward", help="Plan --module without gradients.")] = False,
    device: Device = None,
    policy: PolicyOption = None,
    as_json: Json = False,
) -> int:
    """Which implementation serves a call, or each call of a module, and why the others do not (exit code 1: none)."""
    of_module = {"--input": input, "--dtype": dtype, "--recipe": recipe, "--no-backward": no_backward}
    if module is None:
        if operator is None:
            raise CommandError('name an OPERATOR (te-dispatch ops lists them), or give --module "Linear(1024, 4096)"')
        for name, value in of_module.items():
            if value:
                raise CommandError(f"{name} goes with --module; calls of an operator are described by FACT=VALUE")
        from te_dispatch.cli import explain as verb_module

        return verb_module.explain(operator, facts or [], device, policy, as_json)
    if operator is not None:
        raise CommandError(f"--module takes no OPERATOR and no facts, got {operator!r}; its call goes in quotes")
    require("torch", "torch")
    from te_dispatch.cli import explain_module

    return explain_module.explain(
        explain_module.Described(module, input or [], dtype, recipe, not no_backward), device, policy, as_json
    )


@policy_app.command("check")
@resolving
def policy_check(file: Annotated[str, typer.Argument(metavar="FILE")], as_json: Json = False) -> int:
    """Read a policy file; an error is file:line:column."""
    from te_dispatch.cli import policy as module

    return module.check(file, as_json)


@policy_app.command("show")
@resolving
def policy_show(
    policy: Annotated[str | None, typer.Argument(metavar="[NAME_OR_FILE]")] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Where each line came from.")] = False,
    as_json: Json = False,
) -> int:
    """The effective policy, with the named one on top."""
    from te_dispatch.cli import policy as module

    return module.show(policy, origin, as_json)


@policy_app.command("schema")
@verb
def policy_schema(as_json: Json = False) -> int:
    """The JSON Schema of policy files, for editors."""
    from te_dispatch.cli import policy as module

    return module.schema()


@policy_app.command("list")
@verb
def policy_list(as_json: Json = False) -> int:
    """The policies that ship."""
    from te_dispatch.cli import policy as module

    return module.listing(as_json)


@plan_app.command("check")
@resolving
def plan_check(lock_file: Annotated[str, typer.Argument(metavar="LOCKFILE")], as_json: Json = False) -> int:
    """Would this machine choose what the lock file says? (exit code 1: no, with the differences)"""
    from te_dispatch.cli import plan as module

    return module.check(lock_file, as_json)


_DEMO_SIZES = "tiny, small, medium or large (fills a GPU)."


@app.command()
@resolving
def demo(
    recipe: Annotated[
        list[str] | None,
        typer.Option("--recipe", "-r", help="delayed, current, block or all; repeat it, or separate with commas."),
    ] = None,
    size: Annotated[str | None, typer.Option(help=f"{_DEMO_SIZES} The following override its numbers.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Features.")] = None,
    layers: Annotated[int | None, typer.Option(help="Transformer layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    seq: Annotated[int | None, typer.Option(help="Bytes of context.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of each run.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = 0,
    device: Annotated[str | None, typer.Option("--device", "-d", help="PyTorch device.")] = None,
    policy: PolicyOption = None,
    out: Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="Where the JSON and the PNG go.")] = ".",
    log_every: Annotated[int, typer.Option(help="Steps between progress updates.")] = 10,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Json = False,
) -> int:
    """Train a byte-level GPT in BF16 and in FP8 and compare."""
    require("demo", "torch", "numpy", "matplotlib")
    from te_dispatch.cli.demo import command

    arguments: dict[str, Any] = dict(locals())
    for name in ("command", "as_json", "quiet"):
        arguments.pop(name)
    return command.run(arguments, as_json=as_json, quiet=quiet)


@app.command()
@resolving
def conformance(
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", help="To certify; repeat it. Default: all but the oracle.")
    ] = None,
    against: Annotated[str, typer.Option(help="The backend that is taken to be right.")] = "reference",
    op: Annotated[list[str] | None, typer.Option(help="Operator, family or glob; repeat it.")] = None,
    level: Annotated[str, typer.Option("--level", "-l", help="smoke, full or soak.")] = "smoke",
    check: Annotated[list[str] | None, typer.Option(help="Only this check; repeat it.")] = None,
    skip_check: Annotated[list[str] | None, typer.Option(help="All checks but this; repeat it.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the data.")] = 0,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Run the I-th of N parts.")] = "1/1",
    product: Annotated[bool, typer.Option("--product", help="Every combination, not every pair.")] = False,
    unit: Annotated[list[str] | None, typer.Option(help="Run just this unit, as a report names it; repeat it.")] = None,
    replay: Annotated[str | None, typer.Option(metavar="FILE", help="Judge what shadow mode wrote down.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in --out was stopped.")] = False,
    skip_file: Annotated[str | None, typer.Option(metavar="FILE", help="Units to leave out, with reasons.")] = None,
    expect_file: Annotated[str | None, typer.Option(metavar="FILE", help="Units known to fail, with reasons.")] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", "-d", help="PyTorch device, or a chip that a backend emulates: emulated:gfx942."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Worker processes.")] = 1,
    limit: Annotated[float, typer.Option(min=1.0, metavar="SECONDS", help="For each unit.")] = 60.0,
    in_process: Annotated[bool, typer.Option("--in-process", help="No workers: a crash ends the run.")] = False,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Where the page, the JSON and the JUnit XML go. Default: te_dispatch_conformance, of units its unit.",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Json = False,
) -> int:
    """Certify backends against the reference (exit code 1: something claimed failed)."""
    require("conformance", "torch", "numpy", "jinja2")
    from te_dispatch.cli import conformance as module

    arguments: dict[str, Any] = dict(locals())
    for name in ("module", "as_json", "quiet"):
        arguments.pop(name)
    return module.run(arguments, as_json=as_json, quiet=quiet)


@app.command()
@resolving
def tune(
    facts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FACT=VALUE]...", help="Of --shape: a.dtype=e4m3fn layout=NN bias=true; bf16 NT if left."
        ),
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(metavar="MxNxK", help="A product; repeat it.")] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help="All of a layer: hidden=4096,ffn=16384,tokens=8192[,kv=1024][,gated=1]."),
    ] = None,
    recipe: Annotated[
        list[str] | None, typer.Option("--recipe", "-r", help="Of --layer: bf16, delayed, current, block, mxfp8.")
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", help="Repeat it. Default: all that tune.")
    ] = None,
    device: Annotated[int, typer.Option("--device", "-d", min=0, help="Index.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Json = False,
) -> int:
    """Time algorithms of matrix products ahead and keep the fastest (exit code 1: none for a product)."""
    from te_dispatch.cli import tune as module

    return module.tune(backend or [], shape or [], layer or [], recipe or ["bf16"], facts or [], device, as_json, quiet)


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)
def run(
    context: typer.Context,
    program: Annotated[str, typer.Argument(metavar="SCRIPT [ARGUMENT]...", help="And its own arguments.")],
    as_module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name.")] = False,
) -> None:
    """Run a Python program in which import transformer_engine imports te_dispatch."""
    from te_dispatch.cli import run as module

    module.run(program, context.args, as_module)
