"""Prompts as token ids: text, conversations through the model's chat template, or ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from d3d.errors import InvalidRequest
from d3d.text.control import Message, encode_rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Messages = list[dict[str, str]]
Prompt = str | Messages | list[int]


def heeds_thinking(tokenizer: PreTrainedTokenizerFast) -> bool:
    """True if the chat template reads `enable_thinking`."""
    return "enable_thinking" in str(tokenizer.chat_template)


def check_unicode(text: str, what: str) -> None:
    """Raise InvalidRequest for text that holds half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{what}: it is not valid Unicode text at character {error.start}; give it as UTF-8"
        ) from error


def check_prompt(prompt: str, *, raw: bool = False) -> None:
    """Raise InvalidRequest for text that can't be a prompt: empty, or not Unicode."""
    if not (prompt if raw else prompt.strip()):
        raise InvalidRequest("prompt: it is empty; give some text")
    check_unicode(prompt, "prompt")


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast,
    prompt: Prompt,
    *,
    raw: bool = False,
    thinking: bool | None = None,
) -> list[int]:
    """Encode a prompt: a user's turn or a conversation (both through `encode_chat`), plain text
    (`raw`), in which control tokens may be spelled, or ids.

    Raises InvalidRequest for an empty prompt, and for `raw` or `thinking` if they do not apply."""
    if isinstance(prompt, str):
        check_prompt(prompt, raw=raw)
    elif not isinstance(prompt, list):
        raise InvalidRequest(
            "prompt: give text, a list of messages or a list of token ids, "
            f"not {type(prompt).__name__}"
        )
    elif raw:
        raise InvalidRequest(
            "raw: it is for text; messages go through the chat template, and token ids are "
            "taken as they are"
        )
    if isinstance(prompt, str) and not raw:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return encode_chat(tokenizer, prompt, thinking=thinking)
    if thinking is not None:
        raise InvalidRequest(
            "thinking: it is a switch of the chat template, which this prompt does not go through"
        )
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    if any(isinstance(each, bool) or not isinstance(each, int) for each in prompt):
        raise InvalidRequest(
            "prompt: a list holds messages (role and content) or token ids, nothing else"
        )
    return list(cast("list[int]", prompt))


def encode_chat(
    tokenizer: PreTrainedTokenizerFast, messages: Messages, *, thinking: bool | None = None
) -> list[int]:
    """Token ids of a conversation up to the start of the answer, or if it ends with the assistant's
    words, up to their end: the answer continues them. Control tokens are the template's own;
    messages that spell them hold text. thinking: passed to the template as `enable_thinking`.

    Raises InvalidRequest if a message is not text, no turn is the user's, the model has no
    template, or the template refuses the conversation."""
    _check_messages(messages)
    if not tokenizer.chat_template:
        raise InvalidRequest("this model has no chat template; pass the prompt as it is (--raw)")
    last = messages[-1]
    continues = last["role"] == "assistant" and bool(last["content"].strip())
    if last["role"] == "assistant" and not continues:
        messages = messages[:-1]  # nothing to continue: an answer begins
    extra = {} if thinking is None else {"enable_thinking": thinking}

    def render(conversation: Sequence[Message]) -> str:
        return str(
            tokenizer.apply_chat_template(
                list(conversation),
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
                **extra,
            )
        )

    try:
        return encode_rendered(tokenizer, messages, render)
    except InvalidRequest:
        raise
    except Exception as error:  # jinja's errors and the template's own
        if continues and isinstance(error, ValueError):
            raise InvalidRequest(
                "the chat template does not show the assistant's last words as they are, so they "
                "can't be continued; leave them out"
            ) from error
        raise InvalidRequest(f"the chat template refuses this conversation: {error}") from error


def _check_messages(messages: Any) -> None:
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            raise InvalidRequest(
                f"message {number}: a message has a role and a content, both of them text"
            )
        for text in (message["role"], message["content"]):
            check_unicode(text, f"message {number}")
    if not any(message["role"] == "user" for message in messages):
        raise InvalidRequest(
            "messages: none of them is a user's turn; add one with the role user, or give a raw "
            "prompt"
        )
