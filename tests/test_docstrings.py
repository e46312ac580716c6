"""Modules and names in docstrings and comments of the packages exist.

`trainer.save_freq` is a key of the configuration's section `trainer`, which has a package's name.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests import ROOT
from tests.import_graph import PACKAGES, sources

DOTTED = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)`")


def module_of(dotted: str) -> tuple[Path | None, list[str]]:
    """Return the file of the longest prefix that is a module, and the rest of the name."""
    parts = dotted.split(".")
    for number in range(len(parts), 1, -1):
        base = ROOT.joinpath(*parts[:number])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path, parts[number:]
    return None, parts[1:]


def exists(dotted: str, keys_of_trainer: str) -> bool:
    """True if the name is a module, a name in a module or package, or a configuration key."""
    path, rest = module_of(dotted)
    text = keys_of_trainer if path is None else path.read_text(encoding="utf-8")
    if path is None:
        text += (ROOT / dotted.split(".")[0] / "__init__.py").read_text(encoding="utf-8")
    return all(re.search(rf"\b{name}\b", text) for name in rest)


def test_every_module_named_in_a_docstring_or_comment_exists() -> None:
    names = [
        (path, name)
        for package in PACKAGES
        for path in sources(package)
        for name in DOTTED.findall(path.read_text(encoding="utf-8"))
    ]
    configs = [path for path in sources("trainer") if path.stem in ("schema", "config", "recipe")]
    keys = "\n".join(path.read_text(encoding="utf-8") for path in configs)
    missing = [f"{path.relative_to(ROOT)}: {n}" for path, n in names if not exists(n, keys)]
    assert missing == []
    assert len(names) > 100
