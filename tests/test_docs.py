"""The blocks of the README and the docs work: Python runs, quotes are true.

The ```python blocks of one page share their names.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.import_graph import PACKAGES, parsed, sources
from trainer import load_config
from trainer.cli import make_tiny
from trainer.config.schema import TRACKERS
from trainer.launch import nominal_placement
from trainer.ppo.filters import FILTERS

BLOCK = re.compile(r"^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)


def pages() -> list[object]:
    marked = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        blocks = [m for m in BLOCK.finditer(text) if "no-run" not in m["info"]]
        if blocks:
            uses_ray = any(
                "RayWorkerGroup(" in m["code"] or "RayWorkerGroup)" in m["code"] for m in blocks
            )
            name = path.relative_to(ROOT).as_posix()
            marked.append(pytest.param(path, id=name, marks=[pytest.mark.ray] if uses_ray else []))
    return marked


@functools.cache
def messages(package: str) -> str:
    """Return every string of a package; an f-string gives the parts between its values."""
    nodes = (node for path in sources(package) for node in ast.walk(parsed(path)))
    texts = (node.value for node in nodes if isinstance(node, ast.Constant))
    return "\n".join(text for text in texts if isinstance(text, str))


def test_troubleshooting_quotes_messages_of_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    symptoms = re.findall(r"^([^|\n]*`[^|\n]*)\|", text, re.M)
    quoted = []
    for row in symptoms:
        for quote in re.findall("`([^`]+)`", row):
            quoted += filter(None, quote.split("..."))

    code = "\n".join(map(messages, PACKAGES))
    code += (ROOT / "tools" / "install.sh").read_text(encoding="utf-8")
    assert len(quoted) >= 8
    assert [part for part in quoted if part.strip() not in code] == []


SMALLER = {
    '"Qwen/Qwen2.5-0.5B-Instruct"': '"tiny/model"',
    "max_response_length=64": "max_prompt_length=64, max_response_length=8",
    "max_completion_length=64": "max_prompt_length=64, max_completion_length=8",
    "steps=100": "steps=1",
}
"""Text of a page -> its replacement in the tests, which have no network."""


def load_and_plan(*arguments: Any) -> Any:
    """Load a configuration of the docs, on the machines that it names."""
    config = load_config(*arguments)
    nominal_placement(config)
    return config


@pytest.mark.parametrize("path", pages())
def test_the_python_blocks_of_a_page_run(
    path: Path, request: pytest.FixtureRequest, monkeypatch, tmp_path: Path, tiny_dir: Path
) -> None:
    if request.node.get_closest_marker("ray"):
        request.getfixturevalue("ray_session")
    if ".plot(" in path.read_text(encoding="utf-8"):
        request.getfixturevalue("figures")
    (tmp_path / "tiny").symlink_to(tiny_dir)  # the output of `verl-like make-tiny tiny`
    if path.name == "README.md":
        make_tiny.make(tmp_path / "sums", sums=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer.load_config", load_and_plan)
    for registry in (TRACKERS, FILTERS):  # pages register further entries
        monkeypatch.setattr(registry, "_entries", dict(registry))
    text = path.read_text(encoding="utf-8")
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    space: dict[str, object] = {"__name__": "docs"}
    for match in BLOCK.finditer(text):
        if "no-run" not in match["info"]:
            line = text.count("\n", 0, match.start("code"))
            code = "\n" * line + match["code"]
            exec(compile(code, str(path), "exec", dont_inherit=True), space)


@pytest.mark.parametrize("page", ["troubleshooting.md", "reading_the_report.md"])
def test_the_code_writes_the_metrics_that_a_page_names(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    code = messages("trainer") + messages("workers")
    named = set(re.findall(r"`(?:actor|reward|training)/(\w+)`", text))
    assert len(named) >= 5
    assert [name for name in named if name not in code] == []


WIDEST = 82
"""Columns of a block that the site shows without a scroll bar."""
WIDER = ("models.md", "my_curves_differ.md", "notebook.md", "rented_machines.md")
TABLE_OF_PLAN = re.compile(r"   s/step |\d  [\d.]+ ")


def test_no_block_is_wider_than_the_site_shows() -> None:
    wide = [
        f"{page.name}: {line}"
        for page in (ROOT / "docs").glob("*.md")
        if page.name not in WIDER
        for block in re.findall(r"^```.*?\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        for line in block.splitlines()
        if len(line) > WIDEST and not TABLE_OF_PLAN.match(line)
    ]
    assert wide == []


def test_the_page_of_check_loss_prints_the_error_of_its_example(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs" / "check_loss.md").read_text(encoding="utf-8")
    (printed,) = re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)
    first = next(BLOCK.finditer(text))
    exec(first["code"], {"__name__": "docs"})
    assert " ".join(printed.split()) in " ".join(capsys.readouterr().out.split())
