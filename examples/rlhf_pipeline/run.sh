#!/usr/bin/env bash
# SFT, a reward model from pairs, PPO with PTX, and an evaluation; docs/pipeline.md explains the steps:
#   bash examples/rlhf_pipeline/run.sh [key=value ...]
# Settings go to PPO. RUN_DIR=<folder> sets the run folder (default runs/rlhf_pipeline), PYTHON the Python that has this project.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/stoppable.sh
here=examples/rlhf_pipeline
py=${PYTHON:-.venv/bin/python}
[ -x "$py" ] || py=$(command -v python3)
run_dir=${RUN_DIR:-runs/rlhf_pipeline}
data=$run_dir/data
export TOKENIZERS_PARALLELISM=false

if ! "$py" -c "import trainer" 2>/dev/null; then
    echo "$py does not have this project: bash examples/quickstart/run.sh installs it into .venv, or set PYTHON=<a Python that has it>" >&2
    exit 1
fi
verl_like=("$py" -c "from trainer.cli.main import main; main()") # the command verl-like, of this Python and checkout
common=(trainer.backend=local trainer.n_gpus_per_node=1 trainer.device=cpu)
of_rows=(data.train_batch_size=64 data.max_length=64 optim.lr_scheduler_type=cosine)

step() { # <step> <command and settings>: run it, unless its model is there already
    echo
    if [ -e "$run_dir/$1/model/config.json" ]; then
        echo "== $1: skipped, because $run_dir/$1 has its model; remove that folder to repeat the step"
        return
    fi
    echo "== $1"
    stoppable "${verl_like[@]}" "$2" "${common[@]}" trainer.default_local_dir="$run_dir/$1" "${@:3}"
}

if [ ! -e "$data/prompts_val.jsonl" ]; then
    mkdir -p "$run_dir"
    "$py" "$here/make_data.py" "$data" 2>"$run_dir/make_data.log" || { cat "$run_dir/make_data.log" >&2; exit 1; }
fi

step sft sft model.path="$data/base" data.train_files="$data/sft.jsonl" data.val_files="$data/sft_val.jsonl" \
    "${of_rows[@]}" optim.lr=5e-3 trainer.test_freq=32

step reward_model reward-model model.path="$run_dir/sft/model" \
    data.train_files="$data/pairs.jsonl" data.val_files="$data/pairs_val.jsonl" \
    "${of_rows[@]}" optim.lr=3e-3 center_coef=0.01 trainer.test_freq=16

scorer=$run_dir/reward_model/model
preference="{name: preference, kind: model, path: '$scorer'}"
rule="{name: kindness, path: $here/kindness.py, function: kindness, weight: 0}" # measured, not trained with
step ppo ppo actor_rollout_ref.model.path="$run_dir/sft/model" critic.model.path="$scorer" \
    "reward.list=[$preference, $rule]" \
    ptx.train_files="$data/sft.jsonl" ptx.coef=0.2 ptx.batch_size=32 \
    algorithm.use_kl_in_reward=true algorithm.kl_ctrl.kl_coef=0.05 \
    data.train_files="$data/prompts.jsonl" data.val_files="$data/prompts_val.jsonl" \
    data.train_batch_size=32 data.max_prompt_length=24 data.max_response_length=32 actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.optim.lr=1e-3 critic.optim.lr=2e-3 \
    trainer.total_training_steps=20 trainer.test_freq=10 "$@"

echo
"$py" "$here/evaluate.py" "$run_dir" "$data/base" "$run_dir/sft/model" "$run_dir/ppo/model" "$scorer"
