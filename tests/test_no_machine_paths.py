"""Nothing in the repository names a package index or a folder of somebody's machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests import ROOT

INDEX = re.compile(r"--(extra-)?index-url|https?://\S+/(simple|whl)\b")
HOME = re.compile(r"(?<![\w.])/(root|home|Users)/\w")


def test_no_tracked_file_names_an_index_or_a_machine_path() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    wrong = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path == Path(__file__) or not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore")
        if INDEX.search(text) or HOME.search(text) or f"{ROOT.parent}/" in text:
            wrong.append(name)
    assert wrong == []
