"""The search with measurements of a formula: it finds what is fast, repeats itself by its seed, and
goes on where it stopped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from d3d.errors import InvalidRequest, MissingExtra, WorkerFailed
from d3d.lab.tune.measure import CaseResult
from d3d.lab.tune.search import Search
from d3d.lab.tune.setups import OWN, SPARED_NOTHING, DrafterFacts, Setup, Space, starting_points
from support.tuning import SPACE, Formula, journal, plan


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test pulls the plug, and each write to the journal waits for the disk."""
    monkeypatch.setattr("os.fsync", lambda _file: None)


def quiet(_done: int, _text: str) -> None:
    pass


def never() -> bool:
    return False


def stopping_after(count: int) -> Callable[[], bool]:
    asked = iter(range(10**6))
    return lambda: next(asked) >= count


def test_it_finds_what_is_fast(tmp_path: Path) -> None:
    found = []
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        search = Search(journal(tmp_path / str(seed)), plan(60, seed=seed))
        assert search.run(Formula(), quiet, never)
        best = search.best()
        setup = best[0].setup
        assert (setup.mode, setup.threads, setup.given.get("num_denoise_steps")) == ("serial", 4, 1)
        assert best[0].score == pytest.approx(Formula().ms_per_token(setup) / 15), (
            "of plain decoding with two threads"
        )
        assert [trial.score for trial in best] == sorted(trial.score for trial in best)
        assert best[0].score < 0.8 * Formula().ms_per_token(search.default) / 15
        found.append((setup.given.get("draft_length") or 0, best[0].score))
    length, score = min(found, key=lambda one: one[1])
    assert 5 <= length <= 7
    assert score < 0.37, "the best there is has 0.333"


def test_trials_of_before_lookup_and_pauses_could_be_chosen_count_as_without(
    tmp_path: Path,
) -> None:
    search = Search(journal(tmp_path), plan(6))
    assert search.run(Formula(), quiet, never)
    text = (tmp_path / "search.log").read_text()
    lines = [
        line
        for line in text.splitlines()
        if json.loads(line).get("param_name") not in SPARED_NOTHING
    ]
    assert len(lines) < len(text.splitlines())
    (tmp_path / "search.log").write_text("".join(line + "\n" for line in lines))
    again = Search(journal(tmp_path), plan(6)).best()
    assert again
    assert all(
        trial.setup.given.get("lookup") is None and trial.setup.given.get("least_kept") is None
        for trial in again
    )


def test_it_begins_with_what_is_done_by_default(tmp_path: Path) -> None:
    formula = Formula()
    search = Search(journal(tmp_path), plan(len(starting_points(SPACE, 2))))
    search.run(formula, quiet, never)
    assert search.default == Setup(search.default.config, OWN, 2)
    assert search.default.given == {"draft_length": 5, "num_denoise_steps": 1}
    own = list(dict.fromkeys(key for key, _ in formula.asked if "plain" not in key))
    assert own[0] == search.default.key
    assert '"draft_confidence"' in own[1]
    assert {mode for mode in ("serial", "fused", "async") if any(mode in key for key in own)} == {
        "serial",
        "fused",
        "async",
    }


def test_every_setup_is_compared_with_plain_decoding_of_the_same_prompt(tmp_path: Path) -> None:
    formula = Formula()
    Search(journal(tmp_path), plan(5)).run(formula, quiet, never)
    pairs = list(zip(formula.asked[::2], formula.asked[1::2], strict=True))
    assert all(one[1] == other[1] for one, other in pairs)
    assert all(sum("plain" in key for key, _ in pair) == 1 for pair in pairs)
    assert {"plain" in pair[0][0] for pair in pairs} == {True, False}, "neither is always first"


def test_hopeless_setups_are_given_up_early(tmp_path: Path) -> None:
    formula, told = Formula(), []
    Search(journal(tmp_path), plan(40)).run(formula, lambda _, text: told.append(text), never)
    given_up = [text for text in told if "given up" in text]
    assert 5 < len(given_up) < 35
    assert len(formula.asked) < 40 * 3 * 2 * 0.85


@pytest.mark.parametrize("seed", [0, 7])
def test_the_same_seed_makes_the_same_choices(seed: int, tmp_path: Path) -> None:
    asked = []
    for name in ("one", "other"):
        formula = Formula()
        Search(tmp_path / name, plan(25, seed)).run(formula, quiet, never)
        asked.append(formula.asked)
    assert asked[0] == asked[1]
    formula = Formula()
    Search(tmp_path / "another seed", plan(25, seed + 1)).run(formula, quiet, never)
    assert formula.asked != asked[0]


@pytest.mark.parametrize("stop_after", [0, 1, 9, 40])
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(
    stop_after: int, tmp_path: Path
) -> None:
    whole = Search(tmp_path / "whole", plan(25))
    whole.run(Formula(), quiet, never)
    first = Search(tmp_path / "parts", plan(25))
    assert not first.run(Formula(), quiet, stopping_after(stop_after))
    formula = Formula()
    second = Search(tmp_path / "parts", plan(25))
    done = second.num_done
    assert second.run(formula, quiet, never)
    assert second.best() == whole.best()
    assert (done == 0) == (stop_after < 4)
    assert not second.run(Formula(), quiet, stopping_after(0)) or second.num_done == 25


