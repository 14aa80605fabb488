"""Drafter without a model: prompt lookup alone."""

from __future__ import annotations

from collections.abc import Sequence

from d3d.engine.drafter import Draft, Drafter
from d3d.engine.request import Request
from d3d.methods.ngram.lookup import PromptLookup


class NgramDrafter(Drafter):
    """Copies what followed the latest earlier occurrence of the text's last tokens."""

    def __init__(self, max_draft_length: int, shortest: int = 1, longest: int = 3) -> None:
        """shortest, longest: lengths of matched runs, in tokens. Raises ValueError unless 1 <=
        shortest <= longest."""
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest must be within 1 and longest, got {shortest} and {longest}")
        self.max_draft_length = max_draft_length
        self._shortest, self._longest = shortest, longest
        self._pasts: dict[int, PromptLookup] = {}

    def propose(self, requests: Sequence[Request]) -> list[Draft]:
        copies = [self._copy(request) for request in requests]
        return [Draft(tokens, looked_up=bool(tokens)) for tokens in copies]

    def _copy(self, request: Request) -> tuple[int, ...]:
        if request.id not in self._pasts:
            self._pasts[request.id] = PromptLookup(self._shortest, self._longest)
        room = request.draft_room(self.max_draft_length)
        return self._pasts[request.id].copy(request.token_ids, room)

    def end(self, request: Request) -> None:
        self._pasts.pop(request.id, None)

    @property
    def num_held(self) -> int:
        return len(self._pasts)
