"""`environment=harbor:FOLDER` plays the tasks in a folder, in Harbor's format, by shell commands.

A task is a folder with `instruction.md`, `task.toml`, `environment/` and `tests/test.sh`. The
policy calls the tool `bash`, and at the end the tests write the reward. If `docker` or `podman`
works in the sandbox, each trajectory has a container of the task's image. Otherwise the commands
run in the sandbox, in a copy of `environment/`. There, the task's absolute paths (`/app`, `/tests`,
`/logs`, `/solution`, and WORKDIR) are folders of the trajectory, and packages that a Dockerfile
names are not installed. `environment.kwargs.runtime` is auto, local, docker or podman.

    shell = Container("docker", task, settings)      # or LocalShell(task)
    shell.run("pwd").stdout
    shell.put_tests(task / "tests")                  # at /tests
    shell.close()
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import tomllib
import uuid
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError, join_few, nearest
from verl_like.process.machine import loopback_interface
from verl_like.process.sandbox import check_can_confine_programs
from workers.agents.environment import EnvironmentAdapter

Done = subprocess.CompletedProcess[str]
TEXT: dict[str, Any] = {
    "stdout": subprocess.PIPE,
    "stderr": subprocess.STDOUT,
    "text": True,
    "errors": "replace",
}
"""Arguments of `subprocess` by which standard output and standard error are read as one text."""
PROGRAMS = ("docker", "podman")
REPLY_S = 20.0
"""Seconds in which `docker ps` must succeed; otherwise this program is not used."""
BEGUN = "verl-like has begun"
ROOTS = ("app", "tests", "logs", "solution")
"""Folders at the root of a task's container."""
WORKDIR = re.compile(r"^WORKDIR[ \t]+/([\w.-]+)(\S*)", re.M)
IMAGE_FILES = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")


def container_program(runtime: str) -> str:
    """Return the program that runs containers here, or "" if commands run in the sandbox."""
    if runtime not in ("auto", "local", *PROGRAMS):
        raise ConfigError(
            f"environment.kwargs.runtime={runtime}: choose auto, local, {' or '.join(PROGRAMS)}."
        )
    for program in PROGRAMS:
        if runtime in ("auto", program) and _runs_containers(program):
            return program
    if runtime in PROGRAMS:
        raise ConfigError(
            f"environment.kwargs.runtime={runtime}: `{runtime} ps` does not work in the sandbox "
            "of environments. List the variables that it needs in environment.sandbox.env, such "
            "as DOCKER_HOST. As root, podman needs CONTAINER_HOST, the address of a `podman "
            "system service`. Set environment.kwargs.runtime=local to run without containers."
        )
    check_can_confine_programs()
    return ""


def _runs_containers(program: str) -> bool:
    if program == "podman" and os.geteuid() == 0 and "CONTAINER_HOST" not in os.environ:
        return False  # in the sandbox, root cannot create the device files of a container
    with suppress(OSError, subprocess.TimeoutExpired):
        return _call([program, "ps", "-q"], timeout=REPLY_S).returncode == 0
    return False


class Container:
    """A container, which is removed when it is closed or the process that started it ends.

    The container's first process reads the standard input of `docker run`, and exits when that
    input ends.
    """

    def __init__(self, program: str, task: Path, settings: Mapping[str, Any]) -> None:
        """Start a container of the task's image, which is built if needed.

        `settings` is the section `[environment]` of `task.toml`, with the container's limits.
        """
        self._name = f"verl-like-{uuid.uuid4().hex[:12]}"
        self._program, self._workdir = program, settings.get("workdir")
        command = [program, "run", "--rm", "-i", "--label=verl-like", f"--name={self._name}"]
        if "cpus" in settings:
            command.append(f"--cpus={settings['cpus']}")
        if "memory_mb" in settings:
            command.append(f"--memory={settings['memory_mb']}m")
        may_connect = settings.get("allow_internet", settings.get("network_mode") != "no-network")
        if not may_connect or {name for _, name in socket.if_nameindex()} <= {loopback_interface()}:
            command.append("--network=none")  # the sandbox or the task forbids network access
        command += [_image(program, task, settings), "sh", "-c", f"echo {BEGUN}; exec cat"]
        process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, **TEXT)
        self.close = weakref.finalize(self, process.stdin.close)
        lines: list[str] = []
        while BEGUN not in lines:
            lines.append(process.stdout.readline().strip())
            if process.poll() is not None:
                output = " ".join([*lines, process.stdout.read()])
                raise RuntimeError(
                    f"the container of {task.name} does not start: {output[-500:]}. Set "
                    "environment.kwargs.runtime=local to run without a container."
                )
        self.run("mkdir -p /logs/agent; chmod 777 /logs /logs/agent", user=0)

    def run(
        self, script: str, variables: Mapping[str, str] | None = None, user: Any = None
    ) -> Done:
        """Run a script with bash; its errors are in its output."""
        options = [f"--env={name}={value}" for name, value in (variables or {}).items()]
        options += [f"--user={user}"] if user is not None else []
        options += [f"--workdir={self._workdir}"] if self._workdir else []
        return _call([self._program, "exec", *options, self._name, "bash", "-c", script])

    def put_tests(self, folder: Path) -> None:
        """Copy the tests to /tests."""
        _call([self._program, "cp", f"{folder}/.", f"{self._name}:/tests"]).check_returncode()


