"""The methods that can be compared: our own, and other programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from d3d.api import Model
from d3d.config import METHOD_ALIASES
from d3d.errors import InvalidRequest
from d3d.lab.bench.answers import (
    PLAIN,
    MethodOptions,
    Peer,
    Question,
    Sampling,
    Setting,
    TimedAnswer,
)
from d3d.lab.bench.own import DEFAULT_DRAFT_LENGTH, OWN, answer_together


@dataclass(frozen=True)
class Method:
    """A way to answer."""

    name: str
    answer: Callable[[Sequence[Question], Setting], list[TimedAnswer]]
    drafts: bool
    """True if it has a draft length."""
    batches: bool
    """True if it can answer several prompts together."""
    is_peer: bool = False
    is_plain: bool = False
    """True if it decodes without speculation, as a baseline of speed-ups."""
    check: Callable[[int], object] = int
    """Raises InvalidRequest for a draft length that it can't serve."""
    default_draft_length: int | None = DEFAULT_DRAFT_LENGTH
    """None: the method chooses."""
    describe: Callable[[], dict[str, Any]] = field(default=dict)
    close: Callable[[], None] = field(default=lambda: None)


PeerMaker = Callable[[Model, MethodOptions, Sampling], Peer]


class PeerSpec(NamedTuple):
    """Another program; started only if requested."""

    make: PeerMaker
    drafts: bool
    is_plain: bool


def _transformers(kind: str) -> PeerMaker:
    def make(model: Model, options: MethodOptions, sampling: Sampling) -> Peer:
        from d3d.lab.bench.peers.transformers import TransformersPeer

        assistant = options.assistant or options.draft_model
        return TransformersPeer(model.target, kind, assistant, ignore_eos=sampling.ignore_eos)

    return make


def _server(model: Model, options: MethodOptions, sampling: Sampling) -> Peer:
    from d3d.lab.bench.peers.openai_server import OpenAIServer

    if options.server_url is None:
        raise InvalidRequest("method server: give its address, --server-url http://HOST:PORT/v1")
    if sampling.ignore_eos:
        raise InvalidRequest(
            "method server: not every server can ignore the end of an answer; "
            "leave out --ignore-eos"
        )
    return OpenAIServer(
        options.server_url,
        options.server_model,
        api_key=options.server_key,
        tokenizer=model.tokenizer,
    )


def _llama_cpp(model: Model, options: MethodOptions, sampling: Sampling) -> Peer:
    from d3d.lab.bench.peers.llama_cpp import LlamaCpp, gguf_file

    file = gguf_file(model.target.source, options.gguf)
    return LlamaCpp(file, model.target, ignore_eos=sampling.ignore_eos)


PEERS: dict[str, PeerSpec] = {
    "transformers": PeerSpec(_transformers("plain"), drafts=False, is_plain=True),
    "transformers_lookup": PeerSpec(_transformers("lookup"), drafts=True, is_plain=False),
    "transformers_assistant": PeerSpec(_transformers("assistant"), drafts=True, is_plain=False),
    "server": PeerSpec(_server, drafts=False, is_plain=False),
    "llama_cpp": PeerSpec(_llama_cpp, drafts=False, is_plain=True),
}

USERS = {
    "draft_model": ("draft_model", "transformers_assistant"),
    "assistant": ("transformers_assistant",),
    "gguf": ("llama_cpp",),
    "server_url": ("server",),
    "server_model": ("server",),
}
"""Options, and the methods that use them."""

NAMES: tuple[str, ...] = (*OWN, *PEERS)


def make_methods(
    names: Sequence[str], model: Model, options: MethodOptions, sampling: Sampling
) -> list[Method]:
    """Build the named methods, plain first, which is added if missing.

    Raises InvalidRequest for an unknown name, a missing option, or a peer if answers are sampled;
    and what opening a model or a peer raises, such as MissingExtra."""
    check_names(names, sampling.temperature)
    ours = [METHOD_ALIASES.get(name, name) for name in names]
    return [_make(name, model, options, sampling) for name in dict.fromkeys([PLAIN, *ours])]


def check_names(names: Sequence[str], temperature: float) -> None:
    """Raises InvalidRequest for an unknown name, and for a peer if answers are sampled; call it
    before anything is loaded."""
    for name in names:
        if name not in NAMES and name not in METHOD_ALIASES:
            known = ", ".join(NAMES)
            raise InvalidRequest(
                f"method {name!r}: there is no method of this name; there are {known}"
            )
        if name in PEERS and temperature > 0:
            raise InvalidRequest(
                f"method {name}: other programs sample with other noise, so peers are compared "
                "greedily; use temperature 0"
            )


def check_options(names: Sequence[str], options: MethodOptions) -> None:
    """Raises InvalidRequest for an option that is empty, or that none of the methods uses."""
    for name, users in USERS.items():
        value, flag = getattr(options, name), f"--{name.replace('_', '-')}"
        if value is not None and not value.strip():
            raise InvalidRequest(f"{flag} is empty; name something, or leave it out")
        if value is not None and not {*users} & {*names}:
            raise InvalidRequest(
                f"{flag} is for method {' or '.join(users)}; add it with --method, or leave {flag} "
                "out"
            )


def _make(name: str, model: Model, options: MethodOptions, sampling: Sampling) -> Method:
    if name in PEERS:
        return _peer(name, PEERS[name], PEERS[name].make(model, options, sampling))
    own = OWN[name](model, options)
    default = own.at(None).drafter
    length = 0 if default is None else default.max_draft_length

    def answer(questions: Sequence[Question], setting: Setting) -> list[TimedAnswer]:
        built = own.at(setting.draft_length)
        answers = answer_together(model, built, questions, setting, sampling)
        return answers if own.retime is None else [own.retime(timed) for timed in answers]

    return Method(
        name,
        answer,
        drafts=length > 0,
        batches=own.retime is None,
        is_plain=name == PLAIN,
        check=own.check,
        # each method that auto chooses from has a draft length of its own
        default_draft_length=None if name == "auto" else length,
        describe=lambda: own.about,
    )


def _peer(name: str, spec: PeerSpec, peer: Peer) -> Method:
    return Method(
        name,
        lambda questions, setting: [peer.answer(question, setting) for question in questions],
        drafts=spec.drafts,
        batches=False,
        is_peer=True,
        is_plain=spec.is_plain,
        describe=peer.describe,
        close=peer.close,
    )


def settings_for(
    method: Method, max_tokens: int, batch: int, draft_lengths: Sequence[int]
) -> list[Setting]:
    """Settings of a method at one answer length and batch: one for each draft length if it drafts;
    none if it can't answer in batches."""
    if batch > 1 and not method.batches:
        return []
    lengths: Sequence[int | None] = draft_lengths
    if not method.drafts:
        lengths = [None]
    elif not draft_lengths:
        lengths = [method.default_draft_length]
    else:
        method.check(max(draft_lengths))
    return [Setting(max_tokens=max_tokens, batch=batch, draft_length=length) for length in lengths]
