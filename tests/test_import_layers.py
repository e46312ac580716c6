"""Imports go one way, between packages and between their rooms; cheap modules stay cheap.

A room is a folder or a file of a package, such as `batch` in `verl_like`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from tests.import_graph import (
    AT_IMPORT,
    FOR_TYPES,
    IN_FUNCTION,
    PACKAGES,
    Import,
    all_imports,
    cycles,
    imports_of_file,
    module_name,
    parsed,
    sources,
)
from tests.loaded_modules import loaded_by
from trainer.config.placement import roles_of
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from trainer.sft.recipe import SFTConfig

BELOW: dict[str, set[str]] = {
    "verl_like": set(),
    "workers": {"verl_like"},
    "trainer": {"verl_like", "workers"},
}
OPTIONAL = {"vllm", "flash_attn", "peft", "wandb", "mlflow"}

ORDER: dict[str, list[tuple[str, ...]]] = {
    "verl_like": [
        ("errors",),
        ("signatures",),
        ("files", "masking", "registry", "tensor_ops", "terminal"),
        ("config_key",),
        ("batch",),
        ("process.facts", "process.machine"),
        ("calls",),
        ("process",),
        ("placement",),
        ("backends",),
        ("__init__",),
    ],
    "workers": [
        ("columns", "config", "cpu"),
        ("losses", "models", "parallel", "rewards"),
        ("weights",),
        ("rollout", "training"),
        ("memory",),
        ("roles",),
        ("__init__",),
    ],
    "trainer": [
        ("config", "hooks", "report"),
        ("alarms", "data", "groups", "run_folder", "sample_ledger"),
        ("chaos", "memory", "restarts"),
        ("recovery",),
        ("loop",),
        ("command_errors", "dry_run"),
        ("launch",),
        ("rollouts", "rows"),
        ("ppo", "preference", "reward_model", "sft"),
        ("best_of_n", "compare", "detached"),
        ("migrate",),
        ("evaluation", "replay"),
        ("multirun",),
        ("recipe_command",),
        ("main_ppo", "api"),
        ("__init__",),
        ("cli",),
    ],
}
"""The rooms of each package from the ground up; a room imports those of lower rows alone.

`__init__` is the list of a package's public names. A longer name takes its modules out of the
shorter one's room: `process.facts` is not in `process`.
"""

EXCEPTIONS: dict[tuple[str, str], str] = {}
"""(importer, imported) of imports in functions that may go up or close a cycle -> the reason."""


def package_names(path: Path, kinds: tuple[str, ...] | None = None) -> set[str]:
    """The top-level packages that a file imports: all of them, or by these kinds of import."""
    imported = imports_of_file(path)
    return {name.split(".")[0] for name, kind in imported if kinds is None or kind in kinds}


def room_of(module: str) -> tuple[str, str]:
    """(package, room) of a module; a room that is in no order has its own name."""
    package, _, inside = module.partition(".")
    rooms = [room for row in ORDER[package] for room in row]
    found = [room for room in rooms if f"{inside or '__init__'}.".startswith(f"{room}.")]
    return package, max(found, key=len, default=inside.split(".")[0])


def row_of(package: str, room: str) -> int | None:
    """The number of a room's row, from the ground up."""
    for number, row in enumerate(ORDER[package]):
        if room in row:
            return number
    return None


def is_excepted(edge: Import) -> bool:
    return edge.kind == IN_FUNCTION and (edge.importer, edge.imported) in EXCEPTIONS


def shown(imports: list[Import]) -> list[str]:
    return sorted(f"{edge.importer} -> {edge.imported} ({edge.kind})" for edge in imports)


@pytest.mark.parametrize("package", BELOW)
def test_a_package_imports_only_packages_below_it(package: str) -> None:
    others = {*BELOW, "examples", "tests"} - BELOW[package] - {package}
    wrong = {}
    for path in sources(package):
        if found := package_names(path) & others:
            wrong[module_name(path)] = sorted(found)
    assert wrong == {}


@pytest.mark.parametrize("package", ["verl_like", "workers"])
def test_no_string_names_a_module_of_a_higher_package(package: str) -> None:
    higher = [name for name in BELOW if package in BELOW[name]]
    modules = {module_name(path) for name in higher for path in sources(name)}
    wrong = []
    for path in sources(package):
        for line, text in strings(parsed(path)):
            dotted = re.findall(rf"\b(?:{'|'.join(higher)})(?:\.\w+)+", text)
            if text in higher or any(names_a_module(name, modules) for name in dotted):
                wrong.append(f"{module_name(path)}, line {line}: {text!r}")
    assert wrong == []


def names_a_module(dotted: str, modules: set[str]) -> bool:
    """Whether a dotted name is a module, or something in one below its package."""
    return dotted in modules or dotted.rpartition(".")[0] in modules - set(BELOW)


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string in a file that is not documentation."""
    for node in string_nodes(tree):
        yield node.lineno, str(node.value)


def string_nodes(tree: ast.Module) -> Iterator[ast.Constant]:
    """Those strings."""
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    documentation = {id(value) for value in statements}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if id(node) not in documentation:
            yield node


ROOT = {
    *("alarms", "chaos", "config", "dry_run", "groups", "hooks", "launch", "loop", "memory"),
    *("recovery", "restarts", "run_folder", "sample_ledger"),
}
"""The rooms of `trainer` that every recipe stands on."""
KNOWS_PPO = {
    "trainer.run_folder.saved_model": "checkpoints do not say which role's model is the run's; of "
    "several roles it is PPO's actor",
}
"""Module of the root -> why it names what is PPO's."""


