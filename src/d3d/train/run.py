"""A training run in a directory: state to go on from, a log, and the best checkpoint so far.

state.pt        everything that going on needs (state.parts/ where several processes share the
weights out) log.jsonl       losses and held-out acceptance, one JSON object a line tensorboard/
the same as curves, where they are wanted best/           the drafter that measured best on the
held-out answers"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from d3d.errors import D3DError, InvalidCheckpoint, InvalidRequest
from d3d.files import alone_in
from d3d.hub.checkpoint import check_mask_token, restore_interrupted, save_drafter
from d3d.hub.fingerprint import first_difference
from d3d.hub.names import resolve_drafter
from d3d.hub.open_drafter import start_from
from d3d.hub.open_model import OpenModel
from d3d.model.drafter import DrafterModel
from d3d.model.from_target import from_target
from d3d.train.acceptance import Acceptance, total
from d3d.train.config import RunConfig
from d3d.train.corpus import Sample, corpus_fingerprint, drop_torn_line
from d3d.train.curves import Curves
from d3d.train.evaluate import replay
from d3d.train.parallel import Alone, Parallel, Sharded
from d3d.train.trainer import StepStats, Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STATE_EVERY_S = 300.0
"""A run that is killed loses at most this much, in seconds."""


class Author(NamedTuple):
    """The model that wrote the corpus, where the drafter is made of another one. Its weights are
    not needed."""

    source: str
    tokenizer: PreTrainedTokenizerBase


class TrainingRun:
    """Starts a run, or goes on with one that was interrupted."""

    def __init__(
        self,
        directory: Path,
        base: OpenModel,
        config: RunConfig,
        samples: list[Sample],
        held_out: list[Sample],
        *,
        author: Author | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        """`base`: the model whose layers the drafter starts from; `author`: who wrote the corpus,
        None for the base itself.

        Samples whose prompt is held out too are not trained on. Raises InvalidRequest and
        InvalidCheckpoint as its parts do."""
        measured = {tuple(sample.prompt_ids) for sample in held_out}
        if not any(len(sample.answer_ids) > 1 for sample in held_out):
            raise InvalidRequest(
                "the held-out corpus has no answer of two tokens or more, so nothing can be measured"
            )
        drafter = config.drafter.resolve(base.config.num_layers)
        check_mask_token(drafter, base)
        if author is not None:
            check_author(author, base, samples + held_out)
        self.directory, self.config, self.held_out = directory, config, held_out
        self.source = base.source if author is None else author.source
        self.parallel: Parallel = parallel or Alone()
        self.model: DrafterModel = from_target(base.transformer, drafter, seed=config.train.seed)
        if config.drafter.start is not None:
            start_from(resolve_drafter(config.drafter.start), self.model, base)
        self.base = (
            base if drafter.delta else dataclasses.replace(base, transformer=self.model.transformer)
        )  # frees the base's weights
        training = [sample for sample in samples if tuple(sample.prompt_ids) not in measured]
        if drafter.draft_vocabulary is not None:
            self.model.set_draft_ids(
                frequent_tokens(training, drafter.draft_vocabulary, base.config.vocab_size)
            )
        identity = {"base": base.fingerprint, "corpus": corpus_fingerprint(training)}
        self.trainer = Trainer(self.model, training, config.train, self.parallel, identity)
        self.left_out = dict(self.trainer.left_out)
        """How many samples are not trained on, for each reason."""
        if len(training) < len(samples):
            self.left_out["their prompt is held out"] = len(samples) - len(training)
        self.acceptance: Acceptance | None = None
        self._state = directory / self.parallel.state_name
        self._curves = (
            Curves(directory / "tensorboard")
            if config.tensorboard and self.parallel.rank == 0
            else None
        )
        self._open()
        self.best = 0.0
        if self._state.exists():
            self.trainer.load(self._state)
            self.best = _measured(directory / "best")

    def _open(self) -> None:
        """Raises InvalidRequest where the directory holds a state that these processes can't
        read."""
        if self.parallel.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            restore_interrupted(self._state)
            restore_interrupted(self.directory / "best")
        self.parallel.any(False)  # the others wait
        for kind in (Alone, Sharded):
            if (
                kind.state_name != self.parallel.state_name
                and (self.directory / kind.state_name).exists()
            ):
                raise InvalidRequest(
                    f"{self.directory} holds {kind.state_name}, which a run with weights {'shared out' if kind is Sharded else 'whole'} in "
                    f"each process has written; go on as it was started (torchrun, train.distributed), or choose another directory"
                )

    def run(
        self, on_step: Callable[[StepStats], None], *, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Train, evaluate and save until the end or `stop`. What else interrupts it costs the steps
        since the last save: it may come in the middle of a step, whose state is worth nothing.
        Raises InvalidRequest where another run is at work in the directory."""
        with alone_in(self.directory, "d3d train") if self.parallel.rank == 0 else nullcontext():
            self._run(on_step, stop)

    def _run(self, on_step: Callable[[StepStats], None], stop: Callable[[], bool]) -> None:
        saved = time.monotonic()

        def after(stats: StepStats) -> None:
            nonlocal saved
            on_step(stats)
            if self._curves is not None:
                self._curves.step(stats, self.config.train.learning_rate_at(stats.step - 1))
            if (
                stats.step % self.config.evaluate_every == 0
                or stats.step == self.config.train.steps
            ):
                self.evaluate(stats)
                saved = time.monotonic()
            elif self.parallel.any(time.monotonic() - saved > STATE_EVERY_S):
                self.trainer.save(self._state)
                saved = time.monotonic()

        try:
            if self.config.measure_start and self.trainer.step == 0:
                self.evaluate(StepStats(0, 0.0, 0, 0.0))
            self.trainer.run(after, stop=stop)
        except D3DError:
            self.trainer.save(self._state)
            raise
        self.trainer.save(self._state)

    def evaluate(self, stats: StepStats) -> None:
        """Measure, log, and keep the checkpoint if it is the best so far."""
        self.acceptance = self._measure()
        length = self.acceptance.acceptance_length
        row: dict[str, Any] = {
            "step": stats.step,
            "loss": stats.loss if stats.step else None,
            "slots": self.trainer.slots_seen,
            "seconds": self.trainer.seconds,
            "acceptance_length": length,
            "acceptance_at": self.acceptance.acceptance_at,
        }
        if self.config.bonus_recall:
            row["bonus_recall"] = {
                str(top): recall for top, recall in self.acceptance.bonus_recall.items()
            }
        if length > self.best:
            self.best = length
            tensors = {
                name: self.parallel.whole(parameter.detach())
                for name, parameter in self.model.trainable().items()
            }
            if self.parallel.rank == 0:
                save_drafter(
                    self.directory / "best",
                    self.model,
                    self.base,
                    provenance=self._provenance(row),
                    tensors=tensors,
                )
        self.trainer.save(self._state)
        if self.parallel.rank == 0:
            self._log(row)

    def _measure(self) -> Acceptance:
        self.model.eval()
        lockstep = self.parallel.shards_weights  # then every pass needs every process
        samples = self.held_out if lockstep else self.parallel.share(self.held_out)
        length = self.config.evaluate_draft_length
        mine = self.parallel.within(
            self.trainer.objective,
            lambda: replay(self.model, samples, length, recall=self.config.bonus_recall),
        )
        return mine if lockstep else total(length, self.parallel.gather(mine))

    def _log(self, row: dict[str, Any]) -> None:
        log = self.directory / "log.jsonl"
        if log.exists():
            drop_torn_line(log)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if self._curves is not None:
            self._curves.measured(row)

    def _provenance(self, row: dict[str, Any]) -> dict[str, Any]:
        return {
            "target": self.source,
            "base": self.base.source,
            "answers": len(self.trainer.samples),
            "sources": dict(
                sorted(Counter(sample.source for sample in self.trainer.samples).items())
            ),
            "config": self.config.model_dump(mode="json"),
            "held_out": {
                "answers": len(self.held_out),
                "draft_length": self.config.evaluate_draft_length,
            },
            "measured": row,
        }


