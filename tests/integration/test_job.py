"""A run submitted to a cluster as a job, as in `docs/cluster.md`: its end and its output."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import lines, overrides

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"
MY_CRITIC = (
    "from workers.roles.critic import CriticWorker\n\nclass MyCritic(CriticWorker):\n    pass\n"
)
MY_REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 0.25\n"
)


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


@pytest.fixture
def job_environment(forked_python: Path) -> Iterator[dict[str, str]]:
    """A local Ray head, and the environment that submits jobs to it. Jobs' `python` is forked."""
    folder = tempfile.mkdtemp(prefix="ray")  # sockets need a short path
    dashboard, agent, client = free_port(), free_port(), free_port()
    binaries = Path(sys.executable).parent
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "PATH": os.pathsep.join([str(forked_python.parent), str(binaries), os.environ["PATH"]]),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "of-this-test"}
    command = [
        binaries / "ray", "start", "--head", "--block", "--num-cpus=2", "--port=0",
        f"--temp-dir={folder}", f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}",
    ]  # fmt: skip
    with Path(folder, "head.log").open("wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield environment | {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    finally:
        head.terminate()
        head.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def submit(environment: dict[str, str], folder: Path, *words: str) -> str:
    """Return the output of `ray job submit ...`."""
    command = [shutil.which("ray", path=environment["PATH"]), "job", "submit", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    return done.stdout + done.stderr


def submit_at_start(environment: dict[str, str], **job: str) -> None:
    """Submit a job as soon as the head and its agent take jobs."""
    deadline = time.monotonic() + 120
    while True:
        try:
            request(environment, "", **job)
        except OSError:
            assert time.monotonic() < deadline, "the head takes no jobs"
            time.sleep(0.1)
        else:
            return


def request(environment: dict[str, str], path: str, **job: str) -> Any:
    """Return the head's answer about its jobs, without a `ray job` process for each question.

    With a `job`, submit it.
    """
    message = urllib.request.Request(
        f"{environment['RAY_API_SERVER_ADDRESS']}/api/jobs/{path}",
        json.dumps(job).encode() if job else None,
        {
            "Authorization": f"Bearer {environment['RAY_AUTH_TOKEN']}",
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(message, timeout=60) as response:
        return json.load(response)


@pytest.mark.long
@pytest.mark.ray
def test_a_submitted_job_succeeds_or_fails_and_its_log_has_the_output(
    job_environment: dict[str, str], tiny_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "my_critic.py").write_text(MY_CRITIC, encoding="utf-8")
    (tmp_path / "my_reward.py").write_text(MY_REWARD, encoding="utf-8")
    (written,) = re.findall(r"^ray (job submit .*) \.\.\.$", PAGE.read_text(encoding="utf-8"), re.M)
    mine = overrides(
        tiny_dir,
        tmp_path / "run",
        "+role_workers.critic=my_critic.MyCritic",
        "trainer.logger=[console]",
    )
    settings = [*shlex.split(written)[2:], *mine, "trainer.total_training_steps=1"]

    command = shlex.join([*settings[settings.index("--") + 1 :], "data.tran_files=x"])
    submit_at_start(job_environment, entrypoint=command, submission_id="bad")
    shown = submit(job_environment, tmp_path, "--submission-id=good", *settings)
    assert "Job 'good' succeeded" in shown, shown
    good = request(job_environment, "good/logs")["logs"]
    assert re.search(r"^step 1/1  reward 0.25 ", good, re.M)
    assert lines(tmp_path / "run")[0]["critic/score/mean"] == 0.25

    submitted = [job for job in request(job_environment, "") if job["submission_id"]]
    ended = {job["submission_id"]: job["status"] for job in submitted}
    assert ended == {"good": "SUCCEEDED", "bad": "FAILED"}
    log = request(job_environment, "bad/logs")["logs"].splitlines()
    assert log[-1].startswith("error: there is no key 'data.tran_files'"), log
