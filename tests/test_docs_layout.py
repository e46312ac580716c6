"""Paths on pages exist, and the index and the nav have every page."""

from __future__ import annotations

import re

from tests import ROOT
from tests.import_graph import PACKAGES

PATH = re.compile(r"`((?:verl_like|workers|trainer|tests)/[\w/.]+)`")
LAYOUT = ROOT / "CONTRIBUTING.md"
PAGES = (LAYOUT, ROOT / "docs" / "dispatch.md", ROOT / "AGENTS.md")
MAX_LINES = 110


def test_every_path_on_these_pages_exists() -> None:
    named = {path.name: PATH.findall(path.read_text(encoding="utf-8")) for path in PAGES}
    assert len(named[LAYOUT.name]) > 20
    missing = {
        page: [name for name in names if not (ROOT / name).exists()]
        for page, names in named.items()
    }
    assert {page: names for page, names in missing.items() if names} == {}


def test_contributing_is_short_and_names_every_folder() -> None:
    page = LAYOUT.read_text(encoding="utf-8")
    assert len(page.splitlines()) <= MAX_LINES
    folders = [path for package in PACKAGES for path in (ROOT / package).iterdir()]
    names = [str(path.relative_to(ROOT)) for path in folders if (path / "__init__.py").is_file()]
    assert [name for name in names if f"`{name}/`" not in page] == []


def test_the_index_links_to_every_page() -> None:
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((\w+\.md)", index)) | {"index.md"}
    assert {page.name for page in docs.glob("*.md")} - linked == set()


def test_the_site_navigation_has_every_page() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = re.findall(r": (\w+\.md)$", text, re.M)
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_agents_md_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) <= 80
