"""The target in C: one answer, bit for bit, whatever is drafted or batched."""

from __future__ import annotations

import pytest

from d3d.engine.drafter import Draft, Drafter
from d3d.engine.request import Request
from d3d.methods.ngram.drafter import NgramDrafter
from d3d.model.config import decoder_config
from d3d.native import build
from d3d.native.native_pass import NativePass
from d3d.target.compiled import CompiledTarget
from d3d.target.native import NativeTarget
from support.doubles import Double, noisy
from support.runs import SAMPLING, Run, make, run, run_all
from support.tiny import tiny_config, tiny_tensors, tiny_transformer

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

PROMPTS = [[3, 14, 15, 92, 65, 3, 14, 15], [7] * 20, list(range(60)), [5]]
WAYS = ("greedy", "sampled penalties", "hot", "greedy")


class Trees(Double):
    """Beside each right token stands a wrong one that comes first."""

    max_nodes = 6  # type: ignore[assignment] - a constant here

    def __init__(self, answers: list[list[int]], vocab_size: int) -> None:
        def propose(request: Request, length: int, _: int) -> Draft:
            committed = len(request)
            known = (each for each in answers if each[:committed] == request.token_ids)
            coming = next(known, [])[committed : committed + min(length, 3)]
            token_ids = [each for right in coming for each in ((right + 1) % vocab_size, right)]
            parents = [2 * depth - 1 for depth in range(len(coming)) for _ in range(2)]
            return Draft(tuple(token_ids), parents=tuple(parents)) if coming else Draft()

        super().__init__(3, propose)


@pytest.fixture(scope="module")
def target() -> CompiledTarget:
    shape = tiny_config()
    return CompiledTarget(
        NativePass.from_tensors(tiny_tensors(shape), decoder_config(shape), threads=2)
    )


def four(target: CompiledTarget) -> list[Run]:
    return [
        make(target, prompt, max_tokens=20, logprobs=2, **SAMPLING[way])
        for prompt, way in zip(PROMPTS, WAYS, strict=True)
    ]


def test_ids_are_those_of_the_torch_target(target: CompiledTarget) -> None:
    reference = NativeTarget(tiny_transformer())
    for prompt in PROMPTS:
        ours, theirs = (run(each, prompt=prompt, max_tokens=20) for each in (target, reference))
        assert ours.ids == theirs.ids


def test_bits_are_equal_drafted_in_trees_batched_and_in_chunks(
    target: CompiledTarget,
) -> None:
    plain = [run_all(target, None, [one])[0] for one in four(target)]
    answers = [one.token_ids for one in plain]
    drafters: list[Drafter | None] = [
        None,
        NgramDrafter(6),
        noisy(0.3, 11, 6, answers, target.vocab_size),
        Trees(answers, target.vocab_size),
    ]
    for drafter in drafters:
        for prefill_rows in (512, 7):
            others = run_all(target, drafter, four(target), prefill_rows=prefill_rows)
            for one, other in zip(plain, others, strict=True):
                assert one.ids == other.ids
                assert one.logprobs == other.logprobs
                assert not other.faults
                if isinstance(drafter, Trees):
                    assert len(other.rounds) < len(one.rounds)
