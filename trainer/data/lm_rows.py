"""Rows that a language-model loss trains on: plain text, prompts with responses, chats.

    rows = read_lm_rows("ptx.train_files", files, tokenizer, max_length=512)
    loader = RowLoader(rows, seed, partial(lm_batch, pad_token_id=tokenizer.pad_token_id))
    batch = loader.take(64)                     # what `TrainEngine.update` reads

A row's columns decide which tokens are in the loss:

- `text`: every token, and the end of the text;
- `prompt` and `response`: the response and, unless its `finish_reason` is length, its end. The
  prompt is tokenized as PPO tokenizes prompts;
- `messages`: the assistant's part of every turn. If the chat template marks it by
  `{% generation %}`, the marked tokens; otherwise what the template adds for an assistant's message
  after the generation prompt, with its end-of-turn tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.encoded_rows import EncodedRow, LMRow, cut_rows, encode_rows, teaches
from trainer.data.files import Row, filled_columns
from trainer.data.prompt_tokens import (
    OF_A_TEMPLATE,
    check_length,
    check_messages,
    encode_prompt,
    readable,
    written,
)
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import Ragged
from verl_like.errors import ConfigError
from workers.rollout.sample import CUT_BY_LENGTH

logger = logging.getLogger(__name__)
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


def read_lm_rows(
    key: str,
    files: Any,
    tokenizer: Any,
    max_length: int,
    *,
    loss_on_all: bool = False,
    on_bad_row: str | None = None,
    limit: int | None = None,
) -> list[LMRow]:
    """Return the rows of the files that the configuration's `key` names, in order.

    With `loss_on_all` every token is in the loss, whatever the columns. A bad row is an error, or
    skipped and counted. Rows of more than `max_length` tokens are cut at their end; a row without a
    token in the loss is then dropped. A line of the log counts both.
    """
    encoded, num_bad = encode_rows(
        key, files, "language model", _encode, tokenizer, on_bad_row, limit
    )
    if loss_on_all:
        sides = [row.sides[0] for row in encoded]
        encoded = [EncodedRow([LMRow(row.ids, np.ones_like(row.in_loss))]) for row in sides]
    rows, story = cut_rows(key, "rows", encoded, num_bad, max_length, "their loss")
    if not rows:
        raise ConfigError(f"{story}: no row is left to train on.")
    logger.info("%s", story)
    return [row.sides[0] for row in rows]


def _encode(row: Row, tokenizer: Any) -> EncodedRow:
    return EncodedRow([encode_lm_row(row, tokenizer)])


def encode_lm_row(row: Row, tokenizer: Any) -> LMRow:
    """Return tokens and loss mask of a row; a ValueError says what is wrong with it."""
    row = readable(row)
    for columns, encode in ENCODERS.items():
        if all(row.get(column) is not None for column in columns):
            encoded = encode(row, tokenizer)
            if not teaches([encoded]):
                raise ValueError("no token of it is in the loss")
            return encoded

    raise ValueError(
        "it has neither 'messages', nor 'prompt' and 'response', nor 'text'; there is "
        f"{filled_columns(row)}"
    )


def _encode_text(row: Row, tokenizer: Any) -> LMRow:
    text = _filled_string(row, "text")
    ids = _with_end(tokenizer(text)["input_ids"], tokenizer)
    return LMRow(ids, np.ones(len(ids), dtype=np.bool_))


def _encode_response(row: Row, tokenizer: Any) -> LMRow:
    if row["prompt"] in ("", []):
        raise ValueError("'prompt' is empty")
    prompt = encode_prompt(row["prompt"], tokenizer)
    response = tokenizer(_filled_string(row, "response"), add_special_tokens=False)["input_ids"]
    if row.get("finish_reason") != CUT_BY_LENGTH:
        response = _with_end(response, tokenizer)
    ids = np.concatenate([prompt, np.array(response, dtype=np.int64)])
    return LMRow(ids, np.arange(len(ids)) >= len(prompt))


def _encode_chat(row: Row, tokenizer: Any) -> LMRow:
    from jinja2 import TemplateError

    messages = row["messages"]
    check_messages("messages", messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("'messages' has no message of the assistant")
    for number, message in enumerate(messages):
        content = message["content"]
        text = content.strip() if isinstance(content, str) else content
        if message["role"] == "assistant" and not (text or message.get("tool_calls")):
            raise ValueError(f"message {number} of 'messages', the assistant's, is empty")
    template = tokenizer.chat_template
    if template is None:
        raise ValueError(
            f"it is a chat, and the tokenizer of {tokenizer.name_or_path} has no chat template; "
            "add chat_template.jinja to the model folder"
        )

    if isinstance(template, str) and GENERATION_MARKER.search(template):
        try:
            return _encode_marked(messages, tokenizer)
        except (TemplateError, *OF_A_TEMPLATE) as error:
            raise ValueError(f"the chat template rejects it: {error}") from error
    text = written(messages, tokenizer)
    spans = _assistant_spans(messages, tokenizer, text)

    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = np.array([start for start, _ in encoded["offset_mapping"]])
    in_loss = np.zeros(len(starts), dtype=np.bool_)
    for first, end in spans:
        in_loss |= (starts >= first) & (starts < end)
    return LMRow(np.array(encoded["input_ids"], dtype=np.int64), in_loss)


def _encode_marked(messages: list[Row], tokenizer: Any) -> LMRow:
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return LMRow(
        np.array(encoded["input_ids"], dtype=np.int64),
        np.array(encoded["assistant_masks"], dtype=np.bool_),
    )


def _assistant_spans(messages: list[Row], tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Return where each of the assistant's messages begins and ends in the chat's text."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = written(messages[:number], tokenizer, add_generation_prompt=True)
        after = written(messages[: number + 1], tokenizer)
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"the chat template writes message {number}, the assistant's, otherwise where "
                "others follow it, so its tokens cannot be told apart; put {% generation %} and "
                "{% endgeneration %} around them in the template"
            )
        spans.append((len(before), len(after)))
    return spans


def _filled_string(row: Row, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"{column!r} is a {type(value).__name__}, not a string")
    if not value.strip():
        raise ValueError(f"{column!r} is empty")
    check_length(value)
    return value


def _with_end(ids: list[int], tokenizer: Any) -> NDArray[np.int64]:
    """Return the tokens with one eos at their end."""
    eos = tokenizer.eos_token_id
    has_end = eos is None or (ids and ids[-1] == eos)
    return np.array(ids if has_end else [*ids, eos], dtype=np.int64)


ENCODERS: dict[tuple[str, ...], Callable[[Row, Any], LMRow]] = {
    ("messages",): _encode_chat,
    ("prompt", "response"): _encode_response,
    ("text",): _encode_text,
}
"""Columns -> the function that encodes a row with them; the first that fit."""


def lm_batch(rows: Sequence[LMRow], uids: Sequence[str], pad_token_id: int) -> DataProto:
    """Return a batch with the columns that `TrainEngine.update` reads."""
    return DataProto.from_dict(
        tensors=lm_columns(rows, pad_token_id), non_tensors={"uid": list(uids)}
    )


def lm_columns(rows: Sequence[LMRow], pad_token_id: int) -> dict[str, Ragged]:
    """Return the tensors of rows padded on the right.

    Every token except the first of a row is a response; the mask says which are in the loss.
    """
    tokens = [torch.tensor(row.ids, dtype=torch.int64) for row in rows]
    in_loss = [torch.tensor(row.in_loss, dtype=torch.int64) for row in rows]
    width = max(map(len, tokens))
    ids = Ragged.from_rows(tokens, width, fill=pad_token_id)
    positions = torch.cat([torch.arange(len(row)) for row in tokens])
    return {
        "input_ids": ids,
        "attention_mask": ids.with_values(torch.ones_like(positions)),
        "position_ids": ids.with_values(positions),
        "responses": Ragged.from_rows([row[1:] for row in tokens], width - 1, fill=pad_token_id),
        "response_mask": Ragged.from_rows([row[1:] for row in in_loss], width - 1),
    }
