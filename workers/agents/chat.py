"""Render the tokens between two sampled turns, so that sampled ids are not re-created from text.

    chat = TurnRenderer(tokenizer, tools, stop_ids)
    ids = chat.prompt(messages)                     # up to the start of the policy's turn
    ids += sampled_ids
    ids += chat.between(sampled_ids[-1], observations)    # turn end, observations, turn start

The row has the tokens that were sampled and read, even if the template drops parts of older turns
(such as reasoning). With `environment.history_tokens=retokenized`, if the template changes earlier
text, `chat.rewritten` returns the whole chat, which is tokenized again.

`ChatTemplate` finds the text that a template writes between two turns: it renders a short chat with
a placeholder turn and the observations, and uses the text after the placeholder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError
from workers.agents.calls import FORMS, forms_of, parse
from workers.chats import TEMPLATE_ERRORS, images_of, render_chat, text_of, texts_of
from workers.thoughts import REASONING, ThoughtReader, split_thoughts


class TurnRenderer:
    """Renders prompts and observations with the chat template of a tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]],
        stop_ids: Sequence[int],
        keeps_reasoning: bool = True,
    ) -> None:
        """Reject a tokenizer whose template is missing or does not render turns or tools.

        With `keeps_reasoning`, the template gets the reasoning of older turns.
        """
        self._tokenizer, self._has_tools = tokenizer, bool(tools)
        self._keeps_reasoning = keeps_reasoning
        self.template = ChatTemplate(tokenizer, tools, stop_ids)
        self.thoughts = ThoughtReader.of(tokenizer)
        self._by_tools: dict[str, TurnRenderer] = {}

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> TurnRenderer:
        """Return a renderer for chats with these tools."""
        written = json.dumps(tools, sort_keys=True)
        if written not in self._by_tools:
            stops = tuple(self.template.stops)
            renderer = TurnRenderer(self._tokenizer, tools, stops, self._keeps_reasoning)
            self._by_tools = {**self._by_tools, written: renderer}
        return self._by_tools[written]

    def text_of(self, ids: Sequence[int]) -> str:
        """Decode sampled ids; if there are tools, keep special tokens, which may enclose calls.

        Special tokens around reasoning are kept in any case.
        """
        if not self._has_tools:
            return self.thoughts.text_of(ids)
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a chat, up to the start of the response."""
        text = self.template.written(messages)
        return self.ids_of([self.with_images(text, messages)])[0]

    def with_images(self, text: str, messages: Sequence[Message]) -> str:
        """Return the rendered text of these messages, with the tokens of their images."""
        refs = images_of(messages)
        if not refs:
            return text
        from workers.models.images import with_image_tokens

        return with_image_tokens(self._tokenizer, text, refs)

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
        messages = [self._for_history(message) for message in messages]
        text, read = self.template.written(self.template.escaped(messages)), ""
        text = self.with_images(text, messages)
        if before:
            read = self._tokenizer.decode(before)
        begins = text.startswith(read)
        return self.ids_of([text.removeprefix(read)])[0], not begins

    def between(self, last: int | None, observations: Sequence[Message]) -> list[int]:
        """Return the ids between a turn and the next one.

        `last` is the stop token that ended the turn, or None without one.
        """
        text = self.text_between(last, observations)
        return self.ids_of([self.with_images(text, observations)])[0]

    def text_between(self, last: int | None, observations: Sequence[Message]) -> str:
        """Return the text that the template renders between two turns."""
        return self.template.between(last, self.template.escaped(observations))

    def turn(
        self, sampled_ids: Sequence[int], last: int | None, observations: Sequence[Message]
    ) -> list[Message]:
        """Return messages of a sampled turn and the observations after it, for `rewritten`."""
        text = self._tokenizer.decode(sampled_ids if last is None else sampled_ids[:-1])
        observations = self.template.escaped(observations)
        calls, rest = parse(text, forms_of(self.template.text))
        is_behind = bool(calls) and self.template.are_behind_calls(observations)
        turn: Message = {"role": "assistant", "content": text}
        if is_behind:
            functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
            turn, *observations = with_calls(observations, functions)
            turn = {**turn, "content": rest, "sampled": text}
        if self.thoughts.hides:  # its template writes reasoning in other places than the answer
            reasoning, content = split_thoughts(str(turn["content"]), self.thoughts.is_open)
            named = {REASONING: reasoning} if reasoning else {}
            turn = self._for_history({**turn, "content": content, **named, "sampled": text})
        return [turn, *observations]

    def _for_history(self, message: Message) -> Message:
        """Return a message as the template gets it: with or without its reasoning."""
        if self._keeps_reasoning or REASONING not in message:
            return message
        return {name: value for name, value in message.items() if name != REASONING}

    def rewritten(
        self, read: Sequence[Message], turn: Sequence[Message], last: int | None
    ) -> str | None:
        """Return the whole chat after one more turn if the template changes its earlier text.

        Otherwise return None.
        """
        message, *observations = turn
        stop = "" if last is None else self.template.stops.get(last, "")
        sampled = message.get("sampled", message["content"])
        appended = sampled + stop + self.template.between(last, observations)
        text, before = self.template.written([*read, *turn]), self.template.written(read)
        if text == before + appended:
            return None
        self.template.check_inside(observations, text[len(commonprefix([text, before])) :])
        return text


def with_refs(value: Any) -> Any:
    """Return contents, messages or a request with references to images instead of `data:` URLs.

    A reference, as in a recorded answer, is checked, because the process that sends it could name
    any file. A ValueError says what is wrong with an image.
    """
    if isinstance(value, list):
        return [with_refs(part) for part in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("type") == "image":
        from workers.images import image_ref

        url, path, sha = (str(value.get(name)) for name in ("url", "path", "sha"))
        is_sent = url.startswith("data:")
        ref = image_ref(url if is_sent else Path(path))
        if not is_sent and sha != ref.sha:
            raise ValueError(f"the image {path} does not have the hash {sha:.80}")
        return {"type": "image", **ref._asdict()}
    names = {"content", "chat"} & value.keys()
    return {**value, **{name: with_refs(value[name]) for name in names}}


def with_observation(prompt: Any, content: Any) -> list[Message]:
    """Return a row's prompt (a text or a chat) as messages, plus the first observation, if any.

    The observation is a text, or a list of parts if it has images.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if content is None:
        return messages
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": content}]
    *others, last = messages
    if isinstance(content, str) and not images_of([last]):
        before = text_of(last["content"])
        return [*others, {**last, "content": f"{before}\n{content}" if before else content}]
    parts: list[Any] = []
    for side in (last["content"], "\n", content):
        parts += [{"type": "text", "text": side}] if isinstance(side, str) else side or []
    return [*others, {**last, "content": parts if last["content"] else content}]


