"""A checkpoint of ranks in any layout resumes on ranks in any other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration import axes
from tests.workers import distributed
from tests.workers.training.test_sequence_ranks import saved
from tests.workers.training.test_tensor_ranks import State, actor_over, state_of, updated_and_saved
from workers.config import ParallelConfig

LAYOUTS = {"one process": axes.Layout(1, ()), **axes.LAYOUTS}
del LAYOUTS["ep x tp"]
Saved = dict[str, tuple[State, str]]


def over_ranks(layout: str, function: Any, folder: Path, *args: Any) -> list[Any]:
    num_ranks, of_ranks, _ = LAYOUTS[layout]
    pairs = (axis.split("=") for axis in of_ranks)
    parallel = ParallelConfig(**{name: int(size) for name, size in pairs})
    return distributed.run(num_ranks, function, folder, parallel, *args, deadline_s=150)


def saved_as(folder: Path, parallel: ParallelConfig, name: str) -> tuple[State, str]:
    return updated_and_saved(folder / name, parallel, 0)


def resumed_from(folder: Path, parallel: ParallelConfig, names: list[str]) -> Saved:
    """Return an actor's state and hash after a resume from each of these checkpoints."""
    actor, found = actor_over(folder, parallel), {}
    for name in names:
        actor.load_checkpoint(str(folder / name / "first"))
        found[name] = state_of(actor), actor.weights_checksum()
    return found


def whole(of_ranks: list[tuple[State, str]]) -> tuple[State, str]:
    """Merge the weights of ranks: stages have different ones."""
    (checksum,) = {checksum for _, checksum in of_ranks}
    found: State = {}
    for state, _ in of_ranks:
        for name, tensor in state.items():
            assert found.setdefault(name, tensor).equal(tensor), name
    return found, checksum


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Saved]:
    """A checkpoint of every layout after an update, in folders of their names."""
    folder = saved(tmp_path_factory.mktemp("layouts"), "qwen3-moe")
    for name in LAYOUTS:
        (folder / name).mkdir()
        (folder / name / "model").symlink_to(folder / "model")
    return folder, {name: whole(over_ranks(name, saved_as, folder, name)) for name in LAYOUTS}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_resumes_from_all_others(layout: str, checkpoints: tuple[Path, Saved]) -> None:
    folder, expected = checkpoints
    of_ranks = over_ranks(layout, resumed_from, folder, [*expected])
    for name, (state, checksum) in expected.items():
        resumed, own = whole([found[name] for found in of_ranks])
        assert own == checksum
        assert resumed.keys() == state.keys()
        assert all(resumed[key].equal(tensor) for key, tensor in state.items())
