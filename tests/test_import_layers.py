"""Imports go one way, between packages and between their rooms; cheap modules stay cheap.

A room is a folder or a file of a package, such as `batch` in `verl_like`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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

BELOW: dict[str, set[str]] = {
    "verl_like": set(),
    "workers": {"verl_like"},
    "trainer": {"verl_like", "workers"},
}
OPTIONAL = {"vllm", "flash_attn", "peft", "trackio", "wandb", "datasets", "pandas"}

ORDER: dict[str, list[tuple[str, ...]]] = {
    "verl_like": [
        ("errors", "record"),
        ("balance", "files", "lazy", "masking", "registry", "tensor_ops", "terminal"),
        ("config_key", "remote_files"),
        ("batch",),
        ("process.machine",),
        ("process.info",),
        ("calls",),
        ("verl", "verl.groups"),
        ("calls.group",),
        ("process",),
        ("verl.workers",),
        ("placement",),
        ("backends",),
        ("__init__", "extend", "rules", "tiny"),
    ],
    "workers": [
        ("chats", "columns", "config", "cpu", "images"),
        ("thoughts",),
        ("parallel",),
        ("losses", "models", "rewards"),
        ("weights",),
        ("rollout", "training"),
        ("agents", "memory"),
        ("roles",),
        ("__init__",),
    ],
    "trainer": [
        ("config", "hooks"),
        ("data", "groups", "run_folder"),
        ("lost_groups",),
        ("memory", "recovery", "observers"),
        ("run_state",),
        ("loop",),
        ("threads",),
        ("launch",),
        ("stubs",),
        ("rollouts", "rows"),
        ("ppo", "preference", "reward_model", "sft"),
        ("async_training",),
        ("tools", "tools.report"),
        ("tools.planner",),
        ("tools.check_loss", "tools.evaluation", "tools.replay", "serve"),
        ("tools.migrate", "tools.bisect", "tools.rehearsal"),
        ("recipe_command",),
        ("main_ppo", "api"),
        ("__init__",),
        ("cli",),
    ],
}
"""The rooms of each package from the ground up; a room imports only rooms of lower rows.

`__init__` is the list of a package's public names. A longer name takes its modules out of the
shorter one's room: `process.info` is not in `process`.
"""

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("trainer.launch", "trainer.tools.report.page"): "a run writes its report at its end",
    ("trainer.run_folder.result", "trainer.tools.report.figures"): "a result draws its curves",
}
"""(importer, imported) of imports in functions that may go up or close a cycle -> the reason."""

PUBLIC_NAMES = ("verl_like", "verl_like.extend", "verl_like.rules", "verl_like.tiny")
"""The modules that name higher packages: they import what users import, on first use."""


def package_names(path: Path, kinds: tuple[str, ...] | None = None) -> set[str]:
    """Return the top-level packages that a file imports, by all or these kinds of import."""
    imported = imports_of_file(path)
    return {name.split(".")[0] for name, kind in imported if kinds is None or kind in kinds}


def room_of(module: str) -> tuple[str, str]:
    """Return (package, room) of a module; a room without an order has its own name."""
    package, _, inside = module.partition(".")
    rooms = [room for row in ORDER[package] for room in row]
    matching = [room for room in rooms if f"{inside or '__init__'}.".startswith(f"{room}.")]
    return package, max(matching, key=len, default=inside.split(".")[0])


def row_of(package: str, room: str) -> int | None:
    """Return the number of a room's row, counted from the bottom."""
    for number, row in enumerate(ORDER[package]):
        if room in row:
            return number
    return None


def is_excepted(edge: Import) -> bool:
    if edge.importer in PUBLIC_NAMES and edge.kind == FOR_TYPES:
        return True
    return edge.kind == IN_FUNCTION and (edge.importer, edge.imported) in EXCEPTIONS


def shown(imports: list[Import]) -> list[str]:
    return sorted(f"{edge.importer} -> {edge.imported} ({edge.kind})" for edge in imports)


@pytest.mark.parametrize("package", BELOW)
def test_a_package_imports_only_packages_below_it(package: str) -> None:
    others = {*BELOW, "examples", "tests"} - BELOW[package] - {package}
    wrong = {}
    for path in sources(package):
        if module_name(path) in PUBLIC_NAMES:
            assert package_names(path, kinds=(AT_IMPORT, IN_FUNCTION)) & others == set()
        elif imported := package_names(path) & others:
            wrong[module_name(path)] = sorted(imported)
    assert wrong == {}


