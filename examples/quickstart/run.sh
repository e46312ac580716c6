#!/usr/bin/env bash
# A tiny model learns to add by PPO, on a machine with nothing but Python and pip:
#   bash examples/quickstart/run.sh [key=value ...]
# It uses Ray, FSDP over gloo, one pool each for actor and critic, and the native rollout engine. RUN_DIR=<folder> sets
# the run folder (default runs/quickstart). The same command resumes a run that was stopped.
# The run uses two CPU slots even on a machine with GPUs. To run it on one GPU:
#   bash examples/quickstart/run.sh trainer.device=cuda
set -euo pipefail
SECONDS=0
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tools/install.sh
source examples/stoppable.sh
install_project
installed=$SECONDS
run_dir=${RUN_DIR:-runs/quickstart}
goal=0.75
places=(trainer.device=cpu placement=split trainer.n_gpus_per_node=2)
case " $*" in
*" trainer.device=cpu"*) ;;
*" trainer.device="* | *" trainer.simulate="*) places=() ;;
*) if nvidia-smi -L >/dev/null 2>&1; then say "running on the CPU; to run on a GPU: bash examples/quickstart/run.sh trainer.device=cuda"; fi ;;
esac

if "$py" examples/quickstart/watch.py --reached "$run_dir" "$goal"; then
    say "the run in $run_dir has reached $goal: open $run_dir/report.html. For another run: RUN_DIR=<another folder>, or rm -r $run_dir"
    exit 0
fi
if compgen -G "$run_dir/global_step_*/commit.json" >/dev/null; then
    say "the run in $run_dir was stopped; it resumes from its last checkpoint"
elif [ -s "$run_dir/metrics.jsonl" ]; then
    say "the run in $run_dir was stopped before its first checkpoint; it starts again"
fi

if [ ! -e "$run_dir/tiny/val.parquet" ]; then "$py" examples/tiny/make.py "$run_dir/tiny" --sums >/dev/null 2>&1; fi
export TOKENIZERS_PARALLELISM=false RAY_DEDUP_LOGS=0
code=0 # on a signal the run stops its workers and writes its report; then this script prints where
stoppable "$py" examples/quickstart/watch.py "$py" -P -m trainer.main_ppo \
    ${places[@]+"${places[@]}"} \
    actor_rollout_ref.model.path="$run_dir/tiny/model" data.train_files="$run_dir/tiny/train.parquet" \
    reward="$PWD/examples/quickstart/reward.py:verify" \
    data.train_batch_size=64 data.max_prompt_length=16 data.max_response_length=4 \
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.optim.lr=1e-3 critic.optim.lr=2e-3 \
    trainer.total_training_steps=60 trainer.stop_at="{critic/score/mean: $goal}" trainer.save_freq=10 \
    trainer.max_ckpt_to_keep=1 trainer.default_local_dir="$run_dir" "$@" || code=$?
echo "$((SECONDS - installed)) s after the install, $SECONDS s from the start"
[ -s "$run_dir/metrics.jsonl" ] || exit "$code" # no step was trained: a dry run, or an error
if [ -f "$run_dir/report.html" ]; then echo "report: $run_dir/report.html"; fi
if [ "$code" -eq 0 ] && ! "$py" examples/quickstart/watch.py --reached "$run_dir" "$goal"; then
    say "the mean reward did not reach $goal; see the report"
    code=1
fi
exit "$code"
