#!/usr/bin/env bash
# The common part of the scripts in this folder: asynchronous PPO on a tiny model.
#   bash examples/async/run.sh TOPOLOGY [key=value ...]
# BACKEND=local runs it without Ray, RUN_DIR=<folder> sets the run folder (default runs/async/TOPOLOGY), PYTHON the
# Python that has this project. Every call starts a new run. A folder with checkpoints, such as those of a stopped run, is
# rejected: remove them, or set trainer.resume_mode=auto to resume.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
topology=${1:?a topology: 1m1t, 2m1t, 1m2t, 2m2t}
py=${PYTHON:-.venv/bin/python}
[ -x "$py" ] || py=$(command -v python3)
run_dir=${RUN_DIR:-runs/async/$topology}
export TOKENIZERS_PARALLELISM=false

if ! "$py" -c "import trainer" 2>/dev/null; then
    echo "$py does not have this project: bash examples/quickstart/run.sh installs it into .venv, or set PYTHON=<a Python that has it>" >&2
    exit 1
fi
if [ ! -e "$run_dir/tiny/val.parquet" ]; then "$py" examples/tiny/make.py "$run_dir/tiny" >/dev/null 2>&1; fi

exec "$py" -c "from trainer.cli.main import main; main()" async async_training.topology="$topology" \
    trainer.backend="${BACKEND:-ray}" trainer.device=cpu trainer.resume_mode=disable \
    actor_rollout_ref.model.path="$run_dir/tiny/model" data.train_files="$run_dir/tiny/train.parquet" \
    data.train_batch_size=16 data.max_prompt_length=16 data.max_response_length=8 \
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.optim.lr=2e-3 \
    trainer.total_training_steps=20 trainer.default_local_dir="$run_dir" "${@:2}"
