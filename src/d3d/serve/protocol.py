"""Requests of OpenAI's API, as clients send them.

A field is honoured, accepted without effect (`IGNORED`), or refused: nothing else is dropped
silently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from d3d.errors import first_problem

IGNORED = frozenset(
    {
        "cache_prompt",
        "include_reasoning",
        "metadata",
        "parallel_tool_calls",
        "priority",
        "prompt_cache_key",
        "request_id",
        "safety_identifier",
        "service_tier",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "store",
        "user",
        "verbosity",
    }
)
"""Fields that clients send and that change nothing here."""

INERT: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "length_penalty": (None, 1, 1.0),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "prompt_logprobs": (None, 0),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "web_search_options": (None,),
}
"""Fields of features that are not there, with the values that ask for nothing."""

MOST_CHOICES = 16
MOST_PROMPTS = 64
MOST_STOPS = 16
MOST_IDS = 1024
"""Entries of logit_bias and stop_token_ids."""


class BadRequest(Exception):  # becomes an HTTP answer, not a line of a command
    """Refused request: HTTP status, message, and the field concerned."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        kind: str = "invalid_request_error",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after_s = status, retry_after_s
        self.body = {
            "error": {"message": message, "type": kind, "param": param, "code": code},
        }


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class TemplateOptions(_Body):
    enable_thinking: bool | None = None


class GenerationBody(_Body):
    """Fields that chat and text completions share."""

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0.0, le=100.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=100.0)
    logit_bias: dict[int, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(
        default=None, max_length=MOST_IDS
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=MOST_IDS)
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool = False
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @field_validator("stop")
    @classmethod
    def _stops_are_not_empty(cls, value: str | list[str] | None) -> str | list[str] | None:
        if value is not None and any(not each for each in _listed(value)):
            raise ValueError("an empty string stops nothing")
        return value

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, room: int) -> dict[str, Any]:
        """Fields of `SamplingParams`. room: longest answer that fits into the context."""
        names = (
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "min_tokens",
            "stop_token_ids",
        )
        fields: dict[str, Any] = {
            name: value for name in names if (value := getattr(self, name)) is not None
        }
        fields["temperature"] = 1.0 if self.temperature is None else self.temperature
        fields["max_tokens"] = self.wanted_tokens(room)
        fields["ignore_eos"] = self.ignore_eos
        if self.top_k is not None:
            fields["top_k"] = max(0, self.top_k)
        if self.stop:
            fields["stop"] = tuple(_listed(self.stop))
        if self.num_logprobs is not None:
            fields["logprobs"] = self.num_logprobs
        return fields

    def wanted_tokens(self, room: int) -> int:
        """Maximum answer length."""
        return self.max_tokens or room

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives a token; None if log-probabilities are not wanted."""
        return None


class ChatBody(GenerationBody):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    chat_template_kwargs: TemplateOptions | None = None

    def wanted_tokens(self, room: int) -> int:
        return self.max_completion_tokens or self.max_tokens or room

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def thinking(self) -> bool | None:
        options = self.chat_template_kwargs
        return None if options is None else options.enable_thinking


class CompletionBody(GenerationBody):
    """Body of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None

    @model_validator(mode="after")
    def _something_is_wanted(self) -> CompletionBody:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 is for echo only")
        if self.echo and (self.stream or self.num_choices > 1):
            raise ValueError("echo: it goes with neither stream nor n")
        return self

    def wanted_tokens(self, room: int) -> int:
        return max(1, min(16, room) if self.max_tokens is None else self.max_tokens)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            return []
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TokenizeBody(_Body):
    """Body of /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: bool = True


class DetokenizeBody(_Body):
    """Body of /detokenize."""

    model: str | None = None
    tokens: list[int]


def parsed(kind: type[_Body], fields: Any) -> Any:
    """Check a request's JSON. Raises BadRequest naming the first field that is wrong."""
    if not isinstance(fields, Mapping):
        raise BadRequest("the body is no JSON object")
    known = kind.model_fields
    given = {}
    for name, value in fields.items():
        if name in known or (name not in IGNORED and name not in INERT):
            given[name] = value
        elif name in INERT and not any(_is_same(value, each) for each in INERT[name]):
            raise BadRequest(f"{name}: this server does not support it; leave it out", param=name)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0]) if error.errors()[0]["loc"] else None
        raise BadRequest(first_problem(error, sorted(known)), param=name) from error


def _is_same(value: Any, other: Any) -> bool:
    """Equality that tells False from 0."""
    return type(value) is type(other) and bool(value == other)


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
