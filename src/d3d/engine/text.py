"""Detokenization and stops.

Text only grows and never shows half a character. A token's text can depend on its neighbours (bytes
of one character, the space that SentencePiece drops at the start), so tokens are decoded together
with a few before them, and only new text is returned. Stops are checked token by token, so an
answer ends exactly as in plain decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from d3d.engine.round import FinishReason
from d3d.engine.sampling import SamplingParams, Verdict
from d3d.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_REPLACEMENT = "\ufffd"
_MAX_HELD = 4
"""Tokens after which incomplete bytes can no longer form a character: UTF-8 takes at most four."""
_KEPT, _FULL, _OVERFULL = 8, 16, 32
"""Every _FULL tokens the window is shortened to _KEPT or slightly more if the cut is clean; from
_OVERFULL on, in any case."""


class Detokenizer:
    """Incremental `tokenizer.decode(ids, skip_special_tokens=True,
    clean_up_tokenization_spaces=False)`.

    The pieces, joined, are the decoded whole, with one exception: tokenizers with byte-fallback
    tokens (Llama 2) turn a whole run of bytes into replacement characters once one byte is wrong;
    characters already returned stay."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._skipped = {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._window: list[int] = []
        self._text = ""
        self._num_shown = 0
        self._num_held = 0
        self._settled_length = 0

    def push(self, token_id: int) -> str:
        """Text completed by this token, possibly empty."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if self._settled_length and not text.startswith(self._text[: self._num_shown]):
            # A byte-fallback run that has become invalid, perhaps for a moment: only its end is
            # new.
            self._window = self._window[self._settled_length :]
            self._num_shown = self._settled_length = 0
            text = self._decode(self._window)
        self._text = text
        self._num_held = self._num_held + 1 if text.endswith(_REPLACEMENT) else 0
        settled = text[:-1] if self._num_held > _MAX_HELD else text.rstrip(_REPLACEMENT)
        piece = text[self._num_shown : len(settled)]
        self._num_shown = max(self._num_shown, len(settled))
        if self._num_shown == len(text):
            self._settled_length = len(self._window)
        if len(self._window) % _FULL == 0:
            self._shorten()
        return piece

    def finish(self) -> str:
        """Text held back so far, half characters as U+FFFD."""
        piece = self._text[self._num_shown :]
        self._num_shown = len(self._text)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def _shorten(self) -> None:
        """Drop the front of the window. Unshown text is counted from the end, so a front that
        decodes differently is harmless: UTF-8 resynchronises within three bytes."""
        waiting = self._text[self._num_shown :]
        overfull = len(self._window) >= _OVERFULL
        for start in range(len(self._window) - _KEPT, 0, -1):
            text = self._decode(self._window[start:])
            clean = self._text.endswith(text) or overfull
            if clean and text.endswith(waiting) and len(text) > len(waiting):
                self._window = self._window[start:]
                self._text, self._num_shown = text, len(text) - len(waiting)
                self._settled_length = max(0, self._settled_length - start)
                return


class StopStringFilter:
    """Passes text on up to the first stop string, holding back possible beginnings of one.

    The stop string that is complete first counts, so the result does not depend on how the text is
    cut into pieces."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, piece: str, *, honour: bool = True) -> str:
        """Text that may be shown. With `honour` False, a stop string completed by this piece is
        ordinary text."""
        text = self._held + piece
        if honour and (end := self._first_stop(text)) is not None:
            self.stopped, self._held = True, ""
            return text[:end]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        cut = len(text) - num_held
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """Text held back so far."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        """Start of the stop string that ends first; text before the last push has been checked."""
        ends = []
        for stop in self._stop:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start))
        return min(ends)[1] if ends else None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


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
    token; the text excludes an EOS, a stop token, a stop string and anything after it."""

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
