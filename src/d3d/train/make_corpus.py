"""From prompt files to a corpus of the target's answers, resumably, with a manifest that tells what
was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from d3d.errors import InvalidRequest
from d3d.hub.chat import heeds_thinking
from d3d.hub.open_model import OpenModel
from d3d.train.corpus_writer import CorpusWriter, writer_identity
from d3d.train.evaluation_sets import SETS
from d3d.train.prompts import LeftOut, PromptOptions, draw_prompts
from d3d.train.regenerate import Answering, AnswerOptions


@dataclass(frozen=True)
class CorpusPlan:
    """Everything that a run of `d3d data` was asked for."""

    corpus: Path
    prompts: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    taken: PromptOptions = field(default_factory=PromptOptions)
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    shard_answers: int | None = None

    def check(self) -> None:
        """Raises InvalidRequest for options that contradict each other, before anything is read."""
        if not self.taken.suffix and self.taken.suffix_share != 1.0:
            raise InvalidRequest(
                "--suffix-share says how many prompts get the suffix; give one with --suffix"
            )
        if len(set(self.answers.temperatures)) < len(self.answers.temperatures):
            raise InvalidRequest(
                "--temperature: one of them is given twice; each prompt is answered once at each temperature"
            )


class CorpusRun:
    """Starts a corpus, or goes on with one: prompts are drawn and files opened at once, answers
    come with `write`."""

    def __init__(self, model: OpenModel, plan: CorpusPlan) -> None:
        """Raises InvalidRequest, InvalidCheckpoint and MissingExtra as `draw_prompts` and
        `CorpusWriter` do; nothing is written then."""
        plan.check()
        self._model, self._plan = model, plan
        self._drawn = draw_prompts(plan.prompts, model.tokenizer, plan.taken, exclude=plan.exclude)
        identity = writer_identity(
            model,
            thinking=plan.taken.thinking if heeds_thinking(model.tokenizer) else None,
            top_logits=plan.answers.top_logits,
            evaluation_prompts=plan.taken.evaluation_prompts == "allow"
            and bool(self._drawn.evaluation.counts),
        )
        self._writer = CorpusWriter(plan.corpus, identity, plan.shard_answers)
        self._answering = Answering(model, plan.answers, self._writer.known, self.left_out)
        self.num_turns = self._answering.num_turns(self._drawn.prompts)
        """Answers that there are to be, if none is left out, with those that are there."""
        self.turns_done = self.new_answers = self.new_tokens = 0

    @property
    def left_out(self) -> LeftOut:
        """What has not been used so far, and why."""
        return self._drawn.left_out

    @property
    def answers(self) -> int:
        """Answers in the corpus, with those of earlier runs."""
        return self._writer.answers

    def write(self, on_batch: Callable[[], None]) -> None:
        """Write the answers that the corpus lacks."""
        self._writer.start()
        for batch in self._answering.run(self._drawn.prompts):
            self._writer.append(batch.samples, batch.top_logits)
            self.new_answers += len(batch.samples)
            self.new_tokens += sum(len(sample.answer_ids) for sample in batch.samples)
            self.turns_done += batch.turns_done
            self._writer.write_manifest(self._record(complete=False))
            on_batch()
        self._writer.write_manifest(self._record(complete=True))

    def _record(self, *, complete: bool) -> dict[str, Any]:
        """What the manifest tells of this run."""
        plan, drawn, first = self._plan, self._drawn, self.left_out.first
        return {
            "d3d": version("d3d-decoding"),
            "complete": complete,
            "answers": self.new_answers,
            "answer_tokens": self.new_tokens,
            "prompts": [
                {"from": source.spec, "sha256": source.sha256, "rows": len(source.rows)}
                for source in drawn.sources
            ],
            "drawn": len(drawn.prompts),
            "left_out": [
                {"reason": reason, "rows": rows, "first": first[reason]}
                for reason, rows in self.left_out.counts.items()
            ],
            "exclude": list(plan.exclude),
            "options": asdict(plan.taken) | asdict(plan.answers),
            "evaluation_sets": {
                "looked_for": list(SETS.values()),
                "found": {SETS[name]: count for name, count in drawn.evaluation.counts.items()},
            },
            "dtype": str(self._model.transformer.embedding.dtype).removeprefix("torch."),
            "device": str(self._model.transformer.device),
        }
