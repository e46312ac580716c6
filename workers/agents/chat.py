"""Render the tokens between two sampled turns, so that sampled ids are not re-created from text.

    chat = TurnRenderer(tokenizer, tools, stop_ids)
    ids = chat.prompt(messages)                     # up to the start of the policy's turn
    ids += sampled_ids
    ids += chat.between(sampled_ids[-1], observations)    # turn end, observations, turn start

The row has the tokens that were sampled and read, even if the template drops parts of older turns
(such as reasoning). With `environment.history_tokens=retokenized`, if the template changes earlier
text, `chat.rewritten` returns the whole chat, which is tokenized again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

from workers.agents.calls import forms_of, parse
from workers.agents.template import ChatTemplate, Message, with_calls
from workers.chats import images_of, text_of
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
        text, read = self.template.written(self.template.safe(messages)), ""
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
        return self.template.between(last, self.template.safe(observations))

    def turn(
        self, sampled_ids: Sequence[int], last: int | None, observations: Sequence[Message]
    ) -> list[Message]:
        """Return messages of a sampled turn and the observations after it, for `rewritten`."""
        text = self._tokenizer.decode(sampled_ids if last is None else sampled_ids[:-1])
        observations = self.template.safe(observations)
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
