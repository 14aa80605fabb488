"""A pruning run in a directory: one layer goes at a time, the least harmful first, each step kept
as a checkpoint of its own.

log.jsonl     who was pruned by what, then one depth a line (`d3d.lab.prune.curve.Depth`)
NN-layers/    the drafter at that depth

Every step starts from the checkpoint of the one before, so a run that was interrupted goes on as if
it had not been."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d3d.errors import InvalidRequest
from d3d.files import Journal, alone_in
from d3d.hub.checkpoint import read_config, read_provenance, save_drafter
from d3d.hub.open_drafter import load_drafter
from d3d.hub.open_model import WEIGHTS_FILE, OpenModel
from d3d.lab.prune.curve import Depth
from d3d.lab.prune.removal import depth_layers, removable, without_layer
from d3d.lab.prune.screening import Probe
from d3d.model.drafter import DrafterModel
from d3d.train.config import TrainConfig
from d3d.train.corpus import Sample, corpus_fingerprint
from d3d.train.replay import replay
from d3d.train.trainer import Trainer


@dataclass(frozen=True)
class Settings:
    """How layers are chosen."""

    fewest_layers: int = 1
    shortlist: int = 3
    """Layers of least loss whose removal is scored by acceptance length."""
    draft_length: int = 5
    screened_answers: int = 8
    anchors: int = 8
    """Blocks hung in each screened answer."""
    max_length: int = 512
    """Tokens of a text that are screened and trained on."""
    seed: int = 0


@dataclass(frozen=True)
class Answers:
    """Recorded answers, by what they are for."""

    choosing: list[Sample]
    judging: list[Sample]
    healing: tuple[Sample, ...] = ()


class PruningRun:
    """Starts a run, or goes on with one that was interrupted."""

    def __init__(
        self,
        directory: Path,
        source: Path,
        target: OpenModel,
        answers: Answers,
        settings: Settings,
        heal: TrainConfig | None = None,
    ) -> None:
        """source: the drafter's checkpoint, which is only read. heal: how the drafter is trained
        after every removal, on `answers.healing`. Raises InvalidRequest for settings that can't be,
        prompts that choose and judge, a drafter that is not made of `target`, or another run's
        directory."""
        self.directory, self.target, self.answers, self.settings, self.heal = (
            directory,
            target,
            answers,
            settings,
            heal,
        )
        self._check()
        if (
            base := read_config(source).base
        ).fingerprint != target.fingerprint:  # its layers would be looked for in the target
            raise InvalidRequest(
                f"the drafter {source} is made of {base.source}, not of {target.source}; name its base with --target: answers are "
                "replayed, and only the times are then those of the base"
            )
        model = load_drafter(source, target)
        layers = depth_layers(model.config)
        if not 1 <= settings.fewest_layers <= len(layers):
            raise InvalidRequest(
                f"fewest layers: {settings.fewest_layers} is not within 1 and the drafter's own, {len(layers)}"
            )
        if settings.draft_length > model.config.block_size:
            raise InvalidRequest(
                f"draft length: {settings.draft_length} is above the drafter's block size, {model.config.block_size}"
            )
        self.depths = len(layers) - settings.fewest_layers + 1
        """Points of the whole curve."""
        self.curve: list[Depth] = []
        self._source = source
        self._identity = {
            "drafter": hashlib.sha256(
                (source / WEIGHTS_FILE).read_bytes() + (source / "config.json").read_bytes()
            ).hexdigest(),
            "target": target.fingerprint,
            "choosing": corpus_fingerprint(answers.choosing),
            "judging": corpus_fingerprint(answers.judging),
            "healing": corpus_fingerprint(list(answers.healing)),
            "settings": json.dumps({**vars(settings), "fewest_layers": None}, sort_keys=True),
            "heal": heal.model_dump_json() if heal else "",
        }
        self._open()

    def _check(self) -> None:
        settings, answers = self.settings, self.answers
        if both := {tuple(s.prompt_ids) for s in answers.choosing} & {
            tuple(s.prompt_ids) for s in answers.judging
        }:
            raise InvalidRequest(
                f"{len(both)} prompts would choose layers and judge the choice; give others to judge by"
            )
        for name, samples in (
            ("to choose layers by", answers.choosing),
            ("to judge by", answers.judging),
        ):
            if not any(len(sample.answer_ids) > 1 for sample in samples):
                raise InvalidRequest(f"there is no recorded answer of two tokens or more {name}")
        if self.heal is not None and not answers.healing:
            raise InvalidRequest("healing trains, and there is no corpus to train on")
        measured = {tuple(sample.prompt_ids) for sample in (*answers.choosing, *answers.judging)}
        if any(tuple(sample.prompt_ids) in measured for sample in answers.healing):
            raise InvalidRequest(
                "a prompt of the corpus to heal on is measured, too; leave it out of one of them"
            )
        if (
            min(
                settings.shortlist,
                settings.draft_length,
                settings.screened_answers,
                settings.anchors,
            )
            < 1
        ):
            raise InvalidRequest(
                "shortlist, draft length, screened answers and anchors must be 1 or more"
            )

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / "log.jsonl"
        if not log.exists():
            _append(log, self._identity)
            return
        Journal(log).cut_torn_line()
        lines = log.read_text(encoding="utf-8").splitlines()
        if not lines or json.loads(lines[0]) != self._identity:
            raise InvalidRequest(
                f"{self.directory} holds a run with another drafter, answers or settings; choose another directory"
            )
        self.curve = [Depth.model_validate_json(line) for line in lines[1:]]

    def run(
        self, on_depth: Callable[[Depth], None], on_look: Callable[[str], None] = lambda _: None
    ) -> None:
        """Prune to the fewest layers. `on_look`: told what is being looked at. Raises
        InvalidRequest where another process does so here."""
        with alone_in(self.directory, "d3d prune"):
            self._run(on_depth, on_look)

    def _run(self, on_depth: Callable[[Depth], None], on_look: Callable[[str], None]) -> None:
        if not self.curve:
            self._keep(load_drafter(self._source, self.target), None, {}, {}, on_depth)
        while len(self.curve) < self.depths:
            model = load_drafter(self.checkpoint(self.curve[-1]), self.target)
            if not removable(model.config):
                break
            screened = self._screen(model, on_look)
            best = sorted(screened, key=lambda layer: (screened[layer], layer))[
                : self.settings.shortlist
            ]
            shortlisted = {}
            for layer in best:
                on_look(f"acceptance without layer {layer}")
                shortlisted[layer] = self._acceptance(
                    without_layer(model, layer), self.answers.choosing
                )
            removed = max(shortlisted, key=lambda layer: (shortlisted[layer], -screened[layer]))
            thinner = without_layer(model, removed)
            if self.heal is not None:
                on_look(f"healing without layer {removed}")
                Trainer(thinner, list(self.answers.healing), self.heal).run(lambda _: None)
                thinner.eval()
            self._keep(thinner, removed, screened, shortlisted, on_depth)

    def checkpoint(self, depth: Depth) -> Path:
        return self.directory / depth.checkpoint

    def _screen(self, model: DrafterModel, on_look: Callable[[str], None]) -> dict[int, float]:
        s = self.settings
        probe = Probe(
            model,
            self.answers.choosing[: s.screened_answers],
            draft_length=s.draft_length,
            anchors=s.anchors,
            max_length=s.max_length,
            seed=s.seed,
        )
        losses = {}
        for layer in removable(model.config):
            on_look(f"loss without layer {layer}")
            losses[layer] = probe.loss(without_layer(model, layer))
        return losses

    def _acceptance(self, model: DrafterModel, samples: list[Sample]) -> float:
        return replay(model, samples, self.settings.draft_length).acceptance_length

    def _keep(
        self,
        model: DrafterModel,
        removed: int | None,
        screened: dict[int, float],
        shortlisted: dict[int, float],
        on_depth: Callable[[Depth], None],
    ) -> None:
        layers = len(depth_layers(model.config))
        name = f"{layers:02d}-layers"
        steps = (self.heal.steps if self.heal else 0) * len(self.curve)
        how: dict[str, Any] = {
            "pruned_from": read_provenance(self._source),
            "removed": [
                *(depth.removed for depth in self.curve[1:]),
                *([] if removed is None else [removed]),
            ],
            "healed_steps": steps,
        }
        save_drafter(
            self.directory / name,
            model,
            self.target,
            provenance=how,
            tensors=dict(model.trainable()),
        )
        kept = load_drafter(
            self.directory / name, self.target
        )  # what a user of the checkpoint has is what is measured
        depth = Depth(
            layers=layers,
            removed=removed,
            screened=screened,
            shortlisted=shortlisted,
            healed=steps,
            acceptance_length=self._acceptance(kept, self.answers.choosing),
            judged=self._acceptance(kept, self.answers.judging),
            checkpoint=name,
        )
        _append(self.directory / "log.jsonl", depth.model_dump(mode="json"))
        self.curve.append(depth)
        on_depth(depth)


def _append(log: Path, row: dict[str, Any]) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
