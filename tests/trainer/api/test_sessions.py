"""A run from a script without a `__main__` guard, and from a cell in an event loop.

Worker processes run no script again either: `tests/verl_like/process/test_child.py`.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from tests.forked import run_program

CELL = """
print("the session begins")
from trainer import PPO

table = {"a": 1.0}


def score(prompt, response, **row):
    return response.count(row["letter"]) * table["a"]


run = PPO(
    MODEL, [{"prompt": "say a", "letter": "a"}] * 4, score,
    data={"train_batch_size": 4, "max_prompt_length": 16, "max_response_length": 8},
    actor_rollout_ref={"actor": {"ppo_mini_batch_size": 4}, "rollout": {"n": 2}},
    logger=[], PLACES
)
print("failed:", run.fit(steps=1).metrics[0]["reward/num_failed"])
"""
ENVIRONMENT_CELL = """
print("the session begins")
from verl_like import GRPO, Environment, Observation, TrajectoryEnd

letters = "ab"


class Guess(Environment):
    def reset(self, row, rng):
        self.secret = letters[rng.integers(2)]
        return "Guess my letter"

    def step(self, text):
        return TrajectoryEnd(0.5) if letters else Observation("?")


run = GRPO(
    MODEL, 4, environment={"path": Guess, "max_tokens_per_turn": 1}, batch_size=4, n=2,
    max_prompt_length=32, max_response_length=8,
    logger=[], PLACES
)
print("score:", run.fit(steps=1).metrics[0]["critic/score/mean"])
"""


def script_of(cell: str) -> str:
    """Return a script that runs a cell as a notebook does, in an event loop."""
    return f"""
import asyncio

async def in_an_event_loop():
    exec({cell!r}, {{"__name__": "__main__", "MODEL": "MODEL"}})

asyncio.run(in_an_event_loop())
"""


PRINTS_NOTHING = """
from pathlib import Path
from trainer import SFT

run = SFT(MODEL, ["a b c"] * 4, data={"train_batch_size": 4, "max_length": 16}, save_to="run")
Path("steps").write_text(str(len(run.fit(steps=1).metrics)))
"""


def run_script() -> None:
    runpy.run_path(sys.argv[1], run_name="__main__")


def run_on_a_full_disk() -> None:
    """Run `python SCRIPT > /dev/full`."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    run_script()


@pytest.mark.parametrize(
    "places", ['algorithm="grpo"', pytest.param('placement="split"', marks=pytest.mark.ray)]
)
@pytest.mark.parametrize(
    ("cell", "printed"), [(CELL, "failed: 0.0"), (ENVIRONMENT_CELL, "score: 0.5")]
)
def test_a_script_runs_once_and_its_functions_and_classes_are_found(
    cell: str,
    printed: str,
    places: str,
    tiny_dir: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    cluster = {}
    if "split" in places:
        import ray  # not above: the script's process would load it without the cluster's settings

        request.getfixturevalue("ray_session")
        cluster["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    script = tmp_path / "session.py"
    text = script_of(cell).replace('"MODEL": "MODEL"', f'"MODEL": "{tiny_dir}/model"')
    script.write_text(text.replace("PLACES", places))
    done = run_program(run_script, str(script), folder=tmp_path, OMP_NUM_THREADS="1", **cluster)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the session begins") == 1
    assert printed in done.stdout


@pytest.mark.long
def test_an_environment_of_a_notebook_trains(tiny_dir: Path, tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    cells = [f"MODEL = {str(tiny_dir / 'model')!r}", ENVIRONMENT_CELL.replace("PLACES", "")]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    where = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where)
    client.execute(env={**os.environ, "PATH": path})
    printed = [output.get("text", "") for output in notebook.cells[1].outputs]
    assert "score: 0.5" in "".join(printed)


def test_a_run_continues_on_a_full_disk_for_its_output(tiny_dir: Path, tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(PRINTS_NOTHING.replace("MODEL", f'"{tiny_dir}/model"'))
    done = run_program(run_on_a_full_disk, str(script), folder=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "steps").read_text() == "1"
