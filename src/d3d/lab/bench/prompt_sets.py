"""What the methods are asked: seven public sets with their usual templates, a small set of our own,
and anybody's prompts.

None of the public sets is in this package: they are read from files that you have, or from the hub.
`mini` is self-written, of the same kinds, and comes along. Templates: GSM8K, MATH-500, HumanEval
and MT-Bench as in DFlash's benchmark (z-lab/dflash, dflash/benchmark.py); MBPP as in its paper
(Austin et al., arXiv 2108.07732), which shows the tests, since without them nobody can know the
function's name; AIME and LiveCodeBench as their files have them."""

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

Message = dict[str, str]
MINI = "mini"
MBPP_TEST = range(11, 511)
MBPP_FORMAT = "You are an expert Python programmer, and here is your task: {text} Your code should pass these tests:\n\n{tests}"


@dataclass(frozen=True)
class Prompt:
    """One thing to ask; `later` are the user's next turns, each asked once the turn before is
    answered."""

    set_name: str
    prompt_id: str
    messages: tuple[Message, ...]
    later: tuple[str, ...] = ()
    reference: dict[str, Any] | None = None
    """What `d3d.lab.bench.scorers` needs to score an answer; None where it can't be scored."""

    @property
    def num_turns(self) -> int:
        return 1 + len(self.later)

    def conversation(self, answers: Sequence[str]) -> list[Message]:
        """Messages of the turn that follows these answers."""
        messages = list(self.messages)
        for answer, said in zip(answers, self.later, strict=False):
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": said},
            ]
        return messages


class Asked(NamedTuple):
    """What a set's reader makes of a row."""

    prompt_id: str
    messages: list[Message]
    later: tuple[str, ...] = ()
    reference: dict[str, Any] | None = None


Reader = Callable[[dict[str, Any], int], "Asked | None"]
"""(row, its place from 0) -> what it asks, or None where it is no part of the set."""


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _gsm8k(row: dict[str, Any], place: int) -> Asked:
    reference = {"kind": "number", "answer": row["answer"].split("####")[-1].strip()}
    return Asked(
        str(place), _user(apply_format(FORMATS["boxed"], row["question"])), reference=reference
    )


def _math500(row: dict[str, Any], place: int) -> Asked:
    reference = {"kind": "math", "answer": str(row["answer"])}
    return Asked(
        str(row.get("unique_id", place)),
        _user(apply_format(FORMATS["boxed"], row["problem"])),
        reference=reference,
    )


def _aime25(row: dict[str, Any], place: int) -> Asked:
    text = row.get("prompt") or row["problem"]
    asked = text if "\\boxed" in text else apply_format(FORMATS["boxed"], text)
    return Asked(
        str(place), _user(asked), reference={"kind": "number", "answer": str(row["answer"])}
    )


def _humaneval(row: dict[str, Any], place: int) -> Asked:  # noqa: ARG001 - its rows name themselves
    reference = {"kind": "humaneval"} | {
        name: row[name] for name in ("prompt", "test", "entry_point")
    }
    return Asked(
        row["task_id"], _user(apply_format(FORMATS["code"], row["prompt"])), reference=reference
    )


def _mbpp(row: dict[str, Any], place: int) -> Asked | None:  # noqa: ARG001 - its rows name themselves
    if int(row["task_id"]) not in MBPP_TEST:
        return None
    text = MBPP_FORMAT.format(
        text=row.get("text") or row["prompt"], tests="\n".join(row["test_list"])
    )
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or ())
    return Asked(
        str(row["task_id"]),
        _user(text),
        reference={"kind": "mbpp", "tests": list(row["test_list"]), "setup": setup},
    )


def _turns(row: dict[str, Any], place: int) -> Asked:
    turns = row.get("turns") or row["prompt"]
    return Asked(
        str(row.get("question_id") or row.get("prompt_id") or place),
        _user(turns[0]),
        tuple(turns[1:]),
    )


def _own(row: dict[str, Any], place: int) -> Asked:
    messages, later = read_conversation(row)
    return Asked(str(row.get("id") or row.get("prompt_id") or place), messages, later)


def _mini(row: dict[str, Any], place: int) -> Asked | None:
    asked = SETS[row["like"]].read(row, place)
    return asked and asked._replace(prompt_id=f"{row['like']}-{asked.prompt_id}")


class SetSpec(NamedTuple):
    """A set that this module can read."""

    title: str
    read: Reader
    files: tuple[str, ...]
    """Where it may lie in a directory of data."""


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
    """Prompts to ask, in the order in which they are asked."""

    name: str
    title: str
    sha256: str
    """Of the file, or of the rows of a data set: which version of the set this was."""
    available: int
    """Prompts that the set has; `prompts` may be a part of them."""
    prompts: tuple[Prompt, ...] = field(repr=False)


def read_set(
    spec: str, data: Path | None = None, *, limit: int | None = None, seed: int = 0
) -> PromptSet:
    """A set by its name (found in the directory `data`), NAME=SOURCE, or a file of one's own
    prompts.

    SOURCE and the file are what `d3d.train.prompt_rows.read_rows` reads: JSON lines, .json,
    .parquet, a directory, or a data set of the hub. `limit` prompts are drawn by `seed`; a larger
    limit begins with the same ones. Raises InvalidRequest for a set that is not there, has no
    prompts, or whose rows are of another kind."""
    name, _, source = spec.partition("=")
    if name in SETS:
        rows, known = _rows_of(name, source, data), SETS[name]
    elif source or (Path(spec).suffix == "" and "/" not in spec):
        raise InvalidRequest(
            f"set {name!r}: there is none of this name; there are {', '.join(SETS)}, or give a file of your own prompts"
        )
    else:
        rows = read_rows(spec)
        name, known = rows.name, SetSpec(rows.name, _own, ())
        if name in SETS:
            raise InvalidRequest(
                f"{spec}: own prompts can't be called {name}, a set's name; write {name}={spec}, or rename the file"
            )
    prompts = list(_prompts(name, known.read, rows))
    if not prompts:
        raise InvalidRequest(f"{rows.spec}: it holds no prompt")
    order = list(range(len(prompts)))
    if limit is not None:
        random.Random(f"{seed} {name}").shuffle(order)
    return PromptSet(
        name,
        known.title,
        rows.sha256,
        len(prompts),
        tuple(prompts[place] for place in order[:limit]),
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
            f"set {name}: say where it is, with --data DIRECTORY or as {name}=FILE (the set `mini` needs no files)"
        )
    for file in SETS[name].files:
        if (data / file).is_file():
            return read_rows(str(data / file))
    raise InvalidRequest(
        f"set {name}: {data} holds none of {', '.join(SETS[name].files)}; give its file as {name}=FILE"
    )


def _prompts(name: str, read: Reader, rows: PromptRows) -> list[Prompt]:
    prompts: dict[str, Prompt] = {}
    for place, (where, row) in enumerate(rows.rows):
        try:
            asked = read(row, place)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InvalidRequest(
                f"{where}: not a row of {name} ({type(error).__name__}: {error}); give the set's own file"
            ) from error
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error}") from error
        if asked is None:
            continue
        if asked.prompt_id in prompts:
            raise InvalidRequest(
                f"{where}: there are two prompts {asked.prompt_id!r} in {name}; give each an id of its own"
            )
        prompts[asked.prompt_id] = Prompt(
            name, asked.prompt_id, tuple(asked.messages), asked.later, asked.reference
        )
    return list(prompts.values())
