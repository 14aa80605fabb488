"""`d3d bench`: measure methods over prompt sets, check identity, report a run, compare two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from d3d.cli import options as o
from d3d.cli.groups import CheckedCommand
from d3d.json_text import to_json

if TYPE_CHECKING:
    from d3d.api import Model
    from d3d.lab.bench.answers import MethodOptions
    from d3d.lab.bench.harness import BenchPlan
    from d3d.lab.bench.prompt_sets import PromptSet
    from d3d.lab.bench.rows import Row
    from d3d.lab.report.tables import Section

RESULTS = Path("results")
RECORD_FILE = "identity.json"
EXIT_MISTAKE = 1

bench = typer.Typer(
    help="Measure methods over sets of prompts, report it, compare runs.",
    no_args_is_help=True,
    add_completion=False,
)

NameArgument = Annotated[
    str, typer.Argument(help="Name of the run, RESULTS/NAME; a run that exists is resumed.")
]
DataOption = Annotated[Path | None, typer.Option(help="Directory that holds the public sets.")]
PromptsOption = Annotated[
    int, typer.Option(help="Prompts of each set, drawn by --seed; 0 takes all.", min=0)
]
DraftLengthsOption = Annotated[
    list[int] | None,
    typer.Option(
        help="Tokens to draft a round; may be repeated. Default: each method's own.", min=1
    ),
]
DrafterOption = Annotated[
    str | None, typer.Option(help="Drafter: directory or hub id. Default: the preset's own.")
]
SeedOption = Annotated[
    int, typer.Option(help="Draws the prompts and the noise of sampling.", min=0)
]
DirectoryOption = Annotated[Path, typer.Option("--results", help="Directory that holds the runs.")]
RunArgument = Annotated[Path, typer.Argument(help="Directory of a run.")]


@bench.command("run", cls=CheckedCommand)
@o.takes(o.MODEL)
def run(
    *,
    name: NameArgument,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt_bench (from --data, "
            "or as NAME=FILE or NAME=HUB_SET), mini (built in), or a file of your own prompts; "
            "may be repeated. Default: mini.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            help="A method of d3d, async_modelled, transformers, "
            "transformers_lookup, transformers_assistant, server or llama_cpp; may be repeated. "
            "plain is always among them. Default: serial, ngram.",
        ),
    ] = None,
    data: DataOption = None,
    prompts: PromptsOption = 20,
    max_tokens: Annotated[
        list[int] | None,
        typer.Option(help="Longest answer in tokens; may be repeated. Default: 128.", min=1),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Prompts decoded together; may be repeated. Default: 1.", min=1),
    ] = None,
    draft_length: DraftLengthsOption = None,
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="Causal model for draft_model and transformers_assistant. Default for "
            "draft_model: the drafter's own clean rows."
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
            help="For server: up to and including /v1. An API key is read from D3D_SERVER_KEY."
        ),
    ] = None,
    server_model: Annotated[
        str | None, typer.Option(help="Model of the server. Default: its first.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy; peers are compared greedily only.", min=0.0)
    ] = 0.0,
    seed: SeedOption = 0,
    thinking: o.ThinkingOption = None,
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
    results: DirectoryOption = RESULTS,
    choice: o.ModelChoice,
) -> None:
    """Measure every method on every prompt, one prompt after the other, and append rows to
    RESULTS/NAME/results.jsonl."""
    import os

    from d3d.cli.console import note
    from d3d.cli.requests import thinking_warning
    from d3d.lab.bench.answers import MethodOptions, Sampling
    from d3d.lab.bench.harness import BenchPlan
    from d3d.lab.bench.methods import check_options

    directory = _directory_of(results, name)
    wanted = methods or ["serial", "ngram"]
    _check(wanted, temperature)
    options = MethodOptions(
        draft_model=draft_model,
        server_url=server_url,
        server_model=server_model,
        server_key=os.environ.get("D3D_SERVER_KEY"),
        gguf=gguf,
        device=choice.device,
        dtype=choice.dtype,
        assistant=assistant,
    )
    check_options(wanted, options)
    plan = BenchPlan(
        directory,
        _read_sets(sets or ["mini"], data, prompts, seed),
        tuple(max_tokens or (128,)),
        tuple(batch or (1,)),
        tuple(draft_length or ()),
        Sampling(temperature, seed, ignore_eos),
        thinking,
        run_code,
    )
    model = choice.load()
    if warning := thinking_warning(model.target, thinking):
        note(warning, "yellow")
    rows = _measure(plan, model, wanted, options)
    failed = sum(row.error is not None for row in rows)
    told = f", of which {failed} failed" if failed else ""
    typer.echo(f"{directory}: {len(rows)} answers{told}; d3d bench report {directory}")


@bench.command("identity", cls=CheckedCommand)
@o.takes(o.TARGET)
def identity(
    *,
    name: NameArgument = "identity",
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="As for d3d bench run; may be repeated. Default: the seven public sets of --data, "
            "or mini without it.",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method", help="As for d3d bench run; may be repeated. Default: serial, fused, async."
        ),
    ] = None,
    data: DataOption = None,
    prompts: PromptsOption = 20,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = 48,
    draft_length: DraftLengthsOption = None,
    drafter: DrafterOption = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0)] = 0.0,
    seed: SeedOption = 0,
    device: o.DeviceOption = "auto",
    quantize: o.QuantizeOption = None,
    results: DirectoryOption = RESULTS,
    model: str | None,
) -> None:
    """Compare every mode's answers with plain decoding's, token by token, in float32.

    Writes identity.json and a report to RESULTS/NAME, and lists each answer that differs from
    plain's, with the position and the gap between the target's two choices there. Exit code 1 if
    rounding does not explain a difference."""

    from d3d.files import FileKind, write_whole
    from d3d.lab.bench.answers import MethodOptions, Sampling
    from d3d.lab.bench.harness import BenchPlan
    from d3d.lab.bench.prompt_sets import MINI, SETS
    from d3d.lab.bench.results import load_run
    from d3d.lab.report.benchmark import identity_record, identity_sections, provenance_section
    from d3d.lab.report.tables import check_report

    directory = _directory_of(results, name)
    file = directory / RECORD_FILE
    kind = FileKind("a record of d3d bench identity", ("settings", "sets", "commands"))
    kind.check(file)
    check_report(directory)
    wanted = methods or ["serial", "fused", "async"]
    _check(wanted, temperature)
    public = [name for name in SETS if name != MINI]
    plan = BenchPlan(
        directory,
        _read_sets(sets or ([MINI] if data is None else public), data, prompts, seed),
        (max_tokens,),
        draft_lengths=tuple(draft_length or ()),
        sampling=Sampling(temperature, seed),
    )
    loaded = o.ModelChoice(model, drafter, device, "float32", quantize=quantize).load()
    _measure(plan, loaded, wanted, MethodOptions(device=device, dtype="float32"))
    measured = load_run(directory)
    record = identity_record(measured)
    write_whole(file, kind, to_json(record, indent=2, ensure_ascii=False) + "\n")
    sections = [*identity_sections(measured), provenance_section(measured)]
    _print_tables(sections[:1])
    typer.echo(file)
    _write(directory, f"Identity {name}", sections)
    if record["mistakes"]:
        raise typer.Exit(EXIT_MISTAKE)


@bench.command("report", cls=CheckedCommand)
def report(
    run: RunArgument,
    output: Annotated[
        Path | None, typer.Option(help="Directory of the report. Default: that of the results.")
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Pictures need matplotlib.")
    ] = True,
) -> None:
    """Write report.md and a self-contained report.html, and print the first table."""
    from d3d.lab.bench.results import load_run
    from d3d.lab.report.benchmark import report as sections_of
    from d3d.lab.report.tables import check_report

    check_report(output or run)
    loaded = load_run(run)
    sections = sections_of(loaded, with_pictures=pictures)
    _print_tables(sections[:1])
    for line in sections[0].text:
        typer.echo(line)
    _write(output or run, f"Benchmark {loaded.name}", sections)


@bench.command("compare", cls=CheckedCommand)
def compare(
    a: RunArgument,
    b: Annotated[Path, typer.Argument(help="Directory of another.")],
    output: Annotated[
        Path | None,
        typer.Option(help="Write it into this directory too, as report.md and report.html."),
    ] = None,
) -> None:
    """Show two runs side by side, and how their settings differ."""
    from dataclasses import replace

    from d3d.errors import InvalidRequest
    from d3d.lab.bench.results import load_run
    from d3d.lab.report.benchmark import comparison
    from d3d.lab.report.tables import check_report

    if output is not None:
        check_report(output)
    runs = load_run(a), load_run(b)
    if a.resolve() == b.resolve():
        raise InvalidRequest(f"{a} and {b} are one run; give two to compare")
    if runs[0].name == runs[1].name:
        runs = replace(runs[0], name=str(a)), replace(runs[1], name=str(b))
    sections = comparison(*runs)
    _print_tables(sections)
    if output is not None:
        _write(output, f"{runs[0].name} and {runs[1].name}", sections)


def _directory_of(results: Path, name: str) -> Path:
    """Directory of a run. Raises InvalidRequest for a name that is a path."""
    from d3d.errors import InvalidRequest

    if not name or name in (".", "..") or Path(name).name != name:
        raise InvalidRequest(
            f"name: {name!r} can't be the name of a directory in {results}; "
            "use a plain word (--results gives the place)"
        )
    return results / name


def _check(methods: Sequence[str], temperature: float) -> None:
    """Raises InvalidRequest for methods or a temperature that can't be used."""
    from d3d.lab.bench.methods import check_names
    from d3d.request_options import sampling_params

    sampling_params({"temperature": temperature})
    check_names(methods, temperature)


