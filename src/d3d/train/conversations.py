"""What a row of a prompt file asks the model: the conversation up to the last user turn, and what
the user says after that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from d3d.errors import InvalidRequest
from d3d.train.evaluation_sets import words
from d3d.train.formats import without_formats

TEXT_FIELDS = ("prompt", "question", "problem", "instruction", "text")
"""Fields that hold a user's turn, in the order in which they are looked for, after `messages`,
`conversations` and `turns`."""

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of `conversations`, where they are called otherwise."""

Message = dict[str, str]


class Conversation(NamedTuple):
    """Messages that end with a user's turn, and the user's turns that follow once the model has
    answered."""

    messages: list[Message]
    later: tuple[str, ...] = ()

    @property
    def user_texts(self) -> list[str]:
        return [
            message["content"] for message in self.messages if message["role"] == "user"
        ] + list(self.later)

    @property
    def key(self) -> tuple[str, ...]:
        """The same for a conversation in another answer format, case, punctuation or white
        space."""
        said = [*self.messages, *({"role": "user", "content": text} for text in self.later)]
        return tuple(
            f"{message['role']} {' '.join(words(without_formats(message['content'])))}"
            for message in said
        )


def read_conversation(row: Mapping[str, Any]) -> Conversation:
    """The conversation that a row asks the model to go on with. Raises InvalidRequest for a row
    without one.

    Of `messages` (or ShareGPT's `conversations`) what the model would be asked, so without the
    answer that may end them. `turns` are the user's; the model answers each."""
    if row.get("messages"):
        return Conversation(_asked(row["messages"], "messages", "role", "content"))
    if row.get("conversations"):
        return Conversation(_asked(row["conversations"], "conversations", "from", "value"))
    if turns := row.get("turns"):
        if not isinstance(turns, list) or not all(
            isinstance(turn, str) and turn.strip() for turn in turns
        ):
            raise InvalidRequest("turns is no list of texts")
        return Conversation(
            [{"role": "user", "content": turns[0].strip()}],
            tuple(turn.strip() for turn in turns[1:]),
        )
    for name in TEXT_FIELDS:
        if isinstance(row.get(name), str) and row[name].strip():
            return Conversation([{"role": "user", "content": row[name].strip() + _task_input(row)}])
    raise InvalidRequest(f"no text in messages, conversations, turns, {', '.join(TEXT_FIELDS)}")


def _asked(messages: Any, name: str, role: str, content: str) -> list[Message]:
    """A conversation up to its last user turn."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest(f"{name} is no list of messages")
    if any(
        not isinstance(message.get(part), str) for message in messages for part in (role, content)
    ):
        raise InvalidRequest(f"a message whose {role} or {content} is no text")
    asked = [
        {"role": SHAREGPT_ROLES.get(message[role], message[role]), "content": message[content]}
        for message in messages
    ]
    while asked and asked[-1]["role"] != "user":
        asked.pop()
    if not asked or not asked[-1]["content"].strip():
        raise InvalidRequest(f"{name} without a user's turn, or with an empty one at their end")
    return asked


def _task_input(row: Mapping[str, Any]) -> str:
    """Self-instruct rows carry the input of their task apart."""
    instances = row.get("instances")
    first = instances[0] if isinstance(instances, list) and instances else None
    given = first.get("input") if isinstance(first, dict) else None
    return f"\n\n{given.strip()}" if isinstance(given, str) and given.strip() else ""
