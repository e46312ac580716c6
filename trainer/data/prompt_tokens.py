"""Token ids of prompts: messages go through the chat template, strings are tokenized as they are.

A ValueError says what is wrong with a prompt. The row reader adds the prompt's place.
`DroppedCharacters` counts the characters of rows that a tokenizer drops without a trace.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.chats import TEMPLATE_ERRORS, images_of, render_chat, text_of

logger = logging.getLogger(__name__)
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character: JSON can contain it, but UTF-8 and tokenizers cannot represent it."""
LONGEST_TEXT = 4 * 2**20
"""Maximum number of characters of a text: a million tokens or more, tokenized in seconds."""


def encode_prompt(prompt: Any, tokenizer: Any) -> NDArray[np.int64]:
    """Return the ids of a prompt, which is a text or a list of messages."""
    text = readable(prompt)
    is_plain = isinstance(text, str)
    if not is_plain:
        check_messages("prompt", text)
        if tokenizer.chat_template is None:
            raise ValueError(
                f"it is a chat, and the tokenizer of {tokenizer.name_or_path} has no chat "
                "template; add chat_template.jinja to the model folder, or write prompts as plain "
                "strings"
            )
        text = render_messages(text, tokenizer, add_generation_prompt=True)
    check_length(text)
    # the template already writes the special tokens of a chat
    ids = np.array(tokenizer(text, add_special_tokens=is_plain)["input_ids"], dtype=np.int64)
    if ids.size == 0:
        raise ValueError(f"it has no tokens: {text!r:.80}")
    return ids


def render_messages(messages: Any, tokenizer: Any, add_generation_prompt: bool = False) -> str:
    """Return the messages as text, formatted by the tokenizer's chat template.

    The text has the tokens of images in their places.
    """
    from jinja2 import TemplateError

    refs = images_of(messages)
    if refs:
        from workers.models.images import image_reader, with_image_tokens

        image_reader(tokenizer.name_or_path)  # a model of text is an error, before its template is
    try:
        text: str = render_chat(
            tokenizer, messages, add_generation_prompt=add_generation_prompt, tokenize=False
        )
    except (TemplateError, *TEMPLATE_ERRORS) as error:
        raise ValueError(f"the chat template rejects it: {error}") from error
    if refs:
        text = with_image_tokens(tokenizer, text, refs)
    check_length(text)
    return text


def check_length(text: str) -> None:
    """Raise an error for a text of more than `LONGEST_TEXT` characters."""
    if len(text) > LONGEST_TEXT:
        raise ValueError(
            f"it has {len(text):,} characters, more than the limit of {LONGEST_TEXT:,}"
        )


def check_messages(column: str, messages: Any) -> None:
    """Raise an error unless this is a chat; a template would write the content None as a word."""
    if isinstance(messages, bool | int | float):
        raise ValueError(f"{column!r} is {messages!r}, neither a text nor messages")
    is_list = isinstance(messages, list | tuple) and messages
    if not is_list or not all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    ):
        first = messages[0] if is_list and isinstance(messages[0], dict) else {}
        is_sharegpt = {"from", "value"} <= first.keys()
        hint = ". Rename 'from' to 'role', and 'value' to 'content'" if is_sharegpt else ""
        raise ValueError(
            f"{column!r} is not a list of messages with role and content: {messages!r:.80}{hint}"
        )
    for number, message in enumerate(messages):
        content = message["content"]
        if content is None and not message.get("tool_calls"):
            raise ValueError(f"the content of message {number} is null")
        check_length(text_of(content, f"message {number}"))
        if not isinstance(message["role"], str):
            raise ValueError(f"message {number} has the invalid role {message['role']!r:.40}")


def readable(value: Any) -> Any:
    """Replace each lone surrogate with U+FFFD, including those in lists and objects."""
    if isinstance(value, str):
        return LONE_SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [readable(inner) for inner in value]
    if isinstance(value, dict):
        return {key: readable(inner) for key, inner in value.items()}
    return value


TEXT_COLUMNS = ("prompt", "response", "completion", "messages", "text", "chosen", "rejected")
MAX_NAMED = 10
"""Number of characters that the warning names."""


class DroppedCharacters:
    """Counts characters for which a tokenizer has neither a token nor an unknown token.

    Example:

        dropped = DroppedCharacters(tokenizer)
        dropped.note(row)           # for each row
        dropped.warn("data.train_files")
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: set[str] = set()
        self._dropped: set[str] = set()
        self.counts: Counter[str] = Counter()

    def note(self, row: dict[str, Any], columns: tuple[str, ...] = TEXT_COLUMNS) -> None:
        """Count the characters of a row's texts."""
        for name in columns:
            self._note(row.get(name))

    def _note(self, value: Any) -> None:
        if isinstance(value, dict):
            value = [*value.values()]
        if isinstance(value, list):
            for inner in value:
                self._note(inner)
        if not isinstance(value, str):
            return
        letters = set(value)
        self._dropped |= {letter for letter in letters - self._known if self._drops(letter)}
        self._known |= letters
        for letter in letters & self._dropped:
            self.counts[letter] += value.count(letter)

    def _drops(self, letter: str) -> bool:
        """Return True if no token comes of a character; spaces and control characters may be."""
        if letter.isspace() or unicodedata.category(letter).startswith("C"):
            return False
        return not self._tokenizer(letter, add_special_tokens=False)["input_ids"]

    def warn(self, key: str) -> None:
        """Log the dropped characters of the files that the configuration's `key` names."""
        if not self.counts:
            return
        named = [f"{letter!r} ({count})" for letter, count in self.counts.most_common(MAX_NAMED)]
        ellipsis = ", ..." if len(self.counts) > MAX_NAMED else ""
        logger.warning(
            "%s: the tokenizer of %s drops %d characters, because it has neither tokens for them "
            "nor an unknown token: %s%s. The model does not see them. Use a tokenizer that has "
            "them, or replace them in the rows.",
            key,
            self._tokenizer.name_or_path,
            self.counts.total(),
            ", ".join(named),
            ellipsis,
        )
