"""Would a miss be better answered with a successor that was prepared for another bonus token?

usage: python studies/miss_policies.py smollm2-135m CORPUS.jsonl [--drafter D] [--draft-length 5]
           [--limit 10] [--budgets 1 4 8 32] [--passes-ms ONE VERIFY DRAFT PACKED PACKED ...]

CORPUS.jsonl holds the target's recorded answers (`d3d data`). Rounds of async mode are replayed on
them without a clock, each policy and budget along its own rounds. On a miss

    draft_now        waits for a fresh draft
    bonus_only       verifies the anchor alone
    reuse            verifies the best successor of the same num_accepted, with the true bonus token
                     as its anchor, or a fresh draft if there is none; the outcomes of such a draft
                     are guessed from its own confidences
    reuse_listed     the same, but the worker drafts afresh during the verification and guesses the
                     outcomes from that draft
    rechosen         as reuse, but the previous-token head chooses again, given the true bonus token
    rechosen_listed  both

Then the model of rounds (`d3d.lab.plan.simulate`) gives the time per token, on two devices that
share nothing: with free rows and a draft that takes a given share of a verification (times in
verifications); on two H100s by their data sheets; and with --passes-ms, measured passes: a
verification of one row, one of draft_length + 1, a draft, and the packed pass of each budget.
Prints one JSON object."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch

import d3d
from d3d.lab.plan.roofline import DATA_SHEETS, MODELS, RooflineCosts
from d3d.lab.plan.simulate import RoundWork, pipeline
from d3d.methods.async_.outcomes import Outcome, Place, likely_outcomes, within_budget
from d3d.methods.async_.packed_layout import run_side_by_side
from d3d.methods.async_.packed_pass import PackedDrafter, PackedSession
from d3d.methods.async_.preparer import PrepareTask
from d3d.methods.serial.denoise import last_tokens
from d3d.train.corpus import Sample, read_corpus
from shared import make_parser

POLICIES = ("draft_now", "bonus_only", "reuse", "reuse_listed", "rechosen", "rechosen_listed")
SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Of a verification, that a draft takes where rows are free."""
Came = Literal["hit", "fresh", "none", "reused"]


class Drafted(NamedTuple):
    token_ids: tuple[int, ...]
    places: Sequence[Place]


class Round(NamedTuple):
    came: Came
    draft_length: int
    num_committed: int
    context: int


@dataclass
class Answer:
    """A recorded answer; drafts at each of its places are computed once, on first use."""

    session: PackedSession
    sample: Sample
    draft_length: int
    most: int
    """Largest budget."""
    _fresh: dict[int, tuple[Drafted, list[Outcome], list[Outcome]]] = field(default_factory=dict)
    _reused: dict[tuple[int, Outcome], tuple[Drafted, Drafted]] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """The first anchor's place."""
        return len(self.sample.prompt_ids)

    @property
    def last(self) -> int:
        return len(self.sample.token_ids) - 1

    def fresh(self, anchor: int) -> tuple[Drafted, list[Outcome], list[Outcome]]:
        """The draft at an anchor; its likely outcomes; those of an empty draft."""
        if anchor not in self._fresh:
            text = self.sample.token_ids[: anchor + 1]
            draft = self.session.draft(text, self.draft_length).token_ids
            alone = self.session.likely_outcomes(text, (), self.most)
            listed = self.session.likely_outcomes(text, draft, self.most)
            self._fresh[anchor] = (
                Drafted(draft, self.session._block_places(text, draft)),
                listed,
                alone,
            )
        return self._fresh[anchor]

    @torch.inference_mode()
    def reused(
        self, anchor: int, draft: tuple[int, ...], outcome: Outcome
    ) -> tuple[Drafted, Drafted]:
        """The successor of an outcome whose bonus token was wrong: as it was prepared, and chosen
        again after the true token. anchor: of the verified draft, `draft`."""
        key = anchor, outcome
        if key not in self._reused:
            session, text = self.session, self.sample.token_ids[: anchor + 1]
            branches = session.branches(
                PrepareTask(session, text, draft, [outcome], self.draft_length)
            )
            assert branches is not None, "recorded answers lie within the drafter's context"
            model = session._model
            (states,) = run_side_by_side(model, [branches.layout], [session.cache])
            prepared = model.draft_logits(states, session._drafter.target_vocab_size)
            true_text = self.sample.token_ids[: anchor + outcome.num_accepted + 2]
            lasts = branches.last_tokens(), [last_tokens(true_text)]
            self._reused[key] = (
                self._chosen(states, prepared.clone(), lasts[0]),
                self._chosen(states, prepared, lasts[1]),
            )
        return self._reused[key]

    def _chosen(self, states: torch.Tensor, logits: torch.Tensor, last: list[list[int]]) -> Drafted:
        model = self.session._model
        model.choose_in_turn(states, logits, torch.tensor(last), own_rows=model.config.own_rows)
        places = self.session._places(logits[0])
        return Drafted(tuple(place.token_ids[0] for place in places[:-1]), places)

    def kept(self, anchor: int, draft: Sequence[int]) -> int:
        truth = self.sample.token_ids[anchor + 1 :]
        differs = (
            place
            for place, (drafted, wanted) in enumerate(zip(draft, truth, strict=False))
            if drafted != wanted
        )
        return next(differs, min(len(draft), len(truth)))

    def outcomes(self, drafted: Drafted, budget: int) -> list[Outcome]:
        model, doubt = self.session._model, self.session._doubt.weight
        return likely_outcomes(
            drafted.token_ids, drafted.places, budget, num_clean=model.config.own_rows, doubt=doubt
        )


