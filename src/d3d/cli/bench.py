"""`d3d bench`: measure methods over sets of prompts, report a run, compare two."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from d3d.cli.bench_identity import identity
from d3d.cli.bench_parts import RESULTS, DirectoryOption, directory_of, measure
from d3d.cli.options import (
    DEFAULT_MODEL,
    DeviceOption,
    DTypeOption,
    EngineOption,
    QuantizeOption,
    ThinkingOption,
)

bench = typer.Typer(
    help="Measure methods over sets of prompts, report it, compare runs.",
    no_args_is_help=True,
    add_completion=False,
)

bench.command("identity")(identity)


@bench.command("run")
def run(
    name: Annotated[
        str,
        typer.Argument(help="Name of the run, RESULTS/NAME; one that is there already goes on."),
    ],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt_bench (from --data, or as NAME=FILE or NAME=HUB_SET), mini "
            "(comes along), or a file of your own prompts; may be repeated. Default: mini.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="A mode of d3d, async_modelled, lookup, draft_model, transformers, transformers_lookup, transformers_assistant, server or "
            "llama_cpp; may be repeated. plain is always among them. Default: serial, lookup.",
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Directory that holds the public sets.")] = None,
    prompts: Annotated[
        int, typer.Option(help="Prompts of each set, drawn by --seed; 0 takes all.", min=0)
    ] = 20,
    max_tokens: Annotated[
        list[int] | None,
        typer.Option(help="Longest answer in tokens; may be repeated. Default: 128.", min=1),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Prompts decoded together; may be repeated. Default: 1.", min=1),
    ] = None,
    draft_length: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens to draft a round; may be repeated. Default: each method's own.", min=1
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(help="Preset, directory, GGUF file or hub id of the target.")
    ] = DEFAULT_MODEL,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter: directory or hub id. Default: the preset's own.")
    ] = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Causal model for draft_model and transformers_assistant. Default for draft_model: the drafter's own clean rows."
        ),
    ] = None,
    assistant: Annotated[
        str | None,
        typer.Option(help="Causal model for transformers_assistant. Default: --draft-model."),
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(help="File for llama_cpp. Default: the target's own.")
    ] = None,
    server_url: Annotated[
        str | None,
        typer.Option(
            help="For server: up to and with /v1. Its API key, if it wants one, is read from D3D_SERVER_KEY."
        ),
    ] = None,
    server_model: Annotated[
        str | None, typer.Option(help="Its model's name. Default: the first that it has.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; peers are compared greedily only.", min=0.0)
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Draws the prompts and the noise of sampling.", min=0)
    ] = 0,
    thinking: ThinkingOption = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Go on past the natural end; the report warns of it."),
    ] = False,
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code", help="Score HumanEval and MBPP by running the answers, guarded."
        ),
    ] = False,
    engine: EngineOption = "native",
    device: DeviceOption = "auto",
    dtype: DTypeOption = "auto",
    quantize: QuantizeOption = None,
    results: DirectoryOption = RESULTS,
) -> None:
    """Every method answers every prompt, one prompt after the other; rows go to
    RESULTS/NAME/results.jsonl as they are measured."""
    import os

    import d3d
    from d3d.cli.console import note
    from d3d.cli.options import sampling_options
    from d3d.cli.requests import thinking_warning
    from d3d.lab.bench.answers import Sampling
    from d3d.lab.bench.harness import Plan
    from d3d.lab.bench.methods import MethodOptions, check_names
    from d3d.lab.bench.prompt_sets import read_set

    sampling_options({"temperature": temperature})
    directory = directory_of(results, name)
    wanted = methods or ["serial", "lookup"]
    check_names(wanted, temperature)
    limit = prompts or None
    read = {
        one.name: one
        for one in (read_set(spec, data, limit=limit, seed=seed) for spec in sets or ["mini"])
    }
    plan = Plan(
        directory,
        tuple(read.values()),
        tuple(max_tokens or (128,)),
        tuple(batch or (1,)),
        tuple(draft_length or ()),
        Sampling(temperature, seed, ignore_eos),
        thinking,
        run_code,
    )
    model = d3d.load(target, drafter, device=device, dtype=dtype, quantize=quantize, engine=engine)
    if warning := thinking_warning(model.target, thinking):
        note(warning, "yellow")
    options = MethodOptions(
        draft_model,
        server_url,
        server_model,
        os.environ.get("D3D_SERVER_KEY"),
        gguf,
        device,
        dtype,
        assistant,
    )
    rows = measure(plan, model, wanted, options)
    typer.echo(f"{directory}: {len(rows)} answers; d3d bench report {directory}")


@bench.command("report")
def report(
    run: Annotated[Path, typer.Argument(help="Directory of a run.")],
    output: Annotated[
        Path | None, typer.Option(help="Where the report goes. Default: beside the results.")
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Pictures need matplotlib.")
    ] = True,
) -> None:
    """Write report.md and a self-contained report.html, and print the first table."""
    from d3d.cli.tables import print_table
    from d3d.lab.report.benchmark import report as sections_of
    from d3d.lab.report.page import write_report
    from d3d.lab.report.run import load_run

    loaded = load_run(run)
    sections = sections_of(loaded, with_pictures=pictures)
    directory = output or run
    directory.mkdir(parents=True, exist_ok=True)
    files = write_report(directory, f"Benchmark {loaded.name}", sections)
    for table in sections[0].tables:
        print_table(table)
    for line in sections[0].text:
        typer.echo(line)
    for file in files:
        typer.echo(file)


@bench.command("compare")
def compare(
    a: Annotated[Path, typer.Argument(help="Directory of a run.")],
    b: Annotated[Path, typer.Argument(help="Directory of another.")],
    output: Annotated[
        Path | None,
        typer.Option(help="Write it into this directory too, as report.md and report.html."),
    ] = None,
) -> None:
    """What two runs measured, side by side, and what was different about them."""
    from d3d.cli.tables import print_table
    from d3d.lab.report.benchmark import comparison
    from d3d.lab.report.page import write_report
    from d3d.lab.report.run import load_run

    one, other = load_run(a), load_run(b)
    sections = comparison(one, other)
    for section in sections:
        for table in section.tables:
            print_table(table)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        for file in write_report(output, f"{one.name} and {other.name}", sections):
            typer.echo(file)
