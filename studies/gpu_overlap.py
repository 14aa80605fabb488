"""Async mode on a GPU: are its ids plain decoding's with two streams, and how much drafting hides
behind verification?

usage: python studies/gpu_overlap.py [--placement streams|devices] [--outcomes 4 16]
           [--tokens 512] [--prompt 1024] [--json FILE]
       python studies/gpu_overlap.py --tiny --device cpu    (tries the script; times mean nothing)

1. Tiny models with a real drafter, float32, greedy and sampled: async ids against plain ids.
2. The shapes of Qwen3-8B (target) and Qwen3-1.7B (drafter), random weights in bfloat16: every pass
   is really made, and a script replaces its results, so that the acceptance length is 7.9 and a
   given share of verdicts is foreseen. t_draft, t_verify, t_switch and overlap_ratio by CUDA
   events, for each outcome budget, and a drafter's pass while nothing else runs.

It has not run on a GPU yet. Needs about 32 GB on the device while the weights are made, half of
that afterwards, and a few minutes."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from d3d.engine.drafter import Draft, Drafter, Target
from d3d.engine.engine import Engine
from d3d.engine.metrics import acceptance_length, overlap
from d3d.engine.noise import uniform
from d3d.engine.params import SamplingParams
from d3d.engine.request import Request, new_request
from d3d.engine.round import Round
from d3d.engine.sampling import LogitRows
from d3d.errors import InvalidRequest
from d3d.hub.open_model import pick_device, tensor_shapes
from d3d.methods.async_.coordinator import Coordinator, Policy
from d3d.methods.async_.drafter import AsyncDrafter
from d3d.methods.async_.outcomes import Outcome
from d3d.methods.async_.packed_pass import PackedDrafter, PackedSession
from d3d.methods.async_.placement import check_placement, default_placement, other_device
from d3d.methods.async_.preparer import Preparer, PreparingSession
from d3d.methods.async_.worker_link import WorkerLink
from d3d.methods.async_.workers import ThreadWorker, on_own_stream, on_the_processor
from d3d.model.config import decoder_config
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.model.from_target import from_target
from d3d.model.transformer import Transformer
from d3d.target.native import NativeTarget
from shared import make_parser

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.doubles import Double, foresees, misjudges, noisy, sometimes
from support.tiny import tiny_config, tiny_transformer

BLOCK_SIZE = 16
ACCEPTANCE_LENGTH = 7.9

QWEN3: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
}
COMMON = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


@dataclass(frozen=True)
class Where:
    """The placement that is looked at."""

    name: str
    device: torch.device

    @property
    def drafter_device(self) -> torch.device:
        return other_device(self.device) if self.name == "devices" else self.device

    def coordinator(self, make: Callable[[], Preparer]) -> Coordinator:
        setting = (
            on_the_processor
            if self.name == "thread"
            else partial(on_own_stream, self.drafter_device)
        )
        return Coordinator(WorkerLink(lambda: ThreadWorker(make, setting), restarts=0, start_s=600))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--placement", choices=["streams", "devices", "thread"])
    parser.add_argument("--outcomes", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument(
        "--hit-rate", type=float, default=0.85, help="share of verdicts that the script foresees"
    )
    parser.add_argument(
        "--prompt", type=int, default=1024, help="tokens of context before the first round"
    )
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument(
        "--tiny", action="store_true", help="tiny shapes in float32, to try the script itself"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    try:
        device = pick_device(options.device)
        where = Where(options.placement or default_placement(device), device)
        check_placement(where.name, device)
        if device.type == "cpu" and not options.tiny:
            raise InvalidRequest(
                "device: Qwen3-8B's shapes are for a GPU; on a CPU add --tiny, whose times mean "
                "nothing"
            )
    except InvalidRequest as error:
        print(f"gpu_overlap: {error}", file=sys.stderr)
        return 2
    if options.tiny:
        options.prompt, options.tokens = min(options.prompt, 40), min(options.tokens, 80)
    report: dict[str, Any] = {
        "placement": where.name,
        "device": _device_name(device),
        "torch": torch.__version__,
        "tiny": options.tiny,
    }
    report["identity"] = identity(where, max_tokens=10 if options.tiny else 60)
    print(json.dumps(report["identity"]), flush=True)
    report["overlap"] = measure(where, options)
    print(json.dumps(report, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["identity"]["different"] == 0 else 1


# 1. Identity


def identity(where: Where, max_tokens: int) -> dict[str, int]:
    """Tiny models, real drafter: answers whose ids are plain decoding's, and others."""
    base = tiny_transformer().to(where.device)
    target, counts = NativeTarget(base), {"identical": 0, "different": 0, "hits": 0}
    for block_size in (4, 8, 16):
        model = from_target(base, DrafterConfig(block_size=block_size, kept_layers=(0, 1)))
        drafter = PackedDrafter(model.eval().to(where.drafter_device), target.vocab_size)
        coordinator = where.coordinator(lambda drafter=drafter: drafter)  # type: ignore[misc]
        coordinator.ensure_worker()
        for number in range(4):
            prompt = torch.randint(
                0, 90, (5 + 7 * number,), generator=torch.Generator().manual_seed(number)
            ).tolist()
            for sampling in (
                SamplingParams(max_tokens=max_tokens),
                SamplingParams(max_tokens=max_tokens, temperature=0.9, seed=number),
            ):
                plain, _ = _decode(target, None, prompt, sampling)
                for draft_length in (
                    1,
                    block_size,
                ):  # one token is the anchor's row's, which is right: those drafts hit
                    ids, rounds = _decode(
                        target,
                        AsyncDrafter(coordinator, Policy(draft_length, 64)),
                        prompt,
                        sampling,
                    )
                    counts["identical" if ids == plain else "different"] += 1
                    counts["hits"] += sum(round_.readiness == "hit" for round_ in rounds)
        coordinator.close()
    return counts


