"""`d3d bench identity`: are the answers of all modes plain decoding's own?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from d3d.cli.bench_parts import RESULTS, DirectoryOption
from d3d.cli.options import DEFAULT_MODEL, DeviceOption, QuantizeOption

RECORD_FILE = "identity.json"
EXIT_MISTAKE = 1


def identity(
    name: Annotated[
        str,
        typer.Argument(help="Name of the run, RESULTS/NAME; one that is there already goes on."),
    ] = "identity",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="As for d3d bench run; may be repeated. Default: the seven public sets of --data, or mini without it.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method", help="As for d3d bench run; may be repeated. Default: serial, fused, async."
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Directory that holds the public sets.")] = None,
    prompts: Annotated[
        int, typer.Option(help="Prompts of each set, drawn by --seed; 0 takes all.", min=0)
    ] = 20,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = 48,
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
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Draws the prompts and the noise of sampling.", min=0)
    ] = 0,
    device: DeviceOption = "auto",
    quantize: QuantizeOption = None,
    results: DirectoryOption = RESULTS,
) -> None:
    """Compare every mode's answers with plain decoding's, token by token, in float32.

    Writes identity.json and a report to RESULTS/NAME, and lists each answer that parts from plain's
    with its position and the gap between the target's two choices there. Exit code 1 where rounding
    does not explain one."""
    import json

    import d3d
    from d3d.cli.bench_parts import directory_of, measure
    from d3d.cli.options import sampling_options
    from d3d.cli.tables import print_table
    from d3d.lab.bench.answers import Sampling
    from d3d.lab.bench.harness import Plan
    from d3d.lab.bench.methods import MethodOptions, check_names
    from d3d.lab.bench.prompt_sets import MINI, SETS, read_set
    from d3d.lab.report.identity import identity_record, identity_sections
    from d3d.lab.report.page import write_report
    from d3d.lab.report.run import load_run
    from d3d.lab.report.run_tables import provenance_tables
    from d3d.lab.report.tables import Section

    sampling_options({"temperature": temperature})
    directory = directory_of(results, name)
    wanted = methods or ["serial", "fused", "async"]
    check_names(wanted, temperature)
    specs = sets or ([MINI] if data is None else [one for one in SETS if one != MINI])
    read = {
        one.name: one
        for one in (read_set(spec, data, limit=prompts or None, seed=seed) for spec in specs)
    }
    sampling = Sampling(temperature, seed)
    plan = Plan(
        directory,
        tuple(read.values()),
        (max_tokens,),
        draft_lengths=tuple(draft_length or ()),
        sampling=sampling,
    )
    model = d3d.load(target, drafter, device=device, dtype="float32", quantize=quantize)
    measure(plan, model, wanted, MethodOptions(device=device, dtype="float32"))
    run = load_run(directory)
    record = identity_record(run)
    (directory / RECORD_FILE).write_text(
        json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    sections = identity_sections(run)
    files = write_report(
        directory,
        f"Identity {name}",
        [*sections, Section("Where this comes from", tables=provenance_tables(run))],
    )
    for table in sections[0].tables:
        print_table(table)
    for file in (directory / RECORD_FILE, *files):
        typer.echo(file)
    if record["mistakes"]:
        raise typer.Exit(EXIT_MISTAKE)
