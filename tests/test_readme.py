"""The README agrees with the code, and the links and tables of all pages work."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path

import pytest

from tests import ROOT
from tests.conftest import load
from trainer.ppo.recipe import PPO
from trainer.ppo.stages import PPOTrainer

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def test_the_readme_quotes_the_step_of_the_code() -> None:
    (quoted,) = re.findall(r"^```python no-run\n(.*?)^```", README, re.M | re.S)
    assert quoted == textwrap.dedent(inspect.getsource(PPOTrainer.step))


def test_the_scripts_that_the_readme_names_exist() -> None:
    scripts = re.findall(r"\bbash (\S+\.sh)", README)
    assert len(scripts) >= 3
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_images_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_linked_headings_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]*)\)", page.read_text(encoding="utf-8")):
        named = page.parent / target if target else page
        headings = re.findall(r"^#+ (.*)", named.read_text(encoding="utf-8"), re.M)
        slugs = [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
        assert anchor in slugs, f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_line_that_starts_with_a_bar_is_in_a_table(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for block in re.split(r"\n\s*\n", text):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        if rows:
            assert len(rows) >= 2, rows[0]
            assert re.fullmatch(r"\|( *:?-+:? *\|)+", rows[1]), rows[0]
            cells = [len(re.findall(r"(?<!\\)\|", re.sub("`[^`]*`", "", row))) for row in rows]
            assert set(cells) == {cells[0]}, rows[cells.index(max(cells))]


def test_the_readme_is_short_and_begins_with_the_status() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert any("Status:" in line for line in lines[:10])


def test_the_architecture_picture_matches_its_script() -> None:
    script = load("docs/draw_architecture.py")
    assert script.PICTURE.read_text(encoding="utf-8") == script.draw()


def test_the_readme_counts_the_presets() -> None:
    assert f"{len(PPO.preset_names('algorithm'))} [presets]" in README