def _decode(
    target: Target, drafter: Drafter | None, prompt: list[int], sampling: SamplingParams
) -> tuple[list[int], list[Round]]:
    request = new_request(target, prompt, sampling)
    rounds = [round_ for round_ in Engine(target, drafter).run([request]) if round_.number]
    return request.answer_ids, rounds


# 2. Overlap


class ScriptedTarget(NativeTarget):
    """A target whose passes are real and whose choices are a script: one text, prompt and
    answer."""

    def __init__(self, model: Transformer, script: list[int]) -> None:
        super().__init__(model)
        self._script = script

    def prefill(self, requests: Sequence[Request], num_rows: int) -> list[LogitRows | None]:
        logits = super().prefill(requests, num_rows)
        for request, rows in zip(requests, logits, strict=True):
            if rows is not None:
                self._overwrite(rows, len(request))
        return logits

    def verify(self, requests: Sequence[Request], drafts: Sequence[Draft]) -> list[LogitRows]:
        logits = super().verify(requests, drafts)
        for request, rows in zip(requests, logits, strict=True):
            self._overwrite(rows, len(request))
        return logits

    @torch.inference_mode()
    def _overwrite(self, rows: LogitRows, position: int) -> None:
        """position: that the first row predicts."""
        chosen = self._script[position : position + len(rows.raw)]
        ids = torch.tensor(chosen, device=rows.raw.device)
        rows.raw.zero_().scatter_(1, ids[:, None], 100.0)


@dataclass(frozen=True)
class ScriptedShape(Preparer):
    """A drafter whose packed passes are real and whose blocks are a script."""

    drafter: PackedDrafter
    double: Double
    hit_rate: float
    script: list[int]

    def open(self, outcome_budget: int) -> ScriptedShapeSession:
        return ScriptedShapeSession(self, self.drafter.open(outcome_budget))


class ScriptedShapeSession(PreparingSession):
    def __init__(self, shape: ScriptedShape, session: PackedSession) -> None:
        self._shape, self._session = shape, session
        knows, vocab_size = foresees([shape.script]), shape.drafter.target_vocab_size
        self._expect = sometimes(shape.hit_rate, 7, knows, misjudges(knows, vocab_size))

    def draft(self, text: list[int], draft_length: int) -> Draft:
        self._session.draft(text, draft_length)
        return self._block(text, draft_length)

    def likely_outcomes(self, text: list[int], draft: Sequence[int], budget: int) -> list[Outcome]:
        """The verdict or a wrong one, and others up to the budget, so that the pass has its full
        width."""
        vocab_size = self._shape.drafter.target_vocab_size
        others = (
            Outcome(place % (len(draft) + 1), (31 * place + 11) % vocab_size)
            for place in range(2 * budget)
        )
        return list(dict.fromkeys([*self._expect(text, draft), *others]))[:budget]

    def prepare(
        self, text: list[int], draft: Sequence[int], outcomes: Sequence[Outcome], draft_length: int
    ) -> dict[Outcome, Draft]:
        self._session.prepare(text, draft, outcomes, draft_length)
        return {
            o: self._block([*text, *draft[: o.num_accepted], o.bonus_token], draft_length)
            for o in outcomes
        }

    def _block(self, text: list[int], draft_length: int) -> Draft:
        return self._shape.double.make_draft(Request(text), draft_length, 0)


