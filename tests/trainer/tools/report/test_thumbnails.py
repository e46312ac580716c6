"""The page shows the images of samples, and no other files."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.trainer.tools.report.report_runs import make_run
from trainer.tools.report.page import write_report
from trainer.tools.report.read import MAX_FILES, MAX_PER_SAMPLE, PIXELS, Thumbnails


def recorded(path: Path, sha: str | None = None) -> dict[str, str]:
    return {"path": str(path), "sha": sha or hashlib.sha256(path.read_bytes()).hexdigest()}


def page_with(folder: Path, rows: list[Any]) -> str:
    """Return the report of a run whose last step has a sample for each value of `images`."""
    run = make_run(folder / "run", 2, samples=1)
    lines = [
        {"input": f"prompt {number}", "output": "aa", "gts": "a", "score": 1.0, "images": images}
        for number, images in enumerate(rows)
    ]
    (run / "rollouts" / "2.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return write_report(run).read_text(encoding="utf-8")


def test_the_page_has_small_copies_of_images(tmp_path: Path) -> None:
    path = tmp_path / "a picture <b>.png"
    Image.new("RGB", (640, 320), "red").save(path)
    page = page_with(tmp_path, [[recorded(path)]])
    (data,) = re.findall(r'src="data:image/jpeg;base64,([^"]+)"', page)
    small = Image.open(io.BytesIO(base64.b64decode(data)))
    assert small.size == (PIXELS, PIXELS // 2)
    assert small.getpixel((3, 3)) == pytest.approx((254, 0, 0), abs=3)
    assert 'title="a picture &lt;b&gt;.png"' in page


def test_anything_but_the_recorded_image_is_a_placeholder(tmp_path: Path) -> None:
    secret, image, broken = (tmp_path / name for name in ("secret.txt", "i.png", "broken.png"))
    secret.write_text("a secret of the user")
    Image.new("RGB", (8, 8), "red").save(image)
    broken.write_bytes(image.read_bytes()[:50])
    os.mkfifo(tmp_path / "pipe")
    rows = [
        [recorded(secret)],
        [recorded(image, sha="0" * 64)],
        [recorded(broken)],
        [recorded(tmp_path / "pipe", "0" * 64)],
        [recorded(tmp_path / "missing.png", "0" * 64)],
        [recorded(Path("/dev/zero"), "0" * 64)],
        [{"path": "a\0b", "sha": "0"}],
        [{"path": 3}, "text", None],
        "text",
    ]
    page = page_with(tmp_path, rows)
    assert "<img" not in page
    assert page.count(" is not shown") == 10
    assert "missing.png is not shown" in page
    assert "a secret of the user" not in page
    assert base64.b64encode(b"a secret of the user")[:16].decode() not in page


def test_thumbnails_are_limited_in_number(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.png" for number in range(MAX_FILES + 8)]
    for number, path in enumerate(paths):
        Image.new("L", (4, 4), number % 256).save(path)
    refs, thumbnails = [recorded(path) for path in paths], Thumbnails()
    assert len(thumbnails.of(refs)) == MAX_PER_SAMPLE
    shown = [image.uri for ref in refs for image in thumbnails.of([ref])]
    assert all(shown[:MAX_FILES])
    assert not any(shown[MAX_FILES:])
    assert thumbnails.of(refs[:1])[0].uri == shown[0]