def frequent_tokens(samples: list[Sample], count: int, vocab_size: int) -> Tensor:
    """int64 [count], ascending: the tokens that answers hold most often, then those of prompts,
    then the lowest ids (a tokenizer learnt the most frequent ones first). Raises InvalidRequest
    where there are not so many."""
    if count > vocab_size:
        raise InvalidRequest(
            f"drafter.draft_vocabulary: {count} is more than there are tokens, {vocab_size}"
        )
    answers = Counter(token_id for sample in samples for token_id in sample.answer_ids)
    prompts = Counter(token_id for sample in samples for token_id in sample.prompt_ids)
    by_count = [token_id for counted in (answers, prompts) for token_id, _ in counted.most_common()]
    ranked = dict.fromkeys([*by_count, *range(vocab_size)])
    return torch.tensor(sorted(list(ranked)[:count]))


def check_author(author: Author, base: OpenModel, samples: list[Sample]) -> None:
    """Raises InvalidCheckpoint where a drafter made of `base` would read the author's token ids as
    something else."""
    difference = first_difference(base.tokenizer, author.tokenizer)
    if difference is not None:
        raise InvalidCheckpoint(
            f"drafter.base: {base.source} can't be made a drafter of {author.source}: {difference}"
        )
    largest = max((max(sample.token_ids) for sample in samples if sample.token_ids), default=0)
    if largest >= base.config.vocab_size:
        raise InvalidCheckpoint(
            f"drafter.base: the corpus holds token id {largest}, {base.source} has embeddings for ids below {base.config.vocab_size}"
        )


def _measured(checkpoint: Path) -> float:
    """Acceptance length of the best checkpoint so far, 0 where there is none: from the checkpoint
    itself, so that the two agree."""
    file = checkpoint / "provenance.json"
    return (
        float(json.loads(file.read_text(encoding="utf-8"))["measured"]["acceptance_length"])
        if file.is_file()
        else 0.0
    )
