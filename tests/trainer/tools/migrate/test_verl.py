"""verl's command lines: each composes, and every key is described."""

from __future__ import annotations

import os

import pytest

from tests.trainer.tools.migrate.words import composed, migrated, translated_whole
from trainer.tools.migrate.systems import migrate
from verl_like.errors import ConfigError

GRPO = """
set -x
python3 -m verl.trainer.main_ppo --config-path=./config --config-name='ppo_megatron_trainer' \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files="['/data/gsm8k/test.parquet', '/data/math/test.parquet']" \\
    data.train_batch_size=1024 data.return_raw_chat=True data.truncation='error' \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.strategy=fsdp2 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$TP \\
    actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.mode=async \\
    actor_rollout_ref.rollout.n=5 \\
    critic.optim.lr=1e-5 \\
    trainer.max_actor_ckpt_to_keep=3 trainer.device=npu trainer.total_epochs=15 $@
"""


def test_every_key_of_verl_s_script_is_translated_or_described() -> None:
    done = migrated("verl", GRPO)
    config = composed(done)
    policy = config.actor_rollout_ref
    assert (policy.rollout.name, policy.rollout.n, policy.actor.strategy) == ("vllm", 5, "fsdp")
    assert config.data.val_files == ["/data/gsm8k/test.parquet", "/data/math/test.parquet"]
    assert config.trainer.max_ckpt_to_keep == 3
    assert (config.trainer.total_epochs, config.trainer.n_gpus_per_node) == (15, 8)
    assert (policy.actor.ppo_mini_batch_size, policy.rollout.tensor_model_parallel_size) == (256, 2)
    assert any("strategy=fsdp" in line for line in done.renamed)
    assert any(line.startswith("data.return_raw_chat=True: chats") for line in done.always)
    absent = "\n".join(done.absent)
    assert "megatron.tensor_model_parallel_size=$TP" in absent
    assert any(line.startswith("trainer.device npu -> ") for line in done.renamed)
    unread = "\n".join(done.unread)
    assert "critic.optim.lr=1e-5" in unread


def test_settings_need_no_program() -> None:
    text = "data.train_files=x actor_rollout_ref.model.path=y"
    assert migrated("verl", text).settings["actor_rollout_ref.model.path"] == "y"


def test_variables_of_the_script_have_their_values() -> None:
    script = """
    test_files="['$HOME/a.parquet']"
    N=${N:-5}
    estimator=grpo  # no critic
    cut=1
    python3 -m verl.trainer.main_ppo algorithm.adv_estimator=$estimator data.train_files=x \\
        data.val_files="$test_files" actor_rollout_ref.model.path=y critic.optim.lr=1e-5 \\
        actor_rollout_ref.rollout.n=$((N * 2)) trainer.test_freq=5 trainer.save_freq=$SAVE \\
        actor_rollout_ref.actor.ulysses_sequence_parallel_size=$cut
    """
    done = migrated("verl", script)
    assert done.settings["data.val_files"] == f"['{os.environ['HOME']}/a.parquet']"
    assert done.settings["trainer.test_freq"] == "5"
    assert done.settings["actor_rollout_ref.rollout.n"] == "10"
    assert done.settings["trainer.save_freq"] == "$SAVE"
    assert '"trainer.save_freq=$SAVE"' in done.command()
    assert not done.absent
    assert [line.split("=")[0] for line in done.unread] == ["critic.optim.lr"]


SPLIT = """
set -x
python3 main_ppo_split.py \\
    data.train_files=$HOME/data/gsm8k/train.parquet data.train_batch_size=1024 \\
    actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 actor_rollout_ref.rollout.name=vllm \\
    critic.model.path=deepseek-ai/deepseek-llm-7b-chat critic.ppo_micro_batch_size_per_gpu=8
"""


def test_the_example_of_split_placement_keeps_its_pools_and_passes() -> None:
    done = migrated("verl", SPLIT)
    config = composed(done)
    assert config.resource_pool_spec.keys() == {"actor_rollout_ref_pool", "critic_pool"}
    actor = config.actor_rollout_ref.actor
    assert (actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz) == (8, False)
    assert config.critic.ppo_micro_batch_size_per_gpu == 8


