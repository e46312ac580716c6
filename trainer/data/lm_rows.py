"""Rows that a language-model loss trains on: plain text, prompts with responses, chats.

    rows = read_lm_rows("ptx.train_files", files, tokenizer, max_length=512)
    loader = RowLoader(rows, seed, partial(lm_batch, pad_token_id=tokenizer.pad_token_id))
    batch = loader.next_batch(64)                     # what `TrainEngine.update` reads

A row's columns decide which tokens are in the loss:

- `text`: every token, and the end of the text;
- `prompt` and `response` or `completion`: the response and, unless its `finish_reason` is length,
  its end token. The prompt is tokenized as in PPO. A `completion` may also be the messages after a
  prompt of messages;
- `messages`: the assistant's part of every turn. If the chat template marks that part with
  `{% generation %}`, the marked tokens are in the loss; otherwise, the tokens that the template
  writes for an assistant's message after the generation prompt, including end-of-turn tokens.

A bad row stops the run, or is left out. Rows of large files are cached on disk, and later runs
memory-map the cache.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.data.files import (
    NoColumn,
    Row,
    filled_columns,
    first_rows,
    folders_of,
    good_rows,
    names_of,
    rows_of_files,
)
from trainer.data.media import ReadColumns, read_media
from trainer.data.prompt_table import cache_key
from trainer.data.prompt_tokens import (
    DroppedCharacters,
    check_length,
    check_messages,
    encode_prompt,
    readable,
    render_messages,
)
from trainer.data.row_cache import Entry, cached_rows, check_cacheable
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import ConfigError
from workers.chats import TEMPLATE_ERRORS, images_of, render_chat, text_of
from workers.columns import IMAGES
from workers.models.folder import generation_eos
from workers.rollout.sample import LENGTH_LIMIT

if TYPE_CHECKING:
    from workers.images import ImageRef

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LMRow:
    """The tokens of a text, and which of them are in the loss."""

    ids: NDArray[np.int64]
    in_loss: NDArray[np.bool_]
    images: Sequence[ImageRef] = ()

    def cut(self, max_length: int) -> LMRow:
        """Return the first `max_length` tokens; a longer row with images leaves the loss."""
        if self.images and len(self.ids) > max_length:
            return replace(self, in_loss=np.zeros_like(self.in_loss))
        return replace(self, ids=self.ids[:max_length], in_loss=self.in_loss[:max_length])

    def from_token(self, start: int) -> LMRow:
        """Return the row with the tokens before `start` taken out of the loss."""
        return replace(self, in_loss=self.in_loss & (np.arange(len(self.ids)) >= start))


STUB_ROW = LMRow(np.arange(2), np.array([False, True]))
"""A row for steps on stubs (`trainer.stubs`)."""


class EncodedRow(NamedTuple):
    """One row of a file as a recipe encodes it: one or more token sequences, and numbers."""

    sides: Sequence[LMRow]
    numbers: Sequence[float] = ()


Encode = Callable[[Row, Any], EncodedRow]
"""Maps (row, tokenizer) to the encoded row. A ValueError says what is wrong with the row."""
ColumnsOf = Callable[[Row], ReadColumns]
"""Returns the columns of a row that a recipe reads."""


def encode_rows(
    key: str,
    files: Any,
    kind: str,
    columns_of: ColumnsOf,
    encode: Encode,
    tokenizer: Any,
    on_bad_row: str,
    limit: int | None = None,
) -> tuple[list[EncodedRow], int]:
    """Encode the rows in order; also return the number of skipped rows.

    The configuration's `key` names the files. The tokens of large files are cached; `kind`
    distinguishes cache entries of the same files. With `on_bad_row=skip`, a bad row is left out;
    otherwise it stops the run.
    """
    names = names_of(files)
    folders = folders_of(names)
    dropped = DroppedCharacters(tokenizer)

    def encode_and_note(where: str, row: Row) -> EncodedRow:
        row, refs = read_media(row, columns_of(row), folders, model=tokenizer.name_or_path)
        try:
            encoded = encode(row, tokenizer)
        except ConfigError as error:  # the model reads no images
            raise ConfigError(f"{where}: {error}") from error
        dropped.note(row)
        if not refs:
            return encoded
        return encoded._replace(sides=[replace(side, images=refs) for side in encoded.sides])

    def read() -> Iterator[EncodedRow | None]:
        dropped.counts.clear()
        rows = first_rows(rows_of_files(names, key), limit, key)
        return good_rows(rows, encode_and_note, on_bad_row)

    def cells() -> Iterator[dict[str, Any] | None]:
        for row in read():
            images = row.sides[0].images if row else ()
            check_cacheable(images)
            yield row and {
                "images": json.dumps(images),
                "ids": [side.ids for side in row.sides],
                "in_loss": [side.in_loss.view(np.uint8) for side in row.sides],
                "numbers": list(row.numbers),
            }

    settings = {"rows": kind, "on_bad_row": on_bad_row, "eos_token_id": tokenizer.eos_token_id}
    entry_key = cache_key(names, tokenizer, **settings) if limit is None else None
    if entry_key is not None:
        import pyarrow as pa

        columns = {
            "ids": pa.list_(pa.list_(pa.int64())),
            "in_loss": pa.list_(pa.list_(pa.uint8())),
            "numbers": pa.list_(pa.float64()),
            "images": pa.string(),
        }
        entry = cached_rows("rows", entry_key, columns, cells)
        dropped.warn(key)
        if entry is not None:
            return list(_rows_of(entry)), entry.summary["num_bad"]
    encoded = list(read())
    dropped.warn(key)
    rows = [row for row in encoded if row is not None]
    return rows, len(encoded) - len(rows)


def _rows_of(entry: Entry) -> Iterator[EncodedRow]:
    """Yield the encoded rows of a table in the cache."""
    for block in entry.table.to_batches():
        sides_of_rows = block.column("ids")
        ids = sides_of_rows.values.values.to_numpy()
        in_loss = block.column("in_loss").values.values.to_numpy().view(np.bool_)
        bounds = sides_of_rows.values.offsets.to_numpy().tolist()
        sides = [
            LMRow(ids[begin:end], in_loss[begin:end])
            for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
        ]
        ends = sides_of_rows.offsets.to_numpy().tolist()
        numbers, images = block.column("numbers").to_pylist(), block.column("images").to_pylist()
        for begin, end, its_numbers, text in zip(ends[:-1], ends[1:], numbers, images, strict=True):
            of_row = sides[begin:end]
            refs = json.loads(text)
            if refs:
                from workers.images import ImageRef

                refs = [ImageRef(*ref) for ref in refs]
                of_row = [replace(side, images=refs) for side in of_row]
            yield EncodedRow(of_row, its_numbers)


def teaches(sides: Sequence[LMRow]) -> bool:
    """Return whether every side has a token in the loss, and no other side equals the first."""
    first, *others = sides
    has_loss = all(side.in_loss[1:].any() for side in sides)
    return has_loss and not any(np.array_equal(first.ids, side.ids) for side in others)


def stop_tokens(tokenizer: Any, path: str) -> list[int]:
    """Return the tokens that end a sample of the model in the folder `path`."""
    return [id for id in (tokenizer.eos_token_id, *generation_eos(path)) if id is not None]


def without_blanks(side: LMRow, stops: Sequence[int], tokenizer: Any) -> LMRow:
    """Cut the side after its last stop token if only whitespace follows."""
    if side.ids[-1] in stops:
        return side
    is_reply = np.arange(len(side.ids)) >= side.in_loss.argmax()
    places = (np.isin(side.ids, stops) & is_reply).nonzero()[0]
    if not len(places) or tokenizer.decode(side.ids[places[-1] + 1 :]).strip():
        return side
    return side.cut(int(places[-1]) + 1)


def cut_rows(
    key: str, kind: str, rows: Sequence[EncodedRow], num_bad: int, max_length: int, why: str
) -> tuple[list[EncodedRow], str]:
    """Cut sides to `max_length` tokens; return the rows, and a sentence with the counts.

    A row is dropped if a side is left without a token in the loss, or if another side equals the
    first; it is an error if none is left. The sentence calls the rows `kind`, and says `why` rows
    are dropped.
    """
    good: list[EncodedRow] = []
    num_truncated = 0
    for row in rows:
        if max(len(side.ids) for side in row.sides) > max_length:
            num_truncated += 1
            row = row._replace(sides=[side.cut(max_length) for side in row.sides])
        if teaches(row.sides):
            good.append(row)
    skipped = f", {num_bad} malformed and skipped" if num_bad else ""
    story = (
        f"{key}: {len(rows) + num_bad} {kind}{skipped}; {num_truncated} truncated to {max_length} "
        f"tokens; {len(rows) - len(good)} dropped because afterwards {why}"
    )
    if not good:
        raise ConfigError(
            f"{story}. No {kind.removesuffix('s')} is left to train or validate on. Fix the rows, "
            f"or raise {key.partition('.')[0]}.max_length."
        )
    return good, story


GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


def read_lm_rows(
    key: str,
    files: Any,
    tokenizer: Any,
    max_length: int,
    *,
    loss_on_all: bool = False,
    on_bad_row: str = "error",
    limit: int | None = None,
) -> list[LMRow]:
    """Return the rows of the files that the configuration's `key` names, in order.

    With `loss_on_all`, every token but those of images is in the loss, whatever the columns. A bad
    row raises an error; with `on_bad_row="skip"`, it is skipped and counted. Rows of more than
    `max_length` tokens are cut at their end; a row that is left without a token in the loss is
    dropped. A log line reports these numbers.
    """
    encoded, num_bad = encode_rows(
        key, files, "language model", lm_columns_of, _encode, tokenizer, on_bad_row, limit
    )
    warn_of_no_ends(key, [row.sides[0] for row in encoded], tokenizer)
    if loss_on_all:
        encoded = [EncodedRow([_all_in_loss(row.sides[0], tokenizer)]) for row in encoded]
    rows, story = cut_rows(key, "rows", encoded, num_bad, max_length, "no token is in the loss")
    logger.info("%s", story)
    return [row.sides[0] for row in rows]


def _all_in_loss(row: LMRow, tokenizer: Any) -> LMRow:
    """Return the row with every token in the loss, except those of images."""
    in_loss = np.ones_like(row.in_loss)
    if row.images:
        from workers.models.images import image_reader

        in_loss = row.ids != image_reader(tokenizer.name_or_path).token_id
    return replace(row, in_loss=in_loss)


def warn_of_no_ends(key: str, rows: Sequence[LMRow], tokenizer: Any) -> None:
    """Warn if most rows have no stop token in the loss."""
    stops = [id for id in [tokenizer.eos_token_id] if id is not None]
    if Path(tokenizer.name_or_path).is_dir():
        stops = stop_tokens(tokenizer, tokenizer.name_or_path)
    num_without = sum(not np.isin(row.ids[row.in_loss], stops).any() for row in rows)
    if stops and 2 * num_without > len(rows):
        names = ", ".join(map(repr, tokenizer.convert_ids_to_tokens([*dict.fromkeys(stops)])))
        logger.warning(
            "%s: %d of %d rows have none of the model's stop tokens (%s) in the loss, so the model "
            "does not learn to end a response. Let the chat template of %s write "
            "{{ eos_token }} after an assistant's message (within its {%% generation %%} markers, "
            "if it has any).",
            key,
            num_without,
            len(rows),
            names,
            tokenizer.name_or_path,
        )


def _encode(row: Row, tokenizer: Any) -> EncodedRow:
    return EncodedRow([encode_lm_row(row, tokenizer)])


def encode_lm_row(row: Row, tokenizer: Any) -> LMRow:
    """Return tokens and loss mask of a row; a ValueError says what is wrong with it."""
    row = readable(row)
    if has_completion(row):
        return encode_reply(row["prompt"], row["completion"], tokenizer, row.get("finish_reason"))
    column = check_lm_row(row)
    if column == "messages":
        encoded = _encode_chat(row, tokenizer)
    elif column == "text":
        ids = _with_end(tokenizer(row["text"])["input_ids"], tokenizer)
        encoded = LMRow(ids, np.ones(len(ids), dtype=np.bool_))
    else:
        prompt = encode_prompt(row["prompt"], tokenizer)
        response = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
        if row.get("finish_reason") != LENGTH_LIMIT:
            response = _with_end(response, tokenizer)
        ids = np.concatenate([prompt, np.array(response, dtype=np.int64)])
        encoded = LMRow(ids, np.arange(len(ids)) >= len(prompt))
    if not teaches([encoded]):
        raise ValueError("the row has no token in the loss")
    return encoded


def has_completion(row: Row) -> bool:
    """Return whether a row has TRL's columns `prompt` and `completion`."""
    others = (row.get("messages"), row.get("response"))
    return others == (None, None) and None not in (row.get("prompt"), row.get("completion"))


