"""Images in rows: paths and bytes in data files become references in the messages.

    row, refs = take_images(row, ("prompt",), "images", [Path("data")])

The rows of verl and TRL have a column of images, and `<image>` or an empty part of type `image`
where each belongs. Without such places, the images come first in the user's first message, as in
TRL. In OpenAI's format, the parts contain the images. Afterwards, each image is a part `{"type":
"image", "path": ..., "sha": ...}`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workers.chats import IMAGE_TYPES, MEDIA
from workers.images import ImageRef, image_ref

MARK = "<image>"
Row = dict[str, Any]


class Place(NamedTuple):
    """A place for an image in a content; without `media`, for the next image of the column."""

    media: Any = None


def take_images(
    row: Row, columns: Sequence[str], image_key: str | None, folders: Sequence[Path]
) -> tuple[Row, list[ImageRef]]:
    """Return the row with references to images in the messages of `columns`, and the references.

    Relative paths are looked up in the `folders`. A ValueError says what is wrong with an image, or
    that there are more or fewer places than images.
    """
    given = row.get(image_key) if image_key else None
    images = [] if given is None else given if isinstance(given, list | tuple) else [given]
    taken = {name: value for name, value in row.items() if name != image_key}
    chats = {name: row[name] for name in columns if isinstance(row.get(name), list)}
    if images and not chats:
        raise ValueError("it has images, which need a chat: write the prompt as messages")
    contents = [message.get("content") for chat in chats.values() for message in chat]
    if images and not any(isinstance(p, Place) for c in contents for p in _pieces(c, True)):
        name = next(iter(chats))
        chats[name] = _with_places(chats[name], len(images))

    left = deque(image_ref(image, folders) for image in images)
    refs: list[ImageRef] = []
    for name, chat in chats.items():
        taken[name] = list(chat)
        for number, message in enumerate(chat):
            pieces = list(_pieces(message.get("content"), bool(images)))
            if not any(isinstance(piece, Place) for piece in pieces):
                continue
            for place, piece in enumerate(pieces):
                if not isinstance(piece, Place):
                    continue
                if piece.media is None and not left:
                    raise ValueError(
                        f"part {place} of message {number} is a place for an image, but the row "
                        f"has only {len(images)} images in the column {image_key!r}"
                    )
                media = piece.media
                refs.append(left.popleft() if media is None else image_ref(media, folders))
                pieces[place] = {"type": "image", **refs[-1]._asdict()}
            taken[name][number] = {**message, "content": pieces}
    if left:
        raise ValueError(
            f"it has {len(images)} images, but only {len(images) - len(left)} places for them "
            f"({MARK}) in its messages"
        )
    return taken, refs


def _pieces(content: Any, has_column: bool) -> Iterator[Any]:
    """Yield the parts of a content, with a `Place` for each image.

    If the row has a column of images, each `<image>` in a text is a place for one of them.
    """
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES:
            media = (part[name] for name in (*MEDIA, "path", "bytes") if part.get(name))
            yield Place(next(media, None))
        elif has_column and isinstance(part, Mapping) and MARK in str(part.get("text")):
            for number, text in enumerate(part["text"].split(MARK)):
                if number:
                    yield Place()
                if text:
                    yield {**part, "text": text}
        else:
            yield part


def _with_places(chat: Sequence[Any], count: int) -> list[Any]:
    """Return the chat with places for images at the start of the user's first message."""
    for number, message in enumerate(chat):
        content = message.get("content")
        if message.get("role") == "user" and content is not None:
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            first = {**message, "content": [*[{"type": "image"}] * count, *parts]}
            return [*chat[:number], first, *chat[number + 1 :]]
    raise ValueError("it has images, but no message of the user to put them in")
