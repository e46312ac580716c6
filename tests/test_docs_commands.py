"""Every command that the README and the docs print works, and every key that they name exists.

Commands on the files that `make-tiny` and the page itself write pass `verl-like check`. For others,
on models and files that are not here, the configuration composes.
"""

from __future__ import annotations

import functools
import inspect
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pytest

from tests import ROOT
from tests.forked import run_program
from trainer import load_config, recipe_command
from trainer.cli import main, plan
from trainer.config.checks import check_fields
from trainer.config.compose import as_object, compose_tree, known_settings
from trainer.config.keys import config_keys, known_arguments, named_keys, value_at
from trainer.config.schema import Recipe
from trainer.config.settings import sweep_jobs, unknown_key
from trainer.launch import NO_ERRORS, nominal_placement
from trainer.ppo.verl_keys import our_key
from trainer.recipe_command import is_setting
from trainer.serve.recipe import SERVE
from trainer.tools.evaluation.recipe import EVAL
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.agents.calls import FORMS

PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "commands.md"),
    *sorted((ROOT / "examples").rglob("*.md")),
]
"""`commands.md` is the help of the commands, whose examples tests of each command try."""
RECIPES: dict[str, Recipe[Any]] = {name: resolve_name(path) for name, path in main.RECIPES.items()}
RECIPES |= {"eval": EVAL, "serve": SERVE}
TRIED = {*RECIPES, "check"}
"""Commands that compose a configuration."""
GENERATED = re.compile(r"<!-- begin .*?<!-- end .*?-->", re.S)
FENCED = re.compile(r"^```(?P<info>[^\n]*)\n(?P<code>.*?)^```", re.M | re.S)
INDENTED = re.compile(r"^ {4}.*$", re.M)
IN_BACKTICKS = re.compile("`([^`]+)`")
ENDS = {"||", "|", "&&", ";", ">"}
"""Words of the shell after which another command begins."""
DROPPED = {"...", "…", "key=value"}
"""Words that stand for further settings."""
PLACEHOLDER = re.compile(r"\.\.\.|…|[$<|]|\b[A-Z][A-Z_]*\b")
"""Matches placeholders: `MODEL`, `N`, `<role>`, `$MODEL`, `local|docker`."""
FILE = re.compile(r"[\w./-]+\.(?:py|parquet|jsonl?|yaml)\b|\b(?:tiny|sums|runs)/[\w./-]+")
NUMBER_OF_SHELL = re.compile(r"(async_training|trainer)\.\w+=\$")
NEEDED = {
    "data.train_files": "train.parquet",
    "data.val_files": "val.parquet",
    "actor_rollout_ref.model.path": "model",
    "model.path": "model",
}
"""Keys that some recipe requires, and a value where a page sets none."""


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    page: str
    words: tuple[str, ...]
    """The words after `verl-like`, without ellipses."""
    is_whole: bool
    """True if it runs as it is printed."""

    @property
    def recipe(self) -> str:
        """The recipe whose configuration it composes."""
        name, *rest = self.words
        if name in RECIPES:
            return name
        return rest[0] if rest and rest[0] in RECIPES else "ppo"

    @property
    def settings(self) -> list[str]:
        """The `key=value` words; of a sweep, those of its first job."""
        words = [word for word in self.words if "..." not in word and "…" not in word]
        settings = [word for word in words if is_setting(word)]
        if {"--multirun", "-m"} & {*self.words}:
            settings = sweep_jobs(settings)[0]
        return [setting for setting in settings if not NUMBER_OF_SHELL.match(setting)]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words[:2])[:60]}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_generated(page: Path) -> str:
    return GENERATED.sub("", page.read_text(encoding="utf-8"))


def commands_of(page: Path) -> Iterator[Command]:
    text = without_generated(page).replace("\\\n", " ")
    prose = FENCED.sub("", text)
    lines = [line for block in FENCED.finditer(text) for line in block["code"].splitlines()]
    lines += INDENTED.findall(prose)
    lines += IN_BACKTICKS.findall(INDENTED.sub("", prose))
    for line in lines:
        if not re.search(r"(?:^|[\s!`])verl-like |-m trainer\.main_ppo ", line):
            continue
        line = line.replace("-m trainer.main_ppo ", "verl-like ppo ").lstrip().lstrip("!")
        words = shlex.split(line, comments=True)
        if "verl-like" not in words:
            continue
        words = words[words.index("verl-like") + 1 :]
        words = words[: next((i for i, word in enumerate(words) if word in ENDS), None)]
        arguments = tuple(word for word in words if word not in DROPPED)
        if arguments:
            is_whole = len(arguments) == len(words) and not any(map(PLACEHOLDER.search, arguments))
            yield Command(name_of(page), arguments, is_whole)


