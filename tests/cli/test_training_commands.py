"""`d3d data | train | evaluate`, and `d3d generate` with what came of it, on a tiny model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from d3d.cli import console
from d3d.cli.interrupt import deferred_interrupt
from d3d.hub.checkpoint import save_drafter
from d3d.train import prompts as prompts_module
from d3d.train.corpus import read_corpus
from d3d.train.evaluation_sets import EvaluationSets, fingerprint
from support.command import Outcome, d3d
from support.tiny_model import open_tiny, random_drafter, tiny_tokenizer, write_tiny_target

CONFIG = """
drafter: {block_size: 4, delta: {rank: 4}}
train: {steps: %d, warmup: 2, answers_per_step: 1,
  stages: [{share: 1.0, block_size: 4, anchors: 6, decay: 4.0}]}
evaluate_every: 2
evaluate_draft_length: 4
"""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(
            json.dumps({"question": f"how much is {number} and two?"}) + "\n" for number in range(8)
        )
    )
    return path


def data(target: Path, corpus: Path, prompts: Path, *more: object) -> Outcome:
    given = [str(argument) for argument in more]
    length = () if "--max-tokens" in given else ("--max-tokens", "16")
    return d3d(
        "data",
        corpus,
        "--prompts",
        prompts,
        "--target",
        target,
        "--dtype",
        "float32",
        "--device",
        "cpu",
        *length,
        *given,
    )


@pytest.fixture
def corpora(tiny_target: Path, prompts: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A training corpus and a held-out one."""
    held_out = tmp_path / "held_prompts.jsonl"
    held_out.write_text('{"question": "hello there"}\n{"question": "who are you?"}\n')
    for corpus, source in (("train.jsonl", prompts), ("held.jsonl", held_out)):
        assert data(tiny_target, tmp_path / corpus, source).code == 0
    return tmp_path / "train.jsonl", tmp_path / "held.jsonl"


def config(directory: Path, steps: int = 4) -> Path:
    (directory / "train.yaml").write_text(CONFIG % steps)
    return directory / "train.yaml"


def train(target: Path, corpora: tuple[Path, Path], output: Path, *more: object) -> Outcome:
    given = ("--held-out", corpora[1], "--target", target, "--dtype", "float32", "--device", "cpu")
    return d3d("train", corpora[0], output, *given, *more)


