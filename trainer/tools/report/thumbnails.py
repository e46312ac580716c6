"""Small copies of samples' images, which the page contains as data URIs.

A run folder may come from someone else, so its sample files must not make the page contain other
files of yours. A file is shown only if it has the recorded hash, which an author who does not have
the file cannot know, and if PIL decodes it. Anything else has a placeholder.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from verl_like.errors import ConfigError

PIXELS = 96
"""Longest side of a thumbnail."""
MOST_PER_SAMPLE, MOST_FILES = 4, 256
"""The most images of a sample, and the most files that a table of samples shows."""
MOST_BYTES = 32 * 2**20
"""Larger files are not read."""


class Thumbnail(NamedTuple):
    """A data URI, or "" if the image is not shown, and the name of its file."""

    uri: str
    name: str


class Thumbnails:
    """The thumbnails of a table of samples; each file is read once."""

    def __init__(self) -> None:
        """Begin without files."""
        self._uris: dict[tuple[str, str], str] = {}

    def of(self, images: Any) -> list[Thumbnail]:
        """Return the thumbnails of the field `images` of a sample's line."""
        if not isinstance(images, list):
            return []
        shown = []
        for image in images[:MOST_PER_SAMPLE]:
            row = image if isinstance(image, Mapping) else {}
            path, sha = str(row.get("path")), str(row.get("sha"))
            if (path, sha) not in self._uris and len(self._uris) < MOST_FILES:
                self._uris[path, sha] = _data_uri(path, sha)
            shown.append(Thumbnail(self._uris.get((path, sha), ""), Path(path).name))
        return shown


def _data_uri(path: str, sha: str) -> str:
    """Return a small copy of the image, or "" if it is missing, changed or not an image."""
    from workers.images import ImageRef, opened

    try:
        if not Path(path).is_file() or Path(path).stat().st_size > MOST_BYTES:
            return ""  # reading a pipe or a device might not end
        image = opened(ImageRef(path, sha, 0, 0))
    except (ConfigError, OSError):
        return ""
    image.thumbnail((PIXELS, PIXELS))
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
