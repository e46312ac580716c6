#!/usr/bin/env bash
# A tiny model learns by real PPO, on a machine with nothing but Python and pip:
#   bash examples/quickstart/run.sh [key=value ...]
# Ray, FSDP over gloo, actor and critic on pools of their own, the native rollout engine: about half a minute after the
# install. RUN_DIR=<folder> chooses where the run goes (default runs/quickstart); a run that was stopped goes on there.
# The run uses two CPU slots even where there are GPUs. To run it on one GPU:
#   bash examples/quickstart/run.sh trainer.device=cuda
set -euo pipefail
SECONDS=0
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source tools/install.sh
source examples/stoppable.sh
install_project
installed=$SECONDS
run_dir=${RUN_DIR:-runs/quickstart}
goal=0.8
places=(trainer.device=cpu placement=split trainer.n_gpus_per_node=2)
case " $*" in
*" trainer.device=cpu"*) ;;
*" trainer.device="* | *" trainer.simulate="*) places=() ;;
*) if nvidia-smi -L >/dev/null 2>&1; then say "running on the CPU; to run on a GPU: bash examples/quickstart/run.sh trainer.device=cuda"; fi ;;
esac

if "$py" examples/quickstart/watch.py --reached "$run_dir" "$goal"; then
    say "$run_dir holds a run that has reached $goal: open $run_dir/report.html. For another: RUN_DIR=<another folder>, or rm -r $run_dir"
    exit 0
fi
if compgen -G "$run_dir/global_step_*/commit.json" >/dev/null; then
    say "$run_dir holds a run that was stopped; it goes on from its last checkpoint"
elif [ -s "$run_dir/metrics.jsonl" ]; then
    say "$run_dir holds a run that was stopped before its first checkpoint; it starts again"
fi

if [ ! -e "$run_dir/tiny/val.parquet" ]; then "$py" examples/tiny/make.py "$run_dir/tiny" >/dev/null 2>&1; fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false RAY_DEDUP_LOGS=0
code=0 # a signal ends the run, which ends its workers and writes its report; then this script goes on to say where
stoppable "$py" examples/quickstart/watch.py "$py" -P -m trainer.main_ppo \
    ${places[@]+"${places[@]}"} \
    actor_rollout_ref.model.path="$run_dir/tiny/model" data.train_files="$run_dir/tiny/train.parquet" \
    custom_reward_function.path="$PWD/examples/quickstart/reward.py" custom_reward_function.name=letters \
    data.train_batch_size=64 data.max_prompt_length=16 data.max_response_length=8 \
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.optim.lr=2e-3 critic.optim.lr=2e-3 \
    trainer.total_training_steps=60 trainer.stop_at="{critic/score/mean: $goal}" trainer.save_freq=10 \
    trainer.max_ckpt_to_keep=1 trainer.default_local_dir="$run_dir" "$@" || code=$?
echo "$((SECONDS - installed)) s after the install, $SECONDS s from the start"
[ -s "$run_dir/metrics.jsonl" ] || exit "$code" # nothing was trained: a dry run, or an error before the first step
if [ -f "$run_dir/report.html" ]; then echo "report: $run_dir/report.html"; fi
if [ "$code" -eq 0 ] && ! "$py" examples/quickstart/watch.py --reached "$run_dir" "$goal"; then
    say "the mean reward has not reached $goal in the steps that it had; see the report"
    code=1
fi
exit "$code"
