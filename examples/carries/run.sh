#!/usr/bin/env bash
# A model of 1.1 million weights learns sums such as 478+365, by SFT and then by GRPO, on one CPU core:
#   bash examples/carries/run.sh [key=value ...]
# Settings go to GRPO: `trainer.seed=2`. ALGORITHM=ppo runs PPO with a critic instead. RUN_DIR=<folder> sets the run
# folder (default runs/carries), SFT_STEPS=<number> the steps of SFT (default 600), PYTHON a Python that has this
# project; without it, the script makes .venv and installs the project there. docs/carries.md shows the result.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
here=examples/carries
run_dir=${RUN_DIR:-runs/carries}
algorithm=${ALGORITHM:-grpo}
source examples/sft_then_rl.sh

sft data.max_length=24 data.train_batch_size=256 optim.lr=6e-4 optim.lr_warmup_steps=50 \
    trainer.total_training_steps="${SFT_STEPS:-600}"

echo "== ${algorithm^^}"
if [ "$algorithm" = ppo ]; then set -- critic.optim.lr=3e-4 "$@"; fi
stoppable "${verl_like[@]}" ppo algorithm="$algorithm" "${common[@]}" \
    actor_rollout_ref.model.path="$run_dir/sft/model" reward=$here/reward.py:score \
    data.train_files="$run_dir/data/train.parquet" data.val_files="$run_dir/data/val.parquet" \
    data.train_batch_size=128 data.max_prompt_length=12 data.max_response_length=5 \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.actor.optim.lr=5e-5 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    trainer.test_freq=25 trainer.total_training_steps=300 trainer.default_local_dir="$run_dir/$algorithm" "$@"

print_accuracies "$run_dir/$algorithm" "right answers to 1,000 new sums: {:.3f} after SFT, {:.3f} after RL"
