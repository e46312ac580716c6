#!/usr/bin/env bash
# The job of job.sh on verl-like: it runs bench_job.py, which prints the row itself.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/job.sh"

engine=(actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization="$ENGINE_MEMORY")
[ "$DEVICE" = cuda ] || engine=(trainer.backend=local)
run "$PYTHON" "$peers/../bench_job.py" --out "$out/bench.json" \
    algorithm.adv_estimator=grpo \
    data.train_files="$PROMPTS" \
    data.train_batch_size="$BATCH" \
    data.max_prompt_length="$MAX_PROMPT" \
    data.max_response_length="$MAX_RESPONSE" \
    data.filter_overlong_prompts=true \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH" \
    actor_rollout_ref.actor.ppo_epochs="$EPOCHS" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$PASS_TOKENS" \
    actor_rollout_ref.actor.optim.lr="$LR" \
    actor_rollout_ref.rollout.n="$SAMPLES" \
    reward.function.path="$peers/reward.py" \
    trainer.device="$DEVICE" \
    trainer.n_gpus_per_node="$GPUS" \
    trainer.total_training_steps="$STEPS" \
    trainer.seed="$SEED" \
    trainer.default_local_dir="$out/run" \
    "${engine[@]}" "$@"
