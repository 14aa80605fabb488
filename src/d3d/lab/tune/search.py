"""The first stage: short runs of many setups, each beside plain decoding of the same prompt, chosen
by optuna and kept in its journal.

A setup's score is its time per token over plain decoding's, so what slows the machine for a while
slows both. Setups that fall behind the others after a prompt or two are given up. What is tried
next depends on the seed and on what has been measured, and on nothing else: a search that was
interrupted goes on as if it had not been."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d3d.errors import D3DError, InvalidRequest, MissingExtra
from d3d.lab.tune.measure import Measurer
from d3d.lab.tune.setups import SPARED_NOTHING, Setup, Space, starting_points, suggested

if TYPE_CHECKING:
    import optuna

INSTALL = "pip install 'd3d-decoding[tune]'"
STUDY = "tune"
UNJUDGED = 4
"""Trials before any is given up."""

Show = Callable[[int, str], None]
Stop = Callable[[], bool]


class Trial(NamedTuple):
    """A setup that was tried on every case of the search."""

    setup: Setup
    score: float
    """Time per token over plain decoding's."""


@dataclass(frozen=True)
class SearchPlan:
    """What a search is."""

    space: Space
    cases: tuple[int, ...]
    """Numbers of the cases that it may look at."""
    trials: int
    seed: int
    threads: int
    """What torch takes by itself: plain decoding's, with which setups are compared, and the first
    setups'."""
    identity: dict[str, Any]
    """What must be the same when it goes on."""


class Search:
    """A search, new or resumed, in a journal of its own."""

    def __init__(self, journal: Path, plan: SearchPlan) -> None:
        """Raises MissingExtra without optuna, InvalidRequest where the journal holds another
        search."""
        self._optuna = require_optuna()
        self._plan = plan
        with _quiet(self._optuna):
            storage = self._optuna.storages.JournalStorage(
                self._optuna.storages.journal.JournalFileBackend(str(journal))
            )
            pruner = self._optuna.pruners.MedianPruner(n_startup_trials=UNJUDGED)
            self._study = self._optuna.create_study(
                storage=storage, study_name=STUDY, pruner=pruner, load_if_exists=True
            )
        identity = {
            **plan.identity,
            "seed": plan.seed,
            "ways": plan.space.ways,
            "thread_choices": list(plan.space.threads),
        }
        for name, value in identity.items():
            known = self._study.user_attrs.get(name, value)
            if known != value:
                raise InvalidRequest(
                    f"{journal} holds a search with another {name}: {known!r}, not {value!r}; name another directory"
                )
        for name, value in identity.items():
            if name not in self._study.user_attrs:
                self._study.set_user_attr(name, value)
        for trial in self._study.get_trials(states=(self._states.RUNNING,)):  # a kill has left it
            self._study.tell(trial.number, state=self._states.FAIL)

    @property
    def _states(self) -> Any:
        return self._optuna.trial.TrialState

    def run(self, measure: Measurer, show: Show, stop: Stop) -> bool:
        """Try setups until as many as planned have been; False where `stop` said so before. What a
        setup fails of is told and passed over."""
        while (done := self.num_done) < self._plan.trials:
            if stop():
                return False
            with _quiet(self._optuna):
                finished = self._one(done, measure, show, stop)
            if not finished:
                return False
        return True

    @property
    def num_done(self) -> int:
        """Setups that were tried, to the end or until they were given up; those that can't be,
        too."""
        trials = self._study.get_trials(deepcopy=False)
        return sum(
            trial.state in (self._states.COMPLETE, self._states.PRUNED)
            or "problem" in trial.user_attrs
            for trial in trials
        )

    def best(self) -> list[Trial]:
        """Different setups that were tried to the end, the best first; of equal setups the mean."""
        scores: dict[str, list[float]] = {}
        setups: dict[str, Setup] = {}
        for trial in self._study.get_trials(deepcopy=False, states=(self._states.COMPLETE,)):
            setup = suggested(
                self._optuna.trial.FixedTrial({**SPARED_NOTHING, **trial.params}), self._plan.space
            )
            setups[setup.key] = setup
            scores.setdefault(setup.key, []).append(float(trial.value or 0.0))
        means = {key: sum(values) / len(values) for key, values in scores.items()}
        return [Trial(setups[key], means[key]) for key in sorted(means, key=lambda key: means[key])]

    @property
    def default(self) -> Setup:
        """Where the search begins: what is done by default."""
        first = starting_points(self._plan.space, self._plan.threads)[0]
        return suggested(self._optuna.trial.FixedTrial(first), self._plan.space)

    def _one(self, done: int, measure: Measurer, show: Show, stop: Stop) -> bool:
        """Try one setup; False where it was interrupted, and counts for nothing."""
        self._study.sampler = self._optuna.samplers.TPESampler(
            seed=_seed(self._plan.seed, done), constant_liar=False
        )
        starts = starting_points(self._plan.space, self._plan.threads)
        if done < len(starts):
            self._study.enqueue_trial(starts[done])
        trial = self._study.ask()
        setup = suggested(trial, self._plan.space)
        try:
            score = self._score(trial, setup, done, measure, stop)
        except D3DError as error:
            trial.set_user_attr("problem", str(error))
            self._study.tell(trial, state=self._states.FAIL)
            show(done + 1, f"can't be: {setup} ({error})")
            return True
        except BaseException:
            self._study.tell(trial, state=self._states.FAIL)
            raise
        if score is None:
            self._study.tell(trial, state=self._states.FAIL)
            return False
        if given_up := trial.user_attrs.get("given_up", False):
            self._study.tell(trial, state=self._states.PRUNED)
        else:
            self._study.tell(trial, score)
        show(done + 1, f"{score:.2f} of plain{', given up' if given_up else ''}: {setup}")
        return True

    def _score(
        self, trial: optuna.Trial, setup: Setup, done: int, measure: Measurer, stop: Stop
    ) -> float | None:
        """Time per token over plain decoding's, of the cases until it was given up; None where it
        was interrupted."""
        reference = Setup("plain", threads=self._plan.threads if self._plan.space.threads else None)
        own, plain, score = [0.0, 0.0], [0.0, 0.0], 0.0
        for step, case in enumerate(self._plan.cases):
            if stop():
                return None
            pair = [(setup, own), (reference, plain)]
            for one, sums in pair if (done + step) % 2 else reversed(pair):
                measured = measure(one, case)
                sums[0] += measured.seconds
                sums[1] += measured.tokens
            if not own[1] or not plain[1]:
                continue  # answers of one token say nothing
            score = own[0] / own[1] / (plain[0] / plain[1])
            trial.report(score, step)
            if step < len(self._plan.cases) - 1 and trial.should_prune():
                trial.set_user_attr("given_up", True)
                break
        if not own[1]:
            raise InvalidRequest(
                "the search's answers are of one token each, so there is nothing to time; take other prompts"
            )
        return score


def _seed(seed: int, number: int) -> int:
    """32 bits for the choice that follows `number` others."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "big")


def require_optuna() -> Any:
    """The library. Raises MissingExtra with the line that installs it."""
    try:
        import optuna
    except ImportError as error:
        raise MissingExtra(f"d3d tune needs optuna: {INSTALL}") from error
    return optuna


@contextmanager
def _quiet(optuna_module: Any) -> Iterator[None]:
    """Without optuna's own log and its warnings about what is experimental there."""
    before = optuna_module.logging.get_verbosity()
    optuna_module.logging.set_verbosity(optuna_module.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna_module.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna_module.logging.set_verbosity(before)
