"""Classic speculative decoding: a smaller causal model drafts token by token (Leviathan et al.,
arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import torch
from torch import Tensor

from d3d.core.sequence import Sequence
from d3d.core.types import DraftBlock
from d3d.errors import InvalidCheckpoint, InvalidRequest
from d3d.hub.fingerprint import first_difference
from d3d.hub.open_model import OpenModel, TargetModel
from d3d.model.drafter import DrafterModel
from d3d.model.transformer import Transformer
from d3d.target.native import NativeEngine


@dataclass(frozen=True)
class DraftModel:
    """Greedy drafts of a causal model, one pass a token."""

    model: Transformer
    target_vocab_size: int
    block_size: int = 16

    def open(self, num_sequences: int, capacity: int) -> DraftModelSession:
        return DraftModelSession(self, num_sequences, capacity)


def draft_model(model: OpenModel, target: TargetModel) -> DraftModel:
    """A model that drafts for a target. Raises InvalidCheckpoint where their tokenizers read ids
    differently."""
    difference = first_difference(model.tokenizer, target.tokenizer)
    if difference is not None:
        raise InvalidCheckpoint(
            f"{model.source} can't draft for {target.source}: {difference}; take a model of the target's own family"
        )
    return DraftModel(model.transformer, target.vocab_size)


def autoregressive_head(drafter: DrafterModel, target_vocab_size: int) -> DraftModel:
    """A block drafter's own clean rows as a causal drafter: what its blocks have to beat.

    Raises InvalidRequest for a drafter whose deltas act on clean rows too: without slots it is not
    what was trained."""
    delta = drafter.config.delta
    if delta is not None and not drafter.config.clean_rows_are_base:
        raise InvalidRequest(
            "draft_model: this drafter's deltas act on clean rows too; name a causal model to draft with instead"
        )
    return DraftModel(drafter.transformer, target_vocab_size)


class DraftModelSession:
    """The drafting model's cache; between drafts it may hold drafted tokens, which the next draft
    forgets unless they were kept."""

    def __init__(self, drafter: DraftModel, num_sequences: int, capacity: int) -> None:
        engine = NativeEngine(drafter.model)
        self._drafter = drafter
        self._limit = engine.max_length
        # besides the text: the padding beside another sequence's catch-up rows
        self._session = engine.open(
            num_sequences, min(capacity, engine.max_length) + drafter.block_size + 1
        )
        self._held: list[list[int]] = [[] for _ in range(num_sequences)]

    def keep(self, rows: list[int]) -> None:
        self._session.keep(rows)
        self._held = [self._held[row] for row in rows]

    def join(self, count: int) -> None:
        self._session.join(count)
        self._held += [[] for _ in range(count)]

    def draft(self, sequences: ListLike[Sequence], lengths: ListLike[int]) -> list[DraftBlock]:
        # the last drafted token is never run, so a text may grow up to the context's end
        wanted = [
            max(0, min(n, self._drafter.block_size, self._limit - len(s)))
            for s, n in zip(sequences, lengths, strict=True)
        ]
        vocab_size = self._drafter.model.config.vocab_size
        unknown = [max(sequence.token_ids) >= vocab_size for sequence in sequences]
        going = [0 if odd else length for odd, length in zip(unknown, wanted, strict=True)]
        drafted: list[list[int]] = [[] for _ in sequences]
        finite = [True] * len(sequences)
        feeds = self._catch_up(sequences, going)
        for step in range(max(going)):
            rows = self._run(feeds)
            feeds = []
            for row, logits in enumerate(rows):
                if logits is None or step >= going[row]:
                    feeds.append([])
                    continue
                finite[row] &= bool(torch.isfinite(logits).all())
                drafted[row].append(int(logits.argmax()))
                feeds.append(
                    drafted[row][-1:]
                    if step + 1 < going[row] and drafted[row][-1] < vocab_size
                    else []
                )
        return [
            self._block(ids, is_finite, odd)
            for ids, is_finite, odd in zip(drafted, finite, unknown, strict=True)
        ]

    def _catch_up(self, sequences: ListLike[Sequence], going: list[int]) -> list[list[int]]:
        """What each row has yet to run, the anchor always among it; the cache forgets what was not
        kept."""
        shared = [
            _shared_length(held, sequence.token_ids[:-1])
            for held, sequence in zip(self._held, sequences, strict=True)
        ]
        self._session.crop(shared)
        self._held = [held[:length] for held, length in zip(self._held, shared, strict=True)]
        feeds = [
            sequence.token_ids[length:] if drafts else []
            for sequence, length, drafts in zip(sequences, shared, going, strict=True)
        ]
        for row, feed in enumerate(feeds):
            if len(feed) > self._drafter.block_size + 1 and any(
                shared
            ):  # it has joined the others: in a pass of all they would be padding
                self._run([feed[:-1] if place == row else [] for place in range(len(feeds))])
                feeds[row] = feed[-1:]
        return feeds

    def _run(self, feeds: list[list[int]]) -> list[Tensor | None]:
        """Float32 logits [target_vocab_size] behind each row's tokens; None where there are
        none."""
        if not any(feeds):
            return [None] * len(feeds)
        outputs = self._session.forward(feeds, last_only=True)
        for held, feed in zip(self._held, feeds, strict=True):
            held += feed
        return [
            logits[-1, : self._drafter.target_vocab_size] if feed else None
            for logits, feed in zip(outputs, feeds, strict=True)
        ]

    def _block(self, token_ids: list[int], is_finite: bool, odd: bool) -> DraftBlock:
        if odd:
            return DraftBlock(
                fault=f"the text has an id that the drafter does not know (it knows {self._drafter.model.config.vocab_size})"
            )
        return (
            DraftBlock(tuple(token_ids))
            if is_finite
            else DraftBlock(fault="the drafter's logits are not finite")
        )


def _shared_length(a: ListLike[int], b: ListLike[int]) -> int:
    """How many tokens from the start two texts have in common."""
    return next(
        (place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
        min(len(a), len(b)),
    )
