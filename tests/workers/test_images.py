"""Images of every kind are read as PIL reads them, or rejected with the reason."""

from __future__ import annotations

import io
import os
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.workers.models.vision import picture
from verl_like.errors import ConfigError
from workers.images import ImageRef, image_ref, open_image

Make = Callable[[], tuple[bytes, Any]]
"""Returns the bytes of an image file, and the pixels that a model should get."""


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def loaded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def cmyk() -> tuple[bytes, Any]:
    data = saved(picture(30, 20).convert("CMYK"), "JPEG")
    return data, loaded(data).convert("RGB")


def palette() -> tuple[bytes, Any]:
    data = saved(picture(30, 20).convert("P"), "PNG")
    assert loaded(data).mode == "P"
    return data, loaded(data).convert("RGB")


def rotated(orientation: int) -> tuple[bytes, Any]:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(picture(30, 20), "JPEG", exif=exif)
    upright = ImageOps.exif_transpose(loaded(data))
    assert (upright.size == (20, 30)) == (orientation > 4)
    return data, upright


def gray_16() -> tuple[bytes, Any]:
    values = np.linspace(0, 65535, 600).astype(np.uint16).reshape(20, 30)
    data = saved(Image.fromarray(values), "PNG")
    assert loaded(data).mode == "I;16"
    return data, Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")


def gray() -> tuple[bytes, Any]:
    data = saved(picture(30, 20).convert("L"), "PNG")
    return data, loaded(data).convert("RGB")


def black_and_white() -> tuple[bytes, Any]:
    data = saved(picture(30, 20).convert("1"), "PNG")
    return data, loaded(data).convert("RGB")


def on_white(data: bytes) -> Image.Image:
    image = loaded(data).convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


def transparent() -> tuple[bytes, Any]:
    image = picture(30, 20).convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    data = saved(image, "PNG")
    return data, on_white(data)


