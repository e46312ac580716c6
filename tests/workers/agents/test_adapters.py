"""Environments of other packages, by prefix. Those whose packages are installed are played."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.waiting import wait_until
from trainer.cli import check_environment
from verl_like.errors import ConfigError
from workers.agents import EnvironmentAdapter, Observation, TrajectoryEnd
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec, full_path
from workers.agents.process import Episode

HERE = "tests.workers.agents.test_adapters"
SEEDS = (0, 1)


def begin(path: str, row: dict[str, Any] | None = None, **kwargs: Any) -> tuple[Episode, str]:
    """Begin a trajectory; return it with its first observation."""
    episode = Episode(EnvironmentSpec(path, kwargs).load(), SEEDS)
    return episode, episode.reset({"prompt": "", **(row or {})})["text"]


def text_of(reply: dict[str, Any]) -> str:
    return str(reply["messages"][0]["content"])


class Level(EnvironmentAdapter):
    """A user's own adapter."""

    def reset(self, row: Any, rng: Any) -> str:
        return f"level {self.id} of {self.kwargs}"

    def step(self, text: str) -> Observation | TrajectoryEnd:
        return TrajectoryEnd(1.0)


def test_a_users_adapter_gets_an_id() -> None:
    assert begin(f"{HERE}:Level:7:b", top=9)[1] == "level 7:b of {'top': 9}"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("gymnasium:FrozenLak-v1", r"no 'FrozenLak-v1' among the \d+ ids.*mean 'FrozenLake-v1'"),
        ("gymnasum:FrozenLake-v1", "Did you mean 'gymnasium'"),
        ("gymnasium", "use FILE.py:NAME.*Did you mean 'gymnasium'"),
        ("textarena:Nim-v0", "cannot start with one player: The number of players has to be 2"),
        ("skyrl_gym:gsm9k", "Did you mean 'gsm8k'"),
        ("mcp:true", "the server exited without answering initialize"),
        ("openenv:http://127.0.0.1:9", "/schema does not reply like an OpenEnv server"),
        (f"{HERE}:Level", "needs an id"),
        ("tests.workers.agents.games:Count:3", "Count is not an EnvironmentAdapter. Remove ':"),
    ],
)
def test_an_unusable_environment_is_rejected_with_the_reason(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        EnvironmentSpec(path).load()


@pytest.mark.parametrize(
    ("path", "package"),
    [
        ("gymnasium:x", "gymnasium"),
        ("textarena:x", "textarena"),
        ("gem:x", "gem"),
        ("reasoning_gym:x", "reasoning-gym"),
        ("skyrl_gym:x", "skyrl-gym"),
        ("openenv:http://x", "openenv"),
    ],
)
def test_a_missing_package_is_named_with_its_pip_command(
    path: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "websockets" if package == "openenv" else path.partition(":")[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"pip install 'verl-like\[{package}\]'"):
        EnvironmentSpec(path).load()
    assert f"\n{package} = [" in Path("pyproject.toml").read_text(encoding="utf-8")


def test_gymnasium_is_played_by_numbers() -> None:
    episode, first = begin("gymnasium:FrozenLake-v1", is_slippery=False)
    assert first == "0\n[S]FFF\nFHFH\nFFFH\nHFFG\nSay a number from 0 to 3."
    assert text_of(episode.step("not 0 but 2")) == "1\n(Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"
    assert text_of(episode.step("down")) == "Say a number from 0 to 3."
    assert text_of(episode.step("4")) == "Say a number from 0 to 3."
    assert episode.step("1") == {"end": True, "reward": 0.0, "truncated": False}


def test_a_truncation_of_gymnasium_is_no_end() -> None:
    episode, _ = begin("gymnasium:FrozenLake-v1", max_episode_steps=2)
    episode.step("0")
    assert episode.step("0") == {"end": True, "reward": 0.0, "truncated": True}


def test_actions_of_gymnasium_may_be_several_numbers() -> None:
    episode, first = begin("gymnasium:Pendulum-v1")
    assert first.endswith("Say 1 numbers of Box(-2.0, 2.0, (1,), float32).")
    assert json.loads(text_of(episode.step("0.5")))[0] != json.loads(first.partition("\n")[0])[0]
    for no_action in ("9", "1e999", "9" * 5000, "nan", ""):
        assert text_of(episode.step(no_action)).startswith("Say 1 numbers of ")


def test_textarena_observes_only_new_text() -> None:
    episode, first = begin("textarena:GuessTheNumber-v0")
    assert "guess the number between 1 and 20" in first
    assert text_of(episode.step("I say [20]")) == "The target number is lower."
    replies = [episode.step(f"[{number}]") for number in range(1, 20)]
    assert next(reply for reply in replies if reply.get("end"))["reward"] > 0


def test_environments_with_one_seed_are_equal() -> None:
    for path in ("textarena:2048-v0", "gymnasium:Blackjack-v1"):
        assert begin(path)[1] == begin(path)[1]


def test_skyrl_environments_get_the_rows_ground_truth() -> None:
    episode, first = begin("skyrl_gym:gsm8k_multi_turn", {"ground_truth": "7", "extra_info": {}})
    assert first is None
    reply = episode.step("#### 6")
    assert "in the exact format: '#### ANSWER'" in text_of(reply)
    assert reply["reward"] == pytest.approx(0.04)
    assert episode.step("#### 7")["reward"] == 1.0


SKYRL = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

class Echo(BaseTextEnv):
    def __init__(self, env_config, extras):
        super().__init__()
        self.word = extras["word"] + env_config.mark

    def step(self, action):
        self.turns += 1
        texts = [{"role": "user", "content": f"{self.word} {action}"}]
        changed = {"postprocessed_action": "b"} if action == "change" else {}
        return BaseTextEnvStepOutput(
            observations=texts, reward=0.5, done=self.turns == 2, metadata={}, **changed
        )
"""


def test_a_users_skyrl_class_is_played_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "echo.py").write_text(SKYRL)
    monkeypatch.chdir(tmp_path)
    path = full_path("skyrl_gym:echo.py:Echo")
    assert path == f"skyrl_gym:{tmp_path}/echo.py:Echo"
    episode, _ = begin(path, {"word": "hm"}, mark="!")
    assert text_of(episode.step("a")) == "hm! a"
    with pytest.raises(ValueError, match="differs from the policy's text"):
        episode.step("change")


def test_the_policy_gets_the_tools_of_an_mcp_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    path = full_path(f"mcp:{sys.executable} mcp_calculator.py")
    assert shlex.split(path)[-1] == str(Path(__file__).parent / "mcp_calculator.py")
    spec = EnvironmentSpec(path)
    loaded = spec.load()
    assert [tool.name for tool in loaded.tools] == ["add", "divide"]
    assert loaded.tools[0].schema["function"]["parameters"]["required"] == ["a", "b"]
    episode = Episode(loaded, SEEDS)
    assert episode.reset({"prompt": ""}) == {"text": None}
    process = episode._env._server._process
    assert text_of(episode.step('{"name": "add", "arguments": {"a": 2, "b": 3}}')) == "5"
    failed = episode.step('{"name": "divide", "arguments": {"a": 1, "b": 0}}')
    assert (failed["errors"], "divide" in text_of(failed)) == (1, True)
    assert episode.step("5") == {"end": True, "reward": 0.0}
    del episode
    assert process.poll() is not None, "a server ends with its trajectory"


@contextlib.contextmanager
def openenv_server(schema: dict[str, Any]) -> Iterator[str]:
    """A server that counts steps per connection, as OpenEnv's server does."""
    from websockets.datastructures import Headers
    from websockets.http11 import Response
    from websockets.sync.server import serve

    def session(socket: Any) -> None:
        turns, secret = 0, None
        for line in socket:
            request = json.loads(line)
            if request["type"] == "reset":
                turns, secret = 0, random.Random(request["data"]["seed"]).randrange(10**6)
            else:
                turns += 1
            if request["data"] == {"message": "break"}:
                socket.send(json.dumps({"type": "error", "data": {"message": "it broke"}}))
                continue
            observed = {"echo": f"{secret} {request['data'].get('message')}"}
            data = {"observation": observed, "reward": turns or None, "done": turns == 2}
            socket.send(json.dumps({"type": "observation", "data": data}))

    def answer(_: Any, request: Any) -> Response | None:
        if request.path != "/schema":
            return None
        return Response(200, "OK", Headers(), json.dumps({"action": schema}).encode())

    with serve(session, "127.0.0.1", 0, process_request=answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()


MESSAGE = {"properties": {"message": {"type": "string"}, "metadata": {}}, "required": ["message"]}


def test_an_openenv_server_has_one_session_per_trajectory() -> None:
    with openenv_server(MESSAGE) as url:
        episode, first = begin(f"openenv:{url}")
        other, first_of_other = begin(f"openenv:{url}")
        assert first == first_of_other
        assert text_of(episode.step("hi")) == f"{first.split()[0]} hi"
        assert episode.step("hi") == {"end": True, "reward": 2.0, "truncated": False}
        assert other.step("hi")["reward"] == 1.0
        with pytest.raises(RuntimeError, match="it broke"):
            other.step("break")


def test_actions_of_several_fields_are_json() -> None:
    with openenv_server({"properties": {}, "required": []}) as url:
        episode, _ = begin(f"openenv:{url}")
        for text in ("{", "[1]"):
            assert text_of(episode.step(text)).startswith("error: an action is a JSON object")
        assert text_of(episode.step('{"message": "a"}')).endswith(" a")


def test_a_gem_environment_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    class Countdown:
        def __init__(self, start: int) -> None:
            self.left = start

        def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
            return f"{self.left} left", {}

        def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            self.left -= 1
            return f"{self.left} left", 0.5, text == "stop", self.left == 0, {}

    modules = {name: ModuleType(name) for name in ("gem", "gem.envs", "gem.envs.registration")}
    vars(modules["gem"])["make"] = lambda name, **kwargs: Countdown(**kwargs)
    vars(modules["gem.envs.registration"])["ENV_REGISTRY"] = {"game:Countdown": None}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    episode, first = begin("gem:game:Countdown", start=2)
    assert (first, text_of(episode.step("x"))) == ("2 left", "1 left")
    assert episode.step("x") == {"end": True, "reward": 0.5, "truncated": True}
    assert begin("gem:game:Countdown", start=2)[0].step("stop")["truncated"] is False


needs_gem = pytest.mark.skipif(
    importlib.util.find_spec("gem") is None or importlib.util.find_spec("reasoning_gym") is None,
    reason="tests/run.sh installs them if there is a C compiler",
)


@needs_gem
def test_the_gem_package_is_played() -> None:
    episode, first = begin("gem:game:GuessTheNumber-v0-easy")
    assert "guess the number between 1 and 10" in first
    replies = [episode.step(f"\\boxed{{{number}}}") for number in (2, 4, 6, 8)]
    assert any(reply.get("end") for reply in replies)
    with pytest.raises(ConfigError, match="Did you mean 'game:Sudoku-v0-easy'"):
        begin("gem:game:Sudoku-v0-eazy")


@needs_gem
def test_the_reasoning_gym_package_scores_its_own_answers() -> None:
    episodes = [begin("reasoning_gym:chain_sum") for _ in range(3)]
    assert len({first for _, first in episodes}) == 1
    right, plain, wrong = (episode for episode, _ in episodes)
    answer = str(right._env._entry["answer"])
    end = {"end": True, "reward": 1.0, "truncated": False}
    assert right.step(f"so <answer>{answer}</answer>") == end
    assert plain.step(f" {answer} ")["reward"] == 1.0
    assert wrong.step("<answer>?</answer>")["reward"] < 1.0


TEST_SH = """#!/bin/bash
cd /app
[ "$(cat /app/out.txt)" = "$WANTED" ] && [ -f seed.txt ] && echo 1 > /logs/verifier/reward.txt \\
    || echo '{"reward": 0.25, "size": 3}' > /logs/verifier/reward.json
"""


def harbor_task(folder: Path, name: str) -> None:
    for part in ("environment", "tests"):
        (folder / name / part).mkdir(parents=True)
    (folder / name / "instruction.md").write_text(f"Write {name} into /app/out.txt.")
    (folder / name / "task.toml").write_text(f'[verifier.env]\nWANTED = "{name}"\n')
    (folder / name / "environment/Dockerfile").write_text("FROM ubuntu\nWORKDIR /app\n")
    (folder / name / "environment/seed.txt").write_text("seed")
    (folder / name / "tests/test.sh").write_text(TEST_SH)


def bash_call(command: str) -> str:
    return json.dumps({"name": "bash", "arguments": {"command": command}})


def test_a_task_of_harbor_is_played_by_a_shell(tmp_path: Path) -> None:
    for name in ("hello", "bye"):
        harbor_task(tmp_path, name)
    spec = EnvironmentSpec(f"harbor:{tmp_path}", {"runtime": "local"})
    with closing(EnvironmentHost(spec, 20.0)) as host:
        assert [tool["function"]["name"] for tool in host.tools] == ["bash"]
        for word, reward in (("hello", 1.0), ("bye", 0.25)):
            commands = "pwd; ls /app; ls missing", f"echo 1 > /logs/x; echo {word} > /app/out.txt"
            texts = [*map(bash_call, commands), "done"]
            (trajectory,) = check_environment.play(host, [0], {"task": "hello"}, texts, 5)
            first, listed, written, end = trajectory.answers
            assert first["text"] == "Write hello into /app/out.txt."
            assert text_of(listed).startswith("/app\nseed.txt\n")
            assert text_of(listed).endswith("[exit code 2]")
            assert text_of(written) == ""
            assert (end["end"], end["reward"]) == (True, reward)
    assert not (tmp_path / "hello/environment/out.txt").exists()


DOCKER = """#!{python} -IS
import pathlib, shutil, subprocess, sys

command, *words = sys.argv[1:]
home = pathlib.Path({home!r})
with open(home / "log", "a") as log:
    print(command, *words, file=log)
options = {{}}
while words and words[0].startswith("-"):
    name, _, value = words.pop(0).partition("=")
    options.setdefault(name, []).append(value)
if command == "build":
    print("image-of", pathlib.Path(words[0]).parent.name)
elif command == "run":
    root = home / "containers" / options["--name"][0]
    shutil.copytree(home / "image", root)
    subprocess.run(words[1:])
    shutil.rmtree(root)
elif command == "exec":
    root = home / "containers" / words[0]
    script = words[-1].replace(" /", f" {{root}}/")
    env = dict(pair.split("=", 1) for pair in options.get("--env", ()))
    sys.exit(subprocess.run([*words[1:-1], script], cwd=root / "app", env=env).returncode)
elif command == "cp":
    shutil.copytree(words[0], home / "containers" / words[1].replace(":", ""))
"""
"""A stand-in for docker: a container is a folder, to which absolute paths after a space lead."""
LIMITS = """
[environment]
cpus = 2
memory_mb = 512
allow_internet = false
[environment.env]
NAME = "a b"
[agent]
user = "agent"
[verifier.env]
WANTED = "hello"
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace `docker` by a program, and return its folder."""
    home = tmp_path / "docker"
    (home / "image/app").mkdir(parents=True)
    (home / "containers").mkdir()
    program = tmp_path / "bin/docker"
    program.parent.mkdir()
    program.write_text(DOCKER.format(python=sys.executable, home=str(home)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return home


def test_a_task_of_harbor_has_a_container_if_docker_works(tmp_path: Path, docker: Path) -> None:
    harbor_task(tmp_path / "tasks", "hello")
    (tmp_path / "tasks/hello/task.toml").write_text(LIMITS)
    test = '[ "$(cat out.txt)" = "$WANTED" ] && echo 0.5 > ../logs/verifier/reward.txt'
    (tmp_path / "tasks/hello/tests/test.sh").write_text(test)
    texts = [bash_call("echo $NAME; ls missing"), bash_call("echo hello > out.txt"), "done"]
    with closing(EnvironmentHost(EnvironmentSpec(f"harbor:{tmp_path}/tasks"), 60.0)) as host:
        for trajectory in check_environment.play(host, [0, 1], {}, texts, 5):
            listed = text_of(trajectory.answers[1])
            assert listed.startswith("a b\n")
            assert listed.endswith("[exit code 2]")
            assert (trajectory.has_ended, trajectory.reward) == (True, 0.5)
        containers = docker / "containers"
        wait_until(lambda: not any(containers.iterdir()))  # the program ends when its input does

    commands = [line.split() for line in (docker / "log").read_text().splitlines()]
    assert [words[0] for words in commands].count("build") == 1
    starts = [words for words in commands if words[0] == "run"]
    assert len(starts) == 2
    assert {"--rm", "-i", "--cpus=2", "--memory=512m", "--network=none", "hello"} <= {*starts[0]}
    of_policy = [words for words in commands if words[-1] == "out.txt" and words[0] == "exec"]
    assert all("--user=agent" in words for words in of_policy)
    assert len(of_policy) == 2


@pytest.mark.parametrize("program", ["docker", "podman"])
def test_docker_and_podman_have_the_options_of_containers(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    options = {
        "ps": ["-q"],
        "build": ["-q"],
        "run": "--rm -i --label --name --cpus --memory --network".split(),
        "exec": ["--env", "--user", "--workdir"],
    }
    for command, names in options.items():
        call = [program, command, "--help"]
        shown = subprocess.run(call, capture_output=True, text=True, check=True).stdout
        words = {word.rstrip(",") for word in shown.split()}
        assert {*names} <= words


def test_a_container_program_that_does_not_work_is_named(tmp_path: Path, docker: Path) -> None:
    harbor_task(tmp_path, "a")
    (tmp_path / "bin/docker").write_text("#!/bin/sh\nexit 1\n")
    spec = EnvironmentSpec(f"harbor:{tmp_path}", {"runtime": "docker"})
    with pytest.raises(ConfigError, match="runtime=docker: `docker ps` does not work"):
        spec.load()
    with pytest.raises(ConfigError, match="runtime=lxc: choose auto, local, docker or podman"):
        replace(spec, kwargs={"runtime": "lxc"}).load()


def test_a_folder_without_harbor_tasks_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder in it is a task"):
        EnvironmentSpec(f"harbor:{tmp_path}").load()
    harbor_task(tmp_path, "a")
    spec = EnvironmentSpec(f"harbor:{tmp_path}", {"runtime": "local"})
    with closing(EnvironmentHost(spec, 20.0)) as host:
        (trajectory,) = check_environment.play(host, [0], {"task": "aa"}, [], 1)
    assert "column 'task' is 'aa', but the folder has only the tasks a. Did" in trajectory.problem
    (tmp_path / "a/tests/test.sh").unlink()
    with pytest.raises(ConfigError, match=r"a has no tests/test\.sh"):
        EnvironmentSpec(f"harbor:{tmp_path}").load()


COINS = """import verifiers.v1 as vf

class CoinData(vf.TaskData):
    side: str

class CoinTask(vf.Task[CoinData]):
    @vf.stop
    async def once(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.side)

class CoinTaskset(vf.Taskset[CoinTask, vf.TasksetConfig]):
    def load(self):
        return [CoinTask(CoinData(idx=0, prompt="Heads or tails?", side="heads"), self.config.task)]

__all__ = ["CoinTaskset"]
"""


def test_a_verifiers_package_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its harness starts a program by `uv`, which it installs if there is none."""
    pytest.importorskip("verifiers.v1")
    (tmp_path / "coins_of_test.py").write_text(COINS)
    monkeypatch.syspath_prepend(tmp_path)
    kwargs = {"agent": {"harness": {"id": "null"}}}
    spec = EnvironmentSpec("verifiers:coins_of_test", kwargs)
    with closing(EnvironmentHost(spec, 60.0)) as host:
        assert host.kinds[""].players == []
        for text, reward in (("heads", 2.0), ("tails", 0.0)):
            (trajectory,) = check_environment.play(host, [0], {}, [text], 3)
            assert trajectory.answers[0]["messages"][-1]["content"] == "Heads or tails?"
            assert (trajectory.has_ended, trajectory.reward) == (True, reward)


def test_a_verifiers_agent_with_another_model_needs_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "coins_of_test.py").write_text(COINS)
    monkeypatch.syspath_prepend(tmp_path)
    kwargs = {"agent": {"harness": {"id": "null"}, "model": "other"}}
    with pytest.raises(ConfigError, match=r"agent\.model needs agent\.client"):
        EnvironmentSpec("verifiers:coins_of_test", kwargs).load()