def test_a_kill_in_the_middle_of_a_measurement_costs_that_setup_only(tmp_path: Path) -> None:
    whole = Search(tmp_path / "whole", plan(15))
    whole.run(Formula(), quiet, never)

    class Killed(Formula):
        def __call__(self, setup: Setup, case: int) -> CaseResult:
            if len(self.asked) == 21:
                raise KeyboardInterrupt
            return super().__call__(setup, case)

    with pytest.raises(KeyboardInterrupt):
        Search(tmp_path / "parts", plan(15)).run(Killed(), quiet, never)
    again = Search(tmp_path / "parts", plan(15))
    assert 2 <= again.num_done <= 4
    again.run(Formula(), quiet, never)
    assert again.best() == whole.best()


def test_more_trials_go_on_from_those_that_were_done(tmp_path: Path) -> None:
    Search(journal(tmp_path), plan(8)).run(Formula(), quiet, never)
    formula = Formula()
    more = Search(journal(tmp_path), plan(12))
    more.run(formula, quiet, never)
    assert more.num_done == 12
    assert len(formula.asked) <= 4 * 3 * 2
    whole = Search(tmp_path / "whole", plan(12))
    whole.run(Formula(), quiet, never)
    assert more.best() == whole.best()


@pytest.mark.parametrize("change", [{"prompts": "b"}, {"dtype": "bfloat16"}])
def test_a_search_of_something_else_is_not_gone_on_with(
    change: dict[str, Any], tmp_path: Path
) -> None:
    given: dict[str, object] = {"prompts": "a", "dtype": "float32"}
    Search(journal(tmp_path), plan(3, **given)).run(Formula(), quiet, never)
    with pytest.raises(InvalidRequest, match=next(iter(change))):
        Search(journal(tmp_path), plan(3, **(given | change)))
    with pytest.raises(InvalidRequest, match="seed"):
        Search(journal(tmp_path), plan(3, seed=1, **given))
    with pytest.raises(InvalidRequest, match="ways"):
        Search(journal(tmp_path), plan(3, space=Space(("serial",), SPACE.drafters), **given))


def test_what_can_not_be_is_told_and_passed_over(tmp_path: Path) -> None:
    class NoWorker(Formula):
        def __call__(self, setup: Setup, case: int) -> CaseResult:
            if setup.mode == "async":
                raise WorkerFailed("there is no worker")
            return super().__call__(setup, case)

    told: list[str] = []
    search = Search(journal(tmp_path), plan(20))
    assert search.run(NoWorker(), lambda _, text: told.append(text), never)
    assert any("impossible: async" in text and "no worker" in text for text in told)
    assert search.num_done == 20
    assert all(trial.setup.mode != "async" for trial in search.best())


def test_a_drafter_is_asked_for_no_more_than_it_can(tmp_path: Path) -> None:
    seen: list[Setup] = []

    class Noting(Formula):
        def __call__(self, setup: Setup, case: int) -> CaseResult:
            seen.append(setup)
            return super().__call__(setup, case)

    Search(journal(tmp_path), plan(60)).run(Noting(), quiet, never)
    short = [setup for setup in seen if setup.drafter == "short"]
    assert short
    assert {setup.mode for setup in short} <= {"serial", "async"}, "it has no fused mode"
    assert max(setup.given.get("draft_length") or 0 for setup in short) <= 4
    assert all(
        (setup.given.get("num_denoise_steps") or 1) <= (setup.given.get("draft_length") or 1)
        for setup in short
    )
    fused = [setup.given for setup in seen if setup.mode == "fused"]
    assert max(given.get("draft_length") or 0 for given in fused) <= 15
    unlimited = [given for given in fused if "draft_length" not in given]
    assert all(options["lookup"] for options in unlimited), (
        "copies may be longer than what slots can draft, and nothing else"
    )
    assert unlimited


def test_without_optuna_the_line_that_installs_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtra, match=r"pip install 'd3d-decoding\[tune\]'"):
        Search(journal(tmp_path), plan(1))


def test_a_setup_reads_well() -> None:
    space = Space(("serial",), (DrafterFacts("runs/best", 8),), (1, 2))
    assert space.ways == ["serial runs/best"]
    assert str(Setup(threads=2)) == "plain, 2 threads"
    assert space.way("serial runs/best") == ("serial", DrafterFacts("runs/best", 8))


def resumed(log: Path) -> Search:
    search = Search(log, plan(3))
    assert search.run(Formula(), quiet, never)
    return search


def test_a_log_cut_anywhere_goes_on_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    log = journal(tmp_path)
    resumed(log)
    whole = log.read_bytes()
    lines = whole.splitlines(keepends=True)
    for kept in range(0, len(lines), 3):
        log.write_bytes(b"".join(lines[:kept]) + lines[kept][:-7])
        assert resumed(log).num_done == 3
    for damage in (b'{"torn\n', b"{}\n", b'{"op_code": 99, "worker_id": ""}\n'):
        log.write_bytes(b"".join([*lines[:5], damage, *lines[5:]]))
        before = log.read_bytes()
        with pytest.raises(
            InvalidRequest, match=r"search\.log.* (damaged|not JSON) .*(remove this|move it)"
        ):
            resumed(log)
        assert log.read_bytes() == before
