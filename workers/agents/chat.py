"""What stands between two drawn turns, as token ids; drawn ids are never made again from text.

    chat = TurnRenderer(tokenizer, tools, stop_ids)
    ids = chat.prompt(messages)                     # up to where the policy begins
    ids += drawn
    ids += chat.between(drawn[-1], observations)    # turn end, observations, begin

The template writes a short chat with and without the observations; what it writes more is what
stands between. So a template may leave out of older turns what it likes (reasoning, for one): a row
keeps what was drawn and read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_like.errors import ConfigError

SAID = "\u241f"
"""Stands for a drawn turn where the template is asked what surrounds one."""
Message = Mapping[str, Any]


class TurnRenderer:
    """Prompts and observations by the chat template of a tokenizer."""

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]], stop_ids: Sequence[int]
    ) -> None:
        """A tokenizer without a template, or with one that cannot take tools, is refused."""
        self._tokenizer, self._tools = tokenizer, [dict(tool) for tool in tools]
        self._stops = {token: str(tokenizer.decode([token])) for token in stop_ids}
        self._special = sorted(filter(None, tokenizer.all_special_tokens), key=len, reverse=True)
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"environment: the tokenizer of {tokenizer.name_or_path} has no chat template, "
                "which says what stands around a turn. Add chat_template.jinja to the model folder."
            )
        self._base, self._tail = self._around_a_turn()
        self.between(None, [{"role": "user", "content": "a"}])
        if self._tools:
            self._check_tools()

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a chat, up to where the policy answers."""
        return self._ids(self._written(messages, begins=True))

    def between(self, last: int | None, observations: Sequence[Message]) -> list[int]:
        """The ids after a turn that ended with this token; None: with none of the template's."""
        safe = [{**one, "content": self.escaped(one["content"])} for one in observations]
        whole = self._written([*self._asked(), *safe], begins=True)
        if not whole.startswith(self._base):
            raise ConfigError(
                f"environment: the chat template of {self._tokenizer.name_or_path} writes a turn "
                "otherwise once another one follows, so what stands between them is not known. "
                "Give the model folder a template that only appends."
            )
        stop = "" if last is None else self._stops.get(last, "")
        tail = self._tail
        if stop and tail.startswith(stop):
            tail = tail[len(stop) :]
        return self._ids(tail + whole[len(self._base) :])

    def escaped(self, text: str) -> str:
        """A text of the environment's in which no special token of the template's stands."""
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text

    def _asked(self) -> list[Message]:
        return [{"role": "user", "content": "a"}, {"role": "assistant", "content": SAID}]

    def _around_a_turn(self) -> tuple[str, str]:
        """A chat of one turn, and what the template writes after what was said."""
        base = self._written(self._asked(), begins=False)
        if base.count(SAID) != 1:
            raise ConfigError(
                f"environment: the chat template of {self._tokenizer.name_or_path} does not write "
                "what the assistant said as it was said."
            )
        return base, base[base.index(SAID) + len(SAID) :]

    def _check_tools(self) -> None:
        name = self._tools[0]["function"]["name"]
        without, self._tools = self._tools, []
        plain = self._written(self._asked()[:1], begins=True)
        self._tools = without
        if plain == self._written(self._asked()[:1], begins=True):
            raise ConfigError(
                f"tools: the chat template of {self._tokenizer.name_or_path} does not write tools "
                f"into the prompt, so the policy cannot know of {name!r}. Take a template that "
                "has `tools`."
            )
        self._base, self._tail = self._around_a_turn()
        self.between(None, [{"role": "tool", "name": name, "content": "a"}])

    def _written(self, messages: Sequence[Message], begins: bool) -> str:
        from jinja2 import TemplateError

        tools = self._tools or None
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(one) for one in messages],
                tools=tools,
                add_generation_prompt=begins,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"environment: the chat template of {self._tokenizer.name_or_path} refuses a chat "
                f"with the roles {', '.join(str(one['role']) for one in messages)}: {error}"
            ) from error
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def with_observation(prompt: Any, text: str | None) -> list[Message]:
    """A row's prompt, plain or a chat, with the first observation at its end."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if text is None:
        return messages
    if messages and messages[-1]["role"] == "user":
        last = messages[-1]
        joined = f"{last['content']}\n{text}" if last["content"] else text
        return [*messages[:-1], {**last, "content": joined}]
    return [*messages, {"role": "user", "content": text}]
