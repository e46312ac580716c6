"""What the README says of the code is what the code says."""

from __future__ import annotations

import inspect
import re
import textwrap

from tests import ROOT
from trainer.ppo.step import PPOTrainer

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_quoted_step_is_the_step() -> None:
    (quoted,) = re.findall(r"^```python no-run\n(.*?)^```", README, re.M | re.S)
    assert quoted == textwrap.dedent(inspect.getsource(PPOTrainer.step))


def test_the_first_two_commands_are_the_quickstart_and_the_tests() -> None:
    commands = re.findall(r"^    (?:\w+=\w+ )?bash (\S+)", README, re.M)
    assert commands[:2] == ["examples/quickstart/run.sh", "tests/run.sh"]
    assert [command for command in commands if not (ROOT / command).is_file()] == []


def test_links_and_images_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_the_first_screen_has_a_picture_two_commands_and_few_lines_of_python() -> None:
    screen = "\n".join(README.splitlines()[:32])
    assert "![" in screen
    assert len(re.findall("^    bash ", screen, re.M)) == 2
    (code,) = re.findall(r"^```python\n(.*?)^```", screen, re.M | re.S)
    assert len(code.replace("\n\n", "\n").splitlines()) <= 6


def test_what_python_reads_is_made_by_a_command_above_it() -> None:
    """The blocks themselves are run by tests/test_docs.py, beside what `make-tiny` makes."""
    for page in (ROOT / "README.md", ROOT / "docs" / "python.md"):
        text = page.read_text(encoding="utf-8")
        assert 0 <= text.find("verl-like make-tiny tiny") < text.index('"tiny/model"'), page.name
