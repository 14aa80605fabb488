"""A training run in a directory: state to continue from, a log, and the best checkpoint so far.

state.pt      everything needed to continue (state.parts/ if several processes share the weights)
log.jsonl     losses and held-out acceptance, one JSON object a line
tensorboard/  the same as curves, if wanted
best/         the drafter that measured best on the held-out answers"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from d3d.errors import CantWrite, D3DError, InvalidCheckpoint, InvalidRequest, MissingExtra
from d3d.files import FileKind, Journal, alone_in, restore_interrupted
from d3d.hub.checkpoint import (
    DRAFTER,
    PROVENANCE,
    check_mask_token,
    save_drafter,
)
from d3d.hub.fingerprint import first_difference
from d3d.hub.names import resolve_drafter
from d3d.hub.open_drafter import start_from
from d3d.hub.open_model import CONFIG_FILE, OpenModel
from d3d.inputs import read_object, validated
from d3d.json_text import to_json
from d3d.model.drafter import DrafterModel
from d3d.model.from_target import from_target
from d3d.train.acceptance import RoundCounts, total
from d3d.train.config import RunConfig
from d3d.train.corpus import Sample, corpus_fingerprint
from d3d.train.parallel import Parallel, Sharded
from d3d.train.replay import replay
from d3d.train.trainer import StepStats, Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG_FILE = "log.jsonl"
LOG = FileKind("the log of a training run", ("step", "loss", "slots"))
STATE_EVERY_S = 300.0
"""Longest time between two saves, in seconds; a killed run loses no more."""


class Author(NamedTuple):
    """The model that wrote the corpus, if the drafter is made of another one. Its weights are not
    needed."""

    source: str
    tokenizer: PreTrainedTokenizerBase


class TrainingRun:
    """Starts a run, or continues one that was interrupted."""

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
        """base: the model whose layers the drafter starts from; author: who wrote the corpus, None
        for the base itself. Holds the directory until `run` ends.

        Samples whose prompt is held out too are not trained on. Raises InvalidRequest and
        InvalidCheckpoint as its parts do."""
        if not any(len(sample.answer_ids) > 1 for sample in held_out):
            raise InvalidRequest(
                "the held-out corpus has no answer of two tokens or more, so nothing can be "
                "measured"
            )
        self.directory, self.config, self.held_out = directory, config, held_out
        self.parallel = parallel or Parallel()
        self.source = base.source if author is None else author.source
        if author is not None:
            check_author(author, base, samples + held_out)
        held_prompts = {tuple(sample.prompt_ids) for sample in held_out}
        training = [sample for sample in samples if tuple(sample.prompt_ids) not in held_prompts]
        self.model, self.base = _new_drafter(base, config, training)
        identity = {"base": base.fingerprint, "corpus": corpus_fingerprint(training)}
        self.trainer = Trainer(self.model, training, config.train, self.parallel, identity)
        self.left_out = dict(self.trainer.left_out)
        """Number of samples that are not trained on, by reason."""
        if len(training) < len(samples):
            self.left_out["their prompt is held out"] = len(samples) - len(training)
        self.acceptance: RoundCounts | None = None
        """The last measurement on the held-out answers."""
        self._state = directory / self.parallel.state_name
        curves = config.tensorboard and self.parallel.rank == 0
        self.best = 0.0
        self._open()
        try:
            self._resume()
            self._curves = Curves(directory / "tensorboard") if curves else None
        except BaseException:
            self._release()
            raise

    def _open(self) -> None:
        """Hold the directory, creating it if necessary. Raises InvalidRequest if another run is at
        work in it."""
        if self.parallel.rank == 0:
            self._held = alone_in(self.directory, "d3d train").hold()

    def _release(self) -> None:
        if self.parallel.rank == 0:
            self._held.release()

    def _resume(self) -> None:
        """Read the state, if there is one. Raises InvalidRequest if it is of the other kind, or if
        there are files that are not of a run."""
        if self.parallel.rank == 0:
            LOG.check(self.directory / LOG_FILE)
            DRAFTER.check_in(self.directory / "best", CONFIG_FILE)
            restore_interrupted(self._state)
            restore_interrupted(self.directory / "best")
        self.parallel.any(False)  # the others wait
        for kind, weights in ((Parallel, "whole"), (Sharded, "shared out")):
            other = kind.state_name != self.parallel.state_name
            if other and (self.directory / kind.state_name).exists():
                raise InvalidRequest(
                    f"{self.directory} holds {kind.state_name}, which a run with weights {weights} "
                    "in each process has written; continue it as it was started (torchrun, "
                    "train.distributed), or choose another directory"
                )
        best = self.directory / "best"
        if self._state.exists():
            self.trainer.load(self._state)
            self.best = _measured(best)
        elif best.exists():
            raise InvalidRequest(
                f"{best} holds a drafter, and {self.directory} no {self._state.name} of the run "
                "that made it; choose another directory, so that it is not replaced"
            )

    def run(
        self, on_step: Callable[[StepStats], None], *, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Train, evaluate and save until the end or `stop`.

        Any other interruption may come in the middle of a step, so it costs the steps since the
        last save. Raises CantWrite; what was saved before stays whole."""
        try:
            self._run(on_step, stop)
        finally:
            self._release()

    def _run(self, on_step: Callable[[StepStats], None], stop: Callable[[], bool]) -> None:
        saved = time.monotonic()

        def after(stats: StepStats) -> None:
            nonlocal saved
            on_step(stats)
            if self._curves is not None:
                self._curves.step(stats, self.config.train.learning_rate_at(stats.step - 1))
            last = stats.step == self.config.train.steps
            if last or stats.step % self.config.evaluate_every == 0:
                self.evaluate(stats)
                saved = time.monotonic()
            elif self.parallel.any(time.monotonic() - saved > STATE_EVERY_S):
                self.trainer.save(self._state)
                saved = time.monotonic()

        if self.trainer.step == 0:
            self.trainer.save(self._state)  # so that there is no best checkpoint without a state
        try:
            if self.config.measure_start and self.trainer.step == 0:
                self.evaluate(StepStats(0, 0.0, 0, 0.0))
            self.trainer.run(after, stop=stop)
        except CantWrite:
            raise
        except D3DError:
            self.trainer.save(self._state)
            raise
        self.trainer.save(self._state)

    def evaluate(self, stats: StepStats) -> None:
        """Measure, log, and keep the checkpoint if it is the best so far."""
        self.acceptance = self._measure()
        row: dict[str, Any] = {
            "step": stats.step,
            "loss": stats.loss if stats.step else None,
            "slots": self.trainer.slots_seen,
            "seconds": self.trainer.seconds,
            "acceptance_length": self.acceptance.acceptance_length,
            "acceptance_at": self.acceptance.acceptance_at,
        }
        if self.config.bonus_recall:
            recall = self.acceptance.bonus_recall
            row["bonus_recall"] = {str(top): shares for top, shares in recall.items()}
        if self.acceptance.acceptance_length > self.best:
            self.best = self.acceptance.acceptance_length
            tensors = {
                name: self.parallel.whole(parameter.detach())
                for name, parameter in self.model.trainable().items()
            }
            if self.parallel.rank == 0:
                provenance = self._provenance(row)
                best = self.directory / "best"
                save_drafter(best, self.model, self.base, provenance=provenance, tensors=tensors)
        self.trainer.save(self._state)
        if self.parallel.rank == 0:
            Journal(self.directory / LOG_FILE, LOG).append(to_json(row))
            if self._curves is not None:
                self._curves.measured(row)

    def _measure(self) -> RoundCounts:
        self.model.eval()
        lockstep = self.parallel.shards_weights  # every pass then needs all processes
        samples = self.held_out if lockstep else self.parallel.share(self.held_out)
        length = self.config.evaluate_draft_length
        mine = self.parallel.within(
            self.trainer.objective,
            lambda: replay(
                self.model,
                samples,
                length,
                ends=self.base.eos_token_ids,
                recall=self.config.bonus_recall,
            ),
        )
        return mine if lockstep else total(length, self.parallel.gather(mine))

    def _provenance(self, row: dict[str, Any]) -> dict[str, Any]:
        sources = Counter(sample.source for sample in self.trainer.samples)
        return {
            "target": self.source,
            "base": self.base.source,
            "answers": len(self.trainer.samples),
            "sources": dict(sorted(sources.items())),
            "config": self.config.model_dump(mode="json"),
            "held_out": {
                "answers": len(self.held_out),
                "draft_length": self.config.evaluate_draft_length,
            },
            "measured": row,
        }


