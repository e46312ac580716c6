"""The names that the packages export and the docs use exist, are sorted, and can be imported."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator

import pytest
import yaml

from tests import ROOT
from tests.conftest import load
from tests.import_graph import PACKAGES, imported_names, parsed, sources
from trainer.async_training.recipe import ASYNC
from trainer.config.keys import config_keys
from trainer.ppo.recipe import PPO
from verl_like.errors import ConfigError
from verl_like.registry import load_object
from workers.rewards.scorer import trust_kwargs

EXAMPLES = ROOT / "examples"
PUBLIC = ("verl_like", "verl_like.extend", "verl_like.tiny")
"""The modules that users of runs import, and authors of extensions and of examples."""
DOCUMENTED = (
    "trainer.PPOConfig",
    "trainer.PPOTrainer",
    "trainer.load_config",
    "trainer.main_ppo",
    "trainer.ppo.PPOTrainer",
    "trainer.run",
)


API = yaml.safe_load((ROOT / "docs" / "data" / "api.yaml").read_text(encoding="utf-8"))
"""Page of the Python API -> section -> dotted path -> members that the site shows."""


def find(path: str) -> object:
    """Return the module or the object at a dotted path."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        package, _, name = path.rpartition(".")
        if not package or not path.startswith(f"{error.name}"):
            raise
        return getattr(find(package), name)


@pytest.mark.parametrize(
    "package", [*PACKAGES, "verl_like.extend", "verl_like.rules", "verl_like.tiny"]
)
def test_public_names_are_sorted_and_exist(package: str) -> None:
    module = importlib.import_module(package)
    names = list(module.__all__)
    assert names == sorted(names)
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize(
    "name",
    [
        *("PPO", "GRPO", "AsyncPPO", "SFT", "RewardModelTraining", "DPO", "KTO", "DataProto"),
        *("ResourcePool", "RayResourcePool", "LocalWorkerGroup", "RayWorkerGroup"),
    ],
)
def test_help_of_a_class_starts_with_its_arguments(name: str) -> None:
    cls = getattr(importlib.import_module("verl_like"), name)
    text = inspect.getdoc(cls) or ""
    parameters = [*inspect.signature(cls).parameters]
    assert "\n\nArgs:\n    " in text
    assert [name for name in parameters if f"\n    {name}: " not in text] == []


@pytest.mark.parametrize("path", DOCUMENTED)
def test_a_documented_path_can_be_imported(path: str) -> None:
    assert find(path) is not None


def api_paths() -> list[str]:
    """Return the paths on the pages of the Python API."""
    return [path for sections in API.values() for names in sections.values() for path in names]


def test_the_api_pages_show_every_name_with_a_meaning_without_mkdocs() -> None:
    assert set(API) == {f"api_{package}.md" for package in PACKAGES}
    for page, sections in API.items():
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert ":::" not in text
        shown = {*re.findall(r"^`(\w+)[^`]*`  \n\S+ \S+", text, re.M)}
        names = {path.rpartition(".")[2] for paths in sections.values() for path in paths}
        assert names - {"protocol", "errors"} - shown == set()
        assert len(shown) > 15


def test_the_api_pages_show_all_parameters_with_types_or_defaults() -> None:
    lines = [
        "`place_at_last_token(values: Tensor, mask: Tensor) -> Tensor`",
        "`PPO.command(steps=None) -> str`",
        "`GRPO`",
        "`Observation(text: str, reward=0.0, images=())`",
        "`Environment.step(text: str, *args, **kwargs)`",
        "`RunResult.model_folder`",
        "`DataProto.repeat(repeat_times=2, interleave=True)`",
    ]
    pages = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in API)
    assert [line for line in lines if f"\n{line}  \n" not in pages] == []
    arguments = [*inspect.signature(find("verl_like.PPO")).parameters]
    (shown,) = re.findall(r"^`PPO\((.*)\)`  $", pages, re.M)
    assert [text.partition("=")[0].strip("*") for text in shown.split(", ")] == arguments


def test_the_site_adds_the_docstrings_to_the_api_tables() -> None:
    hooks = load("docs/hooks.py")
    for page, sections in API.items():
        text = hooks.on_page_markdown((ROOT / "docs" / page).read_text(encoding="utf-8"))
        added = re.findall(r"^::: (\S+)\n    options: \{.*\}$", text, re.M)
        assert added == [path for names in sections.values() for path in names]


def test_the_api_pages_list_only_names_of_verl_like_that_can_be_imported() -> None:
    paths = api_paths()
    others = {path for path in paths if not path.startswith("verl_like.")}
    assert others == set()
    assert len(paths) >= 15
    assert [path for path in paths if find(path) is None] == []


def documented() -> set[str]:
    """Return the paths of the names on the pages of the interface."""
    errors = {f"verl_like.errors.{name}" for name in vars(find("verl_like.errors"))}
    exported = {"verl_like.ConfigError", "verl_like.VerlLikeError"}  # also in the errors' module
    return {*api_paths()} | exported | errors


