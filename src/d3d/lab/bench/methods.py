"""The methods that can be compared. All of ours run through one engine and one loop; only the
drafter differs.

A mode of `d3d.decoding.modes.MODES` is a method of the same name; what else may stand in for a
drafter is another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from d3d.api import Model
from d3d.baselines.draft_model import draft_model
from d3d.baselines.lookup import LookupDrafter
from d3d.decoding.modes import MODES, Decoding, ModeOptions
from d3d.engine.drafter import Drafter
from d3d.errors import InvalidRequest
from d3d.hub.fingerprint import weights_fingerprint
from d3d.hub.open_model import open_model
from d3d.lab.bench.answers import Answer, Peer, Question, Sampling, Setting
from d3d.lab.bench.modelled import ASYNC_MODELLED, on_two_devices
from d3d.lab.bench.own import answer_together
from d3d.lab.plan.handover import handover_seconds
from d3d.lab.plan.rehearsal import RehearsedDrafter
from d3d.methods.async_.config import DEFAULT_OUTCOMES
from d3d.methods.async_.packed_pass import PackedDrafter
from d3d.methods.base import DEFAULT_DRAFT_LENGTH
from d3d.methods.draft_model.drafter import autoregressive_head
from d3d.methods.serial.drafter import BlockDrafter

HANDOVERS = 20
"""From how many the switch of async_modelled is told."""

PLAIN = "plain"
"""What every other method is compared with, so it is always among them."""


@dataclass(frozen=True)
class MethodOptions:
    """What methods need besides the model."""

    draft_model: str | None = None
    """A causal model that drafts for `draft_model`, and for `transformers_assistant` where no other
    is named."""
    server_url: str | None = None
    server_model: str | None = None
    server_key: str | None = None
    gguf: str | None = None
    """The file that llama.cpp runs; the target's own where that is a GGUF file or a preset."""
    device: str = "auto"
    dtype: str = "auto"
    assistant: str | None = None
    """A causal model that drafts for `transformers_assistant`."""


@dataclass(frozen=True)
class Method:
    """One way to answer."""

    name: str
    answer: Callable[[Sequence[Question], Setting], list[Answer]]
    drafts: bool
    """Whether a draft length means something to it."""
    batches: bool
    """Whether it can answer several questions together."""
    is_peer: bool = False
    is_plain: bool = False
    """Decodes without speculation: what speed-ups are measured against."""
    max_draft_length: int | None = None
    default_draft_length: int | None = DEFAULT_DRAFT_LENGTH
    """None: its own, whatever that is."""
    describe: Callable[[], dict[str, Any]] = field(default=dict)
    close: Callable[[], None] = field(default=lambda: None)


class Loop(NamedTuple):
    """One of our own methods: what the decoding loop is given at a draft length."""

    at: Callable[[int | None], Decoding]
    """None: the method's own draft length."""
    about: dict[str, Any]
    """What the drafter is, for the provenance."""
    longest: int | None = None
    """Most tokens of a draft; None: what the drafter says."""
    retime: Callable[[Answer], Answer] | None = None
    """Replaces an answer's times by modelled ones; it then answers one prompt at a time."""


def _mode(name: str) -> Callable[[Model, MethodOptions], Loop]:
    def make(model: Model, options: MethodOptions) -> Loop:  # noqa: ARG001 - the model brings its drafter
        about = {} if name == PLAIN or model.drafter is None else _about(model.drafter)
        if options_of_preset := {
            key: value
            for key, value in model.options(name, ModeOptions())._asdict().items()
            if value is not None
        }:
            about["options"] = options_of_preset
        # async mode's drafter is made for one draft length, and knows of no other
        longest = (
            model.drafter.block_size if name == "async" and model.drafter is not None else None
        )
        return Loop(
            lambda length: model.decoding(name, ModeOptions(draft_length=length)), about, longest
        )

    return make


