"""Conversations as token ids, through the model's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from d3d.errors import InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def heeds_thinking(tokenizer: PreTrainedTokenizerFast) -> bool:
    """True if the chat template reads `enable_thinking`."""
    return "enable_thinking" in str(tokenizer.chat_template)


def encode_chat(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, str]],
    *,
    thinking: bool | None = None,
) -> list[int]:
    """Token ids of a conversation up to the start of the answer. thinking: passed to the template
    as `enable_thinking`.

    Raises InvalidRequest if a message is not text, the model has no template, or the template
    refuses the conversation."""
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            raise InvalidRequest(
                f"message {number}: a message has a role and a content, both of them text"
            )
    if not tokenizer.chat_template:
        raise InvalidRequest("this model has no chat template; pass the prompt as it is (--raw)")
    extra = {} if thinking is None else {"enable_thinking": thinking}
    try:
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **extra
        )
    except Exception as error:  # jinja's errors and the template's own
        raise InvalidRequest(f"the chat template refuses this conversation: {error}") from error
    try:
        str(text).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            "the conversation is not valid Unicode text; give it as UTF-8"
        ) from error
    return list(tokenizer.encode(str(text), add_special_tokens=False))
