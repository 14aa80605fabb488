"""Prompt sets: seven public ones with their usual templates, a built-in one, and files of your
own prompts.

The public sets are not in this package: they are read from your files, or from the hub. `mini` is
self-written, with prompts of the same kinds. Templates: GSM8K, MATH-500, HumanEval and MT-Bench as
in DFlash's benchmark (z-lab/dflash, dflash/benchmark.py); MBPP as in its paper (Austin et al.,
arXiv 2108.07732), which shows the tests, since they name the function; AIME and LiveCodeBench as in
their files."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from d3d.errors import InvalidRequest
from d3d.train.evaluation_sets import FORMATS, apply_format
from d3d.train.prompt_rows import PromptRows, read_conversation, read_rows
from d3d.train.prompts import LeftOut

Message = dict[str, str]
MINI = "mini"
MBPP_TEST = range(11, 511)
MBPP_FORMAT = (
    "You are an expert Python programmer, and here is your task: {text} "
    "Your code should pass these tests:\n\n{tests}"
)


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation to answer; `later` holds the user's further turns, each sent once the turn
    before it is answered."""

    set_name: str
    prompt_id: str
    messages: tuple[Message, ...]
    later: tuple[str, ...] = ()
    reference: dict[str, Any] | None = None
    """For `d3d.lab.bench.scorers`; None if answers can't be scored."""
    where: str = ""
    """File and line, for messages."""

    @property
    def num_turns(self) -> int:
        return 1 + len(self.later)

    def conversation(self, answers: Sequence[str]) -> list[Message]:
        """Messages up to the turn that follows these answers."""
        messages = list(self.messages)
        for answer, said in zip(answers, self.later, strict=False):
            messages.append({"role": "assistant", "content": answer})
            messages.append({"role": "user", "content": said})
        return messages


class SetRow(NamedTuple):
    """A parsed row of a set's file."""

    prompt_id: str
    messages: list[Message]
    later: tuple[str, ...] = ()
    reference: dict[str, Any] | None = None
    not_read: tuple[str, ...] = ()
    """Its fields that hold text and were not read."""


SetReader = Callable[[dict[str, Any], int], SetRow | None]
"""Parses (row, its index); None if the row is not part of the set."""


def _single(prompt_id: object, text: str, **reference: Any) -> SetRow:
    """A prompt of one turn."""
    return SetRow(str(prompt_id), [{"role": "user", "content": text}], (), reference)


def _gsm8k(row: dict[str, Any], place: int) -> SetRow:
    answer = row["answer"].split("####")[-1].strip()
    text = apply_format(FORMATS["boxed"], row["question"])
    return _single(place, text, kind="number", answer=answer)


def _math500(row: dict[str, Any], place: int) -> SetRow:
    text = apply_format(FORMATS["boxed"], row["problem"])
    return _single(row.get("unique_id", place), text, kind="math", answer=str(row["answer"]))


def _aime25(row: dict[str, Any], place: int) -> SetRow:
    text = row.get("prompt") or row["problem"]
    asked = text if "\\boxed" in text else apply_format(FORMATS["boxed"], text)
    return _single(place, asked, kind="number", answer=str(row["answer"]))


def _humaneval(row: dict[str, Any], _: int) -> SetRow:
    text = apply_format(FORMATS["code"], row["prompt"])
    parts = {name: row[name] for name in ("prompt", "test", "entry_point")}
    return _single(row["task_id"], text, kind="humaneval", **parts)


def _mbpp(row: dict[str, Any], _: int) -> SetRow | None:
    if int(row["task_id"]) not in MBPP_TEST:
        return None
    tests = list(row["test_list"])
    text = MBPP_FORMAT.format(text=row.get("text") or row["prompt"], tests="\n".join(tests))
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    return _single(row["task_id"], text, kind="mbpp", tests=tests, setup=setup)


def _turns(row: dict[str, Any], place: int) -> SetRow:
    first, *later = row.get("turns") or row["prompt"]
    prompt_id = row.get("question_id") or row.get("prompt_id") or place
    return _single(prompt_id, first)._replace(later=tuple(later), reference=None)


def _own(row: dict[str, Any], place: int) -> SetRow:
    messages, later, not_read = read_conversation(row)
    prompt_id = str(row.get("id") or row.get("prompt_id") or place)
    return SetRow(prompt_id, messages, later, not_read=not_read)


def _mini(row: dict[str, Any], place: int) -> SetRow | None:
    asked = SETS[row["like"]].read(row, place)
    return asked and asked._replace(prompt_id=f"{row['like']}-{asked.prompt_id}")


class SetSpec(NamedTuple):
    """Description of how to read a prompt set."""

    title: str
    read: SetReader
    files: tuple[str, ...]
    """Paths to try in a directory of data."""


