"""Where an answer ends. Tokens are taken one by one, so a block ends exactly where plain decoding
would."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from d3d.core.types import FinishReason, SamplingParams, Verdict
from d3d.decoding.detokenize import Detokenizer, StopStringFilter
from d3d.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Scan(NamedTuple):
    """What a verdict has come to."""

    verdict: Verdict
    """Cut behind the token that ended the answer; `bonus_token` is None where that was an accepted
    one."""
    finish_reason: FinishReason | None
    text: str
    """What may be shown now; all texts of a request, joined, are its answer."""


class StopScanner:
    """Cuts the verdicts of one request and turns them into text.

    An answer ends with an EOS (unless `ignore_eos`), a token of `stop_token_ids`, the token that
    completes a stop string (heeded only once the answer has `min_tokens` tokens), `max_tokens`, or
    when prompt and answer fill `max_length`; if two fall on one token, "stop" wins over "length".
    The ids hold the last token; the text does not hold an EOS, a stop token, a stop string, or what
    follows it."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_length: int,
        max_length: int,
        eos_token_ids: frozenset[int],
        tokenizer: PreTrainedTokenizerFast | None = None,
    ) -> None:
        """Without a tokenizer there is no text. Raises InvalidRequest for a prompt that leaves no
        room, and for stop strings that would need a tokenizer."""
        if prompt_length >= max_length:
            raise InvalidRequest(
                f"prompt: {prompt_length} tokens leave no room for an answer in a context of {max_length}; shorten it"
            )
        if params.stop and tokenizer is None:
            raise InvalidRequest("stop: stop strings need a tokenizer; use stop_token_ids instead")
        self.limit = min(params.max_tokens, max_length - prompt_length)
        """Most tokens that the answer can have."""
        self._min_tokens = params.min_tokens
        self._end_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else eos_token_ids
        )
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._filter = StopStringFilter(params.stop)
        self._num_tokens = 0

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed; drafting more than this minus one is wasted."""
        return self.limit - self._num_tokens

    def scan(self, verdict: Verdict) -> Scan:
        """Take the next verdict. Not to be called once the answer has ended."""
        texts: list[str] = []
        for index, token_id in enumerate(verdict.token_ids):
            reason = self._take(token_id, texts)
            if reason is not None:
                return Scan(_cut(verdict, index + 1), reason, "".join(texts))
        return Scan(verdict, None, "".join(texts))

    def _take(self, token_id: int, texts: list[str]) -> FinishReason | None:
        self._num_tokens += 1
        if token_id in self._end_ids:
            texts.append(self._rest())
            return "stop"
        if self._detokenizer is not None:
            texts.append(
                self._filter.push(
                    self._detokenizer.push(token_id), honour=self._num_tokens >= self._min_tokens
                )
            )
            if self._filter.stopped:
                return "stop"
        if self._num_tokens >= self.limit:
            texts.append(self._rest())
            return "length"
        return None

    def _rest(self) -> str:
        if self._detokenizer is None:
            return ""
        return self._filter.push(self._detokenizer.finish(), honour=False) + self._filter.finish()


def _cut(verdict: Verdict, length: int) -> Verdict:
    if length > verdict.num_accepted:
        return verdict
    return Verdict(verdict.accepted[:length], None, verdict.logprobs[:length])