def test_the_whole_chain(tiny_target: Path, corpora: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "run"
    trained = train(tiny_target, corpora, output, "--config", config(tmp_path))
    assert trained.code == 0, trained.err
    assert trained.out == f"{output / 'best'}\n"
    assert "step 4 of 4" in trained.err
    measured = d3d(
        "evaluate",
        output / "best",
        corpora[1],
        "--target",
        tiny_target,
        "--dtype",
        "float32",
        "--device",
        "cpu",
    )
    assert measured.code == 0, measured.err
    record = measured.record
    assert record.keys() == {
        "mode",
        "answers",
        "draft_length",
        "rounds",
        "acceptance_length",
        "acceptance_length_macro",
        "acceptance_at",
        "num_accepted_histogram",
        "bonus_recall",
        "by_source",
        "by_temperature",
    }
    assert sum(record["num_accepted_histogram"]) == record["rounds"]
    provenance = json.loads((output / "best" / "provenance.json").read_text())
    assert record["acceptance_length"] == pytest.approx(
        provenance["measured"]["acceptance_length"], abs=0.3
    ), "int8 storage"
    fused = d3d(
        "evaluate",
        output / "best",
        corpora[1],
        "--target",
        tiny_target,
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--mode",
        "fused",
    ).record
    assert fused.keys() == record.keys() - {"bonus_recall"} | {"is_upper_bound"}
    assert fused["draft_length"] == record["draft_length"] - 1
    assert 1 <= fused["acceptance_length"] < record["acceptance_length"], (
        "in serial mode the anchor's own row always drafts a right token"
    )
    replayed = d3d(
        "evaluate",
        output / "best",
        corpora[1],
        "--target",
        tiny_target,
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--mode",
        "async",
    )
    prepared = replayed.record
    assert prepared.keys() == fused.keys() - {"is_upper_bound"} | {
        "guess_from",
        "rounds_wanting",
        "hit_rate",
        "hit_rate_at",
    }
    assert (prepared["draft_length"], prepared["guess_from"]) == (4, "block")
    assert prepared["acceptance_length"] == record["acceptance_length"]
    assert sum(prepared["rounds_wanting"]) == prepared["rounds"] - prepared["answers"]
    assert (
        list(prepared["hit_rate"])
        == list(prepared["hit_rate_at"])
        == ["1", "2", "4", "8", "16", "32", "64"]
    )
    assert prepared["by_temperature"]["0"]["hit_rate"] == prepared["hit_rate"]
    assert "Hit rate" in replayed.err
    answers = {}
    for mode, drafter in (("plain", ()), ("serial", ("--drafter", output / "best"))):
        given = (
            "--prompt",
            "hello",
            "--target",
            tiny_target,
            "--dtype",
            "float32",
            "--max-tokens",
            24,
            "--mode",
            mode,
            "--json",
        )
        answers[mode] = d3d("generate", *given, *drafter).record
    assert answers["serial"]["token_ids"] == answers["plain"]["token_ids"]
    assert answers["serial"]["speculation"]["acceptance_length"] > 1


# d3d data


def test_data_goes_on_without_repeats(tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    corpus, whole = tmp_path / "corpus.jsonl", tmp_path / "whole.jsonl"
    sampled = ("--temperature", 0.9, "--batch", 3)
    first = data(tiny_target, corpus, prompts, "--limit", 3, *sampled)
    assert first.out.startswith(f"{corpus}: 3 answers, 3 of them new")
    with corpus.open("a") as file:
        file.write('{"prompt_ids": [1,')  # killed
    assert data(tiny_target, corpus, prompts, *sampled).out.startswith(
        f"{corpus}: 8 answers, 5 of them new"
    )
    assert data(tiny_target, corpus, prompts, *sampled).out.startswith(
        f"{corpus}: 8 answers, 0 of them new"
    )
    data(tiny_target, whole, prompts, *sampled)
    assert sorted(read_corpus(corpus)) == sorted(read_corpus(whole))
    assert len({sample.seed for sample in read_corpus(whole)}) == 8


def test_the_same_prompts_may_be_answered_at_another_temperature(
    tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    data(tiny_target, corpus, prompts)
    assert (
        "16 answers, 8 of them new" in data(tiny_target, corpus, prompts, "--temperature", 0.7).out
    )
    assert sorted({sample.temperature for sample in read_corpus(corpus)}) == [0.0, 0.7]


def test_flags_of_data(tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    barred = tmp_path / "barred.jsonl"
    barred.write_text('{"prompt": "how much is 3 and two?"}\n')
    corpus = tmp_path / "corpus.jsonl"
    outcome = data(
        tiny_target,
        corpus,
        prompts,
        "--exclude",
        barred,
        "--suffix",
        " Think.",
        "--max-tokens",
        5,
        "--seed",
        2,
        "--limit",
        7,
    )
    assert outcome.code == 0, outcome.err
    samples = read_corpus(corpus)
    assert len(samples) == 7
    assert max(len(sample.answer_ids) for sample in samples) == 5
    texts = [tiny_tokenizer().decode(sample.prompt_ids) for sample in samples]
    assert all(" Think.<|im_end|>" in text for text in texts)
    assert not any("is 3 and" in text for text in texts)
    told = manifest(corpus)
    (run,) = told["runs"]
    assert (told["answers"], run["answers"], run["drawn"], run["complete"], run["dtype"]) == (
        7,
        7,
        7,
        True,
        "float32",
    )
    assert run["prompts"] == [
        {
            "from": str(prompts),
            "sha256": hashlib.sha256(prompts.read_bytes()).hexdigest(),
            "rows": 8,
        }
    ]
    assert run["left_out"] == [{"reason": "excluded", "rows": 1, "first": f"{prompts}, line 4"}]
    assert run["exclude"] == [str(barred)]
    assert run["options"] == {
        "limit": 7,
        "suffix": " Think.",
        "suffix_share": 1.0,
        "thinking": None,
        "seed": 2,
        "evaluation_prompts": "refuse",
        "max_tokens": 5,
        "temperatures": [0.0],
        "batch": 48,
        "top_logits": 0,
    }
    assert run["evaluation_sets"]["found"] == {}
    assert "GSM8K test" in run["evaluation_sets"]["looked_for"]


def manifest(corpus: Path) -> dict[str, Any]:
    file = (
        corpus / "manifest.json"
        if corpus.is_dir()
        else corpus.with_name(f"{corpus.stem}.manifest.json")
    )
    content: dict[str, Any] = json.loads(file.read_text())
    return content


def test_several_temperatures_and_a_share_with_a_suffix(
    tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    more = ("--temperature", 0, "--temperature", 0.8, "--suffix", "boxed", "--suffix-share", 0.5)
    assert data(tiny_target, corpus, prompts, *more).out.startswith(
        f"{corpus}: 16 answers, 16 of them new"
    )
    samples = read_corpus(corpus)
    assert sorted(sample.temperature for sample in samples) == [0.0] * 8 + [0.8] * 8
    texts = [tiny_tokenizer().decode(sample.prompt_ids) for sample in samples]
    assert 0 < sum("boxed{}." in text for text in texts) < 16
    assert manifest(corpus)["temperatures"] == {"0": 8, "0.8": 8}


def test_a_directory_of_shards_is_trained_on_and_measured(
    tiny_target: Path, tiny_drafter: Path, prompts: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    corpus = tmp_path / "shards"
    assert data(tiny_target, corpus, prompts, "--shard-answers", 3, "--limit", 5).out.startswith(
        f"{corpus}: 5 answers"
    )
    assert data(tiny_target, corpus, prompts).out.startswith(f"{corpus}: 8 answers, 3 of them new")
    assert sorted(file.name for file in corpus.glob("*.jsonl")) == [
        f"answers-0000{number}.jsonl" for number in range(3)
    ]
    assert sorted(read_corpus(corpus)) == sorted(read_corpus(corpora[0]))
    given = ("--target", tiny_target, "--dtype", "float32", "--device", "cpu")
    assert d3d("evaluate", tiny_drafter, corpus, *given).record["answers"] == 8
    assert (
        train(
            tiny_target, (corpus, corpora[1]), tmp_path / "run", "--config", config(tmp_path)
        ).code
        == 0
    )
    assert data(tiny_target, corpora[0], prompts, "--shard-answers", 3).is_refusal(
        "leave --shard-answers out"
    )


def test_the_targets_logits_are_kept_for_distillation(
    tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    assert data(tiny_target, corpus, prompts, "--top-logits", 4, "--batch", 3).code == 0
    assert data(tiny_target, corpus, prompts).is_refusal("another --top-logits")
    for sample in read_corpus(corpus):
        found = sample.top_logits()
        assert found is not None
        assert found.log_probs.shape == (len(sample.answer_ids), 4)
        assert found.ids[:, 0].tolist() == sample.answer_ids, "greedy"


def test_the_thinking_switch(tiny_target: Path, prompts: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    outcome = data(tiny_target, corpus, prompts, "--no-thinking")
    assert "warning" not in outcome.err
    assert all(
        tiny_tokenizer().decode(sample.prompt_ids).endswith("<think></think>")
        for sample in read_corpus(corpus)
    )
    assert data(tiny_target, corpus, prompts, "--thinking").is_refusal("another --thinking switch")
    assert data(tiny_target, corpus, prompts).is_refusal("another --thinking switch")
    deaf = write_tiny_target(tmp_path / "deaf")
    (deaf / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    outcome = data(deaf, tmp_path / "deaf.jsonl", prompts, "--thinking")
    assert "does not look at enable_thinking" in outcome.err
    assert data(deaf, tmp_path / "deaf.jsonl", prompts).code == 0, (
        "a switch without effect parts no corpora"
    )


def test_problems_of_evaluation_sets_are_kept_out_of_training(
    tiny_target: Path,
    prompts: Path,
    corpora: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = "how much is 5 and two?"
    monkeypatch.setattr(
        prompts_module, "known_sets", lambda: EvaluationSets({"gsm8k": fingerprint([problem])})
    )
    corpus = tmp_path / "corpus.jsonl"
    assert data(tiny_target, corpus, prompts).is_refusal(
        "prompts.jsonl, line 6", "GSM8K test", "--allow-evaluation-prompts"
    )
    assert not corpus.exists()
    both = data(
        tiny_target, corpus, prompts, "--allow-evaluation-prompts", "--skip-evaluation-prompts"
    )
    assert both.is_refusal("contradict each other")
    assert data(tiny_target, corpus, prompts, "--skip-evaluation-prompts").out.startswith(
        f"{corpus}: 7 answers"
    )
    assert data(tiny_target, corpus, prompts, "--allow-evaluation-prompts").is_refusal(
        "a corpus to train on"
    )
    evaluation = tmp_path / "evaluation.jsonl"
    assert data(tiny_target, evaluation, prompts, "--allow-evaluation-prompts").out.startswith(
        f"{evaluation}: 8 answers"
    )
    assert manifest(evaluation)["runs"][0]["evaluation_sets"]["found"] == {"GSM8K test": 1}
    settings = ("--config", config(tmp_path))
    assert train(tiny_target, (evaluation, corpora[1]), tmp_path / "run", *settings).is_refusal(
        "problems of evaluation sets"
    )
    assert (
        train(
            tiny_target,
            (evaluation, corpora[1]),
            tmp_path / "run",
            *settings,
            "--allow-evaluation-prompts",
        ).code
        == 0
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--suffix-share", 0.5), "give one with --suffix"),
        (("--temperature", 0.5, "--temperature", 0.5), "given twice"),
    ],
)
def test_options_of_data_that_contradict_each_other(
    more: tuple[object, ...], words: str, tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    assert data(tiny_target, tmp_path / "corpus.jsonl", prompts, *more).is_refusal(words)


def test_data_without_the_library_that_reads_parquet(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "p.parquet").write_bytes(b"")
    outcome = data(tiny_target, tmp_path / "corpus.jsonl", tmp_path / "p.parquet")
    assert outcome.is_refusal("pip install 'd3d-decoding[data]'")


def test_rows_and_prompts_that_cannot_be_used_are_reported(
    tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    with prompts.open("a") as file:
        file.write(
            json.dumps({"question": None})
            + "\n"
            + json.dumps({"question": "the cat " * 300})
            + "\n"
        )
    outcome = data(tiny_target, tmp_path / "corpus.jsonl", prompts)
    assert outcome.out.startswith(f"{tmp_path / 'corpus.jsonl'}: 8 answers, 8 of them new")
    assert "left out 1 rows: no text in" in outcome.err
    assert "prompts.jsonl, line 9" in outcome.err
    assert "left out 1 rows: a prompt that leaves no room for an answer" in outcome.err
    assert "prompts.jsonl, line 10" in outcome.err


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "line 1: it is not JSON"), (None, "no such file")],
    ids=["malformed", "missing"],
)
def test_bad_prompts_start_no_corpus(
    content: str | None, words: str, tiny_target: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "p.jsonl").write_text(content)
    assert data(tiny_target, tmp_path / "corpus.jsonl", tmp_path / "p.jsonl").is_refusal(words)
    assert not (tmp_path / "corpus.jsonl").exists()


@pytest.mark.parametrize("temperature", ["20000", "nan"])
def test_an_impossible_temperature_is_refused(
    temperature: str, tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    assert data(
        tiny_target, tmp_path / "corpus.jsonl", prompts, "--temperature", temperature
    ).is_refusal("temperature")


def test_a_corpus_of_another_tokenizer_is_not_continued(
    tiny_target: Path, prompts: Path, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    data(
        write_tiny_target(tmp_path / "other", texts=["quite another text"] * 4),
        corpus,
        prompts,
        "--limit",
        1,
    )
    before = corpus.read_text()
    assert data(tiny_target, corpus, prompts).is_refusal("another tokenizer")
    assert corpus.read_text() == before


# d3d train


def test_training_that_ran_out_of_minutes_goes_on(
    tiny_target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    output, settings = tmp_path / "run", config(tmp_path)
    stopped = train(tiny_target, corpora, output, "--config", settings, "--minutes", 0)
    assert stopped.code == 0
    assert "nothing measured yet" in stopped.out
    assert train(tiny_target, corpora, output, "--config", settings).out == f"{output / 'best'}\n"
    again = train(tiny_target, corpora, output, "--config", settings)
    assert "step 4 of 4" in again.err, "a run that is done is not run again"


def test_another_configuration_in_the_same_directory_is_refused(
    tiny_target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    train(tiny_target, corpora, output, "--config", config(tmp_path))
    assert train(tiny_target, corpora, output, "--config", config(tmp_path, steps=5)).is_refusal(
        "another training configuration"
    )


def test_refusals_of_train(tiny_target: Path, corpora: tuple[Path, Path], tmp_path: Path) -> None:
    missing = train(tiny_target, (tmp_path / "none.jsonl", corpora[1]), tmp_path / "run")
    assert missing.is_refusal("no such corpus")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("trian: {}")
    assert train(tiny_target, corpora, tmp_path / "run", "--config", wrong).is_refusal(
        "trian: there is no such key"
    )
    assert train(tiny_target, (corpora[1], corpora[1]), tmp_path / "run").is_refusal(
        "no sample that can be trained on"
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_the_state_and_exits_with_130(
    number: signal.Signals, tiny_target: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    output = tmp_path / "run"
    given = [
        corpora[0],
        output,
        "--held-out",
        corpora[1],
        "--target",
        tiny_target,
        "--config",
        config(tmp_path, steps=100_000),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "d3d.cli.app", "train", *map(str, given), "--dtype", "float32"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),  # whatever the shell has set for this one
    )
    try:
        deadline = time.monotonic() + 60
        while not (output / "log.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert out == ""
    assert "run the same command to continue" in err
    assert "Traceback" not in err
    step = int(re.search(r"step (\d+) of 100000", err).group(1))  # type: ignore[union-attr]
    import torch

    assert torch.load(output / "state.pt", weights_only=True)["progress"][0] == step > 0


# d3d evaluate


def test_flags_of_evaluate(
    tiny_target: Path, tiny_drafter: Path, corpora: tuple[Path, Path]
) -> None:
    given = (
        "evaluate",
        tiny_drafter,
        corpora[0],
        "--target",
        tiny_target,
        "--dtype",
        "float32",
        "--device",
        "cpu",
    )
    whole = d3d(*given).record
    assert (whole["answers"], whole["draft_length"]) == (8, 6)
    part = d3d(*given, "--limit", 2, "--draft-length", 3).record
    assert (part["answers"], part["draft_length"], len(part["acceptance_at"])) == (2, 3, 3)
    assert part["acceptance_at"][0] > 0.9, "the anchor's row is the target's own"
    assert part["bonus_recall"].keys() == {"1", "4", "16"}
    assert [len(recall) for recall in part["bonus_recall"].values()] == [4, 4, 4]
    assert whole["bonus_recall"]["1"][6] is None, "a whole block has no room for a guess"
    assert whole["by_source"]["prompts"] == whole["by_temperature"]["0"]
    assert whole["by_source"]["prompts"]["acceptance_length"] == whole["acceptance_length"]
    assert whole["by_source"]["prompts"]["acceptance_length_macro"] == pytest.approx(
        whole["acceptance_length_macro"]
    )


def test_sampled_answers_are_measured_by_temperature_and_source(
    tiny_target: Path, tiny_drafter: Path, corpora: tuple[Path, Path], prompts: Path
) -> None:
    other = prompts.with_name("other.jsonl")
    other.write_text('{"prompt": "bye"}\n')
    data(tiny_target, corpora[0], other, "--temperature", 0.9)
    given = ("--target", tiny_target, "--dtype", "float32", "--device", "cpu")
    record = d3d("evaluate", tiny_drafter, corpora[0], *given).record
    assert record["by_source"].keys() == {"prompts", "other"}
    assert record["by_temperature"].keys() == {"0", "0.9"}
    assert record["by_temperature"]["0.9"] == record["by_source"]["other"]
    assert sum(part["rounds"] for part in record["by_source"].values()) == record["rounds"]


def test_answers_of_another_model_are_measured_with_a_warning(
    tiny_target: Path, tiny_drafter: Path, prompts: Path, tmp_path: Path
) -> None:
    data(write_tiny_target(tmp_path / "other", seed=5), tmp_path / "corpus.jsonl", prompts)
    outcome = d3d(
        "evaluate",
        tiny_drafter,
        tmp_path / "corpus.jsonl",
        "--target",
        tiny_target,
        "--dtype",
        "float32",
    )
    assert outcome.code == 0
    assert "written by another model" in outcome.err


def test_refusals_of_evaluate(
    tiny_target: Path, tiny_drafter: Path, corpora: tuple[Path, Path], tmp_path: Path
) -> None:
    given = ("--target", tiny_target, "--dtype", "float32")
    assert d3d("evaluate", tiny_drafter, corpora[0], *given, "--draft-length", 7).is_refusal(
        "draft_length: 7", "can draft, 6"
    )
    assert d3d("evaluate", tmp_path / "none", corpora[0], *given).is_refusal("no drafter")
    assert d3d("evaluate", tiny_target, corpora[0], *given).is_refusal(
        "not a d3d drafter but a plain llama model"
    )
    assert d3d("evaluate", tiny_drafter, corpora[0], *given, "--mode", "plain").is_refusal(
        "method: 'plain'", "serial, fused, async"
    )
    assert d3d("evaluate", tiny_drafter, corpora[0], *given, "--guess-from", "block").is_refusal(
        "--guess-from", "mode async"
    )
    guessing = ("--mode", "async", "--guess-from", "tea leaves")
    assert d3d("evaluate", tiny_drafter, corpora[0], *given, *guessing).is_refusal(
        "tea leaves", "block, clean_rows"
    )
    base = open_tiny(tiny_target)
    save_drafter(tmp_path / "pruned", random_drafter(base, kept_layers=(0,)), base)
    assert d3d("evaluate", tmp_path / "pruned", corpora[0], *given, "--mode", "fused").is_refusal(
        "the target itself"
    )
    empty = tmp_path / "empty.jsonl"
    empty.write_text(corpora[0].read_text().splitlines()[0] + "\n")
    assert d3d("evaluate", tiny_drafter, empty, *given).is_refusal("nothing can be measured")


# Progress and interruption


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = console.Log(10, every_s=0.05)
    log.show(1, "early")
    time.sleep(0.06)
    log.show(2, "later [x]")
    log.show(3, "too soon")
    log.show(10, "done")
    assert capsys.readouterr().err == "2/10 later [x]\n10/10 done\n"
    with console.meter(1) as meter:
        assert isinstance(meter, console.Log), "standard error is no terminal here"


def test_the_first_ctrl_c_asks_and_the_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), deferred_interrupt() as asked:  # noqa: PT012
        assert not asked()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert asked()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is before
