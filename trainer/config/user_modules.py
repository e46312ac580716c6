"""Find the user's modules that a run needs.

Worker processes import the objects that they use (worker classes, engines, environments, losses,
optimizers, schedules). If a run joins a Ray cluster, Ray sends the modules in the paths of such
objects to its nodes. Estimators and trainers run in the driver's process, and reward functions in
processes that it starts on its node. The files that they import also affect a run's numbers, so
checkpoints have digests of these files.
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
"""Folder names of installed packages, for any Python version."""


def modules_of_the_user(object_paths: Iterable[str]) -> list[str]:
    """Return the files and folders, without duplicates, of the user's code at these object paths.

    Installed packages and registered names are left out. So is `file.py:name`, because every node
    reads that file at its path.
    """
    modules = [path.partition(":")[0] for path in object_paths if {".", ":"} & set(path)]
    packages = dict.fromkeys(
        module.partition(".")[0]
        for module in modules
        if "/" not in module and not module.endswith(".py")
    )
    places = [place_of(package) for package in packages if package not in OWN_PACKAGES]
    return [str(place) for place in places if place is not None]


def place_of(module: str) -> Path | None:
    """Return a module's file or a package's folder; None if it is installed or missing."""
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
    """Return the files of the user's modules that a Python file imports, even indirectly.

    The file is parsed, including imports inside functions; nothing is executed.
    """
    files: set[Path] = set()
    ahead = [file.resolve()]
    while ahead:
        new = set(_imported_by(ahead.pop())) - files - {file.resolve()}
        files |= new
        ahead += new
    return sorted(files)


def _imported_by(file: Path) -> Iterator[Path]:
    """Yield the files of the modules that a file imports, and of the packages around them."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):  # loading it reports the error
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
    """Return the folder of a user's module, and None for other modules.

    A module that is not on the import path is expected next to its importer, which may add that
    folder itself.
    """
    if module in OWN_PACKAGES or module in sys.stdlib_module_names:
        return None
    try:
        place = place_of(module)
    except (ImportError, ValueError):  # loading it reports the error
        return None
    return place.parent if place else importer.parent