def lm_columns_of(row: Row) -> ReadColumns:
    """Return the columns of a row that `encode_lm_row` reads."""
    if has_completion(row):
        return ReadColumns(["prompt"], ["completion"])
    if row.get("messages") is not None:
        return ReadColumns(["messages"])
    if row.get("prompt") is not None and row.get("response") is not None:
        return ReadColumns(["prompt"], ["response"])
    return ReadColumns(["prompt" if row.get("text") is None else "text"])


def encode_reply(prompt: Any, reply: Any, tokenizer: Any, finish_reason: Any = None) -> LMRow:
    """Encode a prompt and its reply, which is a text or messages; only the reply is in the loss."""
    encoded = encode_lm_row(reply_row(prompt, reply, finish_reason), tokenizer)
    if isinstance(reply, str):
        return encoded
    return encoded.from_token(len(encode_prompt(prompt, tokenizer)))


def reply_row(prompt: Any, reply: Any, finish_reason: Any = None) -> Row:
    """Return a prompt, if any, and its reply as a row for `encode_lm_row`."""
    if prompt is None:
        return {"text" if isinstance(reply, str) else "messages": reply}
    if isinstance(reply, str):
        return {"prompt": prompt, "response": reply, "finish_reason": finish_reason}
    if not isinstance(prompt, list) or not isinstance(reply, list):
        raise ValueError(
            "the response must be a text, unless prompt and response are both lists of messages"
        )
    return {"messages": [*prompt, *reply]}


