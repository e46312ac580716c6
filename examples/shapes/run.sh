#!/usr/bin/env bash
# A tiny vision-language model learns to name coloured shapes, by SFT and then by GRPO, on two CPU cores:
#   bash examples/shapes/run.sh [key=value ...]
# Settings go to GRPO. RUN_DIR=<folder> sets the run folder (default runs/shapes), PYTHON a Python that has this project;
# without it, the script makes .venv and installs the project there. docs/shapes.md explains the steps.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/stoppable.sh
if [ -n "${PYTHON:-}" ]; then
    py=$PYTHON
else
    source tools/install.sh
    install_project
fi
here=examples/shapes
run_dir=${RUN_DIR:-runs/shapes}
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
verl_like=("$py" -c "from trainer.cli.main import main; main()") # the command verl-like, of this Python and checkout
common=(trainer.backend=local trainer.n_gpus_per_node=1 trainer.device=cpu)

if [ ! -e "$run_dir/data/val.parquet" ]; then
    mkdir -p "$run_dir"
    "$py" $here/make.py "$run_dir/data" 2>"$run_dir/make.log" || { cat "$run_dir/make.log" >&2; exit 1; }
fi

echo "== SFT"
if [ -e "$run_dir/sft/model/config.json" ]; then
    echo "skipped, because $run_dir/sft has its model; remove that folder to repeat the step"
else
    stoppable "${verl_like[@]}" sft "${common[@]}" \
        model.path="$run_dir/data/model" data.train_files="$run_dir/data/sft.parquet" \
        data.max_length=64 data.train_batch_size=64 optim.lr=2e-3 \
        trainer.total_training_steps=12 trainer.default_local_dir="$run_dir/sft"
fi

echo "== GRPO"
stoppable "${verl_like[@]}" ppo algorithm=grpo "${common[@]}" \
    actor_rollout_ref.model.path="$run_dir/sft/model" reward=$here/reward.py:score \
    data.train_files="$run_dir/data/train.parquet" data.val_files="$run_dir/data/val.parquet" \
    data.train_batch_size=32 data.max_prompt_length=32 data.max_response_length=4 \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.actor.optim.lr=1e-3 \
    trainer.total_training_steps=100 trainer.default_local_dir="$run_dir/grpo" "$@"

[ -s "$run_dir/grpo/metrics.jsonl" ] || exit 0 # no step was trained: a dry run
"$py" -c '
import json, sys

name = "val-core/prompts/acc/mean@1"
lines = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
accuracies = [line[name] for line in lines if name in line]
print(f"accuracy on 200 new pictures: {accuracies[0]:.3f} after SFT, {accuracies[-1]:.3f} after GRPO")
' "$run_dir/grpo/metrics.jsonl"
