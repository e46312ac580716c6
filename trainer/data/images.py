"""Images in chats: paths and bytes in data files become references in the messages.

    messages, refs = take_images(row["prompt"], row["images"], [Path("data")])

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


class ImagePlaceholder(NamedTuple):
    """A place for an image in a content; without `media`, for the next image of the column."""

    media: Any = None


def take_images(
    chat: Sequence[Any], images: Sequence[Any], folders: Sequence[Path]
) -> tuple[list[Any], list[ImageRef]]:
    """Return the chat with references to images, and the references.

    `images` are those of the row's column. A ValueError says what is wrong with an image, or that
    there are more or fewer places than images.
    """
    messages = [_with_places(message, bool(images)) for message in chat]
    if images and not any(_places(messages)):
        _put_first(messages, len(images))

    left = deque(image_ref(image, folders) for image in images)
    refs: list[ImageRef] = []
    for number, place, parts in _places(messages):
        media = parts[place].media
        if media is None and not left:
            raise ValueError(
                f"part {place} of message {number} is a place for an image, but the row has only "
                f"{len(images)} images in its column of images"
            )
        refs.append(left.popleft() if media is None else image_ref(media, folders))
        parts[place] = {"type": "image", **refs[-1]._asdict()}
    if left:
        raise ValueError(
            f"it has {len(images)} images, but only {len(images) - len(left)} places for them "
            f"({MARK}) in its messages"
        )
    return messages, refs


def _with_places(message: Any, has_column: bool) -> Any:
    """Return the message with an `ImagePlaceholder` per image, or the message itself."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = list(_parts(content, has_column))
    has_place = any(isinstance(part, ImagePlaceholder) for part in parts)
    return {**message, "content": parts} if has_place else message


def _parts(content: Any, has_column: bool) -> Iterator[Any]:
    """Yield the parts of a content, with an `ImagePlaceholder` for each image.

    If the row has a column of images, each `<image>` in a text is a place for one of them.
    """
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for part in parts if isinstance(parts, list) else ():
        if isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES:
            media = (part[name] for name in (*MEDIA, "path", "bytes") if part.get(name))
            yield ImagePlaceholder(next(media, None))
        elif has_column and isinstance(part, Mapping) and MARK in str(part.get("text")):
            for number, text in enumerate(part["text"].split(MARK)):
                if number:
                    yield ImagePlaceholder()
                if text:
                    yield {**part, "text": text}
        else:
            yield part


def _places(chat: Sequence[Any]) -> Iterator[tuple[int, int, list[Any]]]:
    """Yield (message number, part number, parts) of each `ImagePlaceholder`."""
    for number, message in enumerate(chat):
        parts = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(parts, list):
            yield from (
                (number, n, parts) for n, p in enumerate(parts) if isinstance(p, ImagePlaceholder)
            )


def _put_first(chat: list[Any], count: int) -> None:
    """Put places for images at the start of the user's first message."""
    for number, message in enumerate(chat):
        content = message.get("content") if isinstance(message, Mapping) else None
        if content is not None and message.get("role") == "user":
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            chat[number] = {**message, "content": [*[ImagePlaceholder()] * count, *parts]}
            return
    raise ValueError("it has images, but no message of the user to put them in")
