"""ColossalChat's PPO scripts: each composes, and every flag is described."""

from __future__ import annotations

from tests.trainer.tools.migrate.words import composed, migrated, notes, translated
from trainer.tools.migrate.translation import Table
from verl_like.placement.pools import expand_roles

ASYNC = """
python mmmt_prompt.py --prompt_path prompts.csv --num_makers 2 --num_trainers 2 \\
    --trainer_strategy colossalai_gemini_cpu --model opt --critic_model opt \\
    --pretrain facebook/opt-350m --critic_pretrain rm --experience_batch_size 4 \\
    --experience_steps 8 --update_steps 2 --train_epochs 3 --train_batch_size 2 --lora_rank 4
"""
ONE_GROUP = """
torchrun --standalone --nproc_per_node=4 train_prompts.py --pretrain bloom --model bloom \\
    --rm_pretrain rm --prompt_path prompts.jsonl --pretrain_dataset texts.jsonl \\
    --strategy colossalai_zero2 --num_episodes 2 --max_timesteps 20 --update_timesteps 10 \\
    --max_epochs 3 --train_batch_size 8 --experience_batch_size 4 --kl_coef 0.05
"""


def test_makers_and_trainers_become_an_async_run() -> None:
    done = migrated("coati", ASYNC)
    assert done.command().startswith("verl-like async \\\n    algorithm=coati_legacy")
    config = composed(done)
    async_training, actor = config.async_training, config.actor_rollout_ref.actor
    assert (async_training.generators, async_training.trainers) == (2, 2)
    assert (
        async_training.update_steps,
        async_training.train_epochs,
        async_training.max_staleness,
    ) == (2, 3, 1)
    on_generators = {"rollout", "ref", "reward_model", "critic_copy"}
    pools = expand_roles(config.role_mapping)
    assert {role for role, pool in pools.items() if pool == "generator_0_pool"} == on_generators
    # 2 trainers x 2 rows a batch; 4 prompts x 8 steps x 2 makers are 16 batches, each three times
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == (4, 4)
    assert config.trainer.total_training_steps == 48
    assert (actor.strategy, config.critic.strategy) == ("fsdp+offload", "fsdp+offload")
    assert (config.data.max_prompt_length, config.data.max_response_length) == (96, 416)
    assert (actor.optim.lr, config.critic.optim["lr"], actor.optim.weight_decay) == (1e-7, 1e-7, 0)
    algorithm = config.algorithm
    assert (algorithm.adv_estimator, algorithm.kl_penalty_per) == ("coati", "sequence")
    assert (algorithm.kl_ctrl.kl_coef, config.critic.cliprange_value) == (0.1, 0.4)
    assert (config.reward.model.path, config.critic.model.path) == ("rm", "rm")


def test_train_prompts_becomes_ppo_with_ptx() -> None:
    config = composed(migrated("coati", ONE_GROUP))
    actor = config.actor_rollout_ref.actor
    # 4 prompts x 10 timesteps x 4 processes; 2 episodes x 20 timesteps are 4 updates
    assert (config.data.train_batch_size, config.trainer.total_training_steps) == (160, 4)
    assert (actor.ppo_mini_batch_size, actor.ppo_epochs) == (32, 3)
    assert (config.ptx.coef, config.algorithm.kl_ctrl.kl_coef) == (9.0, 0.05)
    assert (config.trainer.n_gpus_per_node, actor.strategy) == (4, "shard_grad_op")


def test_every_flag_is_described() -> None:
    missing = []
    for name in Table("coati", "all").rows:
        done = translated("coati", f"python train_prompts.py --{name} 2")
        missing += [] if any(name in line for line in notes(done)) else [name]
    assert set(missing) <= {"max_input_len", "max_seq_len", "max_timesteps", "update_timesteps"}
