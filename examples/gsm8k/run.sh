#!/usr/bin/env bash
# GRPO on GSM8K.
#   bash examples/gsm8k/run.sh [key=value ...]            Qwen2.5-0.5B-Instruct on one GPU
#   bash examples/gsm8k/run.sh trainer.n_gpus_per_node=8  the same on eight GPUs
#   TINY=1 bash examples/gsm8k/run.sh [key=value ...]     a tiny Llama and easy sums on the CPU, as in CI
# MODEL names another model. DATA is the folder with train.parquet and test.parquet; without a train.parquet, GSM8K is
# downloaded into it. TINY=1 ignores both.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
py=${PYTHON:-$root/.venv/bin/python}
[ -x "$py" ] || py=$(command -v python3)
run_dir=${RUN_DIR:-runs/gsm8k}
data=${DATA:-data/gsm8k}
model=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
changes=()

if [ "${TINY:-0}" = 1 ]; then
    data=$run_dir/tiny model=$run_dir/tiny/model
    changes=(
        data.train_batch_size=64
        data.max_prompt_length=48
        data.max_response_length=8
        actor_rollout_ref.actor.kl_loss_coef=0.04
        actor_rollout_ref.actor.ppo_mini_batch_size=16
        actor_rollout_ref.actor.optim.lr=1e-3
        trainer.device=cpu
        trainer.backend=local
        trainer.total_epochs=1
        trainer.test_freq=0
    )
    export TOKENIZERS_PARALLELISM=false
    [ -e "$data/test.jsonl" ] || "$py" "$root/examples/tiny/make_gsm8k.py" "$data" 2>/dev/null
    "$py" "$root/examples/data/prepare_gsm8k.py" "$data" "$data/train.jsonl" "$data/test.jsonl"
elif [ ! -e "$data/train.parquet" ]; then
    "$py" "$root/examples/data/prepare_gsm8k.py" "$data"
fi

exec "$py" -m trainer.main_ppo \
    algorithm=grpo \
    actor_rollout_ref.model.path="$model" \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    trainer.total_epochs=15 \
    trainer.test_freq=10 \
    trainer.default_local_dir="$run_dir" \
    ${changes[@]+"${changes[@]}"} "$@"
