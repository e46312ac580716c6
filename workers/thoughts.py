"""Tell the reasoning in a response from its answer.

    reader = ThoughtReader.of(tokenizer)
    text = reader.text_of(ids)              # with special tokens only around reasoning
    reasoning, content = split_thoughts(text, reader.is_open)

This module does not import torch, because the processes of environments and agents load it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workers.chats import TEMPLATE_ERRORS

THOUGHTS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel>thought": "<channel|>",
    "<|channel|>analysis": "<|end|><|start|>assistant",
}
"""The strings around reasoning."""
REASONING = "reasoning_content"
"""The key of a message that has the reasoning, as in the APIs of vLLM and DeepSeek."""
MARKS = ("<think>", "[THINK]", "<|START_THINKING|>", "<|channel>", "<|channel|>")
"""If one of these is a special token, text without special tokens joins reasoning and answer."""
HARMONY = "<|message|>"
"""Separates the header of a message from its text, in models whose turns have several messages."""
ENDS = re.compile(r"<\|(?:start|end|return|call)\|>")
"""Matches the tokens between those messages."""
THOUGHT = re.compile(
    "|".join(rf"{re.escape(a)}(.*?)(?:{re.escape(b)}|\Z)" for a, b in THOUGHTS.items()), re.DOTALL
)
CLOSINGS = re.compile("|".join(map(re.escape, ("</think>", "[/THINK]", "<|END_THINKING|>"))))


def split_thoughts(text: str, is_open: bool = False) -> tuple[str, str]:
    """Return the reasoning in a response, or "", and the rest.

    With `is_open`, the prompt ends with the opening of the reasoning. A text without reasoning is
    returned as it is. Reasoning without an end takes the whole text.
    """
    if HARMONY in text or text.lstrip().startswith("<|channel|>"):
        return _split_messages(text)
    thoughts = []
    rest = text.lstrip()
    is_first = True
    while match := THOUGHT.match(rest):
        thoughts.append(next(group for group in match.groups() if group is not None))
        rest, is_first = rest[match.end() :].lstrip(), False
    if is_first:
        before, after = rest, ""
        closing = CLOSINGS.search(rest)
        if closing is None and not is_open:
            return "", text
        if closing is not None:
            before, after = rest[: closing.start()], rest[closing.end() :]
        thoughts, rest = [before], after
    return "\n\n".join(filter(None, map(str.strip, thoughts))), rest.strip()


def _split_messages(text: str) -> tuple[str, str]:
    """Split a turn of several messages; those of the channel `analysis` are reasoning."""
    thoughts, contents = [], []
    for message in ENDS.split(text):
        header, is_whole, body = message.partition(HARMONY)
        channel = header.rpartition("<|channel|>")[2].strip()
        if channel.startswith("analysis"):
            thoughts.append(body.strip())
        elif " to=" in header:
            contents.append(message.strip())
        elif is_whole:
            contents.append(body.strip())
    return "\n\n".join(filter(None, thoughts)), "\n\n".join(filter(None, contents))


@dataclass(frozen=True)
class ThoughtReader:
    """Decodes responses so that `split_thoughts` can tell reasoning from the answer."""

    tokenizer: Any
    is_open: bool
    """True if prompts end with the opening of reasoning."""
    hides: bool
    """True if text without special tokens would join reasoning and answer."""
    others: re.Pattern[str]
    """Matches the special tokens that are not around reasoning."""

    @classmethod
    def of(cls, tokenizer: Any) -> ThoughtReader:
        """Return the reader of a tokenizer, whose chat template tells how a response begins."""
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        special = {*added, *tokenizer.all_special_tokens} - {""}
        around = "".join((*THOUGHTS, *THOUGHTS.values(), HARMONY, "<|return|><|call|>"))
        others = sorted((token for token in special if token not in around), key=len, reverse=True)
        return cls(
            tokenizer,
            _opens_reasoning(tokenizer),
            not special.isdisjoint(MARKS),
            re.compile("|".join(map(re.escape, others)) or r"(?!)"),
        )

    @property
    def details(self) -> dict[str, Any]:
        """The properties that are true, as an environment's process gets them with a text."""
        properties = {"hides_thoughts": self.hides, "is_open": self.is_open}
        return {name: value for name, value in properties.items() if value}

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode ids without special tokens, except those around reasoning."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=not self.hides)
        return self.cleaned(text)

    def cleaned(self, text: str) -> str:
        """Remove the special tokens that are not around reasoning."""
        return self.others.sub("", text) if self.hides else text


def _opens_reasoning(tokenizer: Any) -> bool:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        return False
    try:
        prompt: str = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False
        )
    except (TemplateError, *TEMPLATE_ERRORS):
        return False
    return prompt.rstrip().endswith((*THOUGHTS,))
