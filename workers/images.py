"""Image files: references to them, which travel in place of pixels, and how they are opened.

    ref = image_ref(row["image"], [Path("data")])   # path, hash and size of an image
    image = open_image(ref)                             # an upright RGB image of PIL

This module does not import torch, because reward processes import it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import stat
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from verl_like.errors import ConfigError
from verl_like.files import cache_folder, write_atomic

MAX_PIXELS = 100_000_000
"""Larger images are rejected, since a small file can contain a huge image."""
DAMAGED = (OSError, ValueError, SyntaxError, IndexError, MemoryError)
"""Errors of PIL for a file that it cannot decode."""
END_OF_JPEG = b"\xff\xd9"
TURNS_PNG = (b"eXIf", b"XML:com.adobe.xmp", b"Raw profile type exif")
"""Names of parts of a PNG file, often after its pixels, that say how to turn the image."""


class ImageRef(NamedTuple):
    """The file of an image, the SHA-256 of its bytes, and the size of the upright image."""

    path: str
    sha: str
    width: int
    height: int


def image_ref(value: Any, folders: Sequence[Path] = (Path(),)) -> ImageRef:
    """Return the reference to an image; a ValueError says what is wrong with it.

    `value` is a path (relative to one of the `folders`), bytes, an image of PIL, a `data:` URL, or
    a dict with one of them under `bytes`, `path`, `image`, `url` or `image_url`. Images that are
    not files are written to the cache folder `images`.
    """
    data, path, size = _read(value, folders)
    if path is None:
        return ImageRef(*_stored(data), *size)
    return ImageRef(str(path.absolute()), hashlib.sha256(data).hexdigest(), *size)


def image_url(value: Any) -> str:
    """Return an image as a `data:` URL; a ValueError says what is wrong with it.

    `value` is an image as in `image_ref`.
    """
    import base64

    return f"data:;base64,{base64.b64encode(_read(value)[0]).decode()}"


def _read(
    value: Any, folders: Sequence[Path] = (Path(),)
) -> tuple[bytes, Path | None, tuple[int, int]]:
    """Return the bytes of an image, which is checked, the path of its file if any, and its size."""
    if isinstance(value, Mapping):
        keys = ("bytes", "path", "image", "url", "image_url")
        filled = [key for key in keys if value.get(key) is not None]
        if not filled:
            raise ValueError(f"an image has none of the keys {', '.join(keys)}: {value!r:.80}")
        return _read(value[filled[0]], folders)
    if isinstance(value, str) and value.startswith("data:"):
        value = _bytes_of_url(value)
    elif isinstance(value, str) and "://" in value and not value.startswith("file://"):
        raise ValueError(f"the image {value!r:.80} is not on this machine. Download it first")
    if isinstance(value, str | Path):
        name = Path(str(value).removeprefix("file://")).expanduser()
        paths = [folder / name for folder in folders]
        path = next((path for path in paths if path.is_file()), paths[0])
        try:
            data = _bytes_of_file(path)
        except OSError as error:
            raise ValueError(f"the image {path} is not readable: {error.strerror}") from error
        return data, path, _checked_size(data, str(path))
    if is_picture(value):
        value = as_png(value)
    if not isinstance(value, bytes):
        raise ValueError(f"an image is {value!r:.80}, not a path, bytes or an image of PIL")
    return value, None, _checked_size(value, "an image in the row")


def _bytes_of_file(path: Path) -> bytes:
    """Return the content of a plain file; others, such as a FIFO, could have no end."""
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise OSError(errno.EINVAL, "it is not a plain file")
    return path.read_bytes()


def is_picture(value: Any) -> bool:
    """Return whether the value is an image of PIL."""
    return hasattr(value, "save") and hasattr(value, "mode")


def as_png(picture: Any) -> bytes:
    """Return an image of PIL as the bytes of an upright PNG file in RGB."""
    _check_is_still(picture)
    buffer = io.BytesIO()
    _upright_rgb(picture).save(buffer, format="PNG")
    return buffer.getvalue()


def _bytes_of_url(url: str) -> bytes:
    import base64

    header, _, body = url.partition(",")
    try:
        if not header.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise ValueError(f"the image {url!r:.40} is not readable: {error}") from error


def _stored(data: bytes) -> tuple[str, str]:
    """Write the bytes to the cache folder, under their hash; return path and hash."""
    folder = cache_folder("images")
    sha = hashlib.sha256(data).hexdigest()
    path = folder / sha
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, data)
    return str(path), sha


def _checked_size(data: bytes, name: str) -> tuple[int, int]:
    """Return width and height of the upright image; a ValueError says that it is not readable.

    A damaged file may have a valid beginning, so it is read to its end: a JPEG file must have an
    end marker after its header, the checksums of a PNG file must be right, and others are decoded.
    """
    from PIL import ExifTags

    try:
        image = _header(data)
        _check_is_still(image)
        size: tuple[int, int] = image.size
        if image.format == "JPEG":
            if data.find(END_OF_JPEG, image.fp.tell()) < 0:
                raise OSError("the file is truncated, it has no end marker")
            is_turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
            return size[::-1] if is_turned else size
        if image.format == "PNG" and not any(name in data for name in TURNS_PNG):
            image.verify()
            return size
        width, height = _upright_rgb(image).size
        return width, height
    except DAMAGED as error:
        reason = "it is empty" if not data else _reason(error)
        raise ValueError(f"{name} is not a readable image: {reason}") from error


def _check_is_still(image: Any) -> None:
    """Raise a ValueError for an animation, or for a file of several pages.

    A photo in the format MPO is one picture: its other images are previews.
    """
    count = getattr(image, "n_frames", 1)
    if count > 1 and image.format != "MPO":
        raise ValueError(
            f"the image has {count} frames or pages, and a model reads one picture. Save the frame "
            "that it should see as a separate file"
        )


def _reason(error: BaseException) -> str:
    """Return PIL's message without the address of an object."""
    return str(error).split("<")[0].strip()


def _header(data: bytes) -> Any:
    """Return the image, not yet decoded, if it has a reasonable size."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            image: Image.Image = Image.open(io.BytesIO(data))
        except Image.DecompressionBombError as error:
            raise ValueError(str(error)) from error
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise ValueError(f"it has {width} x {height} pixels, more than {MAX_PIXELS:,}")
        return image


def _upright_rgb(image: Any) -> Any:
    """Return the image in RGB, turned as its EXIF data says."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):  # PIL's own conversion makes values above 255 white
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.mode == "P" or "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in ("RGBA", "LA"):  # transparent pixels are white
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def open_image(ref: ImageRef, row: str = "") -> Any:
    """Return the image of a row, which errors name; its file must be as when the row was read."""
    called = f"{row}: the image {ref.path}" if row else f"the image {ref.path}"
    try:
        data = _bytes_of_file(Path(ref.path))
    except OSError as error:
        raise ConfigError(
            f"{called} is not readable here: {error.strerror}. Put images on storage that all "
            "nodes share; for images inside of data files, set XDG_CACHE_HOME to it."
        ) from error
    if hashlib.sha256(data).hexdigest() != ref.sha:
        raise ConfigError(f"{called} has changed since this run read its rows.")
    try:
        return _upright_rgb(_header(data))
    except DAMAGED as error:
        raise ConfigError(
            f"{called} is damaged: {_reason(error)}. Replace the file, or remove the row."
        ) from error
