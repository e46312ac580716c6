"""Import the public names of a module on first use."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any


def names_by_block(path: str) -> list[dict[str, str]]:
    """Return the names that each `if TYPE_CHECKING:` block of a file imports, and their modules.

    The blocks are read as text, which is formatted by ruff: importing `ast` takes too long.
    """
    with open(path, encoding="utf-8") as file:
        blocks = re.findall(r"^if TYPE_CHECKING:.*\n((?:    .*\n)+)", file.read(), re.M)
    imports = re.compile(r"^    from (\S+) import \(?\s*(\w+) as", re.M)
    return [{name: module for module, name in imports.findall(block)} for block in blocks]


def import_name(package: str, modules: dict[str, str], name: str) -> Any:
    """Return a public name of a package from the module that has it."""
    if name not in modules:
        from verl_like.errors import nearest

        raise AttributeError(
            f"module '{package}' has no attribute '{name}'.{nearest(name, modules)}"
        )
    try:
        return getattr(importlib.import_module(modules[name]), name)
    except ImportError as error:
        check_not_hidden({module.partition(".")[0] for module in modules.values()}, error)
        raise


def check_not_hidden(packages: Collection[str], error: ImportError | None = None) -> None:
    """Name the user's file or folder that Python finds in place of one of these packages."""
    root = Path(__file__).resolve().parents[1]
    for package in sorted(packages):
        spec = importlib.util.find_spec(package)
        places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else []
        if places and root / package not in map(Path, places):
            raise ImportError(
                f"{places[-1]} hides the package {package!r} of verl-like. Rename it, start Python "
                f"in another folder, or uninstall what it belongs to."
            ) from error
