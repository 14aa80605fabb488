"""Shared steps of `generate` and `chat`: read the prompt, record, trace, and print notes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import typer

from d3d.cli.options import ModelChoice
from d3d.config import SpeculativeChoice
from d3d.errors import InvalidRequest
from d3d.files import FileKind, alone_with, write_whole
from d3d.inputs import refuse_packed
from d3d.json_text import to_json

if TYPE_CHECKING:
    from d3d.api import Model
    from d3d.hub.open_model import TargetModel
    from d3d.lab.tune.traffic import Asked, TrafficLog
    from d3d.results import GenerationResult


TRACE = FileKind(
    "a trace", ("traceEvents", "otherData"), test=lambda trace: "tpot_s" in trace["otherData"]
)


def note_speculation(result: GenerationResult) -> None:
    """Print auto mode's choices, their reasons, and warnings on standard error."""
    from d3d.cli.console import note

    if result.speculation is None:
        return
    if result.speculation.choice is not None:
        note(f"auto: {result.speculation.choice.why}")
    for warning in result.speculation.warnings:
        note(f"warning: {warning}", "yellow")


def show_dry_run(
    choice: ModelChoice, asked: SpeculativeChoice, max_tokens: int, *, as_json: bool
) -> None:
    """Print the plan of a run. Raises InvalidRequest, InvalidCheckpoint."""
    from d3d.cli.dry_run import dry_run, lines

    plan = dry_run(choice, asked, max_tokens)
    typer.echo(to_json(plan) if as_json else "\n".join(lines(plan)))


def read_prompt(prompt: str | None, option: str | None, *, raw: bool) -> str:
    """Read the prompt from the argument or --prompt; `-` reads standard input, without its last
    line end. Raises InvalidRequest if it is missing, empty or given twice."""
    from d3d.text.prompts import check_prompt
    from d3d.text.streams import without_line_end

    if prompt is not None and option is not None and prompt != option:
        raise InvalidRequest("PROMPT and --prompt are both given; give one of them")
    text = prompt if prompt is not None else option
    if text is None:
        raise InvalidRequest(
            "PROMPT: it is missing; d3d generate 'Why is the sky blue?' (- reads standard input)"
        )
    if text == "-":
        with standard_input() as stream:
            text = without_line_end(stream.read())
    check_prompt(text, raw=raw)
    return text


@contextmanager
def standard_input() -> Iterator[TextIO]:
    """Standard input to read from. Raises InvalidRequest if it is closed, can't be read, or is not
    text."""
    if sys.stdin is None or sys.stdin.closed:
        raise InvalidRequest("standard input is closed; give the prompt as an argument")
    try:
        yield sys.stdin
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"standard input is not UTF-8 text ({error})") from error
    except OSError as error:
        raise InvalidRequest(f"standard input can't be read: {error.strerror}") from error


def hold_trace(path: Path | None) -> AbstractContextManager[object]:
    """Hold the file of --trace. Raises InvalidRequest or CantWrite before any computation if it
    can't be used."""
    if path is None:
        return nullcontext()
    refuse_packed(path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidRequest(
            f"--trace {path}: there is no such directory, or it is one; name a file in a directory "
            "that exists"
        )
    TRACE.check(path)
    return alone_with(path, "d3d generate --trace")


def traffic_log(path: Path | None, *, with_text: bool) -> TrafficLog | None:
    """Open the log of --record. Raises InvalidRequest before any computation if it can't be
    used."""
    from d3d.lab.tune.traffic import TRAFFIC, TrafficLog

    if path is None:
        if with_text:
            raise InvalidRequest(
                "--record-text says what goes into the file of --record; name one, or leave it out"
            )
        return None
    refuse_packed(path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise InvalidRequest(
            f"--record {path}: there is no such directory, or it is one; name a file in a "
            "directory that exists"
        )
    TRAFFIC.check(path)
    return TrafficLog(path, with_text)


def record_request(
    log: TrafficLog | None, model: Model, asked: Asked, result: GenerationResult
) -> None:
    """Add a line to the log, if there is one; warn if that fails."""
    from d3d.cli.console import note

    if log is not None and (problem := log.add(model, asked, result)):
        note(f"warning: {problem}", "yellow")


def write_trace(path: Path, result: GenerationResult, dtype: str) -> None:
    """Write a trace with the facts that d3d plan needs to model the same rounds. Raises
    CantWrite."""
    import torch

    from d3d.engine.trace import chrome_trace

    about = {
        "mode": "plain" if result.speculation is None else result.speculation.mode,
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "prompt_tokens": result.usage.prompt_tokens,
        "tpot_s": result.timing.tpot_s,
    }
    write_whole(path, TRACE, to_json(chrome_trace(result.rounds, about)))


def thinking_warning(model: TargetModel, thinking: bool | None) -> str | None:
    """Warning about a switch that this model's chat template does not have."""
    from d3d.text.prompts import heeds_thinking

    if thinking is None or heeds_thinking(model.tokenizer):
        return None
    return (
        f"warning: the chat template of {model.source} does not look at enable_thinking, so "
        "--thinking/--no-thinking changes nothing"
    )