def check_lm_row(row: Row) -> str:
    """Return the column with the tokens in the loss; a ValueError says what is wrong with a row."""
    if has_completion(row):
        row = reply_row(row["prompt"], row["completion"])
    if row.get("messages") is not None:
        _check_chat(row["messages"])
        return "messages"
    has_response = row.get("prompt") is not None and row.get("response") is not None
    if not has_response and row.get("text") is None:
        columns = ("messages", "response", "completion", "text")
        error = NoColumn if row.keys().isdisjoint(columns) else ValueError
        pairs = "; `verl-like dpo` trains on 'chosen' and 'rejected'" if "chosen" in row else ""
        raise error(
            "it has neither 'messages', nor 'prompt' and 'response' (or 'completion'), nor 'text'; "
            f"columns: {filled_columns(row)}{pairs}"
        )
    if has_response and row["prompt"] in ("", []):
        raise ValueError("'prompt' is empty")
    if has_response and not isinstance(row["prompt"], str):
        check_messages("prompt", row["prompt"])
    column = "response" if has_response else "text"
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"{column!r} is {value!r:.80}, not a text")
    if not value.strip():
        raise ValueError(f"{column!r} is empty")
    check_length(value)
    return column


def _check_chat(messages: Any) -> None:
    check_messages("messages", messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("'messages' has no message of the assistant")
    for number, message in enumerate(messages):
        is_empty = not text_of(message["content"]).strip()
        if message["role"] == "assistant" and is_empty and not message.get("tool_calls"):
            raise ValueError(f"message {number} of 'messages' is an empty assistant message")


def _encode_chat(row: Row, tokenizer: Any) -> LMRow:
    """Return a chat's tokens, with the tokens of the assistant in the loss.

    If the chat template marks them with `{% generation %}`, its marks are used. Otherwise their
    positions in the rendered text are.
    """
    from jinja2 import TemplateError

    messages, template = row["messages"], tokenizer.chat_template
    if template is None:
        raise ValueError(
            f"it is a chat, and the tokenizer of {tokenizer.name_or_path} has no chat template; "
            "add chat_template.jinja to the model folder"
        )

    is_marked = isinstance(template, str) and GENERATION_MARKER.search(template)
    if is_marked and not images_of(messages):
        try:
            encoded = render_chat(
                tokenizer,
                messages,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            return LMRow(
                np.array(encoded["input_ids"], dtype=np.int64),
                np.array(encoded["assistant_masks"], dtype=np.bool_),
            )
        except (TemplateError, *TEMPLATE_ERRORS) as error:
            raise ValueError(f"the chat template rejects it: {error}") from error
    text = render_messages(messages, tokenizer)
    spans = _assistant_spans(messages, tokenizer, text)

    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    starts = np.array([start for start, _ in encoded["offset_mapping"]])
    in_loss = np.zeros(len(starts), dtype=np.bool_)
    for first, end in spans:
        in_loss |= (starts >= first) & (starts < end)
    return LMRow(np.array(encoded["input_ids"], dtype=np.int64), in_loss)


def _assistant_spans(messages: list[Row], tokenizer: Any, text: str) -> list[tuple[int, int]]:
    """Return the start and end of each assistant message in the chat's text."""
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render_messages(messages[:number], tokenizer, add_generation_prompt=True)
        after = render_messages(messages[: number + 1], tokenizer)
        if not (text.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"the tokens of message {number}, of the assistant, cannot be identified: the chat "
                "template writes it differently when other messages follow it, or does not begin "
                "it with the generation prompt. Put {% generation %} and {% endgeneration %} "
                "around these tokens in the template"
            )
        spans.append((len(before), len(after)))
    return spans


def _with_end(ids: list[int], tokenizer: Any) -> NDArray[np.int64]:
    """Return the tokens with one eos at their end."""
    eos = tokenizer.eos_token_id
    has_end = eos is None or (ids and ids[-1] == eos)
    return np.array(ids if has_end else [*ids, eos], dtype=np.int64)


def lm_batch(rows: Sequence[LMRow], uids: Sequence[str], pad_token_id: int) -> DataProto:
    """Return a batch with the columns that `TrainEngine.update` reads."""
    others = {"uid": list(uids), **image_column(rows)}
    return DataProto.from_dict(tensors=lm_columns(rows, pad_token_id), non_tensors=others)


def image_column(rows: Sequence[Any]) -> dict[str, list[Any]]:
    """Return the column with the rows' images, if there are any."""
    return {IMAGES: [row.images for row in rows]} if any(row.images for row in rows) else {}


def lm_columns(rows: Sequence[LMRow], pad_token_id: int) -> dict[str, RaggedTensor]:
    """Return the tensors of rows padded on the right.

    All tokens of a row except the first are its response; the mask says which are in the loss.
    """
    tokens = [torch.tensor(row.ids, dtype=torch.int64) for row in rows]
    in_loss = [torch.tensor(row.in_loss, dtype=torch.int64) for row in rows]
    width = max(map(len, tokens))
    ids = RaggedTensor.from_rows(tokens, width, fill=pad_token_id)
    positions = torch.cat([torch.arange(len(row)) for row in tokens])
    return {
        "input_ids": ids,
        "attention_mask": ids.with_values(torch.ones_like(positions)),
        "position_ids": ids.with_values(positions),
        "responses": RaggedTensor.from_rows(
            [row[1:] for row in tokens], width - 1, fill=pad_token_id
        ),
        "response_mask": RaggedTensor.from_rows([row[1:] for row in in_loss], width - 1),
    }
