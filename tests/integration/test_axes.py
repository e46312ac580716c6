"""Models whose ranks share tokens, matrices or experts follow one process, step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import numbers, overrides, with_experts
from trainer import load_config, run
from verl_like.errors import ConfigError
from workers.config import ParallelConfig
from workers.training.parts.load_balancing import check_routers

POLICY = "actor_rollout_ref"
SECTIONS = (f"{POLICY}.actor", f"{POLICY}.ref", "critic")
OF_TWO = ["pp=2", "sp=2", "tp=2"]
"""Axes of actor, reference and critic on two ranks."""


def two_steps(tiny: Path, folder: Path, *more: str) -> list[dict[str, float]]:
    """Run two PPO steps on processes of this machine."""
    where = "trainer.backend=local", "placement=colocate", "trainer.total_training_steps=2"
    run(load_config(overrides(tiny, folder, *where, *more)))
    return numbers(folder)


def on_two(tiny: Path, folder: Path, axes: list[str], *more: str) -> list[dict[str, float]]:
    """Run two steps of actor, reference and critic with these axes on two ranks."""
    set_axes = [f"{section}.parallel.{axis}" for section, axis in zip(SECTIONS, axes, strict=True)]
    return two_steps(tiny, folder, "trainer.n_gpus_per_node=2", *set_axes, *more)


def assert_follows(found: list[dict[str, float]], of_one: list[dict[str, float]]) -> None:
    """Compare every number of every step, except those about the distribution of rows."""
    for own, expected in zip(found, of_one, strict=True):
        shared = {name for name in expected.keys() & own.keys() if "seqlen" not in name}
        assert {"actor/pg_loss", "critic/vf_loss", "actor/grad_norm"} <= shared
        for name in shared:
            assert own[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


def test_two_ranks_that_share_a_model_follow_one_process(tiny_dir: Path, tmp_path: Path) -> None:
    of_one = two_steps(tiny_dir, tmp_path / "one")
    assert_follows(on_two(tiny_dir, tmp_path / "two", OF_TWO), of_one)


@pytest.mark.slow
def test_two_ranks_that_share_experts_follow_one_process(tiny_dir: Path, tmp_path: Path) -> None:
    model = with_experts(tiny_dir, tmp_path / "model")
    more = (model, f"critic.model.path={tmp_path / 'model'}")
    of_one = two_steps(tiny_dir, tmp_path / "one", *more)
    assert_follows(on_two(tiny_dir, tmp_path / "two", ["ep=2"] * 3, *more), of_one)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["ep=3"], "actor.*ep=3 does not divide the 4 ranks .*nearest that do: 2 or 4"),
        (["ep=4", "shard=2"], "does not divide the 2 ranks .*nearest that do: 2"),
    ],
)
def test_ranks_that_cannot_share_experts_are_refused(
    axes: list[str], message: str, tiny_dir: Path, tmp_path: Path
) -> None:
    asked = [f"{POLICY}.actor.parallel.{axis}" for axis in axes]
    with pytest.raises(ConfigError, match=message):
        two_steps(tiny_dir, tmp_path, "trainer.n_gpus_per_node=4", *asked)


def test_ranks_without_a_pass_each_are_refused(tiny_dir: Path, tmp_path: Path) -> None:
    actor = f"{POLICY}.actor"
    two = "trainer.n_gpus_per_node=2", f"{actor}.parallel.pp=2"
    by_rows = f"{actor}.use_dynamic_bsz=false", f"{actor}.ppo_micro_batch_size_per_gpu=1000"
    with pytest.raises(
        ConfigError, match=f"pp=2 needs at least 2 passes .*set {actor}.ppo_micro_.* or less"
    ):
        two_steps(tiny_dir, tmp_path, *two, *by_rows)
    one_row = f"{actor}.ppo_mini_batch_size=1", f"{POLICY}.rollout.n=1"
    with pytest.raises(
        ConfigError, match="which makes 1 pass; set .*pp=1, or raise .*ppo_mini_batch_size"
    ):
        two_steps(tiny_dir, tmp_path, *two, *one_row)


def test_routers_of_interleaved_stages_are_refused() -> None:
    interleaved = ParallelConfig(pp=2, pp_schedule="interleaved")
    with pytest.raises(ConfigError, match="two pipeline stages per rank.*pp_schedule=1f1b"):
        check_routers("", interleaved)


def test_a_model_whose_experts_cannot_be_shared_is_refused(tiny_dir: Path, tmp_path: Path) -> None:
    four = "trainer.n_gpus_per_node=8", f"{POLICY}.actor.parallel.ep=8"
    with pytest.raises(ConfigError, match="role 'actor': .*ep=8: .* has no routed experts"):
        two_steps(tiny_dir, tmp_path, *four)
    model = with_experts(tiny_dir, tmp_path / "model")
    with pytest.raises(ConfigError, match="role 'actor': .*ep=8 does not divide the 4 experts of"):
        two_steps(tiny_dir, tmp_path, model, *four)
    with pytest.raises(ConfigError, match="strategy=ddp .* keeps the whole model on every rank"):
        two_steps(tiny_dir, tmp_path, model, *four, f"{POLICY}.actor.strategy=ddp")