@pytest.mark.parametrize("package", ["verl_like", "workers"])
def test_no_string_names_a_module_of_a_higher_package(package: str) -> None:
    higher = [name for name in BELOW if package in BELOW[name]]
    modules = {module_name(path) for name in higher for path in sources(name)}
    wrong = []
    for path in sources(package):
        for line, text in strings(parsed(path)):
            dotted = re.findall(rf"\b(?:{'|'.join(higher)})(?:\.\w+)+", text)
            is_wrong = text in higher or any(names_a_module(name, modules) for name in dotted)
            if is_wrong and module_name(path) not in PUBLIC_NAMES:
                wrong.append(f"{module_name(path)}, line {line}: {text!r}")
    assert wrong == []


def names_a_module(dotted: str, modules: set[str]) -> bool:
    """True if a dotted name is a module, or something in a module below its package."""
    return dotted in modules or dotted.rpartition(".")[0] in modules - set(BELOW)


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return (line, text) of every string of a file that is not documentation."""
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    documentation = {id(value) for value in statements}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in documentation:
                yield node.lineno, node.value


@pytest.mark.parametrize("package", ORDER)
def test_the_order_of_rooms_names_every_room(package: str) -> None:
    listed = {room for row in ORDER[package] for room in row}
    rooms = {room_of(module_name(path))[1] for path in sources(package)}
    assert rooms == listed, "write a new room into ORDER, above all that it imports"


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
    imports = [edge for edge in all_imports() if not is_excepted(edge)]
    assert cycles(edge for edge in imports if edge.kind != IN_FUNCTION) == []


def test_an_import_inside_a_function_closes_no_cycle() -> None:
    imports = [edge for edge in all_imports() if not is_excepted(edge)]
    rings = cycles(imports)
    closing = []
    for edge in imports:
        in_a_ring = any(edge.importer in ring and edge.imported in ring for ring in rings)
        if edge.kind == IN_FUNCTION and in_a_ring:
            closing.append(edge)
    assert shown(closing) == []


def test_only_the_ray_backend_imports_ray() -> None:
    paths = [path for package in PACKAGES for path in sources(package)]
    importers = {module_name(path) for path in paths if "ray" in package_names(path)}
    assert {name for name in importers if not name.startswith("verl_like.backends.ray")} == set()


def test_optional_packages_are_imported_only_in_functions() -> None:
    wrong = {}
    for package in PACKAGES:
        for path in sources(package):
            if imported := package_names(path, kinds=(AT_IMPORT, FOR_TYPES)) & OPTIONAL:
                wrong[module_name(path)] = imported
    assert wrong == {}


LOADS_LITTLE = {
    "verl_like": ("ray", "torch", "transformers"),
    "verl_like.placement.plan": ("ray", "torch", "transformers"),
    "verl_like.registry": ("ray", "torch", "transformers"),
    "workers.rewards.functions": ("torch", "ray", "transformers"),
    "workers.rewards.process": ("torch", "ray", "transformers"),
    "trainer.cli.main": ("torch", "ray", "transformers", "hydra"),
    "trainer.cli.report": ("torch", "ray", "transformers", "hydra"),
    "trainer.cli.watch": ("torch", "ray", "transformers", "hydra"),
    "trainer.cli.export": ("torch", "ray", "transformers", "hydra"),
    "trainer.ppo.recipe": ("torch", "ray", "transformers"),
    "trainer.async_training.recipe": ("torch", "ray", "transformers"),
}
NO_RECIPE = ("transformers", "trainer.ppo.stages", "trainer.data.prompts", "workers.roles")
LOADS_TORCH = {
    "workers.config": ("ray", "transformers"),
    "trainer.ppo.advantages": ("ray", "transformers", "tensordict"),
    "trainer.loop": NO_RECIPE,
    "trainer.launch": NO_RECIPE,
}
"""Module -> the modules that its import must not load."""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    return loaded_by(list(LOADS_LITTLE), list(LOADS_TORCH))


@pytest.mark.parametrize(("module", "absent"), [*LOADS_LITTLE.items(), *LOADS_TORCH.items()])
def test_an_import_does_not_load(
    loaded: dict[str, list[str]], module: str, absent: tuple[str, ...]
) -> None:
    assert module in loaded[module]
    assert [name for name in absent if name in loaded[module]] == []
