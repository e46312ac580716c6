"""Render chats whose messages have a text or a list of parts as their content.

    text = render_chat(tokenizer, messages, add_generation_prompt=True, tokenize=False)

OpenAI's format writes a content as `"a"` or as `[{"type": "text", "text": "a"}]`. Chat templates
read one of these forms or both, which may depend on the message's role, and some read only the
first part. A short chat, rendered once per template, role and form, shows what a template reads.

An image is the part `{"type": "image", "path": ..., "sha": ..., "width": ..., "height": ...}`
(`trainer.data.images`), of which a template gets only the type. Any other part that is not a text
is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

TEMPLATE_ERRORS = (
    *(TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, RecursionError, MemoryError),
)
"""Errors that a template's code may raise for unexpected messages, in addition to jinja2's."""
TEXT_TYPES = ("text", "input_text", "output_text")
"""Types of text parts in OpenAI's and Anthropic's APIs."""
MEDIA = ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")
"""Keys that hold the content of parts of other types."""
MARKS = ("qxjone", "qxjtwo")
"""Texts of a short chat that are looked for in its rendered text."""
Part = dict[str, str]
IMAGE = {"type": "image"}
IMAGE_TYPES = ("image", "image_url", "input_image")
"""Types of parts that are images, in data files and in the APIs."""


def is_image(part: Any) -> bool:
    """Return True for a part of a content that is an image."""
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def has_images(content: Any) -> bool:
    """Return True for a content with parts that are images."""
    return isinstance(content, list) and any(map(is_image, content))


def read_parts(content: Sequence[Any], place: str) -> list[Part]:
    """Return text and images without other keys, such as those that Parquet files fill with None.

    A ValueError names the first part that is neither. `place` names the message.
    """
    parts = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise ValueError(f"part {number} of {place} is {part!r:.80}, not an object with a type")
        if part.get("type") == "image" and part.get("sha"):
            parts.append(IMAGE)
            continue
        media = [name for name in MEDIA if part.get(name) is not None]
        kind = part.get("type") or (media[0] if media else "text")
        if kind not in TEXT_TYPES or media:
            kind = media[0] if kind in TEXT_TYPES else kind
            raise ValueError(f"part {number} of {place} has the type {kind!r}; only text is read")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {number} of {place} has no text: {dict(part)!r:.80}")
        parts.append(_text_part(part["text"]))
    return parts


def text_of(content: Any, place: str = "the message") -> str:
    """Return a content as text: its parts are joined, and None is empty."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise ValueError(f"the content of {place} is {content!r:.80}, not a text")
    return "".join(part.get("text", "<image>") for part in read_parts(content, place))


def texts_of(content: Any, image: str = "") -> list[str]:
    """Return the texts in a content of an observation, and the text `image` for each image."""
    if not isinstance(content, list):
        return [str(content)]
    return [part.get("text", image) for part in content]


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, int, int]]:
    """Return path, hash, width and height of each image in the messages."""
    return [
        (part["path"], part["sha"], part["width"], part["height"])
        for message in messages
        if isinstance(message["content"], list | tuple)
        for part in message["content"]
        if isinstance(part, Mapping) and part.get("type") == "image"
    ]


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
    """Return what the tokenizer's `apply_chat_template` returns with these options.

    A part that is not a text raises a ValueError. The template's code may raise `TEMPLATE_ERRORS`
    and errors of jinja2.
    """
    written = [
        _for_template(tokenizer, message, f"message {number}")
        for number, message in enumerate(messages)
    ]
    return tokenizer.apply_chat_template(written, **options)


def _for_template(tokenizer: Any, message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a message whose content has a form that the template reads for its role."""
    # Parquet files fill absent keys with None, and templates test whether a key is there
    filled = {name: value for name, value in message.items() if value is not None}
    content, forms = message["content"], list(FORMS)
    if isinstance(content, list | tuple):
        parts = read_parts(content, place)
        if IMAGE in parts:
            return {**filled, "content": parts}
        texts = [part["text"] for part in parts]
    elif isinstance(content, str):
        texts, forms = [content], ["text", "part"]
    else:
        return {**filled, "content": content}
    readable = (form for form in forms if _writes(tokenizer, str(message["role"]), form))
    return {**filled, "content": FORMS[next(readable, "text")](texts)}


def _text_part(text: str) -> Part:
    return {"type": "text", "text": text}


FORMS: dict[str, Callable[[Sequence[str]], Any]] = {
    "parts": lambda texts: [_text_part(text) for text in texts],
    "text": "".join,
    "part": lambda texts: [_text_part("".join(texts))],
}
"""Forms of a content with these texts; the first form that a template reads is used."""
_WRITTEN: dict[tuple[str, str, str], bool] = {}
"""Results of `_writes` by the template's text, role and form."""


def _writes(tokenizer: Any, role: str, form: str) -> bool:
    """Return True if the template writes both texts of a content that has this form."""
    key = str(tokenizer.chat_template), role, form
    if key not in _WRITTEN:
        text = _try(tokenizer, role, FORMS[form](MARKS), FORMS[form](["a"]))
        between, second, _ = text.partition(MARKS[0])[2].partition(MARKS[1])
        # a template that prints the list in Python's or JSON's form writes its keys
        _WRITTEN[key] = bool(second) and "text" not in between
    return _WRITTEN[key]


def _try(tokenizer: Any, role: str, content: Any, other: Any) -> str:
    """Render a short chat with a message of this role; other messages have the content `other`.

    Return "" if the template rejects the chat.
    """
    from jinja2 import TemplateError

    question, message = {"role": "user", "content": other}, {"role": role, "content": content}
    chat = [question, message]
    if role == "user":
        chat = [message]
    elif role in ("system", "developer"):
        chat = [message, question]
    elif role == "tool":
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
        turn = {"role": "assistant", "content": other, "tool_calls": [call]}
        chat = [question, turn, {**message, "name": "f", "tool_call_id": call["id"]}]
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False))
    except (TemplateError, *TEMPLATE_ERRORS):
        return ""