def _lookup(model: Model, options: MethodOptions) -> Loop:  # noqa: ARG001 - it needs no other model
    drafter = LookupDrafter()
    return Loop(
        _serially(model, drafter), {"longest": drafter.longest, "shortest": drafter.shortest}
    )


def _draft_model(model: Model, options: MethodOptions) -> Loop:
    if options.draft_model is not None:
        other = draft_model(
            open_model(options.draft_model, device=options.device, dtype=options.dtype),
            model.target,
        )
        return Loop(_serially(model, other), {"model": options.draft_model})
    if model.drafter is None:
        raise InvalidRequest(
            "method draft_model: name a causal model with --draft-model, or a drafter whose own head can be used"
        )
    own = autoregressive_head(model.drafter.model, model.engine.vocab_size)
    return Loop(_serially(model, own), {"model": "the clean rows of the drafter"})


def _serially(model: Model, drafter: Drafter) -> Callable[[int | None], Decoding]:
    return lambda length: Decoding(
        model.engine, drafter, min(length or DEFAULT_DRAFT_LENGTH, drafter.block_size)
    )


def _async_modelled(model: Model, options: MethodOptions) -> Loop:  # noqa: ARG001 - the model brings its drafter
    if model.drafter is None:
        raise InvalidRequest(
            f"method {ASYNC_MODELLED}: it needs a D3D drafter; name one with --drafter"
        )
    drafter, limit = (
        PackedDrafter(model.drafter.model, model.engine.vocab_size),
        model.drafter.block_size,
    )
    switch_s = median(handover_seconds("thread", HANDOVERS))

    def at(length: int | None) -> Decoding:
        width = min(length or DEFAULT_DRAFT_LENGTH, limit)
        return Decoding(model.engine, RehearsedDrafter(drafter, width, DEFAULT_OUTCOMES), width)

    about = _about(model.drafter) | {
        "outcomes": DEFAULT_OUTCOMES,
        "times": "modelled, as if the drafter had a second device",
    }
    return Loop(at, about, retime=lambda answer: on_two_devices(answer, switch_s))


def _about(drafter: BlockDrafter) -> dict[str, Any]:
    config = drafter.model.config
    return {
        "fingerprint": weights_fingerprint(drafter.model.trainable()),
        "block_size": config.block_size,
        "kept_layers": list(config.kept_layers),
        "own_mib": round(
            sum(
                tensor.numel() * tensor.element_size()
                for tensor in drafter.model.trainable().values()
            )
            / (1 << 20)
        ),
        "num_denoise_steps": drafter.num_denoise_steps,
    }


OWN: dict[str, Callable[[Model, MethodOptions], Loop]] = {
    **{mode: _mode(mode) for mode in MODES},
    "lookup": _lookup,
    "draft_model": _draft_model,
    ASYNC_MODELLED: _async_modelled,
}
"""Our methods: every mode, drafters that are no mode, and one whose times are modelled."""

PeerMaker = Callable[[Model, MethodOptions, Sampling], Peer]


class PeerSpec(NamedTuple):
    """Another program, made only when it is asked for."""

    make: PeerMaker
    drafts: bool
    is_plain: bool


def _transformers(kind: str) -> PeerMaker:
    def make(model: Model, options: MethodOptions, sampling: Sampling) -> Peer:
        from d3d.lab.bench.peers.transformers import TransformersPeer

        return TransformersPeer(
            model.target,
            kind,
            options.assistant or options.draft_model,
            ignore_eos=sampling.ignore_eos,
        )

    return make


def _server(model: Model, options: MethodOptions, sampling: Sampling) -> Peer:
    from d3d.lab.bench.peers.openai_server import OpenAIServer

    if options.server_url is None:
        raise InvalidRequest(
            "method server: say where it is, with --server-url http://HOST:PORT/v1"
        )
    if sampling.ignore_eos:
        raise InvalidRequest(
            "method server: not every server can ignore the end of an answer; leave --ignore-eos out"
        )
    return OpenAIServer(
        options.server_url,
        options.server_model,
        api_key=options.server_key,
        tokenizer=model.tokenizer,
    )


