"""OpenRLHF's command lines: each composes, and every flag is described."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.tools.migrate.words import (
    composed,
    migrated,
    notes,
    translated,
    translated_whole,
)
from trainer.cli.main import main
from workers.config import critic_optim

FLAGS = Path(__file__).with_name("openrlhf_flags.txt").read_text(encoding="utf-8").splitlines()
"""Every flag of `train_ppo_ray` in both generations, with a value."""

COLOCATED_PAIRS = """
set -x
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json='{"working_dir": "/openrlhf"}' \\
   -- python3 -m openrlhf.cli.train_ppo_ray \\
   --ref_num_nodes 1 --ref_num_gpus_per_node 2 \\
   --reward_num_nodes 1 --reward_num_gpus_per_node 2 \\
   --critic_num_nodes 1 --critic_num_gpus_per_node 2 \\
   --actor_num_nodes 1 --actor_num_gpus_per_node 2 \\
   --vllm_num_engines 4 --vllm_tensor_parallel_size 2 \\
   --colocate_critic_reward --colocate_actor_ref \\
   --pretrain policy --reward_pretrain rm \\
   --micro_train_batch_size 8 --train_batch_size 128 \\
   --micro_rollout_batch_size 16 --rollout_batch_size 1024 \\
   --prompt_max_len 1024 --generate_max_len 512 --zero_stage 3 --bf16 \\
   --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 \\
   --prompt_data prompts.jsonl --input_key context_messages --apply_chat_template \\
   --normalize_reward --packing_samples --adam_offload --gradient_checkpointing
"""
GRPO = """
python3 -m openrlhf.cli.train_ppo_ray \\
   --actor.model_name_or_path "$MODEL" --data.prompt_dataset math.jsonl \\
   --data.input_key prompt --reward.remote_url reward_func.py \\
   --ref.num_nodes 1 --ref.num_gpus_per_node 8 --actor.num_nodes 1 --actor.num_gpus_per_node 8 \\
   --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.colocate_all --vllm.enforce_eager \\
   --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 \\
   --algo.kl.init_coef 1e-3 --actor.eps_clip_low_high 0.2 0.27 --actor.adam.lr=5e-7 \\
   --rollout.n_samples_per_prompt 8 --rollout.batch_size 128 --train.batch_size 1024 \\
   --train.dynamic_batch_enable --train.max_tokens_per_gpu 16192 \\
   --data.max_len 4096 --rollout.max_new_tokens 3072 --algo.dynamic_filtering_enable
