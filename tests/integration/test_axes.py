"""Models whose ranks share tokens or matrices train to one process's numbers, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import numbers, overrides
from trainer import load_config, run

POLICY = "actor_rollout_ref"
OF_TWO = {
    "actor, critic and reference": (f"{POLICY}.actor", f"{POLICY}.ref", "critic"),
    "the critic alone": ("critic",),
}


def two_steps(tiny: Path, folder: Path, *more: str) -> list[dict[str, float]]:
    """Of PPO on processes of this machine."""
    where = "trainer.backend=local", "placement=colocate", "trainer.total_training_steps=2"
    run(load_config(overrides(tiny, folder, *where, *more)))
    return numbers(folder)


@pytest.fixture(scope="module")
def of_one(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The numbers of one process."""
    return two_steps(tiny_dir, tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("sections", OF_TWO.values(), ids=OF_TWO)
def test_two_ranks_that_share_tokens_follow_one_process(
    sections: tuple[str, ...], of_one: list[dict[str, float]], tiny_dir: Path, tmp_path: Path
) -> None:
    axes = [f"{section}.parallel.sp=2" for section in sections]
    found = two_steps(tiny_dir, tmp_path, "trainer.n_gpus_per_node=2", *axes)
    for own, expected in zip(found, of_one, strict=True):
        shared = {name for name in expected.keys() & own.keys() if "seqlen" not in name}
        assert {"actor/pg_loss", "critic/vf_loss", "actor/grad_norm"} <= shared
        for name in shared:
            assert own[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
