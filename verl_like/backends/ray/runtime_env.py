"""Try a runtime environment before Ray starts workers in it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.runtime_env import RuntimeEnv

from verl_like.errors import ConfigError, nearest

TRIED_FOR_S = 120.0
"""Seconds that a Python of the environment may take to import this package."""
REMEDY = "Install this project there, or remove the key: workers then run in the driver's Python."


def check_runtime_env(env: Mapping[str, Any], runs_here: bool) -> None:
    """Raise if Ray rejects the environment, or if its Python cannot import this package.

    Ray would start such a Python again and again, until the start of the workers times out. If
    workers run only on other machines (`runs_here` is false), their Python is not tried.
    """
    known = sorted(name for name in RuntimeEnv.known_fields if not name.startswith("_"))
    unknown = [name for name in env if name not in known]
    if unknown:
        raise ConfigError(
            f"ray.runtime_env has no field {unknown[0]!r}.{nearest(unknown[0], known)} Known: "
            f"{', '.join(known)}."
        )
    try:
        RuntimeEnv(**env)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Ray rejects ray.runtime_env={dict(env)}: {error}") from error
    python, folder = env.get("py_executable"), str(env.get("working_dir") or ".")
    if not python or not runs_here or not Path(folder).is_dir():
        return
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "try.py")
        file.write_text("import ray, verl_like\n", encoding="utf-8")
        try:
            tried = subprocess.run(
                f"{python} {file}",
                shell=True,  # as Ray starts it
                cwd=folder,
                env={**os.environ, **env.get("env_vars", {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=TRIED_FOR_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"ray.runtime_env.py_executable={python}: it did not import verl_like within "
                f"{TRIED_FOR_S:.0f} s. {REMEDY}"
            ) from error
    if tried.returncode:
        lines = tried.stdout.decode("utf-8", "replace").strip().splitlines()
        raise ConfigError(
            f"ray.runtime_env.py_executable={python}: this Python cannot import ray and "
            f"verl_like: {' / '.join(lines[-3:]) or f'exit code {tried.returncode}'}. {REMEDY}"
        )