def printed_files() -> dict[str, dict[str, str]]:
    """Return page -> name -> text of the Python files that it prints.

    The name is in a comment on the first line, or at the end of the paragraph above.
    """
    files: dict[str, dict[str, str]] = {}
    block = re.compile(r"(?P<above>[^\n]*)\n+```python[^\n]*\n(?P<code>.*?)^```", re.M | re.S)
    for page in PAGES:
        of_page = files.setdefault(name_of(page), {})
        for match in block.finditer(page.read_text(encoding="utf-8")):
            name = re.match(r"# (\w+\.py)\b", match["code"]) or re.search(
                r"`(\w+\.py)`:$", match["above"]
            )
            if name:
                of_page[name[1]] = of_page.get(name[1], "") + match["code"]
    return files


FILES = printed_files()


def files_for(page: str) -> dict[str, str]:
    """Return the files that this page prints, and those that only other pages print."""
    others = {name: text for files in FILES.values() for name, text in files.items()}
    return others | FILES[page]


def is_here(command: Command) -> bool:
    """Return whether every file of the command is made by `make-tiny` or printed on a page."""
    tiny_files = {
        f"{folder}/{name}" for folder in ("tiny", "sums") for name in ("model", *PARQUETS)
    }
    words = [word for word in command.words if not word.startswith("trainer.default_local_dir=")]
    inputs = FILE.findall(" ".join(words))
    return (
        command.is_whole
        and command.words[0] in TRIED - {"serve"}  # which `check` does not know
        and any(name in tiny_files for name in inputs)
        and tiny_files.union(files_for(command.page)).issuperset(inputs)
    )


PARQUETS = ("train.parquet", "val.parquet")
COMMANDS = [*dict.fromkeys(command for page in PAGES for command in commands_of(page))]
CHECKED = [command for command in COMMANDS if is_here(command)]
PLANNED = [command for command in COMMANDS if command.words[0] == "plan" and command.settings]
BY_CONFIG = {
    (command.recipe, *sorted(command.settings)): command
    for command in COMMANDS
    if command.words[0] in TRIED and command.settings and command not in CHECKED + PLANNED
}
"""Recipe and settings -> the last command that composes them."""
COMPOSED = list(BY_CONFIG.values())


@functools.cache
def help_of(command: str) -> str:
    """Return the text of `verl-like COMMAND --help`; for a recipe, with its common options."""
    common = inspect.getsource(recipe_command) if command in main.RECIPES else ""
    return f"{main.command_help(command)} {common}"


def test_every_command_and_option_exists() -> None:
    words = {command.words[0] for command in COMMANDS}
    assert [word for word in words if word not in main.COMMANDS and word[0] != "-"] == []
    assert [
        f"{command}: {word}"
        for command in COMMANDS
        for word in command.words
        if word.startswith("--")
        and word != "--help"
        and command.words[0] in main.COMMANDS
        and not re.search(rf"{word.partition('=')[0]}\b", help_of(command.words[0]))
    ] == []


def test_the_page_of_commands_has_every_option() -> None:
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    for name in main.OTHERS:
        file = ROOT / f"trainer/cli/{name.replace('-', '_')}.py"
        options = re.findall(r'\badd(?:_argument)?\("(--[\w-]+)"', file.read_text("utf-8"))
        listed = page.partition(f"### `{name}`\n")[2].partition("\n### ")[0]
        missing = [option for option in options if not re.search(rf"{option}\b", listed)]
        assert missing == [], name


def test_the_page_of_commands_has_every_form_of_a_command() -> None:
    page = (ROOT / "docs/commands.md").read_text(encoding="utf-8")
    forms = (
        "verl-like chat MODEL [options]",
        "verl-like chat MODEL --environment FILE.py:CLASS [options]",
        "verl-like replay RUN --step K [--stage score|estimate|update]",
        "verl-like plan [RECIPE] --gpus 16 --device H100 [options] [key=value ...]",
    )
    assert [form for form in forms if f"\n{form}\n" not in page] == []
    listed = page.partition("during and after a run\n")[2].partition("\nserve")[0]
    assert re.findall(r"^  (\S+)", listed, re.M)[:2] == ["watch", "join"]


