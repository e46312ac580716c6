"""Render the tokens between two sampled turns, so that sampled ids are not re-created from text.

    chat = TurnRenderer(tokenizer, tools, stop_ids)
    ids = chat.prompt(messages)                     # up to the start of the policy's turn
    ids += sampled_ids
    ids += chat.between(sampled_ids[-1], observations)    # turn end, observations, turn start

To find the text between two turns, the template renders a short chat with a placeholder turn and
the observations; the text after the placeholder is used. So the row has the tokens that were
sampled and read, even if the template drops parts of older turns (such as reasoning). With
`environment.history_tokens=retokenized`, if the template changes earlier text, `chat.rewritten`
returns the whole chat, which is tokenized again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

from verl_like.errors import ConfigError
from workers.agents.calls import FORMS, forms_of, parse

PLACEHOLDER = "\u241f"
"""Placeholder for a sampled turn in chats that are rendered to find the text around it."""
Message = Mapping[str, Any]
PROBE: list[Message] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": PLACEHOLDER},
]
"""A chat whose last turn is the placeholder."""


class TurnRenderer:
    """Renders prompts and observations with the chat template of a tokenizer."""

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]], stop_ids: Sequence[int]
    ) -> None:
        """Reject a tokenizer whose template is missing or does not render turns or tools."""
        self._tokenizer, self._tools = tokenizer, [dict(tool) for tool in tools]
        self._stops = {token: str(tokenizer.decode([token])) for token in stop_ids}
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        special = {*added, *tokenizer.all_special_tokens} - {""}
        self._special = sorted(special, key=len, reverse=True)
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"environment: the tokenizer of {tokenizer.name_or_path} has no chat template, "
                "which defines how turns are written. Add chat_template.jinja to the model folder."
            )
        self._by_tools: dict[str, TurnRenderer] = {}
        self._is_behind_calls: dict[tuple[str, ...], bool] = {}
        """By roles of observations: True if the template renders them only after tool calls."""
        self._tail = self._after_a_turn()
        self.between(None, [{"role": "user", "content": "a"}])
        if not self._tools:
            return

        name = self._tools[0]["function"]["name"]
        all_tools, self._tools = self._tools, []
        plain = self.written(PROBE[:1])
        self._tools = all_tools
        if plain == self.written(PROBE[:1]):
            raise ConfigError(
                f"tools: the chat template of {self._tokenizer.name_or_path} does not write tools "
                f"into the prompt, so the policy cannot know of {name!r}. Use a template that has "
                "`tools`."
            )
        self._tail = self._after_a_turn()
        self.between(None, [{"role": "tool", "name": name, "content": "a"}])

    @property
    def template(self) -> str:
        """The chat template."""
        return str(self._tokenizer.chat_template)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TurnRenderer:
        """Return a renderer for chats with these tools."""
        written = json.dumps(tools, sort_keys=True)
        if written not in self._by_tools:
            renderer = TurnRenderer(self._tokenizer, tools, tuple(self._stops))
            self._by_tools = {**self._by_tools, written: renderer}
        return self._by_tools[written]

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode sampled ids; if there are tools, keep special tokens, which may enclose calls."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=not self._tools)
        return text

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a chat, up to the start of the response."""
        return self.ids_of([self.written(messages)])[0]

    def ids_of(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts that the template rendered; many at once are faster."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return ids

    def after(self, before: Sequence[int], messages: Sequence[Message]) -> tuple[list[int], bool]:
        """Return the ids of a chat, without the text of `before` if the chat begins with that text.

        The second value is True if it does not, so that the ids of the whole chat are returned.
        """
        text, read = self.written(self.safe(messages)), ""
        if before:
            read = self._tokenizer.decode(before)
        begins = text.startswith(read)
        return self.ids_of([text.removeprefix(read)])[0], not begins

    def between(self, last: int | None, observations: Sequence[Message]) -> list[int]:
        """Return the ids between a turn and the next one.

        `last` is the stop token that ended the turn, or None without one.
        """
        return self.ids_of([self.text_between(last, observations)])[0]

    def text_between(self, last: int | None, observations: Sequence[Message]) -> str:
        """Return the text that the template renders between two turns."""
        return self._between(last, self.safe(observations))

    def turn(
        self, sampled_ids: Sequence[int], last: int | None, observations: Sequence[Message]
    ) -> list[Message]:
        """Return messages of a sampled turn and the observations after it, for `rewritten`."""
        text = self._tokenizer.decode(sampled_ids if last is None else sampled_ids[:-1])
        observations = self.safe(observations)
        calls, rest = parse(text, forms_of(self.template))
        if not calls or not self._are_behind_calls(observations):
            return [{"role": "assistant", "content": text}, *observations]
        functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
        turn, *observations = _with_calls(observations, functions)
        return [{**turn, "content": rest, "sampled": text}, *observations]

    def rewritten(
        self, read: Sequence[Message], turn: Sequence[Message], last: int | None
    ) -> str | None:
        """Return the whole chat after one more turn if the template changes its earlier text.

        Otherwise return None.
        """
        message, *observations = turn
        stop = "" if last is None else self._stops.get(last, "")
        sampled = message.get("sampled", message["content"])
        appended = sampled + stop + self._between(last, observations)
        text, before = self.written([*read, *turn]), self.written(read)
        if text == before + appended:
            return None
        self._check_inside(observations, text[len(commonprefix([text, before])) :])
        return text

    def _between(self, last: int | None, observations: Sequence[Message]) -> str:
        behind_calls = self._are_behind_calls(observations)
        rest = self._after_turn(observations, behind_calls)
        self._check_inside(observations, rest)
        stop = "" if last is None else self._stops.get(last, "")
        if stop and self._tail.startswith(stop) and not rest.startswith(stop) and not behind_calls:
            # the template ends older turns with another token than the last turn
            stop = next((token for token in self._special if rest.startswith(token)), "")
        return rest.removeprefix(stop)

    def _are_behind_calls(self, observations: Sequence[Message]) -> bool:
        """Return True if messages of these roles are rendered only after a turn that calls tools.

        Such templates render a tool's reply as a part of the turn. Raise a `ConfigError` if the
        template never renders the messages.
        """
        roles = tuple(str(message["role"]) for message in observations)
        if roles in self._is_behind_calls:
            return self._is_behind_calls[roles]
        probes = [
            {**message, "content": f"observation {number}."}
            for number, message in enumerate(observations)
        ]
        problems = []
        for behind_calls in (False, True) if "tool" in roles else (False,):
            try:
                self._check_inside(probes, self._after_turn(probes, behind_calls))
            except ConfigError as error:
                problems.append(error)
            else:
                self._is_behind_calls[roles] = behind_calls
                return behind_calls
        raise problems[-1]

    def _check_inside(self, observations: Sequence[Message], text: str) -> None:
        """Reject a rendered text that lacks an observation, both literally and as JSON."""
        for message in observations:
            content = str(message["content"]).strip()
            in_json = [json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
            is_written = any(form in text for form in (content, *in_json))
            if not is_written and not message.get("tool_calls"):
                way_out = ", or an environment without tools" * (message["role"] == "tool")
                raise ConfigError(
                    f"environment: the chat template of {self._tokenizer.name_or_path} leaves out "
                    f"the content of a message of the role {message['role']!r}, so it would be "
                    f"missing from the sample: {content!r:.80}. Use a template that writes it "
                    f"(chat_template.jinja in the model folder){way_out}."
                )

    def _after_turn(self, observations: Sequence[Message], behind_calls: bool) -> str:
        """Return the rendered text after a turn: the turn's end, observations, the next start."""
        if behind_calls:
            return self._after_calls(observations)
        text = self.written([*PROBE, *observations])
        _, placeholder, rest = text.partition(PLACEHOLDER)
        if not placeholder:
            raise ConfigError(
                f"environment: the chat template of {self._tokenizer.name_or_path} drops the "
                "assistant's message once another turn follows, so the text between the turns is "
                "unknown. Use a template that keeps earlier assistant messages."
            )
        return rest

    def _after_calls(self, observations: Sequence[Message]) -> str:
        """Return the rendered text after a turn that only calls tools.

        It starts after the last call, or after the end of the turn if that comes later.
        """
        question, (turn, *answers) = PROBE[0], _with_calls(observations)
        prompt = self.written([question])
        before = self.written([question, turn], begins=False)
        text = self.written([question, turn, *answers])
        begin, end = len(commonprefix([prompt, before])), len(commonprefix([before, text]))
        stops = [stop for stop in self._stops.values() if stop]
        ends = [text.rfind(stop, begin, end) for stop in stops]
        for form in FORMS.values():
            if form.closing and form.closing not in stops and form.closing in text[begin:end]:
                ends.append(text.rfind(form.closing, begin, end) + len(form.closing))
        if max(ends, default=-1) < 0:
            raise ConfigError(
                f"environment: the chat template of {self._tokenizer.name_or_path} writes a "
                "tool's result only after a call, and the end of a call is not known. Use a "
                "template that writes tool results after any message."
            )
        return text[max(ends) :]

    def safe(self, part: Any) -> Any:
        """Return an environment's text, in which special tokens are broken up.

        Of messages, every text is changed, including names and calls.
        """
        if isinstance(part, Mapping):
            return {self.safe(name): self.safe(inner) for name, inner in part.items()}
        if isinstance(part, list | tuple):
            return [self.safe(inner) for inner in part]
        if not isinstance(part, str):
            return part
        text = part.encode(errors="replace").decode()  # tokenizers reject lone surrogates
        for token in self._special:
            if token in text:
                text = text.replace(token, f"{token[0]}\u200b{token[1:]}")
        return text

    def _after_a_turn(self) -> str:
        """Return the rendered text after the last turn of a chat."""
        base = self.written(PROBE, begins=False)
        if base.count(PLACEHOLDER) != 1:
            raise ConfigError(
                f"environment: the chat template of {self._tokenizer.name_or_path} changes the "
                "text of the assistant's messages. Use a template that writes them unchanged."
            )
        return base.partition(PLACEHOLDER)[2]

    def written(self, messages: Sequence[Message], begins: bool = True) -> str:
        """Return the text of a chat; with `begins`, up to the start of the response."""
        from jinja2 import TemplateError

        tools = self._tools or None
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=tools,
                add_generation_prompt=begins,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise ConfigError(
                f"environment: the chat template of {self._tokenizer.name_or_path} rejects a chat "
                f"with the roles {', '.join(str(m['role']) for m in messages)}: {error}"
            ) from error
        return text


def _with_calls(
    observations: Sequence[Message], functions: Sequence[Mapping[str, Any]] | None = None
) -> list[Message]:
    """Return a turn that calls the tools whose replies are in `observations`, then `observations`.

    The turn calls `functions`, by default each replying tool without arguments.
    """
    answers = [message for message in observations if message["role"] == "tool"]
    if functions is None:
        functions = [{"name": answer.get("name", "tool"), "arguments": {}} for answer in answers]
    ids = [f"call{number:05}" for number in range(max(len(functions), len(answers)))]
    calls = [
        {"id": number, "type": "function", "function": function}
        for number, function in zip(ids, functions, strict=False)
    ]
    numbers = iter(ids)
    return [
        {"role": "assistant", "content": "", "tool_calls": calls},
        *(
            {**message, "tool_call_id": next(numbers)} if message["role"] == "tool" else message
            for message in observations
        ),
    ]


def with_observation(prompt: Any, text: str | None) -> list[Message]:
    """Return a row's prompt (a text or a chat) as messages, plus the first observation, if any."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if text is None:
        return messages
    if messages and messages[-1]["role"] == "user":
        last = messages[-1]
        joined = f"{last['content']}\n{text}" if last["content"] else text
        return [*messages[:-1], {**last, "content": joined}]
    return [*messages, {"role": "user", "content": text}]