class Curves:
    """Writes a run's curves for TensorBoard."""

    def __init__(self, directory: Path) -> None:
        """Raises MissingExtra if TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra(
                "tensorboard: true needs TensorBoard: pip install 'd3d-decoding[train]', or leave "
                "the key out (log.jsonl is always written)"
            ) from error
        self._writer = SummaryWriter(str(directory))

    def step(self, stats: StepStats, learning_rate: float) -> None:
        self._writer.add_scalar("train/loss", stats.loss, stats.step)
        self._writer.add_scalar("train/learning_rate", learning_rate, stats.step)
        self._writer.add_scalar("train/slots_per_second", stats.slots / stats.seconds, stats.step)

    def measured(self, row: dict[str, Any]) -> None:
        """row: a line of log.jsonl."""
        shares = {
            f"acceptance_at_{place:02}": share
            for place, share in enumerate(row["acceptance_at"], 1)
        }
        for top, recall in row.get("bonus_recall", {}).items():
            for num_accepted, share in enumerate(recall):
                if share is not None:
                    shares[f"bonus_recall_top_{top}/num_accepted_{num_accepted:02}"] = share
        for name, value in {"acceptance_length": row["acceptance_length"], **shares}.items():
            self._writer.add_scalar(f"held_out/{name}", value, row["step"])
        self._writer.flush()


def _new_drafter(
    base: OpenModel, config: RunConfig, samples: list[Sample]
) -> tuple[DrafterModel, OpenModel]:
    """The untrained drafter, and its base; full weights replace the base's, which frees these."""
    drafter = config.drafter.resolve(base.config.num_layers)
    check_mask_token(drafter, base)
    model = from_target(base.transformer, drafter, seed=config.train.seed)
    if config.drafter.start is not None:
        start_from(resolve_drafter(config.drafter.start), model, base)
    if drafter.draft_vocabulary is not None:
        vocab_size = base.config.num_tokens
        model.set_draft_ids(frequent_tokens(samples, drafter.draft_vocabulary, vocab_size))
    if drafter.delta is None:
        base = dataclasses.replace(base, transformer=model.transformer)
    return model, base


