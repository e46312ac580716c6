"""The modules that processes of tests are forked with are there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.conftest import PRELOADED
from tests.forked import run_program


@pytest.mark.parametrize("name", PRELOADED)
def test_a_preloaded_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)


def loaded() -> list[str]:
    return [name for name in PRELOADED if name in sys.modules]


def print_loaded() -> None:
    """What runs in the process of the test below."""
    print(*loaded())
    sys.exit(f"in {Path.cwd()} with {sys.argv[1:]}")


def test_a_forked_program_has_them_and_its_output_status_and_arguments_are_its_own(
    tmp_path: Path,
) -> None:
    done = run_program(print_loaded, "one", folder=tmp_path)
    assert done.stdout.split() == PRELOADED
    assert (done.returncode, done.stderr) == (1, f"in {tmp_path} with ['one']\n")


@pytest.mark.ray
def test_a_worker_of_the_shared_cluster_has_them_too(ray_session: None) -> None:
    import ray

    assert ray.get(ray.remote(num_cpus=0)(loaded).remote()) == PRELOADED