"""


def test_colocated_pairs_share_pools_and_have_openrlhf_s_defaults() -> None:
    config = composed(migrated("openrlhf", COLOCATED_PAIRS))
    assert config.resource_pool_spec == {"actor_pool": [2], "rollout_pool": [8], "critic_pool": [2]}
    assert config.role_mapping == {
        "actor": "actor_pool",
        "rollout": "rollout_pool",
        "ref": "actor_pool",
        "critic": "critic_pool",
        "reward_model": "critic_pool",
    }
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node) == (2, 8)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (actor.optim.lr, config.critic.optim["lr"]) == (5e-7, 9e-6)
    assert list(actor.optim.betas) == [0.9, 0.95]
    assert (actor.optim.weight_decay, actor.optim.lr_scheduler_type) == (0.0, "cosine")
    assert (actor.ppo_mini_batch_size, config.data.train_batch_size) == (128, 1024)
    assert (rollout.name, rollout.tensor_model_parallel_size) == ("vllm", 2)
    assert config.critic.model.path == "rm"
    assert config.reward.model.path == "rm"
    assert config.algorithm.use_kl_in_reward
    assert (config.algorithm.kl_ctrl.kl_coef, config.algorithm.score_clip) == (0.01, 10.0)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1024, 512)
    assert (actor.strategy, config.critic.strategy) == ("fsdp", "fsdp")
    assert actor.fsdp_config["optimizer_offload"]
    assert config.critic.model.fsdp_config["optimizer_offload"]


def test_flags_may_have_sections_and_shell_variables() -> None:
    done = migrated("openrlhf", GRPO)
    config = composed(done)
    actor = config.actor_rollout_ref.actor
    assert '"actor_rollout_ref.model.path=$MODEL"' in done.command()
    assert config.algorithm.adv_estimator == "grpo"
    assert (actor.use_kl_loss, actor.kl_loss_type, actor.kl_loss_coef) == (True, "low_var_kl", 1e-3)
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.27)
    assert (config.actor_rollout_ref.rollout.n, actor.ppo_mini_batch_size) == (8, 128)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1024, 3072)
    assert (actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu) == (True, 16192)
    assert actor.strategy == "shard_grad_op"  # ZeRO stage 2, their default
    assert config.reward.function.path == "reward_func.py"
    assert config.algorithm.filter_groups.enable
    assert list(config.resource_pool_spec.values()) == [[8]]


def test_without_engines_the_actor_generates() -> None:
    flags = "--pretrain model --remote_rm_url http://a:1,http://b:2 --prompt_data x.jsonl"
    config = composed(translated_whole("openrlhf", flags))
    assert config.role_mapping["rollout"] == "actor_pool"
    assert [reward.url for reward in config.reward.list] == ["http://a:1", "http://b:2"]
    assert [reward.protocol for reward in config.reward.list] == ["openrlhf"] * 2


def test_muon_has_the_rates_of_both_groups() -> None:
    flags = "--pretrain model --remote_rm_url http://a:1 --prompt_data x.jsonl --actor.adam.lr 1e-6"
    rate, muon = "--actor.muon.lr 0.01", "--actor.optim muon --actor.muon.momentum 0.9"
    config = composed(translated_whole("openrlhf", f"{flags} {rate} {muon}"))
    actor = config.actor_rollout_ref.actor.optim
    assert (actor.optimizer, actor.lr) == ("Muon", 1e-6)
    assert actor.args == {"matrix_lr": 0.01, "momentum": 0.9}
    assert critic_optim(config).optimizer == "AdamW"
    ignored = composed(translated_whole("openrlhf", f"{flags} {rate}"))
    assert ignored.actor_rollout_ref.actor.optim.optimizer == "AdamW"


@pytest.mark.parametrize(
    ("flags", "unread"),
    [
        ("--advantage_estimator rloo --gamma 1 --n_samples_per_prompt 4", ["algorithm.gamma=1"]),
        ("--eval_steps 5 --lora_alpha 16", ["trainer.test_freq=5", "lora_alpha=16"]),
        ("--init_kl_coef 0 --ref_reward_offload", ["param_offload=True"]),
    ],
)
def test_flags_that_openrlhf_does_not_read_are_left_out(flags: str, unread: list[str]) -> None:
    needed = "--pretrain model --remote_rm_url http://a:1 --prompt_data x.jsonl"
    done = translated_whole("openrlhf", f"{needed} {flags}")
    for setting in unread:
        assert any(setting in line for line in done.unread)


def test_every_flag_is_described() -> None:
    missing = []
    for flag in FLAGS:
        done = translated("openrlhf", f"--{flag}")
        words = {word.rstrip(":,") for line in notes(done) for word in line.split()}
        if f"--{flag.split()[0]}" not in words and f"--{flag}" not in done.joined:
            missing.append(flag)
    assert missing == []


def test_the_command_describes_each_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.sh"
    script.write_text(COLOCATED_PAIRS, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["verl-like", "migrate", "openrlhf", str(script)])
    main()
    printed = capsys.readouterr().out
    assert printed.startswith("verl-like ppo \\\n")
    defaults = "Defaults of the other framework that differ"
    for title in ("Renamed", defaults, "Built-in behavior", "Not supported"):
        assert f"\n# {title}:\n" in printed

    monkeypatch.setattr("sys.argv", ["verl-like", "migrate", "openrlh", "--pretrain x"])
    with pytest.raises(SystemExit, match="no translation from 'openrlh'. Did you mean 'openrlhf'"):
        main()
