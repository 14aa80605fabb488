"""The method `async_modelled`: async mode as it would be if the drafter had a second device like
the target's.

Ids, blocks, hits and the time of every pass are real, from rounds that this run decodes one pass at
a time; when what would run beside what is modelled (`d3d.lab.plan`). The answers' times are
therefore modelled, and every row of them says so."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from d3d.lab.bench.answers import Answer, Delivery
from d3d.lab.plan.rehearsal import overlapped

ASYNC_MODELLED = "async_modelled"

LABEL = "async_modelled: its times are modelled, not measured: as if the drafter had a second device like the target's."


def on_two_devices(answer: Answer, switch_s: float) -> Answer:
    """A rehearsed answer with the times of the model. What a round takes beside its passes is the
    mean of what it took here."""
    if not answer.rounds:
        return replace(answer, modelled=True)
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(answer.deliveries)]
    spent = sum(one.t_draft + one.t_verify for one in answer.rounds)
    rest_s = max(0.0, sum(gaps) - spent) / len(answer.rounds)
    rounds, ends = overlapped(answer.rounds, switch_s, rest_s)
    first = answer.deliveries[0]
    deliveries = (
        first,
        *(
            Delivery(first.at_s + end, told.num_tokens)
            for end, told in zip(ends, answer.deliveries[1:], strict=True)
        ),
    )
    after = max(0.0, answer.wall_s - answer.deliveries[-1].at_s)
    return replace(
        answer,
        deliveries=deliveries,
        rounds=tuple(rounds),
        wall_s=deliveries[-1].at_s + after,
        modelled=True,
    )