@pytest.fixture(scope="module")
def folder(tiny_dir: Path, make_tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `tiny` and `sums`, whose model is not trained here."""
    folder = tmp_path_factory.mktemp("commands")
    (folder / "tiny").symlink_to(tiny_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make_tiny, "fit_answers", lambda *_: None)
        make_tiny.make(folder / "sums", sums=True)
    return folder


@pytest.mark.parametrize("command", CHECKED, ids=str)
def test_a_command_on_tiny_files_passes_check(
    command: Command, folder: Path, tmp_path: Path
) -> None:
    for name in ("tiny", "sums"):
        (tmp_path / name).symlink_to(folder / name)
    for name, text in files_for(command.page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    words = command.words if command.words[0] in ("check", "eval") else ("check", *command.words)
    dry = ("trainer.dry_run=true",) if words[0] == "eval" else ()
    done = run_program(main.main, *words, *dry, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert NO_ERRORS in done.stdout


@pytest.mark.parametrize("command", COMPOSED, ids=str)
def test_a_command_composes_and_its_pools_have_room(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files_for(command.page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe, before = RECIPES[command.recipe], {*sys.modules}
    config = load_config([*needed(recipe, command.settings), *command.settings], recipe)
    nominal_placement(config)
    for name in {Path(name).stem for name in files_for(command.page)} - before:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("command", PLANNED, ids=str)
def test_a_plan_command_has_a_plannable_job(command: Command, tmp_path: Path) -> None:
    """The planner reads config.json of the model only: here one of 8 billion parameters."""
    words = [re.sub(r"^(\S*model\.path)=.*", rf"\1={tmp_path}", word) for word in command.words]
    (tmp_path / "config.json").write_text(LLAMA, encoding="utf-8")
    assert plan.job_of(words[1:]).num_gpus > 0


LLAMA = """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096,
"intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}"""


def needed(recipe: Recipe[Any], settings: Sequence[str]) -> list[str]:
    """Return settings of the keys that the recipe requires and a page leaves out."""
    set_keys = {setting.partition("=")[0] for setting in settings}
    keys = named_keys(recipe.schema)
    return [
        f"{key}={value}" for key, value in NEEDED.items() if key in keys and key not in set_keys
    ]


def test_many_commands_are_found() -> None:
    assert len(CHECKED) >= 4
    assert len(PLANNED) >= 3
    assert len(COMPOSED) >= 40


WORD = re.compile(r"\+?(?P<name>[A-Za-z_]\w*(?:\.\w+)*)(?:=(?P<value>.+))?", re.S)
"""Matches a name in backticks that may be a key, and its value."""
TABLE = re.compile(r"^\| `(?P<key>[\w.]+)` \|.*\n\|[-:| ]+\n(?P<rows>(?:\|.*\n)+)", re.M)
"""Matches a table of the values of a key."""
VALUE_OF_ROW = re.compile(r"^\| `?([\w.-]+)`?(?:,| \|)", re.M)
LIST = re.compile(r"^(?P<intro>.*:)\n\n(?P<items>(?:- .*\n(?: .*\n)*)+)", re.M)
VALUE_OF_ITEM = re.compile(r"^- `?([\w.-]+)`?:", re.M)
"""Matches the value in a list of what a key's values mean, below a line that names the key."""
KINDS_OF_FILES = {*"html ipynb json jsonl lock log md parquet py sh toml txt yaml damaged".split()}
NOT_A_VALUE = re.compile(rf"""{PLACEHOLDER.pattern}|"|\b(?:my_\w+|module)\.|^[a-z]$|^mine$""")
"""Matches also `n`, names of the reader's own code and presets, and Python."""
OTHER_SYSTEMS = ("coati", "openrlhf", "trl", "verl")
VARIABLE = re.compile(r"\b(\w+)(?: =|, \w+ =|: [\w\[\], |]+ =| in |:$)")
CHECKED_LATER: dict[str, Collection[str]] = {"environment.tool_call_parser": FORMS}
"""Key -> its valid names, where a run checks them only when it reads its data."""


def settings_in_prose(page: Path) -> Iterator[tuple[str, str]]:
    """Yield every name in backticks that a key may have, and its value, or ""."""
    prose = INDENTED.sub("", FENCED.sub("", without_generated(page)))
    for words in IN_BACKTICKS.findall(prose):
        for word in re.split(r"\s+(?=\+?[\w.]+=)", words) if WORD.match(words) else ():
            match = WORD.fullmatch(word)
            if match and ("." in match["name"] or match["value"]):
                yield match["name"], match["value"] or ""
            elif not match:
                break  # a command or a call, whose words belong together
    for table in TABLE.finditer(prose):
        if table["key"] in keys_by_ending():
            yield from ((table["key"], value) for value in VALUE_OF_ROW.findall(table["rows"]))
    for values in LIST.finditer(prose):
        keys = [word for word in IN_BACKTICKS.findall(values["intro"]) if "." in word]
        if len(keys) == 1 and keys[0] in keys_by_ending() and not is_section(keys[0]):
            yield from ((keys[0], value) for value in VALUE_OF_ITEM.findall(values["items"]))


@functools.cache
def keys_by_ending() -> dict[str, list[tuple[str, str]]]:
    """Return every ending of a key at a dot -> recipe and whole name of the keys with it."""
    keys: dict[str, list[tuple[str, str]]] = {}
    for name, recipe in RECIPES.items():
        recipe.load_registries()
        names = [*named_keys(recipe.schema), *recipe.groups]
        names += [key.name for key in known_arguments(recipe.schema)]
        default = recipe.schema()
        for key in config_keys(recipe.schema):
            if key.takes_any:
                names += [f"{key.name}.{entry}" for entry in value_at(default, key.name) or ()]
        for key_name in dict.fromkeys(names):
            parts = key_name.split(".")
            for first in range(len(parts)):
                keys.setdefault(".".join(parts[first:]), []).append((name, key_name))
    return keys


def is_section(name: str) -> bool:
    return any(known.startswith(f"{name}.") for known in keys_by_ending())


@functools.cache
def is_key(name: str) -> bool:
    """Return whether a recipe has the key, users name it, or verl calls it so."""
    return (
        name in keys_by_ending()
        or any(is_named_by_users(name, recipe) for recipe in RECIPES.values())
        or our_key(name) in keys_by_ending()
    )


def is_named_by_users(name: str, recipe: Recipe[Any]) -> bool:
    """Return whether users name it, as in `role_mapping.judge` or `algorithm.args.tau`."""
    default = recipe.schema()
    return any(
        name.startswith(f"{key.name}.")
        and not value_at(default, key.name)  # such as `timeouts`, whose names are fixed
        and not unknown_key(name, recipe)
        for key in config_keys(recipe.schema)
        if key.takes_any or key.rules.arguments_of
    )


def is_of_code(name: str, page: Path) -> bool:
    """Return whether the dotted name is a file, an object, or an attribute of a variable."""
    first, *rest = name.split(".")
    if rest[-1] in KINDS_OF_FILES or first in (*OTHER_SYSTEMS, "self", "module"):
        return True
    for start in (name, f"verl_like.{name}", f"verl_like.extend.{name}"):
        with suppress(ImportError, AttributeError, ValueError):
            resolve_name(start)
            return True
    if first in keys_by_ending():  # `data`: a section of keys, and a batch
        return hasattr(DataProto(), rest[0])
    text = page.read_text(encoding="utf-8")
    return first in {
        name for block in FENCED.finditer(text) for name in VARIABLE.findall(block["code"])
    }


@functools.cache
def rejection_of(name: str, value: str) -> str:
    """Return why no key with this ending takes the value, or ""."""
    rejection = ""
    for recipe_name, key in keys_by_ending()[name]:
        recipe, setting = RECIPES[recipe_name], f"{key}={value}"
        if key in CHECKED_LATER and ":" not in value and value not in CHECKED_LATER[key]:
            rejection = f"{setting}: it takes {', '.join(CHECKED_LATER[key])}"
            continue
        try:
            settings = known_settings([*needed(recipe, [setting]), setting], recipe)
            check_fields(as_object(compose_tree(settings, recipe), recipe))
        except ConfigError as error:
            rejection = str(error)
        else:
            return ""
    return rejection


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_key_of_a_page_exists_and_takes_its_value(page: Path) -> None:
    settings = {*settings_in_prose(page)}
    dotted = {name for name, _ in settings if "." in name}
    assert [name for name in dotted if not is_of_code(name, page) and not is_key(name)] == []

    with_values = [
        (name, value)
        for name, value in settings
        if value and name in keys_by_ending() and not NOT_A_VALUE.search(value)
    ]
    assert [problem for setting in with_values if (problem := rejection_of(*setting))] == []


def test_many_keys_are_found() -> None:
    settings = {setting for page in PAGES for setting in settings_in_prose(page)}
    assert len({name for name, _ in settings if "." in name and is_key(name)}) >= 150
    assert len([name for name, value in settings if value and name in keys_by_ending()]) >= 100
