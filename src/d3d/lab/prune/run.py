"""A pruning run: the least harmful layer is removed, again and again, and each depth kept as a
checkpoint.

log.jsonl     the run's identity, then a depth a line (`d3d.lab.prune.curve.Depth`)
NN-layers/    the drafter at that depth

Every step starts from the checkpoint before, so an interrupted run continues as if it had not
been."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d3d.errors import InvalidRequest
from d3d.files import FileKind, Journal, alone_in
from d3d.hub.checkpoint import read_config, read_provenance, save_drafter
from d3d.hub.open_drafter import load_drafter
from d3d.hub.open_model import WEIGHTS_FILE, OpenModel
from d3d.inputs import json_or_none, parse_json, validated
from d3d.json_text import to_json
from d3d.lab.prune.curve import Depth
from d3d.lab.prune.removal import depth_layers, removable, without_layer
from d3d.lab.prune.screening import SlotLoss
from d3d.model.drafter import DrafterConfig, DrafterModel
from d3d.train.config import TrainConfig
from d3d.train.corpus import Sample, corpus_fingerprint
from d3d.train.replay import replay
from d3d.train.trainer import Trainer

Look = Callable[[str], None]


@dataclass(frozen=True)
class PruneSettings:
    """Settings by which layers are chosen."""

    fewest_layers: int = 1
    shortlist: int = 3
    """Layers of least loss whose removal is scored by acceptance length."""
    draft_length: int = 5
    screened_answers: int = 8
    anchors: int = 8
    """Blocks in each screened answer."""
    max_length: int = 512
    """Tokens of a text that are screened."""
    seed: int = 0


@dataclass(frozen=True)
class PruneAnswers:
    """Recorded answers, by use."""

    choosing: list[Sample]
    judging: list[Sample]
    healing: tuple[Sample, ...] = ()


LOG = FileKind("the log of a pruning run", ("drafter", "target", "choosing"))


class PruningRun:
    """A run, new or resumed."""

    def __init__(
        self,
        directory: Path,
        source: Path,
        target: OpenModel,
        answers: PruneAnswers,
        settings: PruneSettings,
        heal: TrainConfig | None = None,
    ) -> None:
        """source: the drafter's checkpoint, which is only read. heal: training after every removal,
        on `answers.healing`. Raises InvalidRequest for impossible settings, prompts that both
        choose and judge, a drafter of another base than `target`, or another run's directory. Holds
        the directory until `run` ends."""
        self.directory, self.target, self.answers = directory, target, answers
        self.settings, self.heal = settings, heal
        _check_settings(settings)
        _check_answers(answers, heals=heal is not None)
        base = read_config(source).base
        if base.fingerprint != target.fingerprint:
            raise InvalidRequest(
                f"the drafter {source} is made of {base.source}, not of {target.source}; name its "
                "base with --target: answers are replayed, and only the times are then the base's"
            )
        config = load_drafter(source, target).config
        _check_drafter(config, settings)
        self.depths = len(depth_layers(config)) - settings.fewest_layers + 1
        """Depths of the whole curve."""
        self.curve: list[Depth] = []
        self._source = source
        self._log = Journal(directory / "log.jsonl", LOG)
        self._held = alone_in(directory, "d3d prune").hold()
        try:
            self._resume()
        except BaseException:
            self._held.release()
            raise

    def _resume(self) -> None:
        """Read the log, or begin one. Raises InvalidRequest if it is that of another run, damaged,
        or of another program."""
        LOG.check(self._log.path)
        weights = (self._source / WEIGHTS_FILE).read_bytes()
        config = (self._source / "config.json").read_bytes()
        identity = {
            "drafter": hashlib.sha256(weights + config).hexdigest(),
            "target": self.target.fingerprint,
            "choosing": corpus_fingerprint(self.answers.choosing),
            "judging": corpus_fingerprint(self.answers.judging),
            "healing": corpus_fingerprint(list(self.answers.healing)),
            "settings": to_json({**vars(self.settings), "fewest_layers": None}, sort_keys=True),
            "heal": self.heal.model_dump_json() if self.heal else "",
        }
        lines = list(self._log.lines())
        if not lines:
            if older := next(self.directory.glob("*-layers"), None):
                raise InvalidRequest(
                    f"{older} is not of this run, which has no log yet; choose another directory"
                )
            self._log.append(to_json(identity))
            return
        if json_or_none(lines[0][1]) != identity:
            raise InvalidRequest(
                f"{self.directory} holds a run with another drafter, answers or settings; choose "
                "another directory"
            )
        advice = "remove this line and those after it to go on from there"
        for number, line in lines[1:]:
            where = f"{self._log.path}, line {number}"
            self.curve.append(validated(Depth, parse_json(line, where, advice), where, advice))

    def run(self, on_depth: Callable[[Depth], None], on_look: Look = lambda _: None) -> None:
        """Prune to the fewest layers, then let other processes work in the directory. on_look:
        called with what is being examined. Raises CantWrite."""
        try:
            if not self.curve:
                on_depth(self._keep(load_drafter(self._source, self.target)))
            while len(self.curve) < self.depths:
                model = load_drafter(self.checkpoint(self.curve[-1]), self.target)
                if not removable(model.config):
                    break
                on_depth(self._prune(model, on_look))
        finally:
            self._held.release()

    def checkpoint(self, depth: Depth) -> Path:
        return self.directory / depth.checkpoint

    def _prune(self, model: DrafterModel, on_look: Look) -> Depth:
        """Removes the layer whose absence costs least acceptance."""
        losses = self._losses(model, on_look)
        best = sorted(losses, key=lambda layer: (losses[layer], layer))[: self.settings.shortlist]
        shortlisted = {}
        for layer in best:
            on_look(f"acceptance without layer {layer}")
            thinner = without_layer(model, layer)
            shortlisted[layer] = self._acceptance(thinner, self.answers.choosing)
        removed = max(best, key=lambda layer: (shortlisted[layer], -losses[layer]))
        thinner = without_layer(model, removed)
        if self.heal is not None:
            on_look(f"healing without layer {removed}")
            Trainer(thinner, list(self.answers.healing), self.heal).run(lambda _: None)
            thinner.eval()
        return self._keep(thinner, removed, screened=losses, shortlisted=shortlisted)

    def _losses(self, model: DrafterModel, on_look: Look) -> dict[int, float]:
        """Loss of the slots without each layer."""
        settings = self.settings
        screening = SlotLoss(
            model,
            self.answers.choosing[: settings.screened_answers],
            draft_length=settings.draft_length,
            anchors=settings.anchors,
            max_length=settings.max_length,
            seed=settings.seed,
        )
        losses = {}
        for layer in removable(model.config):
            on_look(f"loss without layer {layer}")
            losses[layer] = screening.loss(without_layer(model, layer))
        return losses

    def _acceptance(self, model: DrafterModel, samples: list[Sample]) -> float:
        ends, length = self.target.eos_token_ids, self.settings.draft_length
        return replay(model, samples, length, ends=ends).acceptance_length

    def _keep(self, model: DrafterModel, removed: int | None = None, **scores: Any) -> Depth:
        """Saves a depth, and measures the checkpoint as a user would load it."""
        layers = len(depth_layers(model.config))
        name = f"{layers:02d}-layers"
        steps = (self.heal.steps if self.heal else 0) * len(self.curve)
        before = [depth.removed for depth in self.curve[1:]]
        how: dict[str, Any] = {
            "pruned_from": read_provenance(self._source),
            "removed": before if removed is None else [*before, removed],
            "healed_steps": steps,
        }
        path, tensors = self.directory / name, model.trainable()
        save_drafter(path, model, self.target, provenance=how, tensors={**tensors})
        kept = load_drafter(path, self.target)
        depth = Depth(
            layers=layers,
            removed=removed,
            healed=steps,
            acceptance_length=self._acceptance(kept, self.answers.choosing),
            judged=self._acceptance(kept, self.answers.judging),
            checkpoint=name,
            **scores,
        )
        self._log.append(depth.model_dump_json())
        self.curve.append(depth)
        return depth


def _check_settings(settings: PruneSettings) -> None:
    counts = (settings.shortlist, settings.draft_length, settings.screened_answers)
    if min(*counts, settings.anchors) < 1:
        raise InvalidRequest(
            "shortlist, draft length, screened answers and anchors must be 1 or more"
        )


def _check_answers(answers: PruneAnswers, *, heals: bool) -> None:
    choosing, judging, healing = (
        {tuple(sample.prompt_ids) for sample in samples}
        for samples in (answers.choosing, answers.judging, answers.healing)
    )
    if both := choosing & judging:
        raise InvalidRequest(
            f"{len(both)} prompts would choose layers and judge the choice; give others to judge by"
        )
    uses = {"to choose layers by": answers.choosing, "to judge by": answers.judging}
    for use, samples in uses.items():
        if not any(len(sample.answer_ids) > 1 for sample in samples):
            raise InvalidRequest(f"there is no recorded answer of two tokens or more {use}")
    if heals and not answers.healing:
        raise InvalidRequest("healing trains, and there is no corpus to train on")
    if healing & (choosing | judging):
        raise InvalidRequest(
            "a prompt of the corpus to heal on is measured, too; leave it out of one of them"
        )


def _check_drafter(config: DrafterConfig, settings: PruneSettings) -> None:
    layers = len(depth_layers(config))
    if not 1 <= settings.fewest_layers <= layers:
        raise InvalidRequest(
            f"fewest layers: {settings.fewest_layers} is not within 1 and the drafter's own, "
            f"{layers}"
        )
    if settings.draft_length > config.block_size:
        raise InvalidRequest(
            f"draft_length: {settings.draft_length} is above the drafter's block size, "
            f"{config.block_size}"
        )