def transparent_gray() -> tuple[bytes, Any]:
    image = picture(30, 20).convert("LA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    data = saved(image, "PNG")
    return data, on_white(data)


def transparent_palette() -> tuple[bytes, Any]:
    data = saved(picture(30, 20).convert("P"), "PNG", transparency=3)
    return data, on_white(data)


def gif() -> tuple[bytes, Any]:
    data = saved(picture(30, 20), "GIF")
    return data, loaded(data).convert("RGB")


def photo_with_preview() -> tuple[bytes, Any]:
    """Return a file as some phones write it."""
    data = saved(picture(30, 20), "MPO", save_all=True, append_images=[picture(12, 8)])
    assert loaded(data).n_frames == 2
    return data, loaded(data).convert("RGB")


def large() -> tuple[bytes, Any]:
    image = Image.new("RGB", (10_000, 5_000), "red")
    return saved(image, "PNG", compress_level=1), image


@pytest.mark.parametrize(
    "make",
    [
        *(cmyk, palette, gray_16, gray, black_and_white),
        *(transparent, transparent_gray, transparent_palette, gif, photo_with_preview, large),
        *(lambda n=n: rotated(n) for n in (1, 3, 6, 8)),
    ],
)
def test_an_image_of_every_kind_is_read_as_pil_converts_it(make: Make, tmp_path: Path) -> None:
    data, expected = make()
    path = tmp_path / "a path with spaces.png"
    path.write_bytes(data)
    for value in (path, str(path), {"path": str(path)}, f"file://{path}"):
        ref = image_ref(value)
        image = open_image(ref)
        assert (image.mode, image.size) == ("RGB", expected.size)
        assert (ref.width, ref.height) == image.size
        difference = np.asarray(image, dtype=int) - np.asarray(expected, dtype=int)
        assert np.abs(difference).max() <= 1, "blending rounds"
        if image.size[0] > 1000:
            break


@pytest.mark.parametrize("make", [cmyk, gray_16, transparent_palette, lambda: rotated(6)])
def test_an_image_of_pil_has_the_pixels_of_its_file(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    data, _ = make()
    (tmp_path / "file").write_bytes(data)
    ours, in_memory = (open_image(image_ref(value)) for value in (tmp_path / "file", loaded(data)))
    assert np.array_equal(np.asarray(ours), np.asarray(in_memory))


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_an_animation_is_rejected(kind: str, tmp_path: Path) -> None:
    frames = [picture(30, 20, seed=number) for number in range(3)]
    data = saved(frames[0], kind, save_all=True, append_images=frames[1:])
    path = tmp_path / "image"
    path.write_bytes(data)
    for value in (path, data, loaded(data)):
        with pytest.raises(ValueError, match="the image has 3 frames or pages, and a model reads"):
            image_ref(value)


def test_a_path_that_is_no_plain_file_is_rejected(tmp_path: Path) -> None:
    fifo, server = tmp_path / "fifo", tmp_path / "socket"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(server))
        for path in (fifo, server, Path("/dev/zero")):
            with pytest.raises(ValueError, match=f"{path} is not readable: it is not a plain file"):
                image_ref(str(path))
    ref = ImageRef(str(fifo), "", 1, 1)
    with pytest.raises(ConfigError, match="not readable here: it is not a plain file"):
        open_image(ref)


def header_only(width: int, height: int) -> bytes:
    """Return a PNG file that claims to have this size."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 9) + b"IDAT"


def flipped(data: bytes) -> bytes:
    """Return a PNG file with another bit among its pixels."""
    place = data.index(b"IDAT") + 100
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def with_thumbnail() -> bytes:
    """Return a JPEG file whose EXIF data has a picture, which has an end marker, too."""
    exif = Image.Exif()
    exif[0x010E] = saved(picture(8, 8), "JPEG")
    data = saved(picture(40, 40), "JPEG", exif=exif)
    assert data.count(b"\xff\xd9") == 2
    return data


def text_bomb() -> bytes:
    """Return a PNG file with a compressed text of 256 MiB."""
    data = saved(picture(4, 4), "PNG")
    body = b"zTXtcomment\0\0" + zlib.compress(bytes(2**28), 1)
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    end = data.index(b"IDAT") - 4
    return data[:end] + chunk + data[end:]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is not a readable image: it is empty"),
        (b"no image at all", "is not a readable image: cannot identify image file"),
        (saved(picture(40, 40), "PNG")[:-400], "is not a readable image: Truncated File"),
        (saved(picture(40, 40), "PNG")[:-12], "is not a readable image: truncated PNG file"),
        (flipped(saved(picture(40, 40), "PNG")), "bad header checksum in b'IDAT'"),
        (saved(picture(40, 40), "GIF")[:-400], "is not a readable image: .*truncated"),
        (saved(picture(40, 40), "JPEG")[:-400], "is not a readable image: .*truncated"),
        (saved(picture(40, 40), "JPEG")[:-1], "is not a readable image: .*truncated"),
        (saved(picture(40, 40), "JPEG", progressive=True)[:-2], "it has no end marker"),
        (with_thumbnail()[:-400], "is not a readable image: .*truncated"),
        (header_only(11_000, 10_000), "it has 11000 x 10000 pixels, more than 100,000,000"),
        (header_only(60_000, 60_000), "Image size .3600000000 pixels. exceeds limit"),
        (text_bomb(), "Decompressed data too large"),
    ],
)
def test_a_file_that_is_no_image_is_rejected(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=words) as caught:
        image_ref("image.png", [tmp_path])
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (rotated(6)[0], (20, 30)),
        (with_thumbnail(), (40, 40)),
        (saved(picture(30, 20), "JPEG", progressive=True) + b"\xff\xda a video", (30, 20)),
        (saved(picture(30, 20), "PNG"), (30, 20)),
    ],
)
def test_a_jpeg_or_png_file_is_checked_without_its_pixels(
    data: bytes, size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "image"
    path.write_bytes(data)
    with monkeypatch.context() as patch:
        patch.setattr("PIL.ImageFile.ImageFile.load", None)
        ref = image_ref(path)
    assert (ref.width, ref.height) == size == open_image(ref).size


def test_a_png_file_that_is_turned_after_its_pixels_has_the_upright_size(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(picture(30, 20), "PNG", exif=exif)
    start = data.index(b"eXIf") - 4
    chunk = data[start : start + 12 + struct.unpack(">I", data[start : start + 4])[0]]
    end = data.index(b"IEND") - 4
    moved = data[:start] + data[start + len(chunk) : end] + chunk + data[end:]
    (tmp_path / "image.png").write_bytes(moved)
    ref = image_ref(tmp_path / "image.png")
    assert (ref.width, ref.height) == (20, 30) == open_image(ref).size


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{folder}", "is not readable: Is a directory"),
        ("{folder}/no.png", "is not readable: No such file"),
        ("https://example.org/a.png", "is not on this machine. Download it first"),
        ("data:image/png,abc", "it is not base64"),
        ({"height": 3}, "has none of the keys bytes, path"),
        (7, "an image is 7, not a path, bytes or an image of PIL"),
    ],
)
def test_a_value_that_is_no_image_is_rejected(value: Any, words: str, tmp_path: Path) -> None:
    if isinstance(value, str):
        value = value.format(folder=tmp_path)
    with pytest.raises(ValueError, match=words):
        image_ref(value)
