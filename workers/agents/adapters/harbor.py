"""`harbor:FOLDER` plays the tasks of a folder in Harbor's format, by shell commands.

A task is a folder with `instruction.md`, `environment/` and `tests/test.sh`. The policy calls the
tool `bash`; at the end the tests say the reward. There is no container: the commands run in the
sandbox, in a copy of `environment/`, and the absolute paths of the task (`/app`, `/tests`, `/logs`,
`/solution`, and WORKDIR) are folders of the trajectory. Packages of its Dockerfile are not
installed, so a task runs whose commands this machine has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError
from workers.agents.environment import Adapter

ROOTS = ("app", "tests", "logs", "solution")
"""Folders at the root of a task's container."""
WORKDIR = re.compile(r"^WORKDIR[ \t]+/([\w.-]+)(\S*)", re.M)
OF_IMAGE = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")


class Harbor(Adapter):
    """A shell in the world of a task."""

    tasks: Mapping[str, Path]

    @classmethod
    def id_in_full(cls, name: str) -> str:
        """The folder in full."""
        return str(Path(name).expanduser().absolute())

    @classmethod
    def prepare(cls) -> None:
        """Find the tasks: the folder's own, or that of each folder in it."""
        folder = Path(cls.id)
        folders = [folder, *sorted(folder.glob("*/"))]
        cls.tasks = {each.name: each for each in folders if (each / "instruction.md").is_file()}
        tested = {name for name, task in cls.tasks.items() if (task / "tests/test.sh").is_file()}
        if not tested or tested != {*cls.tasks}:
            missing = sorted({*cls.tasks} - tested)
            what = f"{missing[0]} has no tests/test.sh" if missing else "no folder in it is a task"
            raise ConfigError(
                f"environment=harbor:{cls.id}: {what}. A task has instruction.md and tests/test.sh."
            )

    def reset(self, row: Mapping[str, Any], rng: Any) -> str:
        """Set the task up: that of the row's column `task`, or one of the prompt's generator."""
        name = row.get("task") or list(self.tasks)[int(rng.integers(len(self.tasks)))]
        self._task = self.tasks[name]
        dockerfile = self._task / "environment/Dockerfile"
        text = dockerfile.read_text(encoding="utf-8") if dockerfile.is_file() else ""
        root, below = (WORKDIR.findall(text) or [("app", "")])[-1]
        self._home = tempfile.mkdtemp()
        names = "|".join(map(re.escape, dict.fromkeys([*ROOTS, root])))
        self._paths = re.compile(rf"(?<![\w./\-}})~*])/({names})(?![\w.-])")
        self._workdir = Path(self._home, root + below)
        if (self._task / "environment").is_dir():
            ignored = shutil.ignore_patterns(*OF_IMAGE)
            shutil.copytree(self._task / "environment", self._workdir, ignore=ignored)
        self._workdir.mkdir(parents=True, exist_ok=True)
        Path(self._home, "logs/agent").mkdir(parents=True)
        return (self._task / "instruction.md").read_text(encoding="utf-8")

    def bash(self, command: str) -> str:
        """Run a shell command and return its output.

        Args:
            command: The command, as bash takes it.
        """
        done = self._run(["bash", "-c", self._here(command)])
        ending = f"\n[exit code {done.returncode}]" if done.returncode else ""
        return done.stdout.replace(self._home, "") + ending

    def get_reward(self) -> float:
        """Run the tests, which write a reward."""
        for name in ("tests", "logs/verifier"):
            shutil.rmtree(Path(self._home, name), ignore_errors=True)
        shutil.copytree(self._task / "tests", Path(self._home, "tests"))
        for file in Path(self._home, "tests").rglob("*"):
            with suppress(UnicodeDecodeError, IsADirectoryError):
                file.write_text(self._here(file.read_text(encoding="utf-8")), encoding="utf-8")
        logs = Path(self._home, "logs/verifier")
        logs.mkdir(parents=True)
        toml = self._task / "task.toml"
        settings = tomllib.loads(toml.read_text(encoding="utf-8")) if toml.is_file() else {}
        variables = settings.get("verifier", {}).get("env", {})
        done = self._run(["bash", f"{self._home}/tests/test.sh"], variables)
        if (logs / "reward.json").is_file():
            rewards = json.loads((logs / "reward.json").read_text(encoding="utf-8"))
            if isinstance(rewards, dict):
                return float(rewards.get("reward", sum(rewards.values()) / max(len(rewards), 1)))
            return float(rewards)
        if (logs / "reward.txt").is_file():
            return float((logs / "reward.txt").read_text(encoding="utf-8").strip() or 0)
        problem = f"tests/test.sh of {self._task.name} wrote no reward: "
        raise RuntimeError(problem + done.stdout[-500:])

    def _here(self, text: str) -> str:
        """A text whose paths are those of the trajectory."""
        return self._paths.sub(lambda path: self._home + path[0], text)

    def _run(
        self, command: list[str], variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self._workdir,
            env={**os.environ, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