PLACEHOLDER = "\u241f"
"""Placeholder for a sampled turn in chats that are rendered to find the text around it."""
Message = Mapping[str, Any]
PROBE: list[Message] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": PLACEHOLDER},
]
"""A chat whose last turn is the placeholder."""


class ChatTemplate:
    """The chat template of a tokenizer, with the tools that it writes into the prompt."""

    def __init__(
        self, tokenizer: Any, tools: Sequence[Mapping[str, Any]], stop_ids: Sequence[int]
    ) -> None:
        """Reject a tokenizer whose template is missing or does not render turns or tools."""
        self._tokenizer, self._tools = tokenizer, [dict(tool) for tool in tools]
        self.stops = {token: str(tokenizer.decode([token])) for token in stop_ids}
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        special = {*added, *tokenizer.all_special_tokens} - {""}
        self._special = sorted(special, key=len, reverse=True)
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"environment: the tokenizer of {tokenizer.name_or_path} has no chat template, "
                "which defines how turns are written. Add chat_template.jinja to the model folder."
            )
        self.text = str(tokenizer.chat_template)
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

    def written(self, messages: Sequence[Message], begins: bool = True) -> str:
        """Return the text of a chat; with `begins`, up to the start of the response."""
        from jinja2 import TemplateError

        tools = self._tools or None
        try:
            text: str = render_chat(
                self._tokenizer,
                [_with_thinking(message) for message in messages],
                tools=tools,
                add_generation_prompt=begins,
                tokenize=False,
            )
        except (TemplateError, *TEMPLATE_ERRORS) as error:
            raise ConfigError(
                f"environment: the chat template of {self._tokenizer.name_or_path} rejects a chat "
                f"with the roles {', '.join(str(m['role']) for m in messages)}: {error}"
            ) from error
        return text

    def between(self, last: int | None, observations: Sequence[Message]) -> str:
        """Return the text between two turns; `last` is the stop token of the first, or None."""
        behind_calls = self.are_behind_calls(observations)
        rest = self._after_turn(observations, behind_calls)
        self.check_inside(observations, rest)
        stop = "" if last is None else self.stops.get(last, "")
        if stop and self._tail.startswith(stop) and not rest.startswith(stop) and not behind_calls:
            # the template ends older turns with another token than the last turn
            stop = next((token for token in self._special if rest.startswith(token)), "")
        return rest.removeprefix(stop)

    def are_behind_calls(self, observations: Sequence[Message]) -> bool:
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
                self.check_inside(probes, self._after_turn(probes, behind_calls))
            except ConfigError as error:
                problems.append(error)
            else:
                self._is_behind_calls[roles] = behind_calls
                return behind_calls
        raise problems[-1]

    def check_inside(self, observations: Sequence[Message], text: str) -> None:
        """Reject a rendered text that lacks an observation, both literally and as JSON."""
        parts = [
            (message, part) for message in observations for part in texts_of(message["content"])
        ]
        for message, part in parts:
            content = part.strip()
            in_json = [json.dumps(content, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
            is_written = any(form in text for form in (content, *in_json))
            if not is_written and not message.get("tool_calls"):
                remedy = ", or an environment without tools" * (message["role"] == "tool")
                raise ConfigError(
                    f"environment: the chat template of {self._tokenizer.name_or_path} leaves out "
                    f"the content of a message of the role {message['role']!r}, so it would be "
                    f"missing from the sample: {content!r:.80}. Use a template that writes it "
                    f"(chat_template.jinja in the model folder){remedy}."
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
        question, (turn, *answers) = PROBE[0], with_calls(observations)
        prompt = self.written([question])
        before = self.written([question, turn], begins=False)
        text = self.written([question, turn, *answers])
        begin, end = len(commonprefix([prompt, before])), len(commonprefix([before, text]))
        stops = [stop for stop in self.stops.values() if stop]
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

    def escaped(self, part: Any) -> Any:
        """Return an environment's text, in which special tokens are broken up.

        Of messages, every text is changed, including names and calls.
        """
        if isinstance(part, Mapping):
            return {self.escaped(name): self.escaped(inner) for name, inner in part.items()}
        if isinstance(part, list | tuple):
            return [self.escaped(inner) for inner in part]
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


def _with_thinking(message: Message) -> Message:
    """Return a message whose reasoning also has the name that the template of gpt-oss reads."""
    return {**message, "thinking": message[REASONING]} if REASONING in message else message


def with_calls(
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
