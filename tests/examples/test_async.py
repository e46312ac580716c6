"""Generators and trainers: the ledger of every topology balances."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import ray

from tests.examples.scripts import EXAMPLES, bash


def ledger_of(shown: str) -> dict[str, list[int]]:
    """Return the final ledger: generated, trained, queued, dropped and in flight per generator."""
    rows = re.findall(r"^(generator \d)((?: +\d+){5})$", shown, re.M)
    return {generator: [int(number) for number in numbers.split()] for generator, numbers in rows}


@pytest.mark.parametrize(
    ("topology", "backend"),
    [
        pytest.param("1m1t", "ray", marks=pytest.mark.ray),
        pytest.param("2m1t", "local", marks=pytest.mark.example),
        pytest.param("1m2t", "local", marks=pytest.mark.example),
        pytest.param("2m2t", "ray", marks=pytest.mark.ray),
    ],
)
def test_trainers_train_on_all_samples_of_the_generators(
    topology: str,
    backend: str,
    tmp_path: Path,
    tiny_dir: Path,
    forked_python: Path,
    request: pytest.FixtureRequest,
) -> None:
    if topology != "1m1t":  # which makes its own
        (tmp_path / "tiny").symlink_to(tiny_dir)
    settings = ["trainer.total_training_steps=2"]
    if topology == "2m2t":  # where 1m1t starts a cluster, this one joins that of the tests
        request.getfixturevalue("ray_session")
        settings += [f"ray.address='{ray.get_runtime_context().gcs_address}'"]
        settings += ["cpus_per_process=0.25"]
    script = EXAMPLES / "async" / f"{topology}.sh"
    done = bash(script, *settings, RUN_DIR=tmp_path, PYTHON=forked_python, BACKEND=backend)
    assert done.returncode == 0, done.stdout + done.stderr

    num_generators, num_trainers, num_samples = int(topology[0]), int(topology[2]), 2 * 16 * 4
    ledger = ledger_of(done.stdout)
    assert set(ledger) <= {f"generator {generator}" for generator in range(num_generators)}
    assert sum(generated for generated, *_ in ledger.values()) == num_samples
    assert all(row == [row[0], row[0], 0, 0, 0] for row in ledger.values())

    trained = json.loads((tmp_path / "async.json").read_text())["ledger"]["trainers"]
    share = num_samples // num_trainers
    assert trained == {str(rank): share for rank in range(num_trainers)}
    if topology == "2m2t":
        assert ledger == {
            "generator 0": [share, share, 0, 0, 0],
            "generator 1": [share, share, 0, 0, 0],
        }
