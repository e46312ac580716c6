"""What stands between two drawn turns, as token ids; drawn ids are never made again from text.

    chat = TurnRenderer(tokenizer, tools, stop_ids)
    ids = chat.prompt(messages)                     # up to where the policy begins
    ids += drawn
    ids += chat.between(drawn[-1], observations)    # turn end, observations, begin

The template writes a short chat with the observations; what it writes after the turn is what stands
between. So a template may leave out of older turns what it likes (reasoning, for one): a row keeps
what was drawn and read, or `chat.rewritten` has the chat as the template writes it now.
"""

from __future__ import annotations

import json
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
        """Reject a tokenizer without a template, or with one that cannot take turns or tools."""
        self._tokenizer, self._tools = tokenizer, [dict(tool) for tool in tools]
        self._stops = {token: str(tokenizer.decode([token])) for token in stop_ids}
        added = [str(one) for one in tokenizer.added_tokens_decoder.values() if one.special]
        special = {*added, *tokenizer.all_special_tokens} - {""}
        self._special = sorted(special, key=len, reverse=True)
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"environment: the tokenizer of {tokenizer.name_or_path} has no chat template, "
                "which says what stands around a turn. Add chat_template.jinja to the model folder."
            )
        self._by_tools: dict[str, TurnRenderer] = {}
        self._known_to_be_written: set[tuple[str, ...]] = set()
        self._tail = self._after_a_turn()
        self.between(None, [{"role": "user", "content": "a"}])
        if self._tools:
            self._check_tools()

    @property
    def template(self) -> str:
        """The chat template."""
        return str(self._tokenizer.chat_template)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TurnRenderer:
        """The renderer of chats that have these tools."""
        written = json.dumps(tools, sort_keys=True)
        if written not in self._by_tools:
            made = TurnRenderer(self._tokenizer, tools, tuple(self._stops))
            self._by_tools = {**self._by_tools, written: made}
        return self._by_tools[written]

    def text_of(self, ids: Sequence[int]) -> str:
        """What was drawn, as a text; calls of tools may stand between special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=not self._tools)
        return text

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a chat, up to where the policy answers."""
        return self._ids(self.written(messages))

    def written(self, messages: Sequence[Message]) -> str:
        """The text of a chat, up to where the policy answers."""
        return self._written(messages, begins=True)

    def ids_of(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of texts that the template has written; many at once cost less."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return ids

    def after(self, before: Sequence[int], messages: Sequence[Message]) -> tuple[list[int], bool]:
        """The ids of a chat behind these, if its text begins with theirs; otherwise all of them."""
        whole, read = self._written(self.safe(messages), begins=True), ""
        if before:
            read = self._tokenizer.decode(before)
        begins = whole.startswith(read)
        return self._ids(whole.removeprefix(read)), not begins

    def between(self, last: int | None, observations: Sequence[Message]) -> list[int]:
        """The ids after a turn that ended with this token; None: with none of the template's."""
        return self._ids(self.text_between(last, observations))

    def text_between(self, last: int | None, observations: Sequence[Message]) -> str:
        """What the template writes there."""
        return self._between(last, self.safe(observations))

    def turn(
        self, drawn: Sequence[int], last: int | None, observations: Sequence[Message]
    ) -> list[Message]:
        """A drawn turn and what was observed then, as messages for `rewritten`."""
        said = self._tokenizer.decode(drawn if last is None else drawn[:-1])
        return [{"role": "assistant", "content": said}, *self.safe(observations)]

    def rewritten(
        self, read: Sequence[Message], turn: Sequence[Message], last: int | None
    ) -> str | None:
        """The chat with one more turn as a text, where the template does not only append it."""
        said, *observations = turn
        stop = "" if last is None else self._stops.get(last, "")
        appended = said["content"] + stop + self._between(last, observations)
        whole = self._written([*read, *turn], begins=True)
        if whole == self._written(read, begins=True) + appended:
            return None
        return whole

    def _between(self, last: int | None, observations: Sequence[Message]) -> str:
        self._check_written(observations)
        rest = self._after_plain_turn(observations)
        stop = "" if last is None else self._stops.get(last, "")
        if stop and self._tail.startswith(stop) and not rest.startswith(stop):
            # an older turn ends with another token than the last one: the drawn one stands for it
            stop = next((token for token in self._special if rest.startswith(token)), "")
        return rest.removeprefix(stop)

    def _check_written(self, observations: Sequence[Message]) -> None:
        """Reject a template that drops messages of these roles behind a plain turn.

        Some write a tool's answer only behind a message that has `tool_calls`.
        """
        roles = tuple(str(message["role"]) for message in observations)
        if roles in self._known_to_be_written:
            return
        probes = [f"observation {number}." for number in range(len(roles))]
        rest = self._after_plain_turn(
            [
                {**message, "content": probe}
                for message, probe in zip(observations, probes, strict=True)
            ]
        )
        for message, probe in zip(observations, probes, strict=True):
            if probe not in rest and not message.get("tool_calls"):
                way_out = ", or an environment without tools" * (message["role"] == "tool")
                raise ConfigError(
                    f"environment: the chat template of {self._tokenizer.name_or_path} leaves out "
                    f"what a message of the role {message['role']!r} says behind a plain turn of "
                    "the assistant, so it would be missing from the sample. Take a template that "
                    f"writes it (chat_template.jinja in the model folder){way_out}."
                )
        self._known_to_be_written.add(roles)

    def _after_plain_turn(self, observations: Sequence[Message]) -> str:
        whole = self._written([*self._asked(), *observations], begins=True)
        _, said, rest = whole.partition(SAID)
        if not said:
            raise ConfigError(
                f"environment: the chat template of {self._tokenizer.name_or_path} leaves out what "
                "the assistant said once another turn follows, so what stands between the turns is "
                "not known."
            )
        return rest

    def safe(self, messages: Sequence[Message]) -> list[Message]:
        """Messages, their names and calls too, in which none of the template's tokens stands."""
        return [self._safe(one) for one in messages]

    def _safe(self, part: Any) -> Any:
        if isinstance(part, str):
            return self.escaped(part)
        if isinstance(part, Mapping):
            return {self._safe(name): self._safe(inner) for name, inner in part.items()}
        return [self._safe(inner) for inner in part] if isinstance(part, list) else part

    def escaped(self, text: str) -> str:
        """A text of the environment's in which no special token of the template's stands."""
        text = text.encode(errors="replace").decode()  # halves of a surrogate pair have no ids
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text

    def _asked(self) -> list[Message]:
        return [{"role": "user", "content": "a"}, {"role": "assistant", "content": SAID}]

    def _after_a_turn(self) -> str:
        """What the template writes after what was said, in the last turn of a chat."""
        base = self._written(self._asked(), begins=False)
        if base.count(SAID) != 1:
            raise ConfigError(
                f"environment: the chat template of {self._tokenizer.name_or_path} does not write "
                "what the assistant said as it was said."
            )
        return base.partition(SAID)[2]

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
        self._tail = self._after_a_turn()
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
        return self.ids_of([text])[0]


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