def words_of_ppo() -> set[str]:
    """Its roles, and its sections that not every recipe has."""
    sections = {field.name for field in fields(PPOConfig)} - {
        field.name for field in fields(SFTConfig)
    }
    return {*roles_of(PPO), *sections}


def names_ppo(text: str) -> bool:
    """Whether a string is a role or section of PPO, or a metric or key of one: `actor/entropy`."""
    words = "|".join(sorted(words_of_ppo()))
    return re.search(rf"^(?:{words})$|\b(?:{words})[./]\w|trainer\.ppo\b", text) is not None


@pytest.mark.parametrize(
    ("text", "is_of_ppo"),
    [
        *(
            (text, True)
            for text in ("critic", "actor/ppo_kl", "look at actor.optim.lr", "algorithm")
        ),
        *(
            (text, False)
            for text in ("actors", "rollouts/*.jsonl", "a critic", "student/loss", "data")
        ),
    ],
)
def test_a_string_that_names_what_is_ppos_is_told_from_others(text: str, is_of_ppo: bool) -> None:
    assert names_ppo(text) == is_of_ppo


def test_the_root_of_recipes_names_no_role_section_or_metric_of_ppo() -> None:
    wrong = []
    for path in sources("trainer"):
        name = module_name(path)
        if room_of(name)[1] not in ROOT or name in KNOWS_PPO:
            continue
        tree = parsed(path)
        keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
        of_verl = {id(node.value) for node in keywords if node.arg == "verl"}
        for node in string_nodes(tree):
            if id(node) not in of_verl and names_ppo(str(node.value)):
                wrong.append(f"{name}, line {node.lineno}: {node.value!r}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in words_of_ppo():
                wrong.append(f"{name}, line {node.lineno}: .{node.attr}")
    assert wrong == []


@pytest.mark.parametrize("package", ORDER)
def test_the_order_of_rooms_names_every_room(package: str) -> None:
    listed = {room for row in ORDER[package] for room in row}
    there = {room_of(module_name(path))[1] for path in sources(package)}
    assert there == listed, "write a new room into ORDER, above all that it imports"


@pytest.mark.parametrize("package", ORDER)
def test_a_room_imports_only_rooms_below_it(package: str) -> None:
    wrong = []
    for edge in all_imports():
        (importers, importer), (importeds, imported) = map(room_of, (edge.importer, edge.imported))
        if not importers == importeds == package or importer == imported or is_excepted(edge):
            continue
        upper, lower = row_of(package, importer), row_of(package, imported)
        if upper is None or lower is None or lower >= upper:
            wrong.append(edge)
    assert shown(wrong) == []


def test_no_modules_import_each_other() -> None:
    assert cycles(edge for edge in all_imports() if edge.kind != IN_FUNCTION) == []


def test_an_import_inside_a_function_closes_no_cycle() -> None:
    imports = [edge for edge in all_imports() if not is_excepted(edge)]
    rings = cycles(imports)
    closing = []
    for edge in imports:
        in_a_ring = any(edge.importer in ring and edge.imported in ring for ring in rings)
        if edge.kind == IN_FUNCTION and in_a_ring:
            closing.append(edge)
    assert shown(closing) == []


def test_a_cycle_is_found_whatever_kinds_of_import_make_it() -> None:
    ring = [Import("a", "b", AT_IMPORT), Import("b", "c", IN_FUNCTION), Import("c", "a", AT_IMPORT)]
    others = [Import("d", "a", AT_IMPORT), Import("e", "e", AT_IMPORT)]
    assert cycles([*ring, *others]) == [["a", "b", "c"], ["e"]]
    assert cycles([ring[0], ring[2], others[0]]) == []


def test_ray_is_imported_by_its_backend_alone() -> None:
    paths = [path for package in PACKAGES for path in sources(package)]
    importers = {module_name(path) for path in paths if "ray" in package_names(path)}
    assert {name for name in importers if not name.startswith("verl_like.backends.ray")} == set()


def test_optional_packages_are_imported_when_they_are_chosen() -> None:
    wrong = {}
    for package in PACKAGES:
        for path in sources(package):
            if found := package_names(path, kinds=(AT_IMPORT, FOR_TYPES)) & OPTIONAL:
                wrong[module_name(path)] = found
    assert wrong == {}


LOADS_LITTLE = {
    "verl_like": ("ray", "torch", "transformers"),
    "verl_like.placement.plan": ("ray", "torch", "transformers"),
    "verl_like.registry": ("ray", "torch", "transformers"),
    "workers.config": ("ray", "transformers"),
    "workers.rewards.functions": ("torch", "ray", "transformers"),
    "workers.rewards.process": ("torch", "ray", "transformers"),
    "trainer.cli.main": ("torch", "ray", "transformers", "hydra"),
}
NO_RECIPE = ("transformers", "trainer.ppo.step", "trainer.data.prompts", "workers.roles")
LOADS_TORCH = {
    "trainer.ppo.advantages": ("ray", "transformers", "tensordict"),
    "trainer.loop": NO_RECIPE,
    "trainer.launch": NO_RECIPE,
}
"""Module -> what its import does not load."""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    return loaded_by(list(LOADS_LITTLE), list(LOADS_TORCH))


@pytest.mark.parametrize(("module", "absent"), [*LOADS_LITTLE.items(), *LOADS_TORCH.items()])
def test_an_import_does_not_load(
    loaded: dict[str, list[str]], module: str, absent: tuple[str, ...]
) -> None:
    assert module in loaded[module]
    assert [name for name in absent if name in loaded[module]] == []
