"""The script that compares miss policies, on a tiny model: its rounds are those of the replay, and
its arithmetic that of the model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import d3d
import miss_policies as script
from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.train.corpus import Sample
from d3d.train.replay import replay_outcomes
from support.tiny_model import write_tiny_drafter

LENGTH, BUDGETS = 4, (1, 8)


@pytest.fixture(scope="module")
def preparer(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> PackedDrafter:
    path = write_tiny_drafter(
        tmp_path_factory.mktemp("misses") / "drafter", tiny_target, previous_token_width=8
    )
    model = d3d.load(str(tiny_target), path, device="cpu", dtype="float32")
    assert model.parts.drafter is not None
    return PackedDrafter(model.parts.drafter, model.parts.target.vocab_size)


@pytest.fixture(scope="module")
def samples(tiny_target: Path) -> list[Sample]:
    model = d3d.load(str(tiny_target), device="cpu", dtype="float32")
    prompts = [model.encode(text) for text in ("the cat sat", "how much is two and two?")]
    return [
        Sample(
            ids, list(model.generate(ids, max_tokens=40, ignore_eos=True).token_ids), "own", 0.0, 0
        )
        for ids in prompts
    ]


@pytest.fixture(scope="module")
def answers(preparer: PackedDrafter, samples: list[Sample]) -> list[Any]:
    most = max(BUDGETS)
    return [script.Answer(preparer.open(most), one, LENGTH, most) for one in samples]


def test_rounds_of_draft_now_are_those_of_the_replay(
    answers: list[Any], preparer: PackedDrafter, samples: list[Sample]
) -> None:
    acceptance, hits = replay_outcomes(preparer, samples, LENGTH, budgets=BUDGETS)
    found = script.report(answers, LENGTH, BUDGETS, None)
    for budget in BUDGETS:
        rounds, misses = found[str(budget)]["rounds"]["draft_now"], found[str(budget)]["misses"]
        assert rounds["tokens_a_round"] == pytest.approx(acceptance.acceptance_length, abs=1e-3)
        assert misses["wanted"] == sum(hits.wanted)
        assert misses["wanted"] - misses["missed"] == sum(hits.hits[budget])
        assert misses["same num_accepted"] > 0, "there is something to reuse"


def test_every_policy_commits_the_whole_answer(answers: list[Any]) -> None:
    for policy, budget in itertools.product(script.POLICIES, BUDGETS):
        for answer in answers:
            assert (
                sum(one.num_committed for one in script.walk(answer, policy, budget))
                == len(answer.sample.answer_ids) - 1
            )
    came = {one.came for answer in answers for one in script.walk(answer, "reuse", 8)}
    assert "reused" in came
    assert {one.came for one in script.walk(answers[0], "bonus_only", 1)} <= {
        "hit",
        "fresh",
        "none",
    }


def test_a_draft_that_is_chosen_again_behind_the_same_token_is_the_same(answers: list[Any]) -> None:
    """And a successor of the true outcome is the fresh draft."""
    answer = answers[0]
    fresh, _, _ = answer.fresh(answer.first)
    kept = answer.kept(answer.first, fresh.token_ids)
    behind = answer.first + kept + 1
    true = script.Outcome(kept, answer.sample.token_ids[behind])
    prepared, rechosen = answer.reused(answer.first, fresh.token_ids, true)
    assert prepared.token_ids == rechosen.token_ids == answer.fresh(behind)[0].token_ids


def test_times_are_those_on_paper() -> None:
    passes = script.Given(one=1.0, several=2.0, drafting=0.5, packing={1: 2.5})
    rounds = [
        script.Round("fresh", 4, 3, 10),
        script.Round("hit", 4, 2, 13),
        script.Round("none", 0, 1, 15),
        script.Round("reused", 4, 2, 16),
    ]

    def seconds(*, listed_afresh: bool) -> float:
        return float(script.seconds_a_token([rounds], passes, 1, 4, listed_afresh=listed_afresh))

    # a draft and a verification; the hit and the round without a draft wait for the packed pass
    # before them, the reused one for a draft too
    assert seconds(listed_afresh=False) * 8 == pytest.approx(0.5 + 2.5 + 2.5 + 3.0 + 2.0)
    assert seconds(listed_afresh=True) == seconds(listed_afresh=False), (
        "what the last round prepares is wanted by nobody"
    )
    rounds.append(script.Round("hit", 4, 2, 18))
    assert seconds(listed_afresh=False) * 10 == pytest.approx(10.5 - 2.0 + 2.5 + 2.0)
    assert seconds(listed_afresh=True) * 10 == pytest.approx(10.5 - 2.0 + 3.0 + 2.0), (
        "the worker drafts before it prepares"
    )


def test_the_command_prints_its_record(
    tiny_target: Path,
    tiny_drafter: Path,
    samples: list[Sample],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    rows = [{key: value for key, value in one._asdict().items() if key != "top"} for one in samples]
    lines = [{"target": "tiny", "target_fingerprint": "x", "tokenizer": "y"}, *rows]
    corpus.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fixed = (
        str(tiny_target),
        str(corpus),
        "--drafter",
        str(tiny_drafter),
        "--dtype",
        "float32",
        "--draft-length",
        "3",
        "--limit",
        "1",
    )
    script.main([*fixed, "--budgets", "1", "--passes-ms", "1", "2", "3", "4"])
    record = json.loads(capsys.readouterr().out)
    assert record["settings"]["answers"] == 1
    assert record["budgets"]["1"]["time_a_token"]["as measured, ms"].keys() == set(script.POLICIES)
    with pytest.raises(SystemExit):
        script.main([*fixed, "--budgets", "1", "--passes-ms", "1"])
    assert "give 4 numbers" in capsys.readouterr().err
