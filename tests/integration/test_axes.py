"""Models whose ranks share tokens, matrices or experts give the numbers of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.published import write_published
from tests.integration.runs import POLICY_ALONE, assert_same_numbers, two_steps, with_experts
from verl_like.errors import ConfigError
from workers.config import ParallelConfig
from workers.training.model_parts.load_balancing import check_routers

POLICY = "actor_rollout_ref"
SECTIONS = (f"{POLICY}.actor", f"{POLICY}.ref", "critic")
OF_TWO = ["pp=2", "sp=2", "tp=2"]
"""Axes of actor, reference and critic on two ranks."""
SLOW = pytest.mark.slow
REQUIRED = ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm")


def on_two(tiny: Path, folder: Path, axes: list[str], *more: str) -> list[dict[str, float]]:
    """Run two steps of actor, reference and critic with these axes on two ranks."""
    set_axes = [f"{section}.parallel.{axis}" for section, axis in zip(SECTIONS, axes, strict=True)]
    return two_steps(tiny, folder, "trainer.n_gpus_per_node=2", *set_axes, *more)


def with_tower(case: str, tiny: Path, folder: Path) -> tuple[str, ...]:
    """Write a published class with a vision tower; return the keys of a run on it."""
    write_published(case, tiny, folder)
    return (
        *POLICY_ALONE,
        f"{POLICY}.model.path={folder}/model",
        f"{POLICY}.rollout.name=hf",  # native does not decode Gemma 3
    )


@pytest.mark.long
def test_two_ranks_that_share_a_model_equal_one_process(tiny_dir: Path, tmp_path: Path) -> None:
    of_one = two_steps(tiny_dir, tmp_path / "one")
    assert_same_numbers(on_two(tiny_dir, tmp_path / "two", OF_TWO), of_one, *REQUIRED)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "axis"),
    [
        pytest.param(case, axis, marks=() if (case, axis) == ("gemma3", "tp=2") else SLOW)
        for case in ("gemma3", "qwen2_vl")
        for axis in ("shard=2", "tp=2", "sp=2")
    ],
)
def test_two_ranks_that_share_a_model_with_a_tower_equal_one_process(
    case: str, axis: str, tiny_dir: Path, tmp_path: Path
) -> None:
    keys = with_tower(case, tiny_dir, tmp_path)
    two = "trainer.n_gpus_per_node=2", f"{POLICY}.actor.parallel.{axis}"
    of_one = two_steps(tiny_dir, tmp_path / "one", *keys)
    steps = two_steps(tiny_dir, tmp_path / "two", *keys, *two)
    assert_same_numbers(steps, of_one, "actor/pg_loss", "actor/grad_norm")


def test_stages_of_a_model_with_a_tower_are_rejected(tiny_dir: Path, tmp_path: Path) -> None:
    keys = with_tower("gemma3", tiny_dir, tmp_path)
    two = "trainer.n_gpus_per_node=2", f"{POLICY}.actor.parallel.pp=2"
    with pytest.raises(ConfigError, match="pp=2: model type gemma3 cannot be split into stages"):
        two_steps(tiny_dir, tmp_path / "two", *keys, *two)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (["ep=3"], "actor.*ep=3 does not divide the 4 ranks .*nearest that do: 2 or 4"),
        (["ep=4", "shard=2"], "does not divide the 2 ranks .*nearest that do: 2"),
    ],
)
def test_an_ep_size_that_does_not_divide_the_ranks_is_rejected(
    axes: list[str], message: str, tiny_dir: Path, tmp_path: Path
) -> None:
    settings = [f"{POLICY}.actor.parallel.{axis}" for axis in axes]
    with pytest.raises(ConfigError, match=message):
        two_steps(tiny_dir, tmp_path, "trainer.n_gpus_per_node=4", *settings)


def test_a_pipeline_with_fewer_passes_than_stages_is_rejected(
    tiny_dir: Path, tmp_path: Path
) -> None:
    actor = f"{POLICY}.actor"
    two = "trainer.n_gpus_per_node=2", f"{actor}.parallel.pp=2"
    by_rows = f"{actor}.use_dynamic_bsz=false", f"{actor}.ppo_micro_batch_size_per_gpu=1000"
    with pytest.raises(
        ConfigError, match=f"pp=2 needs at least 2 passes .*set {actor}.ppo_micro_.* or less"
    ):
        two_steps(tiny_dir, tmp_path, *two, *by_rows)
    one_row = f"{actor}.ppo_mini_batch_size=1", f"{POLICY}.rollout.n=1"
    with pytest.raises(
        ConfigError, match="which makes 1 pass; lower .*pp, or raise .*ppo_mini_batch_size"
    ):
        two_steps(tiny_dir, tmp_path, *two, *one_row)


def test_routers_in_interleaved_stages_are_rejected() -> None:
    interleaved = ParallelConfig(pp=2, pp_schedule="interleaved")
    with pytest.raises(ConfigError, match="two pipeline stages per rank.*pp_schedule=1f1b"):
        check_routers("", interleaved)


def test_a_model_whose_experts_cannot_be_distributed_is_rejected(
    tiny_dir: Path, tmp_path: Path
) -> None:
    eight = "trainer.n_gpus_per_node=8", f"{POLICY}.actor.parallel.ep=8"
    with pytest.raises(ConfigError, match="role 'actor': .*ep=8: .* has no routed experts"):
        two_steps(tiny_dir, tmp_path, *eight)
    model = with_experts(tiny_dir, tmp_path / "model")
    with pytest.raises(ConfigError, match="role 'actor': .*ep=8 does not divide the 4 experts of"):
        two_steps(tiny_dir, tmp_path, model, *eight)
    with pytest.raises(ConfigError, match="strategy=ddp .* keeps the whole model on every rank"):
        two_steps(tiny_dir, tmp_path, model, *eight, f"{POLICY}.actor.strategy=ddp")
