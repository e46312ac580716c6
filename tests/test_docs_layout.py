"""`docs/layout.md` names files that are there, with functions and classes that they define."""

from __future__ import annotations

import re

import pytest

from tests import ROOT
from tests.import_graph import defined_in

PAGE = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
PATH = re.compile(r"`((?:verl_like|workers|trainer|tests)/[\w/.]+)`")


def rows() -> list[tuple[list[str], list[str]]]:
    """(files, names that they should define) of the tables "Where is" and "A batch's way"."""
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
            if names and not any(path.endswith("/") for path in paths):
                found.append((paths, names))
    return found


def test_every_path_of_the_page_is_there() -> None:
    paths = PATH.findall(PAGE)
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(("paths", "names"), rows())
def test_a_name_is_defined_in_a_file_that_the_page_gives(
    paths: list[str], names: list[str]
) -> None:
    defined = set[str]().union(*(defined_in(ROOT / path) for path in paths))
    assert [name for name in names if name not in defined] == []


def test_the_page_names_many_functions() -> None:
    assert len(rows()) > 30
