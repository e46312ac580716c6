"""The blocks of the README and the docs work: Python runs, commands compose, quotes are true.

The ```python blocks of one page share their names.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from tests import ROOT
from tests.import_graph import PACKAGES, parsed, sources
from trainer import load_config
from trainer.async_training.config import AsyncConfig
from trainer.cli.main import RECIPES
from trainer.config.keys import named_keys
from trainer.config.recipe import Recipe
from trainer.config.schema import TRACKERS
from trainer.hooks import Hooks
from trainer.launch import nominal_placement
from workers.training.schedules import LR_SCHEDULES

BLOCK = re.compile(r"^```python(?P<info>[^\n]*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
NAMES = "|".join(RECIPES)
STARTS = (
    rf"(?:verl-like |-m trainer\.(?:cli\.)?main[ _])({NAMES}) +((?:\.{{3}} )?\+?[\w.]+=[^`#\n]+)"
)
"""A command that starts a run, and its settings."""
NUMBER_OF_SHELL = re.compile(r"(async_training|trainer)\.\w+=\$")


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
    """Every string of a package as the program prints it."""
    return "\n".join(text for path in sources(package) for text in strings(parsed(path)))


def strings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part)}}}"
                for part in node.values
            )


def test_the_symptoms_that_troubleshooting_quotes_are_the_codes_words() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    symptoms = re.findall(r"^\| ([^|]*`[^|]*) \|", text, re.M)
    quoted = []
    for row in symptoms:
        for quote in re.findall("`([^`]+)`", row):
            quoted += filter(None, quote.split("..."))

    code = "\n".join(map(messages, PACKAGES))
    code += (ROOT / "tools" / "install.sh").read_text(encoding="utf-8")
    assert len(quoted) >= 8
    assert [part for part in quoted if part.strip() not in code] == []


COMPLAINTS = (
    "CUDA out of memory",
    "OOM",
    "stuck",
    "hangs",
    "NCCL timeout",
    "NaN loss",
    "reward is flat",
    "KL explodes",
    "response length",
    "slow",
)
"""Words that people type into a search when a run goes wrong."""


def test_troubleshooting_contains_the_words_that_people_search_for() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").lower()
    assert [words for words in COMPLAINTS if words.lower() not in text] == []


SMALLER = {
    '"Qwen/Qwen2.5-0.5B-Instruct"': '"tiny/model"',
    "max_new_tokens=64": "max_prompt_length=64, max_new_tokens=8",
    "steps=100": "steps=1",
}
"""What a page shows, and what its blocks are tried with: tests have no network."""


def load_and_plan(*arguments: Any) -> Any:
    """Load a configuration of the docs, on the machines that it names."""
    config = load_config(*arguments)
    nominal_placement(config)
    return config


@pytest.mark.parametrize("path", pages())
def test_the_python_blocks_run(
    path: Path, request: pytest.FixtureRequest, monkeypatch, tmp_path: Path, tiny_dir: Path
) -> None:
    if request.node.get_closest_marker("ray"):
        request.getfixturevalue("ray_session")
    (tmp_path / "tiny").symlink_to(tiny_dir)  # what `verl-like make-tiny tiny` makes
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trainer.load_config", load_and_plan)
    for registry in (TRACKERS, LR_SCHEDULES):  # a page registers one of its own
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
def test_the_metrics_that_a_page_looks_at_are_written_by_the_code(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    code = messages("trainer") + messages("workers")
    named = set(re.findall(r"`(?:actor|reward|training)/(\w+)`", text))
    assert len(named) >= 5
    assert [name for name in named if name not in code] == []


def commands() -> Iterator[object]:
    """Return the settings of every command that starts a run; `...` stands for further settings.

    Numbers that a variable of the shell holds are left out, and so are the help texts in
    `commands.md`, where words follow a command.
    """
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if path.name == "commands.md":
            continue
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for name, command in re.findall(STARTS, text):
            parts = [part for part in shlex.split(command) if part != "..."]
            settings = [part for part in parts if not NUMBER_OF_SHELL.match(part)]
            if settings != ["key=value"]:
                recipe = resolve_name(RECIPES[name])
                yield pytest.param(recipe, settings, id=f"{path.name}: {settings[0]}")


@pytest.mark.parametrize(("recipe", "settings"), list(commands()))
def test_a_command_composes_and_its_pools_have_room(
    recipe: Recipe[Any], settings: list[str]
) -> None:
    has_roles = "actor_rollout_ref" in recipe.schema.__dataclass_fields__
    model = "actor_rollout_ref.model.path" if has_roles else "model.path"
    needed = {"data.train_files": "train.parquet", model: "model"}
    given = {setting.partition("=")[0] for setting in settings}
    missing = [f"{key}={value}" for key, value in needed.items() if key not in given]
    config = load_config([*missing, *settings], recipe)
    assert config.data.train_files
    nominal_placement(config)


KEYS = re.compile(
    r"`((?:actor_rollout_ref|algorithm|critic|data|async_training|reward_model|trainer)(?:\.\w+)+)"
)


@pytest.mark.parametrize(
    "page", ["docs/async.md", "examples/async/README.md", "docs/troubleshooting.md"]
)
def test_the_keys_that_a_page_names_are_there(page: str) -> None:
    named = set(KEYS.findall((ROOT / page).read_text(encoding="utf-8")))
    keys = set(named_keys(AsyncConfig))
    of_generators = {
        name for name in named if name.startswith("async_training.generator_settings.")
    }
    assert len(named) > 15
    assert named - keys - of_generators - {"async.json"} == set()


def test_the_hooks_beside_colossalchats_callbacks_are_ours() -> None:
    text = (ROOT / "examples" / "async" / "README.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `on_")]
    ours = {name for row in rows for name in re.findall(r"`(on_\w+)", row[1])}
    assert len(ours) >= 5
    assert [name for name in ours if not hasattr(Hooks, name)] == []
