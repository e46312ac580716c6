"""A function or class of the user's, from a file or a module.

Torch-free: the reward process starts with it.

Callers: `trainer.data.prompts` (data.custom_cls), `workers.rewards.process`
(custom_reward_function).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_user_code(path: str, name: str, setting: str) -> Any:
    """What is called `name` in a Python file (`folder/file.py`) or a module (`package.module`).

    `setting` is the config section that names them, for the error: `ImportError`, so that this
    loads without torch.
    """
    module = (
        _load_file(Path(path), setting) if path.endswith(".py") else _load_module(path, setting)
    )
    if not hasattr(module, name):
        there = ", ".join(sorted(n for n in vars(module) if not n.startswith("_"))) or "nothing"
        raise ImportError(f"{setting}.name={name!r}: {path} has no such name; it has {there}.")
    return getattr(module, name)


def _load_module(path: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(path)
    except (ImportError, ValueError) as err:
        raise ImportError(
            f"{setting}.path={path!r} cannot be imported ({type(err).__name__}: {err}). Give a "
            "file that ends in .py, or a module that Python finds."
        ) from err


def _load_file(path: Path, setting: str) -> ModuleType:
    if not path.is_file():
        raise ImportError(
            f"{setting}.path={path}: there is no such file (looked for {path.resolve()})."
        )
    name = f"user_code_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a path that ends in .py always has a loader"
    assert spec.loader is not None, "a path that ends in .py always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
