"""Flags of ColossalChat's PPO scripts, as data: what each one becomes in our settings."""

from __future__ import annotations

ONE_GROUP = ("train_prompts",)
DETACHED = ("1mmt_prompt", "mmmt_prompt", "1mmt_dummy", "mmmt_dummy")
"""The scripts: `PPOTrainer` in one group of processes; `DetachedPPOTrainer` on Ray."""

RENAMED = {
    "debug": "detached.debug",
    "grad_checkpoint": "actor_rollout_ref.model.enable_gradient_checkpointing",
    "kl_coef": "algorithm.kl_ctrl.kl_coef",
    "log_dir": "trainer.default_local_dir",
    "max_epochs": "actor_rollout_ref.actor.ppo_epochs",
    "pretrain": "actor_rollout_ref.model.path",
    "pretrain_dataset": "ptx.train_files",
    "prompt_dataset": "data.train_files",
    "prompt_path": "data.train_files",
    "ptx_batch_size": "ptx.batch_size",
    "train_epochs": "detached.train_epochs",
    "update_steps": "detached.update_steps",
}
"""Flags with one key of ours for their value, which means the same."""

TOGETHER = {
    "critic_pretrain": "`reward_model.model.path`, `critic.model.path`",
    "experience_batch_size": "`data.train_batch_size`; of makers `trainer.total_training_steps`",
    "experience_steps": "`trainer.total_training_steps`",
    "lora_rank": "`actor_rollout_ref.model.lora_rank`, `critic.model.lora_rank`",
    "lr": "`actor_rollout_ref.actor.optim.lr`, `critic.optim.lr`",
    "max_input_len": "`data.max_prompt_length`",
    "max_seq_len": "`data.max_response_length`, with `--max_input_len`",
    "max_timesteps": "`trainer.total_training_steps`",
    "num_collect_steps": "`data.train_batch_size`, with `--experience_batch_size`",
    "num_episodes": "`trainer.total_training_steps`",
    "num_makers": "`detached.makers`",
    "num_trainers": "`detached.trainers`",
    "num_update_steps": "`actor_rollout_ref.actor.ppo_epochs`",
    "ptx_coef": "`ptx.coef`: theirs over one less theirs",
    "rm_pretrain": "`reward_model.model.path`, `critic.model.path`",
    "strategy": "`actor_rollout_ref.actor.strategy`, `critic.strategy`",
    "train_batch_size": "`actor_rollout_ref.actor.ppo_mini_batch_size`",
    "trainer_strategy": "`actor_rollout_ref.actor.strategy`, `critic.strategy`",
    "update_timesteps": "`data.train_batch_size`, with `--experience_batch_size`",
    "use_wandb": "`trainer.logger`",
}
"""Flags that are read with others -> the keys that they decide."""

ALWAYS = {
    "critic_model": "the model's family stands in its folder",
    "maker_strategy": "a maker is an engine: actor_rollout_ref.rollout.name",
    "merge_lora_weights": "hf_model in checkpoint.save_contents is merged",
    "model": "the model's family stands in its folder",
    "need_optim_ckpt": "a checkpoint has what a resume needs",
    "rm_model": "the model's family stands in its folder",
    "tokenizer": "the tokenizer of the model's folder",
}
"""Flags that change nothing here -> what is the case instead."""

ABSENT = {
    "initial_model_quant_ckpt": "GPTQ checkpoints are not read",
    "quant_bits": "GPTQ checkpoints are not read",
    "quant_group_size": "GPTQ checkpoints are not read",
    "rm_path": "give the reward model as a folder: verl-like reward-model writes one",
    "save_path": "checkpoints are in the run folder: trainer.save_freq, and hf_model in "
    "actor_rollout_ref.actor.checkpoint.save_contents for a folder that loads anywhere",
}
"""Flags without a counterpart -> the way out."""
