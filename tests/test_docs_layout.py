"""`docs/layout.md` names files that are there, with functions and classes that they define."""

from __future__ import annotations

import re

import pytest

from tests import ROOT
from tests.import_graph import defined_in

PAGE = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
PATH = re.compile(r"`((?:verl_like|workers|trainer|tests)/[\w/.]+)`")


def rows() -> list[tuple[str, list[str]]]:
    """(file, names it should define) of the tables "Where is" and "A batch's way"."""
    found = []
    for section in PAGE.split("\n## "):
        if not section.startswith(("Where is", "A batch's way")):
            continue
        for line in section.splitlines():
            cells = line.split("|")
            if len(cells) < 4 or not (paths := PATH.findall(cells[2])):
                continue
            named = cells[3] if section.startswith("Where is") else cells[2]
            names = re.findall(r"`(\w+(?:\.\w+)?)`", named)
            if len(paths) == 1 and names:
                found.append((paths[0], names))
    return found


def test_every_path_of_the_page_is_there() -> None:
    paths = PATH.findall(PAGE)
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(("path", "names"), rows())
def test_a_name_is_defined_in_the_file_that_the_page_gives(path: str, names: list[str]) -> None:
    assert [name for name in names if name not in defined_in(ROOT / path)] == []


def test_the_page_names_many_functions() -> None:
    assert len(rows()) > 30
