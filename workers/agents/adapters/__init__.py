"""Environments of other packages, one file each; `ENVIRONMENT_ADAPTERS` names them.

A package is imported only if its prefix is used, in the environments' process. This process also
checks the id before a trajectory begins, with the functions here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from verl_like.errors import ConfigError, nearest


def imported(module: str, setting: str, install: str) -> Any:
    """Import a module of another package; on failure, suggest `pip install` with `install`.

    If `install` is "", the module may be the user's own.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        remedy = "Install it, or put its folder on PYTHONPATH"
        if install:
            remedy = f"Install or update its package with: pip install '{install}'"
        raise ConfigError(
            f"environment={setting}: the module {module} cannot be imported ({error}). {remedy}."
        ) from error


def check_id(name: str, ids: Iterable[str], setting: str) -> None:
    """Reject an id that its package does not know."""
    known = list(ids)
    if name not in known:
        raise ConfigError(
            f"environment={setting}: there is no {name!r} among the {len(known)} ids of its "
            f"package.{nearest(name, known)}"
        )


def seed_from(rng: Any) -> int:
    """Return a seed that every package accepts."""
    return int(rng.integers(2**31))
