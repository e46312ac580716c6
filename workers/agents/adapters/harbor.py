"""`environment=harbor:FOLDER` plays the tasks in a folder, in Harbor's format, by shell commands.

A task is a folder with `instruction.md`, `task.toml`, `environment/` and `tests/test.sh`. The
policy calls the tool `bash`, and at the end the tests write the reward. If `docker` or `podman`
works in the sandbox, each trajectory has a container of the task's image. Otherwise the commands
run in the sandbox, in a copy of `environment/`. There, the task's absolute paths (`/app`, `/tests`,
`/logs`, `/solution`, and WORKDIR) are folders of the trajectory, and packages that a Dockerfile
names are not installed. `environment.kwargs.runtime` is auto, local, docker or podman.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError, few, nearest
from workers.agents.adapters.shells import Container, LocalShell, container_program
from workers.agents.environment import EnvironmentAdapter


class Harbor(EnvironmentAdapter):
    """An environment that runs shell commands for a Harbor task."""

    tasks: Mapping[str, Path]
    program: str
    """The program that runs containers, or "" if commands run in the sandbox."""

    @classmethod
    def id_in_full(cls, name: str) -> str:
        """Return the absolute path of the folder."""
        return str(Path(name).expanduser().absolute())

    @classmethod
    def prepare(cls) -> None:
        """Find the tasks: the folder itself, and the folders in it."""
        folder = Path(cls.id)
        folders = [folder, *sorted(folder.glob("*/"))]
        cls.tasks = {task.name: task for task in folders if (task / "instruction.md").is_file()}
        tested = {name for name, task in cls.tasks.items() if (task / "tests/test.sh").is_file()}
        if not tested or tested != {*cls.tasks}:
            missing = sorted({*cls.tasks} - tested)
            why = f"{missing[0]} has no tests/test.sh" if missing else "no folder in it is a task"
            raise ConfigError(
                f"environment=harbor:{cls.id}: {why}. A task has instruction.md and tests/test.sh."
            )
        cls.program = container_program(str(cls.kwargs.get("runtime", "auto")))
        if cls.program:
            print(f"note: harbor: each trajectory has a {cls.program} container", flush=True)

    def reset(self, row: Mapping[str, Any], rng: Any) -> str:
        """Set up the task that the row's column `task` names, or a task drawn with `rng`."""
        name = row.get("task") or list(self.tasks)[int(rng.integers(len(self.tasks)))]
        if name not in self.tasks:
            raise ConfigError(
                f"environment=harbor:{self.id}: a row's column 'task' is {name!r}, but the folder "
                f"has only the tasks {few([*self.tasks])}.{nearest(str(name), self.tasks)}"
            )
        self._task = self.tasks[name]
        toml = self._task / "task.toml"
        self._settings = tomllib.loads(toml.read_text(encoding="utf-8")) if toml.is_file() else {}
        of_environment = self._settings.get("environment", {})
        self._shell: Container | LocalShell
        if self.program:
            self._shell = Container(self.program, self._task, of_environment)
        else:
            self._shell = LocalShell(self._task)
        return (self._task / "instruction.md").read_text(encoding="utf-8")

    def bash(self, command: str) -> str:
        """Run a shell command and return its output.

        Args:
            command: The command, in the syntax of bash.
        """
        done = self._run(command, "agent")
        ending = f"\n[exit code {done.returncode}]" if done.returncode else ""
        return str(done.stdout) + ending

    def get_reward(self) -> float:
        """Run the task's tests, and return the reward that they write.

        Of several rewards in `reward.json`, it is the entry `reward`, or otherwise their mean.
        """
        clean = "rm -rf /tests /logs/verifier; mkdir -p /logs/verifier; chmod 777 /logs/verifier"
        self._shell.run(clean, user=0)
        self._shell.put_tests(self._task / "tests")
        done = self._run("bash /tests/test.sh", "verifier")
        as_json, as_text = [
            self._shell.run(f"cat /logs/verifier/reward.{ending}") for ending in ("json", "txt")
        ]
        self._shell.close()
        if as_json.returncode and as_text.returncode:
            problem = f"tests/test.sh of {self._task.name} wrote no reward: "
            raise RuntimeError(problem + done.stdout[-500:])
        if as_json.returncode:
            return float(as_text.stdout.strip() or 0)
        rewards = json.loads(as_json.stdout)
        if isinstance(rewards, dict):
            return float(rewards.get("reward", sum(rewards.values()) / max(len(rewards), 1)))
        return float(rewards)

    def _run(self, script: str, section: str) -> Any:
        """Run a script with the variables and the user that a section of `task.toml` sets.

        Variables in `[environment]` also apply.
        """
        settings = self._settings.get(section, {})
        variables = self._settings.get("environment", {}).get("env", {}) | settings.get("env", {})
        return self._shell.run(script, variables, settings.get("user"))