def same_count(outcomes: Sequence[Outcome], num_accepted: int) -> Outcome | None:
    """The likeliest outcome that keeps as many tokens."""
    return next((outcome for outcome in outcomes if outcome.num_accepted == num_accepted), None)


def walk(answer: Answer, policy: str, budget: int) -> list[Round]:
    """An answer's rounds under a policy."""
    rounds: list[Round] = []
    anchor, drafted = answer.first, Drafted((), ())
    came: Came = "fresh"
    rechosen, listed_afresh = policy.startswith("rechosen"), policy.endswith("_listed")
    while anchor < answer.last:
        fresh, likely, alone = answer.fresh(anchor)
        if came == "none":
            drafted, outcomes = Drafted((), ()), within_budget(alone, budget, 0)
        elif came == "reused":
            outcomes = answer.outcomes(
                Drafted(drafted.token_ids, fresh.places) if listed_afresh else drafted, budget
            )
        else:
            drafted, outcomes = fresh, within_budget(likely, budget, len(fresh.token_ids))
        kept = answer.kept(anchor, drafted.token_ids)
        committed = min(kept + 1, answer.last - anchor)
        rounds.append(Round(came, len(drafted.token_ids), committed, anchor + 1))
        before, anchor = anchor, anchor + committed
        if anchor >= answer.last:
            break
        verdict = Outcome(kept, answer.sample.token_ids[anchor])
        near = same_count(outcomes, kept)
        if verdict in outcomes:
            came = "hit"
        elif policy == "bonus_only":
            came = "none"
        elif policy == "draft_now" or near is None:
            came = "fresh"
        else:
            came, drafted = "reused", answer.reused(before, drafted.token_ids, near)[rechosen]
    return rounds


def misses(answers: Sequence[Answer], budget: int) -> dict[str, Any]:
    """The worth of successors for other bonus tokens, on the misses of draft_now's rounds."""
    count: Counter[str] = Counter()
    for answer in answers:
        anchor = answer.first
        while anchor < answer.last:
            fresh, likely, _ = answer.fresh(anchor)
            kept = answer.kept(anchor, fresh.token_ids)
            before, anchor = anchor, anchor + kept + 1
            if anchor >= answer.last:
                break
            outcomes = within_budget(likely, budget, len(fresh.token_ids))
            count["wanted"] += 1
            if Outcome(kept, answer.sample.token_ids[anchor]) in outcomes:
                continue
            count["missed"] += 1
            near = same_count(outcomes, kept)
            if near is None:
                continue
            prepared, rechosen = answer.reused(before, fresh.token_ids, near)
            count["same num_accepted"] += 1
            count["kept"] += answer.kept(anchor, prepared.token_ids)
            count["kept, rechosen"] += answer.kept(anchor, rechosen.token_ids)
            count["kept, fresh"] += answer.kept(anchor, answer.fresh(anchor)[0].token_ids)
    of = max(1, count["same num_accepted"])
    means = {name: round(count[name] / of, 3) for name in ("kept", "kept, rechosen", "kept, fresh")}
    return {name: count[name] for name in ("wanted", "missed", "same num_accepted")} | means


class Passes(Protocol):
    """Seconds."""

    def verify(self, rows: int, context: float) -> float: ...

    def draft(self, draft_length: int, context: float) -> float: ...

    def packed(self, draft_length: int, outcomes: int, context: float) -> float: ...


@dataclass(frozen=True)
class Given:
    """The same at every context."""

    one: float
    several: float
    drafting: float
    packing: dict[int, float]
    """By budget."""

    def verify(self, rows: int, context: float) -> float:  # noqa: ARG002
        return self.one if rows == 1 else self.several

    def draft(self, draft_length: int, context: float) -> float:  # noqa: ARG002
        return self.drafting

    def packed(self, draft_length: int, outcomes: int, context: float) -> float:  # noqa: ARG002
        return self.packing[outcomes]