def measure(where: Where, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of the scripted rounds, by budget of outcomes."""
    target, model = _shapes(where, options)
    vocab_size = target.config.vocab_size
    length = options.prompt + options.tokens + 2 * BLOCK_SIZE
    script = [int(uniform(1, place) * vocab_size) for place in range(length)]
    double = noisy(1 - _keep_probability(ACCEPTANCE_LENGTH), 3, BLOCK_SIZE, [script], vocab_size)
    scripted, drafter = ScriptedTarget(target, script), PackedDrafter(model, vocab_size)
    shape = ScriptedShape(drafter, double, options.hit_rate, script)
    coordinator = where.coordinator(lambda: shape)
    coordinator.ensure_worker()
    sampling = SamplingParams(max_tokens=options.tokens)
    figures: dict[str, Any] = {"drafted_alone_s": _alone(where, shape, script, options)}
    for budget in options.outcomes:
        asynchronous = AsyncDrafter(coordinator, Policy(BLOCK_SIZE, budget, patience_s=5.0))
        for measured in (False, True):  # once to warm up
            cut = sampling if measured else sampling.model_copy(update={"max_tokens": 40})
            started = time.perf_counter()
            ids, rounds = _decode(scripted, asynchronous, script[: options.prompt], cut)
            seconds = time.perf_counter() - started
        assert ids == script[options.prompt : options.prompt + options.tokens], (
            "the script is what must come out"
        )
        seen = overlap(rounds, BLOCK_SIZE)
        picked = (
            "hit_rate",
            "t_draft_s",
            "t_verify_s",
            "t_switch_s",
            "exposed_draft_s",
            "overlap_ratio",
            "late",
            "fallbacks",
        )
        figures[f"outcomes {budget}"] = {
            "acceptance_length": round(acceptance_length(rounds), 3),
            "rounds": len(rounds),
            "ms_per_round": round(
                1000 * sum(stats.t_draft + stats.t_verify for stats in rounds) / len(rounds), 3
            ),
            "ms_per_token": round(1000 * seconds / len(ids), 3),
            **{name: getattr(seen, name) for name in picked},
        }
    coordinator.close()
    return figures


def _alone(
    where: Where, shape: ScriptedShape, script: list[int], options: argparse.Namespace
) -> dict[str, float]:
    """Median seconds of a drafting pass while nothing else runs: one block, and packed passes of
    each budget."""
    times: dict[str, float] = {}
    setting = on_the_processor() if where.name == "thread" else on_own_stream(where.drafter_device)
    with setting as clock:
        for budget in [0, *options.outcomes]:
            session = shape.open(max(1, budget))
            text, spans = script[: options.prompt], []
            for number in range(8):
                begun = clock.mark()
                if budget:
                    draft = script[options.prompt : options.prompt + BLOCK_SIZE]
                    session.prepare(
                        text, draft, session.likely_outcomes(text, draft, budget), BLOCK_SIZE
                    )
                else:
                    session.draft(text, BLOCK_SIZE)
                span = clock.span(begun, clock.mark())
                spans += [span[1] - span[0]] if number > 2 else []
            times["one block" if not budget else f"outcomes {budget}"] = median(spans)
    return times


def _keep_probability(acceptance_length: float) -> float:
    """Of a drafted token, for which a block of BLOCK_SIZE and the bonus token come to so many on
    average."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        kept = sum(middle**place for place in range(1, BLOCK_SIZE + 1))
        low, high = (middle, high) if 1 + kept < acceptance_length else (low, middle)
    return low


def _shapes(where: Where, options: argparse.Namespace) -> tuple[Transformer, DrafterModel]:
    """Target and drafter, with full weights of its own."""
    if options.tiny:
        target, base = tiny_transformer("qwen3").to(where.device), tiny_transformer("qwen3", seed=1)
    else:
        target, base = _random("8B", where.device), _random("1.7B", where.drafter_device)
    config = DrafterConfig(block_size=BLOCK_SIZE, kept_layers=tuple(range(len(base.layers))))
    model = DrafterModel(config, base)
    model.set_mask_vector(base.embedding.detach().float().mean(0))
    return target, model.eval().to(where.drafter_device)


def _random(size: str, device: torch.device) -> Transformer:
    """Weights that are made on the device, in bfloat16; they mean nothing."""
    config = tiny_config("qwen3", **COMMON, **QWEN3[size], tie_word_embeddings=size == "1.7B")
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16, device=device)
        if name.endswith("norm.weight")
        else torch.randn(shape, dtype=torch.bfloat16, device=device) * 0.02
        for name, shape in tensor_shapes(config).items()
    }
    return Transformer(decoder_config(config), tensors).eval()


def _device_name(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )


if __name__ == "__main__":
    sys.exit(main())
