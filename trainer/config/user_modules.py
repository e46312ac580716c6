"""Which modules of the user's a run needs.

What it names by a dotted path is imported in the worker processes (worker classes, policy losses,
optimizers): Ray sends it to other nodes. Estimators, reward functions and trainers run beside the
driver and stay there. What files of theirs import decides a run's numbers as they do: checkpoints
have digests of it.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

OWN_PACKAGES = ("verl_like", "workers", "trainer")
INSTALLED = frozenset(["site-packages", "dist-packages"])
"""Names of folders of installed packages, whatever Python they are of."""


def modules_of_the_user(object_paths: Iterable[str]) -> list[str]:
    """Files and folders, each once, that hold the user's code behind these paths of objects.

    Installed packages are left out, and so are registered names and `file.py:name`: every node
    reads that file where the path says.
    """
    modules = [path.rpartition(":")[0] or path for path in object_paths if {".", ":"} & set(path)]
    packages = dict.fromkeys(
        module.partition(".")[0] for module in modules if not module.endswith(".py")
    )
    places = []
    for package in packages:
        place = None if package in OWN_PACKAGES else place_of(package)
        if place is not None:
            places.append(str(place))
    return places


def place_of(module: str) -> Path | None:
    """The file of a module or the folder of a package; None if it is installed or not there."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    place = Path(folders[0] if folders else str(spec.origin)).resolve()

    for kind in ("purelib", "platlib", "stdlib"):
        if place.is_relative_to(Path(sysconfig.get_path(kind)).resolve()):
            return None
    return None if INSTALLED & set(place.parts) else place


def imported_files(file: Path) -> list[Path]:
    """The files of the user's modules that a Python file imports, and those that these do.

    They are found by reading them, also imports within functions; nothing is run.
    """
    found: set[Path] = set()
    ahead = [file.resolve()]
    while ahead:
        new = set(_imported_by(ahead.pop())) - found - {file.resolve()}
        found |= new
        ahead += new
    return sorted(found)


def _imported_by(file: Path) -> Iterator[Path]:
    """The files of the modules that it imports, and of the packages around them."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # whoever loads it says so
        return
    for node in ast.walk(tree):
        names, level = [], 0
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            level, above = node.level, f"{node.module}." if node.module else ""
            names = [f"{above}{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            place = file.parents[level - 1] if level else _root_of(parts[0], file)
            if place is None:
                continue
            for part in parts:
                place /= part
                yield from filter(Path.is_file, (place.with_suffix(".py"), place / "__init__.py"))


def _root_of(module: str, importer: Path) -> Path | None:
    """The folder of a module of the user's; None of others.

    One that is on no path is looked for beside its importer, which may add that folder itself.
    """
    if module in OWN_PACKAGES or module in sys.stdlib_module_names:
        return None
    try:
        place = place_of(module)
    except (ImportError, ValueError):  # as above
        return None
    return place.parent if place else importer.parent