def seconds_a_token(
    walks: Sequence[list[Round]],
    passes: Passes,
    budget: int,
    draft_length: int,
    *,
    listed_afresh: bool,
) -> float:
    seconds = 0.0
    for rounds in walks:
        works = []
        for round_ in rounds:
            draft_s = passes.draft(draft_length, round_.context)
            packed_s = passes.packed(draft_length, budget, round_.context)
            if round_.came == "none" or (round_.came == "reused" and listed_afresh):
                packed_s += draft_s  # the worker has no draft behind this text yet
            works.append(
                RoundWork(
                    passes.verify(round_.draft_length + 1, round_.context),
                    draft_s,
                    packed_s,
                    round_.came != "fresh",
                )
            )
        seconds += pipeline(works, 0.0)[-1].ended
    return seconds / sum(round_.num_committed for rounds in walks for round_ in rounds)


def summary(walks: Sequence[list[Round]]) -> dict[str, Any]:
    came = Counter(round_.came for rounds in walks for round_ in rounds)
    count = sum(came.values())
    tokens = sum(round_.num_committed for rounds in walks for round_ in rounds)
    return {"tokens_a_round": round(tokens / count, 3)} | {
        name: round(share / count, 3) for name, share in sorted(came.items())
    }


def cases(budgets: Sequence[int], passes_ms: Sequence[float] | None) -> dict[str, Passes]:
    found: dict[str, Passes] = {
        f"rows free, draft {share:g} of a verification": Given(
            1, 1, share, dict.fromkeys(budgets, share)
        )
        for share in SHARES
    }
    for drafter in ("d3d-8b", "d3d-1.7b"):
        found[f"2 H100, qwen3-8b, {drafter}, ms"] = RooflineCosts(
            MODELS["qwen3-8b"], MODELS[drafter], DATA_SHEETS["h100"], 2
        )
    if passes_ms:
        one, several, drafting, *packing = (1e-3 * each for each in passes_ms)
        found["as measured, ms"] = Given(
            one, several, drafting, dict(zip(budgets, packing, strict=True))
        )
    return found


def report(
    answers: Sequence[Answer],
    draft_length: int,
    budgets: Sequence[int],
    passes_ms: Sequence[float] | None,
) -> dict[str, Any]:
    """Misses, rounds and modelled times, by budget."""
    known = cases(budgets, passes_ms)
    found: dict[str, Any] = {}
    for budget in budgets:
        walks = {
            policy: [walk(answer, policy, budget) for answer in answers] for policy in POLICIES
        }
        times = {
            name: {
                policy: round(
                    (1e3 if name.endswith("ms") else 1)
                    * seconds_a_token(
                        walks[policy],
                        passes,
                        budget,
                        draft_length,
                        listed_afresh=policy.endswith("_listed"),
                    ),
                    4,
                )
                for policy in POLICIES
            }
            for name, passes in known.items()
        }
        rounds = {policy: summary(walks[policy]) for policy in POLICIES}
        found[str(budget)] = {
            "misses": misses(answers, budget),
            "rounds": rounds,
            "time_a_token": times,
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("target")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--drafter")
    parser.add_argument("--draft-length", type=int, default=5)
    parser.add_argument("--limit", type=int, default=10, help="most answers to replay")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--passes-ms", type=float, nargs="+")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args(arguments)
    if options.passes_ms and len(options.passes_ms) != 3 + len(options.budgets):
        parser.error(
            f"--passes-ms: give {3 + len(options.budgets)} numbers, a packed pass for each budget"
        )

    model = d3d.load(options.target, options.drafter, dtype=options.dtype, device="cpu")
    assert model.parts.drafter is not None, "a target with a drafter is needed"
    samples = [
        sample
        for sample in read_corpus(options.corpus)[: options.limit]
        if len(sample.answer_ids) > 1
    ]
    preparer, most = (
        PackedDrafter(model.parts.drafter, model.parts.target.vocab_size),
        max(options.budgets),
    )
    length = options.draft_length
    opened = [Answer(preparer.open(most), sample, length, most) for sample in samples]
    found = report(opened, length, options.budgets, options.passes_ms)
    settings = {
        "target": options.target,
        "corpus": options.corpus.name,
        "answers": len(opened),
        "draft_length": length,
    }
    print(
        json.dumps(
            {"budgets": found, "settings": settings, "date": date.today().isoformat()}, indent=2
        )
    )


if __name__ == "__main__":
    main()
