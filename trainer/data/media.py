"""Images, videos and sound of a row: all of them are read, or rejected.

    row, refs = read_media(row, ReadColumns(["prompt"]), [Path("data")], model="models/qwen")

Every recipe reads its rows through `read_media`. A row mentions media in three ways: by a column
(`image`, `images`), by parts of a content, and by a marker in a text (`<image>`).

- Images in a column or in parts become references in the chat (`trainer.data.images`).
- Videos and sound are rejected, and so is a marker without media.
- A column that is absent, null or empty, without a marker, is a row of text.

A text may contain `<image>` as a word, as XML does. So it is a marker only if the row has a column
for images, or if the model reads images. Without such a column, a model of text gets the text as it
is, and so does any model if the content is a part of type `text`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from workers.chats import has_images

if TYPE_CHECKING:
    from workers.images import ImageRef

Row = dict[str, Any]
IMAGE_COLUMNS = ("images", "image")
UNREAD = {"video": ("videos", "video"), "audio": ("audios", "audio")}
"""Modalities that no recipe reads -> their columns."""


class ReadColumns(NamedTuple):
    """The columns of a row that a recipe turns into tokens."""

    chats: Sequence[str]
    """Prompts or whole chats; each has all images of the row."""
    replies: Sequence[str] = ()
    """Responses to a prompt, which contain no media."""


def read_media(
    row: Row,
    read: ReadColumns,
    folders: Sequence[Path],
    *,
    image_key: str | None = IMAGE_COLUMNS[0],
    model: str = "",
) -> tuple[Row, Sequence[ImageRef]]:
    """Return the row with references to images in its chats, and the references.

    Relative paths are looked up in the `folders`. `image_key` names a column of images next to
    `IMAGE_COLUMNS`; with None, columns and markers of images are not read. `model` is the folder of
    the model, if it is known. A ValueError says what is wrong with the media.
    """
    for kind, unread in UNREAD.items():
        filled = _filled(row, unread)
        if filled:
            raise ValueError(
                f"it has a value in the column {filled[0]!r}, but only texts and images are read, "
                f"no {kind}. Leave the row out, or rename the column if it is not for the model"
            )
        _check_no_marker(row, read, kind, unread, model)
    columns = tuple(dict.fromkeys((image_key, *IMAGE_COLUMNS))) if image_key else ()
    filled = _filled(row, columns)
    if len(filled) > 1:
        raise ValueError(
            f"it has images in the columns {filled[0]!r} and {filled[1]!r}. Leave one of them out"
        )
    if not filled and image_key:
        _check_no_marker(row, read, "image", columns, model)
    contents = (content for name in read.chats for content in _contents(row.get(name)))
    if not filled and not any(map(has_images, contents)):
        return row, ()
    return _with_refs(row, read, filled[0] if filled else None, folders)


def _filled(row: Row, columns: Sequence[str]) -> list[str]:
    """Return the columns with a value; null and an empty list are none."""
    values = {name: row[name] for name in columns if row.get(name) is not None}
    return [name for name, value in values.items() if not hasattr(value, "__len__") or len(value)]


def _contents(value: Any) -> Iterator[Any]:
    """Yield the contents of a chat; a text is one content."""
    messages = value if isinstance(value, list | tuple) else [{"content": value}]
    yield from (message.get("content") for message in messages if isinstance(message, Mapping))


def _texts(value: Any, in_parts: bool) -> Iterator[str]:
    """Yield the texts of a chat, or a text; those in parts only if `in_parts`."""
    for content in _contents(value):
        parts = [{"text": content}] if isinstance(content, str) else content
        if isinstance(content, str) or (in_parts and isinstance(content, list | tuple)):
            yield from (str(part.get("text")) for part in parts if isinstance(part, Mapping))


def _check_no_marker(
    row: Row, read: ReadColumns, kind: str, columns: Sequence[str], model: str
) -> None:
    """Raise a ValueError for a marker in a row without media of this kind."""
    empty = [name for name in columns if name in row]
    for name in (*read.chats, *read.replies):
        if not any(f"<{kind}>" in text for text in _texts(row.get(name), bool(empty))):
            continue
        story = f"{name!r} contains <{kind}>, but the row has no {kind}"
        if empty:
            raise ValueError(
                f"{story}: its column {empty[0]!r} is empty. Fill it, or remove the column if "
                f"<{kind}> is a word of the text"
            )
        if _reads_images(model):
            raise ValueError(
                f"{story} in a column {' or '.join(map(repr, columns))}. Add it; if <{kind}> is a "
                "word of the text, write the content as a part of type 'text'"
            )


def _reads_images(model: str) -> bool:
    """Return whether the model in this folder reads images."""
    try:
        config = json.loads((Path(model) / "config.json").read_bytes()) if model else {}
    except (OSError, ValueError):  # the model's own check says what is wrong
        return False
    return config.get("vision_config") is not None


def _with_refs(
    row: Row, read: ReadColumns, column: str | None, folders: Sequence[Path]
) -> tuple[Row, Sequence[ImageRef]]:
    """Return the row with references to the images of the column and of parts.

    The code for images is imported only if a row has some.
    """
    from trainer.data.images import take_images

    if any(row.get(name) is None for name in read.chats):
        return row, ()  # the recipe says which column is missing
    for name in read.replies:
        if column and any("<image>" in text for text in _texts(row.get(name), True)):
            raise ValueError(f"{name!r} contains <image>: only the prompt has places for images")
    images = None if column is None else row[column]
    if not isinstance(images, list | tuple):
        images = [] if images is None else [images]
    taken = {}
    for name in read.chats:
        if not isinstance(row.get(name), list | tuple):
            raise ValueError("it has images, which need a chat: write the prompt as messages")
        taken[name] = take_images(row[name], images, folders)
    first, *others = read.chats
    refs = taken[first][1]
    for other in others:
        if taken[other][1] != refs:
            paths = [[ref.path for ref in taken[name][1]] for name in (first, other)]
            raise ValueError(
                f"the images of {first!r} {paths[0]} differ from those of {other!r} {paths[1]}"
            )
    chats = {name: chat for name, (chat, _) in taken.items()}
    return {name: value for name, value in row.items() if name != column} | chats, refs
