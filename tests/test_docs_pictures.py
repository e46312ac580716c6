"""The names in the pictures of the docs are those of the code."""

from __future__ import annotations

import html
import json
import re
from fnmatch import fnmatchcase

import pytest

from tests import ROOT
from tests.conftest import load
from trainer.ppo.recipe import PPO
from trainer.tools.report.figures import METHOD_COLORS, known_panels

IMAGES = ROOT / "docs" / "images"
LARGEST = 150_000
"""Bytes."""


def texts(name: str, which: str = "<text[^>]*>(.*?)</text>") -> list[str]:
    picture = (IMAGES / name).read_text(encoding="utf-8")
    return [html.unescape(text) for text in re.findall(which, picture, re.S)]


def words(name: str) -> set[str]:
    """Return the texts of a picture that are not numbers."""
    return {text for text in texts(name) if re.search("[A-Za-z]", text)}


def test_the_curves_are_those_of_the_presets() -> None:
    presets = {name for kind, name in load("docs/make_curves.py").runs() if kind == "algorithm"}
    assert words("curves.svg") == presets, "run: python docs/make_curves.py --only"
    assert presets <= {*PPO.preset_names("algorithm")}


def test_the_picture_of_the_report_has_the_titles_and_metrics_of_the_report() -> None:
    shown = load("docs/draw_report.py").SHOWN
    panels = [panel for panel in known_panels() if panel.title in shown]
    assert texts("report.svg", '<text class="title"[^>]*>(.*?)</text>') == [
        panel.title for panel in panels
    ], "run: python docs/draw_report.py RUN SPLIT_RUN"
    names = [name for panel in panels for name in panel.names]
    metrics = words("report.svg") - {*shown, "step"}
    assert [text for text in metrics if not any(fnmatchcase(text, name) for name in names)] == []


def test_the_timeline_has_the_methods_of_the_roles() -> None:
    methods = {text for text in words("gantt.svg") if re.fullmatch("[a-z]+(_[a-z]+)+", text)}
    assert {"update_actor", "update_critic"} <= methods
    assert methods <= {*METHOD_COLORS, "update_weights"}


def test_the_clip_of_the_picture_is_that_of_the_loss() -> None:
    clip = load("docs/draw_clip.py")
    assert words("clip.svg") == {*clip.LINES, "ratio r", "loss"}
    ratios, good = clip.losses(1.0)
    flat = [ratio for ratio, loss in zip(ratios, good, strict=True) if loss == good[-1]]
    assert min(flat) == pytest.approx(1.2, abs=0.011)


def test_the_pictures_of_results_have_the_curves_of_the_data() -> None:
    results = load("docs/draw_results.py")
    for name, stored in json.loads(results.DATA.read_text("utf-8")).items():
        label = results.LABELS.get(name, "reward")
        assert words(f"{name}.svg") == {*stored["curves"], label, "step"}, "run: draw_results.py"


@pytest.mark.parametrize("page", ["ppo_explained.md", "preference.md"])
def test_formulas_become_mathml(page: str) -> None:
    pytest.importorskip("latex2mathml")
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    formulas = re.findall(r"^```math\n(.*?)^```", text, re.M | re.S)
    assert len(formulas) >= 4
    for formula in formulas:
        mathml = load("docs/hooks.py").to_mathml(formula)
        assert mathml.startswith("<math")
        assert "\\" not in mathml.replace(formula, "")


def test_the_pictures_are_small_and_every_page_has_them() -> None:
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    for path in IMAGES.iterdir():
        assert path.stat().st_size < LARGEST, path
        assert f"images/{path.name}" in pages, path