COMMAND = re.compile(r"^[%!].*$", re.M)
"""A line of a notebook that is not Python."""


def python_for_users() -> Iterator[tuple[str, str]]:
    """Yield a file's name and Python of it: blocks of pages, cells of notebooks, examples."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for block in re.findall(r"^```python.*?\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
            yield str(page.relative_to(ROOT)), block
    for notebook in EXAMPLES.rglob("*.ipynb"):
        for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                yield str(notebook.relative_to(ROOT)), "".join(cell["source"])
    for file in EXAMPLES.rglob("*.py"):
        yield str(file.relative_to(ROOT)), file.read_text("utf-8")


def test_the_docs_and_the_examples_import_only_names_of_the_api_pages() -> None:
    private, users = dict[str, set[str]](), set[str]()
    for place, code in python_for_users():
        names = [name for name, _ in imported_names(ast.parse(COMMAND.sub("", code)))]
        ours = {name for name in names if name.partition(".")[0] in PACKAGES} - {*PACKAGES}
        users |= {place} if ours else set()
        if others := ours - documented():
            private[place] = others
    assert private == {}
    assert {"README.md", "examples/grpo_from_scratch.py", "docs/add_a_role.md"} <= users


@pytest.mark.parametrize("module", PUBLIC)
def test_the_api_pages_list_every_public_name(module: str) -> None:
    assert {f"{module}.{name}" for name in find(module).__all__} - documented() == set()


def test_names_for_verl_code_can_be_imported_and_are_not_in_all() -> None:
    names = {path.removeprefix("verl_like.") for path in API["api_verl_like.md"]["verl-names"]}
    assert len(names) == 15
    module = find("verl_like")
    assert [name for name in names if not hasattr(module, name)] == []
    assert names & {*module.__all__, *dir(module)} == set()


def test_most_errors_are_imported_from_their_module() -> None:
    errors = {name for name in find("verl_like").__all__ if name.endswith("Error")}
    assert errors == {"ConfigError", "VerlLikeError"}
    assert len([name for name in vars(find("verl_like.errors")) if name.endswith("Error")]) == 18


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(AttributeError, match="no attribute 'GPRO'. Did you mean 'GRPO'"):
        find("verl_like").GPRO  # noqa: B018


def test_each_name_is_in_only_one_public_module() -> None:
    names = [name for module in PUBLIC for name in find(module).__all__]
    assert len(names) == len({*names})
    authors = find("verl_like.extend").__all__
    assert [name for name in authors if hasattr(find("verl_like"), name)] == []


INTERNAL = re.compile(r"(?<![\w.])(?:workers|trainer)(?:\.\w+)+(?::\w+)?")
KEYS = {key.name for recipe in (PPO, ASYNC) for key in config_keys(recipe.schema)}


def internal_paths(text: str) -> list[str]:
    """Return the paths of modules of `workers` and `trainer`, and of names in them."""
    paths = [path for path in INTERNAL.findall(text) if path not in KEYS]
    modules = (ROOT.joinpath(*re.split("[.:]", path)[:2]) for path in paths)
    return [
        path
        for path, module in zip(paths, modules, strict=True)
        if module.is_dir() or module.with_suffix(".py").is_file()
    ]


def test_the_docs_name_only_public_modules() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {page.name: internal_paths(page.read_text("utf-8")) for page in pages}
    assert {name: paths for name, paths in named.items() if paths} == {}


def test_messages_name_only_public_modules() -> None:
    named = dict[str, list[str]]()
    for path in (path for package in PACKAGES for path in sources(package)):
        tree = parsed(path)
        docstrings = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if node not in docstrings and " " in node.value:
                    if paths := internal_paths(node.value):
                        named[f"{path.relative_to(ROOT)}:{node.lineno}"] = paths
    assert named == {}


def test_a_reward_is_set_by_the_public_path_of_a_rule() -> None:
    for name in find("verl_like.rules").__all__:
        assert load_object(f"verl_like.rules:{name}", "reward") is find(f"verl_like.rules.{name}")
    assert find("verl_like.rules").run_tests is find("workers.rewards.code").run_tests
    assert trust_kwargs("verl_like.rules", "run_tests", trust_programs=False)
    with pytest.raises(ConfigError, match="It has dapo, geometry, .*Did you mean 'run_tests'"):
        load_object("verl_like.rules:run_test", "reward")


@pytest.mark.parametrize("module", [*PUBLIC, "verl_like.rules"])
def test_docstrings_of_functions_name_every_parameter(module: str) -> None:
    functions = {name: find(f"{module}.{name}") for name in find(module).__all__}
    functions = {name: value for name, value in functions.items() if inspect.isfunction(value)}
    missing = dict[str, list[str]]()
    for name, function in functions.items():
        parameters = inspect.signature(function).parameters
        text = inspect.getdoc(function) or ""
        text += (inspect.getdoc(find(module)) or "") if module == "verl_like.rules" else ""
        unnamed = [each for each in parameters if not re.search(rf"\b{each}\b", text)]
        if len(parameters) > 1 and unnamed:
            missing[name] = unnamed
    assert missing == {}
