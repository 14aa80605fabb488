"""Token ids as text, and stop strings in it.

Text only grows and never shows half a character. A token's text can depend on its neighbours (bytes
of one character, the space that SentencePiece drops at the start), so tokens are decoded together
with a few before them, and only new text is returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_REPLACEMENT = "\ufffd"
_MAX_HELD = 4
"""Tokens after which incomplete bytes can no longer form a character: UTF-8 takes at most four."""
_KEPT, _FULL, _OVERFULL = 8, 16, 32
"""Every _FULL tokens the window is shortened to _KEPT or slightly more if the cut is clean; from
_OVERFULL on, in any case."""


def decode_answer(tokenizer: PreTrainedTokenizerFast, token_ids: Sequence[int]) -> str:
    """The text of an answer, without special tokens."""
    return str(
        tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    )


class Detokenizer:
    """Incremental `decode_answer`.

    The pieces, joined, are the decoded whole, with one exception: tokenizers with byte-fallback
    tokens (Llama 2) turn a whole run of bytes into replacement characters once one byte is wrong;
    characters already returned stay."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.special = {
            token_id: str(token.content)
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special
        }
        """Text of the tokens that answers do not show."""
        self._window: list[int] = []
        self._text = ""
        self._num_shown = 0
        self._num_held = 0
        self._settled_length = 0

    def push(self, token_id: int) -> str:
        """Text completed by this token, possibly empty."""
        if token_id in self.special:
            return ""
        self._window.append(token_id)
        text = decode_answer(self._tokenizer, self._window)
        if self._settled_length and not text.startswith(self._text[: self._num_shown]):
            # A byte-fallback run that has become invalid, perhaps for a moment: only its end is
            # new.
            self._window = self._window[self._settled_length :]
            self._num_shown = self._settled_length = 0
            text = decode_answer(self._tokenizer, self._window)
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

    def _shorten(self) -> None:
        """Drop the front of the window. Unshown text is counted from the end, so a front that
        decodes differently is harmless: UTF-8 resynchronises within three bytes."""
        waiting = self._text[self._num_shown :]
        overfull = len(self._window) >= _OVERFULL
        for start in range(len(self._window) - _KEPT, 0, -1):
            text = decode_answer(self._tokenizer, self._window[start:])
            clean = self._text.endswith(text) or overfull
            if clean and text.endswith(waiting) and len(text) > len(waiting):
                self._window = self._window[start:]
                self._text, self._num_shown = text, len(text) - len(waiting)
                self._settled_length = max(0, self._settled_length - start)
                return


class StopStringFilter:
    """Passes text on up to the first stop string, holding back possible beginnings of one.

    Stop strings are looked for in the text as it is shown, and in the text with special tokens. The
    one that is complete first counts, so the result does not depend on how the text is cut into
    pieces."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stop = stop
        self._held = ""
        self._shown: list[bool] = []
        """Of each held character: False for those of special tokens."""
        self.stopped = False

    def push(self, piece: str, *, honour: bool = True, special: bool = False) -> str:
        """Text that may be shown. With `honour` False, a stop string completed by this piece is
        ordinary text; `special`: the piece is a special token, which is never shown."""
        if not self._stop:
            return "" if special else piece
        checked = len(self._held)
        text = self._held + piece
        shown = self._shown + [not special] * len(piece)
        views = [list(range(len(text)))]
        if not all(shown):
            views.append([place for place in views[0] if shown[place]])
        if honour and (end := self._first_stop(text, views, checked)) is not None:
            self.stopped, self._held, self._shown = True, "", []
            return _only(text[:end], shown)
        cut = min(self._hold_from(text, places) for places in views)
        self._held, self._shown = text[cut:], shown[cut:]
        return _only(text[:cut], shown)

    def finish(self) -> str:
        """Text held back so far."""
        held = _only(self._held, self._shown)
        self._held, self._shown = "", []
        return held

    def _first_stop(self, text: str, views: list[list[int]], checked: int) -> int | None:
        """Start of the stop string that ends first; the first `checked` characters are known to
        hold none that counts. views: places of the characters that are searched."""
        ends = []
        for places in views:
            view = "".join(text[place] for place in places)
            num_checked = sum(place < checked for place in places)
            for stop in self._stop:
                start = view.find(stop, max(0, num_checked - len(stop) + 1))
                if start >= 0:
                    ends.append((places[start + len(stop) - 1], places[start]))
        return min(ends)[1] if ends else None

    def _hold_from(self, text: str, places: list[int]) -> int:
        """Start of the longest end that may begin a stop string."""
        view = "".join(text[place] for place in places)
        num_held = max(_overlap(view, stop) for stop in self._stop)
        return places[len(places) - num_held] if num_held else len(text)


def _only(text: str, shown: list[bool]) -> str:
    return "".join(character for character, is_shown in zip(text, shown, strict=False) if is_shown)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