SETS: dict[str, SetSpec] = {
    "gsm8k": SetSpec("GSM8K test", _gsm8k, ("gsm8k/test.jsonl", "gsm8k.jsonl")),
    "math500": SetSpec("MATH-500", _math500, ("math500/test.jsonl", "math500.jsonl")),
    "aime25": SetSpec("AIME 2025", _aime25, ("aime25/aime25.jsonl", "aime25.jsonl")),
    "humaneval": SetSpec(
        "HumanEval",
        _humaneval,
        ("humaneval/HumanEval.jsonl.gz", "HumanEval.jsonl.gz", "humaneval.jsonl"),
    ),
    "mbpp": SetSpec("MBPP, tasks 11 to 510", _mbpp, ("mbpp/mbpp.jsonl", "mbpp.jsonl")),
    "livecodebench": SetSpec(
        "LiveCodeBench v6, prompts",
        _turns,
        ("livecodebench/livecodebench_release_v6_prompts.jsonl", "livecodebench.jsonl"),
    ),
    "mt_bench": SetSpec(
        "MT-Bench, two turns", _turns, ("mt_bench/question.jsonl", "mt_bench.jsonl")
    ),
    MINI: SetSpec("mini, self-written", _mini, ()),
}


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order in which they are answered."""

    name: str
    title: str
    sha256: str
    """Hash of the file, or of the rows of a data set."""
    available: int
    """Prompts in the whole set; `prompts` may be fewer."""
    prompts: tuple[BenchPrompt, ...] = field(repr=False)
    left_out: LeftOut = field(default_factory=LeftOut, repr=False)
    """Rows of your own prompts without a usable one."""


def read_set(
    spec: str, data: Path | None = None, *, limit: int | None = None, seed: int = 0
) -> PromptSet:
    """Read a set by name (from the directory `data`), NAME=SOURCE, or a file of your own prompts.

    SOURCE and the file: see `d3d.train.prompt_rows.read_rows`. `limit` prompts are drawn by `seed`;
    a larger limit begins with the same ones. Raises InvalidRequest for a set that is missing, has
    no prompts, or has rows of another kind."""
    name, _, source = spec.partition("=")
    if name in SETS:
        rows, known = _rows_of(name, source, data), SETS[name]
    elif source or (Path(spec).suffix == "" and "/" not in spec):
        raise InvalidRequest(
            f"set {name!r}: there is no set of this name; there are {', '.join(SETS)}, "
            "or give a file of your own prompts"
        )
    else:
        rows = read_rows(spec)
        name, known = rows.name, SetSpec(rows.name, _own, ())
        if name in SETS:
            raise InvalidRequest(
                f"{spec}: own prompts can't be called {name}, a set's name; "
                f"write {name}={spec}, or rename the file"
            )
    left_out = LeftOut()
    prompts = list(_prompts(name, known.read, rows, left_out))
    if not prompts:
        raise InvalidRequest("; ".join([f"{rows.spec}: it holds no prompt", *left_out.lines()[:1]]))
    order = list(range(len(prompts)))
    if limit is not None:
        random.Random(f"{seed} {name}").shuffle(order)
    return PromptSet(
        name,
        known.title,
        rows.sha256,
        len(prompts),
        tuple(prompts[place] for place in order[:limit]),
        left_out,
    )


def _rows_of(name: str, source: str, data: Path | None) -> PromptRows:
    if source:
        return read_rows(source)
    if name == MINI:
        with resources.as_file(
            resources.files("d3d").joinpath("assets/mini_prompts.jsonl")
        ) as path:
            return read_rows(str(path))
    if data is None:
        raise InvalidRequest(
            f"set {name}: say where it is, with --data DIRECTORY or as {name}=FILE "
            "(the set `mini` needs no files)"
        )
    for file in SETS[name].files:
        if (data / file).is_file():
            return read_rows(str(data / file))
    raise InvalidRequest(
        f"set {name}: {data} holds none of {', '.join(SETS[name].files)}; "
        f"give its file as {name}=FILE"
    )


def _prompts(name: str, read: SetReader, rows: PromptRows, left_out: LeftOut) -> list[BenchPrompt]:
    prompts: dict[str, BenchPrompt] = {}
    for place, (where, row) in enumerate(rows.rows):
        try:
            asked = read(row, place)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InvalidRequest(
                f"{where}: not a row of {name} ({type(error).__name__}: {error}); "
                "give the set's own file"
            ) from error
        except InvalidRequest as error:
            left_out.add(str(error), where)
            continue
        if asked is None:
            continue
        left_out.add_fields(asked.not_read)
        if asked.prompt_id in prompts:
            raise InvalidRequest(
                f"{where}: there are two prompts {asked.prompt_id!r} in {name}; "
                "give each an id of its own"
            )
        prompts[asked.prompt_id] = BenchPrompt(
            name, asked.prompt_id, tuple(asked.messages), asked.later, asked.reference, where
        )
    return list(prompts.values())