UV = """
RAY=(ray_kwargs.ray_init.runtime_env.py_executable="uv -v run --frozen --extra vllm")
uv -v run --frozen --all-packages --extra vllm --extra fsdp python3 -m verl.trainer.main_ppo \\
    data.train_files=x actor_rollout_ref.model.path=y "${RAY[@]}" $MORE
"""


def test_the_python_of_verl_s_workers_is_left_out() -> None:
    done = migrated("verl", f"MORE=\n{UV}")
    assert not any("runtime_env" in key for key in done.settings)
    assert any("workers run in the driver's Python" in line for line in done.always)


def test_an_error_names_the_whole_program_after_a_launcher() -> None:
    with pytest.raises(ConfigError, match=r"(?m)^python3 -m verl\.trainer\.main_ppo data"):
        migrate("verl", f"MORE=a.b=1\n{UV}")


def test_only_a_command_without_a_reward_is_called_incomplete() -> None:
    trl = "trl grpo --model_name_or_path m --dataset_name a/b"
    for system, line in (("trl", trl), ("openrlhf", "--pretrain x --prompt_data y")):
        first = translated_whole(system, line).report().splitlines()[0]
        assert first.startswith("# incomplete: the command names no reward")
    for system, line in (
        ("trl", f"{trl} --reward_model_name_or_path r"),
        ("verl", "main_ppo data.train_files=x actor_rollout_ref.model.path=y"),
    ):
        assert translated_whole(system, line).report().startswith("verl-like ppo")


@pytest.mark.parametrize(
    ("gpus", "size", "sp", "ours"),
    [(16, 16, 2, 8), (16, 8, 2, 4), (8, 32, 1, -1), (8, 4, 1, 4), (8, -1, 4, -1)],
)
def test_weights_are_sharded_over_as_many_ranks_as_in_verl(
    gpus: int, size: int, sp: int, ours: int
) -> None:
    actor = "actor_rollout_ref.actor.fsdp_config"
    config = composed(
        translated_whole(
            "verl",
            "python3 -m verl.trainer.main_ppo data.train_files=x actor_rollout_ref.model.path=y "
            f"trainer.n_gpus_per_node={gpus} {actor}.fsdp_size={size} "
            f"{actor}.ulysses_sequence_parallel_size={sp}",
        )
    )
    assert config.actor_rollout_ref.actor.fsdp_config["fsdp_size"] == ours


def test_the_patch_size_of_images_is_the_processors() -> None:
    command = "data.train_files=x actor_rollout_ref.model.path=y data.image_patch_size=16"
    assert any("image_patch_size=16: " in line for line in migrated("verl", command).always)


def test_fsdp_turbo_becomes_fsdp_and_its_axes() -> None:
    turbo = "actor_rollout_ref.actor.fsdp_config.turbo_config"
    done = migrated(
        "verl",
        "data.train_files=x actor_rollout_ref.model.path=y "
        "actor_rollout_ref.actor.strategy=fsdp_turbo "
        f"{turbo}.memory.recompute=True {turbo}.distributed.ulysses_parallel_size=2",
    )
    actor = composed(done).actor_rollout_ref.actor
    assert (actor.strategy, actor.parallel) == ("fsdp", {"sp": 2})
    assert any("recompute=True: FSDP and `parallel`" in line for line in done.absent)


DYNAMIC = "actor_rollout_ref.actor.use_dynamic_bsz=True"


@pytest.mark.parametrize("rows", ["path=y data.image_key=images", "path=Qwen/Qwen3-Next-80B-A3B"])
def test_rows_with_images_or_of_qwen3_next_are_not_split_over_ranks(rows: str) -> None:
    actor = "actor_rollout_ref.actor.fsdp_config"
    sizes = f"{actor}.fsdp_size=8 {actor}.ulysses_sequence_parallel_size=2 {DYNAMIC}"
    done = migrated("verl", f"data.train_files=x actor_rollout_ref.model.{rows} {sizes}")
    policy = composed(done).actor_rollout_ref
    assert (policy.actor.parallel["sp"], policy.actor.fsdp_config["fsdp_size"]) == (1, 8)
    assert policy.actor.ppo_max_token_len_per_gpu == 2 * 16384
    assert any("are not split over ranks" in line for line in done.absent)