def _llama_cpp(model: Model, options: MethodOptions, sampling: Sampling) -> Peer:
    from d3d.lab.bench.peers.llama_cpp import LlamaCpp, gguf_file

    return LlamaCpp(
        gguf_file(model.target.source, options.gguf), model.target, ignore_eos=sampling.ignore_eos
    )


PEERS: dict[str, PeerSpec] = {
    "transformers": PeerSpec(_transformers("plain"), drafts=False, is_plain=True),
    "transformers_lookup": PeerSpec(_transformers("lookup"), drafts=True, is_plain=False),
    "transformers_assistant": PeerSpec(_transformers("assistant"), drafts=True, is_plain=False),
    "server": PeerSpec(_server, drafts=False, is_plain=False),
    "llama_cpp": PeerSpec(_llama_cpp, drafts=False, is_plain=True),
}

NAMES: tuple[str, ...] = (*OWN, *PEERS)


def make_methods(
    names: Sequence[str], model: Model, options: MethodOptions, sampling: Sampling
) -> list[Method]:
    """The methods of these names, plain first and added where it is missing.

    Raises InvalidRequest for a name that there is not, for what a method lacks, and for a peer
    where answers are sampled; what opening a model or a peer raises, MissingExtra among it."""
    check_names(names, sampling.temperature)
    wanted = dict.fromkeys([PLAIN, *names])
    return [_make(name, model, options, sampling) for name in wanted]


def check_names(names: Sequence[str], temperature: float) -> None:
    """Raises InvalidRequest for a name that there is not, and for a peer where answers are sampled;
    before anything is loaded."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise InvalidRequest(
            f"method {unknown[0]!r}: there is none of this name; there are {', '.join(NAMES)}"
        )
    peers = [name for name in names if name in PEERS]
    if peers and temperature > 0:
        raise InvalidRequest(
            f"method {peers[0]}: other programs sample with other noise, so peers are compared greedily; take temperature 0"
        )


def _make(name: str, model: Model, options: MethodOptions, sampling: Sampling) -> Method:
    if name in PEERS:
        return _peer(name, PEERS[name], PEERS[name].make(model, options, sampling))
    loop = OWN[name](model, options)
    default = loop.at(None)

    def answer(questions: Sequence[Question], setting: Setting) -> list[Answer]:
        answers = answer_together(
            model, loop.at(setting.draft_length), questions, setting, sampling
        )
        return answers if loop.retime is None else [loop.retime(one) for one in answers]

    return Method(
        name,
        answer,
        drafts=default.drafter is not None and default.drafter.block_size > 0,
        batches=loop.retime is None,
        is_plain=name == PLAIN,
        max_draft_length=loop.longest
        or (None if default.drafter is None else default.drafter.block_size),
        default_draft_length=None
        if name == "auto"
        else default.draft_length,  # each of its modes has one of its own
        describe=lambda: loop.about,
    )


def _peer(name: str, spec: PeerSpec, peer: Peer) -> Method:
    def answer(questions: Sequence[Question], setting: Setting) -> list[Answer]:
        return [peer.answer(question, setting) for question in questions]

    return Method(
        name,
        answer,
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
    """How a method is asked in one part of a run: once for each draft length, if these mean
    something to it; not at all in batches that it can't do."""
    if batch > 1 and not method.batches:
        return []
    if not method.drafts:
        return [Setting(max_tokens=max_tokens, batch=batch)]
    limit, default = method.max_draft_length, method.default_draft_length
    if not draft_lengths:
        draft_length = default if default is None or limit is None else min(default, limit)
        return [Setting(max_tokens=max_tokens, batch=batch, draft_length=draft_length)]
    if limit is not None and max(draft_lengths) > limit:
        raise InvalidRequest(
            f"draft length: {max(draft_lengths)} is above what {method.name} can draft, {limit}"
        )
    return [
        Setting(max_tokens=max_tokens, batch=batch, draft_length=length) for length in draft_lengths
    ]
