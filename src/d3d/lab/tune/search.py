"""The first stage: short runs of many setups, chosen by optuna and kept in its journal.

A setup's score is its time per token over that of plain decoding of the same prompt, so a slower
machine slows both. Setups that fall behind after a prompt or two are given up. The next choice
depends only on the seed and the results so far, so an interrupted search continues as if it had not
been."""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from d3d.engine.metrics import ratio
from d3d.errors import D3DError, InvalidRequest, MissingExtra
from d3d.files import CONTINUED, FileKind, Journal, explained
from d3d.inputs import parse_json
from d3d.lab.tune.measure import Measurer
from d3d.lab.tune.setups import SPARED_NOTHING, Setup, Space, starting_points, suggested

if TYPE_CHECKING:
    import optuna

INSTALL = "pip install 'd3d-decoding[tune]'"
STUDY = "tune"
LOG = FileKind("the log of a search", ("op_code", "worker_id"))
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
    """Search space, prompts and settings."""

    space: Space
    cases: tuple[int, ...]
    """Numbers of the cases that it may use."""
    trials: int
    seed: int
    threads: int
    """Torch's own number: that of the plain decoding setups are compared with, and of the first
    setups."""
    identity: dict[str, Any]
    """Facts that must be the same when the search continues."""


class Search:
    """A search, new or resumed, in a journal of its own."""

    def __init__(self, journal: Path, plan: SearchPlan) -> None:
        """The caller holds the journal's directory. Raises MissingExtra without optuna,
        InvalidRequest if the journal holds another search, is damaged, or is of another
        program."""
        self._optuna = require_optuna()
        _check_log(journal)
        self._plan, self._journal = plan, journal
        self._starts = starting_points(plan.space, plan.threads)
        with _quiet(self._optuna), explained(journal, CONTINUED):
            self._study = self._open()
        identity = {
            **plan.identity,
            "seed": plan.seed,
            "ways": plan.space.ways,
            "thread_choices": list(plan.space.threads),
        }
        known = self._study.user_attrs
        for name, value in identity.items():
            if known.get(name, value) != value:
                raise InvalidRequest(
                    f"{journal} holds a search with another {name}: {known[name]!r}, not "
                    f"{value!r}; name another directory"
                )
        for name in [name for name in identity if name not in known]:
            self._study.set_user_attr(name, identity[name])
        for trial in self._study.get_trials(states=(self._states.RUNNING,)):  # left by a kill
            self._study.tell(trial.number, state=self._states.FAIL)

    def _open(self) -> optuna.Study:
        """Read the journal, or begin one. Raises InvalidRequest if it makes no sense."""
        storages = self._optuna.storages
        backend = storages.journal.JournalFileBackend(
            str(self._journal),
            lock_obj=threading.Lock(),  # its own lock files outlive a kill
        )
        try:
            study: optuna.Study = self._optuna.create_study(
                storage=storages.JournalStorage(backend),
                study_name=STUDY,
                pruner=self._optuna.pruners.MedianPruner(n_startup_trials=UNJUDGED),
                load_if_exists=True,
            )
        except (AssertionError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"{self._journal} is damaged ({type(error).__name__}: {error}); move it away to "
                "search again"
            ) from error
        return study

    @property
    def _states(self) -> Any:
        return self._optuna.trial.TrialState

    def run(self, measure: Measurer, show: Show, stop: Stop) -> bool:
        """Try as many setups as planned; False if `stop` ended it early. Setups that fail are
        reported and skipped. Raises CantWrite."""
        while (done := self.num_done) < self._plan.trials:
            if stop():
                return False
            with _quiet(self._optuna), explained(self._journal, CONTINUED):
                finished = self._try_next(done, measure, show, stop)
            if not finished:
                return False
        return True

    @property
    def num_done(self) -> int:
        """Setups tried to the end or given up, and impossible ones."""
        finished = (self._states.COMPLETE, self._states.PRUNED)
        trials = self._study.get_trials(deepcopy=False)
        return sum(trial.state in finished or "problem" in trial.user_attrs for trial in trials)

    def best(self) -> list[Trial]:
        """Different setups that were tried to the end, the best first; the mean of equal ones."""
        scores: dict[str, list[float]] = {}
        setups: dict[str, Setup] = {}
        for trial in self._study.get_trials(deepcopy=False, states=(self._states.COMPLETE,)):
            setup = self._setup({**SPARED_NOTHING, **trial.params})
            setups[setup.key] = setup
            scores.setdefault(setup.key, []).append(float(trial.value or 0.0))
        trials = [Trial(setups[key], ratio(sum(each), len(each))) for key, each in scores.items()]
        return sorted(trials, key=lambda trial: trial.score)

    @property
    def default(self) -> Setup:
        """Start of the search: the defaults."""
        return self._setup(self._starts[0])

    def _setup(self, params: dict[str, Any]) -> Setup:
        return suggested(self._optuna.trial.FixedTrial(params), self._plan.space)

    def _try_next(self, done: int, measure: Measurer, show: Show, stop: Stop) -> bool:
        """Try one setup; False if it was interrupted, and does not count."""
        self._study.sampler = self._optuna.samplers.TPESampler(
            seed=_seed(self._plan.seed, done), constant_liar=False
        )
        if done < len(self._starts):
            self._study.enqueue_trial(self._starts[done])
        trial = self._study.ask()
        setup = suggested(trial, self._plan.space)
        try:
            score = self._score(trial, setup, done, measure, stop)
        except D3DError as error:
            trial.set_user_attr("problem", str(error))
            self._study.tell(trial, state=self._states.FAIL)
            show(done + 1, f"impossible: {setup} ({error})")
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
        """Time per token over plain decoding's, of the cases until it was given up; None if it was
        interrupted."""
        cases, threads = self._plan.cases, self._plan.threads
        reference = Setup(threads=threads if self._plan.space.threads else None)
        sums, plain_sums, score = [0.0, 0.0], [0.0, 0.0], 0.0
        for step, case in enumerate(cases):
            if stop():
                return None
            pair = [(setup, sums), (reference, plain_sums)]
            for measured, totals in pair if (done + step) % 2 else reversed(pair):
                result = measure(measured, case)
                totals[0] += result.seconds
                totals[1] += result.tokens
            if not sums[1] or not plain_sums[1]:
                continue  # answers of one token say nothing
            score = ratio(ratio(*sums), ratio(*plain_sums))
            trial.report(score, step)
            if step < len(cases) - 1 and trial.should_prune():
                trial.set_user_attr("given_up", True)
                break
        if not sums[1]:
            raise InvalidRequest(
                "the search's answers are of one token each, so there is nothing to time; take "
                "other prompts"
            )
        return score


def _check_log(path: Path) -> None:
    """Cut a torn last line. Raises InvalidRequest for a damaged line before it."""
    log = Journal(path, LOG)
    log.cut_torn_line()
    for number, line in log.lines():
        advice = "remove this line and those after it to go on from there"
        parse_json(line, f"{path}, line {number}", advice)


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
    """Silences optuna's log and its warnings about experimental features."""
    before = optuna_module.logging.get_verbosity()
    optuna_module.logging.set_verbosity(optuna_module.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna_module.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna_module.logging.set_verbosity(before)
