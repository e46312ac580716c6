"""The unmodified `tinker` SDK against a server; `tests/run_tinker.sh` makes its environment."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.trainer.serve.clients import config_of, served

METHODS: dict[str, str] = json.loads((ROOT / "docs/data/tinker_methods.json").read_text())
PYTHON = Path(os.environ.get("TINKER_PYTHON", ROOT / ".venv-tinker/bin/python"))
needs_sdk = [
    pytest.mark.tinker,
    pytest.mark.skipif(
        not PYTHON.is_file(), reason=f"no {PYTHON}: tests/run_tinker.sh makes it, with the SDK"
    ),
]


def run_sdk(file: str, *arguments: str) -> str:
    """Return the output of a script in the environment of the SDK."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    environment.pop("PYTHONPATH", None)
    command = [str(PYTHON), "-W", "error::FutureWarning", str(ROOT / file), *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def url_and_model(tiny_dir: Path, tmp_path: Path) -> Any:
    with served(config_of(tiny_dir / "model", tmp_path)) as (work_queue, url):
        yield url, work_queue.base_model


class TestSDK:
    pytestmark = needs_sdk

    def test_every_method_does_what_the_table_says(self, url_and_model: tuple[str, str]) -> None:
        printed = run_sdk("tests/trainer/serve/sdk_probe.py", *url_and_model)
        probed = json.loads(printed.splitlines()[-1])
        assert sorted(probed["methods"]) == sorted(METHODS), "the SDK has other methods"
        wrong = {
            name: probed["results"].get(name, "not called")
            for name, status in METHODS.items()
            if (probed["results"].get(name) == "works") != (status == "works")
        }
        assert wrong == {}

    def test_the_example_runs(self, url_and_model: tuple[str, str]) -> None:
        url, model = url_and_model
        arguments = ("--url", url, "--model", model, "--steps", "2")
        steps = run_sdk("examples/serve/grpo.py", *arguments).splitlines()
        assert [line.split(":")[0] for line in steps] == ["step 0", "step 1", "saved"]

    def test_the_sdk_reads_a_skipped_step_and_the_likeliest_tokens(
        self, url_and_model: tuple[str, str]
    ) -> None:
        printed = run_sdk("tests/trainer/serve/sdk_edges.py", *url_and_model)
        numbers = json.loads(printed.splitlines()[-1])
        assert float(numbers["skipped"]["skipped_steps"]) == 1
        assert not math.isfinite(float(numbers["skipped"]["grad_norm"]))
        assert numbers["first"] is None
        assert numbers["loss"] == pytest.approx(numbers["expected"], rel=1e-4)

    def test_the_sdk_trains_a_critic(self, tiny_dir: Path, tmp_path: Path) -> None:
        keys = ("placement=split", "role_mapping.critic=values", "resource_pool_spec.values=[1]")
        with served(config_of(tiny_dir / "model", tmp_path, *keys)) as (_, url):
            printed = json.loads(run_sdk("tests/trainer/serve/sdk_critic.py", url))
        errors = printed["errors"]
        assert errors[0] == 1.0, "values begin at 0"
        assert errors[-1] < 0.3
        assert printed["is_equal"], "a loaded critic has other values"


def test_most_methods_work_and_others_have_a_reason() -> None:
    assert len(METHODS) == 56
    assert sum(status == "works" for status in METHODS.values()) >= 45
    assert all(status == "works" or status.startswith("rejected: ") for status in METHODS.values())
