#!/usr/bin/env bash
# A tiny vision-language model learns to name coloured shapes, by SFT and then by GRPO, on two CPU cores:
#   bash examples/shapes/run.sh [key=value ...]
# Settings go to GRPO. RUN_DIR=<folder> sets the run folder (default runs/shapes), PYTHON a Python that has this project;
# without it, the script makes .venv and installs the project there. docs/shapes.md explains the steps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/shapes
run_dir=${RUN_DIR:-runs/shapes}
source examples/sft_then_rl.sh

sft data.max_length=64 data.train_batch_size=64 optim.lr=2e-3 trainer.total_training_steps=12

echo "== GRPO"
stoppable "${verl_like[@]}" ppo algorithm=grpo "${common[@]}" \
    actor_rollout_ref.model.path="$run_dir/sft/model" reward=$here/reward.py:score \
    data.train_files="$run_dir/data/train.parquet" data.val_files="$run_dir/data/val.parquet" \
    data.train_batch_size=32 data.max_prompt_length=32 data.max_response_length=4 \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.actor.optim.lr=1e-3 \
    trainer.total_training_steps=100 trainer.default_local_dir="$run_dir/grpo" "$@"

print_accuracies "$run_dir/grpo" "accuracy on 200 new pictures: {:.3f} after SFT, {:.3f} after GRPO"