def frequent_tokens(samples: list[Sample], count: int, vocab_size: int) -> Tensor:
    """The most frequent tokens, ascending, int64 [count]: first those of answers, then those of
    prompts, then the lowest ids (tokenizers learn frequent tokens first). Raises InvalidRequest if
    there are fewer than `count`."""
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
    """Raise InvalidCheckpoint if `base` would read the author's token ids as other tokens."""
    difference = first_difference(base.tokenizer, author.tokenizer)
    if difference is not None:
        raise InvalidCheckpoint(
            f"drafter.base: {base.source} can't be made a drafter of {author.source}: {difference}"
        )
    largest = max((max(sample.token_ids) for sample in samples if sample.token_ids), default=0)
    if largest >= base.config.vocab_size:
        raise InvalidCheckpoint(
            f"drafter.base: the corpus holds token id {largest}, {base.source} has embeddings for "
            f"ids below {base.config.vocab_size}"
        )


class Measured(BaseModel, extra="allow"):
    """Held-out figures of a checkpoint."""

    acceptance_length: float = Field(ge=0, allow_inf_nan=False)


class BestCheckpoint(BaseModel, extra="allow"):
    """Provenance of the best checkpoint, as far as a run that goes on needs it."""

    measured: Measured


def _measured(checkpoint: Path) -> float:
    """Acceptance length of the best checkpoint, from its provenance; 0 if there is none. Raises
    InvalidRequest if it is damaged."""
    if not checkpoint.is_dir():
        return 0.0
    advice = (
        "so the checkpoint can't be compared; move it out of the directory, and the next "
        "measurement makes a new one"
    )
    file = checkpoint / PROVENANCE
    content = read_object(file, advice)
    return validated(BestCheckpoint, content, file, advice).measured.acceptance_length
