"""Ends of answers.

Stops are checked token by token, so an answer ends exactly as in plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from d3d.engine.round import FinishReason
from d3d.engine.sampling import SamplingParams, Verdict
from d3d.errors import InvalidRequest
from d3d.text.answers import Detokenizer, StopStringFilter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Scan(NamedTuple):
    """Verdict after stops, with its text."""

    verdict: Verdict
    """Verdict cut after the token that ended the answer; `bonus_token` is None if that token was an
    accepted one."""
    finish_reason: FinishReason | None
    text: str
    """Text that may be shown now; the texts of all rounds, joined, are the answer."""


class StopScanner:
    """Cuts one request's verdicts at stops and turns them into text.

    An answer ends with an EOS (unless `ignore_eos`), a token of `stop_token_ids`, the token that
    completes a stop string (once the answer has `min_tokens` tokens), `max_tokens`, or a full
    context (`max_length`); if two coincide, "stop" wins over "length". The ids include the last
    token; the text excludes special tokens, a stop token, a stop string and anything after it. A
    stop string may hold special tokens, which are spelled out for it."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_length: int,
        max_length: int | None,
        eos_token_ids: frozenset[int],
        tokenizer: PreTrainedTokenizerFast | None = None,
    ) -> None:
        """Without a tokenizer there is no text. Raises InvalidRequest if the prompt leaves no room,
        or stop strings have no tokenizer."""
        if max_length is not None and prompt_length >= max_length:
            raise InvalidRequest(
                f"prompt: {prompt_length} tokens leave no room for an answer in a context of "
                f"{max_length}; shorten it"
            )
        if params.stop and tokenizer is None:
            raise InvalidRequest("stop: stop strings need a tokenizer; use stop_token_ids instead")
        self.limit = params.max_tokens
        if max_length is not None:
            self.limit = min(self.limit, max_length - prompt_length)
        """Maximum answer length in tokens."""
        self._min_tokens = params.min_tokens
        self._end_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else eos_token_ids
        )
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._filter = StopStringFilter(params.stop)
        self._num_tokens = 0

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed; drafts beyond this minus one are wasted."""
        return self.limit - self._num_tokens

    def scan(self, verdict: Verdict) -> Scan:
        """Process the next verdict. Must not be called after the answer has ended."""
        texts: list[str] = []
        for index, token_id in enumerate(verdict.token_ids):
            reason = self._take(token_id, texts)
            if reason is not None:
                return Scan(_cut(verdict, index + 1), reason, "".join(texts))
        return Scan(verdict, None, "".join(texts))

    def _take(self, token_id: int, texts: list[str]) -> FinishReason | None:
        self._num_tokens += 1
        texts.append(self._text(token_id))
        if self._filter.stopped:
            return "stop"
        if token_id in self._end_ids:
            texts.append(self._rest())
            return "stop"
        if self._num_tokens >= self.limit:
            texts.append(self._rest())
            return "length"
        return None

    def _text(self, token_id: int) -> str:
        """Text that this token completes."""
        if self._detokenizer is None:
            return ""
        honour = self._num_tokens >= self._min_tokens
        special = self._detokenizer.special.get(token_id)
        if special is not None:
            return self._filter.push(special, honour=honour, special=True)
        if token_id in self._end_ids:
            return ""
        return self._filter.push(self._detokenizer.push(token_id), honour=honour)

    def _rest(self) -> str:
        if self._detokenizer is None:
            return ""
        return self._filter.push(self._detokenizer.finish(), honour=False) + self._filter.finish()


def _cut(verdict: Verdict, length: int) -> Verdict:
    if length > verdict.num_accepted:
        return verdict
    return Verdict(verdict.accepted[:length], None, verdict.logprobs[:length])
