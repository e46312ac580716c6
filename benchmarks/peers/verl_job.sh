#!/usr/bin/env bash
# The job of job.sh on verl 0.8 to 0.10, with vLLM. Its keys are checked against verl's sources; it has not been run on
# GPUs yet. More verl keys can follow the script's name.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/job.sh"

export VERL_FILE_LOGGER_PATH="$out/metrics.jsonl" # of the logger `file`
run "$PYTHON" -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=False \
    data.train_files="$PROMPTS" \
    data.val_files="$PROMPTS" \
    data.train_batch_size="$BATCH" \
    data.max_prompt_length="$MAX_PROMPT" \
    data.max_response_length="$MAX_RESPONSE" \
    data.filter_overlong_prompts=True \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH" \
    actor_rollout_ref.actor.ppo_epochs="$EPOCHS" \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$PASS_TOKENS" \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.optim.lr="$LR" \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n="$SAMPLES" \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization="$ENGINE_MEMORY" \
    custom_reward_function.path="$peers/reward.py" \
    custom_reward_function.name=compute_score \
    trainer.n_gpus_per_node="$GPUS" \
    trainer.nnodes=1 \
    trainer.total_training_steps="$STEPS" \
    trainer.total_epochs="$STEPS" \
    trainer.val_before_train=False \
    trainer.test_freq=-1 \
    trainer.save_freq=-1 \
    trainer.resume_mode=disable \
    trainer.default_local_dir="$out/run" \
    trainer.logger='["console","file"]' \
    "$@"
report "$out/metrics.jsonl"
