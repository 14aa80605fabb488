"""Control tokens that a chat template writes, told apart from text that spells them.

A message may hold any text, `<|im_end|>` too. Only the template may write control tokens: the
messages' own spellings of them are broken by a marker before the template is rendered, and those
that are whole in the rendered text are the template's."""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from d3d.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, Any]
Render = Callable[[Sequence[Message]], str]
MARKERS = range(0xF0000, 0xFFFFE)
"""Code points for private use; one that occurs nowhere becomes the marker."""


def encode_rendered(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], render: Render
) -> list[int]:
    """Token ids of the rendered messages, in which only the template's control tokens are such.

    Equal to encoding `render(messages)` as it is, unless a message spells a control token. Raises
    InvalidRequest if this tokenizer can't encode such a message as text."""
    text = render(messages)
    coder = _coder(tokenizer)
    marker = _unused("".join([str(tokenizer.chat_template), text, *map(str, messages)]))
    broken = [coder.broken(message, marker) for message in messages]
    if broken != list(messages):
        marked = render(broken)
        if len(coder.places(marked, marker)) != len(coder.places(text)):
            return coder.encode(marked, marker)
    return list(tokenizer.encode(text, add_special_tokens=False))


def _unused(text: str) -> str:
    return next(mark for mark in map(chr, MARKERS) if mark not in text)


class _Reader(NamedTuple):
    """A tokenizer that reads control tokens as text, and a name by which it reads each as such."""

    backend: Any
    stand_ins: dict[str, str]


class ControlCoder:
    """Finds a tokenizer's control tokens in text, and encodes text around them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        named = set(tokenizer.all_special_tokens)
        self.tokens = {
            token.content: token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content and (token.special or token.content in named)
        }
        longest_first = sorted(self.tokens, key=len, reverse=True)
        self._pattern = f"(?:{'|'.join(map(re.escape, longest_first))})" if self.tokens else "(?!)"
        self._longest = max(map(len, self.tokens), default=0)
        self._beginnings = {token[:cut] for token in self.tokens for cut in range(2, len(token))}
        self._ends = {token[cut:] for token in self.tokens for cut in range(1, len(token) - 1)}
        self._added = tokenizer.added_tokens_decoder
        self._unknown_id = tokenizer.unk_token_id
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._reader: _Reader | None = None

    def places(self, text: str, marker: str = "") -> list[tuple[int, int]]:
        """Start and end of each control token that no marker breaks."""
        pattern = f"{self._pattern}(?!{marker})" if marker else self._pattern
        return [found.span() for found in re.finditer(pattern, text)]

    def broken(self, message: Message, marker: str) -> Message:
        """The message with a marker behind the first character of each control token that its texts
        spell, and of each part of one that its neighbours could complete."""
        changed: Message = self._broken(message, marker)
        content = message["content"]
        return changed | {
            "content": _marked(content, {*self._starts(content), *self._parts(content)}, marker)
        }

    def _broken(self, value: Any, marker: str) -> Any:
        if isinstance(value, str):
            return _marked(value, set(self._starts(value)), marker)
        if isinstance(value, dict):
            return {name: self._broken(each, marker) for name, each in value.items()}
        return [self._broken(each, marker) for each in value] if isinstance(value, list) else value

    def _starts(self, text: str) -> list[int]:
        return [found.start() for found in re.finditer(f"(?={self._pattern})", text)]

    def _parts(self, content: str) -> Iterator[int]:
        """Starts of parts of control tokens, of two characters or more, at the text's ends."""
        core = content.strip()
        start = content.find(core)
        if len(core) > 1 and any(core in token for token in self.tokens):
            yield start
        for length in range(2, min(self._longest, len(core)) + 1):
            if core[-length:] in self._beginnings:
                yield start + len(core) - length
            if core[:length] in self._ends:
                yield start

    def encode(self, marked: str, marker: str) -> list[int]:
        """Token ids of a text, whose broken control tokens are text. Raises InvalidRequest."""
        if self._reader is None:
            self._reader = self._made_reader()
        backend, stand_ins = self._reader
        pieces, end = [], 0
        for start, stop in self.places(marked, marker):
            pieces += [marked[end:start], stand_ins[marked[start:stop]]]
            end = stop
        pieces.append(marked[end:])
        text = "".join(pieces).replace(marker, "")
        ids = backend.encode(text, add_special_tokens=False).ids
        written = {
            backend.token_to_id(name): self.tokens[token] for token, name in stand_ins.items()
        }
        forged = set(ids) - {self._unknown_id}  # text may hold what it does not know
        for token, token_id in self.tokens.items():
            if token_id in forged:
                raise self._refusal(token)
        return [written.get(token_id, token_id) for token_id in ids]

    def _made_reader(self) -> _Reader:
        if self._backend is None:
            raise self._refusal(next(iter(self.tokens)))
        from tokenizers import AddedToken

        nonce = secrets.token_hex(8)  # no message can spell it
        names = {token: f"<{nonce} {token_id}>" for token, token_id in self.tokens.items()}
        backend = copy.deepcopy(self._backend)
        backend.no_truncation()
        backend.no_padding()
        backend.add_special_tokens(list(self.tokens))
        backend.encode_special_tokens = True
        backend.add_tokens(
            [
                AddedToken(
                    name,
                    lstrip=self._added[self.tokens[token]].lstrip,
                    rstrip=self._added[self.tokens[token]].rstrip,
                    normalized=False,
                )
                for token, name in names.items()
            ]
        )
        return _Reader(backend, names)

    def _refusal(self, token: str) -> InvalidRequest:
        return InvalidRequest(
            f"a message spells the control token {token}, which this model's tokenizer can't take "
            "as text; leave it out"
        )


def _marked(text: str, starts: set[int], marker: str) -> str:
    for start in sorted(starts, reverse=True):
        text = f"{text[: start + 1]}{marker}{text[start + 1 :]}"
    return text


_coders: WeakKeyDictionary[Any, ControlCoder] = WeakKeyDictionary()


def _coder(tokenizer: PreTrainedTokenizerFast) -> ControlCoder:
    if tokenizer not in _coders:
        _coders[tokenizer] = ControlCoder(tokenizer)
    return _coders[tokenizer]