def _read_sets(
    specs: Sequence[str], data: Path | None, prompts: int, seed: int
) -> tuple[PromptSet, ...]:
    from d3d.errors import InvalidRequest
    from d3d.lab.bench.prompt_sets import read_set

    if data is not None and not data.is_dir():
        raise InvalidRequest(f"--data {data}: there is no such directory")
    read = [read_set(spec, data, limit=prompts or None, seed=seed) for spec in specs]
    return tuple({prompt_set.name: prompt_set for prompt_set in read}.values())


def _measure(
    plan: BenchPlan, model: Model, methods: Sequence[str], options: MethodOptions
) -> list[Row]:
    """Run a plan, new or resumed, with progress on standard error; return all rows of the run."""
    from d3d.cli.console import meter, note
    from d3d.cli.interrupt import telling_what_is_kept
    from d3d.lab.bench.harness import Benchmark
    from d3d.lab.bench.methods import make_methods
    from d3d.lab.bench.rows import ROWS_FILE, read_rows

    made = make_methods(methods, model, options, plan.sampling)

    def kept() -> str:
        return f"{plan.directory} holds {len(read_rows(plan.directory / ROWS_FILE))} answers"

    try:
        benchmark = Benchmark(plan, model, made)
        with telling_what_is_kept(kept), meter(benchmark.total) as progress:
            rows = benchmark.run(progress.show)
        for left_out in (*(each.left_out for each in plan.sets), benchmark.left_out):
            for line in left_out.lines():
                note(line, "yellow")
        return rows
    finally:
        for method in made:
            method.close()
        model.close()


def _print_tables(sections: Sequence[Section]) -> None:
    from d3d.cli.tables import print_table

    for section in sections:
        for table in section.tables:
            print_table(table)


def _write(directory: Path, title: str, sections: Sequence[Section]) -> None:
    """Write a report and print its files."""
    from d3d.lab.report.tables import write_report

    for file in write_report(directory, title, sections):
        typer.echo(file)