def _image(program: str, task: Path, settings: Mapping[str, Any]) -> str:
    """Return the task's image. The first trajectory builds it while the others wait."""
    if settings.get("docker_image"):
        return str(settings["docker_image"])
    image = Path(tempfile.gettempdir(), f"image of {task.name}")
    with image.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not image.stat().st_size:
            built = _call([program, "build", "-q", f"{task / 'environment'}"])
            if built.returncode:
                raise RuntimeError(
                    f"the image of {task.name} could not be built: {built.stdout[-500:]}"
                )
            image.write_text(built.stdout.split()[-1])
    return image.read_text()


class LocalShell:
    """A shell in the sandbox; in scripts, a task's absolute paths become folders of the sandbox."""

    def __init__(self, task: Path) -> None:
        """Copy the files of `environment/`. Only WORKDIR of its Dockerfile has an effect."""
        dockerfile = task / "environment/Dockerfile"
        text = dockerfile.read_text(encoding="utf-8") if dockerfile.is_file() else ""
        root, below = (WORKDIR.findall(text) or [("app", "")])[-1]
        self._home = tempfile.mkdtemp()
        names = "|".join(map(re.escape, dict.fromkeys([*ROOTS, root])))
        self._paths = re.compile(rf"(?<![\w./\-}})~*])/({names})(?![\w.-])")
        self._workdir = Path(self._home, root + below)
        if (task / "environment").is_dir():
            ignored = shutil.ignore_patterns(*IMAGE_FILES)
            shutil.copytree(task / "environment", self._workdir, ignore=ignored)
        self._workdir.mkdir(parents=True, exist_ok=True)
        Path(self._home, "logs/agent").mkdir(parents=True)

    def run(
        self, script: str, variables: Mapping[str, str] | None = None, user: Any = None
    ) -> Done:
        """Run a script with bash; its errors are in its output."""
        env = {**os.environ, **(variables or {})}
        done = _call(["bash", "-c", self._with_local_paths(script)], cwd=self._workdir, env=env)
        done.stdout = done.stdout.replace(self._home, "")
        return done

    def put_tests(self, folder: Path) -> None:
        """Copy the tests to /tests."""
        tests = Path(self._home, "tests")
        shutil.copytree(folder, tests)
        for file in tests.rglob("*"):
            with suppress(UnicodeDecodeError, IsADirectoryError):
                file.write_text(
                    self._with_local_paths(file.read_text(encoding="utf-8")), encoding="utf-8"
                )

    def close(self) -> None:
        """Do nothing, because the sandbox removes the folders."""

    def _with_local_paths(self, text: str) -> str:
        """Return the text with the task's paths replaced by the trajectory's folders."""
        return self._paths.sub(lambda path: self._home + path[0], text)


def _call(command: Iterable[str], **settings: Any) -> Done:
    done: Done = subprocess.run(
        [*command], stdin=subprocess.DEVNULL, check=False, **TEXT, **settings
    )
    return done


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
                f"has only the tasks {join_few([*self.tasks])}.{nearest(str(name), self.tasks)}"
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
