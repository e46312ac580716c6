"""`trainer.simulate`: a command for GPUs is checked as on a machine that has them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.runs import overrides
from trainer.config.compose import load_config
from trainer.config.devices import check_offload, run_devices
from trainer.config.schema import TrainerConfig
from trainer.groups.describe import describe_devices
from trainer.launch import NO_ERRORS, run
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from verl_like.errors import ConfigError, VerlLikeError
from workers.config import FSDPConfig

FOR_GPUS = (
    "trainer.device=cuda",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.actor.strategy=fsdp+offload",
    "actor_rollout_ref.actor.fsdp_config.param_offload=true",
)
"""Settings of a command for GPUs, which are rejected without GPUs."""


def config_of(tiny: Path, folder: Path, *settings: str) -> PPOConfig:
    return load_config(overrides(tiny, folder / "run", "trainer.logger=[]", *settings), PPO)


def test_offloading_is_rejected_on_the_cpus_of_one_machine() -> None:
    sections = {"critic": ("fsdp", "critic", FSDPConfig(param_offload=True))}
    check_offload(TrainerConfig(device="cpu", nnodes=2), sections)
    check_offload(TrainerConfig(dry_run=True, simulate="8xH100"), sections)
    with pytest.raises(ConfigError, match="^critic.fsdp_config.param_offload=true: "):
        check_offload(TrainerConfig(device="cpu"), sections)


def test_a_command_for_gpus_is_checked_on_a_machine_without_any(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ("trainer.nnodes=2", "placement=split", "data.train_batch_size=16")
    settings = (*FOR_GPUS, *sizes, "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    run(config_of(tiny_dir, tmp_path, *settings, "trainer.simulate=16xH100"))
    output = " ".join(capsys.readouterr().out.split())  # as wide as the terminal
    assert "Devices: 8 x H100 on each of 2 nodes" in output
    assert "GPUs; " not in output, "all are used"
    assert "fits (73 of 79 GiB usable)" in output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "note"),
    [
        ("trainer.n_gpus_per_node=3", "3 of 8 GPUs; set trainer.n_gpus_per_node=8 to use all"),
        ("resource_pool_spec.global_pool=[2]", "2 of 8 GPUs; raise resource_pool_spec to use more"),
    ],
)
def test_a_note_names_the_key_that_leaves_gpus_unused(
    tiny_dir: Path, tmp_path: Path, setting: str, note: str
) -> None:
    config = config_of(tiny_dir, tmp_path, "trainer.simulate=8xH100", setting)
    devices = describe_devices(config)
    assert devices.startswith("Devices: 8 x H100 on 1 node")
    assert devices.endswith(f"\nnote: this run uses {note}")


def test_a_dry_run_fits_the_passes_to_the_memory(
    tiny_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ("data.max_prompt_length=256", "data.max_response_length=256")
    rollout = (
        "actor_rollout_ref.rollout.name=native",
        "actor_rollout_ref.rollout.kv_cache_gib=0.001",
    )
    settings = (*lengths, *rollout, "trainer.simulate=1x4.01GiB")
    run(config_of(tiny_dir, tmp_path, *settings))
    output = " ".join(capsys.readouterr().out.split())  # as wide as the terminal
    assert ", fits (" in output
    assert "does NOT fit" not in output
    assert NO_ERRORS in output
    default = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192"
    with pytest.raises(ConfigError, match=r"does not fit: .* of 4\.0 GiB usable"):
        run(config_of(tiny_dir, tmp_path, *settings, default))


def test_a_simulated_run_needs_no_weights(tiny_dir: Path, tmp_path: Path) -> None:
    without_weights = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(tiny_dir / "model", tmp_path / "model", ignore=without_weights)
    settings = f"actor_rollout_ref.model.path={tmp_path}/model"
    run(config_of(tiny_dir, tmp_path, settings, "trainer.simulate=1xT4"))
    with pytest.raises(ConfigError, match=r"has a config\.json and no weights"):
        run(config_of(tiny_dir, tmp_path, settings, "trainer.dry_run=true"))


def test_gpus_are_counted_in_all_and_fill_nodes_of_eight(tiny_dir: Path, tmp_path: Path) -> None:
    settings = ("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    for more, nodes in ((), (2, 8)), (("trainer.n_gpus_per_node=4",), (4, 4)):
        config = config_of(tiny_dir, tmp_path, *settings, "trainer.simulate=16xH100", *more)
        assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == nodes


def test_more_gpus_than_simulated_are_rejected(tiny_dir: Path, tmp_path: Path) -> None:
    sizes = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    devices = ("trainer.simulate=4xH100", "trainer.n_gpus_per_node=8")
    with pytest.raises(
        VerlLikeError, match="n_gpus_per_node=8, but --gpus 4xH100 .trainer.simulate. has 4"
    ):
        run(config_of(tiny_dir, tmp_path, *devices, *sizes))


@pytest.mark.parametrize(
    ("simulate", "gib"),
    [
        ("8xH100", 79),
        ("1 x h100-80GB", 79),
        ("2xNVIDIA A100-40GB", 39),
        ("2x40GiB", 40),
        ("2x40", 40),
    ],
)
def test_simulated_gpus_have_a_name_or_a_size(simulate: str, gib: int) -> None:
    gpus = run_devices(TrainerConfig(simulate=simulate))
    assert (gpus.type, gpus.num_gpus, gpus.bytes) == ("cuda", int(simulate[0]), gib * 2**30)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("simulate=H100", "--gpus H100 .trainer.simulate.: write the number and the GPU as 8xH100"),
        ("simulate=8xH10O", "'H10O' is not a GPU .* Did you mean 'H100'"),
        ("simulate=8x0GiB", "'0GiB' is not a GPU whose memory is known"),
        ("simulate=8xH100 trainer.nnodes=3", "does not divide evenly among trainer.nnodes=3"),
        ("simulate=8xH100 trainer.device=cpu", "8xH100 .trainer.simulate. and trainer.device=cpu"),
        ("simulate=8xH100 trainer.dry_run=false", "a run cannot train on simulated GPUs"),
    ],
)
def test_impossible_simulations_are_rejected(
    settings: str, words: str, tiny_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(tiny_dir, tmp_path, *f"trainer.{settings}".split())
